// What hardware rejects of norms: documents of ops-nn, norm/<name>/docs.
#include "checks.h"

using namespace sim;

namespace {

/// gamma is the last axes of x; rstd has x's shape with ones in their place.
void check_shapes(const TensorHandle& x, const TensorHandle& gamma, const TensorHandle& rstd) {
  require_axes(x, "x", 1, 8);
  require_axes(gamma, "gamma", 1, 8);
  auto sizes = x->sizes(), part = gamma->sizes();
  require(part.size() <= sizes.size() && sizes.slice(sizes.size() - part.size()) == part, "gamma has shape ",
          part, ", it must be the last axes of x of shape ", sizes);
  if (!rstd) return;
  auto shape = sizes.vec();
  std::fill(shape.end() - static_cast<int64_t>(part.size()), shape.end(), 1);
  require_dtype(rstd, "rstdOut", {at::kFloat});
  require_shape(rstd, "rstdOut", shape);
}

void check_last_axis_310p(const TensorHandle& x, const char* name) {
  if (!is_310p() || !x) return;
  require(row_bytes(x) >= 32, "the last axis of ", name, " has ", row_bytes(x), " bytes, 310P needs 32");
}

void check_rms_norm(T x, T gamma, O y, O rstd, bool mixed) {
  require_all_given({{x, "x"},
                     {gamma, "gamma"},
                     {y, "yOut"},
                     {rstd, "rstdOut"}});  // no form of this operator goes without rstdOut
  require_float(x, "x");
  require_same_dtype(y, "yOut", x, "x");
  if (mixed && !is_310p()) {
    require(gamma->scalar_type() == x->scalar_type() || gamma->scalar_type() == at::kFloat, "gamma is ",
            gamma->scalar_type(), " with x of ", x->scalar_type(), ": the same or float32");
  } else {
    require_same_dtype(gamma, "gamma", x, "x");
  }
  require_not_empty(gamma, "gamma");
  check_shapes(x, gamma, rstd);
  require_shape(y, "yOut", x->sizes());
  check_last_axis_310p(x, "x");
}

}  // namespace

LIMITS(aclnnRmsNorm, T, x, T, gamma, double, eps, O, y, O, rstd) { check_rms_norm(x, gamma, y, rstd, true); }
LIMITS(aclnnGemmaRmsNorm, T, x, T, gamma, double, eps, O, y, O, rstd) {
  check_rms_norm(x, gamma, y, rstd, false);
}

LIMITS(aclnnAddRmsNorm, T, x1, T, x2, T, gamma, double, eps, O, y, O, rstd, O, x) {
  require_all_given({{x1, "x1"}, {x2, "x2"}, {gamma, "gamma"}, {y, "yOut"}});
  require(eps >= 0, "epsilon is ", eps, ", it must not be negative");
  require_float(x1, "x1");
  require_same_dtype(x2, "x2", x1, "x1");
  require_same_dtype(gamma, "gamma", x1, "x1");
  require_same_dtype(y, "yOut", x1, "x1");
  require_same_dtype(x, "xOut", x1, "x1");
  require_axes(x1, "x1", 1, 8);
  require_shape(x2, "x2", x1->sizes());
  require_shape(y, "yOut", x1->sizes());
  require_shape(x, "xOut", x1->sizes());
  check_last_axis_310p(x1, "x1");
  if (rstd) {
    if (!x) throw NullError("xOut is null and rstdOut is not");
    return check_shapes(x1, gamma, rstd);
  }
  require(x1->scalar_type() != at::kFloat, "float32 needs rstdOut and xOut");
  int64_t row[] = {1, x1->size(-1)};
  require(gamma->sizes() == at::IntArrayRef(row), "without rstdOut gamma must have shape ",
          at::IntArrayRef(row), ", it has ", gamma->sizes());
}

LIMITS(aclnnLayerNorm, T, x, IA, shape, T, weight, T, bias, double, eps, O, out, O, mean, O, rstd) {
  require_all_given({{x, "input"}, {out, "out"}});
  require_given(shape, "normalizedShape");
  for (auto& [tensor, name] : Tensors{{x, "input"},
                                      {weight, "weight"},
                                      {bias, "bias"},
                                      {out, "out"},
                                      {mean, "meanOut"},
                                      {rstd, "rstdOut"}}) {
    require_float(tensor, name);
    require_axes(tensor, name, 0, 8);
  }
  auto sizes = x->sizes(), part = *shape;
  require(part.size() >= 1 && part.size() <= sizes.size() && sizes.slice(sizes.size() - part.size()) == part,
          "normalizedShape is ", part, ", it must be the last axes of input of shape ", sizes);
  require_shape(weight, "weight", part);
  require_shape(bias, "bias", part);
  require_shape(out, "out", sizes);
  require_same_dtype(weight, "weight", bias, "bias");
  for (auto& [tensor, name] : Tensors{{weight, "weight"}, {bias, "bias"}}) {
    if (!tensor) continue;
    bool both = weight && bias;
    require(tensor->scalar_type() == x->scalar_type() || (both && tensor->scalar_type() == at::kFloat), name,
            " is ", tensor->scalar_type(), " with input of ", x->scalar_type(),
            ": the same, or float32 when weight and bias are both there");
  }
}

LIMITS(aclnnAddLayerNorm, T, x1, T, x2, T, gamma, T, beta, T, bias, double, eps, bool, additional, O, y, O,
       mean, O, rstd, O, x) {
  require_all_given({{x1, "x1"},
                     {x2, "x2"},
                     {gamma, "gamma"},
                     {beta, "beta"},
                     {y, "yOut"},
                     {mean, "meanOut"},
                     {rstd, "rstdOut"},
                     {x, "xOut"}});
  for (auto& [tensor, name] :
       Tensors{{x1, "x1"}, {x2, "x2"}, {gamma, "gamma"}, {beta, "beta"}, {bias, "bias"}}) {
    require_float(tensor, name);
    check_last_axis_310p(tensor, name);
  }
  // The table of dtypes: y, x and bias in the wider of x1 and x2; gamma and beta in that or float32.
  auto wider = x1->scalar_type() == at::kFloat ? x1 : x2;
  if (is_310p()) require_same_dtype(x2, "x2", x1, "x1");
  if (wider->scalar_type() != at::kFloat) require_same_dtype(x2, "x2", x1, "x1");
  require_same_dtype(y, "yOut", wider, "the wider of x1 and x2");
  require_same_dtype(x, "xOut", wider, "the wider of x1 and x2");
  require_same_dtype(bias, "bias", wider, "the wider of x1 and x2");
  require_same_dtype(beta, "beta", gamma, "gamma");
  require(gamma->scalar_type() == wider->scalar_type() || (gamma->scalar_type() == at::kFloat && !is_310p()),
          "gamma is ", gamma->scalar_type(), " with x of ", wider->scalar_type());
  require_not_empty(x1, "x1");
  require_shape(x2, "x2", x1->sizes());
  require_shape(y, "yOut", x1->sizes());
  require_shape(x, "xOut", x1->sizes());
  require_shape(beta, "beta", gamma->sizes());
  if (bias) {
    require(bias->sizes() == gamma->sizes() || bias->sizes() == x1->sizes(), "bias has shape ", bias->sizes(),
            ", it must be that of gamma or of x1");
  }
  check_shapes(x1, gamma, rstd);
  check_shapes(x1, gamma, mean);
  require_contiguous(y, "yOut");
  require_contiguous(x, "xOut");
}
