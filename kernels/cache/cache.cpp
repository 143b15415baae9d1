#include <torch/library.h>

#include "cache/cache_checks.h"
#include "common/in_place.h"

namespace liteboost {
namespace {

void kv_append_meta(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key,
                    const at::Tensor& value, const at::Tensor& slots) {
  check_kv_append(keys, values, key, value, slots);
}

void kv_append_in_place(c10::DispatchKeySet dispatch_keys, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& key, const at::Tensor& value, const at::Tensor& slots) {
  static const auto op = find_op<decltype(kv_append_meta)>("liteboost::kv_append");
  run_in_place(op, dispatch_keys, {keys, values}, keys, values, key, value, slots);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("kv_append(Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value, Tensor slots) -> ()");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("kv_append", &liteboost::kv_append_meta); }

TORCH_LIBRARY_IMPL(liteboost, ADInplaceOrView, m) { m.impl("kv_append", &liteboost::kv_append_in_place); }

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) { m.impl("kv_append", torch::CppFunction::makeFallthrough()); }
