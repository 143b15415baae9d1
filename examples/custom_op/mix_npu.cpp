// The same as one aclnn operator. One of your own, in a libcust_opapi.so on ASCEND_CUSTOM_OPP_PATH, is called in the
// same way: its name is looked up in vendors' libraries first, then in CANN's.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "npu/aclnn.h"

namespace {

using liteboost::npu::Operator;
using liteboost::npu::Tensor;

// aclnnLerpGetWorkspaceSize(self, end, weight, out, ...)
const Operator<Tensor, Tensor, Tensor, Tensor> kLerp{"aclnnLerp"};

at::Tensor mix_npu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight) {
  const c10::DeviceGuard guard(a.device());  // launches go to the current device's stream
  at::Tensor out = at::empty_like(a);
  kLerp(a, b, weight, out);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_op, PrivateUse1, m) { m.impl("mix", &mix_npu); }
