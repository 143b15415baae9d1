// PromptFlashAttention and IncreFlashAttention, in fp16.
//
// The first knows neither causality nor windows: what is hidden is a mask, square, of as many queries as keys. Prompts
// are padded to whole blocks behind, where causality or the mask hides the keys. A hidden logit has 10000 taken off, so
// a row that sees nothing is no zero: its result is multiplied. Source: GetBasicShape310P of
// prompt_flash_attention_tiling.cpp and CheckInputFormatAndLimits of incre_flash_attention_tiling_check.cpp
// (ops-transformer, 8.5.0 to 9.1.0). The documents allow as many key heads as query heads only, tilings and kernels
// fewer: the comparison with the reference decides.
#include "attention/attention_npu_310p.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>

#include "npu/aclnn.h"
#include "npu/graph_tasks.h"

namespace liteboost {
namespace {

using npu::Integers;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using npu::Tensors;
using npu::Text;

// clang-format off
const npu::Operator<
    Tensor, Tensor, Tensor,                  // query, key, value
    Tensor, Tensor, Integers, Integers,      // pseShift, attenMask, actualSeqLengths, actualSeqLengthsKv
    Tensor, Tensor, Tensor, Tensor, Tensor,  // deqScale1, quantScale1, deqScale2, quantScale2, quantOffset2
    int64_t, double, int64_t, int64_t,       // numHeads, scaleValue, preTokens, nextTokens
    Text, int64_t, int64_t, int64_t,         // inputLayout, numKeyValueHeads, sparseMode, innerPrecise
    Tensor>                                  // attentionOut
    kPrompt{"aclnnPromptFlashAttentionV3"};
const npu::Operator<
    Tensor, Tensors, Tensors,                // query, key, value
    Tensor, Tensor, Integers,                // pseShift, attenMask, actualSeqLengths
    Tensor, Tensor, Tensor, Tensor, Tensor,  // dequantScale1, quantScale1, dequantScale2, quantScale2, quantOffset2
    Tensor, Tensor, Tensor, Tensor,          // antiquantScale, antiquantOffset, blocktable, kvPaddingSize
    int64_t, double, Text, int64_t,          // numHeads, scaleValue, inputLayout, numKeyValueHeads
    int64_t, int64_t, Tensor>                // blockSize, innerPrecise, attentionOut
    kIncremental{"aclnnIncreFlashAttentionV4"};
// clang-format on

constexpr int64_t kPrecise = 0;
constexpr int64_t kBlock = 32;  // rows of a mask are read in blocks of this size
constexpr int64_t kTriangle = 2048;

Refusal refusal_of_one(const Call& call, int64_t group) {
  if (call.query.size(0) > 256) return "a batch of more than 256 on a 310P";
  if (group > 1 && (group > 32 || call.query.size(3) > 128)) {
    return "more than 32 query heads for a key head, or heads of more than 128, on a 310P";
  }
  return kIncremental.available() ? kServed : "not in this CANN";
}

Refusal refusal_of_prompt(const Call& call, int64_t group) {
  if (call.query.size(0) > 128) return "a batch of more than 128 on a 310P";
  if (group > 64) return "more than 64 query heads for a key head";
  if (call.hides() != Hides::nothing && call.query.size(2) != call.keys.length()) {
    return "queries behind earlier keys on a 310P";
  }
  return kPrompt.available() ? kServed : "not in this CANN";
}

int64_t whole_blocks(int64_t length) { return (length + kBlock - 1) / kBlock * kBlock; }

// x with rows of 0 behind its own, [B, N, side, D].
at::Tensor padded(const at::Tensor& x, int64_t side) {
  const int64_t behind = side - x.size(2);
  return behind > 0 ? at::constant_pad_nd(x, {0, 0, 0, behind}) : x;
}

// What a call hides, [B or 1, 1, q_len, q_len], true where hidden.
at::Tensor hidden_of_prompt(const Call& call) {
  if (call.mask.defined()) return hidden_by_mask(call);
  const int64_t length = call.query.size(2);
  Call alike = call;
  alike.mask = at::ones({1, 1, length, length}, call.query.options().dtype(at::kBool));
  return hidden_by_mask(alike);
}

at::Tensor attend_prompt(const Call& call) {
  const at::Tensor none, &query = call.query;
  const int64_t length = query.size(2), heads = query.size(1), kv_heads = call.keys.key.size(1);
  const bool hides = call.hides() != Hides::nothing;
  const int64_t side = hides ? whole_blocks(length) : length;
  const auto dense = [&](const at::Tensor& x) { return (hides ? padded(x, side) : x).contiguous(); };
  const at::Tensor out = at::empty({query.size(0), side, heads, query.size(3)}, query.options());
  at::Tensor mask, hidden;
  if (call.hides() == Hides::causality && side <= kTriangle) {
    mask = triangle(query.device());
  } else if (hides) {
    hidden = hidden_of_prompt(call);
    mask = at::constant_pad_nd(hidden, {0, side - length, 0, side - length}, true).contiguous();
  }
  kPrompt(dense(query), dense(call.keys.counting(call.keys.key)), dense(call.keys.counting(call.keys.value)),
          none, mask, {}, {}, none, none, none, none, none, heads, call.scaling, kAllTokens,
          hides && call.is_causal ? 0 : kAllTokens, "BNSD_BSND", kv_heads, kMaskOnly, kPrecise, out);
  at::Tensor result = out.narrow(1, 0, length).contiguous();
  if (call.mask.defined()) result.mul_(hidden.all(-1).logical_not().transpose(1, 2).unsqueeze(-1));
  return result;
}

at::Tensor attend_one(const Call& call, const Plan& plan) {
  const at::Tensor none, &query = call.query;
  const at::Tensor result = at::empty({query.size(0), 1, query.size(1), query.size(3)}, query.options());
  const Operands on = operands(plan, query, call.keys, result);
  const std::vector<at::Tensor> keys{on.key}, values{on.value};
  const Integers lengths = on.length ? Integers(*on.length) : Integers();
  const Hiding how = hiding(call, on.key.size(2));
  kIncremental(on.query, keys, values, none, how.mask, lengths, none, none, none, none, none, none, none,
               none, none, query.size(1), call.scaling, on.layout, call.keys.key.size(1), 0, kPrecise,
               on.out);
  if (call.mask.defined()) result.mul_(how.hidden.all(-1).logical_not().transpose(1, 2).unsqueeze(-1));
  return result;
}

}  // namespace

Refusal refusal_on_310p(const Call& call) {
  constexpr int64_t kLongest = 65536;
  const at::Tensor &query = call.query, &key = call.keys.key;
  if (query.numel() == 0 || key.numel() == 0) return "no elements";
  if (query.scalar_type() != at::kHalf) return "not fp16 on a 310P";
  if (call.softcap != 0.0) return "a softcap";
  if (given(call.sinks)) return "sinks on a 310P";
  if (call.has_narrow_values()) return "values of another size than keys on a 310P";
  if (query.size(3) % 16 != 0) return "a head size that is no multiple of 16";
  if (query.size(3) > 512) return "a head size beyond the operator's";
  if (query.size(1) > 256) return "more than 256 heads";
  if (call.hides() == Hides::mask && call.mask.size(1) != 1) return "a mask for each head";
  if (call.hides() == Hides::shift) return "a float mask on a 310P";
  if (call.is_causal && query.size(2) > key.size(2)) return "more queries than keys";
  if (std::max(query.size(2), key.size(2)) > kLongest) return "more than 65536 positions on a 310P";
  const int64_t group = query.size(1) / key.size(1);
  return call.is_one() ? refusal_of_one(call, group) : refusal_of_prompt(call, group);
}

Plan plan_on_310p(const Call& call, bool within_cache) {
  // Heads come first: with fewer key heads than query heads the operator for one query takes no other order.
  Plan made{Order::heads_first, cache_of(call.keys, Order::heads_first, false), 0};
  if (!call.is_one() || (made.has_lengths() && !within_cache)) made.cache.reset();
  return made;
}

at::Tensor attend_on_310p(const Call& call, const Plan& plan) {
  npu::check_reads_in_place(false, "attention on a 310P");
  return call.is_one() ? attend_one(call, plan) : attend_prompt(call);
}

}  // namespace liteboost
