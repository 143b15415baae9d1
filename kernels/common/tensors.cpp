#include "common/tensors.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace liteboost {
namespace {

// Whether all dimensions but the last reduce to one stride, which is then in `stride`.
bool collapse(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t* stride) {
  int64_t inner = 0;  // Rows spanned by the dimensions seen so far; 0 before the first.
  *stride = sizes.back();
  for (int64_t dim = static_cast<int64_t>(sizes.size()) - 2; dim >= 0; --dim) {
    if (sizes[dim] == 1) continue;
    if (inner == 0) {
      *stride = strides[dim];
      inner = sizes[dim];
    } else if (strides[dim] != *stride * inner) {
      return false;
    } else {
      inner *= sizes[dim];
    }
  }
  return true;
}

}  // namespace

Rows rows_of(const at::Tensor& tensor, bool unit_step) {
  const auto sizes = tensor.sizes();
  Rows rows{};
  rows.size = sizes.back();
  rows.count = rows.size == 0 ? 0 : tensor.numel() / rows.size;
  rows.step = rows.size <= 1 ? 1 : tensor.strides().back();
  if ((unit_step && rows.step != 1) || !collapse(sizes, tensor.strides(), &rows.stride)) {
    rows.copy = tensor.clone(at::MemoryFormat::Contiguous);
    rows.stride = rows.size;
    rows.step = 1;
  }
  rows.data = rows.copy.defined() ? rows.copy.const_data_ptr() : tensor.const_data_ptr();
  return rows;
}

at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor tensor(at::detail::empty_cpu(sizes, dtype, false, std::nullopt));
  // As at::empty does it where torch.use_deterministic_algorithms asks for memory to be filled.
  const at::Context& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

at::Tensor one_zero_column(const at::Tensor& tensor) {
  c10::DimVector sizes(tensor.sizes());
  sizes.back() = 1;
  return at::zeros(sizes, tensor.options());
}

}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  // What the kernels allocate, before they write to it: shows that a switch for filled memory reaches them.
  m.def("_empty(int[] sizes, ScalarType dtype) -> Tensor", &liteboost::empty_cpu);
}
