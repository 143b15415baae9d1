// Memory of a KV cache with room behind what is written, and tensors that show the written part of it.
//
// A tensor that was handed out has a storage of its own, which shares the memory's bytes until somebody writes to them
// through it: torch's own copy on write. So whoever keeps such a tensor sees what was in it when it was handed out, and
// what he writes is in his tensor (and in all views of it) alone. The memory itself is written where nothing of it has
// been handed out. On devices other than the CPU, and where torch cannot share a storage so, views are handed out.
//
//   _cache_append(Tensor(a!) memory, Tensor added, int dim, int start, int length) -> Tensor
//     memory   contiguous; positions lie along dim
//     added    written at positions start + length and behind, in memory's dtype; memory's sizes but for dim
//     returns  positions start .. start + length + added.size(dim)
//
//   _cache_start(Tensor held, Tensor memory, int dim, int end) -> int
//     held     what a layer keeps
//     end      how much of memory has been handed out
//     returns  the position in memory at which held begins, if what comes behind held may be written there; else -1. It
//              may where nothing behind held has been handed out, or nobody has kept it.
//
// Source: torch.cat([held, added], dim), which moves everything for each token; c10/core/impl/COW.h. No backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace liteboost {

// `whole` with other sizes, strides and offset; without the dispatcher where no device has a say in it.
at::Tensor view_of(const at::Tensor& whole, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

// Positions start .. start + length + added.size(dim) of `memory`, the last of which are written before.
at::Tensor append_in_memory(const at::Tensor& memory, const at::Tensor& added, int64_t dim, int64_t start,
                            int64_t length);

// Where `held` begins in the bytes of `memory`, or -1 where it is not laid out as a part of it along `dim`.
int64_t start_in_memory(const at::Tensor& held, const at::Tensor& memory, int64_t dim);

}  // namespace liteboost
