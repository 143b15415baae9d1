// Products of 2 to 16 rows of x by pairs of bf16: rows of x lie beside each other in the lanes of a vector, by which words of
// weight, spread to all of them, are multiplied. Nothing is added up over lanes but a few words, once for all of K, and a
// line of weight is in the first cache while it is used, however far apart its rows are. Part of linear_cpu_isa.cpp.
//
// A lane is word w of row r, r * kWords + w, and a *step* is kWords words of K: 16 rows of one word, or 4 of four.
// x is packed as [line of 16 words][step][vector], what is behind the last row and behind K as zeros.
//
// Read bandwidth over that of the loops before (rows of weight as streams, and tiles of 2 by 8 summed over lanes), [6144, 1024],
// [4096, 1024], [1024, 3072] and [1024, 2048] on huge pages, two threads of a Zen 4 that reads 33 to 56 GB/s: 2 to 4 rows 0.97 to
// 1.19, 5 to 8 rows 1.00 to 1.30, 9 rows 0.89 to 0.92, 12 rows 1.05 to 1.22, 13 rows 0.91 to 1.08, 16 rows 1.12 to 1.39.
#pragma once

#include "common/prefetch.h"
#include "common/vec.h"
#include "common/vec_bf16.h"
#include "common/vec_transpose.h"
#include "linear/linear_one_row.h"
#include "linear/linear_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define LB_HAS_LANES 1

constexpr int64_t kMostLaneRows = 16;
constexpr int kLaneN = 8;  // rows of weight of a tile: their sums, one of x and a word fit 32 registers
constexpr int64_t kLineElements = 32, kLineWords = 16;
// How far ahead weights are asked for.
constexpr int64_t kLanesAhead = 32 << 10;

template <int rows, int vectors>
struct Lanes {
  static constexpr int kRows = rows, kVectors = vectors, kWords = kLanes / rows;
  static constexpr int kSteps = rows;                                // of a line
  static constexpr int64_t kLineLanes = kSteps * kVectors * kLanes;  // of packed x
  static constexpr int64_t kBlockLines = 128 / kSteps;  // whose sums are one chain of additions each

  // A step of weight in all rows.
  static LB_INLINE VF spread(const char* words) {
    if constexpr (rows == 16) {
      int32_t word;
      memcpy(&word, words, sizeof(word));
      return (VF)_mm512_set1_epi32(word);
    } else {
      return (VF)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
    }
  }
};

// f with the lanes for so many rows.
template <typename F>
LB_INLINE void with_lanes(int64_t rows, const F& f) {
  if (rows <= 4) return f(Lanes<4, 1>{});
  if (rows <= 8) return f(Lanes<4, 2>{});
  if (rows <= 12) return f(Lanes<4, 3>{});
  f(Lanes<16, 1>{});
}

LB_INLINE int64_t lines_of(int64_t k) { return (k + kLineElements - 1) / kLineElements; }

int64_t packed_lanes_bytes(int64_t rows, int64_t k) {
  int64_t lanes = 0;
  with_lanes(rows, [&](auto of) { lanes = lines_of(k) * decltype(of)::kLineLanes; });
  return lanes * static_cast<int64_t>(sizeof(float));
}

// A line of kRows rows, of which there are so many.
template <typename L>
LB_INLINE void pack_line(const bf16* x, int64_t rows, int64_t k, int64_t elements, float* to) {
  VF words[kLanes];
  LB_UNROLL16 for (int r = 0; r < kLanes; ++r) {
    words[r] = r >= L::kRows || r >= rows  ? VF{}
               : elements >= kLineElements ? (VF)read_pairs(x + r * k)
                                           : (VF)read_pairs(x + r * k, static_cast<int>(elements));
  }
  if constexpr (L::kWords == 1) {
    transpose(words);
    LB_UNROLL16 for (int step = 0; step < L::kSteps; ++step)
        store(to + step * L::kVectors * kLanes, words[step]);
  } else {
    LB_UNROLL16 for (int r = 0; r < L::kRows; ++r) {
      float row[kLanes];
      store(row, words[r]);
      LB_UNROLL16 for (int step = 0; step < L::kSteps; ++step)
          memcpy(to + step * L::kVectors * kLanes + r * L::kWords, row + step * L::kWords,
                 sizeof(float) * L::kWords);
    }
  }
}

void pack_lanes(const bf16* x, int64_t rows, int64_t k, char* packed) {
  with_lanes(rows, [&](auto of) {
    typedef decltype(of) L;
    float* to = reinterpret_cast<float*>(packed);
    for (int64_t at = 0; at < k; at += kLineElements, to += L::kLineLanes) {
      for (int64_t v = 0; v < L::kVectors; ++v)
        pack_line<L>(x + v * L::kRows * k + at, rows - v * L::kRows, k, k - at, to + v * kLanes);
    }
  });
}

// totals[n][vector][lane] += the products of `lines` lines of N rows of weight, `stride` bytes apart.
template <typename L, int N>
void lanes_tile(const char* weight, int64_t stride, const float* x, int64_t lines, LinesAhead& next,
                float* totals) {
  constexpr int V = L::kVectors, kPairs = (N + 1) / 2;
  LinesAhead ahead = next;  // in registers
  VF sums[N][V] = {};
  const char* rows[kPairs];
  LB_UNROLL for (int p = 0; p < kPairs; ++p) rows[p] = weight + 2 * p * stride;
  for (int64_t line = 0; line < lines; ++line) {
    ahead.ask(N);
    LB_UNROLL16 for (int step = 0; step < L::kSteps; ++step) {
      VF lanes[V];
      LB_UNROLL for (int v = 0; v < V; ++v) lanes[v] = load(x + (step * V + v) * kLanes);
      LB_UNROLL for (int n = 0; n < N; ++n) {
        const VF words = L::spread(rows[n / 2] + n % 2 * stride + step * L::kWords * 4);
        LB_UNROLL for (int v = 0; v < V; ++v) sums[n][v] = dot_pairs(sums[n][v], lanes[v], words);
      }
    }
    x += L::kLineLanes;
    LB_UNROLL for (int p = 0; p < kPairs; ++p) rows[p] += kLine;
  }
  next = ahead;
  LB_UNROLL for (int n = 0; n < N; ++n) {
    LB_UNROLL for (int v = 0; v < V; ++v) {
      float* to = totals + (n * V + v) * kLanes;
      store(to, load(to) + sums[n][v]);
    }
  }
}

// The same of k elements, and totals from zero on.
template <typename L, int N>
void lanes_rows(const bf16* weight, int64_t stride, const float* x, int64_t k, LinesAhead& next,
                float* totals) {
  const int64_t whole = k / kLineElements, bytes = stride * static_cast<int64_t>(sizeof(bf16));
  memset(totals, 0, sizeof(float) * N * L::kVectors * kLanes);
  for (int64_t line = 0; line < whole; line += L::kBlockLines) {
    const int64_t some = whole - line < L::kBlockLines ? whole - line : L::kBlockLines;
    lanes_tile<L, N>(reinterpret_cast<const char*>(weight + line * kLineElements), bytes,
                     x + line * L::kLineLanes, some, next, totals);
  }
  const int64_t rest = k - whole * kLineElements;
  if (rest == 0) return;
  bf16 last[N][kLineElements] = {};
  for (int n = 0; n < N; ++n)
    memcpy(last[n], weight + n * stride + whole * kLineElements, static_cast<size_t>(rest) * sizeof(bf16));
  lanes_tile<L, N>(reinterpret_cast<const char*>(last), sizeof(last[0]), x + whole * L::kLineLanes, 1, next,
                   totals);
}

// sums[row][kPanel] of a panel of `count` outputs from totals[output][vector][lane].
template <typename L>
void sum_lanes(const float* totals, int64_t count, float* sums) {
  constexpr int64_t kDistance = L::kVectors * kLanes;
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int64_t v = 0; v < L::kVectors; ++v) {
      VF lanes[kLanes];
      LB_UNROLL16 for (int n = 0; n < kLanes; ++n) lanes[n] = load(totals + (i + n) * kDistance + v * kLanes);
      transpose(lanes);
      LB_UNROLL16 for (int r = 0; r < L::kRows; ++r) {
        VF sum = lanes[r * L::kWords];
        LB_UNROLL for (int w = 1; w < L::kWords; ++w) sum += lanes[r * L::kWords + w];
        store(sums + (v * L::kRows + r) * kPanel + i, sum);
      }
    }
  }
}

template <typename L>
void run_lanes(const LinearArgs& args, int64_t begin, int64_t end) {
  constexpr int N = kLaneN;
  constexpr int64_t kOutput = L::kVectors * kLanes;
  const int64_t stride = args.weight_stride, row_bytes = args.k * static_cast<int64_t>(sizeof(bf16));
  const int64_t distance = kLanesAhead / (row_bytes > 0 ? row_bytes : 1) / N * N + N;
  const bf16* weight = static_cast<const bf16*>(args.weight) + begin * stride;
  const float* x = static_cast<const float*>(args.packed_x);
  LinesAhead next{reinterpret_cast<const char*>(weight + distance * stride),
                  stride * static_cast<int64_t>(sizeof(bf16)), row_bytes, end - begin - distance};
  float totals[kPanel * kOutput], sums[L::kRows * L::kVectors * kPanel];
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    int64_t i = 0;
    for (; i + N <= count; i += N, weight += N * stride)
      lanes_rows<L, N>(weight, stride, x, args.k, next, totals + i * kOutput);
    for (; i < count; ++i, weight += stride)
      lanes_rows<L, 1>(weight, stride, x, args.k, next, totals + i * kOutput);
    sum_lanes<L>(totals, count, sums);
    for (int64_t row = 0; row < args.rows; ++row)
      write_row<bf16>(args, row, begin, count, sums + row * kPanel);
  }
}

#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
