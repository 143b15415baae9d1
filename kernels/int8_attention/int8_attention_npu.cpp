// int8_attention on an NPU, and the rows that it reads there.
//
// A cache there keeps integers and scales apart (int8_attention_npu.h): _npu_quantize_kv makes them by one DynamicQuant,
// which divides a row by its scale where the CPU multiplies by 127 / largest; _npu_int8_attention reads them by one
// FusedInferAttentionScore (int8_attention_npu_fused.cpp). What that does not take is counted, and dequantized for
// `attention`: two launches for keys, two for values, and one read of each. int8_attention itself, whose rows have
// their scales behind them, takes rows apart first; it is what the comparison with the reference calls.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include "attention/attention_checks.h"
#include "int8_attention/int8_attention_checks.h"
#include "int8_attention/int8_attention_npu.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::kServed;
using npu::Refusal;
using npu::Tensor;
constexpr const char* kOp = "int8_attention";
constexpr const char* kRows = "quantize_kv";

// x, smoothScales, y, scale
const npu::Operator<Tensor, Tensor, Tensor, Tensor> kQuantize{"aclnnDynamicQuant"};

using Attention = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                             double, bool, int64_t, double, const OptionalTensor&);

// The values, in two launches.
at::Tensor dequantized(const Integers8& rows, at::ScalarType dtype) {
  return at::mul(rows.integers, rows.scales).to(dtype);
}

at::Tensor attend(const at::Tensor& query, const Integers8& key, const Integers8& value,
                  const OptionalTensor& mask, double scaling, bool is_causal, int64_t sliding_window,
                  double softcap, const OptionalTensor& sinks) {
  const Call call =
      call_of(query, key.integers, value.integers, mask, scaling, is_causal, sliding_window, softcap, sinks);
  const Keys scales{key.scales, value.scales, call.keys.first};
  Refusal refusal = integers_refusal(call);
  bool within_cache = true;
  if (refusal == kServed) {
    const std::string kind = kind_of_integers(call, scales, true);
    refusal = npu::unverified(kOp, kind);
    if (refusal != kServed) {  // the operator may be right of copies all the same
      within_cache = false;
      const std::string of_copies = kind_of_integers(call, scales, false);
      if (of_copies != kind) refusal = npu::unverified(kOp, of_copies);
    }
  }
  const auto of_dequantized = [&](Refusal why) {
    npu::check_reference(kOp, why);
    static const auto attention =
        c10::Dispatcher::singleton().findSchemaOrThrow("liteboost::attention", "").typed<Attention>();
    const at::ScalarType dtype = query.scalar_type();
    const at::Tensor result = attention.call(query, dequantized(key, dtype), dequantized(value, dtype), mask,
                                             scaling, is_causal, sliding_window, softcap, sinks);
    npu::count_fallback(kOp, why);
    return result;
  };
  if (refusal != kServed) return of_dequantized(refusal);
  return npu::serve(kOp, [&] { return attend_integers(call, scales, within_cache); }, of_dequantized);
}

// Rows with their scales behind them, taken apart; those of a cache with all of the cache, as a copy.
Integers8 apart(const at::Tensor& rows) {
  const at::Tensor whole = contiguous_from(rows, 2);
  const at::Tensor& from = whole.defined() ? whole : rows;
  const int64_t size = rows.size(3) - kInt8ScaleBytes;
  const at::Tensor integers = from.narrow(3, 0, size).contiguous();
  const at::Tensor bytes =
      at::empty({from.size(0), from.size(1), from.size(2), kInt8ScaleBytes}, from.options());
  bytes.copy_(from.narrow(3, size, kInt8ScaleBytes));
  return {integers.narrow(2, 0, rows.size(2)), bytes.view(at::kFloat).narrow(2, 0, rows.size(2))};
}

at::Tensor int8_attention_npu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const OptionalTensor& mask, double scaling, bool is_causal,
                              int64_t sliding_window, double softcap, const OptionalTensor& sinks) {
  check_int8_attention(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  const c10::DeviceGuard guard(query.device());
  return attend(query, apart(key), apart(value), mask, scaling, is_causal, sliding_window, softcap, sinks);
}

void check_apart(const char* name, const at::Tensor& integers, const at::Tensor& scales) {
  TORCH_CHECK(integers.dim() == 4 && scales.dim() == 4 && integers.scalar_type() == at::kChar &&
                  scales.scalar_type() == at::kFloat && scales.sym_size(3) == 1 &&
                  integers.sym_sizes().slice(0, 3) == scales.sym_sizes().slice(0, 3),
              "liteboost: _npu_int8_attention takes int8 [B, K, S, D] and fp32 [B, K, S, 1] for ", name,
              ", got ", integers.scalar_type(), " ", integers.sym_sizes(), " and ", scales.scalar_type(), " ",
              scales.sym_sizes(), "; make them with _npu_quantize_kv");
}

at::Tensor int8_attention_apart(const at::Tensor& query, const at::Tensor& key, const at::Tensor& key_scales,
                                const at::Tensor& value, const at::Tensor& value_scales,
                                const OptionalTensor& mask, double scaling, bool is_causal,
                                int64_t sliding_window, double softcap, const OptionalTensor& sinks) {
  check_apart("key", key, key_scales);
  check_apart("value", value, value_scales);
  check_attention_options(kOp, query, key, mask, scaling, is_causal, sliding_window, softcap, sinks);
  const c10::DeviceGuard guard(query.device());
  return attend(query, {key, key_scales}, {value, value_scales}, mask, scaling, is_causal, sliding_window,
                softcap, sinks);
}

at::Tensor int8_attention_apart_meta(const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& key_scales, const at::Tensor& value,
                                     const at::Tensor& value_scales, const OptionalTensor&, double, bool,
                                     int64_t, double, const OptionalTensor&) {
  check_apart("key", key, key_scales);
  check_apart("value", value, value_scales);
  return at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1), value.sym_size(3)},
                          query.options());
}

std::tuple<at::Tensor, at::Tensor> empty_rows(const at::Tensor& x) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  const at::Tensor integers = at::empty_symint(sizes, x.options().dtype(at::kChar));
  sizes.back() = 1;
  return {integers, at::empty_symint(sizes, x.options().dtype(at::kFloat))};
}

Refusal rows_refusal(const at::Tensor& x) {
  if (x.numel() == 0) return "no elements";
  if (x.scalar_type() == at::kFloat) return "fp32";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (!kQuantize.available()) return "not in this CANN";
  // The same operator on the same dtype, which is compared with what is multiplied by its rows.
  return npu::unverified("linear_w8a8", npu::dtype_name(x.scalar_type()));
}

std::tuple<at::Tensor, at::Tensor> quantize_kv_apart(const at::Tensor& x) {
  check_quantize_kv(x);
  const c10::DeviceGuard guard(x.device());
  const int64_t size = x.size(-1);
  using Rows = std::tuple<at::Tensor, at::Tensor>;
  const auto reference = [&](Refusal why) -> Rows {
    const at::Tensor rows = npu::fall_back<at::Tensor(const at::Tensor&)>(kRows, why).call(x);
    return {rows.narrow(-1, 0, size).contiguous(),
            // A copy: what is contiguous may begin at any byte, and a view of floats may not.
            rows.narrow(-1, size, kInt8ScaleBytes).clone(at::MemoryFormat::Contiguous).view(at::kFloat)};
  };
  if (const Refusal refusal = rows_refusal(x); refusal != kServed) return reference(refusal);
  const auto launch = [&]() -> Rows {
    const Rows made = empty_rows(x);
    kQuantize(x.contiguous().view({-1, size}), at::Tensor(), std::get<0>(made).view({-1, size}),
              std::get<1>(made).view({-1}));
    return made;
  };
  return npu::serve(kRows, launch, reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_quantize_kv(Tensor x) -> (Tensor, Tensor)");
  m.def(
      "_npu_int8_attention(Tensor query, Tensor key, Tensor key_scales, Tensor value, Tensor value_scales, "
      "Tensor? mask, float scaling, bool is_causal=False, int sliding_window=0, float softcap=0.0, "
      "Tensor? sinks=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("int8_attention", &liteboost::int8_attention_npu);
  m.impl("_npu_quantize_kv", &liteboost::quantize_kv_apart);
  m.impl("_npu_int8_attention", &liteboost::int8_attention_apart);
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("_npu_quantize_kv", &liteboost::empty_rows);
  m.impl("_npu_int8_attention", &liteboost::int8_attention_apart_meta);
}
