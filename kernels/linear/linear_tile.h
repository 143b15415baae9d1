// What loops over tiles have in common: N rows of weight times X rows of x, whose sums are in registers. Part of
// linear_cpu_isa.cpp; compiled once an instruction set.
#pragma once

#include "common/vec.h"
#include "common/vec_sums.h"
#include "linear/linear_one_row.h"
#include "linear/linear_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// A long sum is made of sums of this many steps: its rounding errors grow with the longest chain of additions.
constexpr int64_t kMostSteps = 64;

// One step of a tile: N rows of weight, X rows of x.
template <typename T, int N, int X>
LB_INLINE void tile_step(VF (&sums)[X][N], const typename Step<T>::Weights (&w)[N], const char* x) {
  LB_UNROLL for (int r = 0; r < X; ++r) {
    LB_UNROLL for (int n = 0; n < N; ++n) {
      sums[r][n] = Step<T>::multiply_add(sums[r][n], w[n], x + r * Step<T>::kPackedBytes);
    }
  }
}

// totals[r * N + n] += the lanes of sums[r][n], added up.
template <int N, int X>
LB_INLINE void add_sums(const VF (&sums)[X][N], float* totals) {
  LB_UNROLL for (int first = 0; first < N * X; first += kLanes) {
    VF some[kLanes];
    LB_UNROLL16 for (int i = 0; i < kLanes; ++i) {
      const int at = first + i;
      some[i] = at < N * X ? sums[at / N][at % N] : VF{};
    }
    if (first + kLanes <= N * X) {
      store(totals + first, load(totals + first) + sum_each(some));
    } else {
      const int rest = N * X - first;
      store(totals + first, load(totals + first, rest) + sum_each(some), rest);
    }
  }
}

// totals[r * N + n] += weight row n times x row r over k elements. For each line of a row of weight `ahead` asks for
// some that come later.
template <typename T, int N, int X, typename Ahead>
LB_INLINE void tile(const T* weight, int64_t stride, const char* x, int64_t k, Ahead& ahead, float* totals) {
  typedef Step<T> S;
  constexpr int kUnroll = kLine / (S::kSize * static_cast<int>(sizeof(T)));
  constexpr int kXBytes = X * S::kPackedBytes;
  VF sums[X][N];
  typename S::Weights w[N];
  LB_UNROLL for (int r = 0; r < X; ++r) { LB_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = VF{}; }
  int64_t at = 0;
  for (; at + kUnroll * S::kSize <= k; at += kUnroll * S::kSize, x += kUnroll * kXBytes) {
    ahead();
    LB_UNROLL for (int u = 0; u < kUnroll; ++u) {
      if constexpr (N > 2 * X) {  // of which one is in a register at a time, and all of x
        LB_UNROLL for (int n = 0; n < N; ++n) {
          const typename S::Weights one = S::read(weight + n * stride + at + u * S::kSize);
          LB_UNROLL for (int r = 0; r < X; ++r) sums[r][n] =
              S::multiply_add(sums[r][n], one, x + u * kXBytes + r * S::kPackedBytes);
        }
      } else {
        LB_UNROLL for (int n = 0; n < N; ++n) w[n] = S::read(weight + n * stride + at + u * S::kSize);
        tile_step<T, N, X>(sums, w, x + u * kXBytes);
      }
    }
  }
  for (; at + S::kSize <= k; at += S::kSize, x += kXBytes) {
    LB_UNROLL for (int n = 0; n < N; ++n) w[n] = S::read(weight + n * stride + at);
    tile_step<T, N, X>(sums, w, x);
  }
  if (at < k) {
    LB_UNROLL for (int n = 0; n < N; ++n) w[n] = S::read(weight + n * stride + at, static_cast<int>(k - at));
    tile_step<T, N, X>(sums, w, x);
  }
  add_sums<N, X>(sums, totals);
}

// Outputs [0, count) of a panel, whose totals are [tile of N][row][row of weight in the tile].
template <typename T, int N>
void write_panel(const LinearArgs& args, int64_t begin, int64_t count, const float* totals) {
  for (int64_t row = 0; row < args.rows; ++row) {
    float sums[kPanel];
    int64_t i = 0;
    for (; i + N <= count; i += N) {
      memcpy(sums + i, totals + i * args.rows + row * N, N * sizeof(float));
    }
    for (; i < count; ++i) sums[i] = totals[i * args.rows + row];
    write_row<T>(args, row, begin, count, sums);
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
