// The argument checks of the collectives, shared by every backend.
#pragma once

#include "common/checks.h"

namespace liteboost {

// Raise on anything that collectives.h does not allow.
void check_all_reduce(const at::Tensor& x);
// `rank` is below 0 where there is no process group to ask (Meta).
void check_all_gather(const at::Tensor& x, c10::SymIntArrayRef sizes, int64_t rank, int64_t ranks);

}  // namespace liteboost
