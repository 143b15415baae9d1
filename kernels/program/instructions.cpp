#include "program/instructions.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>
#include <ATen/ops/arange.h>

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

void Alias::run(Slots& slots) const {
  const at::Tensor& from = slots[source].toTensor();
  LB_CHECK_VALUE(from.is_contiguous(), "program", "slot ", source,
                 " is not contiguous; record the step again");
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
  if (written != slots[end].toInt() || written + count > whole.size(dim)) throw Stopped{};
  slots[result] = start;
}

void Expect::run(Slots& slots) const {
  if (slots[slot].toTensor().is_nonzero() != value) throw Stopped{};
}

void Append::run(Slots& slots) const {
  const at::Tensor& whole = slots[memory].toTensor();
  const at::Tensor& tail = slots[added].toTensor();
  slots[result] = append_in_memory(whole, tail, dim, start.read(slots).toInt(), length.read(slots).toInt());
}

namespace {

// A cache [rows, heads, capacity, size] as one of rows * heads blocks with one head each, and a token likewise.
at::Tensor one_head_each(const at::Tensor& x) { return x.view({-1, 1, x.size(2), x.size(3)}); }

// The place of a token in each of `count` blocks of `capacity` places. Kept with the numbers it was made from.
c10::IValue places_of(const c10::IValue& former, const at::Tensor& whole, int64_t end) {
  const int64_t count = whole.size(0) * whole.size(1), capacity = whole.size(2);
  if (former.isTuple()) {
    const auto& known = former.toTupleRef().elements();
    if (known[1].toInt() == count && known[2].toInt() == capacity && known[3].toInt() == end &&
        known[0].toTensor().device() == whole.device()) {
      return former;
    }
  }
  const auto options = at::TensorOptions().device(whole.device()).dtype(at::kLong);
  const at::Tensor made = at::arange(end, end + count * capacity, capacity, options).unsqueeze(1);
  return c10::ivalue::Tuple::create({made, count, capacity, end});
}

}  // namespace

void Both::run(Slots& slots) const {
  const at::Tensor& key_memory = slots[keys.memory].toTensor();
  const at::Tensor& value_memory = slots[values.memory].toTensor();
  const at::Tensor& key = slots[keys.added].toTensor();
  const at::Tensor& value = slots[values.added].toTensor();
  const int64_t key_begin = keys.start.read(slots).toInt(), value_begin = values.start.read(slots).toInt();
  const int64_t key_end = key_begin + keys.length.read(slots).toInt();
  const int64_t value_end = value_begin + values.length.read(slots).toInt();
  if (key_end != value_end || key_memory.sizes().slice(0, 3) != value_memory.sizes().slice(0, 3)) {
    keys.run(slots);
    values.run(slots);
    return;
  }
  const c10::IValue at = places_of(places < 0 ? c10::IValue() : slots[places], key_memory, key_end);
  append.call(one_head_each(key_memory), one_head_each(value_memory), one_head_each(key.contiguous()),
              one_head_each(value.contiguous()), at.toTupleRef().elements()[0].toTensor());
  slots[made_places] = at;
  slots[keys.result] = key_memory.narrow(2, key_begin, key_end - key_begin + 1);
  slots[values.result] = value_memory.narrow(2, value_begin, value_end - value_begin + 1);
}

void Item::run(Slots& slots) const {
  const c10::IValue value = slots[list];
  if (value.isTensorList()) {
    slots[result] = value.toTensorList().get(index);
  } else {
    slots[result] = value.toListRef()[index];
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
