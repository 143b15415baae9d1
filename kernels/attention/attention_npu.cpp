// Attention as one aclnn operator: FusedInferAttentionScore for bf16 and fp16, FlashAttentionScore for fp32.
//
// Both read [B, N, S, D] (BNSD) or [B, S, N, D] (BSND) and only contiguous. Of one query, as in decode, the two
// are the same memory; in prefill the query is copied where keys and values come from a cache in the other order.
// Queries that see no key give 0: the operators are asked to repair such rows where there is a mask, and where one
// does not take that (one query of a head size that is neither 64 nor 128) the result is multiplied.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/triu.h>
#include <torch/library.h>

#include <limits>

#include "attention/attention_checks.h"
#include "npu/aclnn.h"
#include "npu/kept.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::Integers;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using npu::Tensors;
using npu::Text;
using OptionalTensor = std::optional<at::Tensor>;

constexpr const char* kOp = "attention";

// clang-format off
const npu::Operator<
    Tensor, Tensors, Tensors,                // query, key, value
    Tensor, Tensor, Integers, Integers,      // pseShift, attenMask, actualSeqLengths, actualSeqLengthsKv
    Tensor, Tensor, Tensor, Tensor, Tensor,  // deqScale1, quantScale1, deqScale2, quantScale2, quantOffset2
    Tensor, Tensor,                          // antiquantScale, antiquantOffset
    Tensor, Tensor, Tensor,                  // blockTable, queryPaddingSize, kvPaddingSize
    Tensor, Tensor, Tensor, Tensor,          // keyAntiquantScale, -Offset, valueAntiquantScale, -Offset
    Tensor, Tensor, Integers,                // keySharedPrefix, valueSharedPrefix, actualSharedPrefixLen
    Tensor, Tensor, Tensor,                  // queryRope, keyRope, keyRopeAntiquantScale
    int64_t, double, int64_t, int64_t,       // numHeads, scaleValue, preTokens, nextTokens
    Text, int64_t, int64_t, int64_t,         // inputLayout, numKeyValueHeads, sparseMode, innerPrecise
    int64_t, int64_t, bool,                  // blockSize, antiquantMode, softmaxLseFlag
    int64_t, int64_t,                        // keyAntiquantMode, valueAntiquantMode
    Tensor, Tensor>                          // attentionOut, softmaxLse
    kInfer{"aclnnFusedInferAttentionScoreV3"};
const npu::Operator<
    Tensor, Tensors, Tensors,
    Tensor, Tensor, Integers, Integers,
    Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor,
    Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Integers,
    Tensor, Tensor, Tensor,
    Tensor, Tensor,                          // dequantScaleQuery, learnableSink
    int64_t, double, int64_t, int64_t,
    Text, int64_t, int64_t, int64_t,
    int64_t, int64_t, bool,
    int64_t, int64_t, int64_t,               // ..., queryQuantMode
    Tensor, Tensor>
    kInferWithSinks{"aclnnFusedInferAttentionScoreV4"};
const npu::Operator<
    Tensor, Tensor, Tensor,                  // query, key, value
    Tensor, Tensor, Tensor, Tensor,          // realShift, dropMask, paddingMask, attenMask
    Integers, double, double,                // prefix, scaleValue, keepProb
    int64_t, int64_t, int64_t,               // preTokens, nextTokens, headNum
    Text, int64_t, int64_t,                  // inputLayout, innerPrecise, sparseMode
    Tensor, Tensor, Tensor, Tensor>          // softmaxMax, softmaxSum, softmaxOut, attentionOut
    kFlash{"aclnnFlashAttentionScore"};
// clang-format on

constexpr int64_t kAllTokens = std::numeric_limits<int32_t>::max();
// Side of the triangular mask that the causal modes want, whatever the lengths are.
constexpr int64_t kTriangle = 2048;

enum SparseMode : int64_t { kMaskOnly = 0, kCausalAtTheEnd = 3, kBand = 4 };

// How a call hides keys.
struct Hiding {
  at::Tensor mask;  // true where hidden, or undefined
  int64_t mode = kMaskOnly;
  int64_t before = kAllTokens;
  int64_t after = kAllTokens;

  // Whether there may be queries that see no key.
  bool may_hide_all() const { return mode == kMaskOnly && mask.defined(); }
};

enum Precision : int64_t { kPrecise = 0, kPreciseAndRepaired = 2 };

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

Refusal refusal_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const OptionalTensor& mask, bool is_causal, int64_t sliding_window, double softcap,
                   const OptionalTensor& sinks) {
  const bool is_half = query.scalar_type() != at::kFloat;
  const int64_t head_dim = query.size(3);
  if (query.numel() == 0 || key.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (softcap != 0.0) return "a softcap";
  if (value.size(3) != head_dim) return "values of another size than keys";
  if (head_dim % 16 != 0) return "a head size that is no multiple of 16";
  if (head_dim > (is_half ? 512 : 768)) return "a head size beyond the operator's";
  if (query.size(1) > 256) return "more than 256 heads";
  if (given(mask) && mask->scalar_type() != at::kBool) return "a float mask";
  if (given(mask) && mask->size(1) != 1) return "a mask for each head";
  if (given(mask) && is_causal) return "a mask beside causality";
  if (sliding_window > 0 && query.size(2) == 1) return "a window in decode";
  if (is_causal && query.size(2) > key.size(2)) return "more queries than keys";
  if (given(sinks)) {
    if (!is_half) return "sinks in fp32";
    if (sinks->dim() != 1) return "a sink for each query";
    if (sinks->scalar_type() != query.scalar_type()) return "sinks of another dtype than the queries";
    if (head_dim != 64 && head_dim != 128) return "sinks at this head size";
    if (!kInferWithSinks.available()) return "not in this CANN";
  }
  return (is_half ? kInfer.available() : kFlash.available()) ? kServed : "not in this CANN";
}

// True above the diagonal; undefined where none can be made.
at::Tensor triangle(const at::Device& device) {
  static auto* kept = new npu::Kept<int>;
  return kept->get(device.index(), [&] {
    return at::triu(at::ones({kTriangle, kTriangle}, at::TensorOptions().device(device).dtype(at::kBool)), 1);
  });
}

Hiding hiding(const at::Tensor& query, const at::Tensor& key, const OptionalTensor& mask, bool is_causal,
              int64_t sliding_window) {
  Hiding how;
  if (given(mask)) {
    const int64_t q_len = query.size(2);
    // Of several queries the operator takes one mask for all sequences, of one query it does not.
    const int64_t batch = q_len == 1 ? query.size(0) : mask->size(0);
    how.mask = at::logical_not(mask->expand({batch, 1, q_len, key.size(2)})).contiguous();
  } else if (is_causal && query.size(2) > 1) {
    how.mask = triangle(query.device());
    how.mode = sliding_window > 0 ? kBand : kCausalAtTheEnd;
    if (sliding_window > 0) how.before = sliding_window - 1;
    how.after = 0;
  }
  return how;
}

std::string kind(const at::Tensor& query, const Hiding& how, const OptionalTensor& sinks) {
  std::string text = npu::dtype_name(query.scalar_type());
  text += query.size(2) == 1 ? " decode" : " prefill";
  if (how.mode == kMaskOnly && how.mask.defined()) text += " mask";
  if (how.mode == kMaskOnly && !how.mask.defined() && query.size(2) > 1) text += " full";
  if (how.mode == kBand) text += " window";
  if (given(sinks)) text += " sinks";
  return text;
}

// Query, keys and values as the operator reads them, and where it writes, in `layout`.
struct Operands {
  at::Tensor query, key, value, out;
  at::Tensor result;  // out as [B, S, N, D]
  Text layout;
};

Operands operands(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const auto by_position = [](const at::Tensor& x) { return x.transpose(1, 2); };
  at::Tensor out = at::empty({query.size(0), query.size(2), query.size(1), value.size(3)}, query.options());
  if (query.size(2) > 1 && by_position(query).is_contiguous() && by_position(key).is_contiguous() &&
      by_position(value).is_contiguous()) {
    return {by_position(query), by_position(key), by_position(value), out, out, "BSND"};
  }
  // One query: [B, N, 1, D] and [B, 1, N, D] are the same memory, and the operator knows no mixed layout there.
  const bool is_one = query.size(2) == 1;
  const Text layout = is_one ? "BNSD" : "BNSD_BSND";
  return {
      query.contiguous(), key.contiguous(), value.contiguous(), is_one ? by_position(out) : out, out, layout};
}

void infer(const Operands& on, const Hiding& how, int64_t heads, int64_t kv_heads, double scaling,
           Precision precise, const OptionalTensor& sinks) {
  const at::Tensor none;
  // Asked for or not, the operator wants a place for the logarithms of the sums.
  const at::Tensor lse = at::empty({1}, on.query.options().dtype(at::kFloat));
  const std::vector<at::Tensor> keys{on.key}, values{on.value};
  if (given(sinks)) {
    kInferWithSinks(on.query, keys, values, none, how.mask, {}, {}, none, none, none, none, none, none, none,
                    none, none, none, none, none, none, none, none, none, {}, none, none, none, none, *sinks,
                    heads, scaling, how.before, how.after, on.layout, kv_heads, how.mode, precise, 0, 0,
                    false, 0, 0, 0, on.out, lse);
    return;
  }
  kInfer(on.query, keys, values, none, how.mask, {}, {}, none, none, none, none, none, none, none, none, none,
         none, none, none, none, none, none, none, {}, none, none, none, heads, scaling, how.before,
         how.after, on.layout, kv_heads, how.mode, precise, 0, 0, false, 0, 0, on.out, lse);
}

// The operator for training, which takes fp32. No mixed layout: the result of BNSD is put in order behind it.
at::Tensor flash(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Hiding& how,
                 double scaling) {
  const at::Tensor none;
  const at::Tensor q = query.contiguous();
  const at::TensorOptions fp32 = q.options().dtype(at::kFloat);
  const at::Tensor largest = at::empty({q.size(0), q.size(1), q.size(2), 8}, fp32);
  const at::Tensor sum = at::empty(largest.sizes(), fp32);
  const at::Tensor out = at::empty(q.sizes(), q.options());
  kFlash(q, key.contiguous(), value.contiguous(), none, none, none, how.mask, {}, scaling, 1.0, how.before,
         how.after, q.size(1), "BNSD", how.may_hide_all() ? kPreciseAndRepaired : kPrecise, how.mode, largest,
         sum, at::empty({0}, q.options()), out);
  return out.transpose(1, 2).contiguous();
}

at::Tensor attention_npu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const OptionalTensor& mask, double scaling, bool is_causal, int64_t sliding_window,
                         double softcap, const OptionalTensor& sinks) {
  check_attention(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  const c10::DeviceGuard guard(query.device());
  Refusal refusal = refusal_of(query, key, value, mask, is_causal, sliding_window, softcap, sinks);
  if (refusal == kServed && is_causal && query.size(2) > 1 && !triangle(query.device()).defined()) {
    refusal = "no causal mask can be made while a graph is captured";
  }
  Hiding how;
  if (refusal == kServed) {
    how = hiding(query, key, mask, is_causal, sliding_window);
    refusal = npu::unverified(kOp, kind(query, how, sinks));
  }
  if (refusal != kServed) {
    return fall_back<decltype(attention_npu)>(kOp, refusal)
        .call(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  }
  npu::count_served(kOp);
  if (query.scalar_type() == at::kFloat) return flash(query, key, value, how, scaling);
  const Operands on = operands(query, key, value);
  const OptionalTensor logits = given(sinks) ? OptionalTensor(sinks->contiguous()) : OptionalTensor();
  const int64_t head_dim = query.size(3);
  const bool can_repair = query.size(2) > 1 || head_dim == 64 || head_dim == 128;
  const Precision precise = how.may_hide_all() && can_repair ? kPreciseAndRepaired : kPrecise;
  infer(on, how, query.size(1), key.size(1), scaling, precise, logits);
  if (how.may_hide_all() && !can_repair) {
    // [B, 1, q_len] -> [B, q_len, 1, 1], beside [B, q_len, N, D].
    on.result.mul_(mask->any(-1).transpose(1, 2).unsqueeze(-1));
  }
  return on.result;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("attention", &liteboost::attention_npu); }
