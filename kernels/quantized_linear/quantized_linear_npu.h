// How weights of 4 bits lie on an NPU, for the families that multiply by them there.
#pragma once

#include <ATen/core/Tensor.h>

namespace liteboost {

// Converts packing 1 ([N, K / 2] bytes) to CANN's int4 packing: int32 [N, K / 8], eight columns each, lowest bits
// first, in two's complement (the unsigned 8 becomes 0).
at::Tensor words_of(const at::Tensor& packed);

// Undo the tiles of a CPU: rows_of_tiles makes rows [16 T, W] of [T, W, 16], and words_of_tiles the same of weights,
// [T, W, 64] bytes, whose four bytes of each row become one int32.
at::Tensor rows_of_tiles(const at::Tensor& tiles);
at::Tensor words_of_tiles(const at::Tensor& tiles);

}  // namespace liteboost
