// activation: act(x), rounded once, to the dtype of x. Any shape and strides; returns contiguous.
// gated_activation: the middle of a gated MLP, act(gate) * up.
//
//   g   = min(gate, limit)                      limit: none by default
//   u   = clamp(up, -limit, limit)
//   out = round(act(g) * (u + up_offset))       one rounding, to the dtype of gate
//
//   act        silu: g * sigmoid(alpha * g); gelu: g * normal_cdf(g); gelu_tanh: its tanh form; relu;
//              relu2: the square of relu; sigmoid
//   gate, up   [..., N], one shape and dtype: float32, bfloat16 or float16; any strides. Read in place:
//              contiguous tensors, the two halves of one [..., 2N], the even and odd channels of one, and
//              whatever else has one stride a row. Other views are copied first.
//   returns    [..., N], contiguous, dtype of gate
//
// All arithmetic in fp32. The original code rounds act(g) to the dtype before the product; this does not,
// and is the closer to the exact value.
//
// Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU, GEGLU); the clamped form with alpha = 1.702, limit = 7,
// up_offset = 1 is GptOssExperts in transformers 5.23. No backward.
#pragma once

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

enum class Activation : int32_t { silu, gelu, gelu_tanh, relu, relu2, sigmoid };
constexpr Activation kActivations[] = {Activation::silu, Activation::gelu,  Activation::gelu_tanh,
                                       Activation::relu, Activation::relu2, Activation::sigmoid};

// Strides and steps in elements; out is contiguous. Both tensors are rows of `cols` elements.
struct GatedActivationArgs {
  const void* gate;
  const void* up;
  void* out;
  int64_t cols;
  int64_t gate_stride, gate_step;
  int64_t up_stride, up_step;
  float alpha, limit, up_offset;
  DType dtype;
  Activation activation;
};

struct ActivationArgs {
  const void* x;  // rows of `cols` elements with step 1, `stride` apart
  void* out;      // contiguous
  int64_t cols, stride;
  float alpha;
  DType dtype;
  Activation activation;
};

struct ActivationKernels {
  // Elements [begin, end) of the output, counted over all rows.
  void (*activation)(const ActivationArgs& args, int64_t begin, int64_t end);
  // Elements [begin, end) of the output, counted over all rows.
  void (*gated_activation)(const GatedActivationArgs& args, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(ActivationKernels, activation_kernels)

}  // namespace liteboost
