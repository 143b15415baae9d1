#include "linear/linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "linear/linear_checks.h"

namespace liteboost {

void check_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  constexpr const char* op = "linear";
  LB_CHECK_VALUE(x.dim() >= 1, op, "x must have shape [..., in_features], got a scalar; add a dimension");
  LB_CHECK_VALUE(weight.dim() == 2, op, "weight must have shape [out_features, in_features], got ",
                 weight.sym_sizes(), "; pass it as nn.Linear stores it");
  check_dtype(op, "x", x);
  check_same_dtype(op, "weight", weight, "x", x);
  check_same_device(op, "weight", weight, "x", x);
  LB_CHECK_VALUE(x.sym_size(-1) == weight.sym_size(1), op,
                 "x must have shape [..., in_features] with in_features = ", weight.sym_size(1),
                 " as weight ", weight.sym_sizes(), " has, got ", x.sym_sizes(),
                 "; pass the weight of this layer, not transposed");
  LB_CHECK_NO_GRAD(op, "x", x);
  LB_CHECK_NO_GRAD(op, "weight", weight);
  if (!bias.has_value()) return;
  check_same_dtype(op, "bias", *bias, "x", x);
  check_same_device(op, "bias", *bias, "x", x);
  LB_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), op,
                 "bias must have shape [out_features] = [", weight.sym_size(0), "], got ", bias->sym_sizes(),
                 "; pass the bias of this layer");
  LB_CHECK_NO_GRAD(op, "bias", *bias);
}

namespace {

at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_linear(x, weight, bias);
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  // The sum of a contiguous float32 tensor, read once by all threads: what linear's speed is measured by.
  m.def("_stream_sum(Tensor x) -> float");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("linear", &liteboost::linear_meta); }

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) { m.impl("linear", torch::CppFunction::makeFallthrough()); }
