// FusedInferAttentionScoreV3 over keys and values of 8 bits.
//
// Of one query it takes a scale for each token and head, [B, K, S]. Of several, at most 16 and in bf16, it takes but
// one for each token, [B, S]: each head of the keys is given as a sequence of its own, with the query heads that read
// it, so B * K sequences of one head; nothing is copied for that. Keys within a cache are read where they lie, as those
// of attention are. Source: aclnnFusedInferAttentionScoreV3, keyAntiquantMode and valueAntiquantMode.
#include <ATen/ops/empty.h>

#include "int8_attention/int8_attention_npu.h"
#include "npu/graph_tasks.h"

namespace liteboost {
namespace {

using npu::kServed;
using npu::Refusal;

enum ScaledBy : int64_t { kToken = 1, kTokenAndHead = 3 };
constexpr int64_t kMostQueries = 16, kMostSequences = 65536, kAligned = 32;

// A call in which every head of the keys is a sequence.
Call one_key_head_each(const Call& call) {
  const at::Tensor &query = call.query, &key = call.keys.key;
  const int64_t batch = key.size(0), kv_heads = key.size(1), group = query.size(1) / kv_heads;
  const auto apart = [&](const at::Tensor& x) {
    return x.reshape({batch * kv_heads, 1, x.size(2), x.size(3)});
  };
  Call made = call;
  made.query = query.reshape({batch * kv_heads, group, query.size(2), query.size(3)});
  made.keys = {apart(key), apart(call.keys.value), call.keys.first};
  if (call.mask.defined() && call.mask.size(0) > 1) {
    const at::Tensor spread = call.mask.expand({-1, kv_heads, -1, -1});
    made.mask = spread.reshape({batch * kv_heads, 1, spread.size(2), spread.size(3)});
  }
  return made;
}

Keys one_head_each(const Keys& scales) {
  const auto apart = [](const at::Tensor& x) { return x.reshape({-1, 1, x.size(2), 1}); };
  return {apart(scales.key), apart(scales.value), scales.first};
}

// Where the operator finds them without a copy: both, or neither.
struct Reading {
  std::optional<Cache> integers, scales;
  int64_t before = 0;  // positions that are read before those that count, which a mask hides

  // As of `Plan`.
  bool has_lengths() const {
    return integers && (integers->after > 0 || integers->at_end || npu::tells_lengths());
  }
};

// `keys` from `back` positions before them on, of the same memory.
Keys from_before(const Keys& keys, int64_t back) {
  const auto longer = [&](const at::Tensor& x) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes[2] += back;
    return x.as_strided(sizes, x.strides(), x.storage_offset() - back * x.stride(2));
  };
  return {longer(keys.key), longer(keys.value)};
}

// How many positions before keys, of a sliding window, their scales lie at an address that the operator loads from: it is
// told how many positions count from the end, or the mask hides the others. 0 where they lie so, or not at all.
int64_t misaligned(const Keys& scales) {
  constexpr int64_t kAlignment = 32;  // in bytes, as of `contiguous_from`
  const int64_t step = kAlignment / static_cast<int64_t>(scales.key.itemsize());
  const bool is_dense = scales.key.stride(2) == 1 && scales.value.stride(2) == 1;
  const int64_t back = scales.key.storage_offset() % step;
  return is_dense && scales.value.storage_offset() % step == back ? back : 0;
}

Reading reading_of(const Call& call, const Keys& scales, bool within_cache) {
  // Of several queries the operator wants masks for the whole cache: more to write than there is to copy.
  if (call.mask.defined() && !call.is_one()) within_cache = false;
  const bool from_end = within_cache && call.is_one() && !call.mask.defined();
  const int64_t back = within_cache && call.is_one() && call.keys.first == 0 ? misaligned(scales) : 0;
  const auto has_more = [&](const at::Tensor& x) { return x.storage_offset() >= back * x.stride(2); };
  const bool is_earlier = back > 0 && has_more(call.keys.key) && has_more(call.keys.value);
  const auto in_place = [&](const Keys& keys) {
    if (!is_earlier) return cache_of(keys, Order::heads_first, from_end);
    std::optional<Cache> made = cache_of(from_before(keys, back), Order::heads_first, false);
    if (made) made->at_end = !call.mask.defined();
    return made;
  };
  Reading found{in_place(call.keys), in_place(scales), is_earlier && call.mask.defined() ? back : 0};
  const bool is_alike = found.integers && found.scales && found.integers->after == found.scales->after &&
                        found.integers->at_end == found.scales->at_end &&
                        found.integers->key.size(2) == found.scales->key.size(2);
  if (!is_alike || (found.has_lengths() && !within_cache)) return {};
  return found;
}

}  // namespace

Refusal integers_refusal(const Call& call) {
  const Refusal refusal = refusal_of(call);
  if (refusal != kServed) return refusal;
  if (!call.is_half()) return "fp32";
  if (call.hides() == Hides::shift) return "a float mask";
  if (given(call.sinks)) return "sinks";
  if (call.has_narrow_values()) return "values of another size than keys";
  if (call.query.size(3) % kAligned != 0) return "a head size that is no multiple of 32";
  if (call.is_one()) return kServed;
  if (call.query.size(2) > kMostQueries) return "more than 16 queries";
  if (call.query.scalar_type() != at::kBFloat16) return "several queries in fp16";
  if (call.keys.key.size(0) * call.keys.key.size(1) > kMostSequences) return "more than 65536 heads of keys";
  const bool has_triangle = !call.is_diagonal() || triangle(call.query.device()).defined();
  return has_triangle ? kServed : "no causal mask can be made while a graph is captured";
}

std::string kind_of_integers(const Call& asked, const Keys& scales, bool within_cache) {
  std::string text = npu::dtype_name(asked.query.scalar_type());
  text += asked.is_one() ? " decode" : " prefill";
  if (asked.hides() == Hides::nothing && !asked.is_one()) text += " full";
  if (asked.hides() == Hides::window) text += " window";
  if (asked.hides() == Hides::mask) {
    text += " mask";
    if (asked.is_causal) text += asked.window > 0 ? " window" : " causal";
  }
  const Call call = asked.is_one() ? asked : one_key_head_each(asked);
  const Reading reading = reading_of(call, asked.is_one() ? scales : one_head_each(scales), within_cache);
  if (reading.has_lengths()) text += reading.integers->at_end ? " window" : " cache";
  return text + sizes_kind(asked.query.size(3), asked.keys.length());
}

at::Tensor attend_integers(const Call& asked, const Keys& asked_scales, bool within_cache) {
  const bool is_one = asked.is_one();
  const Call call = is_one ? asked : one_key_head_each(asked);
  const Keys scales = is_one ? asked_scales : one_head_each(asked_scales);
  const Reading reading = reading_of(call, scales, within_cache);
  const auto dense = [](const Keys& keys, const at::Tensor& x) { return keys.counting(x).contiguous(); };
  npu::check_reads_in_place(reading.integers && call.query.is_contiguous(), "integers of attention");
  Operands on;
  on.query = call.query.contiguous();
  on.key = reading.integers ? reading.integers->key : dense(call.keys, call.keys.key);
  on.value = reading.integers ? reading.integers->value : dense(call.keys, call.keys.value);
  on.key_scales = reading.scales ? reading.scales->key : dense(scales, scales.key);
  on.value_scales = reading.scales ? reading.scales->value : dense(scales, scales.value);
  on.scaled_by = is_one ? kTokenAndHead : kToken;
  for (at::Tensor* each : {&on.key_scales, &on.value_scales}) {
    *each = is_one ? each->squeeze(3) : each->view({each->size(0), each->size(2)});
  }
  on.layout = "BNSD";
  on.out = at::empty(on.query.sizes(), on.query.options());
  at::Tensor after;
  if (reading.has_lengths()) {
    on.length = call.keys.length() + reading.before;
    if (reading.integers->at_end) after = counted_from_end(reading.integers->after, on.query.device());
  }
  const Hiding how = hiding(call, on.key.size(2), reading.before);
  // Of one query over integers the operator repairs no row.
  const bool is_masked = call.hides() == Hides::mask, can_repair = !is_one;
  at::Tensor sees_any;  // [B or 1, 1, 1, 1]
  if (is_masked && !can_repair) {
    sees_any =
        npu::filled_in_renewal(key_of_mask(call, 0), {call.mask.size(0), 1, 1, 1}, call.mask.options(),
                               [&] { return hidden_by_mask(call).all(-1).logical_not().unsqueeze(-1); });
  }
  infer(call, on, how, after, is_masked && can_repair ? kPreciseAndRepaired : kPrecise, false);
  if (sees_any.defined() && !npu::is_renewing()) on.out.mul_(sees_any);
  const at::Tensor heads = on.out.view(asked.query.sizes());
  return heads.transpose(1, 2).contiguous();  // of one query the same memory
}

}  // namespace liteboost
