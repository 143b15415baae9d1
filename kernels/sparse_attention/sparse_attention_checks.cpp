#include "sparse_attention/sparse_attention_checks.h"

#include <cmath>

#include "attention/attention_checks.h"

namespace liteboost {
namespace {

constexpr const char* kOp = "block_sparse_attention";

void check_integers(const char* argument, const at::Tensor& tensor, const at::Tensor& query) {
  LB_CHECK_TYPE(tensor.scalar_type() == at::kLong, kOp, argument, " must be int64, got ",
                tensor.scalar_type(), "; convert it");
  check_same_device(kOp, argument, tensor, "query", query);
}

}  // namespace

void check_block_sparse_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                  const at::Tensor& select_idx, const at::Tensor& select_num_idx,
                                  at::IntArrayRef block_shape, double scaling) {
  check_attention_states(kOp, query, key, value);
  const auto fits = [](int64_t block) { return block > 0 && block <= INT32_MAX; };
  LB_CHECK_VALUE(block_shape.size() == 2 && fits(block_shape[0]) && fits(block_shape[1]), kOp,
                 "block_shape must be two numbers from 1 to 2147483647, of queries and of keys, got ",
                 block_shape, "; usual is [128, 128]");
  const auto idx = select_idx.sym_sizes();
  const auto q = query.sym_sizes();
  const c10::SymInt rows = q[0] * blocks_of(q[2], block_shape[0]);
  const c10::SymInt kv_heads = key.sym_size(1);
  LB_CHECK_VALUE(
      idx.size() == 3 && idx[0] == rows && (idx[1] == q[1] || idx[1] == kv_heads), kOp,
      "select_idx must have shape [batch * query blocks, num_heads or num_kv_heads, key blocks] = [", rows,
      ", ", q[1], " or ", kv_heads, ", any], got ", idx, "; pass a list for each block of queries and head");
  LB_CHECK_VALUE(select_num_idx.sym_sizes() == idx.slice(0, 2), kOp,
                 "select_num_idx must have the first two sizes of select_idx = ", idx.slice(0, 2), ", got ",
                 select_num_idx.sym_sizes(), "; pass how many of each list count");
  check_integers("select_idx", select_idx, query);
  check_integers("select_num_idx", select_num_idx, query);
  LB_CHECK_VALUE(std::isfinite(scaling), kOp, "scaling must be finite, got ", scaling,
                 "; usual is 1 / sqrt(head_dim)");
}

void check_selection(const at::Tensor& select_idx, const at::Tensor& select_num_idx, int64_t key_blocks) {
  const int64_t most = select_idx.size(2);
  const int64_t* blocks = select_idx.const_data_ptr<int64_t>();
  const int64_t* counts = select_num_idx.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < select_num_idx.numel(); ++row, blocks += most) {
    TORCH_CHECK_INDEX(counts[row] >= 0 && counts[row] <= most, "liteboost::", kOp,
                      ": select_num_idx must be 0 .. ", most, ", the length of the lists, got ", counts[row],
                      " in row ", row, "; pass longer lists");
    int64_t before = -1;
    for (int64_t i = 0; i < counts[row]; ++i) {
      TORCH_CHECK_INDEX(blocks[i] > before && blocks[i] < key_blocks, "liteboost::", kOp,
                        ": select_idx must be ascending, 0 .. ", key_blocks - 1,
                        ", below the blocks of keys, got ", blocks[i], " behind ", before, " in row ", row,
                        "; sort each list and take every block once");
      before = blocks[i];
    }
  }
}

}  // namespace liteboost
