// Keys and values of 8 bits as an NPU reads them: integers and scales apart, each contiguous, for no operator of CANN
// takes a scale that lies behind the integers of its row.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "attention/attention_npu_launch.h"

namespace liteboost {

// What keys or values are: [B, K, S, D] int8, and [B, K, S, 1] fp32.
struct Integers8 {
  at::Tensor integers, scales;
};

// Why FusedInferAttentionScore does not read the integers of a call. Keys and values of `call` are the integers.
npu::Refusal integers_refusal(const Call& call);

// Runs it. `within_cache`: whether the operator may be given more positions than count.
// Returns [B, q_len, N, D].
at::Tensor attend_integers(const Call& call, const Keys& scales, bool within_cache);

// How it would read, as the comparison with the reference knows it.
std::string kind_of_integers(const Call& call, const Keys& scales, bool within_cache);

}  // namespace liteboost
