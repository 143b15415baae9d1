// _npu_latent_attention: attention of one query a row to the compressed cache of multi-head latent attention, as
// FusedInferAttentionScore with queryRope and keyRope.
//
// Of keys of 512 and a rotated part of 64 the operator takes one key head and 1, 2, 4, ... 128 query heads, bf16 and fp16
// (CheckFeatureHeadDim and CheckFeatureAxisInfo of its tiling, CANN 8.5.0 to 9.1.0). Keys in no pages are read where they
// lie, as attention reads them. Shapes, dtypes, rounding: ops/latent_attention.py.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention/attention_npu_hiding.h"
#include "attention/attention_npu_infer.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;

constexpr const char* kOp = "_npu_latent_attention";
constexpr int64_t kRank = 512, kRope = 64, kMostHeads = 128;

struct Latent {
  at::Tensor query, query_rope;
  Keys keys;  // the latent rows and the rotated ones
  double scaling;
};

void check(const Latent& on) {
  const at::Tensor &q = on.query, &r = on.query_rope, &k = on.keys.key, &p = on.keys.value;
  const bool is_whole = q.dim() == 4 && r.dim() == 4 && k.dim() == 4 && p.dim() == 4 && q.size(2) == 1 &&
                        r.sizes().slice(0, 3) == q.sizes().slice(0, 3) && k.size(0) == q.size(0) &&
                        k.size(1) == 1 && k.size(3) == q.size(3) && p.size(3) == r.size(3) &&
                        p.sizes().slice(0, 3) == k.sizes().slice(0, 3);
  TORCH_CHECK(is_whole,
              "liteboost: _npu_latent_attention takes query [B, N, 1, D], query_rope [B, N, 1, R], latent "
              "[B, 1, S, D] "
              "and key_rope [B, 1, S, R], got ",
              q.sizes(), ", ", r.sizes(), ", ", k.sizes(), " and ", p.sizes(),
              "; call attention for other calls");
}

Refusal refusal_of(const Latent& on, const Plan& plan) {
  const int64_t heads = on.query.size(1);
  if (on.query.numel() == 0 || on.keys.key.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (on.query.scalar_type() == at::kFloat) return "fp32";
  if (on.query.size(3) != kRank || on.query_rope.size(3) != kRope) return "sizes other than 512 and 64";
  if (heads > kMostHeads || (heads & (heads - 1)) != 0) return "heads that are not 1, 2, 4, ... 128";
  if (const Refusal refusal = npu::inference_refusal(false); refusal != kServed) return refusal;
  const std::string dtype = npu::dtype_name(on.query.scalar_type());
  return npu::unverified(kOp, dtype + (plan.has_lengths() ? " cache" : ""));
}

at::Tensor launched(const Latent& on, const Plan& plan) {
  const int64_t batch = on.query.size(0), heads = on.query.size(1);
  const at::Tensor result = at::empty({batch, 1, heads, kRank}, on.query.options());
  const Operands given = operands(plan, on.query, on.keys, result);
  npu::check_reads_in_place(on.query_rope.is_contiguous(), "the rotated part of queries");
  const at::Tensor query_rope = on.query_rope.contiguous();
  npu::Inference made;
  made.query = given.query;
  made.keys = made.values = {given.key};
  made.heads = heads;
  made.kv_heads = 1;
  made.scaling = on.scaling;
  made.layout = given.layout;
  if (given.length) made.kv_lengths = {*given.length};
  made.query_rope = query_rope;
  made.key_rope = given.value;
  const at::Tensor lse = at::empty({1}, on.query.options().dtype(at::kFloat));
  npu::launch_renewable(given.out, lse, [&](const at::Tensor& to, const at::Tensor& lse_to) {
    npu::infer(made, to, lse_to, false);
  });
  return result;
}

at::Tensor latent_attention_meta(const at::Tensor& query, const at::Tensor& /*query_rope*/,
                                 const at::Tensor& /*latent*/, const at::Tensor& /*key_rope*/, double) {
  return at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1), query.sym_size(3)},
                          query.options());
}

at::Tensor latent_attention_npu(const at::Tensor& query, const at::Tensor& query_rope,
                                const at::Tensor& latent, const at::Tensor& key_rope, double scaling) {
  const Latent on{query, query_rope, {latent, key_rope}, scaling};
  check(on);
  const c10::DeviceGuard guard(query.device());
  const Plan plan{Order::heads_first, cache_of(on.keys, Order::heads_first, false), 0};
  const Refusal refusal = refusal_of(on, plan);
  const auto reference = [&](Refusal why) {
    npu::check_reference(kOp, why);
    return fall_back<decltype(latent_attention_npu)>(kOp, why).call(query, query_rope, latent, key_rope,
                                                                    scaling);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(kOp, [&]() -> at::Tensor { return launched(on, plan); }, reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "_npu_latent_attention(Tensor query, Tensor query_rope, Tensor latent, Tensor key_rope, float scaling) "
      "-> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("_npu_latent_attention", &liteboost::latent_attention_meta); }

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("_npu_latent_attention", &liteboost::latent_attention_npu);
}
