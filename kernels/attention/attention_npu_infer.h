// The operators of attention for inference, as attention and paged_attention call them.
#pragma once

#include "npu/aclnn.h"

namespace liteboost::npu {

// clang-format off
inline const Operator<
    Tensor, Tensors, Tensors,                // query, key, value
    Tensor, Tensor, Integers, Integers,      // pseShift, attenMask, actualSeqLengths, actualSeqLengthsKv
    Tensor, Tensor, Tensor, Tensor, Tensor,  // deqScale1, quantScale1, deqScale2, quantScale2, quantOffset2
    Tensor, Tensor,                          // antiquantScale, antiquantOffset
    Tensor, Tensor, Tensor,                  // blockTable, queryPaddingSize, kvPaddingSize
    Tensor, Tensor, Tensor, Tensor,          // keyAntiquantScale, -Offset, valueAntiquantScale, -Offset
    Tensor, Tensor, Integers,                // keySharedPrefix, valueSharedPrefix, actualSharedPrefixLen
    Tensor, Tensor, Tensor,                  // queryRope, keyRope, keyRopeAntiquantScale
    int64_t, double, int64_t, int64_t,       // numHeads, scaleValue, preTokens, nextTokens
    Text, int64_t, int64_t, int64_t,         // inputLayout, numKeyValueHeads, sparseMode, innerPrecise
    int64_t, int64_t, bool,                  // blockSize, antiquantMode, softmaxLseFlag
    int64_t, int64_t,                        // keyAntiquantMode, valueAntiquantMode
    Tensor, Tensor>                          // attentionOut, softmaxLse
    kInfer{"aclnnFusedInferAttentionScoreV3"};
inline const Operator<
    Tensor, Tensors, Tensors,
    Tensor, Tensor, Integers, Integers,
    Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor,
    Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Integers,
    Tensor, Tensor, Tensor,
    Tensor, Tensor,                          // dequantScaleQuery, learnableSink
    int64_t, double, int64_t, int64_t,
    Text, int64_t, int64_t, int64_t,
    int64_t, int64_t, bool,
    int64_t, int64_t, int64_t,               // ..., queryQuantMode
    Tensor, Tensor>
    kInferWithSinks{"aclnnFusedInferAttentionScoreV4"};
// clang-format on

}  // namespace liteboost::npu
