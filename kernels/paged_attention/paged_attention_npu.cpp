// Paged attention as one aclnn operator: FusedInferAttentionScore of packed tokens (layout TND), with a block table or
// with packed keys. It reads lengths on the host, whole pages [pages, page_rows, num_kv_heads * head_dim], and causality
// from a mask of fixed size, by the lengths of each request.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "attention/attention_npu_hiding.h"
#include "attention/attention_npu_infer.h"
#include "attention/attention_npu_launch.h"
#include "npu/aclnn.h"
#include "npu/serve.h"
#include "paged_attention/paged_attention.h"
#include "paged_attention/paged_attention_checks.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;

constexpr const char* kOp = "paged_attention";
constexpr int64_t kPrecise = 0;

// What the operator is told of a call beside the tensors.
struct Packed {
  Spans spans;
  bool is_causal, has_sinks;
  int64_t window;  // 0: none that hides a key

  bool is_served() const {
    for (int64_t r = 0; r < spans.count(); ++r) {
      if (spans.q_len(r) == 0 || spans.kv_len(r) == 0) return false;
    }
    return true;
  }
  bool has_late_queries() const {
    for (int64_t r = 0; r < spans.count(); ++r) {
      if (spans.q_len(r) > spans.kv_len(r)) return true;
    }
    return false;
  }
};

bool is_aligned(const at::Tensor& x) {
  constexpr int64_t kAlignment = 32;  // of what the operators load, in bytes
  return x.storage_offset() * static_cast<int64_t>(x.itemsize()) % kAlignment == 0;
}

Refusal refusal_of_pages(const at::Tensor& key, const at::Tensor& value, const Spans& spans) {
  const int64_t rows = key.size(1);
  if (rows % 16 != 0) return "pages whose rows are no multiple of 16";
  if (rows > 128) return "pages of more than 128 rows";
  if (key.size(2) * key.size(3) > 65535) return "a row of all heads beyond the operator's";
  if (!key.is_contiguous() || !value.is_contiguous()) return "pages that are not contiguous";
  if (!is_aligned(key) || !is_aligned(value)) return "pages at an address that is not aligned";
  int64_t pages = 0;
  for (int64_t r = 0; r < spans.count(); ++r) pages += (spans.kv_len(r) + rows - 1) / rows;
  return pages > key.size(0) ? "requests that share more pages than there are" : kServed;
}

// Head sizes that the operator takes with every option; others have a kernel of their own.
bool has_usual_heads(const at::Tensor& query) {
  const int64_t head_dim = query.size(2);
  return head_dim == 64 || head_dim == 128 || head_dim == 192;
}

Refusal refusal_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const OptionalTensor& block_table, double softcap, const OptionalTensor& sinks,
                   const Packed& packed) {
  const int64_t head_dim = query.size(2), groups = query.size(1) / std::max<int64_t>(key.size(2), 1);
  if (query.numel() == 0 || key.numel() == 0 || value.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (query.scalar_type() == at::kFloat) return "fp32";
  if (softcap != 0.0) return "a softcap";
  if (value.size(3) != head_dim) return "values of another size than keys";
  if (!has_usual_heads(query) && (head_dim % 16 != 0 || head_dim > 256 || groups == 1)) {
    return "a head size that packed tokens do not have";
  }
  if (query.size(1) > 256 || groups > 64) return "more heads than the operator takes";
  if (packed.spans.queries.back() != query.size(0)) return "tokens of no request";
  if (!packed.is_served()) return "a request without queries or keys";
  if (packed.is_causal && packed.has_late_queries()) return "more queries than keys";
  if (packed.has_sinks) {
    if (head_dim != 64 && head_dim != 128) return "sinks with a head size that is neither 64 nor 128";
    if (sinks->scalar_type() != query.scalar_type()) return "sinks of another dtype";
  }
  if (const Refusal refusal = npu::inference_refusal(packed.has_sinks); refusal != kServed) return refusal;
  return given(block_table) ? refusal_of_pages(key, value, packed.spans) : kServed;
}

std::string kind(const at::Tensor& query, const OptionalTensor& block_table, const Packed& packed,
                 int64_t longest) {
  std::string text = npu::dtype_name(query.scalar_type());
  text += given(block_table) ? " pages" : " packed";
  if (!packed.is_causal) text += " full";
  if (packed.window > 0) text += " window";
  if (packed.has_sinks) text += " sinks";
  return text + sizes_kind(query.size(2), longest);
}

at::Tensor fused(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 const OptionalTensor& block_table, double scaling, const OptionalTensor& sinks,
                 const Packed& packed) {
  npu::Inference made;
  made.query = query.contiguous();
  made.heads = query.size(1);
  made.kv_heads = key.size(2);
  made.scaling = scaling;
  made.layout = "TND";
  made.precise = kPrecise;
  made.q_lengths.assign(packed.spans.queries.begin() + 1, packed.spans.queries.end());
  if (given(block_table)) {  // lengths are of each request, else where each ends
    made.block_table = block_table->to(query.device(), at::kInt).contiguous();
    made.page_rows = key.size(1);
    for (int64_t r = 0; r < packed.spans.count(); ++r) made.kv_lengths.push_back(packed.spans.kv_len(r));
    made.keys = {key.view({key.size(0), key.size(1), -1})};
    made.values = {value.view({value.size(0), value.size(1), -1})};
  } else {
    made.kv_lengths.assign(packed.spans.keys.begin() + 1, packed.spans.keys.end());
    const int64_t length = made.kv_lengths.back();
    made.keys = {key[0].narrow(0, 0, length).contiguous()};
    made.values = {value[0].narrow(0, 0, length).contiguous()};
  }
  if (packed.is_causal) {
    made.mask = triangle(query.device());
    made.mode = packed.window > 0 ? kBand : kCausalAtTheEnd;
    if (packed.window > 0) made.before = packed.window - 1;
    made.after = 0;
  }
  if (packed.has_sinks) made.sinks = sinks->contiguous();
  const at::Tensor out = at::empty(query.sizes(), query.options());
  // Not asked for, but the operator wants a place for it.
  const at::Tensor lse = at::empty({1}, query.options().dtype(at::kFloat));
  npu::infer(made, out, lse, false);
  return out;
}

at::Tensor paged_attention_npu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                               const OptionalTensor& block_table, double scaling, bool is_causal,
                               int64_t sliding_window, double softcap, const OptionalTensor& sinks) {
  check_paged_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, scaling, is_causal,
                        sliding_window, softcap, sinks);
  const c10::DeviceGuard guard(query.device());
  Packed packed{spans_of(query, key, cu_seqlens_q, cu_seqlens_k, block_table), is_causal, given(sinks), 0};
  if (given(block_table) && block_table->is_cpu()) pages_of(key, block_table, packed.spans);
  int64_t longest = 0;
  for (int64_t r = 0; r < packed.spans.count(); ++r) longest = std::max(longest, packed.spans.kv_len(r));
  if (sliding_window < longest) packed.window = sliding_window;
  Refusal refusal = refusal_of(query, key, value, block_table, softcap, sinks, packed);
  if (refusal == kServed && is_causal && !triangle(query.device()).defined()) {
    refusal = "no causal mask can be made while a graph is captured";
  }
  if (refusal == kServed) refusal = npu::unverified(kOp, kind(query, block_table, packed, longest));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(paged_attention_npu)>(kOp, why).call(query, key, value, cu_seqlens_q,
                                                                   cu_seqlens_k, block_table, scaling,
                                                                   is_causal, sliding_window, softcap, sinks);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      kOp, [&]() -> at::Tensor { return fused(query, key, value, block_table, scaling, sinks, packed); },
      reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("paged_attention", &liteboost::paged_attention_npu); }
