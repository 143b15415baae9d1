// New keys and values into a cache as aclnn operators: one launch for both, or one each where that operator does not
// serve. Both want the heads of a place side by side in memory, so a cache [blocks, block_size, kv_heads, head_dim].
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "cache/cache_checks.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;

constexpr const char* kOp = "kv_append";

// key, keyCacheRef, slotMapping, value, valueCacheRef, compressLens, compressSeqOffset, seqLens, cacheMode, scatterMode,
// strides, offsets
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, npu::Text, npu::Text,
                    npu::Integers, npu::Integers>
    kScatterPaKvCache{"aclnnScatterPaKvCache"};

// varRef, indices, updates
const npu::Operator<Tensor, Tensor, Tensor> kScatterNdUpdate{"aclnnScatterNdUpdate"};

bool in_one_launch(at::ScalarType dtype) { return dtype != at::kFloat && kScatterPaKvCache.available(); }

Refusal refusal_of(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key,
                   const at::Tensor& value) {
  if (key.numel() == 0 || value.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "on a 310P";
  if (!keys.transpose(1, 2).is_contiguous() || !values.transpose(1, 2).is_contiguous()) {
    return "a cache whose heads are not side by side";
  }
  return in_one_launch(keys.scalar_type()) || kScatterNdUpdate.available() ? kServed : "not in this CANN";
}

// [batch, kv_heads, q_len, size] as [tokens, kv_heads, size]; of one token a sequence usually the same memory.
at::Tensor tokens_of(const at::Tensor& added) {
  return added.transpose(1, 2).contiguous().view({-1, added.size(1), added.size(3)});
}

void scatter(const at::Tensor& cache, const at::Tensor& indices, const at::Tensor& added) {
  const int64_t width = added.size(1) * added.size(3);
  kScatterNdUpdate(cache.transpose(1, 2).view({-1, width}), indices, tokens_of(added).view({-1, width}));
}

void kv_append_npu(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key,
                   const at::Tensor& value, const at::Tensor& slots) {
  check_kv_append(keys, values, key, value, slots);
  const c10::DeviceGuard guard(keys.device());
  Refusal refusal = refusal_of(keys, values, key, value);
  if (refusal == kServed) refusal = npu::unverified(kOp, npu::dtype_name(keys.scalar_type()));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(kv_append_npu)>(kOp, why).call(keys, values, key, value, slots);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      kOp,
      [&]() -> void {
        const at::Tensor places = slots.contiguous();
        if (!in_one_launch(keys.scalar_type())) {
          const at::Tensor indices = places.view({-1, 1});
          scatter(keys, indices, key);
          scatter(values, indices, value);
          return;
        }
        static const int64_t ones[] = {1, 1}, zeros[] = {0, 0};
        kScatterPaKvCache(tokens_of(key), keys.transpose(1, 2), places.view({-1}), tokens_of(value),
                          values.transpose(1, 2), at::Tensor(), at::Tensor(), at::Tensor(), "Norm", "None",
                          at::IntArrayRef(ones), at::IntArrayRef(zeros));
      },
      reference);
}

// Why a token like this one would not be appended where a tensor says; empty where it would: in one launch for keys and
// values, or in two. Integers are appended as half as many floats.
std::string npu_append_refusal(const at::Tensor& token) {
  TORCH_CHECK(token.device().is_privateuseone(),
              "liteboost: _npu_append_refusal takes a tensor on an NPU; pass the keys of a token");
  const c10::DeviceGuard guard(token.device());
  const bool are_integers = token.scalar_type() == at::kChar;
  const at::ScalarType dtype = are_integers ? at::kBFloat16 : token.scalar_type();
  if (npu::soc() == npu::Soc::a310p) return "on a 310P";
  if (are_integers && token.size(-1) % 2 != 0) return "an odd number of integers";
  if (!in_one_launch(dtype) && !kScatterNdUpdate.available()) return "not in this CANN";
  const Refusal refusal = npu::unverified(kOp, npu::dtype_name(dtype));
  return refusal == kServed ? "" : refusal;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_append_refusal(Tensor token) -> str", &liteboost::npu_append_refusal);
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("kv_append", &liteboost::kv_append_npu); }
