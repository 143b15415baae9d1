// Collectives: what the ranks of a process group compute together.
//
// all_reduce: out = sum over ranks of x
//
//   x       any shape and strides, the same shape and dtype on every rank; copied if not contiguous
//   group   name of a process group of torch.distributed
//   result  contiguous; x.dtype, and the same bits on every rank
//
// all_reduce_: the same, written to x, whose memory nobody else may need
//
// all_reduce_of: all_reduce, of ranks that work on the same thing
//
//   same    the same bits on every rank, else an error on each: the tokens that x was computed from. Compared where
//           ranks share memory
//
// all_gather: out = the x of all ranks, one behind the other along the last dimension
//
//   x       [..., n], n = sizes[rank]; the other dimensions are the same on every rank
//   sizes   the last dimension of x on each rank; they may differ
//   result  [..., sum of sizes]   contiguous; x.dtype
//
// dtypes: float32, bfloat16, float16.
//
// Rounding of all_reduce: through shared memory the ranks are added in fp32 in the order of their numbers, and
// rounded once; through a process group as its backend does it (gloo rounds after each addition).
//
// Every rank must make the same calls in the same order. A call returns when all ranks have made it, or raises:
// where a rank has ended, or has not come within the time limit, or somebody has interrupted it (`_interrupt`).
//
// Ranks of one host share a segment of memory (shared_memory.h) once `_share_memory` was called for the group;
// CPU tensors then go through it. Everything else, and every other device, goes through the process group.
//
// No backward: an input that requires grad is an error in grad mode.
#pragma once

#include <stdint.h>

#include "common/dtype.h"

namespace liteboost {

// The most ranks that share a segment of memory.
constexpr int kMostRanks = 64;

// out[i] = sum over ranks of from[rank][i], added in fp32 in that order and rounded once.
void add_ranks(DType dtype, const void* const* from, int ranks, int64_t begin, int64_t end, void* out);

}  // namespace liteboost
