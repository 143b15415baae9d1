// Packs queries, keys and values into the words and panels that attention_tile.h multiplies. Part of
// attention_cpu_isa.cpp; compiled once an instruction set.
#pragma once

#include "attention/attention_tile.h"
#include "common/prefetch.h"
#include "common/vec.h"
#include "common/vec_bf16.h"
#include "common/vec_transpose.h"

namespace liteboost {
namespace LB_ISA {
namespace {

LB_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <typename T>
constexpr bool is_int8 = false;
template <>
constexpr bool is_int8<int8_t> = true;

// Words that hold n values along the summed dimension; of squares an even number.
template <typename Words>
LB_INLINE int64_t words_of(int64_t n) {
  if constexpr (kHasSquares && Words::kPerWord == 2) return round_up(n, 4) / 2;
  return (n + Words::kPerWord - 1) / Words::kPerWord;
}

template <typename T>
LB_INLINE VF load_some(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load(p, static_cast<int>(n));
}
template <typename T>
LB_INLINE void store_some(T* p, VF v, int64_t n) {
  if (n >= kLanes) {
    store(p, v);
  } else {
    store(p, v, static_cast<int>(n));
  }
}

// The kLanes words that begin at value c of a row of n values; zero beyond its end.
template <typename Words>
struct RowWords {
  template <typename T>
  static LB_INLINE VF load(const T* row, int64_t c, int64_t n) {
    return load_some(row + c, n - c);
  }
};
#if defined(LB_BF16_PAIRS)
template <>
struct RowWords<WordsBf16> {
  static LB_INLINE VF load(const bf16* row, int64_t c, int64_t n) {
#if defined(__AVX512BF16__)
    if (n - c >= 2 * kLanes) return (VF)_mm512_loadu_si512(row + c);
    watch(row + c, 2 * (n - c));
    return (VF)_mm512_maskz_loadu_epi16((1u << (n - c)) - 1u, row + c);
#else
    if (n - c >= 2 * kLanes) return (VF)vld1q_u8(reinterpret_cast<const uint8_t*>(row + c));
    return (VF)load_bytes(row + c, static_cast<int>(2 * (n - c)));
#endif
  }
  // Integers of 8 bits are exact in bf16.
  static LB_INLINE VF load(const int8_t* row, int64_t c, int64_t n) {
    const VF low = load_some(row + c, n - c);
    const VF high = n - c > kLanes ? load_some(row + c + kLanes, n - c - kLanes) : VF{};
    return exact_pairs(low, high);
  }
};
#endif

// Bytes of keys or values to ask for ahead of their use: enough to cover the latency of memory at its full
// speed. The CPU's own prefetching has to start anew at each change between keys and values and at page ends:
// on a Zen 5 core, decoding without this was a quarter slower. With 8 KB of the read bandwidth 0.87 is used, with 16 KB
// 0.83 (16,384 keys of 8 heads on huge pages, two threads).
constexpr int64_t kPrefetchBytes = 8192;

// How many rows of `dim` values that is, at least a few.
template <typename T>
LB_INLINE int64_t prefetch_rows(int64_t dim) {
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(T)) + 1;
  return kPrefetchBytes / bytes + 4;
}

LB_INLINE void prefetch(const void* p, int64_t bytes, int64_t distance = 64) {
  for (int64_t b = 0; b < bytes; b += 64, p = static_cast<const char*>(p) + distance) fetch_ahead(p);
}

// Rows to ask for while others are read: with row j of those, if there are so many, row j of these, whose lines are
// `line_distance` bytes from each other.
template <typename T>
struct Ahead {
  const T* rows;
  int64_t stride, count;
  int64_t line_distance = 64;

  LB_INLINE void ask(int64_t j, int64_t bytes) const {
    if (j < count) prefetch(rows + j * stride, bytes, line_distance);
  }
};

// What follows `count` rows that lie evenly. Only a hint: it may lie beyond the last of all.
template <typename T>
LB_INLINE Ahead<T> rows_behind(const T* rows, int64_t stride, int64_t count, int64_t dim) {
  return {rows + prefetch_rows<T>(dim) * stride, stride, count};
}

// Whether none of the n numbers is NaN or infinite.
template <typename T>
bool is_finite(const T* row, int64_t n) {
  VF difference = {};
  for (int64_t j = 0; j < n; j += kLanes) {
    const VF x = load_some(row + j, n - j);
    difference += x - x;
  }
  return sum(difference) == 0.0f;
}

// One query row as words, padded with zeros to a multiple of kLanes words.
template <typename Words, typename T>
void pack_query(const T* row, int64_t n, float* out) {
  for (int64_t c = 0; c < n; c += kLanes * Words::kPerWord) {
    store(out + c / Words::kPerWord, RowWords<Words>::load(row, c, n));
  }
}

// Keys: `n` rows of `dim` values, `stride` apart, into panels of kPanel keys with words along dim, from column
// `at` on, a multiple of kLanes. Columns beyond n are zero up to a multiple of kLanes; the last panel is not
// written further than that.
template <typename Words, typename T>
void pack_keys(const T* keys, int64_t stride, int64_t n, int64_t dim, int64_t at, float* out) {
  const int64_t words = words_of<Words>(dim);
  const int64_t ahead = prefetch_rows<T>(dim);
  for (int64_t j = 0; j < n; j += kLanes) {
    float* panel = out + (at + j) / kPanel * words * kPanel + (at + j) % kPanel;
    const T* first = keys + j * stride;
    const int64_t rows = n - j;
    for (int i = 0; i < kLanes; ++i) {
      prefetch(first + (ahead + i) * stride, dim * static_cast<int64_t>(sizeof(T)));
    }
    for (int64_t w = 0; w < words; w += kLanes) {
      VF block[kLanes];
      if (rows >= kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          block[i] = RowWords<Words>::load(first + i * stride, w * Words::kPerWord, dim);
        }
      } else {
        for (int i = 0; i < kLanes; ++i) {
          block[i] = i < rows ? RowWords<Words>::load(first + i * stride, w * Words::kPerWord, dim) : VF{};
        }
      }
      transpose(block);
#if defined(LB_SQUARES)
      if constexpr (Words::kPerWord == 2) {
        float* lines = panel + (at + j) % kPanel + w * kPanel;  // twice as far along two lines
        store_lines(block[0], block[1], lines);
        if (words - w > 2) store_lines(block[2], block[3], lines + 2 * kPanel);
        continue;
      }
#endif
      if (words - w >= kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(panel + (w + i) * kPanel, block[i]);
      } else {
        for (int i = 0; i < words - w; ++i) store(panel + (w + i) * kPanel, block[i]);
      }
    }
  }
}

// Writes words of kLanes channels from channel c on: one value each.
template <typename Words>
struct ValueWords {
  static constexpr int kChannels = kLanes;  // done at a time
  template <typename T>
  static LB_INLINE void pack(const T* row, int64_t, bool, int64_t channels, float* out) {
    store(out, load_some(row, channels));
  }
};
#if defined(LB_BF16_PAIRS)
// Two vectors of columns at once: the pairs that a row and the next one (zero if there is none) make.
template <>
struct ValueWords<WordsBf16> {
  static constexpr int kChannels = 2 * kLanes;
  template <typename T>
  static LB_INLINE void pack(const T* row, int64_t stride, bool paired, int64_t channels, float* out) {
    const VF first = RowWords<WordsBf16>::load(row, 0, channels);
    const VF second = paired ? RowWords<WordsBf16>::load(row + stride, 0, channels) : VF{};
    store(out, zip_pairs_low(first, second));
    if (channels <= kLanes) return;
    store(out + kLanes, zip_pairs_high(first, second));
  }
};
#endif

#if defined(LB_SQUARES)
// What pack_values does, two words of each channel at a time: four rows, of which those beyond n are zero.
template <typename T>
void pack_squares(const T* values, int64_t stride, int64_t n, int64_t words, int64_t padded, int64_t dim,
                  int64_t capacity, float* out) {
  const int64_t ahead = prefetch_rows<T>(dim);
  for (int64_t w = 0; w < padded; w += 2) {
    const T* at = values + 2 * w * stride;
    const int64_t rows = w < words ? n - 2 * w : 0;
    for (int64_t i = 0; i < rows && i < 4; ++i)
      prefetch(at + (ahead + i) * stride, dim * static_cast<int64_t>(sizeof(T)));
    for (int64_t c = 0; c < dim; c += 2 * kLanes) {
      VF row[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        row[i] = i < rows ? RowWords<WordsBf16>::load(at + i * stride + c, 0, dim - c) : VF{};
      float* to = out + c / kPanel * kPanel * capacity + w * kPanel + 2 * (c % kPanel);
      store_lines(zip_pairs_low(row[0], row[1]), zip_pairs_low(row[2], row[3]), to);
      if (dim - c <= kLanes) break;
      store_lines(zip_pairs_high(row[0], row[1]), zip_pairs_high(row[2], row[3]), to + 2 * kLanes);
    }
  }
}
#endif

// Values: `n` rows of `dim` values, `stride` apart, into panels of kPanel channels with words along the rows.
// A panel holds `capacity` words a column; those beyond n, up to `padded` rows, are zero.
template <typename Words, typename T>
void pack_values(const T* values, int64_t stride, int64_t n, int64_t padded, int64_t dim, int64_t capacity,
                 float* out) {
  constexpr int kStep = ValueWords<Words>::kChannels;
  static_assert(kPanel % kStep == 0, "a step stays in its panel");
  const int64_t words = words_of<Words>(n);
  const int64_t ahead = prefetch_rows<T>(dim);
#if defined(LB_SQUARES)
  if constexpr (Words::kPerWord == 2)
    return pack_squares(values, stride, n, words, words_of<Words>(padded), dim, capacity, out);
#endif
  for (int64_t w = 0; w < words; ++w) {
    const int64_t row = w * Words::kPerWord;
    const T* at = values + row * stride;
    for (int i = 0; i < Words::kPerWord; ++i) {
      prefetch(at + (ahead + i) * stride, dim * static_cast<int64_t>(sizeof(T)));
    }
    for (int64_t c = 0; c < dim; c += kStep) {
      float* to = out + c / kPanel * kPanel * capacity + w * kPanel + c % kPanel;
      ValueWords<Words>::pack(at + c, stride, row + 1 < n, dim - c, to);
    }
  }
  for (int64_t w = words; w < words_of<Words>(padded); ++w) {
    for (int64_t c = 0; c < dim; c += kLanes) {
      store(out + c / kPanel * kPanel * capacity + w * kPanel + c % kPanel, VF{});
    }
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
