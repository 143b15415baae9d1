#include "causal_conv/causal_conv.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "causal_conv/causal_conv_checks.h"
#include "common/in_place.h"

namespace liteboost {
namespace {

at::Tensor causal_conv1d_meta(const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, c10::string_view activation) {
  check_causal_conv1d(x, weight, bias, activation);
  return at::empty_symint(x.sym_sizes(), x.options());
}

at::Tensor causal_conv1d_update_meta(const at::Tensor& x, const at::Tensor& state, const at::Tensor& weight,
                                     const std::optional<at::Tensor>& bias, c10::string_view activation) {
  check_causal_conv1d_update(x, state, weight, bias, activation);
  return at::empty_symint(x.sym_sizes(), x.options());
}

at::Tensor causal_conv1d_update_in_place(c10::DispatchKeySet dispatch_keys, const at::Tensor& x,
                                         const at::Tensor& state, const at::Tensor& weight,
                                         const std::optional<at::Tensor>& bias, c10::string_view activation) {
  static const auto op = find_op<decltype(causal_conv1d_update_meta)>("liteboost::causal_conv1d_update");
  return run_in_place(op, dispatch_keys, {state}, x, state, weight, bias, activation);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, str activation=\"none\") -> Tensor");
  m.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias=None, "
      "str activation=\"none\") -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("causal_conv1d", &liteboost::causal_conv1d_meta);
  m.impl("causal_conv1d_update", &liteboost::causal_conv1d_update_meta);
}

TORCH_LIBRARY_IMPL(liteboost, ADInplaceOrView, m) {
  m.impl("causal_conv1d_update", &liteboost::causal_conv1d_update_in_place);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("causal_conv1d", torch::CppFunction::makeFallthrough());
  m.impl("causal_conv1d_update", torch::CppFunction::makeFallthrough());
}
