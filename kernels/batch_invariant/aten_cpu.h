// Kernels that stand in the place of torch's own while rows are to keep their bits (aten_cpu.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

namespace liteboost {

// torch computes elements by vectors, and those behind the last whole pair of vectors one by one, where some functions have
// other bits. Where a row is no multiple of that, as the scores of a few experts are none, an element's bits depend on the
// rows beside it. The first three are of each row as of that row alone, which has the bits that torch gives it; where
// bits are to depend on a row's own elements alone, all are of all elements by vectors.
at::Tensor sigmoid_alone(const at::Tensor& self);
at::Tensor silu_alone(const at::Tensor& self);
at::Tensor softplus_alone(const at::Tensor& self, const at::Scalar& beta, const at::Scalar& threshold);
at::Tensor mish_alone(const at::Tensor& self);
at::Tensor exp2_alone(const at::Tensor& self);
at::Tensor rsqrt_alone(const at::Tensor& self);
at::Tensor gelu_alone(const at::Tensor& self, c10::string_view approximate);
at::Tensor elu_alone(const at::Tensor& self, const at::Scalar& alpha, const at::Scalar& scale,
                     const at::Scalar& input_scale);

// Products of batches of matrices and softmax, in which hidden keys change no bit either (batch_invariant.h).
at::Tensor bmm_of_any_length(const at::Tensor& self, const at::Tensor& mat2);
at::Tensor baddbmm_of_any_length(const at::Tensor& self, const at::Tensor& batch1, const at::Tensor& batch2,
                                 const at::Scalar& beta, const at::Scalar& alpha);
at::Tensor softmax_of_any_length(const at::Tensor& self, int64_t dim, bool half_to_float);

}  // namespace liteboost
