// Attention of a few rows over keys and values read where they lie, for decoding: nothing is packed, because
// each key serves too few rows to pay for that. Part of attention_cpu_isa.cpp; compiled once an instruction
// set.
#pragma once

#include "attention/attention_pack.h"
#include "common/vec.h"
#include "common/vec_bf16.h"
#include "common/vec_sums.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// dots[row][j] for `rows` query rows and the first n keys. Written up to the next multiple of kLanes keys.
template <typename Words, int rows, typename T>
void dot_rows(const float* queries, int64_t query_stride, const T* keys, int64_t key_stride, int64_t n,
              int64_t dim, float* dots, int64_t dots_stride, const Ahead<T>& ahead) {
  constexpr int kKeys = kLanes / rows;
  constexpr int kStep = kLanes * Words::kPerWord;
  const int64_t whole = dim / kStep * kStep;
  for (int64_t j = 0; j < n; j += kKeys) {
    const T* key[kKeys];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) key[i] = keys + (j + i < n ? j + i : n - 1) * key_stride;
    for (int64_t i = j; i < j + kKeys; ++i) ahead.ask(i, dim * static_cast<int64_t>(sizeof(T)));
    VF sums[kLanes] = {};
    for (int64_t c = 0; c < whole; c += kStep) {
      VF query[rows];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) query[r] = load(queries + r * query_stride + c / Words::kPerWord);
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const VF words = RowWords<Words>::load(key[i] + c, 0, kStep);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          sums[r * kKeys + i] = Words::multiply_add(query[r], words, sums[r * kKeys + i]);
        }
      }
    }
    if (whole < dim) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const VF words = RowWords<Words>::load(key[i], whole, dim);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          const VF query = load(queries + r * query_stride + whole / Words::kPerWord);
          sums[r * kKeys + i] = Words::multiply_add(query, words, sums[r * kKeys + i]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = Words::number(sums[i]);
    float found[kLanes];
    store(found, sum_each(sums));
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
      memcpy(dots + r * dots_stride + j, found + r * kKeys, kKeys * sizeof(float));
  }
}

template <typename Words, typename T>
void dot_keys(const float* queries, int64_t query_stride, int64_t rows, const T* keys, int64_t key_stride,
              int64_t n, int64_t dim, float* dots, int64_t dots_stride, Ahead<T> ahead) {
  for (int64_t r = 0; r < rows; ahead.count = 0) {
    const float* query = queries + r * query_stride;
    float* out = dots + r * dots_stride;
    if (rows - r >= 4) {
      dot_rows<Words, 4>(query, query_stride, keys, key_stride, n, dim, out, dots_stride, ahead);
      r += 4;
    } else if (rows - r >= 2) {
      dot_rows<Words, 2>(query, query_stride, keys, key_stride, n, dim, out, dots_stride, ahead);
      r += 2;
    } else {
      dot_rows<Words, 1>(query, query_stride, keys, key_stride, n, dim, out, dots_stride, ahead);
      r += 1;
    }
  }
}

// output[row][c] = decay[row] * output + sum_j p[row][j] * values[j][c] for `vectors` vectors of channels,
// the last of which reads only `last` values.
template <int rows, int vectors, bool whole, typename T>
void weigh_tile(const float* p, int64_t p_stride, const T* values, int64_t value_stride, int64_t n, int last,
                float* output, int64_t output_stride, const float* decay, const Ahead<T>& ahead,
                int64_t ahead_bytes) {
  VF sums[rows][vectors] = {};
  for (int64_t j = 0; j < n; ++j) {
    ahead.ask(j, ahead_bytes);
    VF value[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const T* at = values + j * value_stride + v * kLanes;
      value[v] = whole || v + 1 < vectors ? load(at) : load(at, last);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const VF weight = splat(p[r * p_stride + j]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      float* out = output + r * output_stride + v * kLanes;
      store(out, fma(load(out), splat(decay[r]), sums[r][v]));
    }
  }
}

template <int rows, typename T>
void weigh_rows(const float* p, int64_t p_stride, const T* values, int64_t value_stride, int64_t n,
                int64_t dim, float* output, int64_t output_stride, const float* decay,
                const Ahead<T>& ahead) {
  // The first tile asks for whole rows; what the others read is then there.
  int64_t ahead_bytes = dim * static_cast<int64_t>(sizeof(T));
  constexpr int kWide = kTileVectors;
  int64_t c = 0;
  for (; c + kWide * kLanes <= dim; c += kWide * kLanes) {
    weigh_tile<rows, kWide, true>(p, p_stride, values + c, value_stride, n, 0, output + c, output_stride,
                                  decay, ahead, ahead_bytes);
    ahead_bytes = 0;
  }
  for (; c + kLanes <= dim; c += kLanes) {
    weigh_tile<rows, 1, true>(p, p_stride, values + c, value_stride, n, 0, output + c, output_stride, decay,
                              ahead, ahead_bytes);
    ahead_bytes = 0;
  }
  if (c < dim) {
    weigh_tile<rows, 1, false>(p, p_stride, values + c, value_stride, n, static_cast<int>(dim - c),
                               output + c, output_stride, decay, ahead, ahead_bytes);
    ahead_bytes = 0;
  }
}

#if defined(LB_BF16_PAIRS)
// The same for probabilities that are bf16 pairs along the keys, with the pairs that the values of two rows
// make together: half the instructions. `vectors` are of 32 channels; without `whole` there is one of `last`.
template <int rows, int vectors, bool whole, typename T>
void weigh_pairs(const float* p, int64_t p_stride, const T* values, int64_t value_stride, int64_t n,
                 int64_t last, float* output, int64_t output_stride, const float* decay,
                 const Ahead<T>& ahead, int64_t ahead_bytes) {
  VF sums[rows][2 * vectors] = {};
  for (int64_t j = 0; j < n; j += 2) {
    const T* at = values + j * value_stride;
    ahead.ask(j, ahead_bytes);
    ahead.ask(j + 1, ahead_bytes);
    VF weights[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) weights[r] = splat_word(p + r * p_stride + j / 2);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const int64_t channels = whole ? 2 * kLanes : last;
      const VF first = RowWords<WordsBf16>::load(at + v * 2 * kLanes, 0, channels);
      const VF second =
          j + 1 < n ? RowWords<WordsBf16>::load(at + value_stride + v * 2 * kLanes, 0, channels) : VF{};
      const VF even = zip_pairs_low(first, second);
      const VF odd = zip_pairs_high(first, second);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        sums[r][2 * v] = WordsBf16::multiply_add(weights[r], even, sums[r][2 * v]);
        sums[r][2 * v + 1] = WordsBf16::multiply_add(weights[r], odd, sums[r][2 * v + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * vectors; ++v) {
      if (!whole && v * kLanes >= last) continue;
      float* out = output + r * output_stride + v * kLanes;
      store(out, fma(load(out), splat(decay[r]), sums[r][v]));
    }
  }
}

template <int rows, typename T>
void weigh_rows_pairs(const float* p, int64_t p_stride, const T* values, int64_t value_stride, int64_t n,
                      int64_t dim, float* output, int64_t output_stride, const float* decay,
                      const Ahead<T>& ahead) {
  int64_t ahead_bytes = dim * static_cast<int64_t>(sizeof(T));
  constexpr int kWide = rows <= 2 ? 4 : 2;
  constexpr int kStep = 2 * kLanes;
  int64_t c = 0;
  for (; c + kWide * kStep <= dim; c += kWide * kStep) {
    weigh_pairs<rows, kWide, true>(p, p_stride, values + c, value_stride, n, 0, output + c, output_stride,
                                   decay, ahead, ahead_bytes);
    ahead_bytes = 0;
  }
  for (; c + kStep <= dim; c += kStep) {
    weigh_pairs<rows, 1, true>(p, p_stride, values + c, value_stride, n, 0, output + c, output_stride, decay,
                               ahead, ahead_bytes);
    ahead_bytes = 0;
  }
  if (c < dim) {
    weigh_pairs<rows, 1, false>(p, p_stride, values + c, value_stride, n, dim - c, output + c, output_stride,
                                decay, ahead, ahead_bytes);
  }
}
#endif

template <typename Words>
struct Weigh {
  template <int rows, typename T>
  static LB_INLINE void run(const float* p, int64_t p_stride, const T* values, int64_t value_stride,
                            int64_t n, int64_t dim, float* output, int64_t output_stride, const float* decay,
                            const Ahead<T>& ahead) {
    weigh_rows<rows>(p, p_stride, values, value_stride, n, dim, output, output_stride, decay, ahead);
  }
};
#if defined(LB_BF16_PAIRS)
template <>
struct Weigh<WordsBf16> {
  template <int rows, typename T>
  static LB_INLINE void run(const float* p, int64_t p_stride, const T* values, int64_t value_stride,
                            int64_t n, int64_t dim, float* output, int64_t output_stride, const float* decay,
                            const Ahead<T>& ahead) {
    weigh_rows_pairs<rows>(p, p_stride, values, value_stride, n, dim, output, output_stride, decay, ahead);
  }
};
#endif

template <typename Words, typename T>
void weigh_values(const float* p, int64_t p_stride, int64_t rows, const T* values, int64_t value_stride,
                  int64_t n, int64_t dim, float* output, int64_t output_stride, const float* decay,
                  Ahead<T> ahead) {
  for (int64_t r = 0; r < rows; ahead.count = 0) {
    const float* weights = p + r * p_stride;
    float* out = output + r * output_stride;
    if (rows - r >= 4) {
      Weigh<Words>::template run<4>(weights, p_stride, values, value_stride, n, dim, out, output_stride,
                                    decay + r, ahead);
      r += 4;
    } else if (rows - r >= 2) {
      Weigh<Words>::template run<2>(weights, p_stride, values, value_stride, n, dim, out, output_stride,
                                    decay + r, ahead);
      r += 2;
    } else {
      Weigh<Words>::template run<1>(weights, p_stride, values, value_stride, n, dim, out, output_stride,
                                    decay + r, ahead);
      r += 1;
    }
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
