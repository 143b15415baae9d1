// Products of more rows of x than a few, bound by arithmetic as much as by weights: a tile of weights stays in the
// first cache while all of x is streamed from the second, and sums are long, so that horizontal sums over lanes are
// rare. Part of linear_cpu_isa.cpp; compiled once an instruction set.
#pragma once

#include "linear/linear_rows.h"
#include "linear/linear_tile.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Of pairs of bf16. Read bandwidth over that of tiles (linear_cpu_isa.cpp), of 32 rows at a time, [4096, 1024], [1024, 2048],
// [6144, 1024] and [1024, 3072] in turn, on huge pages, two threads of a Zen 5; from 96 rows on gemm_linear is as fast:
//
//   rows   16    17    18    20    21    24    28    30    32    33    48    64    80
//          0.77  1.10  1.04  0.89  1.20  1.00  1.00  1.12  1.00  1.20  1.08  1.08  1.10
constexpr int64_t kMoreRows = 80, kMoreThan = 20;
constexpr int kMoreN = 8, kMoreX = 3;  // of a tile: 24 sums, 3 of x and a weight fit 32 registers
constexpr int64_t kMoreSteps = 32;     // of a block of K: kMoreN rows of weight leave room in the first cache

template <typename T>
constexpr bool kHasMoreRows = false;
#if defined(__AVX512BF16__)
template <>
constexpr bool kHasMoreRows<bf16> = true;
#endif

template <typename T>
LB_INLINE bool is_more_rows(int64_t rows) {
  return kHasMoreRows<T> && rows > kMoreThan;
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

template <typename T, int N>
LB_INLINE void more_rows_tiles(const LinearArgs& args, const T* weight, LinesAhead& next, float* totals) {
  const int64_t stride = args.weight_stride, block = kMoreSteps * Step<T>::kSize;
  const char* x = static_cast<const char*>(args.packed_x);
  for (int64_t k = 0; k < args.k; k += block) {
    const int64_t size = args.k - k < block ? args.k - k : block;
    const int64_t x_bytes = steps_of<T>(size) * Step<T>::kPackedBytes;
    for (int64_t row = 0, width; row < args.rows; row += width, x += width * x_bytes) {
      width = group_of<kMoreX>(args.rows - row);
      const AskingTile<T> run = width == 3 ? asking_tile<T, N, 3> : asking_tile<T, N, 2>;
      // The first groups ask for a line of each row.
      run(weight + k, stride, x, size, row < N * kMoreX, next, totals + row * N);
    }
  }
}

template <typename T>
void run_more_rows(const LinearArgs& args, int64_t begin, int64_t end) {
  constexpr int N = kMoreN;
  const int64_t stride = args.weight_stride, element = static_cast<int64_t>(sizeof(T));
  float totals[kMoreRows * kPanel];
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    memset(totals, 0, sizeof(float) * static_cast<size_t>(args.rows * kPanel));
    for (int64_t i = 0, n; i < count; i += n) {
      n = count - i < N ? 1 : N;
      const T* weight = static_cast<const T*>(args.weight) + (begin + i) * stride;
      const int64_t behind = end - begin - i - n;
      LinesAhead next{reinterpret_cast<const char*>(weight + n * stride), stride * element, args.k * element,
                      behind < N ? behind : N};
      n == N ? more_rows_tiles<T, N>(args, weight, next, totals + i * args.rows)
             : more_rows_tiles<T, 1>(args, weight, next, totals + i * args.rows);
    }
    write_panel<T, N>(args, begin, count, totals);
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
