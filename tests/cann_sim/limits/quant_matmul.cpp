// What the quantized matrix products reject. Sources: ops-nn, matmul/{weight_quant_batch_matmul_v2,
// quant_batch_matmul_v3,quant_batch_matmul_v4}/docs/*.md (tables of dtypes of each product), and of 8.5.0 to 9.1.0 their
// op_api: aclnn_weight_quant_batch_matmul_v2.cpp, quant_matmul_checker.cpp, aclnn_quant_matmul_v4.cpp,
// aclnn_quant_matmul_v5.cpp.
#include "../ops/quantize.h"
#include "quantized.h"

using namespace sim;

static bool is_transposed(const TensorHandle& x) {
  return x->dim() >= 2 && x->stride(-1) != 1 && x->stride(-2) == 1;
}
static bool absent(const TensorHandle& x) { return !x || x->numel() == 0; }

// A constant for each list that is chosen at run time: a temporary list would not live long enough.
constexpr Dtypes kHalf = {at::kHalf}, kOnlyInt8 = {kInt8}, kInt8OrInt4 = {kInt8, kInt32}, kIntBias = {kInt32};
constexpr Dtypes kHalfBias = {kInt32, at::kHalf, kFloat32}, kBFloat16Bias = {kInt32, at::kBFloat16, kFloat32};

// ---- 16-bit activations --------------------------------------------------------------------------------------
struct WeightQuant {
  const TensorHandle &x, &weight, &scale, &offset, &quant_scale, &quant_offset, &bias;
  int64_t group;
  const TensorHandle& y;
  int64_t m, k, n;  // logical
};
// 310P sees an NZ weight as (n, k); an int32 weight holds 8 int4 along its contiguous axis.
static std::pair<int64_t, int64_t> weight_shape(const TensorHandle& weight) {
  int64_t rows = weight->size(-2), columns = weight->size(-1);
  if (weight->scalar_type() == kInt32) (is_transposed(weight) ? rows : columns) *= 8;
  if (is_310p() && is_nz(weight)) std::swap(rows, columns);
  return {rows, columns};
}
static void weight_scales(const WeightQuant& w) {
  const int64_t groups = w.group ? (w.k + w.group - 1) / w.group : 1;
  auto shape_fits = [&](const TensorHandle& t) {
    auto s = t->sizes();
    if (w.group) return s == at::IntArrayRef{groups, w.n} || (is_310p() && s == at::IntArrayRef{w.n, groups});
    return t->numel() == 1 || s == at::IntArrayRef{w.n} || s == at::IntArrayRef{1, w.n} ||
           (is_310p() && s == at::IntArrayRef{w.n, 1});
  };
  require(shape_fits(w.scale), "antiquantScale has shape ", w.scale->sizes(), ", needed: ",
          w.group ? text_of("(", groups, ", ", w.n, ")") : text_of("(1), (", w.n, ") or (1, ", w.n, ")"));
  if (w.offset) require_shape(w.offset, "antiquantOffset", w.scale->sizes());
}
// A scale of 64 bits (aclnnTransQuantParamV2) is applied by the cube unit's store.
static void with_hardware_scale(const WeightQuant& w) {
  require_dtype(w.x, "x with a 64-bit antiquantScale", {at::kHalf});
  require_dtype(w.weight, "weight with a 64-bit antiquantScale", {kInt8});
  require_dtype(w.offset, "antiquantOffset with a 64-bit antiquantScale", {kInt32});
  require(!is_transposed(w.x) && is_transposed(w.weight) && !is_nz(w.weight),
          "a 64-bit antiquantScale needs x not transposed and weight ND transposed");
  require(!w.group && w.scale->numel() == w.n, "a 64-bit antiquantScale is per channel");
  require(!w.quant_scale && !w.quant_offset, "a 64-bit antiquantScale excludes quantScale and quantOffset");
  require(w.m >= 1 && w.m <= 96, "a 64-bit antiquantScale needs m in [1, 96], it is ", w.m);
  require(w.k % 64 == 0 && w.n % 64 == 0, "a 64-bit antiquantScale needs k and n divisible by 64, they are ",
          w.k, " and ", w.n);
}
static void nz_weight(const WeightQuant& w) {
  // The operator's own tests of int8 y beside a weight of 8 bits: to be refused up to 9.1.0, accepted on master.
  const bool is_words = w.weight->scalar_type() == kInt32;
  require(w.y->scalar_type() != kInt8 || (!is_words && release_is("9.2.0")), "an NZ weight excludes int8 y");
  if (!is_words) return require(!w.group, "an int8 NZ weight is per tensor or per channel");
  if (!w.group) {  // CheckValForWeightInt4Nz
    require(w.scale->numel() != 1, "an int4 NZ weight is per channel or per group, not per tensor");
    return require(is_transposed(w.weight), "an int4 NZ weight per channel must be transposed");
  }
  require(!is_transposed(w.weight) && !is_transposed(w.x),
          "an int4 NZ weight per group must not be transposed, nor x");
  require(w.group == 64 || w.group == 128, "an int4 NZ weight needs antiquantGroupSize 64 or 128, it is ",
          w.group);
  require(w.k % w.group == 0, "an int4 NZ weight needs k divisible by antiquantGroupSize, k is ", w.k);
  require(w.n % 64 == 0, "an int4 NZ weight needs n divisible by 64, it is ", w.n);
}
// CheckFormatValid, ContiguousCheck and OptionalContiguousCheck, of V2 and V3: a view with gaps is refused, never copied.
static void layouts(const WeightQuant& w) {
  for (auto& [tensor, name] : Tensors{{w.x, "x"}, {w.weight, "weight"}}) {
    require(tensor->is_contiguous() || (is_transposed(tensor) && tensor->transpose(-1, -2).is_contiguous()),
            name, " is neither contiguous nor transposed in its last two axes (strides ", tensor->strides(),
            " of shape ", tensor->sizes(), ")");
  }
  for (auto& [tensor, name] : Tensors{{w.x, "x"}, {w.bias, "bias"}}) {
    require(!tensor || !is_nz(tensor), name, " must be ND");
  }
  for (auto& [tensor, name] : Tensors{{w.scale, "antiquantScale"}, {w.offset, "antiquantOffset"}}) {
    require(!tensor || tensor.format() == ACL_FORMAT_ND, name, " must be ND");
  }
  // AntiQuantScaleAndOffsetContiguousCheck: scales in two axes lie as the weight does on a 950.
  for (auto& [tensor, name] : Tensors{{w.scale, "antiquantScale"}, {w.offset, "antiquantOffset"}}) {
    if (!is_950() || !tensor || tensor->dim() != 2) continue;
    const bool lies =
        is_transposed(w.weight) ? tensor->transpose(0, 1).is_contiguous() : tensor->is_contiguous();
    require(lies, name, " must be transposed where weight is (950), its strides are ", tensor->strides());
  }
  // Beside a transposed weight the scales may lie transposed as well; a 310P with FRACTAL_NZ wants them plain.
  if (!is_transposed(w.weight) || (is_310p() && is_nz(w.weight))) {
    require_contiguous(w.scale, "antiquantScale");
    require_contiguous(w.offset, "antiquantOffset");
  }
  require_contiguous(w.quant_scale, "quantScale");
  require_contiguous(w.quant_offset, "quantOffset");
  require_contiguous(w.bias, "bias");
  require_contiguous(w.y, "y");
}
static void weight_quant(const TensorHandle& x, const TensorHandle& weight, const TensorHandle& scale,
                         const TensorHandle& offset, const TensorHandle& quant_scale,
                         const TensorHandle& quant_offset, const TensorHandle& bias, int64_t group,
                         const TensorHandle& y) {
  require_all_given({{x, "x"}, {weight, "weight"}, {scale, "antiquantScale"}, {y, "y"}});
  require_dtype(x, is_310p() ? "x (310P)" : "x", is_310p() ? kHalf : kSixteenBits);
  require_dtype(weight, is_310p() ? "weight (310P)" : "weight", is_310p() ? kOnlyInt8 : kInt8OrInt4);
  require_axes(x, "x", 2, is_310p() ? 6 : 2);
  require_axes(weight, "weight", 2, is_310p() ? 6 : 2);
  auto [k, n] = weight_shape(weight);
  const WeightQuant w{x, weight, scale, offset, quant_scale, quant_offset, bias, group, y, x->size(-2), k, n};
  require(x->size(-1) == k, "x has k = ", x->size(-1), ", weight has ", k);
  require(k >= 1 && n >= 1 && (is_950() || (k <= 65535 && n <= 65535)),
          "k and n must be in [1, 65535], they are ", k, " and ", n);
  require(w.m >= 1 && (!is_transposed(x) || w.m <= 65535), "m is ", w.m,
          ": at least 1, of a transposed x at most 65535");
  require(group == 0 || (group >= 32 && group <= k - 1 && group % 32 == 0), "antiquantGroupSize ", group,
          ": 0 or a multiple of 32 in [32, k - 1], k is ", k);
  // MAX_MK_VALUE in aclnn_weight_quant_batch_matmul_v2.cpp, 8.5.0 to 9.1.0.
  require(!is_310p() || group == 0 || w.m * k <= 512'000'000,
          "310P with groups takes m * k of at most 512000000, m is ", w.m, ", k ", k);
  // CheckXWeightY: y is (..., m, n).
  require(y->dim() >= 2 && y->size(-2) == w.m && y->size(-1) == n, "y has shape ", y->sizes(),
          ", needed: (..., ", w.m, ", ", n, ")");
  // CheckWeightFormat, CheckOptionalNotNull
  if (is_950())
    require(!is_nz(weight) && !quant_scale && !quant_offset, "950 takes weight in ND and no quantScale");
  layouts(w);
  weight_scales(w);
  if (hardware_scale(*scale)) {
    with_hardware_scale(w);
  } else {
    require_same_dtype(scale, "antiquantScale", x, "x");
    require_same_dtype(offset, "antiquantOffset", x, "x");
  }
  if (is_nz(weight) && !is_310p()) nz_weight(w);
  if (is_310p()) require(!quant_scale && !quant_offset, "310P does not quantize y: quantScale must be null");
  require(!quant_offset || quant_scale, "quantOffset needs quantScale");
  require_dtype(quant_scale, "quantScale", {at::kUInt64, at::kLong});
  if (quant_scale) {
    // CheckQuantParamShape: (1), (n) or (1, n), and the offset alike.
    auto s = quant_scale->sizes();
    require(s == at::IntArrayRef{1} || s == at::IntArrayRef{n} || s == at::IntArrayRef{1, n},
            "quantScale has shape ", s, ", needed: (1), (", n, ") or (1, ", n, ")");
    require_shape(quant_offset, "quantOffset", s);
    require_dtype(y, "y with quantScale", {kInt8});
  } else {
    require_same_dtype(y, "y", x, "x");
  }
  if (bias) {
    // CheckBiasDtypeValid and CheckBiasWithXBf16 in ops-nn, matmul/weight_quant_batch_matmul_v2/op_host/op_api
    // /aclnn_weight_quant_batch_matmul_v2.cpp, of V2 and V3, 8.5.0 to 9.1.0: a bias of bf16 is for a 950 only, whatever
    // the document of V3 says.
    const auto wanted = x->scalar_type() == at::kHalf ? at::kHalf : kFloat32;
    const bool is_like_x = is_950() && bias->scalar_type() == x->scalar_type();
    require(is_like_x || bias->scalar_type() == wanted, "bias is ", bias->scalar_type(), " with ",
            x->scalar_type(), " x: Half with Half, Float with BFloat16");
    // CheckBiasOptionalDimValid: a 310P takes one for each product of a batch.
    require(bias->size(-1) == n && (is_310p() || bias->numel() == n), "bias has shape ", bias->sizes(),
            ", needed: (", n, ") or (1, ", n, ")");
  }
}
LIMITS(aclnnWeightQuantBatchMatmulV2, T, x, T, weight, T, scale, T, offset, T, quant_scale, T, quant_offset,
       T, bias, int, group, O, y) {
  weight_quant(x, weight, scale, offset, quant_scale, quant_offset, bias, group, y);
}
LIMITS(aclnnWeightQuantBatchMatmulV3, T, x, T, weight, T, scale, T, offset, T, quant_scale, T, quant_offset,
       T, bias, int, group, int, inner_precise, O, y) {
  weight_quant(x, weight, scale, offset, quant_scale, quant_offset, bias, group, y);
  require(inner_precise == 0 || inner_precise == 1, "innerPrecise ", inner_precise, ": 0 or 1");
}

// ---- both operands quantized -----------------------------------------------------------------------------------
struct QuantProduct {
  const TensorHandle &x1, &x2;
  const TensorHandle &x1_scale, &x2_scale, &x2_offset, &bias;
  bool transpose1, transpose2;
  const TensorHandle& out;
};
static int64_t logical(const TensorHandle& x, int64_t axis) {
  const int64_t packed = is_transposed(x) ? -2 : -1;
  return x->size(axis) * (x->scalar_type() == kInt32 && axis == packed ? 8 : 1);
}
static std::array<int64_t, 3> product_shape(const QuantProduct& q) {  // m, k, n
  require(logical(q.x1, q.transpose1 ? -2 : -1) == logical(q.x2, q.transpose2 ? -1 : -2), "k of x1 is ",
          logical(q.x1, q.transpose1 ? -2 : -1), ", of x2 ", logical(q.x2, q.transpose2 ? -1 : -2));
  return {logical(q.x1, q.transpose1 ? -1 : -2), logical(q.x1, q.transpose1 ? -2 : -1),
          logical(q.x2, q.transpose2 ? -2 : -1)};
}
// The combinations of dtypes the tables list.
static void combination(const QuantProduct& q) {
  const auto out = q.out->scalar_type(), scale = q.x2_scale->scalar_type();
  const bool tokens = !absent(q.x1_scale), fixed = hardware_scale(*q.x2_scale);
  const bool int4 = q.x1->scalar_type() == kInt32;
  require_dtype(q.x1_scale, "the scale of x1", {kFloat32});
  if (!absent(q.x2_offset)) require(out == kInt8 && fixed, "an offset needs a 64-bit scale and int8 out");
  if (!absent(q.x2_offset)) require_dtype(q.x2_offset, "offset", {kFloat32});
  require(is_one_of(scale, {at::kUInt64, at::kLong, kFloat32, at::kBFloat16}), "the scale of x2 is ", scale,
          ": UInt64, Long, Float or BFloat16");
  Dtypes biases = kIntBias;
  if (fixed) {
    require(!tokens, "a 64-bit scale (aclnnTransQuantParamV2) excludes the scale of x1");
    require(out == at::kHalf || (out == kInt8 && !int4), "out is ", out, " with a 64-bit scale: Half",
            int4 ? "" : " or Char");
  } else if (out == at::kBFloat16) {
    require(!int4 || tokens, "int4 with BFloat16 out needs the scale of x1");
    biases = kBFloat16Bias;
  } else if (out == at::kHalf) {
    require(tokens && scale == kFloat32,
            "Half out needs a 64-bit scale (aclnnTransQuantParamV2), or a Float scale and "
            "the scale of x1");
    biases = kHalfBias;
  } else {
    require(out == kInt32 && !int4 && !tokens, "out is ", out, " with a ", scale,
            " scale: BFloat16, Half or, of int8 "
            "without the scale of x1, Int");
  }
  if (is_310p()) {
    require(fixed || (tokens && out == at::kHalf),
            "310P: a 64-bit scale, or a Float one with the scale of x1 and Half out");
    biases = kIntBias;
  }
  if (!absent(q.bias)) require_dtype(q.bias, "bias", biases);
}
// out has the axes of the operand with most, and m and n last (CheckOutShape in quant_matmul_checker.cpp).
static void product_out(const QuantProduct& q, int64_t m, int64_t n) {
  require(q.out->dim() == std::max(q.x1->dim(), q.x2->dim()) && q.out->size(-2) == m && q.out->size(-1) == n,
          "out has shape ", q.out->sizes(), ", needed: (..., ", m, ", ", n, ")");
  for (int64_t k = 3; k <= q.out->dim(); k++) {
    const int64_t b1 = q.x1->dim() >= k ? q.x1->size(-k) : 1, b2 = q.x2->dim() >= k ? q.x2->size(-k) : 1;
    require((b1 == b2 || b1 == 1 || b2 == 1) && q.out->size(-k) == std::max(b1, b2), "x1 has shape ",
            q.x1->sizes(), ", x2 ", q.x2->sizes(), ", out ", q.out->sizes(),
            ": the batches do not broadcast");
  }
}
static void nz_axes(const TensorHandle& x2) {
  require(!is_nz(x2) || (x2->size(-1) != 1 && x2->size(-2) != 1), "x2 has shape ", x2->sizes(),
          ": k and n must not be 1 in FRACTAL_NZ");
}
static void quant_product(const QuantProduct& q, const char* scale1, const char* scale2) {
  require_all_given({{q.x1, "x1"}, {q.x2, "x2"}, {q.x2_scale, scale2}, {q.out, "out"}});
  const Dtypes integers = is_310p() ? kOnlyInt8 : kInt8OrInt4;
  require_dtype(q.x1, "x1", integers);
  require_dtype(q.x2, "x2", integers);
  require_axes(q.x1, "x1", 2, 6);
  require_axes(q.x2, "x2", 2, 6);
  require(q.x1->numel() > 0 && q.x2->numel() > 0, "x1 or x2 is empty");
  require(q.x1->scalar_type() == q.x2->scalar_type(), "x1 is ", q.x1->scalar_type(), ", x2 ",
          q.x2->scalar_type());
  // CheckFormat in aclnn_quant_matmul_v4.cpp.
  require(!is_nz(q.x1) || (is_310p() && !absent(q.x1_scale)), "x1 must be ND");
  auto [m, k, n] = product_shape(q);
  constexpr int64_t kWidest =
      std::numeric_limits<int32_t>::max();  // QuantBatchMatmulV3's tiling counts in 32 bits
  require(m <= kWidest && k <= kWidest && n <= kWidest, "m, k and n are at most ", kWidest, ", they are ", m,
          ", ", k, " and ", n);
  if (q.x1->scalar_type() == kInt32) {
    require(!q.transpose1 && !is_transposed(q.x1), "int4 x1 must not be transposed");
    require(q.x2->dim() == 2, "int4 x2 has ", q.x2->dim(), " axes, needed: 2");
  }
  combination(q);
  // MaxDimCheck in aclnn_quant_matmul_v4.cpp, of matrices as they lie; IsValidForLargeInput since 9.1.0.
  const bool wide = release_is("9.1.0") && !is_310p() && q.x1->scalar_type() == kInt8 &&
                    !hardware_scale(*q.x2_scale) && q.x2_scale->dim() == 1 && !absent(q.x1_scale) &&
                    q.x1_scale->dim() == 1;
  const int64_t last1 = q.x1->size(is_transposed(q.x1) ? -2 : -1),
                last2 = q.x2->size(is_transposed(q.x2) ? -2 : -1);
  require(wide || (last1 <= 65535 && last2 <= 65535),
          "the last axes of x1 and x2 are at most 65535, they are ", last1, " and ", last2);
  require(q.x2_scale->numel() == 1 || q.x2_scale->numel() == n, scale2, " has ", q.x2_scale->numel(),
          " values, needed: 1 or n = ", n);
  if (!absent(q.x1_scale)) require_shape(q.x1_scale, scale1, {m});
  if (!absent(q.x2_offset))
    require(q.x2_offset->numel() == 1 || q.x2_offset->numel() == n, "offset has ", q.x2_offset->numel(),
            " values, needed: 1 or n = ", n);
  if (!absent(q.bias)) {
    const bool row = q.bias->sizes() == at::IntArrayRef{n};
    const bool batched =
        q.bias->dim() == 3 && q.bias->size(1) == 1 && q.bias->size(2) == n && q.out->dim() == 3;
    require(row || batched, "bias has shape ", q.bias->sizes(),
            ", needed: (n), or (batch, 1, n) with a 3-D out");
  }
  if (is_310p() && is_nz(q.x2))
    require(q.transpose2 || is_transposed(q.x2), "310P needs an NZ x2 transposed");
  if (is_310p() && !absent(q.x1_scale))
    require(is_nz(q.x2), "310P needs x2 in NZ (aclnnTransMatmulWeight) with the scale of x1");
  product_out(q, m, n);
}

LIMITS(aclnnQuantMatmulV4, T, x1, T, x2, T, scale, T, offset, T, token_scale, T, bias, bool, transpose1, bool,
       transpose2, O, out) {
  quant_product({x1, x2, token_scale, scale, offset, bias, transpose1, transpose2, out}, "pertokenScale",
                "scale");
  // CheckShape4WeightNz in quant_batch_matmul_v3_tiling_base.cpp, 9.0.0 and 9.1.0; 8.5.0 has no such check.
  if (release_is("9.0.0")) nz_axes(x2);
}

// groupSize packs three sizes of 16 bits: K | N << 16 | M << 32.
static void by_blocks(const QuantProduct& q, int64_t group) {
  const int64_t gk = group & 0xFFFF, gn = group >> 16 & 0xFFFF, gm = group >> 32 & 0xFFFF;
  auto [m, k, n] = product_shape(q);
  require(!q.transpose1, "block scales need transposeX1 false");
  require_dtype(q.x1_scale, "x1Scale with groupSize", {kFloat32});
  if (q.x1->scalar_type() == kInt8) {
    require(gm == 1 && gn == 128 && gk == 128, "groupSize is (", gm, ", ", gn, ", ", gk,
            "): of int8 (1, 128, 128)");
    require_dtype(q.x2_scale, "x2Scale with groupSize", {kFloat32});
    require_dtype(q.out, "out with groupSize", {at::kBFloat16});
    require(q.transpose2 || is_transposed(q.x2), "int8 block scales need x2 transposed");
    const int64_t kb = (k + 127) / 128, nb = (n + 127) / 128;
    require_shape(q.x1_scale, "x1Scale", {m, kb});
    if (q.transpose2) return require_shape(q.x2_scale, "x2Scale", {nb, kb});
    return require_shape(q.x2_scale, "x2Scale", {kb, nb});
  }
  require(gm <= 1 && gn <= 1 && gk == 256, "groupSize is (", gm, ", ", gn, ", ", gk,
          "): of int4 (0, 0, 256)");
  require(k % 1024 == 0 && n % 256 == 0, "int4 per group needs k divisible by 1024 and n by 256, they are ",
          k, " and ", n);
  require_shape(q.x2_scale, "x2Scale", {(k + 255) / 256, n});
  require_dtype(q.x2_scale, "x2Scale with groupSize", {kFloat32});
  require_dtype(q.x2_offset, "x2Offset with groupSize", {at::kHalf});
  require_dtype(q.out, "out with groupSize", {at::kBFloat16});
}
static void a8w4(const QuantProduct& q, const TensorHandle& y_offset, int64_t group) {
  auto [m, k, n] = product_shape(q);
  require(!q.transpose1 && !q.transpose2 && !is_transposed(q.x1),
          "int8 x int4 needs neither operand transposed");
  require(hardware_scale(*q.x2_scale), "int8 x int4 needs a 64-bit x2Scale (aclnnTransQuantParamV2)");
  require_given(y_offset, "yOffset (of int8 x int4)");
  require_dtype(y_offset, "yOffset", {kFloat32});
  require_shape(y_offset, "yOffset", {n});
  require(!absent(q.x1_scale) && q.x1_scale->numel() == m, "int8 x int4 needs x1Scale of m = ", m, " values");
  // CheckDtypeA8W4Int, CheckScaleDimRangeA8W4.
  require(!q.bias, "int8 x int4 takes no bias");
  require_dtype(q.x1_scale, "x1Scale of int8 x int4", {kFloat32});
  require(q.x1_scale->dim() == q.x2_scale->dim(), "int8 x int4: x1Scale has ", q.x1_scale->dim(),
          " axes, x2Scale ", q.x2_scale->dim());
  product_out(q, m, n);
  require_dtype(q.out, "out of int8 x int4", kSixteenBits);
  require(k < 29576 && k % 2 == 0, "int8 x int4 needs an even k below 29576, it is ", k);
  if (group & 0xFFFF) {
    require((group & 0xFFFF) == 256 && k % 256 == 0,
            "int8 x int4 per group needs groups of 256 that divide k, k is ", k);
    require_shape(q.x2_scale, "x2Scale", {k / 256, n});
  } else {
    require(q.x2_scale->numel() == n, "x2Scale has ", q.x2_scale->numel(), " values, needed: n = ", n);
  }
}
static void quant_product5(const QuantProduct& q, const TensorHandle& y_scale, const TensorHandle& x1_offset,
                           const TensorHandle& y_offset, int64_t group) {
  require_all_given({{q.x1, "x1"}, {q.x2, "x2"}, {q.x2_scale, "x2Scale"}, {q.out, "out"}});
  require(absent(y_scale), "yScale is not supported");
  require(absent(x1_offset), "x1Offset is not supported");
  const bool mixed = q.x1->scalar_type() == kInt8 && q.x2->scalar_type() == kInt32;
  require(absent(y_offset) || mixed, "yOffset belongs to int8 x int4 only");
  if (is_310p()) require(!mixed && !(group & 0xFFFF), "310P: only int8 x int8 with one scale a channel");
  if (mixed) return a8w4(q, y_offset, group);
  if (group & 0xFFFF) return by_blocks(q, group);
  quant_product(q, "x1Scale", "x2Scale");
  nz_axes(q.x2);  // CheckDimValue in quant_matmul_checker.cpp, 8.5.0 to 9.1.0
}
LIMITS(aclnnQuantMatmulV5, T, x1, T, x2, T, x1_scale, T, x2_scale, T, y_scale, T, x1_offset, T, x2_offset, T,
       y_offset, T, bias, bool, transpose1, bool, transpose2, int64_t, group, O, out) {
  quant_product5({x1, x2, x1_scale, x2_scale, x2_offset, bias, transpose1, transpose2, out}, y_scale,
                 x1_offset, y_offset, group);
}
