#include "sparse_attention/sparse_attention.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "sparse_attention/sparse_attention_checks.h"

namespace liteboost {
namespace {

at::Tensor block_sparse_attention_meta(const at::Tensor& query, const at::Tensor& key,
                                       const at::Tensor& value, const at::Tensor& select_idx,
                                       const at::Tensor& select_num_idx, at::IntArrayRef block_shape,
                                       double scaling, bool) {
  check_block_sparse_attention(query, key, value, select_idx, select_num_idx, block_shape, scaling);
  return at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1), value.sym_size(3)},
                          query.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "block_sparse_attention(Tensor query, Tensor key, Tensor value, Tensor select_idx, Tensor "
      "select_num_idx, "
      "int[] block_shape, float scaling, bool is_causal=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("block_sparse_attention", &liteboost::block_sparse_attention_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("block_sparse_attention", torch::CppFunction::makeFallthrough());
}
