// What the CPU code of other families shares with attention's.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace liteboost {

// attention of checked arguments, or attention_part where `lse` is not null: it is filled, and the output is fp32.
// `key` and `value` may be rows of integers (int8_attention/int8_attention.h).
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                  int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks,
                  at::Tensor* lse);

}  // namespace liteboost
