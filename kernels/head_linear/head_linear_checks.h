// The argument checks of head_linear, shared by every backend.
#pragma once

#include "head_linear/head_linear.h"

#include "common/checks.h"

namespace liteboost {

// Raises on anything that head_linear.h does not allow.
void check_head_linear(const at::Tensor& x, const at::Tensor& weight);

}  // namespace liteboost
