// Mixture of experts whose weights are integers of 8 or 4 bits: the products of each token with those of its experts.
//
// experts_packed: out[t, s] = x[t, s] @ weight[e]^T + bias[e], with e = index[t, s]
//
//   x            [T, K], one row a token, or [T, S, K], one row a slot; any strides, copied if not contiguous
//   tiles        the weights [N, K] of all E experts one below the other, as tiles of quantized_linear.h:
//                [E * N / 16, K32 / 4, 64] int8 or [E * N / 16, K / 8, 64] uint8
//   scales       [E * N / 16, G, 16], and zero_points, if any, as of linear_packed
//   bias         [E, N] or none, x.dtype
//   index        [T, S]      int64, 0 .. E; E stands for no expert here: a row of 0
//   out_features N, a multiple of 16: no tile is of two experts
//   result       [T, S, N]   contiguous; x.dtype
//
// dtypes of x: float32, bfloat16, float16. Each expert's rows are computed by the loops of linear_packed, and rounded as
// there (quantized_linear/quantized_linear.h). Only the integers of experts named in index are read, and all threads
// share that reading: a thread takes the next tiles of some expert when it is done with its last.
//
// No backward: an input that requires grad is an error in grad mode.
#pragma once

#include "experts/experts.h"
#include "quantized_linear/quantized_linear.h"
