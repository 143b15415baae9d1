// The argument checks of rope, shared by every backend.
#pragma once

#include <c10/util/string_view.h>

#include "common/checks.h"
#include "rope/rope.h"

namespace liteboost {

// Raises on anything that rope.h does not allow; returns the parsed layout.
RopeLayout check_rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                      int64_t unsqueeze_dim, c10::string_view layout, int64_t rotary_dim);

}  // namespace liteboost
