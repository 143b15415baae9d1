// Attention as one aclnn operator: FusedInferAttentionScore for bf16 and fp16, FlashAttentionScore for fp32; on a 310P
// those of attention_npu_310p.cpp.
//
// attention_npu_operands.h: how query, keys and values become what they read; attention_npu_hiding.h: masks.
// Queries that see no key give 0: the operators are asked to repair such rows where there is a bool mask. Where one
// does not take that (one query of a head size that is neither 64 nor 128), and with masks that are added, the
// result is multiplied. So it is with sinks that the operator does not take ("late"): their share of the softmax
// follows from the logarithm of the sum of the others, which it returns.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sigmoid.h>
#include <torch/library.h>

#include "attention/attention_checks.h"
#include "attention/attention_npu_310p.h"
#include "attention/attention_npu_hiding.h"
#include "attention/attention_npu_infer.h"
#include "attention/attention_npu_launch.h"
#include "attention/attention_npu_operands.h"
#include "npu/aclnn.h"
#include "npu/graph_tasks.h"
#include "npu/kept.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::Integers;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using npu::Text;
constexpr const char* kOp = "attention";

// clang-format off
const npu::Operator<
    Tensor, Tensor, Tensor,                  // query, key, value
    Tensor, Tensor, Tensor, Tensor,          // realShift, dropMask, paddingMask, attenMask
    Integers, double, double,                // prefix, scaleValue, keepProb
    int64_t, int64_t, int64_t,               // preTokens, nextTokens, headNum
    Text, int64_t, int64_t,                  // inputLayout, innerPrecise, sparseMode
    Tensor, Tensor, Tensor, Tensor>          // softmaxMax, softmaxSum, softmaxOut, attentionOut
    kFlash{"aclnnFlashAttentionScore"};
// clang-format on

}  // namespace

Refusal refusal_of(const Call& call) {
  const at::Tensor &query = call.query, &key = call.keys.key;
  const int64_t head_dim = query.size(3);
  if (query.numel() == 0 || key.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (call.softcap != 0.0) return "a softcap";
  if (call.has_narrow_values()) {
    if (!call.is_half()) return "values of another size than keys in fp32";
    if (head_dim != 192 || call.keys.value.size(3) != 128) return "values of another size than keys";
    if (call.hides() == Hides::shift) return "a float mask with values of another size than keys";
  }
  if (head_dim % 16 != 0) return "a head size that is no multiple of 16";
  if (head_dim > (call.is_half() ? 512 : 768)) return "a head size beyond the operator's";
  if (query.size(1) > 256) return "more than 256 heads";
  if (call.is_half() && query.size(1) > 64 * key.size(1)) return "more than 64 query heads for a key head";
  if (call.hides() == Hides::mask && call.mask.size(1) != 1) return "a mask for each head";
  if (call.hides() == Hides::shift) {
    if (!call.is_half()) return "a float mask in fp32";
    if (call.mask.scalar_type() != query.scalar_type())
      return "a float mask of another dtype than the queries";
    if (shift_bytes(call) > kMostShifted) return "a float mask that is too large for each head";
  }
  if (call.is_causal && query.size(2) > key.size(2)) return "more queries than keys";
  if (given(call.sinks)) {
    if (!call.is_half()) return "sinks in fp32";
  }
  if (call.is_half()) return npu::inference_refusal(given(call.sinks) && !call.has_late_sinks());
  return kFlash.available() ? kServed : "not in this CANN";
}

namespace {

bool is_on_310p() { return npu::soc() == npu::Soc::a310p; }

// How the operator is to read the tensors of a call; `within_cache` as of `plan`.
Plan plan_of(const Call& call, bool within_cache) {
  if (is_on_310p()) return plan_on_310p(call, within_cache);
  // Of several queries the operator wants masks for the whole cache: more to write than there is to copy.
  if (!call.is_half() || (call.mask.defined() && !call.is_one())) within_cache = false;
  // What is counted from the end goes with no mask and no sinks.
  const bool from_end = within_cache && call.is_one() && !call.mask.defined() && !given(call.sinks);
  return plan(call.query, call.keys, within_cache, from_end);
}

std::string kind(const Call& call, const Plan& plan) {
  std::string text = npu::dtype_name(call.query.scalar_type());
  text += call.is_one() ? " decode" : " prefill";
  switch (call.hides()) {
    case Hides::nothing:
      if (!call.is_one()) text += " full";
      break;
    case Hides::mask:
    case Hides::shift:
      text += call.hides() == Hides::mask ? " mask" : " bias";
      if (call.is_causal) text += call.window > 0 ? " window" : " causal";
      break;
    case Hides::causality:
      break;
    case Hides::window:
      text += " window";
  }
  if (given(call.sinks)) text += call.has_late_sinks() ? " late-sinks" : " sinks";
  if (plan.has_lengths()) text += plan.cache->at_end ? " window" : " cache";
  if (call.has_narrow_values()) text += " narrow-values";
  return text + sizes_kind(call.keys.value.size(3), call.keys.length());
}

}  // namespace

at::Tensor infer(const Call& call, const Operands& on, const Hiding& how, const at::Tensor& after,
                 Precision precise, bool want_lse) {
  // Asked for or not, the operator wants a place for them.
  const std::vector<int64_t> lse_sizes =
      want_lse ? std::vector<int64_t>{call.query.size(0), call.query.size(1), call.query.size(2), 1}
               : std::vector<int64_t>{1};
  const at::Tensor lse = at::empty(lse_sizes, on.query.options().dtype(at::kFloat));
  npu::Inference made;
  made.query = on.query;
  made.keys = {on.key};
  made.values = {on.value};
  made.heads = call.query.size(1);
  made.kv_heads = call.keys.key.size(1);
  made.scaling = call.scaling;
  made.layout = on.layout;
  if (on.length) made.kv_lengths = {*on.length};
  made.mask = how.mask;
  made.shift = how.shift;
  if (given(call.sinks) && !want_lse) made.sinks = call.sinks->contiguous();
  made.mode = how.mode;
  made.before = how.before;
  made.after = how.after;
  made.precise = precise;
  made.positions_behind = after;
  made.key_scales = on.key_scales;
  made.value_scales = on.value_scales;
  made.scaled_by = on.scaled_by;
  npu::launch_renewable(on.out, lse, [&](const at::Tensor& to, const at::Tensor& lse_to) {
    npu::infer(made, to, lse_to, want_lse);
  });
  return lse;
}

// How many positions behind those that count do not, as the operator reads it.
at::Tensor counted_from_end(int64_t after, const at::Device& device) {
  static auto* kept = new npu::Kept<int>;
  const auto options = at::TensorOptions().device(device).dtype(at::kLong);
  const at::Tensor zero =
      after == 0 ? kept->get(device.index(), [&] { return at::full({1}, 0, options); }) : at::Tensor();
  if (zero.defined()) return zero;
  return npu::made_for_renewal({after}, {1}, options, [&] { return at::full({1}, after, options); });
}

namespace {

at::Tensor fused(const Call& call, const Plan& plan) {
  const at::Tensor& query = call.query;
  const at::Tensor out =
      at::empty({query.size(0), query.size(2), query.size(1), call.keys.value.size(3)}, query.options());
  const Operands on = operands(plan, query, call.keys, out);
  const at::Tensor after = plan.has_lengths() && plan.cache->at_end
                               ? counted_from_end(plan.cache->after, query.device())
                               : at::Tensor();
  const bool can_repair = call.can_repair();
  const bool is_masked = call.hides() == Hides::mask;
  const int64_t columns = on.key.size(position_axis(plan.order));
  const Hiding how = hiding(call, columns);
  const at::Tensor lse = infer(call, on, how, after, is_masked && can_repair ? kPreciseAndRepaired : kPrecise,
                               call.has_late_sinks());
  // [B, N or 1, q_len] beside [B, q_len, N, D].
  const auto beside_out = [](const at::Tensor& x) { return x.transpose(1, 2).unsqueeze(-1); };
  if (call.has_late_sinks()) {
    npu::check_reads_in_place(false, "sinks");
    const at::Tensor sinks = call.sinks->dim() == 1 ? call.sinks->unsqueeze(-1) : *call.sinks;
    out.mul_(beside_out(at::sigmoid(lse.squeeze(-1).sub(sinks))));
  }
  // Late sinks have left nothing of a row whose every key is shifted down.
  if ((call.hides() == Hides::shift && !call.has_late_sinks()) || (is_masked && !can_repair)) {
    out.mul_(beside_out(how.hidden.all(-1).logical_not()));
  }
  return out;
}

// The operator for training, which takes fp32. No mixed layout: the result of BNSD is put in order behind it.
at::Tensor flash(const Call& call) {
  npu::check_reads_in_place(false, "keys and values of attention in fp32");
  const at::Tensor none;
  const Hiding how = hiding(call, call.keys.length());
  const at::Tensor q = call.query.contiguous();
  const at::Tensor key = call.keys.counting(call.keys.key).contiguous();
  const at::Tensor value = call.keys.counting(call.keys.value).contiguous();
  const at::TensorOptions fp32 = q.options().dtype(at::kFloat);
  const at::Tensor largest = at::empty({q.size(0), q.size(1), q.size(2), 8}, fp32);
  const at::Tensor sum = at::empty(largest.sizes(), fp32);
  const at::Tensor out = at::empty(q.sizes(), q.options());
  kFlash(q, key, value, none, none, none, how.mask, {}, call.scaling, 1.0, how.before, how.after, q.size(1),
         "BNSD", call.hides() == Hides::mask ? kPreciseAndRepaired : kPrecise, how.mode, largest, sum,
         at::empty({0}, q.options()), out);
  return out.transpose(1, 2).contiguous();
}

at::Tensor attention_npu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const OptionalTensor& mask, double scaling, bool is_causal, int64_t sliding_window,
                         double softcap, const OptionalTensor& sinks) {
  check_attention("attention", query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  const c10::DeviceGuard guard(query.device());
  const Call call = call_of(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  Refusal refusal = is_on_310p() ? refusal_on_310p(call) : refusal_of(call);
  if (refusal == kServed && call.is_diagonal() && !triangle(query.device()).defined()) {
    refusal = "no causal mask can be made while a graph is captured";
  }
  Plan plan;
  if (refusal == kServed) {
    plan = plan_of(call, true);
    refusal = npu::unverified(kOp, kind(call, plan));
    if (refusal != kServed && plan.has_lengths()) {  // the operator may be right of copies all the same
      plan = plan_of(call, false);
      refusal = npu::unverified(kOp, kind(call, plan));
    }
  }
  const auto reference = [&](Refusal why) {
    npu::check_reference(kOp, why);
    return fall_back<decltype(attention_npu)>(kOp, why).call(query, key, value, mask, scaling, is_causal,
                                                             sliding_window, softcap, sinks);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      kOp,
      [&]() -> at::Tensor {
        if (is_on_310p()) return attend_on_310p(call, plan);
        return call.is_half() ? fused(call, plan) : flash(call);
      },
      reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_long_from() -> int", [] { return liteboost::kLongFrom; });
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("attention", &liteboost::attention_npu); }
