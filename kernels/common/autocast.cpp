#include "common/autocast.h"

#include <ATen/autocast_mode.h>

#include "common/checks.h"

namespace liteboost {

at::Tensor autocast_weight(const at::Tensor& weight, at::ScalarType dtype) {
  LB_CHECK_VALUE(weight.scalar_type() != dtype, "_autocast_weight", "weight has dtype ", dtype, " already");
  return at::autocast::cached_cast(dtype, weight, weight.device().type());
}

}  // namespace liteboost
