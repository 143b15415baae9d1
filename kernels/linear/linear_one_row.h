// The sums of one row of x, and of several in the order of one: each row has the bits that it has alone. Part of
// linear_cpu_isa.cpp; compiled once an instruction set.
//
// Step i of K is added to sum i modulo kRowSums of its lanes, what is left of K behind whole kRowSums to the first, and a
// part of a step to the second; the sums are added up in pairs, and then their lanes.
#pragma once

#include "common/prefetch.h"
#include "common/vec.h"
#include "linear/linear.h"
#include "linear/linear_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Rows of weight whose outputs are written in one go.
constexpr int64_t kPanel = 64;

// Streams in which memory is read at once, where there is little to compute, and how far ahead in each is asked for. A
// Sapphire Rapids reads 4 streams of as many pages a third faster than one (12.5 against 9.5 GB/s a core), and products of
// one row a third faster again with lines asked for. A Zen 4 reads one stream fastest.
#if defined(__AMX_BF16__)
constexpr int kStreams = 4;
#else
constexpr int kStreams = 1;
#endif
constexpr int64_t kStreamAhead = 2 << 10;
constexpr int64_t kEachAhead = 4 << 10;
// The same of one row of weight and one of x, or 0 where it gains nothing. A Zen 3 reads three shapes of bf16 in two threads
// 1.05 to 1.15 times as fast, and less so where it asks for half of it or twice as much.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kOneAhead = 1 << 10;
#else
constexpr int64_t kOneAhead = 0;
#endif

// Rows of x whose kRowSums sums each fit in registers beside a weight.
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 4;
#else
constexpr int kRowsAtOnce = 2;
#endif
// Rows of weight that stay in the first cache while groups of rows of x come by, and each group with them.
constexpr int64_t kWeightsAtOnce = 4;

// X rows of x times `N` rows of weight, `distance` elements apart: out[n * out_distance + r * kPanel].
template <typename T, int N, int X>
LB_INLINE void dots(const T* weight, int64_t distance, const char* x, int64_t k, float* out,
                    int64_t out_distance) {
  typedef Step<T> S;
  constexpr int kSums = kRowSums;
  constexpr int64_t kAhead = N > 1 ? kStreamAhead : X > 1 ? kEachAhead : kOneAhead;
  constexpr int64_t kXBytes = X * S::kPackedBytes;
  VF sums[N][X][kSums] = {};
  int64_t at = 0;
  for (; at + kSums * S::kSize <= k; at += kSums * S::kSize, x += kSums * kXBytes) {
    LB_UNROLL for (int n = 0; n < N; ++n) {
      LB_UNROLL for (int i = 0; i < kSums; ++i) {
        const T* from = weight + n * distance + at + i * S::kSize;
        if (kAhead > 0) fetch_ahead(reinterpret_cast<const char*>(from) + kAhead);
        const typename S::Weights w = S::read(from);
        LB_UNROLL for (int r = 0; r < X; ++r) sums[n][r][i] =
            S::multiply_add(sums[n][r][i], w, x + i * kXBytes + r * S::kPackedBytes);
      }
    }
  }
  for (; at + S::kSize <= k; at += S::kSize, x += kXBytes) {
    LB_UNROLL for (int n = 0; n < N; ++n) {
      const typename S::Weights w = S::read(weight + n * distance + at);
      LB_UNROLL for (int r = 0; r < X; ++r) sums[n][r][0] =
          S::multiply_add(sums[n][r][0], w, x + r * S::kPackedBytes);
    }
  }
  LB_UNROLL for (int n = 0; n < N; ++n) {
    if (at < k) {
      const typename S::Weights w = S::read(weight + n * distance + at, static_cast<int>(k - at));
      LB_UNROLL for (int r = 0; r < X; ++r) sums[n][r][1] =
          S::multiply_add(sums[n][r][1], w, x + r * S::kPackedBytes);
    }
    LB_UNROLL for (int r = 0; r < X; ++r) {
      VF(&of)[kSums] = sums[n][r];
      LB_UNROLL for (int i = 4; i < kSums; ++i) of[i - 4] += of[i];
      out[n * out_distance + r * kPanel] = sum((of[0] + of[1]) + (of[2] + of[3]));
    }
  }
}

template <typename T>
void run_one_row(const LinearArgs& args, int64_t begin, int64_t end) {
  const char* x = static_cast<const char*>(args.packed_x);
  const int64_t stride = args.weight_stride;
  float sums[kPanel];
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    const int64_t distance = count / kStreams;
    const T* weight = static_cast<const T*>(args.weight) + begin * stride;
    for (int64_t i = 0; i < distance; ++i)
      dots<T, kStreams, 1>(weight + i * stride, distance * stride, x, args.k, sums + i, distance);
    for (int64_t i = distance * kStreams; i < count; ++i)
      dots<T, 1, 1>(weight + i * stride, 0, x, args.k, sums + i, 0);
    write_row<T>(args, 0, begin, count, sums);
  }
}

// Several rows of x, each as if it were alone.
template <typename T>
void run_each_row(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t stride = args.weight_stride, row_bytes = steps_of<T>(args.k) * Step<T>::kPackedBytes;
  float sums[kLinearRows * kPanel];
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    const T* weight = static_cast<const T*>(args.weight) + begin * stride;
    for (int64_t first = 0; first < count; first += kWeightsAtOnce) {
      const int64_t last = count - first < kWeightsAtOnce ? count : first + kWeightsAtOnce;
      const char* x = static_cast<const char*>(args.packed_x);
      for (int64_t row = 0, width; row < args.rows; row += width, x += width * row_bytes) {
        width = group_of<kRowsAtOnce>(args.rows - row);
        for (int64_t i = first; i < last; ++i) {
          const T* of = weight + i * stride;
          float* out = sums + row * kPanel + i;
          switch (width) {
            case 1:
              dots<T, 1, 1>(of, 0, x, args.k, out, 0);
              break;
            case 2:
              dots<T, 1, 2>(of, 0, x, args.k, out, 0);
              break;
#if defined(__AVX512F__)
            case 3:
              dots<T, 1, 3>(of, 0, x, args.k, out, 0);
              break;
            default:
              dots<T, 1, 4>(of, 0, x, args.k, out, 0);
#endif
          }
        }
      }
    }
    for (int64_t row = 0; row < args.rows; ++row) write_row<T>(args, row, begin, count, sums + row * kPanel);
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
