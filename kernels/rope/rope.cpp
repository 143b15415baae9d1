#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "common/in_place.h"
#include "rope/rope_checks.h"

namespace liteboost {
namespace {

std::tuple<at::Tensor, at::Tensor> rope_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                             const at::Tensor& sin, int64_t unsqueeze_dim,
                                             c10::string_view layout, int64_t rotary_dim) {
  check_rope(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(k.sym_sizes(), k.options())};
}

void turn_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
               int64_t unsqueeze_dim, c10::string_view layout, int64_t rotary_dim) {
  check_rope(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
}

void turn_in_place(c10::DispatchKeySet dispatch_keys, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& cos, const at::Tensor& sin, int64_t unsqueeze_dim,
                   c10::string_view layout, int64_t rotary_dim) {
  static const auto op = find_op<decltype(turn_meta)>("liteboost::rope_");
  run_in_place(op, dispatch_keys, {q, k}, q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim=1, str layout=\"half\", "
      "int rotary_dim=0) -> (Tensor, Tensor)");
  m.def(
      "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, int unsqueeze_dim=1, str layout=\"half\", "
      "int rotary_dim=0) -> ()");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("rope", &liteboost::rope_meta);
  m.impl("rope_", &liteboost::turn_meta);
}

TORCH_LIBRARY_IMPL(liteboost, ADInplaceOrView, m) { m.impl("rope_", &liteboost::turn_in_place); }

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("rope", torch::CppFunction::makeFallthrough());
  m.impl("rope_", torch::CppFunction::makeFallthrough());
}
