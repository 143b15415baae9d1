#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>

#include "common/tensors.h"
#include "linear/linear_cpu.h"
#include "quantized_linear/quantized_linear.h"
#include "quantized_linear/quantized_linear_checks.h"

namespace liteboost {
namespace {

// Bytes of weight below which a thread is not worth waking.
constexpr int64_t kGrainBytes = 32 << 10;
// A thread's part is a multiple of this many rows of weight, so that few tiles are cut short.
constexpr int64_t kBlock = 8;
// Packed x up to this size lives on the stack.
constexpr int64_t kStackBytes = 16 << 10;
// How much of a weight is multiplied out at a time for many rows: it stays in the last cache until it is read.
constexpr int64_t kTileBytes = 4 << 20;

int64_t rows_of_x(const at::Tensor& x) {
  c10::DimVector sizes(x.sizes());
  sizes.back() = 1;
  return c10::multiply_integers(sizes);
}

// f over [0, n) in blocks of rows of weight.
template <typename F>
void parallel_blocks(const QuantizedWeight& weight, const F& f) {
  const int64_t block_bytes = std::max<int64_t>(1, kBlock * weight.k * weight.bits / 8);
  const int64_t blocks = (weight.n + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, std::max<int64_t>(1, kGrainBytes / block_bytes),
                   [&](int64_t begin, int64_t end) { f(begin * kBlock, std::min(end * kBlock, weight.n)); });
}

// Few rows: the weight is read as it is packed.
void run_packed(const at::Tensor& x, int64_t rows, const QuantizedWeight& weight, const at::Tensor& bias,
                at::Tensor& out) {
  const QuantizedLinearKernels& kernels = LB_KERNELS(quantized_linear_kernels);
  const DType dtype = dtype_of(x);
  const auto x_rows = x.expect_contiguous();
  alignas(64) char stack[kStackBytes];
  c10::DataPtr heap;
  void* packed = stack;
  const int64_t bytes = kernels.packed_bytes(dtype, weight.bits, std::min(rows, kQuantizedChunk), weight.k);
  if (bytes > kStackBytes) {
    heap = c10::GetCPUAllocator()->allocate(bytes);
    packed = heap.get();
  }
  QuantizedLinearArgs args;
  args.weight = weight;
  args.packed_x = packed;
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  const int64_t size = x.element_size();
  for (int64_t row = 0; row < rows; row += kQuantizedChunk) {
    args.rows = std::min(rows - row, kQuantizedChunk);
    args.out = static_cast<char*>(out.mutable_data_ptr()) + row * weight.n * size;
    const char* chunk = static_cast<const char*>(x_rows->const_data_ptr()) + row * weight.k * size;
    kernels.pack(dtype, weight.bits, chunk, args.rows, weight.k, packed);
    parallel_blocks(weight, [&](int64_t begin, int64_t end) { kernels.run(dtype, args, begin, end); });
  }
}

// Many rows: tiles of the weight are multiplied out, and linear does the rest.
void run_tiles(const at::Tensor& x, int64_t rows, const QuantizedWeight& weight, const at::Tensor& bias,
               at::Tensor& out) {
  const QuantizedLinearKernels& kernels = LB_KERNELS(quantized_linear_kernels);
  const DType dtype = dtype_of(x);
  const at::Tensor matrix = x.reshape({rows, weight.k});
  at::Tensor result = out.view({rows, weight.n});
  const int64_t tile_rows = kTileBytes / (weight.k * x.element_size()) / kBlock * kBlock;
  const int64_t most = std::min(weight.n, std::max<int64_t>(kBlock, tile_rows));
  const at::Tensor memory = empty_cpu({most, weight.k}, x.scalar_type());
  for (int64_t begin = 0; begin < weight.n; begin += most) {
    const int64_t count = std::min(most, weight.n - begin);
    char* tile = static_cast<char*>(memory.mutable_data_ptr());
    at::parallel_for(0, count, std::max<int64_t>(1, kGrainBytes / weight.k), [&](int64_t from, int64_t to) {
      char* at = tile + from * weight.k * x.element_size();
      kernels.unpack(dtype, weight, begin + from, begin + to, at);
    });
    std::optional<at::Tensor> part;
    if (bias.defined()) part = bias.narrow(0, begin, count);
    result.narrow(1, begin, count).copy_(linear_cpu(matrix, memory.narrow(0, 0, count), part));
  }
}

at::Tensor product(const at::Tensor& x, const QuantizedWeight& weight,
                   const std::optional<at::Tensor>& bias) {
  c10::DimVector sizes(x.sizes());
  sizes.back() = weight.n;
  at::Tensor out = empty_cpu(sizes, x.scalar_type());
  if (out.numel() == 0) return out;
  if (weight.k == 0) return bias.has_value() ? out.copy_(*bias) : out.zero_();
  const at::Tensor bias_vector = bias.has_value() ? bias->contiguous() : at::Tensor();
  const int64_t rows = rows_of_x(x);
  rows > kQuantizedRows ? run_tiles(x, rows, weight, bias_vector, out)
                        : run_packed(x, rows, weight, bias_vector, out);
  return out;
}

at::Tensor linear_w8_cpu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                         const std::optional<at::Tensor>& bias) {
  check_linear_w8(x, weight, scales, bias);
  const auto data = weight.expect_contiguous();
  const auto scale_data = scales.expect_contiguous();
  return product(x,
                 {data->const_data_ptr(), scale_data->const_data_ptr(), nullptr, weight.size(0),
                  weight.size(1), 1, 8, dtype_of(scales)},
                 bias);
}

at::Tensor linear_w4_cpu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                         const std::optional<at::Tensor>& zero_points,
                         const std::optional<at::Tensor>& bias) {
  check_linear_w4(x, weight, scales, zero_points, bias);
  const auto data = weight.expect_contiguous();
  const auto scale_data = scales.expect_contiguous();
  const at::Tensor zeros = zero_points.has_value() ? zero_points->contiguous() : at::Tensor();
  return product(x,
                 {data->const_data_ptr(), scale_data->const_data_ptr(),
                  zeros.defined() ? zeros.const_data_ptr<uint8_t>() : nullptr, weight.size(0),
                  weight.size(1) * 2, scales.size(1), 4, dtype_of(scales)},
                 bias);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("linear_w8", &liteboost::linear_w8_cpu);
  m.impl("linear_w4", &liteboost::linear_w4_cpu);
}
