// What the files of operators share.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include <limits>

#include "../opapi/operator.h"

namespace sim {

/// The tensor in float32 (float64 stays): fused operators compute in float32 whatever their dtype.
inline at::Tensor fp32(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }

/// The generator of one launch: random operators get seed and offset as arguments.
inline at::Generator generator(int64_t seed, int64_t offset) {
  return at::detail::createCPUGenerator(static_cast<uint64_t>(seed) * 1000003ull +
                                        static_cast<uint64_t>(offset));
}

/// Each result of a function that has several, to its output.
template <class... Results, class... Outputs>
void put_each(const std::tuple<Results...>& results, const Outputs&... outputs) {
  std::apply([&](const auto&... result) { (put(outputs, result), ...); }, results);
}

}  // namespace sim

// Families of operators of the same form. `e` is an expression in x, or in a and b.
#define UNARY(N, e)             \
  OP(aclnn##N, T, x_, O, out) { \
    const at::Tensor& x = *x_;  \
    put(out, e);                \
  }
#define UNARY_AND_INPLACE(N, e) \
  UNARY(N, e)                   \
  OP(aclnnInplace##N, R, x_) {  \
    const at::Tensor& x = *x_;  \
    put(x_, e);                 \
  }
#define BINARY(N, e)                     \
  OP(aclnn##N, T, a_, T, b_, O, out) {   \
    const at::Tensor &a = *a_, &b = *b_; \
    put(out, e);                         \
  }
#define BINARY_AND_INPLACE(N, e)         \
  BINARY(N, e)                           \
  OP(aclnnInplace##N, R, a_, T, b_) {    \
    const at::Tensor &a = *a_, &b = *b_; \
    put(a_, e);                          \
  }
#define WITH_SCALAR(N, e)              \
  OP(aclnn##N, T, a_, S, b_, O, out) { \
    const at::Tensor& a = *a_;         \
    const at::Scalar& b = *b_;         \
    put(out, e);                       \
  }
#define WITH_SCALAR_AND_INPLACE(N, e) \
  WITH_SCALAR(N, e)                   \
  OP(aclnnInplace##N, R, a_, S, b_) { \
    const at::Tensor& a = *a_;        \
    const at::Scalar& b = *b_;        \
    put(a_, e);                       \
  }
#define COMPARE(N, f)                        \
  BINARY_AND_INPLACE(N##Tensor, at::f(a, b)) \
  WITH_SCALAR_AND_INPLACE(N##Scalar, at::f(a, b))
