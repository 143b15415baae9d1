// How weights of 4 bits lie on an NPU, for the families that multiply by them there.
#pragma once

#include <ATen/core/Tensor.h>

namespace liteboost {

// Packing 1 of 4 bits, [N, K / 2] bytes, as CANN packs 4 bits: words [N, K / 8] of eight columns, the first in the lowest
// bits, each in two's complement, in which 8 of packing 1 is 0.
at::Tensor words_of(const at::Tensor& packed);

// Out of the tiles of a CPU, [T, W, 16]: the rows [16 T, W] that lie in them side by side; and the words of those of
// weights, [T, W, 64] bytes.
at::Tensor rows_of_tiles(const at::Tensor& tiles);
at::Tensor words_of_tiles(const at::Tensor& tiles);

}  // namespace liteboost
