#include "program/instructions.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "cache/kv_buffer.h"
#include "common/checks.h"

namespace liteboost::program {

at::Tensor wrapped(const c10::Scalar& number) {
  at::Tensor made = c10::scalar_to_tensor(number);
  made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

c10::IValue Value::read(const Slots& slots) const {
  switch (kind) {
    case Kind::constant:
      return constant;
    case Kind::slot:
      return slots[slot];
    case Kind::wrapped:
      return wrapped(slots[slot].toScalar());
    case Kind::numbers: {
      c10::List<int64_t> list;
      list.reserve(items.size());
      for (const Value& item : items) list.push_back(item.read(slots).toInt());
      return list;
    }
    case Kind::tensors: {
      c10::List<at::Tensor> list;
      list.reserve(items.size());
      for (const Value& item : items) list.push_back(item.read(slots).toTensor());
      return list;
    }
    case Kind::optional_tensors: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(items.size());
      for (const Value& item : items) list.push_back(item.read(slots).toOptional<at::Tensor>());
      return list;
    }
  }
  return {};
}

void Operator::run(Slots& slots) const {
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  for (const Value& argument : arguments) stack.push_back(argument.read(slots));
  handle.callBoxed(stack);
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i] >= 0) slots[results[i]] = std::move(stack[i]);
  }
}

namespace {

// Of whose first tensor an operator reads the rows that another tensor names.
bool is_look_up(const std::string& name) {
  return name == "aten::embedding" || name == "aten::index_select" || name == "aten::index";
}

void add_read(Instruction::Traffic& sum, const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const at::Tensor& tensor = value.toTensor();
  int64_t largest =
      sum.dtype == at::ScalarType::Undefined ? -1 : static_cast<int64_t>(c10::elementSize(sum.dtype));
  for (const int64_t size : sum.sizes) largest *= size;
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  sum.bytes += bytes;
  if (bytes <= largest) return;
  sum.dtype = tensor.scalar_type();
  sum.sizes = {tensor.sizes().begin(), tensor.sizes().end()};
}

void add_read(Instruction::Traffic& sum, const Value& value, const Slots& slots) {
  for (const Value& item : value.items) add_read(sum, item, slots);
  if (value.kind == Value::Kind::slot) add_read(sum, slots[value.slot]);
  if (value.kind == Value::Kind::constant) add_read(sum, value.constant);
}

}  // namespace

Instruction::Traffic Operator::traffic(const Slots& slots) const {
  Traffic sum;
  for (size_t i = is_look_up(name) ? 1 : 0; i < arguments.size(); ++i) add_read(sum, arguments[i], slots);
  for (const int64_t slot : results) {
    if (slot >= 0 && slots[slot].isTensor() && slots[slot].toTensor().defined())
      sum.bytes += static_cast<int64_t>(slots[slot].toTensor().nbytes());
  }
  return sum;
}

void Alias::run(Slots& slots) const {
  const at::Tensor& from = slots[source].toTensor();
  LB_CHECK_VALUE(from.is_contiguous(), "program", "slot ", source,
                 " is not contiguous; record the step again");
  LB_CHECK_VALUE(extent <= from.numel(), "program", "slot ", source, " has ", from.numel(),
                 " elements, and another view of it shows ", extent, "; record the step again");
  slots[result] = view_of(from, sizes, strides, from.storage_offset() + offset);
}

void Like::run(Slots& slots) const {
  const at::Tensor& given = slots[slot].toTensor();
  if (given.scalar_type() != dtype || given.device() != device ||
      given.dim() != static_cast<int64_t>(sizes.size()) || given.layout() != at::kStrided ||
      given.is_conj() || given.is_neg()) {
    throw Stopped{};
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    if (sizes[i] >= 0 && given.size(at) != sizes[i]) throw Stopped{};
    if (strides[i] >= 0 && given.size(at) != 1 && given.stride(at) != strides[i]) throw Stopped{};
  }
}

void Size::run(Slots& slots) const {
  if (slots[slot].toTensor().size(dim) != slots[number].toInt()) throw Stopped{};
}

void KVBuffer::run(Slots& slots) const {
  const at::Tensor& kept = slots[held].toTensor();
  const at::Tensor& whole = slots[memory].toTensor();
  // Not where somebody has written to what is kept, or the layer keeps something else.
  const int64_t start = whole.is_contiguous() ? start_in_memory(kept, whole, dim) : -1;
  if (start < 0) throw Stopped{};
  const int64_t written = start + kept.size(dim);
  // Behind it nothing may have been handed out, and there must be room.
  if (written != slots[end].toInt() || written + count.read(slots).toInt() > whole.size(dim)) throw Stopped{};
  slots[result] = start;
}

void Expect::run(Slots& slots) const {
  if (slots[slot].toTensor().is_nonzero() != value) throw Stopped{};
}

void Append::run(Slots& slots) const {
  const at::Tensor& whole = slots[memory].toTensor();
  const at::Tensor& tail = slots[added].toTensor();
  const at::Tensor all =
      append_in_memory(whole, tail, dim, start.read(slots).toInt(), length.read(slots).toInt());
  if (result >= 0) slots[result] = all;
}

namespace {

// A cache [rows, heads, capacity, size] as one of rows * heads blocks with one head each, and a token likewise. Integers
// are handed on as half as many floats: bits are copied.
at::Tensor one_head_each(const at::Tensor& x) {
  const at::Tensor rows = x.scalar_type() == at::kChar ? x.view(at::kBFloat16) : x;
  return rows.view({-1, 1, rows.size(2), rows.size(3)});
}

}  // namespace

// A tuple of the tensor, [blocks, 1], and of what it was made from: how many blocks, places in each, and the place.
void Places::run(Slots& slots) const {
  const at::Tensor& whole = slots[keys.memory].toTensor();
  const at::Tensor& other = slots[values.memory].toTensor();
  const int64_t end = keys.start.read(slots).toInt() + keys.length.read(slots).toInt();
  if (end != values.start.read(slots).toInt() + values.length.read(slots).toInt() ||
      whole.sizes().slice(0, 3) != other.sizes().slice(0, 3)) {
    slots[result] = c10::IValue();
    return;
  }
  const int64_t count = whole.size(0) * whole.size(1), capacity = whole.size(2);
  const c10::IValue before = former < 0 ? c10::IValue() : slots[former];
  at::Tensor taken;
  if (before.isTuple()) {
    const auto& known = before.toTupleRef().elements();
    taken = known[0].toTensor();
    if (known[1].toInt() == count && known[2].toInt() == capacity && known[3].toInt() == end &&
        taken.device() == whole.device()) {
      slots[result] = before;
      return;
    }
  }
  at::Tensor made;
  if (slots[result].isTuple()) {
    made = slots[result].toTupleRef().elements()[0].toTensor();
    if (made.size(0) != count || made.device() != whole.device() || made.is_same(taken)) made = at::Tensor();
  }
  const auto options = at::TensorOptions().device(whole.device()).dtype(at::kLong);
  if (!made.defined()) {
    const c10::InferenceMode outside(false);  // for whichever run writes it again
    made = at::empty({count, 1}, options);
  }
  at::Tensor flat = made.view({count});
  at::arange_out(flat, end, end + count * capacity, capacity);
  slots[result] = c10::ivalue::Tuple::create({made, count, capacity, end});
}

void Both::run(Slots& slots) const {
  if (!slots[places].isTuple()) {
    keys.run(slots);
    values.run(slots);
    return;
  }
  append.call(one_head_each(slots[keys.memory].toTensor()), one_head_each(slots[values.memory].toTensor()),
              one_head_each(slots[keys.added].toTensor().contiguous()),
              one_head_each(slots[values.added].toTensor().contiguous()),
              slots[places].toTupleRef().elements()[0].toTensor());
}

void Part::run(Slots& slots) const {
  slots[result] =
      slots[memory].toTensor().narrow(dim, start.read(slots).toInt(), length.read(slots).toInt() + count);
}

void Item::run(Slots& slots) const {
  const c10::IValue value = slots[list];
  if (value.isTensorList()) {
    slots[result] = value.toTensorList().get(index);
  } else {
    const auto& items = value.toListRef();
    LB_CHECK_VALUE(index < static_cast<int64_t>(items.size()), "program", "slot ", list, " has no item ",
                   index);
    slots[result] = items[index];
  }
}

void Arithmetic::run(Slots& slots) const {
  const int64_t a = left.read(slots).toInt(), b = right.read(slots).toInt();
  int64_t made = 0;
  switch (kind) {
    case Kind::add:
      made = a + b;
      break;
    case Kind::sub:
      made = a - b;
      break;
    case Kind::mul:
      made = a * b;
      break;
    case Kind::floordiv:
      LB_CHECK_VALUE(b != 0, "program", "a number is divided by 0; record the step again");
      made = a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
      break;
    case Kind::max:
      made = std::max(a, b);
      break;
    case Kind::min:
      made = std::min(a, b);
      break;
  }
  slots[result] = made;
}

void Drop::run(Slots& slots) const {
  for (const int64_t slot : which) slots[slot] = c10::IValue();
}

}  // namespace liteboost::program
