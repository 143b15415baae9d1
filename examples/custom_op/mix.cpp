// mix(a, b, weight) = a + weight * (b - a): schema, CPU kernel, and shapes for torch.compile.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/lerp.h>
#include <torch/library.h>

namespace {

void check(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight) {
  TORCH_CHECK(a.sizes() == b.sizes(), "custom_op::mix: a and b must have one shape, got ", a.sizes(), " and ",
              b.sizes());
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == a.size(-1),
              "custom_op::mix: weight must have shape [hidden_size] = [", a.size(-1), "], got ",
              weight.sizes());
  TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.scalar_type() == weight.scalar_type(),
              "custom_op::mix: a, b and weight must have one dtype");
}

at::Tensor mix_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight) {
  check(a, b, weight);
  return at::lerp(a, b, weight);
}

at::Tensor mix_meta(const at::Tensor& a, const at::Tensor&, const at::Tensor&) { return at::empty_like(a); }

}  // namespace

TORCH_LIBRARY(custom_op, m) { m.def("mix(Tensor a, Tensor b, Tensor weight) -> Tensor"); }
TORCH_LIBRARY_IMPL(custom_op, CPU, m) { m.impl("mix", &mix_cpu); }
TORCH_LIBRARY_IMPL(custom_op, Meta, m) { m.impl("mix", &mix_meta); }
