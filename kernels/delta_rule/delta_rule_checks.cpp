#include "delta_rule/delta_rule_checks.h"

namespace liteboost {
namespace {

void check_head_shape(const char* op, const char* argument, const at::Tensor& tensor, const char* heads) {
  LB_CHECK_VALUE(tensor.dim() == 4, op, argument, " must have shape [batch, tokens, ", heads, ", dim], got ",
                 tensor.sym_sizes(), "; do not transpose tokens and heads");
  LB_CHECK_NO_GRAD(op, argument, tensor);
}

// g and beta: a number for each value head of each token.
void check_rate(const char* op, const char* argument, const at::Tensor& tensor, const at::Tensor& value) {
  check_same_dtype(op, argument, tensor, "value", value, /*or_float32=*/true);
  check_same_device(op, argument, tensor, "value", value);
  LB_CHECK_VALUE(tensor.dim() == 3 && tensor.sym_size(0) == value.sym_size(0) &&
                     tensor.sym_size(1) == value.sym_size(1) && tensor.sym_size(2) == value.sym_size(2),
                 op, argument, " must have shape [batch, tokens, v_heads] = [", value.sym_size(0), ", ",
                 value.sym_size(1), ", ", value.sym_size(2), "], got ", tensor.sym_sizes(),
                 "; pass one number for each value head of each token");
  LB_CHECK_NO_GRAD(op, argument, tensor);
}

void check_inputs(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const at::Tensor& g, const at::Tensor& beta) {
  check_head_shape(op, "query", query, "k_heads");
  check_head_shape(op, "key", key, "k_heads");
  check_head_shape(op, "value", value, "v_heads");
  check_dtype(op, "value", value);
  check_same_dtype(op, "query", query, "value", value);
  check_same_dtype(op, "key", key, "value", value);
  check_same_device(op, "query", query, "value", value);
  check_same_device(op, "key", key, "value", value);
  check_same_shape(op, "key", key, "query", query);
  LB_CHECK_VALUE(query.sym_size(0) == value.sym_size(0) && query.sym_size(1) == value.sym_size(1), op,
                 "query must have batch and tokens of value ", value.sym_sizes(), ", got ", query.sym_sizes(),
                 "; pass the query of the same tokens");
  const c10::SymInt k_heads = query.sym_size(2), v_heads = value.sym_size(2);
  LB_CHECK_VALUE(v_heads == 0 || (k_heads > 0 && v_heads % k_heads == 0), op,
                 "value must have a multiple of the ", k_heads, " heads of query, got ", v_heads,
                 "; do not repeat key heads before the call");
  check_rate(op, "g", g, value);
  check_rate(op, "beta", beta, value);
}

void check_state(const char* op, const char* argument, const at::Tensor& state, const at::Tensor& key,
                 const at::Tensor& value, bool or_bfloat16 = false) {
  LB_CHECK_TYPE(state.scalar_type() == at::kFloat || (or_bfloat16 && state.scalar_type() == at::kBFloat16),
                op, argument, or_bfloat16 ? " must be float32 or bfloat16, got " : " must be float32, got ",
                state.scalar_type(), "; keep the state in float32, small updates are lost in 16 bits");
  check_same_device(op, argument, state, "value", value);
  LB_CHECK_VALUE(state.dim() == 4 && state.sym_size(0) == value.sym_size(0) &&
                     state.sym_size(1) == value.sym_size(2) && state.sym_size(2) == key.sym_size(3) &&
                     state.sym_size(3) == value.sym_size(3),
                 op, argument, " must have shape [batch, v_heads, k_dim, v_dim] = [", value.sym_size(0), ", ",
                 value.sym_size(2), ", ", key.sym_size(3), ", ", value.sym_size(3), "], got ",
                 state.sym_sizes(), "; pass the state of this layer, not transposed");
  LB_CHECK_NO_GRAD(op, argument, state);
}

}  // namespace

void check_recurrent_gated_delta_rule(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const at::Tensor& g, const at::Tensor& beta, const at::Tensor& state) {
  constexpr const char* op = "recurrent_gated_delta_rule";
  check_inputs(op, query, key, value, g, beta);
  check_state(op, "state", state, key, value, /*or_bfloat16=*/true);
}

void check_chunk_gated_delta_rule(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                  const at::Tensor& g, const at::Tensor& beta,
                                  const std::optional<at::Tensor>& initial_state) {
  constexpr const char* op = "chunk_gated_delta_rule";
  check_inputs(op, query, key, value, g, beta);
  if (initial_state.has_value()) check_state(op, "initial_state", *initial_state, key, value);
}

}  // namespace liteboost
