#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>

#include "common/parallel.h"
#include "common/tensors.h"
#include "int8_linear/int8_linear.h"
#include "int8_linear/int8_linear_checks.h"

namespace liteboost {
namespace {

// Bytes of weight below which a thread is not worth waking.
constexpr int64_t kGrainBytes = 32 << 10;
// A thread's part of few rows is a multiple of this many outputs: as many as the widest register has lanes.
constexpr int64_t kBlock = 16;
// Rows that are not packed: the loops of vectors are as fast.
constexpr int64_t kAloneRows = 4;
// Rows that make the interleaving of a panel a small part of the work on it.
constexpr int64_t kPanelRows = 128;
// The most bytes of panels of one task where there are several, which stay in the second cache beside rows of x.
constexpr int64_t kGroupBytes = 1 << 20;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void run_few(const Int8LinearKernels& kernels, DType dtype, c10::ArrayRef<Int8LinearArgs> layers) {
  const auto blocks_of = [](const Int8LinearArgs& args) { return ceil_div(args.n, kBlock); };
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / (kBlock * layers.front().k));
  parallel_for_parts(layers, grain, blocks_of, [&](const Int8LinearArgs& args, int64_t begin, int64_t end) {
    kernels.few(dtype, args, begin * kBlock, std::min(end * kBlock, args.n));
  });
}

// Tasks are some panels and some of the rows: all of them where there are panels enough for the threads. Each row of
// x is read once for all panels of a task.
void run_panels(const Int8LinearKernels& kernels, DType dtype, const Int8LinearArgs& args) {
  const int64_t panel_words = kernels.words(args.k) * kernels.panel_columns;
  const int64_t most = std::clamp<int64_t>(kGroupBytes / (panel_words * 4), 1, kernels.most_panels);
  const int64_t panels = ceil_div(args.n, kernels.panel_columns);
  const int64_t groups = ceil_div(panels, most);
  const int64_t wanted = ceil_div(4 * at::get_num_threads(), groups);
  const int64_t parts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, args.rows / kPanelRows));
  parallel_for(0, groups * parts, 1, [&](int64_t begin, int64_t end) {
    const c10::DataPtr memory = c10::GetCPUAllocator()->allocate(panel_words * 4 * std::min(most, panels));
    int32_t* packed = static_cast<int32_t*>(memory.get());
    int64_t there = -1;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / parts, part = task % parts, first = group * most;
      const Int8Panels some = {first, std::min(most, panels - first), packed};
      for (int64_t i = 0; group != there && i < some.count; ++i)
        kernels.pack(args, first + i, packed + i * panel_words);
      there = group;
      kernels.panels(dtype, args, some, args.rows * part / parts, args.rows * (part + 1) / parts);
    }
  });
}

struct Layer {
  const at::Tensor& weight;
  const at::Tensor& scales;
  const std::optional<at::Tensor>& bias;
};

// Contiguous operands, held while `args` points to them.
struct Operands {
  c10::MaybeOwned<at::Tensor> weight;
  at::Tensor scales, bias;

  explicit Operands(const Layer& layer)
      : weight(layer.weight.expect_contiguous()), scales(layer.scales.to(at::kFloat).contiguous()) {
    if (layer.bias.has_value()) bias = layer.bias->contiguous();
  }
};

// Of layers that are checked, with one x: its rows are rounded once.
std::vector<at::Tensor> products(const at::Tensor& x, c10::ArrayRef<Layer> layers) {
  const Int8LinearKernels& kernels = LB_KERNELS(int8_linear_kernels);
  const DType dtype = dtype_of(x);
  const auto x_rows = x.expect_contiguous();
  c10::DimVector sizes(x.sizes());
  std::vector<at::Tensor> outs;
  outs.reserve(layers.size());
  c10::SmallVector<Operands, 4> operands;
  c10::SmallVector<Int8LinearArgs, 4> each;
  for (const Layer& layer : layers) {
    sizes.back() = layer.weight.size(0);
    at::Tensor& out = outs.emplace_back(empty_cpu(sizes, x.scalar_type()));
    if (out.numel() == 0) continue;
    const Operands& held = operands.emplace_back(layer);
    Int8LinearArgs& args = each.emplace_back();
    args.x = x_rows->const_data_ptr();
    args.weight = held.weight->const_data_ptr<int8_t>();
    args.scales = held.scales.const_data_ptr<float>();
    args.bias = held.bias.defined() ? held.bias.const_data_ptr() : nullptr;
    args.out = out.mutable_data_ptr();
    args.n = layer.weight.size(0);
    args.k = layer.weight.size(1);
    args.rows = out.numel() / args.n;
  }
  if (each.empty()) return outs;

  // Words, which want the alignment that torch's allocator gives, then those that are packed, scales and offsets.
  const int64_t rows = each.front().rows, k = each.front().k, words = kernels.words(k);
  const bool is_packed = rows > kAloneRows && rows <= kernels.most_packed_rows;
  const int64_t packed_words = is_packed ? kernels.some_words(rows, k) : 0;
  const at::Tensor quantized = empty_cpu({rows * (words + 2) + packed_words}, at::kInt);
  for (Int8LinearArgs& args : each) {
    args.words = quantized.mutable_data_ptr<int32_t>();
    args.packed = is_packed ? args.words + rows * words : nullptr;
    args.row_offsets = args.words + rows * words + packed_words;
    args.row_scales = reinterpret_cast<float*>(args.row_offsets + rows);
  }
  const Int8LinearArgs& first = each.front();
  parallel_rows(rows, k, [&](int64_t begin, int64_t end) { kernels.quantize(dtype, first, begin, end); });
  if (is_packed) kernels.pack_some(first, first.packed);
  if (is_packed || rows <= kernels.most_few_rows) {
    run_few(kernels, dtype, each);
  } else {
    for (const Int8LinearArgs& args : each) run_panels(kernels, dtype, args);
  }
  return outs;
}

at::Tensor linear_w8a8_cpu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                           const std::optional<at::Tensor>& bias) {
  check_linear_w8a8(x, weight, scales, bias);
  if (weight.size(1) == 0) return linear_w8a8_cpu(one_zero_column(x), one_zero_column(weight), scales, bias);
  return std::move(products(x, {{weight, scales, bias}}).front());
}

std::vector<at::Tensor> linears_w8a8_cpu(const at::Tensor& x, at::TensorList weights, at::TensorList scales,
                                         const OptionalTensors& biases) {
  check_linears_w8a8(x, weights, scales, biases);
  const std::vector<std::optional<at::Tensor>> given = biases.vec();
  std::vector<at::Tensor> outs;
  if (x.size(-1) == 0) {
    for (size_t i = 0; i < given.size(); ++i)
      outs.push_back(linear_w8a8_cpu(x, weights[i], scales[i], given[i]));
    return outs;
  }
  c10::SmallVector<Layer, 4> layers;
  for (size_t i = 0; i < given.size(); ++i) layers.push_back({weights[i], scales[i], given[i]});
  return products(x, layers);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("linear_w8a8", &liteboost::linear_w8a8_cpu);
  m.impl("_linears_w8a8", &liteboost::linears_w8a8_cpu);
}
