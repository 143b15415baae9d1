#include "common/checks.h"

#include <c10/core/GradMode.h>

#include <string>

namespace liteboost {
namespace {

// As Python spells it; c10 prints "Half" and "Float".
std::string name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace

void check_dtype(const char* op, const char* argument, const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  LB_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op, argument,
                " must be float32, bfloat16 or float16, got ", name_of(dtype),
                "; convert it, or use the plain PyTorch code for other dtypes");
}

void check_same_dtype(const char* op, const char* argument, const at::Tensor& tensor,
                      const char* reference_argument, const at::Tensor& reference, bool or_float32) {
  const auto dtype = tensor.scalar_type();
  if (dtype == reference.scalar_type() || (or_float32 && dtype == at::kFloat)) return;
  LB_CHECK_TYPE(false, op, argument, " must have the dtype of ", reference_argument, " (",
                name_of(reference.scalar_type()), ")", or_float32 ? " or float32" : "", ", got ",
                name_of(dtype), "; convert one of them");
}

void check_same_device(const char* op, const char* argument, const at::Tensor& tensor,
                       const char* reference_argument, const at::Tensor& reference) {
  LB_CHECK_VALUE(tensor.device() == reference.device(), op, argument, " must be on the device of ",
                 reference_argument, " (", reference.device(), "), got ", tensor.device(),
                 "; move one of them");
}

void check_same_shape(const char* op, const char* argument, const at::Tensor& tensor,
                      const char* reference_argument, const at::Tensor& reference) {
  LB_CHECK_VALUE(tensor.sym_sizes() == reference.sym_sizes(), op, argument, " must have the shape of ",
                 reference_argument, " = ", reference.sym_sizes(), ", got ", tensor.sym_sizes(),
                 "; expand it before the call");
}

void check_vector(const char* op, const char* argument, const at::Tensor& tensor, const c10::SymInt& size,
                  const char* what) {
  LB_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) == size, op, argument, " must have shape [", what,
                 "] = [", size, "], got ", tensor.sym_sizes(), "; pass the ", argument,
                 " that belongs to this layer, whole");
}

void check_no_grad(const char* op, const char* argument, const at::Tensor& tensor) {
  if (!tensor.requires_grad() || !c10::GradMode::is_enabled()) return;
  TORCH_CHECK(
      false, "liteboost::", op, ": has no backward, but ", argument,
      " requires grad and grad mode is on; call it under torch.no_grad() or torch.inference_mode(), or "
      "use the plain PyTorch code for training");
}

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      return DType::f32;
  }
}

}  // namespace liteboost
