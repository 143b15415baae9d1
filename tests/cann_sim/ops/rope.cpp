// Rotary position embedding. Rounding follows the kernels of ops-transformer (posembedding/*/op_kernel, read at
// c29bc10): float32 inside and one rounding, except ApplyRotaryPosEmb in float16.
#include "rope.h"

using namespace sim;

using at::Tensor;

OP(aclnnRotaryPositionEmbedding, T, x, T, cos, T, sin, int64_t, mode, O, out) {
  put(out, rotated(*x, *cos, *sin, mode));
}

/// With `rotation`, a matrix [D, D] takes the place of the mode: x * cos + (x @ rotation) * sin.
OP(aclnnRotaryPositionEmbeddingV2, T, x, T, cos, T, sin, int64_t, mode, T, rotation, O, out) {
  if (!rotation) return put(out, rotated(*x, *cos, *sin, mode));
  auto x32 = fp32(*x);
  put(out, x32 * fp32(*cos) + at::matmul(x32, fp32(*rotation)) * fp32(*sin));
}

namespace {

/// In place. float16 is computed in float16 ("cast = 0" in the document's memory formula), so three roundings;
/// bfloat16 in float32 ("cast = 1"), one.
void apply(R x, T cos, T sin) {
  if (x->scalar_type() == at::kHalf) return put(x, *x * *cos + rotate(*x, rotary_half) * *sin);
  put(x, rotated(*x, *cos, *sin, rotary_half));
}

}  // namespace

OP(aclnnApplyRotaryPosEmb, R, query, R, key, T, cos, T, sin, int64_t, layout) {
  apply(query, cos, sin);
  apply(key, cos, sin);
}
OP(aclnnApplyRotaryPosEmbV2, R, query, R, key, T, cos, T, sin, int64_t, layout, CP, mode) {
  apply(query, cos, sin);
  apply(key, cos, sin);
}

/// Takes pairs, gives halves.
OP(aclnnInterleaveRope, T, x, T, cos, T, sin, O, out) {
  put(out, rotated(halves_of_pairs(fp32(*x)), *cos, *sin, rotary_half));
}

namespace {

/// Row `position` of the table for each token; with sections (mrope) each part of a row comes from its own positions.
Tensor rows_of(const Tensor& table, const Tensor& positions, IA sections, int64_t cache_mode) {
  auto tokens = positions.size(-1), width = table.size(-1) / 2;
  TORCH_CHECK(!positions.numel() || positions.max().item<int64_t>() < table.size(0),
              "a position is not in the cosine and sine table of ", table.size(0), " rows");
  auto all = table.index_select(0, positions.flatten());
  if (!sections || (*sections).empty()) return all;
  all = all.view({positions.size(0), tokens, 2, width});  // [section, token, cos or sin, angle]
  auto counts = *sections;
  if (cache_mode == 0) {
    std::vector<Tensor> parts;
    int64_t begin = 0;
    for (size_t k = 0; k < counts.size(); begin += counts[k], k++) {
      parts.push_back(all[static_cast<int64_t>(k)].narrow(-1, begin, counts[k]));
    }
    return at::cat(parts, -1).reshape({tokens, 2 * width});
  }
  // Interleaved: angles 1, 4, 7, ... from the second row, 2, 5, 8, ... from the third, both up to 3 * sections[1].
  auto mixed = all[0].clone();
  for (int64_t k = 1; k < 3; k++) {
    auto end = std::min(counts[1] * 3, width);
    mixed.slice(-1, k, end, 3).copy_(all[k].slice(-1, k, end, 3));
  }
  return mixed.reshape({tokens, 2 * width});
}

void rope_with_cache(T positions, T query, T key, T table, IA sections, int64_t head, bool neox,
                     int64_t cache_mode, O query_out, O key_out) {
  auto rows = rows_of(fp32(*table), *positions, sections, cache_mode).unsqueeze(1).chunk(2, -1);
  auto turn = [&](T x, O out) {
    auto heads = fp32(*x).reshape({x->size(0), -1, head});
    auto width = table->size(-1);
    auto part = heads.narrow(-1, 0, width);
    Tensor cos, sin;
    if (neox) {
      cos = at::cat({rows[0], rows[0]}, -1);
      sin = at::cat({rows[1], rows[1]}, -1);
    } else {
      cos = rows[0].repeat_interleave(2, -1);
      sin = rows[1].repeat_interleave(2, -1);
    }
    auto turned = rotated(part, cos, sin, neox ? rotary_half : rotary_interleave);
    put(out, at::cat({turned, heads.narrow(-1, width, head - width)}, -1).flatten(1));
  };
  turn(query, query_out);
  turn(key, key_out);
}

}  // namespace

OP(aclnnRopeWithSinCosCache, T, positions, T, query, T, key, T, table, IA, sections, int64_t, head, bool,
   neox, O, query_out, O, key_out) {
  rope_with_cache(positions, query, key, table, sections, head, neox, 0, query_out, key_out);
}
OP(aclnnRopeWithSinCosCacheV2, T, positions, T, query, T, key, T, table, IA, sections, int64_t, head, bool,
   neox, int64_t, cache_mode, O, query_out, O, key_out) {
  rope_with_cache(positions, query, key, table, sections, head, neox, cache_mode, query_out, key_out);
}
