// Kernels in the place of torch's own, for layers that no rule serves, such as routers of experts: products (mm, addmm) of up
// to batch_invariant_rows() rows, row by row or in the order of one row, and activations row by row. Where bits are to depend on a row's
// own elements alone (is_length_invariant), also products of batches and softmax, of attention that no rule serves. They
// stand there from the first time on that more than one row is asked for, and call torch's own while only one is.
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

#include "batch_invariant/aten_cpu.h"
#include "common/batch_invariant.h"
#include "common/checks.h"
#include "common/tensors.h"
#include "experts/experts_cpu.h"
#include "linear/linear_cpu.h"

namespace liteboost {
namespace {

// Whether the rows of a [m, k] times b [k, n] are served here; what is not valid is torch's to refuse.
bool follows_one_row(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType dtype = a.scalar_type();
  const bool is_served = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  return is_served && dtype == b.scalar_type() && a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) &&
         a.numel() > 0 && b.numel() > 0 && order_of(a.size(0)) == Order::of_one_row &&
         (b.stride(0) == 1 || b.size(0) == 1 || b.stride(1) == 1 || b.size(1) == 1);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  const at::Tensor weight = b.t();
  if (weight.stride(1) == 1 || weight.size(1) == 1) return own_linear(a, weight, bias, Order::of_one_row);
  // Outputs side by side, as Conv1D of GPT-2 stores them: the loops of experts take it as it lies.
  const at::NoGradGuard below_autograd;  // torch's own knows the derivative
  const at::Tensor index = at::zeros({a.size(0), 1}, at::kLong);
  std::optional<at::Tensor> biases;
  if (bias.has_value()) biases = bias->unsqueeze(0);
  return experts_linear_cpu(a, weight.unsqueeze(0), biases, index).squeeze(1);
}

// Weights of up to so many bytes, of routers of experts and adapters, are multiplied by torch row by row where a few rows are to
// have what each has alone: the bits that torch gives it. Larger ones would be read from memory once a row.
constexpr size_t kReadByRows = size_t{1} << 20;

bool is_read_by_rows(const at::Tensor& b) { return !is_length_invariant() && b.nbytes() <= kReadByRows; }

// `multiply` of each row of a [m, k], which gives [1, n].
template <typename Multiply>
at::Tensor by_rows(const at::Tensor& a, int64_t n, const Multiply& multiply) {
  const at::NoGradGuard below_autograd;  // as above
  const at::Tensor out = at::empty({a.size(0), n}, a.options());
  // Each row where a tensor of its own lies: bits may depend on the alignment.
  for (int64_t row = 0; row < a.size(0); ++row)
    out.select(0, row).copy_(multiply(a.narrow(0, row, 1).clone())[0]);
  return out;
}

at::Tensor mm(const at::Tensor& self, const at::Tensor& mat2) {
  if (!follows_one_row(self, mat2)) return at::cpu::mm(self, mat2);
  if (!is_read_by_rows(mat2)) return product(self, mat2, std::nullopt);
  return by_rows(self, mat2.size(1), [&](const at::Tensor& row) { return at::cpu::mm(row, mat2); });
}

at::Tensor addmm(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  const bool is_bias = self.dim() == 1 && mat2.dim() == 2 && self.size(0) == mat2.size(1) &&
                       self.scalar_type() == mat1.scalar_type() && beta.equal(1) && alpha.equal(1);
  if (!is_bias || !follows_one_row(mat1, mat2)) return at::cpu::addmm(self, mat1, mat2, beta, alpha);
  if (!is_read_by_rows(mat2)) return product(mat1, mat2, self);
  return by_rows(mat1, mat2.size(1),
                 [&](const at::Tensor& row) { return at::cpu::addmm(self, row, mat2, beta, alpha); });
}

// torch warns of every operator that gets another kernel than its own, and this one is meant to.
class Unheard : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

std::mutex mutex;

void add(torch::Library& library) {
  library.impl("mm", &mm);
  library.impl("addmm", &addmm);
  library.impl("bmm", &bmm_of_any_length);
  library.impl("baddbmm", &baddbmm_of_any_length);
  library.impl("_softmax", &softmax_of_any_length);
  library.impl("sigmoid", &sigmoid_alone);
  library.impl("silu", &silu_alone);
  library.impl("softplus", &softplus_alone);
  library.impl("mish", &mish_alone);
  library.impl("exp2", &exp2_alone);
  library.impl("rsqrt", &rsqrt_alone);
  library.impl("gelu", &gelu_alone);
  library.impl("elu", &elu_alone);
}

// Has torch call the functions above, under `mutex`.
void replace_operators() {
  // Never taken back: another thread may be in one of these kernels, and at the end of the process torch's dispatcher may
  // go first.
  static auto* const library = new std::optional<torch::Library>();
  if (library->has_value()) return;
  Unheard unheard;
  const c10::WarningUtils::WarningHandlerGuard guard(&unheard);
  library->emplace(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  add(**library);
}

void set_batch_invariant_rows_everywhere(int64_t rows, bool any_length) {
  const std::lock_guard<std::mutex> lock(mutex);
  set_batch_invariant_rows(rows, any_length);
  if (rows > 1) replace_operators();
}

int64_t set_batch_invariant_rows_of_thread(int64_t rows) {
  if (rows > 1) {
    const std::lock_guard<std::mutex> lock(mutex);
    replace_operators();
  }
  return set_batch_invariant_rows_here(rows);  // last: who sees an exception would not set it back
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_batch_invariant_rows() -> int", &liteboost::batch_invariant_rows);
  m.def("_set_batch_invariant_rows(int rows, bool any_length=False) -> ()",
        &liteboost::set_batch_invariant_rows_everywhere);
  m.def("_set_batch_invariant_rows_here(int rows) -> int", &liteboost::set_batch_invariant_rows_of_thread);
}
