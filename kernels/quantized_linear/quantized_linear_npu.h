// How weights of 4 bits lie on an NPU, for the families that multiply by them there.
#pragma once

#include <ATen/core/Tensor.h>

namespace liteboost {

// Packing 1 of w4, [N, K / 2] bytes, as CANN packs 4 bits: words [N, K / 8] of eight columns, the first in the lowest
// bits, each in two's complement, in which 8 of packing 1 is 0.
at::Tensor words_of(const at::Tensor& packed);

}  // namespace liteboost
