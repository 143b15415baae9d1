// What the grouped matrix products reject. Sources: ops-transformer, gmm/*/docs/*.md (A2/A3: common constraints,
// tables of dtypes, supported group types).
#include "../ops/quantize.h"
#include "quantized.h"

using namespace sim;

static TensorHandle element(const TensorListHandle& list, size_t k) {
  TensorHandle t;
  if (list && k < list.size()) t.p = list.p->v[k];
  return t;
}
static bool some(const TensorListHandle& list) { return list && list.size() > 0; }

struct Grouped {
  const TensorListHandle &x, &weight, &bias, &scale, &offset, &aq_scale, &aq_offset, &token_scale;
  const TensorHandle& list;
  int64_t split, type, list_type, activation;
  const TensorListHandle& out;
};

// The tables of dtypes: x, weight -> out, with the scales each needs.
static void dtypes(const Grouped& g) {
  const auto x = g.x.at(0).scalar_type(), w = g.weight.at(0).scalar_type(), out = g.out.at(0).scalar_type();
  const auto bias = element(g.bias, 0), scale = element(g.scale, 0);
  const bool float_x = is_one_of(x, kFloats);
  require(float_x || is_one_of(x, {kInt8, kInt32}), "x is ", x,
          ": Half, BFloat16, Float, Char or Int (int4)");
  if (float_x) {
    require(out == x, "out is ", out, " with ", x, " x: they must be equal");
    require(w == x || (x != kFloat32 && is_one_of(w, {kInt8, kInt32})), "weight is ", w, " with ", x, " x");
    require(!some(g.scale) && !some(g.token_scale), "scale and perTokenScale belong to quantized x");
    require((w != x) == some(g.aq_scale), "antiquantScale must be given with integer weights and only then");
    require(!is_310p() || (x == at::kHalf && w == x), "310P takes Half x and weight only");
    require(!is_950() || w == x || w == kInt32, "950 multiplies out 4-bit weights only, not ", w);
    if (x == at::kHalf) return require_dtype(bias, "bias", {at::kHalf});
    require_dtype(bias, "bias", {kFloat32});
    return;
  }
  require(!is_310p(), "310P takes Half x and weight only");
  require(g.type == 0, "quantized x needs groupType 0, it is ", g.type);
  require(g.x.size() == 1 && g.weight.size() == 1 && g.out.size() == 1,
          "quantized x needs lists of one tensor");
  require(element(g.weight, 0)->dim() == 3, "the weight of quantized x needs 3 axes (E, K, N)");
  if (x == kInt32 || w == kInt32) {  // int4 weights
    require(w == kInt32, "int4 x needs int4 weight");
    require(scale && hardware_scale(*scale), "int4 weights need a 64-bit scale");
    require(out == at::kHalf || out == at::kBFloat16, "out is ", out, " with int4 weights: Half or BFloat16");
    require(g.activation == 0, "int4 weights exclude actType ", g.activation);
    if (x == kInt8) {
      require(bias && bias->scalar_type() == kFloat32,
              "int8 x int4 needs a Float bias, 8 * sum of weight * scale over k");
      require(some(g.token_scale), "int8 x int4 needs perTokenScale");
    } else {
      require(!bias, "int4 x int4 takes no bias");
    }
    return;
  }
  require(w == kInt8, "int8 x needs int8 or int4 weight");
  // CheckFunctionQuantParams in ops-transformer, gmm/grouped_matmul, aclnn_grouped_matmul.cpp, 8.5.0 to 9.1.0: of Int
  // out no scale is looked at, nor read.
  if (out == kInt32) return;
  require(given(scale), "int8 x needs scale");
  const auto s = scale->scalar_type();
  const bool fits =
      out == kInt8 ? hardware_scale(*scale)
      : out == at::kHalf
          ? s == kFloat32
          : out == at::kBFloat16 && (s == at::kBFloat16 || (s == kFloat32 && is_nz(element(g.weight, 0))));
  require(fits, "scale is ", s, " with ", out,
          " out: UInt64 with Char, Float with Half, BFloat16 (of an NZ weight also "
          "Float) with BFloat16");
  require(out != kInt8 || !some(g.token_scale), "Char out takes no perTokenScale");
  const bool nz_bias = is_nz(element(g.weight, 0)) && out == at::kBFloat16;
  if (nz_bias) return require_dtype(bias, "bias", {kInt32, at::kBFloat16});
  require_dtype(bias, "bias", {kInt32});
}

// Scales and offsets of integer weights beside floating-point x. The document calls offsets optional;
// CheckGroupedMatmulAntiQuant in ops-transformer, gmm/grouped_matmul, aclnn_grouped_matmul.cpp, takes a null for 4-bit
// weights in one tensor only, from 9.0.0.
static void antiquant(const Grouped& g) {
  if (!some(g.aq_scale)) return require(!some(g.aq_offset), "antiquantOffset needs antiquantScale");
  const bool words = g.weight.size() == 1 && element(g.weight, 0)->scalar_type() == kInt32;
  require(some(g.aq_offset) || (words && release_is("9.0.0")),
          "antiquantOffset must be given with antiquantScale");
  require(g.type != 2, "groupType 2 takes no antiquantScale");
  require(
      g.aq_scale.size() == g.weight.size() && (!some(g.aq_offset) || g.aq_offset.size() == g.weight.size()),
      "antiquantScale and antiquantOffset need as many tensors as weight");
  for (size_t k = 0; k < g.weight.size(); k++) {
    auto w = element(g.weight, k), scale = element(g.aq_scale, k);
    auto offset = some(g.aq_offset) ? element(g.aq_offset, k) : TensorHandle{};
    require_same_dtype(scale, "antiquantScale", element(g.x, 0), "x");
    require_same_dtype(offset, "antiquantOffset", element(g.x, 0), "x");
    const bool int4 = w->scalar_type() == kInt32;
    const bool transposed = w->stride(-1) != 1 && w->stride(-2) == 1;
    const int64_t n = w->size(-1) * (int4 && !transposed ? 8 : 1);
    const int64_t inputs = w->size(-2) * (int4 && transposed ? 8 : 1);
    auto shape = w->sizes().slice(0, w->dim() - 2).vec();
    const bool by_group = scale->dim() == static_cast<int64_t>(shape.size()) + 2;
    if (by_group) {
      const int64_t count = scale->size(-2);
      require(int4, "8-bit weights take one scale for each output");
      require(count > 0 && inputs % count == 0 && (!transposed || inputs / count % 2 == 0), count,
              " groups of ", inputs, " rows: all of one size, even where the weight is transposed");
      shape.push_back(count);
    }
    shape.push_back(n);
    require_shape(scale, "antiquantScale", shape);
    require_shape(offset, "antiquantOffset", shape);
  }
}

// The tables of group types: number of tensors, group list, splitItem.
static void groups(const Grouped& g) {
  const size_t nx = g.x.size(), nw = g.weight.size(), ny = g.out.size();
  require(nx <= 128 && nw <= 128 && ny <= 128, "lists have at most 128 tensors");
  require(g.split >= 0 && g.split <= 3, "splitItem ", g.split, ": 0 to 3");
  require(g.type == -1 || g.type == 0 || g.type == 2, "groupType ", g.type, ": -1, 0 or 2");
  require(g.list_type >= 0 && g.list_type <= 2, "groupListType ", g.list_type, ": 0, 1 or 2");
  require(g.activation >= 0 && g.activation <= 5, "actType ", g.activation, ": 0 to 5");
  require(g.split < 2 || ny == 1, "splitItem ", g.split, " needs one output, there are ", ny);
  require(g.split >= 2 || ny == nw, "splitItem ", g.split, " needs as many outputs as weights");
  if (g.list) {
    require_dtype(g.list, "groupList", {at::kLong});
    require_axes(g.list, "groupList", g.list_type == 2 ? 2 : 1, g.list_type == 2 ? 2 : 1);
    require(g.list->size(0) <= (nw == 1 ? 1024 : 128), g.list->size(0),
            " groups: at most 1024, with several weights 128");
    require(g.list_type != 2 || g.list->size(1) == 2, "groupListType 2 needs groupList of shape (E, 2)");
  }
  if (g.type == -1) {
    require(!g.list, "groupType -1 takes no groupList");
    require(g.split < 2 && nx == nw, "groupType -1 needs several x and weights and splitItem 0 or 1");
    return;
  }
  if (nx == 1 && ny == 1) require(given(g.list), "groupType ", g.type, " with one x needs groupList");
  if (g.type == 0) {
    require(g.split >= 2, "groupType 0 needs splitItem 2 or 3");
    require(nx == 1 || nx == nw, "x has ", nx, " tensors, weight ", nw);
    require(element(g.weight, 0)->dim() == (nx == 1 && nw == 1 ? 3 : 2),
            "groupType 0 needs one weight of 3 axes or "
            "several of 2");
    return;
  }
  require(nx == 1, "groupType 2 needs one x");
  require(!some(g.bias), "groupType 2 takes no bias");
  require(element(g.x, 0)->size(-2) == 1 || element(g.x, 0)->stride(-2) == 1,
          "groupType 2 needs x transposed");
}

static void grouped(const Grouped& g) {
  require(some(g.x), "x is empty");
  require(some(g.weight), "weight is empty");
  require(some(g.out), "out is empty");
  require(!some(g.bias) || g.bias.size() == g.weight.size(), "bias has ", g.bias.size(), " tensors, weight ",
          g.weight.size());
  groups(g);
  dtypes(g);
  antiquant(g);
  for (size_t k = 0; k < g.x.size(); k++) {
    auto x = element(g.x, k);
    require(x->dim() >= 2 && x->size(-1) < 65536, "the last axis of x must be below 65536, it is ",
            x->size(-1));
    require(g.type == 2 || x->size(-1) == 1 || x->stride(-1) == 1, "x must not be transposed");
  }
  for (size_t k = 0; k < g.weight.size(); k++) {
    auto w = element(g.weight, k);
    require(w->size(-1) < 65536, "the last axis of weight must be below 65536, it is ", w->size(-1));
  }
  if (some(g.token_scale)) {
    require_dtype(element(g.token_scale, 0), "perTokenScale", {kFloat32});
    require_shape(element(g.token_scale, 0), "perTokenScale", {element(g.x, 0)->size(0)});
  }
}

static void unsupported(const TensorListHandle& act_in, const TensorListHandle& act_scale,
                        const TensorListHandle& act_offset, const TensorListHandle& act_out,
                        const TensorListHandle& scale_out) {
  require(!some(act_in) && !some(act_scale) && !some(act_offset) && !some(act_out) && !some(scale_out),
          "activationInput, activationQuantScale, activationQuantOffset, activationFeatureOut and "
          "dynQuantScaleOut must be "
          "null");
}
LIMITS(aclnnGroupedMatmulV4, TL, x, TL, weight, TL, bias, TL, scale, TL, offset, TL, aq_scale, TL, aq_offset,
       TL, token_scale, T, list, TL, act_in, TL, act_scale, TL, act_offset, int64_t, split, int64_t, type,
       int64_t, list_type, int64_t, activation, OL, out, OL, act_out, OL, scale_out) {
  unsupported(act_in, act_scale, act_offset, act_out, scale_out);
  grouped({x, weight, bias, scale, offset, aq_scale, aq_offset, token_scale, list, split, type, list_type,
           activation, out});
}
