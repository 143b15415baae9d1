#include "activation/activation_aten_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <ATen/ops/silu_cpu_dispatch.h>
#include <ATen/ops/softplus_cpu_dispatch.h>
#include <c10/core/GradMode.h>

#include "common/batch_invariant.h"

namespace liteboost {
namespace {

// Elements of fp32 in a pair of the widest vectors that torch is compiled for.
constexpr int64_t kPair = 32;

// Whether elements have other bits beside other rows. Of 16 bits none has: they are computed in fp32 and rounded.
bool depends_on_others(const at::Tensor& x) {
  if (x.scalar_type() != at::kFloat || x.dim() < 2 || x.numel() == 0 || !x.is_contiguous()) return false;
  const int64_t rows = x.numel() / x.size(-1);
  if (rows == 1 || order_of(rows) != Order::of_one_row) return false;
  return x.size(-1) % kPair != 0 || x.numel() >= at::internal::GRAIN_SIZE;  // threads share it anywhere
}

// `apply(out, x)` of each row of x.
template <typename Apply>
at::Tensor by_rows(const at::Tensor& x, const Apply& apply) {
  const at::NoGradGuard below_autograd;  // torch's own knows the derivative
  const at::Tensor out = at::empty_like(x);
  const at::Tensor rows = x.view({-1, x.size(-1)});
  const at::Tensor out_rows = out.view({-1, x.size(-1)});
  for (int64_t row = 0; row < rows.size(0); ++row) {
    at::Tensor out_row = out_rows.select(0, row);
    apply(out_row, rows.select(0, row));
  }
  return out;
}

}  // namespace

at::Tensor sigmoid_by_rows(const at::Tensor& self) {
  if (!depends_on_others(self)) return at::cpu::sigmoid(self);
  return by_rows(self, [](at::Tensor& out, const at::Tensor& row) { at::cpu::sigmoid_out(out, row); });
}

at::Tensor silu_by_rows(const at::Tensor& self) {
  if (!depends_on_others(self)) return at::cpu::silu(self);
  return by_rows(self, [](at::Tensor& out, const at::Tensor& row) { at::cpu::silu_out(out, row); });
}

at::Tensor softplus_by_rows(const at::Tensor& self, const at::Scalar& beta, const at::Scalar& threshold) {
  if (!depends_on_others(self)) return at::cpu::softplus(self, beta, threshold);
  return by_rows(self, [&](at::Tensor& out, const at::Tensor& row) {
    at::cpu::softplus_out(out, row, beta, threshold);
  });
}

}  // namespace liteboost
