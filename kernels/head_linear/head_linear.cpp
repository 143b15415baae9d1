#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "head_linear/head_linear_checks.h"

namespace liteboost {
namespace {

at::Tensor head_linear_meta(const at::Tensor& x, const at::Tensor& weight) {
  check_head_linear(x, weight);
  return at::empty_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2), weight.sym_size(1)}, x.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  // The same text as in liteboost_adaptor/ops/head_linear.py.
  m.def("head_linear(Tensor x, Tensor weight) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("head_linear", &liteboost::head_linear_meta); }

TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  // No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
  m.impl("head_linear", torch::CppFunction::makeFallthrough());
}
