// Memory of large tensors that were freed, kept for the next ones. The system gives new memory page by page, each cleared at
// its first use, and takes it back when a tensor is freed: for the activations of a prompt of 512 tokens and more that takes
// up to a quarter of the time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace liteboost {

// Has torch take memory for large tensors on the CPU from here, of which up to `bytes` are kept while they are free. 0: gives
// it the allocator back that it had, and the system what is free. False where this cannot be: not on this system, or
// somebody else has set an allocator since.
bool set_caching_allocator(int64_t bytes);

// Bytes that are free and kept, bytes in use, how often memory was taken from the system, and how often it was used again.
std::vector<int64_t> caching_allocator_counts();

// Bytes that are zero, from here: memory of the system's is, until it is used, and what was kept is cleared by torch's threads,
// where there may be as many as torch asks for. Nothing where no memory is kept, or less than that.
std::vector<at::Tensor> kept_zeros(int64_t bytes);

// By what memory from here is freed, as a number; 0 where there is none.
int64_t caching_allocator_deleter();

}  // namespace liteboost
