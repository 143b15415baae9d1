// Products of many rows of bf16, for quantized_linear_cpu_isa.cpp, where the CPU multiplies pairs of bf16.
//
// kMatrixTiles tiles of weight are dequantized to pairs of bf16, [pair of columns][tile][output][2], then
// multiplied by all rows of x, kMatrixRows at a time: a vector of weight serves as many rows, a pair of x as many tiles,
// and the accumulators fill the registers. x is [chunk of kMatrixRows rows][pair of columns][row][2], with zeros where it ends.
#pragma once

#include "common/vec.h"
#include "quantized_linear/quantized_linear.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr int kPairBytes = 4;
constexpr int kMatrixLine = static_cast<int>(kMatrixTiles) * kVecBytes;  // of weight: a pair of columns

void pack_matrix(const void* x, int64_t rows, int64_t k, int64_t pairs, void* packed) {
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(packed);
  if (rows < kMatrixRows || k < 2 * pairs)
    memset(to, 0, static_cast<size_t>(pairs * kMatrixRows * kPairBytes));
  const int64_t row_bytes = k * 2, whole = k / 2;
  if (rows == kMatrixRows) {
    for (int64_t p = 0; p < whole; ++p) {
      for (int r = 0; r < kMatrixRows; ++r)
        memcpy(to + (p * kMatrixRows + r) * kPairBytes, from + r * row_bytes + p * kPairBytes, kPairBytes);
    }
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t p = 0; p < whole; ++p)
        memcpy(to + (p * kMatrixRows + r) * kPairBytes, from + r * row_bytes + p * kPairBytes, kPairBytes);
    }
  }
  if (k % 2 != 0) {
    for (int64_t r = 0; r < rows; ++r)
      memcpy(to + (whole * kMatrixRows + r) * kPairBytes, from + r * row_bytes + whole * kPairBytes, 2);
  }
}

// Pairs of one step: of W8 parts 2 * i and 2 * i + 1, of W4 i and i + 4 (see first_column).
template <typename S, int i>
LB_INLINE void store_pairs(typename S::Loaded w, VF offset, VF factor, int64_t step, char* to) {
  constexpr bool in_order = S::first_column(0, 1, 1) == 1;
  constexpr int first = in_order ? 2 * i : i, second = in_order ? first + 1 : first + 4;
  const VF low = (S::template part<first>(w) + offset) * factor;
  const VF high = (S::template part<second>(w) + offset) * factor;
  typedef uint16_t VWords __attribute__((vector_size(kVecBytes)));
  const VWords order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = _mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  memcpy(to + S::first_column(step, first, 1) / 2 * kMatrixLine, &both, sizeof(both));
  if constexpr (i + 1 < S::kParts / 2) store_pairs<S, i + 1>(w, offset, factor, step, to);
}

// Steps [begin, end) of a tile, which is a whole number of packs, as pairs of bf16, a line apart. With one group the
// integers stay what they are, and `scales` are for the end; with several, weights are rounded, and `scales` are 1.
template <typename S, typename T>
void unpack_pairs(const QuantizedTiles& weight, int64_t tile, int64_t begin, int64_t end, void* pairs,
                  float* scales) {
  const int64_t steps = steps_of(weight.k), steps_in_group = steps / weight.groups;
  const char* data = static_cast<const char*>(weight.data) + (tile * steps + begin) * S::kBytes;
  const T* all_scales = static_cast<const T*>(weight.scales) + tile * weight.groups * kTile;
  const bool is_rounded = weight.groups > 1;
  store(scales, is_rounded ? splat(1.0f) : load(all_scales));
  int64_t group = -1;
  VF factor = splat(1.0f), offset{};
  for (int64_t step = begin; step < end; ++step, data += S::kBytes) {
    if (step / steps_in_group != group) {
      group = step / steps_in_group;
      if (is_rounded) factor = load(all_scales + group * kTile);
      if (weight.zero_points) {
        offset = splat(8.0f) - from_uint8(weight.zero_points + (tile * weight.groups + group) * kTile);
      }
    }
    store_pairs<S, 0>(S::read(data, 0), offset, factor, step - begin, static_cast<char*>(pairs));
  }
}

void unpack_pairs_any(const QuantizedTiles& weight, int64_t tile, int64_t begin, int64_t end, void* pairs,
                      float* scales) {
  LB_DISPATCH_DTYPE(weight.scale_dtype, T, {
    weight.bits == 8 ? unpack_pairs<W8, T>(weight, tile, begin, end, pairs, scales)
                     : unpack_pairs<W4, T>(weight, tile, begin, end, pairs, scales);
  });
}

// One chunk of x; writes `rows` rows.
void matrix_chunk(const MatrixArgs& args, const char* x, float* sums, int64_t rows, bf16* out) {
  constexpr int R = static_cast<int>(kMatrixRows), N = static_cast<int>(kMatrixTiles);
  VF d[R][N];
  if (args.is_first) {
    LB_UNROLL for (int r = 0; r < R; ++r) { LB_UNROLL for (int t = 0; t < N; ++t) d[r][t] = VF{}; }
  } else {
    LB_UNROLL for (int r = 0; r < R; ++r) {
      LB_UNROLL for (int t = 0; t < N; ++t) d[r][t] = load(sums + (r * N + t) * kLanes);
    }
  }
  const char* weight = static_cast<const char*>(args.weight);
  for (int64_t p = 0; p < args.pairs; ++p, weight += kMatrixLine, x += R * kPairBytes) {
    __m512bh w[N];
    LB_UNROLL for (int t = 0; t < N; ++t) w[t] = (__m512bh)_mm512_loadu_si512(weight + t * kVecBytes);
    LB_UNROLL for (int r = 0; r < R; ++r) {
      int32_t pair;
      memcpy(&pair, x + r * kPairBytes, sizeof(pair));
      const __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
      LB_UNROLL for (int t = 0; t < N; ++t) d[r][t] = _mm512_dpbf16_ps(d[r][t], w[t], xs);
    }
  }
  if (!args.is_last) {
    LB_UNROLL for (int r = 0; r < R; ++r) {
      LB_UNROLL for (int t = 0; t < N; ++t) store(sums + (r * N + t) * kLanes, d[r][t]);
    }
    return;
  }
  const bf16* bias = static_cast<const bf16*>(args.bias);
  VF spoiled[1]{};
  LB_UNROLL for (int t = 0; t < N; ++t) {
    const int64_t first = t * kTile, left = args.outputs - first;
    const auto write = [&](auto lanes) {
      const VF scale = load(args.scales + first);
      LB_UNROLL for (int r = 0; r < R; ++r) {
        if (r >= rows) continue;
        const VF y = d[r][t] * scale;
        spoiled[0] = fma(y, VF{}, spoiled[0]);
        store(out + r * args.out_stride + first, bias ? y + load(bias + first, lanes) : y, lanes);
      }
    };
    if (left >= kLanes) {
      write(Full{});
    } else if (left > 0) {
      write(static_cast<int>(left));
    }
  }
  note_not_finite(spoiled, args.not_finite);
}

void run_matrix(const MatrixArgs& args) {
  const char* x = static_cast<const char*>(args.packed_x);
  float* sums = args.sums;
  bf16* out = static_cast<bf16*>(args.out);
  for (int64_t row = 0; row < args.rows; row += kMatrixRows) {
    const int64_t left = args.rows - row;
    matrix_chunk(args, x, sums, left < kMatrixRows ? left : kMatrixRows, out);
    x += args.chunk_bytes;
    sums += kMatrixRows * kMatrixTiles * kTile;
    out += kMatrixRows * args.out_stride;
  }
}
constexpr MatrixKernels kMatrixKernels = {pack_matrix, unpack_pairs_any, run_matrix};
#else
constexpr MatrixKernels kMatrixKernels = {nullptr, nullptr, nullptr};
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
