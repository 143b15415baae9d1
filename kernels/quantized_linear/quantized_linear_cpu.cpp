#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>

#include "common/batch_invariant.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "linear/linear_cpu.h"
#include "linear/linear_gemm_shares.h"
#include "quantized_linear/matrix_product.h"
#include "quantized_linear/quantized_linear.h"
#include "quantized_linear/quantized_linear_checks.h"
#include "quantized_linear/quantized_linear_cpu.h"

#ifdef LB_X86_ISAS
#include <cpuid.h>
#endif

namespace liteboost {
namespace {

// Bytes of weight below which a thread is not worth waking.
constexpr int64_t kGrainBytes = 32 << 10;
// Packed x up to this size lives on the stack; of more rows, as many at once as fit the second cache.
constexpr int64_t kStackBytes = 16 << 10;
constexpr int64_t kPackedBytes = 384 << 10, kPackedTileBytes = 1 << 20;
constexpr int64_t kLeastRows = 64;
// How much of a weight is dequantized at a time for torch's product: it stays in the last cache until it is read.
constexpr int64_t kMultipliedBytes = 4 << 20;

// Rows of x that are packed at once.
int64_t rows_at_once(const QuantizedLinearKernels& kernels, DType dtype, const QuantizedTiles& weight,
                     int64_t rows) {
  const int64_t bytes = kernels.packed_bytes(dtype, weight, kLeastRows) / kLeastRows;
  // Each weight is unpacked once for all.
  const bool is_tiled = kernels.has_matrix_unit && dtype == DType::bf16;
  const int64_t most = is_tiled ? kPackedTileBytes : kPackedBytes;
  return std::min(rows, std::max(kLeastRows, most / bytes / kLeastRows * kLeastRows));
}

// A weight that x is multiplied by, of several.
struct Product {
  const QuantizedTiles& weight;
  const void* bias;  // [n] or null
  char* out;         // [rows, n]
};

// The weights are read as integers. Those of several products are shared out as if they were one: threads wait for each
// other once. Returns whether all outputs are finite.
bool run_int_dot(const at::Tensor& x, int64_t rows, c10::ArrayRef<Product> products) {
  const QuantizedLinearKernels& kernels = LB_KERNELS(quantized_linear_kernels);
  const DType dtype = dtype_of(x);
  const QuantizedTiles& first_weight = products[0].weight;  // x is packed alike for all
  const auto x_rows = x.expect_contiguous();
  const int64_t most = rows_at_once(kernels, dtype, first_weight, rows);
  alignas(64) char stack[kStackBytes];
  c10::DataPtr heap;
  void* packed = stack;
  const int64_t bytes = kernels.packed_bytes(dtype, first_weight, most);
  if (bytes > kStackBytes) {
    heap = c10::GetCPUAllocator()->allocate(bytes);
    packed = heap.get();
  }
  const int64_t size = x.element_size();
  const int64_t step = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, first_weight.tile_bytes()));
  int64_t tiles = 0;
  for (const auto& each : products) tiles += tiles_of(each.weight.n);
  bool not_finite = false;
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(rows - row, most);
    const char* part = static_cast<const char*>(x_rows->const_data_ptr()) + row * first_weight.k * size;
    const int64_t chunks = kernels.chunks(dtype, first_weight, count);
    parallel_rows(chunks, (count + chunks - 1) / chunks * first_weight.k, [&](int64_t begin, int64_t end) {
      kernels.pack_chunks(dtype, first_weight, part, count, begin, end, packed);
    });
    parallel_shares(tiles, step, at::get_num_threads(), [&](int64_t begin, int64_t end) {
      int64_t first = 0;  // of the tiles of a product
      for (const auto& each : products) {
        const int64_t n = each.weight.n, behind = first + tiles_of(n);
        const int64_t from = std::max(begin, first), to = std::min(end, behind);
        if (from < to) {
          QuantizedLinearArgs args{};
          args.packed_x = packed;
          args.bias = each.bias;
          args.out = each.out + row * n * size;
          args.rows = count;
          args.out_stride = n;
          args.not_finite = &not_finite;
          args.weight = each.weight;
          kernels.run(dtype, args, from - first, to - first);
        }
        first = behind;
      }
    });
  }
  return !not_finite;
}

// Rows [begin, end) in tiles of the weight, dequantized.
void unpack_range(const QuantizedLinearKernels& kernels, DType dtype, const QuantizedTiles& weight,
                  int64_t begin, int64_t end, char* out) {
  const int64_t stride = kTile * weight.k * (dtype == DType::f32 ? 4 : 2);
  for (int64_t tile = begin; tile < end; ++tile, out += stride) kernels.unpack(dtype, weight, tile, out);
}

// Some tiles of the weight at a time are dequantized, and torch's product does the rest.
void run_dequantized(const at::Tensor& x, int64_t rows, const QuantizedTiles& weight, const at::Tensor& bias,
                     at::Tensor& out) {
  const QuantizedLinearKernels& kernels = LB_KERNELS(quantized_linear_kernels);
  const DType dtype = dtype_of(x);
  const at::Tensor matrix = x.reshape({rows, weight.k});
  at::Tensor result = out.view({rows, weight.n});
  const int64_t tile = kTile * weight.k * x.element_size(), tiles = tiles_of(weight.n);
  const int64_t most = std::min(tiles, std::max<int64_t>(1, kMultipliedBytes / tile));
  const at::Tensor memory = empty_cpu({most * kTile, weight.k}, x.scalar_type());
  for (int64_t begin = 0; begin < tiles; begin += most) {
    const int64_t count = std::min(most, tiles - begin);
    char* to = static_cast<char*>(memory.mutable_data_ptr());
    parallel_for(0, count, std::max<int64_t>(1, kGrainBytes / tile), [&](int64_t from, int64_t end) {
      unpack_range(kernels, dtype, weight, begin + from, begin + end, to + from * tile);
    });
    const int64_t first = begin * kTile, outputs = std::min(count * kTile, weight.n - first);
    std::optional<at::Tensor> part;
    if (bias.defined()) part = bias.narrow(0, first, outputs);
    result.narrow(1, first, outputs).copy_(linear_cpu(matrix, memory.narrow(0, 0, outputs), part));
  }
}

// Whether torch's product of this dtype has units that the loops here do not use: matrix units, or an instruction for
// f16. Without them the loops are about as fast for any number of rows.
#ifdef LB_X86_ISAS
bool cpu_has_bf16_matrices() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && ((edx >> 22) & 1u);
}

bool has_units_of_its_own(at::ScalarType dtype) {
  static const bool has_matrices = cpu_has_bf16_matrices(), is_old = detect_isa() < Isa::avx2;
  return is_old ||
         (dtype == at::kBFloat16 ? has_matrices : dtype == at::kHalf && linear_max_rows(dtype) <= 32);
}
#else
bool has_units_of_its_own(at::ScalarType) { return true; }
#endif

// What x [..., k] gives of n outputs, and how many rows it has.
std::pair<at::Tensor, int64_t> empty_product(const at::Tensor& x, int64_t n) {
  c10::DimVector sizes(x.sizes());
  sizes.back() = 1;
  const int64_t rows = c10::multiply_integers(sizes);
  sizes.back() = n;
  return {empty_cpu(sizes, x.scalar_type()), rows};
}

// Which GEMM a product with this many rows of x takes: the loops on integers (of bf16 those of AMX where there is), tiles
// of bf16 pairs, panels of floats, or torch on dequantized weights.
enum class GemmPath { int_dot, matrix, panels, dequantized };

GemmPath gemm_path(at::ScalarType dtype, int64_t rows, bool rounds_x = false) {
  const QuantizedLinearKernels& kernels = LB_KERNELS(quantized_linear_kernels);
  if (rounds_x || rows <= std::max(kQuantizedRows, batch_invariant_rows()) ||
      (kernels.has_matrix_unit && dtype == at::kBFloat16)) {
    return GemmPath::int_dot;
  }
  if (has_units_of_its_own(dtype)) return GemmPath::dequantized;
  if (kernels.gemm.run != nullptr) return GemmPath::panels;
  const bool has_matrix = kernels.matrix.run != nullptr;
  return dtype == at::kBFloat16 && has_matrix ? GemmPath::matrix : GemmPath::int_dot;
}

// Returns whether all outputs are finite.
bool run_matrix(const at::Tensor& x, int64_t rows, const QuantizedTiles& weight, const void* bias,
                at::Tensor& out) {
  bool not_finite = false;
  MatrixProduct all{LB_KERNELS(quantized_linear_kernels).matrix, weight,     rows, bias, nullptr,
                    static_cast<char*>(out.mutable_data_ptr()),  &not_finite};
  const c10::DataPtr memory = c10::GetCPUAllocator()->allocate(all.chunks() * all.chunk_bytes());
  all.packed = static_cast<char*>(memory.get());
  all.pack(static_cast<const char*>(x.expect_contiguous()->const_data_ptr()));
  all.run();
  return !not_finite;
}

void run_panels(const at::Tensor& x, int64_t rows, const QuantizedTiles& weight, const void* bias,
                at::Tensor& out) {
  const QuantizedGemmKernels& gemm = LB_KERNELS(quantized_linear_kernels).gemm;
  const DType dtype = dtype_of(x);
  char* const first_out = static_cast<char*>(out.mutable_data_ptr());
  for_widened_rows(x.reshape({rows, weight.k}), [&](const at::Tensor& some, int64_t first) {
    QuantizedLinearArgs args{};
    args.weight = weight;
    args.bias = bias;
    args.out = first_out + first * weight.n * x.element_size();
    args.rows = some.size(0);
    share_gemm((tiles_of(weight.n) + kPanelTiles - 1) / kPanelTiles, args.rows,
               [&](int64_t panels) { return gemm.scratch(weight.k, panels); },
               [&](int64_t panel, int64_t end, int64_t row_begin, int64_t row_end, float* scratch) {
                 gemm.run(dtype, args, some.const_data_ptr<float>(), panel, end, row_begin, row_end, scratch);
               });
  });
}

// The outputs that are not finite once more, by the weight dequantized to fp32; see quantized_linear.h.
void redo_not_finite(const at::Tensor& x, int64_t rows, const QuantizedTiles& weight,
                     const std::optional<at::Tensor>& bias, const at::Tensor& out) {
  // What is at hand is computed below autograd and autocast.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::Tensor all = out.view({rows, weight.n});
  const at::Tensor index = at::isfinite(all).all(1).logical_not().nonzero().squeeze(1);
  if (index.numel() == 0) return;
  const at::Tensor chosen = x.reshape({rows, weight.k}).index_select(0, index).to(at::kFloat);
  at::Tensor made = empty_cpu({index.numel(), weight.n}, at::kFloat);
  run_dequantized(chosen, index.numel(), weight, bias.has_value() ? bias->to(at::kFloat) : at::Tensor(),
                  made);
  const at::Tensor found = all.index_select(0, index);
  all.index_copy_(0, index, at::where(at::isfinite(found), found, made.to(x.scalar_type())));
}

at::Tensor product(const at::Tensor& x, const QuantizedTiles& weight, const std::optional<at::Tensor>& bias) {
  auto [out, rows] = empty_product(x, weight.n);
  if (out.numel() == 0) return out;
  if (weight.k == 0) return bias.has_value() ? out.copy_(*bias) : out.zero_();
  const at::Tensor bias_vector = bias.has_value() ? bias->contiguous() : at::Tensor();
  const void* bias_data = bias_vector.defined() ? bias_vector.const_data_ptr() : nullptr;
  bool is_finite = true;
  switch (gemm_path(x.scalar_type(), rows, weight.rounds_x)) {
    case GemmPath::dequantized:
      run_dequantized(x, rows, weight, bias_vector, out);
      break;
    case GemmPath::matrix:
      is_finite = run_matrix(x, rows, weight, bias_data, out);
      break;
    case GemmPath::panels:
      run_panels(x, rows, weight, bias_data, out);
      break;
    case GemmPath::int_dot:
      is_finite =
          run_int_dot(x, rows, Product{weight, bias_data, static_cast<char*>(out.mutable_data_ptr())});
  }
  if (!is_finite && !weight.rounds_x) redo_not_finite(x, rows, weight, bias, out);
  return out;
}

int64_t rows_of(const at::Tensor& x) { return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)); }

// A weight in tiles, and what holds its memory.
struct Tiles {
  Tiles(int64_t k, const at::Tensor& tiles, const at::Tensor& scales,
        const std::optional<at::Tensor>& zero_points, int64_t out_features, bool rounds_x, int64_t rows)
      : data(tiles.expect_contiguous()),
        scale_data(scales.expect_contiguous()),
        zeros(zero_points.has_value() ? zero_points->contiguous() : at::Tensor()),
        weight{data->const_data_ptr(),
               scale_data->const_data_ptr(),
               zeros.defined() ? zeros.const_data_ptr<uint8_t>() : nullptr,
               out_features,
               k,
               scales.size(1),
               tiles.scalar_type() == at::kChar ? 8 : 4,
               dtype_of(scales),
               rounds_x,
               order_of(rows)} {}

  c10::MaybeOwned<at::Tensor> data, scale_data;
  at::Tensor zeros;
  QuantizedTiles weight;
};

// Whether x is packed for both alike.
bool are_alike(const QuantizedTiles& a, const QuantizedTiles& b) {
  return a.bits == b.bits && a.groups == b.groups && !a.zero_points == !b.zero_points;
}

std::vector<at::Tensor> linears_packed_cpu(const at::Tensor& x, at::TensorList tiles, at::TensorList scales,
                                           const OptionalTensors& zero_points, const OptionalTensors& biases,
                                           at::IntArrayRef out_features, bool rounds_x) {
  check_linears_packed(x, tiles, scales, zero_points, biases, out_features, rounds_x);
  std::vector<Tiles> weights;
  std::vector<at::Tensor> outs;
  c10::SmallVector<Product, 4> products;
  weights.reserve(tiles.size());
  outs.reserve(tiles.size());
  bool can_be = x.size(-1) > 0;
  int64_t rows = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Tiles& made = weights.emplace_back(x.size(-1), tiles[i], scales[i], zero_points.get(i),
                                             out_features[i], rounds_x, rows_of(x));
    can_be = can_be && are_alike(made.weight, weights[0].weight) &&
             (!biases.get(i).has_value() || biases.get(i)->is_contiguous());
    auto [out, count] = empty_product(x, out_features[i]);
    rows = count;
    const void* bias = biases.get(i).has_value() ? biases.get(i)->const_data_ptr() : nullptr;
    products.push_back({made.weight, bias, static_cast<char*>(out.mutable_data_ptr())});
    outs.push_back(std::move(out));
  }
  if (can_be && rows > 0 && gemm_path(x.scalar_type(), rows, rounds_x) == GemmPath::int_dot) {
    if (!run_int_dot(x, rows, products) && !rounds_x) {
      for (size_t i = 0; i < outs.size(); ++i)
        redo_not_finite(x, rows, weights[i].weight, biases.get(i), outs[i]);
    }
    return outs;
  }
  for (size_t i = 0; i < outs.size(); ++i) outs[i] = product(x, weights[i].weight, biases.get(i));
  return outs;
}

}  // namespace

bool uses_int_dot(at::ScalarType dtype, int64_t n, int64_t rows) {
  const GemmPath path = gemm_path(dtype, rows);
  return path == GemmPath::int_dot || (path == GemmPath::panels && !gemm_fills_threads(n, rows));
}

at::Tensor linear_packed_cpu(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                             const std::optional<at::Tensor>& zero_points,
                             const std::optional<at::Tensor>& bias, int64_t out_features) {
  check_linear_packed("linear_packed", x, tiles, scales, zero_points, bias, out_features);
  return product(x, Tiles(x.size(-1), tiles, scales, zero_points, out_features, false, rows_of(x)).weight,
                 bias);
}

namespace {

at::Tensor linear_w4a8_cpu(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                           const std::optional<at::Tensor>& zero_points,
                           const std::optional<at::Tensor>& bias, int64_t out_features) {
  check_linear_w4a8(x, tiles, scales, zero_points, bias, out_features);
  return product(x, Tiles(x.size(-1), tiles, scales, zero_points, out_features, true, rows_of(x)).weight,
                 bias);
}

}  // namespace

}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("linear_packed", &liteboost::linear_packed_cpu);
  m.impl("linear_w4a8", &liteboost::linear_w4a8_cpu);
  m.impl("_linears_packed", &liteboost::linears_packed_cpu);
}
