// What hardware rejects of gated activations: documents of ops-nn, activation/<name>/docs.
#include "checks.h"

using namespace sim;

namespace {

/// `out` has half of x's axis `dim`.
void check_halved(T x, int64_t dim, const TensorHandle& out, const char* name) {
  auto axes = std::max<int64_t>(x->dim(), 1);
  require(dim >= -axes && dim < axes, "dim is ", dim, " of ", x->dim(), " axes");
  require(x->dim() > 0, "x has no axes");
  require(x->size(dim) % 2 == 0, "axis ", dim, " of x is ", x->size(dim), ", it must be even");
  auto shape = x->sizes().vec();
  shape[static_cast<size_t>(dim < 0 ? dim + axes : dim)] /= 2;
  require_shape(out, name, shape);
  require_same_dtype(out, name, x, "x");
}

}  // namespace

LIMITS(aclnnSwiGlu, T, x, int64_t, dim, O, out) {
  require_all_given({{x, "x"}, {out, "out"}});
  require_float(x, "x");
  require_contiguous(x, "x");
  require_contiguous(out, "out");
  check_halved(x, dim, out, "out");
  if (is_310p()) {
    require_not_empty(x, "x");
    require(row_bytes(out) % 64 == 0, "the last axis of out has ", row_bytes(out),
            " bytes; 310P takes multiples of 64 only");
  }
}

LIMITS(aclnnGeGluV3, T, x, int64_t, dim, int64_t, approximate, bool, left, O, out, O, gelu) {
  require_all_given({{x, "self"}, {out, "out"}, {gelu, "outGelu"}});
  require_float(x, "self");
  require_axes(x, "self", 0, 8);
  require(approximate == 0 || approximate == 1, "approximate is ", approximate, ": 0 (none) or 1 (tanh)");
  check_halved(x, dim, out, "out");
  check_halved(x, dim, gelu, "outGelu");
}

LIMITS(aclnnClippedSwiglu, T, x, T, groups, int64_t, dim, double, alpha, double, limit, double, bias, bool,
       interleaved, O, out) {
  require_all_given({{x, "x"}, {out, "out"}});
  require_float(x, "x");
  require_axes(x, "x", 1, 8);
  require(limit > 0, "limit is ", limit, ", it must be positive");
  check_halved(x, dim, out, "out");
  require_dtype(groups, "groupIndex", {at::kLong});
  require_axes(groups, "groupIndex", 1, 1);
  require(!groups || groups->size(0) <= 8192, "groupIndex has more than 8192 groups");
}
