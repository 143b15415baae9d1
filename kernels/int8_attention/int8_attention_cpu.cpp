// Runs the loop of quantize_kv over torch's threads, and attention's own code for int8_attention.
#include <torch/library.h>

#include "attention/attention_cpu.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "int8_attention/int8_attention_checks.h"

namespace liteboost {
namespace {

at::Tensor quantize_kv_cpu(const at::Tensor& x) {
  check_quantize_kv(x);
  c10::DimVector sizes(x.sizes());
  sizes.back() += kInt8ScaleBytes;
  at::Tensor out = empty_cpu(sizes, at::kChar);
  if (out.numel() == 0) return out;
  const at::Tensor given = x.size(-1) == 0 ? one_zero_column(x) : x;
  const Rows rows = rows_of(given, /*unit_step=*/true);
  // Without values, a row is its scale.
  const Int8RowsArgs args = {rows.data, rows.stride, x.size(-1), out.mutable_data_ptr<int8_t>()};
  const auto quantize = LB_KERNELS(quantize_kv_kernels).quantize;
  parallel_rows(rows.count, rows.size,
                [&](int64_t begin, int64_t end) { quantize(dtype_of(x), args, begin, end); });
  return out;
}

at::Tensor int8_attention_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                              int64_t sliding_window, double softcap,
                              const std::optional<at::Tensor>& sinks) {
  check_int8_attention(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  return attend(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks, nullptr);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("quantize_kv", &liteboost::quantize_kv_cpu);
  m.impl("int8_attention", &liteboost::int8_attention_cpu);
}
