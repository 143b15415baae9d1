// What the gated delta rules reject. Sources: ops-transformer, attention/{recurrent,chunk}_gated_delta_rule, docs and
// op_host/op_api.
#include "quantized.h"

using namespace sim;

static void heads(const TensorHandle& query, const TensorHandle& key, const TensorHandle& value,
                  const TensorHandle& beta, const TensorHandle& lengths, const TensorHandle& g,
                  const TensorHandle& out, int64_t most_heads, int64_t widest) {
  for (auto& [t, name] : Tensors{{query, "query"}, {key, "key"}, {value, "value"}}) {
    require_given(t, name);
    require_dtype(t, name, {at::kBFloat16});
    require_axes(t, name, 3, 3);
    require(t->numel() > 0, name, " is empty");
    require(t->size(1) <= most_heads, name, " has ", t->size(1), " heads, at most ", most_heads);
    require(t->size(2) <= widest, name, " has heads of ", t->size(2), ", at most ", widest);
  }
  require_all_given({{beta, "beta"}, {lengths, "actualSeqLengths"}, {out, "out"}});
  require_shape(key, "key", query->sizes());
  require(value->size(1) % query->size(1) == 0, "value has ", value->size(1),
          " heads, not a multiple of key's ", query->size(1));
  require_dtype(beta, "beta", {at::kBFloat16});
  require_shape(beta, "beta", {value->size(0), value->size(1)});
  require_dtype(lengths, "actualSeqLengths", {kInt32});
  require_axes(lengths, "actualSeqLengths", 1, 1);
  require_dtype(g, "g", {kFloat32});
  require_shape(g, "g", {value->size(0), value->size(1)});
  require_dtype(out, "out", {at::kBFloat16});
  require_shape(out, "out", value->sizes());
}
static void state_of(const TensorHandle& state, const char* name, int64_t blocks, const TensorHandle& value,
                     const TensorHandle& key) {
  require_shape(state, name, {blocks, value->size(1), value->size(2), key->size(2)});
}

// The values of lengths, indices and accepted counts are on the device: the caller answers for them.
LIMITS(aclnnRecurrentGatedDeltaRule, T, query, T, key, T, value, T, beta, R, state, T, lengths, T, indices, T,
       g, T, gk, T, accepted, float, scale, O, out) {
  // CheckNotNull in attention/recurrent_gated_delta_rule/op_api, 8.5.0 to 9.1.0: numAcceptedTokens may be left out.
  require_all_given({{state, "stateRef"}, {indices, "ssmStateIndices"}});
  heads(query, key, value, beta, lengths, g, out, 256, 512);
  require_dtype(state, "stateRef", {at::kBFloat16});
  require_contiguous(state, "stateRef");
  require_axes(state, "stateRef", 4, 4);
  state_of(state, "stateRef", state->size(0), value, key);
  require(value->size(0) <= state->size(0), value->size(0), " tokens for ", state->size(0),
          " blocks of state");
  require(value->size(0) <= 8 * lengths->size(0), "a sequence has at most 8 tokens: ", value->size(0),
          " tokens for ", lengths->size(0), " sequences");
  require_dtype(indices, "ssmStateIndices", {kInt32});
  require_shape(indices, "ssmStateIndices", {value->size(0)});
  require_dtype(gk, "gk", {kFloat32});
  require_shape(gk, "gk", {value->size(0), value->size(1), key->size(2)});
  require_dtype(accepted, "numAcceptedTokens", {kInt32});
  require_shape(accepted, "numAcceptedTokens", lengths->sizes());
}
LIMITS(aclnnChunkGatedDeltaRule, T, query, T, key, T, value, T, beta, T, initial, T, lengths, T, g, float,
       scale, O, out, O, final_state) {
  require_all_given({{initial, "initialState"}, {final_state, "finalState"}});
  heads(query, key, value, beta, lengths, g, out, 64, 128);
  // STATE_TYPE_SUPPORT_LIST in aclnn_chunk_gated_delta_rule.cpp: fp32 came behind 9.1.0.
  if (release_is("9.2.0")) {
    require_dtype(initial, "initialState", {at::kBFloat16, kFloat32});
  } else {
    require_dtype(initial, "initialState", {at::kBFloat16});
  }
  require_same_dtype(final_state, "finalState", initial, "initialState");
  state_of(initial, "initialState", lengths->size(0), value, key);
  state_of(final_state, "finalState", lengths->size(0), value, key);
  require(out->is_contiguous() && final_state->is_contiguous(), "the outputs must be contiguous");
}
