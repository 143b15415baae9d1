#include "delta_rule/delta_rule.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "common/in_place.h"
#include "delta_rule/delta_rule_checks.h"

namespace liteboost {
namespace {

at::Tensor recurrent_gated_delta_rule_meta(const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& value, const at::Tensor& g,
                                           const at::Tensor& beta, const at::Tensor& state, double, bool) {
  check_recurrent_gated_delta_rule(query, key, value, g, beta, state);
  return at::empty_symint(value.sym_sizes(), value.options());
}

at::Tensor recurrent_gated_delta_rule_in_place(c10::DispatchKeySet dispatch_keys, const at::Tensor& query,
                                               const at::Tensor& key, const at::Tensor& value,
                                               const at::Tensor& g, const at::Tensor& beta,
                                               const at::Tensor& state, double scaling, bool normalize) {
  static const auto op =
      find_op<decltype(recurrent_gated_delta_rule_meta)>("liteboost::recurrent_gated_delta_rule");
  return run_in_place(op, dispatch_keys, {state}, query, key, value, g, beta, state, scaling, normalize);
}

std::tuple<at::Tensor, at::Tensor> chunk_gated_delta_rule_meta(const at::Tensor& query, const at::Tensor& key,
                                                               const at::Tensor& value, const at::Tensor& g,
                                                               const at::Tensor& beta,
                                                               const std::optional<at::Tensor>& initial_state,
                                                               double, bool) {
  check_chunk_gated_delta_rule(query, key, value, g, beta, initial_state);
  const c10::SymDimVector state{value.sym_size(0), value.sym_size(2), key.sym_size(3), value.sym_size(3)};
  return {at::empty_symint(value.sym_sizes(), value.options()),
          at::empty_symint(state, value.options().dtype(at::kFloat))};
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, "
      "Tensor(a!) state, *, float scaling, bool normalize=False) -> Tensor");
  m.def(
      "chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, "
      "Tensor? initial_state=None, *, float scaling, bool normalize=False) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("recurrent_gated_delta_rule", &liteboost::recurrent_gated_delta_rule_meta);
  m.impl("chunk_gated_delta_rule", &liteboost::chunk_gated_delta_rule_meta);
}

TORCH_LIBRARY_IMPL(liteboost, ADInplaceOrView, m) {
  m.impl("recurrent_gated_delta_rule", &liteboost::recurrent_gated_delta_rule_in_place);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("recurrent_gated_delta_rule", torch::CppFunction::makeFallthrough());
  m.impl("chunk_gated_delta_rule", torch::CppFunction::makeFallthrough());
}
