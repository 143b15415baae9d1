// rms_norm, add_rms_norm, inverse_rms, gated_rms_norm, layer_norm: normalisation along the last dimension.
//
// x32, w32, ... are the arguments in fp32; T is the dtype of x, P = promote(T, dtype of weight).
// Everything is computed in fp32 except where round_T or round_P says otherwise.
//
// rms_norm        r = 1 / sqrt(mean(x32^2) + eps)
//   late = false    y = round_T(x32 * r);  out = round_P((weight_offset + weight) * y)   (Llama)
//                   The bracket is rounded to the dtype of weight; without weight, out = y.
//   late = true     out = round_T(x32 * r * (weight_offset + w32))            (OLMo-2; Gemma, offset 1)
//   weight of [groups, hidden_size]: x is [..., groups, hidden_size], each group with its own weight.
// inverse_rms     out = round_T(r), [..., 1]                              (DeepSeek-V4 scales by it, HY-V4)
// add_rms_norm    sum = round_T(x + residual);  normed = rms_norm(sum);  returns (normed, sum)
// gated_rms_norm  act is silu or sigmoid
//   gate_first = false, late = false   y = round_P(weight * round_T(x32 * r))
//                                      out = round_T(y * act(gate32))               (Qwen3-Next)
//   gate_first = false, late = true    out = round_T(x32 * r * w32 * act(gate32))        (Kimi-linear)
//   gate_first = true                  h = x32 * act(gate32);  r of each group of group_size channels
//                   late = false       out = round_P(weight * round_T(h * r))            (Mamba-2)
//                   late = true        out = round_T(h * r * w32)
// layer_norm      m = mean(x32);  r = 1 / sqrt(mean((x32 - m)^2) + eps)
//                 out = round_T((x32 - m) * r * w32 + b32)
//
//   x, residual, gate   [..., hidden_size], one shape and dtype: float32, bfloat16, float16. Read in place
//                       where rows have one stride and adjacent elements; other views are copied first.
//   weight, bias        [hidden_size] (or see rms_norm), dtype of x or float32 (bias: that of weight, if there
//                       is one)
//   returns             [..., hidden_size], contiguous; dtype P where the last step above is round_P, else T
//
// Sources: Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450; the rounding orders are
// LlamaRMSNorm, Olmo2RMSNorm, Gemma2RMSNorm, Qwen3NextRMSNormGated, KimiLinear's gated norm and
// MambaRMSNormGated of transformers 5.23. No backward. NPU: norm_npu.cpp.
#pragma once

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

enum class NormGate : int32_t { silu, sigmoid };

// Strides in elements between rows; outputs are contiguous. Pointers may be null where said.
struct RmsNormArgs {
  const void* x;
  const void* residual;  // add_rms_norm only, else null
  const void* weight;    // or null
  void* out;
  void* sum;  // add_rms_norm only
  int64_t cols;
  int64_t weight_rows;  // row i is scaled by row i % weight_rows of weight
  int64_t x_stride, residual_stride;
  float eps, weight_offset;
  DType dtype, weight_dtype;
  bool late;
};

struct InverseRmsArgs {
  const void* x;
  void* out;
  int64_t cols;
  int64_t x_stride;
  float eps;
  DType dtype;
};

struct GatedRmsNormArgs {
  const void* x;
  const void* gate;
  const void* weight;
  void* out;
  int64_t cols, group_size;
  int64_t x_stride, gate_stride;
  float eps;
  DType dtype, weight_dtype;
  NormGate activation;
  bool gate_first, late;
};

struct LayerNormArgs {
  const void* x;
  const void* weight;  // or null
  const void* bias;    // or null
  void* out;
  int64_t cols;
  int64_t x_stride;
  float eps;
  DType dtype, weight_dtype;  // weight_dtype: of weight and bias
};

// Each works on rows [begin, end).
struct NormKernels {
  void (*rms_norm)(const RmsNormArgs& args, int64_t begin, int64_t end);
  void (*inverse_rms)(const InverseRmsArgs& args, int64_t begin, int64_t end);
  // scratch: room for `cols` floats, one for each caller.
  void (*gated_rms_norm)(const GatedRmsNormArgs& args, float* scratch, int64_t begin, int64_t end);
  void (*layer_norm)(const LayerNormArgs& args, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(NormKernels, norm_kernels)

}  // namespace liteboost
