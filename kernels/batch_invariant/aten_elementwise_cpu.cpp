// torch's activations and functions of single elements that have other bits by vectors than one by one (aten_cpu.h).
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/elu_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp2_cpu_dispatch.h>
#include <ATen/ops/gelu_cpu_dispatch.h>
#include <ATen/ops/mish_cpu_dispatch.h>
#include <ATen/ops/rsqrt_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <ATen/ops/silu_cpu_dispatch.h>
#include <ATen/ops/softplus_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "batch_invariant/aten_cpu.h"
#include "common/batch_invariant.h"
#include "common/resources.h"

namespace liteboost {
namespace {

// Bytes of a pair of the widest vectors that torch is compiled for.
constexpr int64_t kPairBytes = 128;

int64_t pair_of(const at::Tensor& x) { return kPairBytes / x.element_size(); }

// Whether elements have other bits beside other rows. Of 16 bits these three have none: they are computed in fp32 and
// rounded.
bool depends_on_others(const at::Tensor& x) {
  if (is_length_invariant() || x.scalar_type() != at::kFloat || x.dim() < 2 || x.numel() == 0 ||
      !x.is_contiguous())
    return false;
  const int64_t rows = x.numel() / x.size(-1);
  if (rows == 1 || order_of(rows) != Order::of_one_row) return false;
  return x.size(-1) % pair_of(x) != 0 || x.numel() >= at::internal::GRAIN_SIZE;  // threads share it anywhere
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

// Whether by_vectors has to see to it that no element of x is computed by itself.
bool has_single_elements(const at::Tensor& x) {
  if (!is_length_invariant()) return false;
  const at::ScalarType dtype = x.scalar_type();
  if ((dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) || x.numel() == 0) return false;
  return !x.is_contiguous() || x.numel() % pair_of(x) != 0 || x.numel() >= at::internal::GRAIN_SIZE;
}

// `apply(out, x)` of pieces of x that torch computes by whole pairs of vectors, in one thread each.
template <typename Apply>
at::Tensor by_vectors(const at::Tensor& x, const Apply& apply) {
  const at::NoGradGuard below_autograd;  // torch's own knows the derivative
  constexpr int64_t kPiece = at::internal::GRAIN_SIZE / 2;
  const int64_t count = x.numel(), pair = pair_of(x), whole = (count + pair - 1) / pair * pair;
  at::Tensor from = x.contiguous().view(-1);
  if (whole != count) {
    const at::Tensor padded = at::zeros({whole}, x.options());
    padded.narrow(0, 0, count).copy_(from);
    from = padded;
  }
  const at::Tensor out = at::empty_like(from);
  const int64_t pieces = (whole + kPiece - 1) / kPiece;
  parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      const int64_t size = std::min(kPiece, whole - begin * kPiece);
      at::Tensor piece = out.narrow(0, begin * kPiece, size);
      apply(piece, from.narrow(0, begin * kPiece, size));
    }
  });
  const at::Tensor found = out.narrow(0, 0, count).view(x.sizes());
  return x.is_contiguous() ? found : at::empty_like(x).copy_(found);  // strides are torch's
}

}  // namespace

// Of functions that are row by row where only rows are asked for.
#define LB_ALONE(name, ...)                                                                                  \
  const auto apply = [&](at::Tensor& out, const at::Tensor& x) { at::cpu::name##_out(out, x __VA_ARGS__); }; \
  if (has_single_elements(self)) return by_vectors(self, apply);                                             \
  return depends_on_others(self) ? by_rows(self, apply) : at::cpu::name(self __VA_ARGS__)

at::Tensor sigmoid_alone(const at::Tensor& self) { LB_ALONE(sigmoid); }
at::Tensor silu_alone(const at::Tensor& self) { LB_ALONE(silu); }
at::Tensor softplus_alone(const at::Tensor& self, const at::Scalar& beta, const at::Scalar& threshold) {
  LB_ALONE(softplus, , beta, threshold);
}
#undef LB_ALONE

// Of those that are torch's where only rows are asked for.
#define LB_ALONE(name, ...)                                                                                  \
  const auto apply = [&](at::Tensor& out, const at::Tensor& x) { at::cpu::name##_out(out, x __VA_ARGS__); }; \
  return has_single_elements(self) ? by_vectors(self, apply) : at::cpu::name(self __VA_ARGS__)

at::Tensor mish_alone(const at::Tensor& self) { LB_ALONE(mish); }
at::Tensor exp2_alone(const at::Tensor& self) { LB_ALONE(exp2); }
at::Tensor rsqrt_alone(const at::Tensor& self) { LB_ALONE(rsqrt); }
at::Tensor gelu_alone(const at::Tensor& self, c10::string_view approximate) { LB_ALONE(gelu, , approximate); }
at::Tensor elu_alone(const at::Tensor& self, const at::Scalar& alpha, const at::Scalar& scale,
                     const at::Scalar& input_scale) {
  LB_ALONE(elu, , alpha, scale, input_scale);
}
#undef LB_ALONE

}  // namespace liteboost
