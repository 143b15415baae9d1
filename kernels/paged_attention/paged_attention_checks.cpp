#include "paged_attention/paged_attention_checks.h"

#include <cmath>

namespace liteboost {
namespace {

constexpr const char* kOp = "paged_attention";

void check_states(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const auto q = query.sym_sizes();
  const auto k = key.sym_sizes();
  const auto v = value.sym_sizes();
  LB_CHECK_VALUE(q.size() == 3, kOp, "query must have shape [tokens, num_heads, head_dim], got ", q,
                 "; put the requests one after the other");
  LB_CHECK_VALUE(k.size() == 4, kOp, "key must have shape [pages, page_rows, num_kv_heads, head_dim], got ",
                 k, "; view the cache so");
  LB_CHECK_VALUE(v.size() == 4, kOp,
                 "value must have shape [pages, page_rows, num_kv_heads, value_dim], got ", v,
                 "; view the cache so");
  check_dtype(kOp, "query", query);
  check_same_dtype(kOp, "key", key, "query", query);
  check_same_dtype(kOp, "value", value, "query", query);
  check_same_device(kOp, "key", key, "query", query);
  check_same_device(kOp, "value", value, "query", query);
  LB_CHECK_VALUE(k[3] == q[2], kOp, "key must have the head_dim of query = ", q[2], ", got ", k[3],
                 "; project both to one size");
  LB_CHECK_VALUE(v.slice(0, 3) == k.slice(0, 3), kOp,
                 "value must have the pages, page_rows and num_kv_heads of key ", k, ", got ", v,
                 "; pass the two halves of one cache");
  LB_CHECK_VALUE(k[2] == q[1] || (k[2] > 0 && q[1] % k[2] == 0), kOp,
                 "key must have a number of heads that divides num_heads of query = ", q[1], ", got ", k[2],
                 "; pass the grouped heads without repeating them");
}

void check_integers(const char* argument, const at::Tensor& tensor, const at::Tensor& query) {
  const auto dtype = tensor.scalar_type();
  LB_CHECK_TYPE(dtype == at::kInt || dtype == at::kLong, kOp, argument, " must be int32 or int64, got ",
                dtype, "; convert it");
  LB_CHECK_VALUE(tensor.device().is_cpu() || tensor.device() == query.device(), kOp, argument,
                 " must be on the CPU or on the device of query (", query.device(), "), got ",
                 tensor.device(), "; move it");
}

void check_cu_seqlens(const char* argument, const at::Tensor& tensor, const at::Tensor& query) {
  LB_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) >= 1, kOp, argument,
                 " must have shape [requests + 1], got ", tensor.sym_sizes(),
                 "; pass where each request begins, and where the last one ends");
  check_integers(argument, tensor, query);
}

std::vector<int64_t> values_of(const at::Tensor& tensor) {
  const at::Tensor on_host = tensor.to(at::kCPU, at::kLong).contiguous();
  const int64_t* data = on_host.const_data_ptr<int64_t>();
  return {data, data + on_host.numel()};
}

std::vector<int64_t> sums_of(const char* argument, const at::Tensor& tensor, int64_t most, const char* what) {
  std::vector<int64_t> sums = values_of(tensor);
  int64_t before = 0;
  for (size_t r = 0; r < sums.size(); ++r) {
    LB_CHECK_VALUE(r > 0 ? sums[r] >= before : sums[r] == 0, kOp, argument,
                   " must begin with 0 and not fall, got ", sums[r], " at ", r, " behind ", before,
                   "; pass the sums of the lengths");
    before = sums[r];
  }
  LB_CHECK_VALUE(before <= most, kOp, argument, " must not go beyond the ", most, " ", what, ", got ", before,
                 "; pass all of them, or fewer requests");
  return sums;
}

}  // namespace

void check_paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                           const std::optional<at::Tensor>& block_table, double scaling, bool is_causal,
                           int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks) {
  check_states(query, key, value);
  LB_CHECK_NO_GRAD(kOp, "query", query);
  LB_CHECK_NO_GRAD(kOp, "key", key);
  LB_CHECK_NO_GRAD(kOp, "value", value);
  check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query);
  check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, query);
  LB_CHECK_VALUE(cu_seqlens_k.sym_size(0) == cu_seqlens_q.sym_size(0), kOp,
                 "cu_seqlens_k must have as many entries as cu_seqlens_q = ", cu_seqlens_q.sym_size(0),
                 ", got ", cu_seqlens_k.sym_size(0), "; pass both of the same requests");
  if (block_table.has_value()) {
    LB_CHECK_VALUE(
        block_table->dim() == 2 && block_table->sym_size(0) == cu_seqlens_q.sym_size(0) - 1, kOp,
        "block_table must have shape [requests, most pages] with requests = ", cu_seqlens_q.sym_size(0) - 1,
        ", got ", block_table->sym_sizes(), "; pass a row for each request");
    check_integers("block_table", *block_table, query);
  } else {
    LB_CHECK_VALUE(key.sym_size(0) == 1, kOp, "key must have one page where there is no block_table, got ",
                   key.sym_size(0), "; pass the table");
  }
  if (sinks.has_value()) {
    check_vector(kOp, "sinks", *sinks, query.sym_size(1), "num_heads");
    check_same_dtype(kOp, "sinks", *sinks, "query", query, /*or_float32=*/true);
    check_same_device(kOp, "sinks", *sinks, "query", query);
    LB_CHECK_NO_GRAD(kOp, "sinks", *sinks);
  }
  LB_CHECK_VALUE(std::isfinite(scaling), kOp, "scaling must be finite, got ", scaling,
                 "; usual is 1 / sqrt(head_dim)");
  LB_CHECK_VALUE(std::isfinite(softcap) && softcap >= 0.0, kOp,
                 "softcap must be finite and not negative, got ", softcap, "; pass 0 for none");
  LB_CHECK_VALUE(sliding_window >= 0, kOp, "sliding_window must not be negative, got ", sliding_window,
                 "; pass 0 for none");
  LB_CHECK_VALUE(sliding_window == 0 || is_causal, kOp,
                 "sliding_window needs is_causal = True, got sliding_window = ", sliding_window,
                 " without it; pass 0 for none");
}

Spans spans_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cu_seqlens_q,
               const at::Tensor& cu_seqlens_k, const std::optional<at::Tensor>& block_table) {
  constexpr int64_t kAny = INT64_MAX;
  return {sums_of("cu_seqlens_q", cu_seqlens_q, query.size(0), "tokens of query"),
          sums_of("cu_seqlens_k", cu_seqlens_k, block_table.has_value() ? kAny : key.size(1),
                  "rows of the page of key")};
}

std::vector<int64_t> pages_of(const at::Tensor& key, const std::optional<at::Tensor>& block_table,
                              const Spans& spans) {
  if (!block_table.has_value()) return {};
  std::vector<int64_t> pages = values_of(*block_table);
  const int64_t columns = block_table->size(1), rows = key.size(1);
  for (int64_t r = 0; r < spans.count(); ++r) {
    const int64_t length = spans.kv_len(r);
    LB_CHECK_VALUE(length <= columns * rows, kOp, "block_table must have pages for all ", length,
                   " keys of request ", r, ", got ", columns, " pages of ", rows, " rows; pass them all");
    for (int64_t i = 0; i * rows < length; ++i) {
      const int64_t page = pages[static_cast<size_t>(r * columns + i)];
      LB_CHECK_VALUE(page >= 0 && page < key.size(0), kOp, "block_table must be 0 .. ", key.size(0) - 1,
                     ", below the pages of key, got ", page, " in row ", r, "; pass numbers of pages");
    }
  }
  return pages;
}

}  // namespace liteboost
