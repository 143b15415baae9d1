// What hardware rejects of rotary embeddings: documents of ops-transformer, posembedding/<name>/docs, and the choice of
// a layout in rope_rotate_half_tiling.cpp.
#include "checks.h"

using namespace sim;

namespace {

bool is(const TensorHandle& x, at::IntArrayRef shape) { return x->sizes() == shape; }

/// x in BNSD with cos and sin that lack B or N. Of shapes that two layouts explain, any that is accepted counts.
void check_bnsd(T x, T cos) {
  auto b = x->size(0), n = x->size(1), s = x->size(2), half = x->size(3) / 2;
  if (is(cos, x->sizes())) return;  // nothing to repeat, in any layout
  bool aligned = half % (32 / static_cast<int64_t>(x->element_size())) == 0;
  if (aligned) {
    require(b * n <= 8 * s, "x in BNSD needs B * N <= 8 * S, B is ", b, ", N ", n, ", S ", s);
  } else {
    // The document has "B * N * 2 = 80"; the tiling refuses more than the rows of one of 48 cores while D < 80.
    require(half * 2 >= 80 || 2 * b * n <= (s + 47) / 48, "x in BNSD with half a head of ", half,
            " (no multiple of 32 bytes) is refused for B ", b, ", N ", n, ", S ", s);
  }
}

void check_rotary(T x, T cos, T sin, int64_t mode, O out) {
  require_all_given({{x, "x"}, {cos, "cos"}, {sin, "sin"}, {out, "out"}});
  require_float(x, "x");
  require_same_dtype(cos, "cos", x, "x");
  require_same_dtype(sin, "sin", x, "x");
  require_same_dtype(out, "out", x, "x");
  require_shape(out, "out", x->sizes());
  require_shape(sin, "sin", cos->sizes());
  require_contiguous(out, "out");
  // 2 and 3 are documented for Ascend 950 alone. On others op_api looks at no mode, and IsCapable in
  // ops-transformer, posembedding/rotary_position_embedding/op_host/rope_rotate_half_tiling.h (8.5.0 to 9.1.0) takes
  // all but 1: they are computed as halves.
  require(mode >= 0 && mode <= 3, "mode is ", mode, ": 0 to 3");
  require(mode == 0 || !is_310p(), "mode is ", mode, ": 310P has 0 (half) only");
  require_axes(x, "x", release_is("8.5.0") ? 3 : 4, 4);
  require(cos->dim() == x->dim(), "cos has ", cos->dim(), " axes, x has ", x->dim());
  auto d = x->size(-1);
  require(cos->size(-1) == d, "the last axis of cos is ", cos->size(-1), ", of x ", d);
  if (is_310p()) {
    require(d <= 128 && d % 32 == 0, "D is ", d, "; 310P takes 32, 64, 96 and 128");
  } else {
    require(d < 896 && d % 2 == 0, "D is ", d, ", it must be even and less than 896");
  }
  auto a = x->size(0), b = x->size(1);
  if (x->dim() == 3) {  // TND
    require(is(cos, {a, 1, d}) || (mode != 1 && is(cos, x->sizes())), "x in TND of shape ", x->sizes(),
            " does not go with cos of shape ", cos->sizes());
    require(b < 1000, "N is ", b, ", it must be less than 1000");
    return;
  }
  auto c = x->size(2);
  bool half = mode != 1;
  bool bsnd = is(cos, {1, b, 1, d}) || (half && is(cos, {a, b, 1, d}));
  bool sbnd = is(cos, {a, 1, 1, d}) || (half && is(cos, {a, b, 1, d}));
  bool bnsd = is(cos, {1, 1, c, d}) || (half && is(cos, {a, 1, c, d}));
  bool same = half && is(cos, x->sizes());
  require(bsnd || sbnd || bnsd || same, "cos of shape ", cos->sizes(), " goes with no layout of x of shape ",
          x->sizes(),
          half ? ": BNSD with 11SD, B1SD; BSND with 1S1D, BS1D; SBND with S11D, SB1D; or the same shape"
               : ": interleave takes 11SD, 1S1D and S11D");
  if (half) {
    require(bsnd || sbnd ? c < 1000 : b < 1000, "N must be less than 1000, x has shape ", x->sizes());
    require(a < 1000 || sbnd, "B must be less than 1000, x has shape ", x->sizes());
    if (!bsnd && !sbnd && !same) check_bnsd(x, cos);
  } else {
    auto rows = bsnd ? a * c : sbnd ? b * c : a * b;
    require(rows < 1000, "interleave needs B * N < 1000, x has shape ", x->sizes());
  }
}

}  // namespace

LIMITS(aclnnRotaryPositionEmbedding, T, x, T, cos, T, sin, int64_t, mode, O, out) {
  check_rotary(x, cos, sin, mode, out);
}
namespace {

/// The memory of a vector core: 192 KiB, 256 KiB on 310P.
int64_t vector_memory() { return (is_310p() ? 256 : 192) * 1024; }

void check_apply(R query, R key, T cos, T sin, int64_t layout) {
  require_all_given({{query, "queryRef"}, {key, "keyRef"}, {cos, "cos"}, {sin, "sin"}});
  require_float(query, "queryRef");
  require(layout == 1 || layout == 4, "layout is ", layout, ": 1 (BSND) or 4 (TND) here");
  int64_t axes = layout == 1 ? 4 : 3;
  for (auto& [tensor, name] : Tensors{{query, "queryRef"}, {key, "keyRef"}, {cos, "cos"}, {sin, "sin"}}) {
    require_axes(tensor, name, axes, axes);
    require_not_empty(tensor, name);
    require_same_dtype(tensor, name, query, "queryRef");
    // Newer documents let cos and sin differ from query and key in the last axis without saying what that means.
    require(tensor->sizes().slice(0, static_cast<size_t>(axes - 2)) ==
                    query->sizes().slice(0, static_cast<size_t>(axes - 2)) &&
                tensor->size(-1) == query->size(-1),
            name, " of shape ", tensor->sizes(), " differs from queryRef of shape ", query->sizes(),
            " in more than the number of heads");
  }
  require(cos->size(-2) == 1 && sin->size(-2) == 1, "cos and sin must have one head, they have shape ",
          cos->sizes());
  auto d = query->size(-1);
  require(d == 64 || d == 128, "D is ", d, ", it must be 64 or 128");
  bool cast = query->scalar_type() == at::kBFloat16;
  auto size = static_cast<int64_t>(query->element_size()), wide = cast ? 4 : size;
  auto heads = query->size(-2) + key->size(-2);
  auto needed =
      heads * d * wide * 2 + d * size * 4 + heads * d * wide + heads * d * wide * 2 + (cast ? d * 4 * 2 : 0);
  require(needed <= vector_memory(), heads, " heads of ", d, " need ", needed, " bytes of the vector core's ",
          vector_memory());
}

}  // namespace

LIMITS(aclnnApplyRotaryPosEmb, R, query, R, key, T, cos, T, sin, int64_t, layout) {
  check_apply(query, key, cos, sin, layout);
}
LIMITS(aclnnApplyRotaryPosEmbV2, R, query, R, key, T, cos, T, sin, int64_t, layout, CP, mode) {
  check_apply(query, key, cos, sin, layout);
  if (!mode) throw NullError("rotaryMode is null");
  require(std::string(mode) == "half", "rotaryMode is \"", mode, "\", only \"half\" is supported here");
}
