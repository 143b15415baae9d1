// The short causal convolution in front of linear attention and state space layers: each channel by itself, over its
// last tokens, and an activation.
//
//   out[b, c, t] = round(act(bias[c] + sum over j < taps of weight[c, j] x[b, c, t - (taps - 1) + j]))
//
// causal_conv1d(x, weight, bias, activation): what lies before the first token is 0.
// causal_conv1d_update(x, state, weight, bias, activation): what lies before it are the last columns of `state`, in
//   which then stand the last columns of state and x together.
//
//   x        [batch, channels, tokens]   float32, bfloat16 or float16; any strides, read in place
//   weight   [channels, taps]            dtype of x, any strides; bias [channels] or none
//   state    [batch, channels, length]   dtype of x, any strides, in place; length >= taps - 1
//   act      none, or silu: v / (1 + exp(-v))
//   returns  shape and dtype of x, contiguous
//
// Sum and activation in fp32, one rounding to the dtype of x; the original code rounds before the activation too.
//
// Source: causal_conv1d_fn and causal_conv1d_update of transformers 5.23. No backward.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

struct CausalConvStrides {
  int64_t batch, channel, token;
};

struct CausalConvArgs {
  const void *x, *weight, *bias;  // bias may be null
  void* state;                    // null: zeros, and none is kept
  void* out;                      // contiguous
  CausalConvStrides x_strides, state_strides;
  int64_t weight_stride, tap_stride, bias_stride;
  int64_t batch, channels, tokens, taps, state_length;
  DType dtype;
  bool silu;
};

struct CausalConvKernels {
  // Floats that `run` wants as scratch.
  int64_t (*scratch_floats)(const CausalConvArgs& args);
  // Blocks of channels, counted over the batch, that there are for `run`.
  int64_t (*blocks)(const CausalConvArgs& args);
  // Blocks [begin, end), all tokens.
  void (*run)(const CausalConvArgs& args, float* scratch, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(CausalConvKernels, causal_conv_kernels)

}  // namespace liteboost
