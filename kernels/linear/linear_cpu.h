// What the CPU code of other families shares with linear's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <vector>

#include "common/order.h"

namespace liteboost {

// The most rows that linear's own loops serve for this dtype on this CPU; for more, torch's product is the
// faster. The figures are in linear_cpu.cpp.
int64_t linear_max_rows(at::ScalarType dtype);

// The op on the CPU.
at::Tensor linear_cpu(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// The same of arguments that are checked already. K is not 0.
at::Tensor fastest_linear(const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias);

// The same by linear's own loops, whatever the number of rows. The last dim of weight is contiguous.
at::Tensor own_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      Order order = Order::fastest);

// A weight and its bias. Of tensors that outlive it.
struct LinearLayer {
  const at::Tensor& weight;
  const std::optional<at::Tensor>& bias;
};

// fastest_linear and own_linear of several layers with one x: the bits of each alone. Threads share them out as one.
std::vector<at::Tensor> fastest_linears(const at::Tensor& x, c10::ArrayRef<LinearLayer> layers);
std::vector<at::Tensor> own_linears(const at::Tensor& x, c10::ArrayRef<LinearLayer> layers, Order order);

// Whether linear_cpu multiplies more rows than kLinearRows of this dtype as floats, faster than by the loops of own_linear.
bool linear_widens(at::ScalarType dtype);

// at::linear, contiguous, whatever autocast and autograd would make of it.
at::Tensor torch_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace liteboost
