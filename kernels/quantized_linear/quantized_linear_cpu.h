// What the CPU code of other families shares with that of integer weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace liteboost {

// Whether a product of n outputs, one of several, with this many rows of x uses integer dot products; with more, blocks of
// weight are dequantized.
bool uses_int_dot(at::ScalarType dtype, int64_t n, int64_t rows);

// The op on the CPU.
at::Tensor linear_packed_cpu(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                             const std::optional<at::Tensor>& zero_points,
                             const std::optional<at::Tensor>& bias, int64_t out_features);

}  // namespace liteboost
