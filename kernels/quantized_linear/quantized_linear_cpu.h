// What the CPU code of other families shares with that of integer weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace liteboost {

// Whether so many rows of x meet the integers of a weight one by one: for more, parts of it are multiplied out.
bool are_met_as_integers(at::ScalarType dtype, int64_t rows);

// The op on the CPU.
at::Tensor linear_tiles_cpu(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                            const std::optional<at::Tensor>& zero_points,
                            const std::optional<at::Tensor>& bias, int64_t out_features);

}  // namespace liteboost
