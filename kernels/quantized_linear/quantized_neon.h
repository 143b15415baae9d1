// The loops of quantized_linear_cpu_isa.cpp on aarch64, where a tile of 16 outputs is four registers.
//
// All of a tile is multiplied in one pass, so that its data is one stream, by one, two or four rows of x at a time: as
// many as leave registers for the accumulators. x is multiplied as an element of a register, which costs no instruction.
//
//   limbs   of bf16 and f16, where the CPU sums products of four bytes: a line of a tile is four such operands as it lies
//   floats  of fp32, and of all on the baseline: a table lookup lifts a byte to the top of its lane, from where the
//           conversion takes it as a fixed-point number, sign and all
#pragma once

#if defined(__aarch64__)
#include "common/prefetch.h"
#include "common/vec.h"
#include "quantized_linear/quantized_limbs.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Vectors of a tile.
constexpr int kTileVectors = static_cast<int>(kTile) / kLanes;
// Bytes of a tile that are asked for ahead into the second cache; the processor finds the stream for the first.
constexpr int64_t kStreamAhead = 16384;

template <int64_t bytes>
LB_INLINE void fetch_stream(const char* data) {
  LB_UNROLL for (int64_t line = 0; line < bytes; line += 64) fetch_ahead(data + kStreamAhead + line);
}

// What a pass reads: a tile, and rows of x, `x_rows` of which lie side by side.
struct NeonTile {
  const char* data;
  const void* scales;          // [groups, kTile]
  const uint8_t* zero_points;  // [groups, kTile] or null
  const void* x;               // from the first row of the pass on
  const float* x_sums;
  int64_t x_rows, groups, steps;  // steps of a group
};

template <int rows>
LB_INLINE void store_sums(const VF (&sums)[kTileVectors][rows], float* out) {
  LB_UNROLL for (int r = 0; r < rows; ++r) {
    LB_UNROLL for (int v = 0; v < kTileVectors; ++v) store(out + r * kTile + v * kLanes, sums[v][r]);
  }
}

// sums += (8 - zero point) * scale * the sum of the group's columns of x.
template <int rows>
LB_INLINE void add_zero_points(const NeonTile& t, int64_t group, const VF (&scale)[kTileVectors],
                               VF (&sums)[kTileVectors][rows]) {
  LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
    const VF offset = (splat(8.0f) - from_uint8(t.zero_points + group * kTile + v * kLanes)) * scale[v];
    LB_UNROLL for (int r = 0; r < rows; ++r) sums[v][r] =
        fma(offset, splat(t.x_sums[group * t.x_rows + r]), sums[v][r]);
  }
}

// ---- limbs ----

#if defined(LB_LIMBS)
// Packs that are summed before they are multiplied by the scale of their group.
constexpr int64_t kSummedPacks = 4;

LB_INLINE int8x16_t read_line(const char* data) { return vld1q_s8(reinterpret_cast<const int8_t*>(data)); }

// f<word>(vector, weights) for each word of a pack and each vector of the tile.
template <int word = 0, typename F>
LB_INLINE void each_word(W8Limbs s, const char* data, const F& f) {
  LB_UNROLL for (int v = 0; v < kTileVectors; ++v)
      f.template operator()<word>(v, read_line(data + word * kTileLine + v * kVecBytes));
  if constexpr (word < 7) each_word<word + 1>(s, data, f);
}
template <int step = 0, typename F>
LB_INLINE void each_word(W4Limbs s, const char* data, const F& f) {
  LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
    const uint8x16_t both = vreinterpretq_u8_s8(read_line(data + step * kTileLine + v * kVecBytes));
    f.template operator()<step>(v, vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))));
    f.template operator()<step + 4>(v, vreinterpretq_s8_u8(vshrq_n_u8(both, 4)));
  }
  if constexpr (step < 3) each_word<step + 1>(s, data, f);
}

// The limbs of one kind of a pack, as elements.
struct LimbVectors {
  int8x16_t words[2];
  explicit LB_INLINE LimbVectors(const int32_t (&limbs)[8])
      : words{vld1q_s8(reinterpret_cast<const int8_t*>(limbs)),
              vld1q_s8(reinterpret_cast<const int8_t*>(limbs + 4))} {}
  template <int word>
  LB_INLINE VI add_products(VI sum, int8x16_t weights) const {
    return (VI)vdotq_laneq_s32((int32x4_t)sum, weights, words[word / 4], word % 4);
  }
};

// d += the lowest limbs of a row times its weights.
template <typename S>
LB_INLINE void add_low(const char* data, const PackLimbs& x, float unit, VF (&d)[kTileVectors]) {
  // As if it were elsewhere: the compiler would keep all weights of the pack on the stack, for what is rarely needed.
  __asm__("" : "+r"(data));
  const LimbVectors low(x.low);
  VI sums[kTileVectors];
  LB_UNROLL for (int v = 0; v < kTileVectors; ++v) sums[v] = splat_i(x.low_start);
  each_word(S{}, data, [&]<int word>(int v, int8x16_t weights) __attribute__((always_inline)) {
    sums[v] = low.template add_products<word>(sums[v], weights);
  });
  LB_UNROLL for (int v = 0; v < kTileVectors; ++v) d[v] =
      fma(__builtin_convertvector(sums[v], VF), splat(unit * (1.0f / 256)), d[v]);
}

// d += a pack of `rows` rows times its weights.
template <typename S, int rows>
LB_INLINE void add_pack(const char* data, const PackLimbs* x, VF (&d)[rows][kTileVectors]) {
  VI high[rows][kTileVectors], middle[rows][kTileVectors];
  LB_UNROLL for (int r = 0; r < rows; ++r) {
    LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
      high[r][v] = VI{};
      middle[r][v] = S::kOffset != 0 ? splat_i(x[r].start) : VI{};
    }
  }
  if constexpr (rows == 1) {
    const LimbVectors upper(x->high), lower(x->middle);
    each_word(S{}, data, [&]<int word>(int v, int8x16_t weights) __attribute__((always_inline)) {
      high[0][v] = upper.template add_products<word>(high[0][v], weights);
      middle[0][v] = lower.template add_products<word>(middle[0][v], weights);
    });
  } else {
    const LimbVectors upper[2] = {LimbVectors(x[0].high), LimbVectors(x[1].high)};
    const LimbVectors lower[2] = {LimbVectors(x[0].middle), LimbVectors(x[1].middle)};
    each_word(S{}, data, [&]<int word>(int v, int8x16_t weights) __attribute__((always_inline)) {
      LB_UNROLL for (int r = 0; r < 2; ++r) {
        high[r][v] = upper[r].template add_products<word>(high[r][v], weights);
        middle[r][v] = lower[r].template add_products<word>(middle[r][v], weights);
      }
    });
  }
  LB_UNROLL for (int r = 0; r < rows; ++r) {
    LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
      const VF sum = __builtin_convertvector((high[r][v] << 8) + middle[r][v], VF);
      d[r][v] = fma(sum, splat(x[r].unit), d[r][v]);
    }
    if (x[r].has_low) add_low<S>(data, x[r], x[r].unit, d[r]);
  }
}

// out[r * kTile + i]: output i of a tile for row r.
template <typename S, typename T, int rows>
__attribute__((noinline)) void limb_pass(const NeonTile& t, float* out) {
  const auto* x = static_cast<const PackLimbs*>(t.x);
  const T* scales = static_cast<const T*>(t.scales);
  const char* data = t.data;
  VF sums[kTileVectors][rows] = {};
  const int64_t packs = t.steps / (kPack / kStep);  // of a group
  for (int64_t group = 0; group < t.groups; ++group, scales += kTile) {
    VF scale[kTileVectors];
    LB_UNROLL for (int v = 0; v < kTileVectors; ++v) scale[v] = load(scales + v * kLanes);
    if (t.zero_points) add_zero_points(t, group, scale, sums);
    for (int64_t begin = 0; begin < packs; begin += kSummedPacks) {
      const int64_t end = packs - begin < kSummedPacks ? packs : begin + kSummedPacks;
      VF d[rows][kTileVectors] = {};
      for (int64_t pack = begin; pack < end; ++pack, data += S::kPackBytes, x += t.x_rows) {
        fetch_stream<S::kPackBytes>(data);
        add_pack<S, rows>(data, x, d);
      }
      LB_UNROLL for (int r = 0; r < rows; ++r) {
        LB_UNROLL for (int v = 0; v < kTileVectors; ++v) sums[v][r] = fma(d[r][v], scale[v], sums[v][r]);
      }
    }
  }
  store_sums(sums, out);
}
#endif

// ---- floats ----

// Byte `byte` of each lane, in its highest place above zeros.
template <int byte>
LB_INLINE VI lifted(int8x16_t bytes) {
  constexpr uint8_t b = byte, z = 0xff;  // beyond the table: zero
  const uint8x16_t index = {z, z, z, b, z, z, z, b + 4, z, z, z, b + 8, z, z, z, b + 12};
  return (VI)vqtbl1q_s8(bytes, index);
}

// The bytes of a vector of a step, and part j of them as floats.
struct W8Bytes {
  int8x16_t bytes[2];
  explicit LB_INLINE W8Bytes(const char* step)
      : bytes{vld1q_s8(reinterpret_cast<const int8_t*>(step)),
              vld1q_s8(reinterpret_cast<const int8_t*>(step + kTileLine))} {}
  template <int j>
  LB_INLINE VF part() const {
    return (VF)vcvtq_n_f32_s32((int32x4_t)lifted<j % 4>(bytes[j / 4]), 24);
  }
};
// Nibbles stand for themselves less 8, which is what their upper bit negated makes them with a sign.
struct W4Bytes {
  int8x16_t nibbles[2];  // in the upper half of each byte: the lower ones, the upper ones
  explicit LB_INLINE W4Bytes(const char* step) {
    const int8x16_t both =
        veorq_s8(vld1q_s8(reinterpret_cast<const int8_t*>(step)), vdupq_n_s8(static_cast<int8_t>(0x88)));
    nibbles[0] = vshlq_n_s8(both, 4);
    nibbles[1] = vandq_s8(both, vdupq_n_s8(static_cast<int8_t>(0xf0)));
  }
  template <int j>
  LB_INLINE VF part() const {
    return (VF)vcvtq_n_f32_s32((int32x4_t)lifted<j / 2>(nibbles[j % 2]), 28);
  }
};
template <typename S>
struct BytesOf {
  typedef W8Bytes Type;
};
template <>
struct BytesOf<W4> {
  typedef W4Bytes Type;
};

// The elements of one column of x: those of `rows` rows.
template <int rows>
LB_INLINE float32x4_t read_elements(const float* x) {
  if constexpr (rows == 4) return vld1q_f32(x);
  if constexpr (rows == 2) return vcombine_f32(vld1_f32(x), vdup_n_f32(0.0f));
  return float32x4_t{x[0], 0.0f, 0.0f, 0.0f};
}

template <int rows, int r = 0>
LB_INLINE void add_column(VF (&d)[rows], VF weights, float32x4_t x) {
  d[r] = (VF)vfmaq_laneq_f32((float32x4_t)d[r], (float32x4_t)weights, x, r);
  if constexpr (r + 1 < rows) add_column<rows, r + 1>(d, weights, x);
}

// One step; column j is added to the j % sets-th set of accumulators.
template <typename B, int rows, int sets, int j = 0>
LB_INLINE void add_step(VF (&d)[sets][kTileVectors][rows], const B (&bytes)[kTileVectors], const float* x,
                        int64_t x_rows) {
  const float32x4_t elements = read_elements<rows>(x + j * x_rows);
  LB_UNROLL for (int v = 0; v < kTileVectors; ++v)
      add_column<rows>(d[j % sets][v], bytes[v].template part<j>(), elements);
  if constexpr (j + 1 < static_cast<int>(kStep)) add_step<B, rows, sets, j + 1>(d, bytes, x, x_rows);
}

template <typename S, typename T, int rows>
__attribute__((noinline)) void float_pass(const NeonTile& t, float* out) {
  typedef typename BytesOf<S>::Type B;
  constexpr int sets = 4 / rows;  // 16 accumulators: as many as hide the latency of four units
  constexpr int64_t kSummedSteps = 16;
  const auto* x = static_cast<const float*>(t.x);
  const T* scales = static_cast<const T*>(t.scales);
  const char* data = t.data;
  VF sums[kTileVectors][rows] = {};
  for (int64_t group = 0; group < t.groups; ++group, scales += kTile) {
    VF scale[kTileVectors];
    LB_UNROLL for (int v = 0; v < kTileVectors; ++v) scale[v] = load(scales + v * kLanes);
    if (t.zero_points) add_zero_points(t, group, scale, sums);
    for (int64_t begin = 0; begin < t.steps; begin += kSummedSteps) {
      const int64_t end = t.steps - begin < kSummedSteps ? t.steps : begin + kSummedSteps;
      VF d[sets][kTileVectors][rows] = {};
      for (int64_t step = begin; step < end; ++step, data += S::kBytes, x += kStep * t.x_rows) {
        fetch_stream<S::kBytes>(data);
        const B bytes[kTileVectors] = {B(data), B(data + kVecBytes), B(data + 2 * kVecBytes),
                                       B(data + 3 * kVecBytes)};
        add_step<B, rows, sets>(d, bytes, x, t.x_rows);
      }
      LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
        LB_UNROLL for (int r = 0; r < rows; ++r) {
          LB_UNROLL for (int width = sets / 2; width > 0; width /= 2) {
            LB_UNROLL for (int c = 0; c < width; ++c) d[c][v][r] += d[c + width][v][r];
          }
          sums[v][r] = fma(d[0][v][r], scale[v], sums[v][r]);
        }
      }
    }
  }
  store_sums(sums, out);
}

// out[row * kTile + i]: output i of a tile for each of its rows of x.
template <typename S, typename T>
void neon_tile(NeonTile t, float* out) {
  typedef typename S::Element Element;
  const int64_t rows = t.x_rows;
  for (int64_t row = 0, width; row < rows; row += width, out += width * kTile) {
#if defined(LB_LIMBS)
    if constexpr (S::kIsLimbs) {
      width = rows - row >= 2 ? 2 : 1;
      width == 2 ? limb_pass<S, T, 2>(t, out) : limb_pass<S, T, 1>(t, out);
    } else
#endif
    {
      width = rows - row >= 4 ? 4 : rows - row >= 2 ? 2 : 1;
      width == 4   ? float_pass<S, T, 4>(t, out)
      : width == 2 ? float_pass<S, T, 2>(t, out)
                   : float_pass<S, T, 1>(t, out);
    }
    t.x = static_cast<const Element*>(t.x) + width;
    if (t.x_sums) t.x_sums += width;
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
#endif
