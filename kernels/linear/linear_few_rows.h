// Products of few rows of x, bound by reading weights and hardly by arithmetic: weights are read sequentially, which
// CPUs do best. Part of linear_cpu_isa.cpp; compiled once an instruction set.
//
// As a *stream*, where all of x stays in the first cache and there is little to compute: each row of weight is
// multiplied by all of x as it comes. Otherwise in *stretches*: rows of weight that stay in the second cache are
// multiplied tile by tile, one block of K after the other, while the next stretch is prefetched sequentially.
#pragma once

#include "common/prefetch.h"
#include "common/vec.h"
#include "linear/linear_one_row.h"
#include "linear/linear_steps.h"
#include "linear/linear_tile.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Read bandwidth over that of tiles (linear_cpu_isa.cpp), 2 to 4 rows, [3072, 1024] and [1024, 3072], two threads of a Zen 5:
// bf16 1.1 to 1.25; f16 and f32 1.05 to 1.25. With more of x than this, 0.65 to 0.95.
#if defined(__AVX512F__)
constexpr int kStreamRows = 4;
#else
constexpr int kStreamRows = 1;
#endif
constexpr int64_t kStreamBytesX = 24 << 10;
constexpr int kStreamN = 4;     // rows of weight whose sums are added up together
constexpr int kStreamSums = 2;  // of each row, that hide the latency of the addition
// The more there is to compute for a line, the earlier memory has to be asked.
constexpr int64_t streamed_ahead(int rows) { return (rows > 2 ? 8 : 4) << 10; }

template <typename T>
LB_INLINE bool is_stream(int64_t rows, int64_t k) {
  return rows > 1 && rows <= kStreamRows && rows * steps_of<T>(k) * Step<T>::kPackedBytes <= kStreamBytesX;
}

// Stretches are of pairs of bf16, of which half as many vectors are multiplied; others wait for arithmetic, too. Read bandwidth over
// that of tiles, [4096, 1024], [1024, 2048], [6144, 1024] and [1024, 3072] in turn, on huge pages, two threads of a Zen 5:
//
//   rows   5     6     8     10    12    14    15    16
//          1.20  1.10  1.08  1.30  1.35  1.30  1.20  1.00
//
// and of 16 rows on two threads of a Zen 4 1.0 to 1.13 ([1024, 1024], [3072, 1024], [6144, 1024], [1024, 3072]), of 18 and 20 1.0.
template <typename T>
constexpr int kStretchRows = 1;
#if defined(__AVX512BF16__)
template <>
constexpr int kStretchRows<bf16> = 16;
#endif
constexpr int kStretchN = 2, kStretchX = 8;  // of a tile
// Over 64 KB, on huge pages, two threads of a Zen 4 while it reads 33 to 55 GB/s, 16, 12, 8 and 6 rows: [1024, 3072] 1.05 to 1.11,
// [1024, 2048] 1.04 to 1.08, [4096, 1024] and [6144, 1024] 0.97 to 1.07. 256 KB are no faster.
constexpr int64_t kStretchBytes = 128 << 10;
constexpr int64_t kStretchBytesX = 16 << 10;  // of a block of x

template <typename T>
LB_INLINE bool is_few_rows(int64_t rows, int64_t k) {
  return is_stream<T>(rows, k) || (rows > 1 && rows <= kStretchRows<T>);
}

// Steps of K in a block: whole cache lines of weight.
template <typename T>
int64_t few_block_steps(int64_t rows, int64_t k) {
  typedef Step<T> S;
  constexpr int64_t kLineSteps = kLine / (S::kSize * static_cast<int64_t>(sizeof(T)));
  if (is_stream<T>(rows, k)) return steps_of<T>(k);
  const int64_t steps = kStretchBytesX / (rows * S::kPackedBytes);
  return (steps < kMostSteps ? steps : kMostSteps) / kLineSteps * kLineSteps;
}

// sums[r] = one row of weight times row r of X, the lanes of each.
template <typename T, int X>
LB_INLINE void stream_dots(const T* weight, const char* x, int64_t k, VF (&sums)[X]) {
  typedef Step<T> S;
  constexpr int kXBytes = X * S::kPackedBytes;
  constexpr int64_t kSize = kStreamSums * S::kSize, kRun = kMostSteps * kSize;
  LB_UNROLL for (int r = 0; r < X; ++r) sums[r] = VF{};
  for (int64_t at = 0; at < k;) {
    VF some[kStreamSums][X] = {};
    const int64_t end = k - at < kRun ? k : at + kRun;
    for (; at + kSize <= end; at += kSize, x += kStreamSums * kXBytes) {
      LB_UNROLL for (int i = 0; i < kStreamSums; ++i) {
        const T* from = weight + at + i * S::kSize;
        fetch_ahead(reinterpret_cast<const char*>(from) + streamed_ahead(X));
        const typename S::Weights w = S::read(from);
        LB_UNROLL for (int r = 0; r < X; ++r) some[i][r] =
            S::multiply_add(some[i][r], w, x + i * kXBytes + r * S::kPackedBytes);
      }
    }
    for (; at < end; at += S::kSize, x += kXBytes) {
      const typename S::Weights w =
          k - at < S::kSize ? S::read(weight + at, static_cast<int>(k - at)) : S::read(weight + at);
      LB_UNROLL for (int r = 0; r < X; ++r) some[0][r] =
          S::multiply_add(some[0][r], w, x + r * S::kPackedBytes);
    }
    LB_UNROLL for (int r = 0; r < X; ++r) sums[r] += some[0][r] + some[1][r];
  }
}

// Each row of weight is read whole before the next.
template <typename T, int X>
void run_stream(const LinearArgs& args, int64_t begin, int64_t end) {
  const char* x = static_cast<const char*>(args.packed_x);
  float totals[X * kPanel];
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    const T* weight = static_cast<const T*>(args.weight) + begin * args.weight_stride;
    memset(totals, 0, sizeof(totals));
    int64_t i = 0;
    for (; i + kStreamN <= count; i += kStreamN) {
      VF sums[X][kStreamN];
      for (int n = 0; n < kStreamN; ++n, weight += args.weight_stride) {
        VF of_row[X];
        stream_dots<T>(weight, x, args.k, of_row);
        LB_UNROLL for (int r = 0; r < X; ++r) sums[r][n] = of_row[r];
      }
      add_sums<kStreamN, X>(sums, totals + i * X);
    }
    for (; i < count; ++i, weight += args.weight_stride) {
      VF of_row[X];
      stream_dots<T>(weight, x, args.k, of_row);
      LB_UNROLL for (int r = 0; r < X; ++r) totals[i * X + r] = sum(of_row[r]);
    }
    write_panel<T, kStreamN>(args, begin, count, totals);
  }
}

// A tile, for each line of which so many `lines` of what is `next` are asked for.
template <typename T, int N, int X>
void asking_tile(const T* weight, int64_t stride, const char* x, int64_t k, int64_t lines, LinesAhead& next,
                 float* totals) {
  LinesAhead rest = next;  // in registers
  const auto ask = [&] { rest.ask(lines); };
  tile<T, N, X>(weight, stride, x, k, ask, totals);
  next = rest;
}

template <typename T>
using AskingTile = void (*)(const T*, int64_t, const char*, int64_t, int64_t, LinesAhead&, float*);
// Of N rows of weight, by the number of rows of x - 1.
template <typename T, int N>
constexpr AskingTile<T> kStretchTiles[kStretchX] = {
    asking_tile<T, N, 1>, asking_tile<T, N, 2>, asking_tile<T, N, 3>, asking_tile<T, N, 4>,
    asking_tile<T, N, 5>, asking_tile<T, N, 6>, asking_tile<T, N, 7>, asking_tile<T, N, 8>};

template <typename T>
void run_stretches(const LinearArgs& args, int64_t begin, int64_t end) {
  constexpr int N = kStretchN;
  const int64_t stride = args.weight_stride, row_bytes = args.k * static_cast<int64_t>(sizeof(T));
  const int64_t block = few_block_steps<T>(args.rows, args.k) * Step<T>::kSize;
  const int64_t fitting = kStretchBytes / (row_bytes > 0 ? row_bytes : 1) / N * N;
  const int64_t stretch = fitting < N ? N : fitting < kPanel ? fitting : kPanel;
  const int64_t lines = args.rows > kStretchX ? 1 : N;
  float totals[kStretchRows<T> * kPanel];
  for (; begin < end; begin += stretch) {
    const int64_t count = end - begin < stretch ? end - begin : stretch, behind = end - begin - count;
    const T* weight = static_cast<const T*>(args.weight) + begin * stride;
    LinesAhead next{reinterpret_cast<const char*>(weight + count * stride),
                    stride * static_cast<int64_t>(sizeof(T)), row_bytes, behind < stretch ? behind : stretch};
    const char* block_x = static_cast<const char*>(args.packed_x);
    memset(totals, 0, sizeof(float) * static_cast<size_t>(args.rows * kPanel));
    for (int64_t k = 0; k < args.k; k += block) {
      const int64_t size = args.k - k < block ? args.k - k : block;
      const int64_t x_bytes = steps_of<T>(size) * Step<T>::kPackedBytes;
      for (int64_t i = 0, n; i < count; i += n) {
        n = count - i < N ? 1 : N;
        const AskingTile<T>* const tiles = n == N ? kStretchTiles<T, N> : kStretchTiles<T, 1>;
        const char* x = block_x;
        for (int64_t row = 0, width; row < args.rows; row += width, x += width * x_bytes) {
          width = group_of<kStretchX>(args.rows - row);
          tiles[width - 1](weight + i * stride + k, stride, x, size, lines, next,
                           totals + i * args.rows + row * n);
        }
      }
      block_x += args.rows * x_bytes;
    }
    write_panel<T, N>(args, begin, count, totals);
  }
}

template <typename T>
void run_few_rows(const LinearArgs& args, int64_t begin, int64_t end) {
  if constexpr (kStretchRows<T> > 1) {
    if (!is_stream<T>(args.rows, args.k)) return run_stretches<T>(args, begin, end);
  }
  args.rows == 2   ? run_stream<T, 2>(args, begin, end)
  : args.rows == 3 ? run_stream<T, 3>(args, begin, end)
                   : run_stream<T, 4>(args, begin, end);
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
