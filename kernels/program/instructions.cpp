#include "program/instructions.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

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
  if (from.is_cpu()) {
    auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(from.storage()),
                                                     from.key_set(), from.dtype());
    impl->set_sizes_and_strides(sizes, strides, from.storage_offset() + offset);
    slots[result] = at::Tensor(std::move(impl));
  } else {
    slots[result] = at::as_strided(from, sizes, strides, from.storage_offset() + offset);
  }
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

void Room::run(Slots& slots) const {
  const at::Tensor& kept = slots[held].toTensor();
  const at::Tensor& whole = slots[memory].toTensor();
  if (kept.storage().unsafeGetStorageImpl() != whole.storage().unsafeGetStorageImpl() ||
      kept.dim() != whole.dim() || kept.scalar_type() != whole.scalar_type() || !whole.is_contiguous() ||
      kept.strides() != whole.strides()) {
    throw Stopped{};
  }
  for (int64_t i = 0; i < kept.dim(); ++i) {
    if (i != dim && kept.size(i) != whole.size(i)) throw Stopped{};
  }
  const int64_t start = (kept.storage_offset() - whole.storage_offset()) / whole.stride(dim);
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
  const int64_t begin = start.read(slots).toInt(), end = begin + length.read(slots).toInt();
  whole.narrow(dim, end, tail.size(dim)).copy_(tail);
  slots[result] = whole.narrow(dim, begin, end - begin + tail.size(dim));
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
