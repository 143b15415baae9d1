// From text to a program (see program.h).
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <charconv>
#include <map>
#include <sstream>

#include "common/checks.h"
#include "program/instructions.h"

namespace liteboost::program {
namespace {

constexpr const char* kOp = "program";

// Lists in lists: no operator takes more.
constexpr int kDeepest = 4;
constexpr int64_t kMostSlots = int64_t{1} << 24;

class Reader {
 public:
  // A line of a program with so many slots.
  Reader(const std::string& line, int64_t slots) : stream_(line), slots_(slots) {}

  std::string word() {
    std::string found;
    stream_ >> found;
    LB_CHECK_VALUE(!found.empty(), kOp, "the line '", stream_.str(),
                   "' ends too early; record the step again");
    return found;
  }
  int64_t number() {
    const std::string found = word();
    int64_t value = 0;
    const auto [end, fault] = std::from_chars(found.data(), found.data() + found.size(), value);
    LB_CHECK_VALUE(fault == std::errc() && end == found.data() + found.size(), kOp, "'", found, "' in '",
                   stream_.str(), "' is no number; record the step again");
    return value;
  }
  // One of the program's slots; `least` -1: or none.
  int64_t slot(int64_t least = 0) {
    const int64_t value = number();
    LB_CHECK_VALUE(value >= least && value < slots_, kOp, "slot ", value, " in '", stream_.str(),
                   "' is none of the program's ", slots_, "; record the step again");
    return value;
  }
  // A number, or y SLOT: the one in that slot.
  Value number_or_slot() {
    const auto before = stream_.tellg();
    if (word() == "y") return Value{Value::Kind::slot, {}, slot(), {}};
    stream_.seekg(before);
    return Value{Value::Kind::constant, c10::IValue(number()), 0, {}};
  }
  // How many of something, or where: not below zero.
  int64_t count() {
    const int64_t value = number();
    LB_CHECK_VALUE(value >= 0, kOp, value, " in '", stream_.str(), "' is no count; record the step again");
    return value;
  }
  std::vector<int64_t> slots(int64_t least = 0) {
    std::vector<int64_t> found;
    while (!at_end()) found.push_back(slot(least));
    return found;
  }
  // Of a list that is as long as the line at most.
  int64_t length_of_list() {
    const int64_t value = count();
    LB_CHECK_VALUE(value <= static_cast<int64_t>(stream_.str().size()), kOp, "the list in '", stream_.str(),
                   "' ends too early; record the step again");
    return value;
  }
  bool at_end() { return (stream_ >> std::ws).eof(); }
  void arrow() { LB_CHECK_VALUE(word() == "->", kOp, "'->' expected in '", stream_.str(), "'"); }
  // LENGTH:TEXT, where the text may hold anything.
  std::string text() {
    stream_ >> std::ws;
    int64_t length = 0;
    char colon = 0;
    stream_ >> length >> colon;
    LB_CHECK_VALUE(
        stream_ && colon == ':' && length >= 0 && length <= static_cast<int64_t>(stream_.str().size()), kOp,
        "the text in '", stream_.str(), "' ends too early; record the step again");
    std::string found(static_cast<size_t>(length), '\0');
    stream_.read(found.data(), length);
    return found;
  }

 private:
  std::istringstream stream_;
  int64_t slots_;
};

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

Value value_of(Reader& in, const c10::TypePtr& given_type, int depth = 0);

Value list_of(Reader& in, const c10::TypePtr& type, int depth) {
  const auto list = type->cast<c10::ListType>();
  LB_CHECK_TYPE(list != nullptr, kOp, "a list was given for ", type->str(), "; record the step again");
  const c10::TypePtr element = list->getElementType();
  Value value;
  LB_CHECK_VALUE(depth < kDeepest, kOp, "lists are nested too deep; record the step again");
  const int64_t count = in.length_of_list();
  for (int64_t i = 0; i < count; ++i) value.items.push_back(value_of(in, element, depth + 1));
  switch (without_optional(element)->kind()) {
    case c10::TypeKind::TensorType:
      value.kind = element->kind() == c10::TypeKind::OptionalType ? Value::Kind::optional_tensors
                                                                  : Value::Kind::tensors;
      return value;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      value.kind = Value::Kind::numbers;
      break;
    case c10::TypeKind::FloatType: {
      c10::List<double> numbers;
      for (const Value& item : value.items) numbers.push_back(item.constant.toDouble());
      return Value{Value::Kind::constant, numbers, 0, {}};
    }
    case c10::TypeKind::BoolType: {
      c10::List<bool> flags;
      for (const Value& item : value.items) flags.push_back(item.constant.toBool());
      return Value{Value::Kind::constant, flags, 0, {}};
    }
    default:
      LB_CHECK_TYPE(false, kOp, "lists of ", element->str(), " are not known");
  }
  for (const Value& item : value.items) {
    if (item.kind != Value::Kind::constant) return value;
  }
  return Value{Value::Kind::constant, value.read({}), 0, {}};
}

Value value_of(Reader& in, const c10::TypePtr& given_type, int depth) {
  const c10::TypePtr type = without_optional(given_type);
  const std::string kind = in.word();
  Value value;
  if (kind == "t" || kind == "y") {
    const bool is_wrapped = kind == "y" && type->kind() == c10::TypeKind::TensorType;
    value.kind = is_wrapped ? Value::Kind::wrapped : Value::Kind::slot;
    value.slot = in.slot();
  } else if (kind == "i") {
    const int64_t number = in.number();
    value.constant = type->kind() == c10::TypeKind::FloatType ? c10::IValue(static_cast<double>(number))
                                                              : c10::IValue(number);
  } else if (kind == "f") {
    value.constant = std::stod(in.word());
  } else if (kind == "b") {
    value.constant = in.number() != 0;
  } else if (kind == "s") {
    value.constant = in.text();
  } else if (kind == "d") {
    value.constant = c10::Device(in.word());
  } else if (kind == "[") {
    return list_of(in, type, depth);
  } else {
    LB_CHECK_VALUE(kind == "n", kOp, "'", kind, "' is no kind of value");
  }
  if (value.constant.isScalar() && type->kind() == c10::TypeKind::TensorType) {
    value.constant = wrapped(value.constant.toScalar());
  }
  return value;
}

std::unique_ptr<Instruction> operator_of(Reader& in) {
  const std::string name = in.word(), overload = in.word();
  auto made = std::make_unique<Operator>(c10::Dispatcher::singleton().findSchemaOrThrow(
      name.c_str(), overload == "default" ? "" : overload.c_str()));
  made->name = name;
  const auto& schema = made->handle.schema();
  for (const auto& argument : schema.arguments()) {
    Value value;
    if (argument.default_value()) value.constant = *argument.default_value();
    made->arguments.push_back(std::move(value));
  }
  const int64_t count = in.length_of_list();
  for (int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<size_t>(in.number());
    LB_CHECK_VALUE(index < made->arguments.size(), kOp, name, " takes no argument ", index);
    made->arguments[index] = value_of(in, schema.arguments()[index].real_type());
  }
  in.arrow();
  made->results = in.slots(-1);
  LB_CHECK_VALUE(made->results.size() <= schema.returns().size(), kOp, name, " has fewer results");
  return made;
}

// How many elements behind the first the last one lies that an alias shows.
int64_t extent_of(const Alias& alias) {
  int64_t last = alias.offset;
  for (size_t i = 0; i < alias.sizes.size(); ++i) {
    if (alias.sizes[i] == 0) return 0;
    int64_t step = 0;
    LB_CHECK_VALUE(!__builtin_mul_overflow(alias.sizes[i] - 1, alias.strides[i], &step) &&
                       !__builtin_add_overflow(last, step, &last),
                   kOp, "an alias shows more than memory can be; record the step again");
  }
  LB_CHECK_VALUE(last < INT64_MAX, kOp, "an alias shows more than memory can be; record the step again");
  return last + 1;
}

std::unique_ptr<Instruction> alias_of(Reader& in) {
  auto made = std::make_unique<Alias>();
  made->source = in.slot();
  made->offset = in.count();
  const int64_t rank = in.length_of_list();
  for (int64_t i = 0; i < rank; ++i) made->sizes.push_back(in.count());
  for (int64_t i = 0; i < rank; ++i) made->strides.push_back(in.count());
  in.arrow();
  made->result = in.slot();
  made->extent = extent_of(*made);
  return made;
}

std::unique_ptr<Instruction> append_of(Reader& in) {
  auto made = std::make_unique<Append>();
  made->memory = in.slot();
  made->start = value_of(in, c10::IntType::get());
  made->length = value_of(in, c10::IntType::get());
  made->added = in.slot();
  made->dim = in.number();
  in.arrow();
  made->result = in.slot();
  return made;
}

std::unique_ptr<Instruction> places_of(Reader& in) {
  auto made = std::make_unique<Places>();
  for (Places::Of* one : {&made->keys, &made->values}) {
    one->memory = in.slot();
    one->start = value_of(in, c10::IntType::get());
    one->length = value_of(in, c10::IntType::get());
  }
  made->former = in.slot(-1);
  in.arrow();
  made->result = in.slot();
  return made;
}

std::unique_ptr<Instruction> both_of(Reader& in) {
  auto made = std::make_unique<Both>(c10::Dispatcher::singleton()
                                         .findSchemaOrThrow("liteboost::kv_append", "")
                                         .typed<void(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                     const at::Tensor&, const at::Tensor&)>());
  for (Append* one : {&made->keys, &made->values}) {
    one->memory = in.slot();
    one->start = value_of(in, c10::IntType::get());
    one->length = value_of(in, c10::IntType::get());
    one->added = in.slot();
    one->dim = 2;
    one->result = -1;
  }
  made->places = in.slot();
  return made;
}

std::unique_ptr<Instruction> part_of(Reader& in) {
  auto made = std::make_unique<Part>();
  made->memory = in.slot();
  made->start = value_of(in, c10::IntType::get());
  made->length = value_of(in, c10::IntType::get());
  made->count = in.number();
  made->dim = in.number();
  in.arrow();
  made->result = in.slot();
  return made;
}

std::unique_ptr<Instruction> like_of(Reader& in) {
  auto made = std::make_unique<Like>();
  made->slot = in.slot();
  made->dtype = static_cast<at::ScalarType>(in.number());
  made->device = c10::Device(in.word());
  const int64_t rank = in.length_of_list();
  for (int64_t i = 0; i < rank; ++i) made->sizes.push_back(in.number());
  for (int64_t i = 0; i < rank; ++i) made->strides.push_back(in.number());
  return made;
}

std::unique_ptr<Instruction> size_of(Reader& in) {
  auto made = std::make_unique<Size>();
  made->slot = in.slot();
  made->dim = in.number();
  made->number = in.slot();
  return made;
}

std::unique_ptr<Instruction> kv_buffer_of(Reader& in) {
  auto made = std::make_unique<KVBuffer>();
  made->held = in.slot();
  made->memory = in.slot();
  made->dim = in.number();
  made->end = in.slot();
  made->count = in.number_or_slot();
  in.arrow();
  made->result = in.slot();
  return made;
}

std::unique_ptr<Instruction> expect_of(Reader& in) {
  auto made = std::make_unique<Expect>();
  made->slot = in.slot();
  made->value = in.number() != 0;
  return made;
}

std::unique_ptr<Instruction> instruction_of(const std::string& word, Reader& in) {
  if (word == "op") return operator_of(in);
  if (word == "alias") return alias_of(in);
  if (word == "append") return append_of(in);
  if (word == "places") return places_of(in);
  if (word == "both") return both_of(in);
  if (word == "part") return part_of(in);
  if (word == "like") return like_of(in);
  if (word == "size") return size_of(in);
  if (word == "kv_buffer") return kv_buffer_of(in);
  if (word == "expect") return expect_of(in);
  if (word == "item") {
    auto made = std::make_unique<Item>();
    made->list = in.slot();
    made->index = in.count();
    in.arrow();
    made->result = in.slot();
    return made;
  }
  if (word == "drop") {
    auto made = std::make_unique<Drop>();
    made->which = in.slots();
    return made;
  }
  using Kind = Arithmetic::Kind;
  static const std::map<std::string, Kind> kinds{{"add", Kind::add}, {"sub", Kind::sub},
                                                 {"mul", Kind::mul}, {"floordiv", Kind::floordiv},
                                                 {"max", Kind::max}, {"min", Kind::min}};
  const auto found = kinds.find(word);
  LB_CHECK_VALUE(found != kinds.end(), kOp, "'", word, "' is no instruction");
  auto made = std::make_unique<Arithmetic>();
  made->kind = found->second;
  made->left = value_of(in, c10::IntType::get());
  made->right = value_of(in, c10::IntType::get());
  in.arrow();
  made->result = in.slot();
  return made;
}

// Whether there is room for what a run is given.
void check_slots(const Program& program, const std::string& line) {
  const auto constants = static_cast<int64_t>(program.constants.size());
  LB_CHECK_VALUE(program.slots <= kMostSlots && program.inputs <= kMostSlots &&
                     program.numbers <= kMostSlots &&
                     constants + program.inputs + program.numbers <= program.slots,
                 kOp, "'", line, "' has no room for ", constants, " constants; record the step again");
}

}  // namespace

std::shared_ptr<const Program> parse(const std::string& text, std::vector<at::Tensor> constants) {
  auto program = std::make_shared<Program>();
  for (const at::Tensor& constant : constants) program->kinds.emplace_back(constant);
  program->constants = std::move(constants);
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    Reader in(line, program->slots);
    if (in.at_end()) continue;
    const std::string word = in.word();
    if (word == "slots") {
      program->inputs = in.count();
      program->numbers = in.count();
      program->slots = in.count();
      check_slots(*program, line);
    } else if (word == "return") {
      program->returned = in.slots();
    } else if (word == "phases") {
      program->phases = in.word();
    } else if (word == "statics") {
      program->statics = in.slots();
    } else if (word == "fixed") {
      program->fixed = in.slots();
    } else if (word == "copied") {
      program->copied = in.slots();
    } else {
      program->instructions.push_back(instruction_of(word, in));
      std::string& name = program->instructions.back()->name;
      if (name.empty()) name = word;
    }
  }
  LB_CHECK_VALUE(program->phases.empty() || program->phases.size() == program->instructions.size(), kOp,
                 "the phases of ", program->phases.size(), " of ", program->instructions.size(),
                 " instructions are told; record the step again");
  return program;
}

}  // namespace liteboost::program
