#include "int8_attention/int8_attention_checks.h"

#include "attention/attention_checks.h"

namespace liteboost {
namespace {

constexpr const char* kOp = "int8_attention";

void check_rows(const char* argument, const at::Tensor& rows) {
  LB_CHECK_TYPE(rows.scalar_type() == at::kChar, kOp, argument, " must be int8, got ", rows.scalar_type(),
                "; make rows of integers with quantize_kv");
}

}  // namespace

void check_quantize_kv(const at::Tensor& x) {
  LB_CHECK_VALUE(x.dim() >= 1, "quantize_kv",
                 "x must have shape [..., head_dim], got a scalar; add a dimension");
  check_dtype("quantize_kv", "x", x);
  LB_CHECK_NO_GRAD("quantize_kv", "x", x);
}

void check_int8_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                          int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks) {
  const auto q = query.sym_sizes();
  const auto k = key.sym_sizes();
  const auto v = value.sym_sizes();
  LB_CHECK_VALUE(q.size() == 4, kOp, "query must have shape [batch, num_heads, q_len, head_dim], got ", q,
                 "; reshape it");
  LB_CHECK_VALUE(k.size() == 4, kOp, "key must have shape [batch, num_kv_heads, kv_len, head_dim + ",
                 kInt8ScaleBytes, "], got ", k, "; make it with quantize_kv");
  LB_CHECK_VALUE(v.size() == 4, kOp, "value must have shape [batch, num_kv_heads, kv_len, value_dim + ",
                 kInt8ScaleBytes, "], got ", v, "; make it with quantize_kv");
  check_dtype(kOp, "query", query);
  check_rows("key", key);
  check_rows("value", value);
  check_same_device(kOp, "key", key, "query", query);
  check_same_device(kOp, "value", value, "query", query);
  LB_CHECK_VALUE(k[0] == q[0], kOp, "key must have the batch size of query = ", q[0], ", got ", k[0],
                 "; expand or repeat one of them");
  LB_CHECK_VALUE(k[3] == q[3] + kInt8ScaleBytes, kOp, "key must have rows of head_dim + ", kInt8ScaleBytes,
                 " with the head_dim of query = ", q[3], ", got ", k[3], "; make it with quantize_kv");
  LB_CHECK_VALUE(v[3] >= kInt8ScaleBytes, kOp, "value must have rows of value_dim + ", kInt8ScaleBytes,
                 ", got ", v[3], "; make it with quantize_kv");
  LB_CHECK_VALUE(v[0] == k[0] && v[1] == k[1] && v[2] == k[2], kOp,
                 "value must have the batch, num_kv_heads and kv_len of key = [", k[0], ", ", k[1], ", ",
                 k[2], "], got ", v, "; update both halves of the cache together");
  LB_CHECK_VALUE(k[1] == q[1] || (k[1] > 0 && q[1] % k[1] == 0), kOp,
                 "key must have a number of heads that divides num_heads of query = ", q[1], ", got ", k[1],
                 "; pass the grouped heads without repeating them");
  LB_CHECK_NO_GRAD(kOp, "query", query);
  check_attention_options(kOp, query, key, mask, scaling, is_causal, sliding_window, softcap, sinks);
}

}  // namespace liteboost
