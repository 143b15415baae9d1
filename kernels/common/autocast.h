// Weights in the dtype that autocast computes in.
#pragma once

#include <ATen/core/Tensor.h>

namespace liteboost {

// `weight` in `dtype`, from the cache in which torch's autocast keeps such casts until its outermost block ends, as
// the operators it wraps take it: of a weight that may want gradients there is one cast for all that multiply by it.
// To be called under autocast alone; nobody else empties that cache.
at::Tensor autocast_weight(const at::Tensor& weight, at::ScalarType dtype);

}  // namespace liteboost
