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

// Calls f(tensor) for each that a slot or an argument holds.
template <typename F>
void each_tensor(const c10::IValue& value, const F& f) {
  if (value.isTensor() && value.toTensor().defined()) f(value.toTensor());
  if (!value.isList()) return;
  for (const c10::IValue& item : value.toListRef()) each_tensor(item, f);
}

template <typename F>
void each_tensor(const Value& value, const Slots& slots, const F& f) {
  for (const Value& item : value.items) each_tensor(item, slots, f);
  if (value.kind == Value::Kind::slot) each_tensor(slots[value.slot], f);
  if (value.kind == Value::Kind::constant) each_tensor(value.constant, f);
}

// Of what lies in memory: once where a dimension is the same elements again. None of a layout of its own.
int64_t bytes_in_memory(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return 0;
  auto bytes = static_cast<int64_t>(tensor.element_size());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0 || tensor.size(dim) == 0) bytes *= tensor.size(dim);
  }
  return bytes;
}

// `largest`: bytes of the operand noted.
void add_read(Instruction::Traffic& sum, const at::Tensor& tensor, int64_t& largest) {
  const int64_t bytes = bytes_in_memory(tensor);
  sum.bytes += bytes;
  if (bytes <= largest) return;
  largest = bytes;
  sum.dtype = tensor.scalar_type();
  sum.sizes = {tensor.sizes().begin(), tensor.sizes().end()};
}

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  return one.has_storage() && other.has_storage() && one.is_alias_of(other);
}

}  // namespace

bool Operator::gave_views(const Slots& slots) const {
  if (handle.schema().is_mutable()) return false;
  int64_t tensors = 0, views = 0;
  for (const int64_t slot : results) {
    if (slot < 0) continue;
    each_tensor(slots[slot], [&](const at::Tensor& result) {
      ++tensors;
      bool is_view = false;
      for (const Value& argument : arguments)
        each_tensor(argument, slots,
                    [&](const at::Tensor& from) { is_view = is_view || share_memory(result, from); });
      if (is_view) ++views;
    });
  }
  return tensors > 0 && views == tensors;
}

Instruction::Traffic Operator::traffic(const Slots& slots) const {
  Traffic sum;
  if (gave_views(slots)) return sum;
  int64_t largest = -1;
  for (size_t i = is_look_up(name) ? 1 : 0; i < arguments.size(); ++i) {
    each_tensor(arguments[i], slots, [&](const at::Tensor& read) { add_read(sum, read, largest); });
  }
  for (const int64_t slot : results) {
    if (slot < 0) continue;
    each_tensor(slots[slot], [&](const at::Tensor& made) { sum.bytes += bytes_in_memory(made); });
  }
  return sum;
}

Instruction::Traffic Append::traffic(const Slots& slots) const {
  Traffic sum;
  int64_t largest = -1;
  const at::Tensor& tail = slots[added].toTensor();
  add_read(sum, tail, largest);
  sum.bytes += static_cast<int64_t>(tail.nbytes());  // written
  return sum;
}

Instruction::Traffic Both::traffic(const Slots& slots) const {
  Traffic sum = keys.traffic(slots);
  sum.bytes += values.traffic(slots).bytes;
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
    throw Stopped(Why::input);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    if (sizes[i] >= 0 && given.size(at) != sizes[i]) throw Stopped(Why::input);
    if (strides[i] >= 0 && given.size(at) != 1 && given.stride(at) != strides[i]) throw Stopped(Why::input);
  }
}

void Size::run(Slots& slots) const {
  if (slots[slot].toTensor().size(dim) != slots[number].toInt()) throw Stopped(Why::input);
}

void KVBuffer::run(Slots& slots) const {
  const at::Tensor& kept = slots[held].toTensor();
  const at::Tensor& whole = slots[memory].toTensor();
  // Not where somebody has written to what is kept, or the layer keeps something else.
  const int64_t start = whole.is_contiguous() ? start_in_memory(kept, whole, dim) : -1;
  if (start < 0) throw Stopped(Why::kv_buffer);
  const int64_t written = start + kept.size(dim);
  // Behind it nothing may have been handed out, and there must be room.
  if (written != slots[end].toInt() || written + count.read(slots).toInt() > whole.size(dim))
    throw Stopped(Why::kv_buffer);
  slots[result] = start;
}

void Expect::run(Slots& slots) const {
  if (slots[slot].toTensor().is_nonzero() != value) throw Stopped(Why::decision);
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
