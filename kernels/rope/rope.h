// rope: rotary position embedding of query and key in one call.
//
//   half          x1 = x[.., :R/2], x2 = x[.., R/2:R];  out1 = x1 * c1 - x2 * s1,  out2 = x2 * c2 + x1 * s2,
//                 where c1, s1 are the first and c2, s2 the second half of a table row     (GPT-NeoX, Llama)
//   interleaved   a = x[.., 2i], b = x[.., 2i + 1];  out[.., 2i] = a * c[2i] - b * s[2i],
//                 out[.., 2i + 1] = b * c[2i + 1] + a * s[2i + 1]                          (GPT-J, Cohere)
//   deinterleave  the pairs of interleaved, written where half has them: a = x[.., 2i], b = x[.., 2i + 1];
//                 out1[i] = a * c1[i] - b * s1[i],  out2[i] = b * c2[i] + a * s2[i]        (DeepSeek V3)
//
// Tables of half the width, R/2, hold one entry a pair, used for both of its channels. Channels from R on are
// copied. In fp32, rounded once, to the dtype of q; products and sums are not fused.
//
//   q            unsqueeze_dim 1: [B, H, S, D];  2: [B, S, H, D]; float32, bfloat16 or float16
//   k            the same with K heads (0 to rotate q alone), dtype of q. Both are read in place at any strides with adjacent
//                channels (usually they are transposed views of a projection's output), else copied.
//   cos, sin     [B or 1, S, W] or [S, W], W = rotary_dim or rotary_dim / 2; dtype of q or float32
//   rotary_dim   R; 0 means W, a table of full width
//   returns      (q, k) rotated, contiguous, shapes and dtype of the arguments
//
// rope_: the same, written to q and k, which have memory of their own.
//
// Source: Su et al. 2021, arXiv:2104.09864; apply_rotary_pos_emb of transformers 5.23. No backward.
#pragma once

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

enum class RopeLayout : int32_t { half, interleaved, deinterleave };

// One of q and k. Strides in elements; out is contiguous, rows in the order of the tensor's own dimensions.
struct RopeTensor {
  const void* data;
  void* out;
  int64_t heads;
  int64_t batch_stride, seq_stride, head_stride;
  int64_t out_batch_stride, out_seq_stride, out_head_stride;
};

struct RopeArgs {
  RopeTensor q, k;
  const void* cos;
  const void* sin;
  int64_t seq_len, head_dim, rotary_dim;
  int64_t cos_batch_stride, cos_seq_stride, sin_batch_stride, sin_seq_stride;
  DType dtype, table_dtype;
  RopeLayout layout;
  bool half_tables;
};

struct RopeKernels {
  // All heads of q and k at positions [begin, end), counted as batch * seq_len + position. `scratch` has
  // room for 2 * rotary_dim floats.
  void (*rope)(const RopeArgs& args, float* scratch, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(RopeKernels, rope_kernels)

}  // namespace liteboost
