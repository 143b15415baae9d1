#include "npu/merged_weights.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "torch_npu/csrc/aten/common/from_blob.h"
#include "torch_npu/csrc/core/NPUStorageImpl.h"
#include "torch_npu/csrc/core/npu/NPUFormat.h"

namespace liteboost::npu {
namespace {

constexpr int64_t kNd = 2;
constexpr size_t kAlignment = 32;  // of what operators load, in bytes

// Why `part` cannot lie behind `first`; empty where it can.
bool is_like(const at::Tensor& part, const at::Tensor& first) {
  return part.defined() && part.device() == first.device() && part.scalar_type() == first.scalar_type() &&
         part.dim() == first.dim() && part.sizes().slice(1) == first.sizes().slice(1) && part.numel() > 0 &&
         part.is_contiguous() && part.nbytes() % kAlignment == 0 &&
         at_npu::native::get_npu_format(part) == kNd;
}

bool are_alike(at::TensorList parts) {
  if (parts.empty() || !parts[0].defined() || parts[0].dim() == 0) return false;
  if (!parts[0].device().is_privateuseone()) return false;
  for (const at::Tensor& part : parts) {
    if (!is_like(part, parts[0])) return false;
  }
  return true;
}

std::vector<int64_t> sizes_together(at::TensorList parts) {
  std::vector<int64_t> sizes = parts[0].sizes().vec();
  for (size_t i = 1; i < parts.size(); ++i) sizes[0] += parts[i].size(0);
  return sizes;
}

}  // namespace

at::Tensor merged_view(at::TensorList parts) {
  if (parts.empty() || !parts[0].defined()) return {};
  // First what is another in nearly every model that does not lie so.
  const char* next = static_cast<const char*>(parts[0].const_data_ptr());
  for (const at::Tensor& part : parts) {
    if (!part.defined() || part.const_data_ptr() != next) return {};
    next += part.nbytes();
  }
  if (!are_alike(parts)) return {};
  const auto options = at::TensorOptions().dtype(parts[0].scalar_type()).device(parts[0].device());
  return at_npu::native::from_blob(parts[0].data_ptr(), sizes_together(parts), parts[0].device(), options);
}

std::vector<at::Tensor> merge(at::TensorList parts) {
  TORCH_CHECK(are_alike(parts),
              "liteboost: _npu_merge takes contiguous tensors of one kind on an NPU, in ND, in multiples of ",
              kAlignment, " bytes");
  const c10::DeviceGuard guard(parts[0].device());
  const c10::InferenceMode outside(false);
  const at::Tensor whole = at::empty(sizes_together(parts), parts[0].options().requires_grad(false));
  std::vector<at::Tensor> made;
  int64_t row = 0;
  for (const at::Tensor& part : parts) {
    const at::Tensor target = whole.narrow(0, row, part.size(0));
    target.copy_(part);
    at::Tensor one = at_npu::native::from_blob(
        target.data_ptr(), target.sizes(), [whole](void*) {}, whole.options(), whole.device());
    // What torch_npu saves a tensor by: its from_blob notes one stride, whatever the dimensions.
    auto* storage = static_cast<torch_npu::NPUStorageImpl*>(one.storage().unsafeGetStorageImpl());
    storage->npu_desc_.base_strides_.assign(target.strides().begin(), target.strides().end());
    made.push_back(std::move(one));
    row += part.size(0);
  }
  return made;
}

}  // namespace liteboost::npu

namespace {

std::vector<at::Tensor> merge(std::vector<at::Tensor> parts) { return liteboost::npu::merge(parts); }

bool are_merged(std::vector<at::Tensor> parts) { return liteboost::npu::merged_view(parts).defined(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_merge(Tensor[] parts) -> Tensor[]", &merge);
  m.def("_npu_are_merged(Tensor[] parts) -> bool", &are_merged);
}
