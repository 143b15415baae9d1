// Gated delta rule (linear attention with a decaying state).
// Formula: CANN operator documentation (ops-transformer, attention/{recurrent,chunk}_gated_delta_rule/docs):
//   S = alpha S; S = S + beta (v - S k) k^T; o = S (q scale), alpha = exp(g) exp(gk), S of shape (Dv, Dk).
#include "common.h"

using namespace sim;
using at::Tensor;

struct DeltaInputs {
  Tensor query, key, value, beta, gate, key_gate;  // (T, N, D); gates may be undefined: no decay
  double scale;
};

// Key and query heads serve Nv / Nk value heads each.
static Tensor for_value_heads(const Tensor& x, int64_t value_heads) {
  auto f = fp32(x);
  return x.size(1) == value_heads ? f : f.repeat_interleave(value_heads / x.size(1), 1);
}

static DeltaInputs inputs(const TensorHandle& q, const TensorHandle& k, const TensorHandle& v,
                          const TensorHandle& beta, const TensorHandle& g, const TensorHandle& gk,
                          float scale) {
  const int64_t heads = v->size(1);
  return {for_value_heads(*q, heads), for_value_heads(*k, heads), fp32(*v), fp32(*beta),
          g ? fp32(*g) : Tensor(),    gk ? fp32(*gk) : Tensor(),  scale};
}

// One token; state (Nv, Dv, Dk) float32 is replaced, the output (Nv, Dv) returned.
static Tensor step(const DeltaInputs& in, int64_t t, Tensor& state) {
  if (in.gate.defined()) state = state * in.gate[t].exp().unsqueeze(-1).unsqueeze(-1);
  if (in.key_gate.defined()) state = state * in.key_gate[t].exp().unsqueeze(-2);
  auto k = in.key[t].unsqueeze(-1);
  auto remembered = at::matmul(state, k).squeeze(-1);
  auto update = (in.value[t] - remembered) * in.beta[t].unsqueeze(-1);
  state = state + update.unsqueeze(-1) * k.transpose(-1, -2);
  return at::matmul(state, (in.query[t] * in.scale).unsqueeze(-1)).squeeze(-1);
}

// Speculative decoding: a sequence's start is the state its last accepted token left, the state after each
// token goes to that token's own block, so that any prefix can be accepted next time.
OP(aclnnRecurrentGatedDeltaRule, T, query, T, key, T, value, T, beta, R, state, T, lengths, T, indices, T, g,
   T, gk, T, accepted, float, scale, O, out) {
  auto in = inputs(query, key, value, beta, g, gk, scale);
  auto blocks = indices->to(at::kLong);
  int64_t start = 0;
  for (int64_t b = 0; b < lengths->size(0); b++) {
    const int64_t end = start + (*lengths)[b].item<int64_t>();
    if (start == end) continue;
    const int64_t from = start + (accepted ? (*accepted)[b].item<int64_t>() : 1) - 1;
    auto s = fp32((*state)[blocks[from].item<int64_t>()]).clone();
    for (int64_t t = start; t < end; t++) {
      (*out)[t].copy_(step(in, t, s));
      (*state)[blocks[t].item<int64_t>()].copy_(s);
    }
    start = end;
  }
}

// Declared (..., g, float scale, ...) while torch_npu passes (..., float scale, g, ...): a float travels in
// another register than a pointer, so both mean the same.
OP(aclnnChunkGatedDeltaRule, T, query, T, key, T, value, T, beta, T, initial, T, lengths, T, g, float, scale,
   O, out, O, final_state) {
  auto in = inputs(query, key, value, beta, g, T{}, scale);
  int64_t t = 0;
  for (int64_t b = 0; b < lengths->size(0); b++) {
    auto s = fp32((*initial)[b]).clone();
    const int64_t end = t + (*lengths)[b].item<int64_t>();
    for (; t < end; t++) (*out)[t].copy_(step(in, t, s));
    (*final_state)[b].copy_(s);
  }
}
