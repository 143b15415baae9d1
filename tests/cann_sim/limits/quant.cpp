// What the quantizing operators reject. Sources: ops-nn, quant/*/docs/*.md,
// norm/add_rms_norm_dynamic_quant/docs and matmul/convert_weight_to_int4_pack/docs (tables of dtypes, constraints of each product).
#include "quantized.h"

using namespace sim;

LIMITS(aclnnDynamicQuant, T, x, T, smooth, O, y, O, scale) {
  require_all_given({{x, "x"}, {y, "yOut"}, {scale, "scaleOut"}});
  if (is_310p()) {
    require_dtype(x, "x (310P)", {at::kHalf});
    require_dtype(y, "yOut (310P)", {kInt8});
    require(x->size(-1) % 32 == 0, "on 310P the last axis of x must be a multiple of 32, it is ",
            x->size(-1));
  }
  require_dtype(x, "x", kSixteenBits);
  require_axes(x, "x", 2, 8);
  require_same_dtype(smooth, "smoothScales", x, "x");
  require_dtype(y, "yOut", {kInt8, kInt32});
  require_quantized_shape(y, "yOut", x->sizes());
  require_dtype(scale, "scaleOut", {kFloat32});
  require_shape(scale, "scaleOut", rows_of(x));
  require_shape(smooth, "smoothScales", {x->size(-1)});
}

static void row_quantized(const TensorHandle& x, const TensorHandle& gamma, const TensorHandle& smooth,
                          const TensorHandle& y, const TensorHandle& scale, const char* name) {
  require_all_given({{y, name}, {scale, "scaleOut"}});
  require_same_dtype(smooth, "smoothScale", x, "x");
  require_shape(smooth, "smoothScale", gamma->sizes());
  require_quantized_shape(y, name, x->sizes());
  require_dtype(scale, "scaleOut", {kFloat32});
  require(scale->numel() == row_count(x), "scaleOut has ", scale->numel(), " values for ", row_count(x),
          " rows");
}
LIMITS(aclnnAddRmsNormDynamicQuant, T, x1, T, x2, T, gamma, T, smooth1, T, smooth2, double, eps, O, y1, O, y2,
       O, x_out, O, scale1, O, scale2) {
  require_all_given({{x1, "x1"}, {x2, "x2"}, {gamma, "gamma"}, {x_out, "xOut"}});
  require_dtype(x1, "x1", kSixteenBits);
  require_same_dtype(x2, "x2", x1, "x1");
  require_same_dtype(gamma, "gamma", x1, "x1");
  require_same_dtype(x_out, "xOut", x1, "x1");
  require_shape(x2, "x2", x1->sizes());
  require_shape(x_out, "xOut", x1->sizes());
  require_shape(gamma, "gamma", {x1->size(-1)});
  require_axes(x1, "x1", 2, 8);
  require(!smooth2 || smooth1, "smoothScale2 needs smoothScale1");
  require_dtype(y1, "y1Out", {kInt8});
  row_quantized(x1, gamma, smooth1, y1, scale1, "y1Out");
  if (smooth2) row_quantized(x1, gamma, smooth2, y2, scale2, "y2Out");
}

LIMITS(aclnnConvertWeightToINT4Pack, T, weight, O, packed) {
  require_all_given({{weight, "weight"}, {packed, "weightInt4Pack"}});
  require_dtype(weight, "weight", {kInt32});
  require_axes(weight, "weight", 2, 3);
  require(weight->numel() > 0, "weight is empty");
  require(weight.format() != ACL_FORMAT_FRACTAL_NZ, "weight must be ND");
  require_contiguous(weight, "weight");
  require_contiguous(packed, "weightInt4Pack");
  require_dtype(packed, "weightInt4Pack", {kInt32});
  require_quantized_shape(packed, "weightInt4Pack", weight->sizes());
  // CheckStorageShapeVaild in aclnn_convert_weight_to_int4_pack.cpp.
  const auto stored = packed.storage_shape().size();
  require(packed.format() != ACL_FORMAT_FRACTAL_NZ || stored == 4 || stored == 5,
          "weightInt4Pack in FRACTAL_NZ has ", stored, " axes in memory, needed: 4, or 5 with experts");
}
