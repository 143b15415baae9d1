// For the ADInplaceOrView kernel of an op that writes to its arguments.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <initializer_list>
#include <type_traits>

namespace liteboost {

// The op called `name`, which takes what `Function` takes.
template <typename Function>
c10::TypedOperatorHandle<Function> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>();
}

// Counts a version up in what is written to, as torch's own in-place ops do, so that a backward which needs what was
// there before says so; raises for inference tensors outside inference mode. Then goes on to the backend.
template <typename Result, typename... Args>
Result run_in_place(const c10::TypedOperatorHandle<Result(Args...)>& op, c10::DispatchKeySet dispatch_keys,
                    std::initializer_list<std::reference_wrapper<const at::Tensor>> written,
                    std::type_identity_t<Args>... args) {
  for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.redispatch(dispatch_keys & c10::after_ADInplaceOrView_keyset, static_cast<Args>(args)...);
}

}  // namespace liteboost
