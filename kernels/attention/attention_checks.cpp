#include "attention/attention_checks.h"

#include <cmath>

namespace liteboost {
namespace {

// Whether `sizes` broadcast to [batch, num_heads, q_len, kv_len].
bool mask_fits(c10::SymIntArrayRef sizes, c10::SymIntArrayRef q, const c10::SymInt& kv_len) {
  return sizes.size() == 4 && (sizes[0] == 1 || sizes[0] == q[0]) && (sizes[1] == 1 || sizes[1] == q[1]) &&
         (sizes[2] == 1 || sizes[2] == q[2]) && (sizes[3] == 1 || sizes[3] == kv_len);
}

bool sinks_fit(c10::SymIntArrayRef sizes, c10::SymIntArrayRef q) {
  return sizes.size() == 1 ? sizes[0] == q[1] : sizes == q.slice(0, 3);
}

}  // namespace

void check_attention_states(const char* op, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value) {
  const auto q = query.sym_sizes();
  const auto k = key.sym_sizes();
  const auto v = value.sym_sizes();
  LB_CHECK_VALUE(q.size() == 4, op, "query must have shape [batch, num_heads, q_len, head_dim], got ", q,
                 "; reshape it");
  LB_CHECK_VALUE(k.size() == 4, op, "key must have shape [batch, num_kv_heads, kv_len, head_dim], got ", k,
                 "; reshape it");
  LB_CHECK_VALUE(v.size() == 4, op, "value must have shape [batch, num_kv_heads, kv_len, value_dim], got ", v,
                 "; reshape it");
  check_dtype(op, "query", query);
  check_same_dtype(op, "key", key, "query", query);
  check_same_dtype(op, "value", value, "query", query);
  check_same_device(op, "key", key, "query", query);
  check_same_device(op, "value", value, "query", query);
  LB_CHECK_VALUE(k[0] == q[0], op, "key must have the batch size of query = ", q[0], ", got ", k[0],
                 "; expand or repeat one of them");
  LB_CHECK_VALUE(k[3] == q[3], op, "key must have the head_dim of query = ", q[3], ", got ", k[3],
                 "; project both to one size");
  LB_CHECK_VALUE(v[0] == k[0] && v[1] == k[1] && v[2] == k[2], op,
                 "value must have the batch, num_kv_heads and kv_len of key = [", k[0], ", ", k[1], ", ",
                 k[2], "], got ", v, "; update both halves of the cache together");
  LB_CHECK_VALUE(k[1] == q[1] || (k[1] > 0 && q[1] % k[1] == 0), op,
                 "key must have a number of heads that divides num_heads of query = ", q[1], ", got ", k[1],
                 "; pass the grouped heads without repeating them");
  LB_CHECK_NO_GRAD(op, "query", query);
  LB_CHECK_NO_GRAD(op, "key", key);
  LB_CHECK_NO_GRAD(op, "value", value);
}

void check_attention(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                     int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks) {
  check_attention_states(op, query, key, value);
  check_attention_options(op, query, key, mask, scaling, is_causal, sliding_window, softcap, sinks);
}

void check_attention_options(const char* op, const at::Tensor& query, const at::Tensor& key,
                             const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                             int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks) {
  const auto q = query.sym_sizes();
  if (mask.has_value()) {
    LB_CHECK_VALUE(mask_fits(mask->sym_sizes(), q, key.sym_size(2)), op,
                   "mask must broadcast to [batch, num_heads, q_len, kv_len] = [", q[0], ", ", q[1], ", ",
                   q[2], ", ", key.sym_size(2), "], got ", mask->sym_sizes(),
                   "; give it four dimensions, cut to kv_len");
    const auto dtype = mask->scalar_type();
    LB_CHECK_TYPE(dtype == at::kBool || dtype == at::kFloat || dtype == query.scalar_type(), op,
                  "mask must be bool, float32 or of the dtype of query (", query.scalar_type(), "), got ",
                  dtype, "; convert it");
    check_same_device(op, "mask", *mask, "query", query);
    LB_CHECK_NO_GRAD(op, "mask", *mask);
  }
  if (sinks.has_value()) {
    LB_CHECK_VALUE(sinks_fit(sinks->sym_sizes(), q), op, "sinks must have shape [num_heads] = [", q[1],
                   "] or [batch, num_heads, q_len] = [", q[0], ", ", q[1], ", ", q[2], "], got ",
                   sinks->sym_sizes(), "; pass one logit for each query head, or for each of its queries");
    check_same_dtype(op, "sinks", *sinks, "query", query, /*or_float32=*/true);
    check_same_device(op, "sinks", *sinks, "query", query);
    LB_CHECK_NO_GRAD(op, "sinks", *sinks);
  }
  LB_CHECK_VALUE(std::isfinite(scaling), op, "scaling must be finite, got ", scaling,
                 "; usual is 1 / sqrt(head_dim)");
  LB_CHECK_VALUE(std::isfinite(softcap) && softcap >= 0.0, op,
                 "softcap must be finite and not negative, got ", softcap, "; pass 0 for none");
  LB_CHECK_VALUE(sliding_window >= 0, op, "sliding_window must not be negative, got ", sliding_window,
                 "; pass 0 for none");
  LB_CHECK_VALUE(sliding_window == 0 || is_causal, op,
                 "sliding_window needs is_causal = True, got sliding_window = ", sliding_window,
                 " without it; put a window that looks ahead into the mask");
}

}  // namespace liteboost
