// Argument checks shared by the CPU and Meta kernels of every op, so that no backend can forget one.
// Messages have the form: asked, found, what to do; each names its op and argument.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

#include "common/dtype.h"

#define LB_CHECK_VALUE(condition, op, ...) TORCH_CHECK_VALUE(condition, "liteboost::", op, ": ", __VA_ARGS__)
#define LB_CHECK_TYPE(condition, op, ...) TORCH_CHECK_TYPE(condition, "liteboost::", op, ": ", __VA_ARGS__)

namespace liteboost {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

// Raises TypeError unless `tensor` is float32, bfloat16 or float16.
void check_dtype(const char* op, const char* argument, const at::Tensor& tensor);

// Raises TypeError unless `tensor` has the dtype of `reference`, or float32 where `or_float32`.
void check_same_dtype(const char* op, const char* argument, const at::Tensor& tensor,
                      const char* reference_argument, const at::Tensor& reference, bool or_float32 = false);

// Raises ValueError unless both tensors are on one device.
void check_same_device(const char* op, const char* argument, const at::Tensor& tensor,
                       const char* reference_argument, const at::Tensor& reference);

// Raises ValueError unless `tensor` has exactly the shape of `reference`.
void check_same_shape(const char* op, const char* argument, const at::Tensor& tensor,
                      const char* reference_argument, const at::Tensor& reference);

// Raises ValueError unless `tensor` is one vector of `size` elements; `what` names the size in words.
void check_vector(const char* op, const char* argument, const at::Tensor& tensor, const c10::SymInt& size,
                  const char* what);

// Raises RuntimeError if grad mode is on and `tensor` requires grad: these ops have no backward.
void check_no_grad(const char* op, const char* argument, const at::Tensor& tensor);

// The element type of a tensor that passed check_dtype.
DType dtype_of(const at::Tensor& tensor);

}  // namespace liteboost

// As check_no_grad; the common case costs two loads and no call.
#define LB_CHECK_NO_GRAD(op, argument, tensor)          \
  do {                                                  \
    if (C10_UNLIKELY((tensor).requires_grad())) {       \
      ::liteboost::check_no_grad(op, argument, tensor); \
    }                                                   \
  } while (false)
