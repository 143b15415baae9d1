#include "common/autocast.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "common/checks.h"

namespace liteboost {

at::Tensor autocast_weight(const at::Tensor& weight, at::ScalarType dtype) {
  LB_CHECK_VALUE(weight.scalar_type() != dtype, "_autocast_weight", "weight has dtype ", dtype, " already");
  // Above autograd, as autocast does it: who takes the cast out of the cache later may want its gradient.
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::impl::ForceDispatchKeyGuard above_autograd(keys);
  return at::autocast::cached_cast(dtype, weight, weight.device().type());
}

}  // namespace liteboost
