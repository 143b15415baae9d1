// What the quantizing operators reject. Sources: ops-nn, quant/*/docs/*.md and
// matmul/convert_weight_to_int4_pack/docs (tables of dtypes, constraints of each product).
#include "quantized.h"

using namespace sim;

static void dynamic_quant(const TensorHandle& x, const TensorHandle& smooth, const TensorHandle& y,
                          const TensorHandle& scale) {
  require_given(x, "x");
  require_given(y, "yOut");
  require_given(scale, "scaleOut");
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
}
LIMITS(aclnnDynamicQuant, T, x, T, smooth, O, y, O, scale) {
  dynamic_quant(x, smooth, y, scale);
  require_shape(smooth, "smoothScales", {x->size(-1)});
}
LIMITS(aclnnDynamicQuantV2, T, x, T, smooth, T, group_index, int64_t, dst_type, O, y, O, scale, O, offset) {
  dynamic_quant(x, smooth, y, scale);
  require_dtype(offset, "offsetOut", {kFloat32});
  require_shape(offset, "offsetOut", rows_of(x));
  require(!(is_310p() && offset), "310P quantizes symmetrically only: offsetOut must be null");
  require(dst_type == 2 || dst_type == 3 || dst_type == 29, "dstType ", dst_type,
          ": 2 (int8), 3 or 29 (int4)");
  require((y->scalar_type() == kInt8) == (dst_type == 2), "yOut is ", y->scalar_type(), " but dstType ",
          dst_type);
  if (!group_index) return require_shape(smooth, "smoothScales", {x->size(-1)});
  require(given(smooth), "groupIndex needs smoothScales");
  require_dtype(group_index, "groupIndex", {kInt32});
  require_axes(group_index, "groupIndex", 1, 1);
  require(group_index->size(0) <= 1024, group_index->size(0), " experts, at most 1024");
  require_shape(smooth, "smoothScales", {group_index->size(0), x->size(-1)});
}
LIMITS(aclnnDynamicQuantV3, T, x, T, smooth, T, group_index, int64_t, dst_type, bool, symmetrical, CP, mode,
       O, y, O, scale, O, offset) {
  require(false, "aclnnDynamicQuantV3 runs on Ascend 950 only");
}

LIMITS(aclnnAscendQuantV3, T, x, T, scale, T, offset, bool, sqrt_mode, CP, round_mode, int32_t, dst_type,
       int32_t, axis, O, y) {
  require_given(x, "x");
  require_given(scale, "scale");
  require_given(y, "y");
  require_axes(x, "x", 1, 8);
  for (auto& [t, name] : Tensors{{x, "x"}, {scale, "scale"}, {offset, "offset"}}) {
    if (is_310p()) require_dtype(t, name, {kFloat32, at::kHalf});
    require_dtype(t, name, {kFloat32, at::kHalf, at::kBFloat16});
  }
  require_dtype(y, "y", {kInt8, kInt32});
  require_quantized_shape(y, "y", x->sizes());
  const std::string mode = round_mode ? round_mode : "";
  require(mode == "round" || mode == "ceil" || mode == "trunc" || mode == "floor", "roundMode '", mode,
          "': round, ceil, trunc or floor");
  require(dst_type == 2 || (!is_310p() && (dst_type == 3 || dst_type == 29)), "dstType ", dst_type,
          " is not supported: 2 (int8), not on 310P 3 or 29 (int4)");
  require((y->scalar_type() == kInt8) == (dst_type == 2), "y is ", y->scalar_type(), " but dstType ",
          dst_type);
  const int64_t at = axis < 0 ? axis + x->dim() : axis;
  require(at >= 0 && at < x->dim() && at >= x->dim() - (is_310p() ? 1 : 2), "axis ", axis, " of ", x->dim(),
          is_310p() ? ": 310P takes the last one only" : ": one of the last two is supported");
  for (auto& [t, name] : Tensors{{scale, "scale"}, {offset, "offset"}}) {
    if (t)
      require(t->numel() == 1 || t->numel() == x->size(at), name, " has ", t->numel(),
              " values, needed: 1 or ", x->size(at));
  }
}

LIMITS(aclnnAscendAntiQuant, T, x, T, scale, T, offset, int64_t, dst_type, bool, sqrt_mode, O, y) {
  require_given(x, "x");
  require_given(scale, "scale");
  require_given(y, "y");
  if (is_310p()) require_dtype(x, "x (310P)", {kInt8});
  require_dtype(x, "x", {kInt8, kInt32});
  auto shape = x->sizes().vec();
  if (x->scalar_type() == kInt32) shape.back() *= 8;
  require_shape(y, "y", shape);
  for (auto& [t, name] : Tensors{{scale, "scale"}, {offset, "offset"}}) {
    if (!t) continue;
    require_axes(t, name, 1, 1);
    require(t->numel() == 1 || t->numel() == shape.back(), name, " has ", t->numel(),
            " values, needed: 1 or ", shape.back());
    if (is_310p()) require_dtype(t, name, {kFloat32, at::kHalf});
  }
  require(dst_type == 1 || (dst_type == 27 && !is_310p()), "dstType ", dst_type,
          ": 1 (float16), not on 310P 27 (bfloat16)");
  require(y->scalar_type() == (dst_type == 1 ? at::kHalf : at::kBFloat16), "y is ", y->scalar_type(),
          " but dstType ", dst_type);
}

LIMITS(aclnnTransQuantParamV2, T, scale, T, offset, O, out) {
  require_given(scale, "scale");
  require_given(out, "out");
  require_dtype(scale, "scale", {kFloat32});
  require_dtype(offset, "offset", {kFloat32});
  require_dtype(out, "out", {at::kUInt64, at::kLong});
  require_axes(scale, "scale", 1, 2);
  if (!offset) return require_shape(out, "out", scale->sizes());
  require_axes(offset, "offset", 1, 2);
  require(offset->dim() == 1 || offset->size(0) == 1, "offset has shape ", offset->sizes(),
          ", (t) or (1, n) are");
  require(out->numel() == std::max(scale->numel(), offset->numel()), "out has ", out->numel(),
          " values, needed: the larger of scale's ", scale->numel(), " and offset's ", offset->numel());
}

LIMITS(aclnnConvertWeightToINT4Pack, T, weight, O, packed) {
  require_given(weight, "weight");
  require_given(packed, "weightInt4Pack");
  require_dtype(weight, "weight", {kInt32});
  require_axes(weight, "weight", 2, 3);
  require(weight->numel() > 0, "weight is empty");
  require(weight.format() != ACL_FORMAT_FRACTAL_NZ, "weight must be ND");
  require_contiguous(weight, "weight");
  require_contiguous(packed, "weightInt4Pack");
  require_dtype(packed, "weightInt4Pack", {kInt32});
  require_quantized_shape(packed, "weightInt4Pack", weight->sizes());
}
