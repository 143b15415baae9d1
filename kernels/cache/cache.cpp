#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "cache/cache_checks.h"

namespace liteboost {
namespace {

void kv_append_meta(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key,
                    const at::Tensor& value, const at::Tensor& slots) {
  check_kv_append(keys, values, key, value, slots);
}

// Counts a version up in what is written to, as torch's own in-place ops do, so that a backward which needs what was
// there before says so; raises for inference tensors outside inference mode.
void kv_append_in_place(c10::DispatchKeySet dispatch_keys, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& key, const at::Tensor& value, const at::Tensor& slots) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("liteboost::kv_append", "")
                             .typed<decltype(kv_append_meta)>();
  keys.unsafeGetTensorImpl()->bump_version();
  values.unsafeGetTensorImpl()->bump_version();
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatch(dispatch_keys & c10::after_ADInplaceOrView_keyset, keys, values, key, value, slots);
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
