// Tensors whose contents never change, such as a mask or a weight of ones, made once each.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <mutex>
#include <utility>

#include "npu/serve.h"

namespace liteboost::npu {

// Allocate with `new` and never delete: captured graphs read what it keeps, and torch_npu may be gone when a
// program ends.
template <class Key>
class Kept {
 public:
  // What is kept under `key`; where nothing is, what `make` gives on the current stream. Undefined in a capture
  // where nothing was kept before: what is made there is written when the graph is replayed.
  template <class Make>
  at::Tensor get(const Key& key, const Make& make) {
    const std::lock_guard lock(mutex_);
    const auto found = tensors_.find(key);
    if (found != tensors_.end()) return found->second;
    if (is_capturing()) return at::Tensor();
    const c10::InferenceMode outside(false);
    at::Tensor made = make();
    // Other streams will read it, none of which waits for this one.
    synchronize_current_stream();
    return tensors_.emplace(key, std::move(made)).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, at::Tensor> tensors_;
};

}  // namespace liteboost::npu
