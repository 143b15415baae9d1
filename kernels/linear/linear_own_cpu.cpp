// linear's own loops (linear_cpu_isa.cpp), over threads: of one weight, or of several that have one x.
#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "common/checks.h"
#include "common/isa.h"
#include "common/resources.h"
#include "common/tensors.h"
#include "linear/linear.h"
#include "linear/linear_cpu.h"

namespace liteboost {
namespace {

// Bytes of weight below which a thread is not worth waking.
constexpr int64_t kGrainBytes = 64 << 10;

// Bytes of weight that one thread multiplies alone, for up to kAloneRows rows: it takes the 20 us that it takes to wake
// another one where threads sleep while they wait, and MKL as well does it alone. On a Zen 3, two threads, one row:
// [256, 256] in 12 us in place of 29, [512, 256] in 25 in place of 56.
constexpr int64_t kAloneBytes = 512 << 10;
constexpr int64_t kAloneRows = 4;
// How much more where they are known to sleep. On a Zen 4, two threads, float32, from the cache: [2048, 128] of one row in
// 15 us in place of 63, [344, 128] of 24 rows in 24 in place of 63; from memory, one row, 1 MB in 81 in place of 86, 2 MB in
// 129 in place of 121.
constexpr int64_t kAloneAsleep = 4;

// A thread's part is a multiple of this many rows of weight, so that few tiles are cut short.
constexpr int64_t kBlock = 8;

// Packed x up to this size lives on the stack.
constexpr int64_t kStackBytes = 8 << 10;

// Up to most_rows rows of x, packed, by each weight.
void run_chunk(const LinearKernels& kernels, DType dtype, c10::ArrayRef<LinearArgs> products,
               int64_t element_size) {
  const LinearArgs& first = products.front();
  const auto blocks_of = [](const LinearArgs& args) { return (args.n + kBlock - 1) / kBlock; };
  int64_t blocks = 0;
  for (const LinearArgs& args : products) blocks += blocks_of(args);
  const int64_t block_bytes = std::max<int64_t>(1, kBlock * first.k * element_size);
  const int64_t alone_bytes = (threads_sleep() ? kAloneAsleep : 1) * kAloneBytes;
  const bool is_alone = blocks * block_bytes * std::max(first.rows, kAloneRows) <= alone_bytes * kAloneRows;
  const int64_t grain = is_alone ? blocks : std::max<int64_t>(1, kGrainBytes / block_bytes);
  parallel_for_parts(products, grain, blocks_of, [&](const LinearArgs& args, int64_t begin, int64_t end) {
    kernels.run(dtype, args, begin * kBlock, std::min(end * kBlock, args.n));
  });
}

}  // namespace

at::Tensor own_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      Order order) {
  return std::move(own_linears(x, {{weight, bias}}, order).front());
}

std::vector<at::Tensor> own_linears(const at::Tensor& x, c10::ArrayRef<LinearLayer> layers, Order order) {
  const int64_t k = x.size(-1);
  c10::DimVector sizes(x.sizes());
  sizes.back() = 1;
  const int64_t rows = c10::multiply_integers(sizes);
  const DType dtype = dtype_of(x);
  const int64_t element_size = x.element_size();
  std::vector<at::Tensor> outs;
  outs.reserve(layers.size());
  c10::SmallVector<c10::MaybeOwned<at::Tensor>, 4> biases;
  c10::SmallVector<LinearArgs, 4> products;
  for (const LinearLayer& layer : layers) {
    sizes.back() = layer.weight.size(0);
    if (outs.emplace_back(empty_cpu(sizes, x.scalar_type())).numel() == 0) continue;
    LinearArgs& args = products.emplace_back();
    args.order = order;
    args.weight = layer.weight.const_data_ptr();
    args.weight_stride = layer.weight.stride(0);
    args.bias = nullptr;
    if (layer.bias.has_value())
      args.bias = biases.emplace_back(layer.bias->expect_contiguous())->const_data_ptr();
    args.out = outs.back().mutable_data_ptr();
    args.n = layer.weight.size(0);
    args.k = k;
  }
  if (products.empty()) return outs;

  const auto x_rows = x.expect_contiguous();
  const LinearKernels& kernels = LB_KERNELS(linear_kernels);
  alignas(64) char stack[kStackBytes];
  void* packed = stack;
  c10::DataPtr heap;
  const int64_t most_rows = kernels.most_rows(dtype, order);
  const int64_t packed_bytes = kernels.packed_bytes(dtype, std::min(rows, most_rows), k, order);
  if (packed_bytes > kStackBytes) {
    heap = c10::GetCPUAllocator()->allocate(packed_bytes);
    packed = heap.get();
  }
  const char* chunk = static_cast<const char*>(x_rows->const_data_ptr());
  for (int64_t row = 0, count; row < rows; row += count) {
    count = std::min(rows - row, most_rows);
    const int64_t parts = kernels.pack_parts(dtype, count, k, order);
    const int64_t part_bytes = count * k * element_size / parts;
    parallel_for(0, parts, std::max<int64_t>(1, kGrainBytes / part_bytes), [&](int64_t begin, int64_t end) {
      kernels.pack_some(dtype, chunk, count, k, order, begin, end, packed);
    });
    for (LinearArgs& args : products) {
      args.packed_x = packed;
      args.rows = count;
    }
    run_chunk(kernels, dtype, products, element_size);
    chunk += count * k * element_size;
    for (LinearArgs& args : products) args.out = static_cast<char*>(args.out) + count * args.n * element_size;
  }
  return outs;
}

}  // namespace liteboost
