// The argument checks of quantize_w8 and quantize_w4, shared by every backend.
#pragma once

#include "quantize_weight/quantize_weight.h"

#include "common/checks.h"

namespace liteboost {

// Raise on anything that quantize_weight.h does not allow.
void check_quantize_w8(const at::Tensor& weight, at::ScalarType scale_dtype);
void check_quantize_w4(const at::Tensor& weight, int64_t group_size, at::ScalarType scale_dtype);

}  // namespace liteboost
