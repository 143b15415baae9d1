// _npu_softcap_attention: attention of one query a row whose logits are capped, for recorded steps on an NPU.
//
// No operator of CANN 8.5.0 to 9.1.0 caps the logits of attention (FusedInferAttentionScore V1 to V5,
// PromptFlashAttention, IncreFlashAttention, FlashAttentionScore and BlockSparseAttention have no such argument), so
// there are six launches: the product with the keys, its scale, tanh, the cap and the mask in one, softmax, the product
// with the values. Query heads of one key head are the rows of one product, so keys are not repeated.
// Shapes, dtypes, rounding: ops/softcap_attention.py.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Scalar;
using npu::Tensor;

// a, b, out, cubeMathType
const npu::Operator<Tensor, Tensor, Tensor, int8_t> kMatmul{"aclnnMatmul"};
// self, other, out
const npu::Operator<Tensor, Scalar, Tensor> kMuls{"aclnnMuls"};
const npu::Operator<Tensor, Tensor> kTanh{"aclnnTanh"};
// self, other, alpha, out: self + alpha * other
const npu::Operator<Tensor, Tensor, Scalar, Tensor> kAdd{"aclnnAdd"};
// self, dim, out
const npu::Operator<Tensor, int64_t, Tensor> kSoftmax{"aclnnSoftmax"};

constexpr int8_t kKeepDtype = 0;

struct Capped {
  at::Tensor query, key, value;
  OptionalTensor mask;
  double scaling, softcap;

  bool has_mask() const { return given(mask); }
};

void check(const Capped& on) {
  const at::Tensor &q = on.query, &k = on.key, &v = on.value;
  const bool is_whole = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(2) == 1 &&
                        k.size(0) == q.size(0) && v.size(0) == q.size(0) && v.size(1) == k.size(1) &&
                        v.size(2) == k.size(2) && k.size(3) == q.size(3) && k.size(1) > 0 &&
                        q.size(1) % k.size(1) == 0;
  TORCH_CHECK(is_whole && on.softcap > 0.0,
              "liteboost: _npu_softcap_attention takes query [B, N, 1, D], key and value [B, K, S, D] and a "
              "softcap above 0, got ",
              q.sizes(), ", ", k.sizes(), ", ", v.sizes(), " and ", on.softcap,
              "; call attention for other calls");
}

Refusal refusal_of(const Capped& on) {
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (on.query.numel() == 0 || on.key.numel() == 0 || on.value.numel() == 0) return "no elements";
  if (on.has_mask() &&
      (on.mask->scalar_type() != on.query.scalar_type() || on.mask->dim() != 4 || on.mask->size(1) != 1)) {
    return "a mask that is of another dtype or for each head";
  }
  const bool is_there = kMatmul.available() && kMuls.available() && kTanh.available() && kAdd.available() &&
                        kSoftmax.available();
  if (!is_there) return "not in this CANN";
  return npu::unverified("_npu_softcap_attention", npu::dtype_name(on.query.scalar_type()));
}

at::Tensor launched(const Capped& on) {
  const int64_t batch = on.query.size(0), kv_heads = on.key.size(1), kv_len = on.key.size(2);
  const int64_t group = on.query.size(1) / kv_heads;
  const at::Tensor query = on.query.reshape({batch, kv_heads, group, on.query.size(3)});
  const auto empty = [&](int64_t columns) {
    return at::empty({batch, kv_heads, group, columns}, query.options());
  };
  at::Tensor logits = empty(kv_len), next = empty(kv_len);
  kMatmul(query, on.key.transpose(2, 3), logits, kKeepDtype);
  kMuls(logits, at::Scalar(on.scaling / on.softcap), next);
  kTanh(next, logits);
  if (on.has_mask()) {
    kAdd(*on.mask, logits, at::Scalar(on.softcap), next);
  } else {
    kMuls(logits, at::Scalar(on.softcap), next);
  }
  kSoftmax(next, -1, logits);
  const at::Tensor out = empty(on.value.size(3));
  kMatmul(logits, on.value, out, kKeepDtype);
  return out.view({batch, 1, on.query.size(1), on.value.size(3)});
}

at::Tensor softcap_attention_npu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const OptionalTensor& mask, double scaling, double softcap) {
  constexpr const char* op = "_npu_softcap_attention";
  const Capped on{query, key, value, mask, scaling, softcap};
  check(on);
  const c10::DeviceGuard guard(query.device());
  const Refusal refusal = refusal_of(on);
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(softcap_attention_npu)>(op, why).call(query, key, value, mask, scaling,
                                                                    softcap);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(op, [&]() -> at::Tensor { return launched(on); }, reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "_npu_softcap_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling, "
      "float softcap) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("_npu_softcap_attention", &liteboost::softcap_attention_npu);
}
