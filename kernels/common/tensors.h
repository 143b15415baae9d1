// Tensors as rows of elements, for ops that work along the last dimension.
#pragma once

#include <ATen/core/Tensor.h>

namespace liteboost {

// A tensor [..., size] as `count` rows of `size` elements at data + row * stride + i * step.
struct Rows {
  const void* data;
  int64_t count;
  int64_t size;
  int64_t stride;
  int64_t step;
  // Holds the copy where the argument's strides do not reduce to one stride a row, or its elements are
  // not adjacent though that was asked for; undefined where the argument is read in place.
  at::Tensor copy;

  bool contiguous() const { return step == 1 && (stride == size || count <= 1); }
};

// `tensor` must have at least one dimension and outlive the result. Only slices of a middle dimension and
// expansions need the copy; row-strided, offset and (unless `unit_step`) element-strided views do not.
Rows rows_of(const at::Tensor& tensor, bool unit_step);

// An uninitialised contiguous CPU tensor, without the dispatcher's cost of at::empty. Filled with NaN, or the
// largest integer, where torch's deterministic mode asks for it.
at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype);

// For sums over no elements, which are 0: `tensor` [..., 0] as [..., 1] of zeros, so that the loops need not
// reckon with operands that have no address.
at::Tensor one_zero_column(const at::Tensor& tensor);

}  // namespace liteboost
