// A call of attention as the aclnn operators see it, and how they are told what hides keys from queries.
//
// A bool mask becomes the operator's, true where hidden. A float mask becomes what it adds to the logits (pseShift),
// one for each head. How the operators treat infinities there is not documented, so there are none: -inf becomes
// kHidden and what is lower than kLowest becomes that, far enough apart that beside any other key neither counts.
// Differences among entries below kLowest are lost.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/triu.h>

#include <optional>

#include "attention/attention_npu_infer.h"
#include "attention/attention_npu_operands.h"
#include "npu/aclnn.h"
#include "npu/graph_tasks.h"
#include "npu/kept.h"

namespace liteboost {

enum class Hides { nothing, causality, window, mask, shift };

// A call, without what has no effect on it.
struct Call {
  at::Tensor query;
  Keys keys;
  at::Tensor mask;  // of the keys that count, or undefined
  double scaling;
  bool is_causal;
  int64_t window;  // 0: none
  double softcap;
  OptionalTensor sinks;

  bool is_half() const { return query.scalar_type() != at::kFloat; }
  bool is_one() const { return query.size(2) == 1; }
  bool has_narrow_values() const { return keys.value.size(3) != query.size(3); }
  Hides hides() const {
    if (mask.defined()) return mask.scalar_type() == at::kBool ? Hides::mask : Hides::shift;
    if (!is_causal) return Hides::nothing;
    return window > 0 ? Hides::window : Hides::causality;
  }
  // Whether the operator for inference can be asked to give 0 where a mask hides every key of a query.
  bool can_repair() const { return !is_one() || query.size(3) == 64 || query.size(3) == 128; }
  // Whether the triangular mask is needed.
  bool is_diagonal() const { return hides() == Hides::causality || hides() == Hides::window; }
  // Whether there are sinks that the operator does not take; from CANN 9.0 on it takes bf16 only, on a 950 fp16 too.
  bool has_late_sinks() const {
    if (!given(sinks)) return false;
    const bool takes_size = query.size(3) == 64 || query.size(3) == 128;
    const bool takes_half = npu::soc() == npu::Soc::a950;
    const bool takes_dtype = sinks->scalar_type() == query.scalar_type() &&
                             (query.scalar_type() == at::kBFloat16 || (takes_half && is_half()));
    return !takes_size || sinks->dim() != 1 || !takes_dtype || hides() == Hides::shift;
  }
};

// The only query of a decode step sees the last keys of its window and no others: these are the keys of the call.
inline Call call_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const OptionalTensor& mask, double scaling, bool is_causal, int64_t sliding_window,
                    double softcap, const OptionalTensor& sinks) {
  const int64_t kv_len = key.size(2);
  const bool is_one = query.size(2) == 1;
  const int64_t window = sliding_window < kv_len ? sliding_window : 0;
  Call call{query,   {key, value}, given(mask) ? *mask : at::Tensor(), scaling, is_causal && !is_one, window,
            softcap, sinks};
  if (is_one && window > 0) {
    call.keys.first = kv_len - window;
    call.window = 0;
    if (call.mask.defined() && call.mask.size(3) > 1) {
      call.mask = call.mask.narrow(3, call.keys.first, window);
    }
  }
  return call;
}

using npu::kAllTokens;

enum SparseMode : int64_t { kMaskOnly = 0, kCausalAtTheEnd = 3, kBand = 4 };

// How the operators are told which keys are hidden.
struct Hiding {
  at::Tensor mask;    // true where hidden, or undefined
  at::Tensor hidden;  // the same of a mask of the call, [B or 1, N or 1, q_len, kv_len]
  at::Tensor shift;   // what is added to the logits, or undefined
  int64_t mode = kMaskOnly;
  int64_t before = kAllTokens;
  int64_t after = kAllTokens;
};

// True above the diagonal, of the size that the causal modes want whatever the lengths are; undefined where none can
// be made.
inline at::Tensor triangle(const at::Device& device) {
  constexpr int64_t kSide = 2048;
  static auto* kept = new npu::Kept<int>;
  return kept->get(device.index(), [&] {
    return at::triu(at::ones({kSide, kSide}, at::TensorOptions().device(device).dtype(at::kBool)), 1);
  });
}

// What the mask of a call, and causality beside it, hide: [B or 1, N or 1, q_len, kv_len].
inline at::Tensor hidden_by_mask(const Call& call) {
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  const bool is_bool = call.hides() == Hides::mask;
  const int64_t q_len = call.query.size(2), kv_len = call.keys.length(), diagonal = kv_len - q_len;
  if (!call.is_causal) {
    const at::Tensor hidden = is_bool ? at::logical_not(call.mask) : call.mask.eq(kNever);
    return hidden.expand({-1, -1, q_len, kv_len});
  }
  const at::Tensor seen = is_bool ? call.mask : call.mask.gt(kNever);
  at::Tensor both = seen.expand({-1, -1, q_len, kv_len}).tril(diagonal);
  if (call.window > 0) both = both.triu(diagonal - call.window + 1);
  return at::logical_not(both);
}

// Bytes of the shift of a call, and how many it may be: it is made for each call and each head.
constexpr int64_t kMostShifted = int64_t{1} << 30;
inline int64_t shift_bytes(const Call& call) {
  return call.mask.size(0) * call.query.size(1) * call.query.size(2) * call.keys.length() *
         call.mask.itemsize();
}

// What a float mask adds, [B or 1, N, q_len, columns]; `columns` may be more than there are keys that count.
inline at::Tensor shift_of(const Call& call, const at::Tensor& hidden, int64_t columns) {
  const bool is_bf16 = call.mask.scalar_type() == at::kBFloat16;
  const double kLowest = is_bf16 ? -1e30 : -65472.0, kHidden = is_bf16 ? -2e30 : -65504.0;
  at::Tensor shift = at::clamp_min(call.mask.expand(hidden.sizes()), kLowest);
  shift.masked_fill_(hidden, kHidden);
  const int64_t behind = columns - call.keys.length();
  if (behind > 0) shift = at::constant_pad_nd(shift, {0, behind}, kHidden);
  return shift.expand({-1, call.query.size(1), -1, -1}).contiguous();
}

// `hidden` of the keys of a call with those hidden that are `before` them and behind, `columns` in all.
inline at::Tensor hidden_around(const at::Tensor& hidden, int64_t before, int64_t columns) {
  const int64_t behind = columns - before - hidden.size(3);
  return before > 0 || behind > 0 ? at::constant_pad_nd(hidden, {before, behind}, true) : hidden;
}

// The mask of a bool mask as one query takes it: [B, 1, 1, columns], true where hidden.
inline at::Tensor mask_of_one(const Call& call, int64_t before, int64_t columns) {
  const at::Tensor whole = hidden_around(hidden_by_mask(call), before, columns);
  return whole.expand({call.query.size(0), -1, -1, -1}).contiguous();
}

// What tells the mask of a call from others of the same step.
inline std::vector<int64_t> key_of_mask(const Call& call, int64_t columns) {
  std::vector<int64_t> key{reinterpret_cast<int64_t>(call.mask.const_data_ptr()), call.query.size(0),
                           columns};
  key.insert(key.end(), call.mask.sizes().begin(), call.mask.sizes().end());
  key.insert(key.end(), call.mask.strides().begin(), call.mask.strides().end());
  return key;
}

// The same, once for all attentions of a renewal that are given the same mask.
inline at::Tensor mask_for_renewal(const Call& call, int64_t before, int64_t columns) {
  npu::check_reads_in_place(call.is_one() && call.can_repair(), "rows that a mask hides");
  std::vector<int64_t> key = key_of_mask(call, columns);
  key.push_back(before);
  return npu::made_for_renewal(key, {call.query.size(0), 1, 1, columns}, call.mask.options(),
                               [&] { return mask_of_one(call, before, columns); });
}

// `columns`: positions of the keys as the operator is given them, of which `before` are before those of the call; a mask
// hides these.
inline Hiding hiding(const Call& call, int64_t columns, int64_t before = 0) {
  Hiding how;
  switch (call.hides()) {
    case Hides::nothing:
      break;
    case Hides::mask: {
      if (npu::is_renewable()) {
        how.mask = mask_for_renewal(call, before, columns);
        break;
      }
      how.hidden = hidden_by_mask(call);
      // Of several queries the operator takes one mask for all sequences, of one query it does not.
      const at::Tensor whole = hidden_around(how.hidden, before, columns);
      how.mask = whole.expand({call.is_one() ? call.query.size(0) : -1, -1, -1, -1}).contiguous();
      break;
    }
    case Hides::shift:
      npu::check_reads_in_place(false, "masks that are added");
      how.hidden = hidden_by_mask(call);
      how.shift = shift_of(call, how.hidden, columns);
      break;
    case Hides::causality:
    case Hides::window:
      how.mask = triangle(call.query.device());
      how.mode = call.window > 0 ? kBand : kCausalAtTheEnd;
      if (call.window > 0) how.before = call.window - 1;
      how.after = 0;
  }
  return how;
}

}  // namespace liteboost
