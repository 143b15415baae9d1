#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "activation/activation_cpu.h"
#include "common/batch_invariant.h"
#include "common/resources.h"
#include "common/tensors.h"
#include "linear/linear.h"
#include "linear/linear_checks.h"
#include "linear/linear_cpu.h"
#include "linear/linear_gemm_shares.h"

#ifdef LB_X86_ISAS
#include <cpuid.h>
#endif

namespace liteboost {

// linear_max_rows: at::linear's time over ours, weight [3072, 1024], one thread of a Zen 5 restricted in
// oneDNN and MKL to the same instructions, torch 2.13:
//
//                           rows  16    32    64    512
//     bf16  AVX2                  4.0   3.9   3.8   3.7
//           AVX-512               3.0   2.9   2.6   2.5
//           AVX-512 + BF16        1.4   1.2   0.9   0.8
//     f16   AVX2                  3.6   3.6   3.5   3.5
//           AVX-512               7.4   7.7   7.5   7.6
//     f32   AVX2                  1.5   1.2   1.0   0.9
//           AVX-512               2.2   2.1   1.9   1.8     (MKL runs its AVX2 code on this vendor's CPUs)
//
// So a 16-bit product without an instruction of its own is never at::linear's.
#ifdef LB_X86_ISAS
static bool is_intel() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kGenu = 0x756e6547;  // of "GenuineIntel"
  static const bool is_so = __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == kGenu;
  return is_so;
}

static bool cpu_multiplies_f16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && ((edx >> 23) & 1u);
}

int64_t linear_max_rows(at::ScalarType dtype) {
  constexpr int64_t any = std::numeric_limits<int64_t>::max();
  // What the CPU has, not what current_isa() is limited to: a limit on us does not slow at::linear down.
  static const bool multiplies_bf16 = detect_isa() >= Isa::avx512_bf16;
  static const bool multiplies_f16 = cpu_multiplies_f16();
  if (dtype == at::kBFloat16) return multiplies_bf16 ? 32 : any;
  if (dtype == at::kHalf) return multiplies_f16 ? 32 : any;
  return 64;
}
#else
int64_t linear_max_rows(at::ScalarType) { return 16; }
#endif

// Not where at::linear has an instruction: a limit on us (LITEBOOST_ISA) does not slow that down.
bool linear_widens(at::ScalarType dtype) {
  return dtype != at::kFloat && linear_max_rows(dtype) > kLinearRows &&
         LB_KERNELS(linear_kernels).gemm_widens;
}

#ifdef LB_X86_ISAS
// Two threads of a Zen 5, torch 2.13: 2.0 to 2.3 times as fast as MKL in fp32 from 65 rows on, because that runs its AVX2 code
// there. On Intel's CPUs it knows AVX-512, too. Where there is AVX2 alone, two threads of a Zen 3: 1.1 to 2 times as fast
// for 16 to 256 rows, 0.9 to 1.0 for 512; of fewer outputs than a panel has, 0.7 to 1.
constexpr int64_t kLeastOutputs = 64;

static bool is_torch_faster(const LinearKernels& kernels, int64_t n, int64_t rows) {
  constexpr int64_t kMostRows = 256;
  static const bool has_avx512 = detect_isa() >= Isa::avx512;
  // A limit on us does not slow torch down.
  if (is_intel() || (has_avx512 && kernels.gemm_widens)) return true;
  return !has_avx512 && (rows > kMostRows || n < kLeastOutputs);
}
#endif

// Columns of a panel of gemm_linear where that multiplies this many rows faster than torch does; 0 elsewhere.
static int64_t gemm_columns(const at::Tensor& weight, [[maybe_unused]] int64_t rows) {
  if (weight.stride(1) != 1) return 0;
  const LinearKernels& kernels = LB_KERNELS(linear_kernels);
  const at::ScalarType dtype = weight.scalar_type();
  if (dtype != at::kFloat && kernels.gemm_widens && !linear_widens(dtype)) return 0;
#ifdef LB_X86_ISAS
  if (dtype == at::kFloat && is_torch_faster(kernels, weight.size(0), rows)) return 0;
#endif
  return kernels.gemm_columns(dtype_of(weight), weight.size(0), weight.size(1), Order::fastest);
}

// The same where each row is to have the bits it has alone, which the loops of linear_one_row.h give, too; to pack a weight
// takes as long as to multiply some rows. Their time over gemm's, one thread of a Zen 4, weights in bf16 from memory:
//
//                     rows  20    24    32    48    64
//     [3072, 1024]          1.0   1.0   1.1   1.25  1.3
//     [1024, 3072]          1.1   1.0   1.2   1.35  1.4
//     [1024, 1024]          1.0   1.0   1.05  1.2   1.25
static int64_t gemm_of_one_row_columns(const at::Tensor& weight, int64_t rows) {
  constexpr int64_t kLeastRows = 24;
  if (order_of(rows) != Order::of_one_row || rows < kLeastRows) return 0;
  if (weight.size(0) == 0 || weight.stride(1) != 1) return 0;
  return LB_KERNELS(linear_kernels)
      .gemm_columns(dtype_of(weight), weight.size(0), weight.size(1), Order::of_one_row);
}

// The same of one weight in fp32, where the CPU has AVX2 alone: from a core's own cache MKL multiplies faster. Its time
// over ours, one thread of a Zen 3, torch 2.14:
//
//                     rows   4     8    12    16    24    32    48    64
//     [256, 256]            1.4   1.1   0.9   0.9   0.8   0.7   0.7   0.6
//     [512, 256]            1.4   1.1   0.9   0.8   0.7   0.7   0.7   0.6
//     [1536, 384]           2.6   2.0   1.5   1.1   1.2   1.2   0.9   0.9
//     [1024, 1024]          2.4   2.0   1.4   1.2   1.3   1.0   0.8   0.8
//
// And where the CPU has AMX, of which oneDNN packs the weight before it multiplies; two threads of a Xeon with 2 MB of second
// cache a core, weights from memory, torch 2.13:
//
//                     rows  16    64    128   200   256
//     [1024, 1024]          1.4   1.5   1.2   1.1   0.95
//     [3072, 1024]          1.6   1.2   1.2   1.2   1.05
//     [1024, 3072]          1.3   1.3   1.3   1.1   1.0
//
// Loops with tiles take all of these rows at once; of 512 oneDNN is 1.1 to 1.6 times as fast.
//
// And where the CPU multiplies pairs of bf16 and has no tiles, up to kMoreRows of linear_more_rows.h, and beyond by gemm_linear
// (linear_gemm.h). oneDNN's time over gemm_linear's, two threads of a Zen 5, weights from memory, torch 2.13:
//
//                     rows  97    128   256   512   2048
//     [1024, 1024]          1.17  1.13  1.07  1.05  1.05
//     [3072, 1024]          1.16  1.10  1.05  1.06  1.02
//     [1024, 3072]          1.01  1.05  1.03  1.04  1.06
//     [4096, 4096]          1.04  1.03  1.01  1.04  1.07
//
// And where the CPU has AVX2 alone (linear_widens), 16 bits become floats in gemm_linear. The loops' time over its, two
// threads of a Zen 3:
//
//                     rows  32    40    48    64    96    512
//     bf16  [3072, 1024]    1.05  1.13  1.35  1.26  1.35  1.38
//           [1024, 3072]    1.07        1.15              1.28
//     f16   [3072, 1024]    1.08        1.16              1.42
static int64_t max_rows(const at::Tensor& weight) {
#ifdef LB_X86_ISAS
  if (weight.scalar_type() == at::kBFloat16) {
    const int64_t most_rows = LB_KERNELS(linear_kernels).most_rows(DType::bf16, Order::fastest);
    // A limit on us does not slow at::linear down.
    static const Isa detected = detect_isa();
    if (most_rows > kLinearRows && current_isa() == detected) return most_rows;
  }
  constexpr int64_t kCachedBytes = 1 << 20;
  static const bool has_avx512 = detect_isa() >= Isa::avx512;
  if (weight.scalar_type() == at::kFloat && !has_avx512)
    return static_cast<int64_t>(weight.nbytes()) <= kCachedBytes ? 12 : 32;
  // The loops where gemm_linear does not, whatever the rows.
  if (linear_widens(weight.scalar_type()) && gemm_columns(weight, kLinearRows + 1) > 0) return kLinearRows;
#endif
  return linear_max_rows(weight.scalar_type());
}

namespace {

// Bytes that a thread sums up at least.
constexpr int64_t kGrainBytes = 64 << 10;

// Where x or bias is not contiguous, it is copied: they are small. The weight is large, so one whose last dim
// is not contiguous goes to at::linear, which multiplies by it as it lies.
bool served(const at::Tensor& weight, int64_t rows) {
  return (weight.stride(1) == 1 || weight.size(1) <= 1) &&
         (rows <= max_rows(weight) || rows <= batch_invariant_rows());
}

bool is_own(const at::Tensor& weight, int64_t rows) {
  return rows == 0 || weight.size(0) == 0 || served(weight, rows);
}

at::Tensor outputs_of(const at::Tensor& x, const at::Tensor& weight) {
  c10::DimVector sizes(x.sizes());
  sizes.back() = weight.size(0);
  return empty_cpu(sizes, x.scalar_type());
}

// Rows of out from `first` on, of so many rows of x as gemm takes them in that order.
void gemm_rows(const LinearLayer& layer, const at::Tensor& some, int64_t columns, Order order, int64_t first,
               const at::Tensor& out) {
  const LinearKernels& kernels = LB_KERNELS(linear_kernels);
  const at::Tensor bias = layer.bias.has_value() ? layer.bias->contiguous() : at::Tensor();
  GemmArgs args;
  args.x = some.const_data_ptr();
  args.weight = layer.weight.const_data_ptr();
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  args.rows = some.size(0);
  args.n = layer.weight.size(0);
  args.k = layer.weight.size(1);
  args.weight_stride = layer.weight.stride(0);
  args.out = static_cast<char*>(out.mutable_data_ptr()) + first * args.n * out.element_size();
  args.order = order;
  const DType dtype = dtype_of(out);
  share_gemm((args.n + columns - 1) / columns, args.rows,
             [&](int64_t panels) { return kernels.gemm_scratch(dtype, args.k, panels, order); },
             [&](int64_t panel, int64_t end, int64_t row_begin, int64_t row_end, float* scratch) {
               kernels.gemm(dtype, args, panel, end, row_begin, row_end, scratch);
             });
}

at::Tensor gemm_linear(const at::Tensor& x, const LinearLayer& layer, int64_t rows, int64_t columns) {
  const at::Tensor out = outputs_of(x, layer.weight), matrix = x.reshape({rows, x.size(-1)});
  const auto multiply = [&](const at::Tensor& some, int64_t first) {
    gemm_rows(layer, some, columns, Order::fastest, first, out);
  };
  if (linear_widens(x.scalar_type())) {
    for_widened_rows(matrix, multiply);
  } else {
    multiply(matrix.contiguous(), 0);
  }
  return out;
}

// Rows of a contiguous matrix as gemm takes them in the order of one row.
at::Tensor packed_rows(const at::Tensor& matrix) {
  // Fewer take a thread no longer than it takes to wake another.
  constexpr int64_t kRowsPerThread = 16;
  const LinearKernels& kernels = LB_KERNELS(linear_kernels);
  const DType dtype = dtype_of(matrix);
  const int64_t k = matrix.size(1), floats = kernels.gemm_row_floats(dtype, k);
  const auto* from = static_cast<const char*>(matrix.const_data_ptr());
  at::Tensor packed = empty_cpu({matrix.size(0), floats}, at::kFloat);
  float* to = packed.mutable_data_ptr<float>();
  parallel_for(0, matrix.size(0), kRowsPerThread, [&](int64_t begin, int64_t end) {
    kernels.gemm_pack_rows(dtype, from + begin * k * matrix.element_size(), end - begin, k,
                           to + begin * floats);
  });
  return packed;
}

// The same of layers with one x, each row with the bits it has alone. x is packed once, some rows at a time: those of a long
// prompt take its memory again.
std::vector<at::Tensor> gemm_linears_of_one_row(const at::Tensor& x, c10::ArrayRef<LinearLayer> layers,
                                                int64_t rows) {
  constexpr int64_t kMostRows = 2048;
  std::vector<at::Tensor> outs;
  for (const LinearLayer& layer : layers) outs.push_back(outputs_of(x, layer.weight));
  const at::Tensor matrix = x.reshape({rows, x.size(-1)}).contiguous();
  for (int64_t row = 0; row < rows; row += kMostRows) {
    const at::Tensor packed = packed_rows(matrix.narrow(0, row, std::min(kMostRows, rows - row)));
    for (size_t i = 0; i < layers.size(); ++i) {
      const int64_t columns = gemm_of_one_row_columns(layers[i].weight, rows);
      gemm_rows(layers[i], packed, columns, Order::of_one_row, row, outs[i]);
    }
  }
  return outs;
}

}  // namespace

at::Tensor linear_cpu(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_linear(x, weight, bias);
  if (weight.size(1) == 0) return linear_cpu(one_zero_column(x), one_zero_column(weight), bias);
  return fastest_linear(x, weight, bias);
}

at::Tensor fastest_linear(const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias) {
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  if (gemm_of_one_row_columns(weight, rows) > 0)
    return std::move(gemm_linears_of_one_row(x, {{weight, bias}}, rows).front());
  if (is_own(weight, rows)) return own_linear(x, weight, bias, order_of(rows));
  const int64_t columns = gemm_columns(weight, rows);
  return columns > 0 ? gemm_linear(x, {weight, bias}, rows, columns) : torch_linear(x, weight, bias);
}

std::vector<at::Tensor> fastest_linears(const at::Tensor& x, c10::ArrayRef<LinearLayer> layers) {
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  const auto are_all = [&](const auto& is) { return std::all_of(layers.begin(), layers.end(), is); };
  if (are_all([&](const LinearLayer& of) { return gemm_of_one_row_columns(of.weight, rows) > 0; }))
    return gemm_linears_of_one_row(x, layers, rows);
  if (are_all([&](const LinearLayer& of) { return of.weight.size(1) > 0 && is_own(of.weight, rows); }))
    return own_linears(x, layers, order_of(rows));
  std::vector<at::Tensor> outs;
  for (const LinearLayer& layer : layers) outs.push_back(linear_cpu(x, layer.weight, layer.bias));
  return outs;
}

namespace {

std::vector<at::Tensor> linears_cpu(const at::Tensor& x, at::TensorList weights,
                                    const OptionalTensors& biases) {
  check_linears(x, weights, biases);
  const std::vector<std::optional<at::Tensor>> given = biases.vec();
  c10::SmallVector<LinearLayer, 4> layers;
  for (size_t i = 0; i < given.size(); ++i) layers.push_back({weights[i], given[i]});
  return fastest_linears(x, layers);
}

// The very ops it is made of: their results to the bit.
at::Tensor gated_linear_cpu(const at::Tensor& x, const at::Tensor& gate_weight,
                            const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
                            const std::optional<at::Tensor>& up_bias, c10::string_view activation,
                            double alpha) {
  check_gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, activation, alpha);
  const std::vector<at::Tensor> both = fastest_linears(x, {{gate_weight, gate_bias}, {up_weight, up_bias}});
  return gated_activation_cpu(both[0], both[1], activation, alpha, std::nullopt, 0.0);
}

double stream_sum_cpu(const at::Tensor& x) {
  constexpr const char* op = "_stream_sum";
  LB_CHECK_TYPE(x.scalar_type() == at::kFloat, op, "x must be float32, got ", x.scalar_type(),
                "; convert it");
  LB_CHECK_VALUE(x.is_contiguous(), op, "x must be contiguous, got strides ", x.strides(), "; copy it");
  const auto sum = LB_KERNELS(linear_kernels).stream_sum;
  const float* data = x.const_data_ptr<float>();
  require_threads();
  return at::parallel_reduce(
      0, x.numel(), kGrainBytes / 4, 0.0,
      [&](int64_t begin, int64_t end, double before) { return before + sum(data + begin, end - begin); },
      [](double a, double b) { return a + b; });
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("linear", &liteboost::linear_cpu);
  m.impl("_linears", &liteboost::linears_cpu);
  m.impl("gated_linear", &liteboost::gated_linear_cpu);
  m.impl("_stream_sum", &liteboost::stream_sum_cpu);
}
