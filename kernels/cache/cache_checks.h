// The argument checks of kv_append, shared by every backend.
#pragma once

#include "cache/cache.h"
#include "common/checks.h"

namespace liteboost {

// Raises on anything that cache.h does not allow, but for the numbers in `slots`.
void check_kv_append(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& slots);

}  // namespace liteboost
