// Block-sparse attention as aclnnRainFusionAttention (CANN 8.5; A2 and A3), whose contract the op has.
//
// It takes fp16 and bf16, heads of values as large as those of keys, a power of two of query heads below 128 for
// each head of keys, and no mask: causal calls are the reference's. aclnnBlockSparseAttention takes none either.
// Tensors go in as positions by heads (TND), which is how they leave the projections; the others are copied.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "npu/aclnn.h"
#include "npu/serve.h"
#include "sparse_attention/sparse_attention_checks.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::Integers;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using npu::Text;
constexpr const char* kOp = "block_sparse_attention";
constexpr int64_t kPrecise = 0;

// clang-format off
const npu::Operator<
    Tensor, Tensor, Tensor,         // query, key, value
    Tensor, Tensor, Integers,       // selectIdx, selectNumIdx, blockShape
    Tensor, Integers, Integers,     // attenMask, actualSeqLengths, actualSeqLengthsKv
    Tensor, Text, Text,             // blockTable, qInputLayout, kvInputLayout
    int64_t, int64_t, double,       // numKeyValueHeads, maskType, scaleValue
    int64_t, int64_t,               // innerPrecise, blockSize
    Tensor, Tensor>                 // attentionOut, softmaxLse
    kRainFusion{"aclnnRainFusionAttention"};
// clang-format on

Refusal refusal_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& select_idx, bool is_causal) {
  if (query.numel() == 0 || value.numel() == 0 || select_idx.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "on a 310P";
  if (npu::soc() == npu::Soc::a950) return "on a 950";
  if (is_causal) return "causality inside the blocks";
  if (query.scalar_type() == at::kFloat) return "in fp32";
  if (value.size(3) != query.size(3)) return "values of another size than keys";
  const int64_t group = query.size(1) / key.size(1);
  if (group >= 128 || 128 % group != 0) return "a group of heads that does not divide 128";
  return kRainFusion.available() ? kServed : "not in this CANN";
}

// [batch, heads, positions, dim] as [batch * positions, heads, dim].
at::Tensor by_position(const at::Tensor& states) { return states.transpose(1, 2).contiguous().flatten(0, 1); }

// A table [rows, num_kv_heads, ...] for each query head.
at::Tensor of_heads(const at::Tensor& table, int64_t heads) {
  return table.size(1) == heads ? table.contiguous()
                                : table.repeat_interleave(heads / table.size(1), 1).contiguous();
}

at::Tensor block_sparse_attention_npu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const at::Tensor& select_idx, const at::Tensor& select_num_idx,
                                      at::IntArrayRef block_shape, double scaling, bool is_causal) {
  check_block_sparse_attention(query, key, value, select_idx, select_num_idx, block_shape, scaling);
  const c10::DeviceGuard guard(query.device());
  Refusal refusal = refusal_of(query, key, value, select_idx, is_causal);
  if (refusal == kServed) refusal = npu::unverified(kOp, npu::dtype_name(query.scalar_type()));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(block_sparse_attention_npu)>(kOp, why).call(
        query, key, value, select_idx, select_num_idx, block_shape, scaling, is_causal);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      kOp,
      [&]() -> at::Tensor {
        const int64_t batch = query.size(0), heads = query.size(1), q_len = query.size(2);
        const std::vector<int64_t> q_lens(static_cast<size_t>(batch), q_len);
        const std::vector<int64_t> kv_lens(static_cast<size_t>(batch), key.size(2));
        const at::Tensor none;
        const at::Tensor out = at::empty({batch, q_len, heads, value.size(3)}, query.options());
        kRainFusion(by_position(query), by_position(key), by_position(value), of_heads(select_idx, heads),
                    of_heads(select_num_idx, heads), Integers(block_shape), none,
                    Integers(at::IntArrayRef(q_lens)), Integers(at::IntArrayRef(kv_lens)), none, "TND", "TND",
                    key.size(1), 0, scaling, kPrecise, 0, out.flatten(0, 1), none);
        return out;
      },
      reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("block_sparse_attention", &liteboost::block_sparse_attention_npu);
}
