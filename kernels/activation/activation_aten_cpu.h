// torch's own sigmoid, silu and softplus, of each row as of that row alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

namespace liteboost {

// torch computes elements by vectors, and those behind the last whole pair of vectors one by one, with another exp. Where a
// row is no multiple of that, as the scores of a few experts are none, an element's bits depend on the rows beside it.
at::Tensor sigmoid_by_rows(const at::Tensor& self);
at::Tensor silu_by_rows(const at::Tensor& self);
at::Tensor softplus_by_rows(const at::Tensor& self, const at::Scalar& beta, const at::Scalar& threshold);

}  // namespace liteboost
