// Products of few rows of x, bound by reading weights and hardly by arithmetic: weights are read sequentially, which
// CPUs do best. As a *stream*, where all of x stays in the first cache and there is little to compute: each row of weight is
// multiplied by all of x as it comes. Part of linear_cpu_isa.cpp; compiled once an instruction set.
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
// f16 and f32 1.05 to 1.25. With more of x than this, 0.65 to 0.95.
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

template <typename T>
void run_streams(const LinearArgs& args, int64_t begin, int64_t end) {
  args.rows == 2   ? run_stream<T, 2>(args, begin, end)
  : args.rows == 3 ? run_stream<T, 3>(args, begin, end)
                   : run_stream<T, 4>(args, begin, end);
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
