// The argument checks of block_sparse_attention, shared by every backend.
#pragma once

#include "common/checks.h"
#include "sparse_attention/sparse_attention.h"

namespace liteboost {

// Raises on anything that sparse_attention.h does not allow and that shows without reading a value.
void check_block_sparse_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                  const at::Tensor& select_idx, const at::Tensor& select_num_idx,
                                  at::IntArrayRef block_shape, double scaling);

// Raises unless the numbers in both tables, contiguous and on the host, name blocks, in ascending order.
void check_selection(const at::Tensor& select_idx, const at::Tensor& select_num_idx, int64_t key_blocks);

}  // namespace liteboost
