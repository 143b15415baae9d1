// torch's products of batches and its softmax by the loops of batch_invariant.h, for up to batch_invariant_rows() rows.
#include <ATen/ops/_softmax_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <c10/core/GradMode.h>

#include <optional>

#include "batch_invariant/aten_cpu.h"
#include "batch_invariant/batch_invariant.h"
#include "common/batch_invariant.h"
#include "common/checks.h"
#include "common/parallel.h"
#include "common/tensors.h"

namespace liteboost {
namespace {

// Elements of a row of softmax whose exponentials, as integers, have a sum that an int64_t holds.
constexpr int64_t kMostSummed = 1 << 22;

bool is_served(const at::Tensor& x) {
  const at::ScalarType dtype = x.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && x.numel() > 0 &&
         !x.is_conj() && !x.is_neg();
}

// Whether x [b, m, k] times y [b, k, n] is served here; what is not valid is torch's to refuse.
bool is_product(const at::Tensor& x, const at::Tensor& y) {
  return is_length_invariant() && is_served(x) && is_served(y) && x.scalar_type() == y.scalar_type() &&
         x.dim() == 3 && y.dim() == 3 && x.size(0) == y.size(0) && x.size(2) == y.size(1) &&
         order_of(x.size(1)) == Order::of_one_row;
}

bool steps_by_one(const at::Tensor& x, int64_t dim) { return x.size(dim) <= 1 || x.stride(dim) == 1; }

at::Tensor product(const at::Tensor& x, const at::Tensor& y, const std::optional<at::Tensor>& add,
                   double alpha, double beta) {
  const at::NoGradGuard below_autograd;  // torch's own knows the derivative
  const at::Tensor rows = steps_by_one(x, 2) ? x : x.contiguous();
  const at::Tensor columns = steps_by_one(y, 1) || steps_by_one(y, 2) ? y : y.contiguous();
  at::Tensor out = empty_cpu({x.size(0), x.size(1), y.size(2)}, x.scalar_type());
  BatchedProductArgs args = {};
  args.x = rows.const_data_ptr();
  args.y = columns.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.rows = x.size(1);
  args.columns = y.size(2);
  args.k = x.size(2);
  args.x_batch_stride = rows.stride(0);
  args.x_row_stride = rows.stride(1);
  args.y_batch_stride = columns.stride(0);
  // Of one row or column any step is right.
  args.y_row_step = args.k == 1 ? 1 : columns.stride(1);
  args.y_column_step = args.columns == 1 ? 1 : columns.stride(2);
  if (args.columns == 1 && args.y_row_step == 1 && args.k > 1) args.y_column_step = args.k;  // a dot product
  if (add.has_value()) {
    args.add = add->const_data_ptr();
    for (int dim = 0; dim < 3; ++dim) args.add_strides[dim] = add->stride(dim);
  }
  args.alpha = alpha;
  args.beta = beta;
  args.dtype = dtype_of(x);

  const auto run = LB_KERNELS(batch_invariant_kernels).product;
  const int64_t blocks = (args.columns + kProductColumns - 1) / kProductColumns;
  parallel_rows(x.size(0) * blocks, args.rows * args.k * std::min(args.columns, kProductColumns) / 8,
                [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return out;
}

}  // namespace

at::Tensor bmm_of_any_length(const at::Tensor& self, const at::Tensor& mat2) {
  return is_product(self, mat2) ? product(self, mat2, std::nullopt, 1.0, 0.0) : at::cpu::bmm(self, mat2);
}

at::Tensor baddbmm_of_any_length(const at::Tensor& self, const at::Tensor& batch1, const at::Tensor& batch2,
                                 const at::Scalar& beta, const at::Scalar& alpha) {
  const bool is_real = !beta.isComplex() && !alpha.isComplex();
  if (!is_real || !is_product(batch1, batch2) || self.scalar_type() != batch1.scalar_type() ||
      self.is_neg()) {
    return at::cpu::baddbmm(self, batch1, batch2, beta, alpha);
  }
  // torch reads nothing of it where beta is 0, so that NaN in it is no NaN of the result.
  std::optional<at::Tensor> add;
  const at::NoGradGuard below_autograd;
  if (beta.toDouble() != 0.0) add = self.expand({batch1.size(0), batch1.size(1), batch2.size(2)});
  return product(batch1, batch2, add, alpha.toDouble(), beta.toDouble());
}

at::Tensor softmax_of_any_length(const at::Tensor& self, int64_t dim, bool half_to_float) {
  const bool is_last = self.dim() > 1 && (dim == -1 || dim == self.dim() - 1);
  if (!is_length_invariant() || half_to_float || !is_last || !is_served(self) ||
      self.size(-1) > kMostSummed || order_of(self.size(-2)) == Order::fastest) {
    return at::cpu::_softmax(self, dim, half_to_float);
  }
  const at::NoGradGuard below_autograd;  // torch's own knows the derivative
  const at::Tensor x = self.contiguous();
  at::Tensor out = empty_cpu(x.sizes(), x.scalar_type());
  SoftmaxArgs args = {x.const_data_ptr(), out.mutable_data_ptr(), x.size(-1), dtype_of(x)};
  const auto run = LB_KERNELS(batch_invariant_kernels).softmax;
  parallel_rows(x.numel() / x.size(-1), x.size(-1) * 4,
                [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return out;
}

}  // namespace liteboost
