// The loops of experts.h on raw pointers, compiled once an instruction set.
#include "experts/experts.h"

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Rows of x multiplied by a weight while it is in a register, and rows of weight between two visits of a sum.
constexpr int kTileX = 4;
constexpr int kDepth = 8;
// Rows of weight whose kColumns columns stay in the first two caches while all rows of x pass.
constexpr int64_t kBlock = 64;
// How many rows of weight ahead of its use a part is fetched: the part of a row is too short a stream for the
// hardware to follow.
constexpr int64_t kAhead = 2 * kDepth;
constexpr int kLine = 64;  // bytes a cache line

#define LB_UNROLL _Pragma("GCC unroll 8")

// sums[r][n] += x[r][d] * weight[d][n], for Depth rows of weight and X rows of x. The products of the Depth
// rows are summed first: a long chain of additions is what errors grow with.
template <typename T, int X, int Depth>
LB_INLINE void add_products(const ColumnsArgs& args, const T* weight, const float* x, float* sums) {
  for_lanes(args.count, [&](int64_t i, auto n) __attribute__((always_inline)) {
    VF parts[X];
    LB_UNROLL for (int d = 0; d < Depth; ++d) {
      const VF w = load(weight + d * args.weight_stride + i, n);
      LB_UNROLL for (int r = 0; r < X; ++r) {
        const VF factor = splat(x[r * args.k + d]);
        parts[r] = d == 0 ? w * factor : fma(w, factor, parts[r]);
      }
    }
    LB_UNROLL for (int r = 0; r < X; ++r) {
      float* sum = sums + r * kColumns + i;
      store(sum, load(sum, n) + parts[r], n);
    }
  });
}

template <typename T, int X>
void add_block(const ColumnsArgs& args, const T* weight, const float* x, int64_t depth, int64_t ahead,
               float* sums) {
  const int64_t stride = args.weight_stride;
  int64_t d = 0;
  for (; d + kDepth <= depth; d += kDepth) {
    for (int64_t row = d + kAhead; row < d + kAhead + kDepth && row < ahead; ++row) {
      const char* next = reinterpret_cast<const char*>(weight + row * stride);
      for (int64_t at = 0; at < args.count * static_cast<int64_t>(sizeof(T)); at += kLine) {
        __builtin_prefetch(next + at);
      }
    }
    add_products<T, X, kDepth>(args, weight + d * stride, x + d, sums);
  }
  for (; d < depth; ++d) add_products<T, X, 1>(args, weight + d * stride, x + d, sums);
}

template <typename T>
void columns(const ColumnsArgs& args) {
  float sums[kColumnsRows * kColumns];
  for (int64_t i = 0; i < args.rows * kColumns; ++i) sums[i] = 0.0f;
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t k = 0; k < args.k; k += kBlock, weight += kBlock * args.weight_stride) {
    const int64_t depth = args.k - k < kBlock ? args.k - k : kBlock;
    for (int64_t row = 0; row < args.rows; row += kTileX) {
      // The first rows of x fetch, also what the next block begins with; the others find it in the cache.
      const int64_t ahead = row == 0 ? args.k - k : 0;
      const float* x = args.x + row * args.k + k;
      float* tile = sums + row * kColumns;
      switch (args.rows - row) {
        case 1:
          add_block<T, 1>(args, weight, x, depth, ahead, tile);
          break;
        case 2:
          add_block<T, 2>(args, weight, x, depth, ahead, tile);
          break;
        case 3:
          add_block<T, 3>(args, weight, x, depth, ahead, tile);
          break;
        default:
          add_block<T, 4>(args, weight, x, depth, ahead, tile);
      }
    }
  }
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t row = 0; row < args.rows; ++row) {
    T* out = static_cast<T*>(args.out) + row * args.count;
    for_lanes(args.count, [&](int64_t i, auto n) __attribute__((always_inline)) {
      const VF sum = load(sums + row * kColumns + i, n);
      store(out + i, bias ? sum + load(bias + i, n) : sum, n);
    });
  }
}

template <typename T>
void combine(const CombineArgs& args, int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t token = begin / args.n, col = begin % args.n;
    const int64_t count = args.n - col < end - begin ? args.n - col : end - begin;
    const T* y = static_cast<const T*>(args.y) + token * args.slots * args.n + col;
    const float* scores = args.scores + token * args.slots;
    T* out = static_cast<T*>(args.out) + begin;
    for_lanes(count, [&](int64_t i, auto n) __attribute__((always_inline)) {
      VF sum{};
      for (int64_t slot = 0; slot < args.slots; ++slot) {
        sum = fma(load(y + slot * args.n + i, n), splat(scores[slot]), sum);
      }
      store(out + i, sum, n);
    });
    begin += count;
  }
}

template <typename T>
void to_float(const T* x, int64_t count, float* out) {
  for_lanes(count,
            [&](int64_t i, auto n) __attribute__((always_inline)) { store(out + i, load(x + i, n), n); });
}

void to_float_any(DType dtype, const void* x, int64_t count, float* out) {
  LB_DISPATCH_DTYPE(dtype, T, to_float<T>(static_cast<const T*>(x), count, out));
}

void columns_any(DType dtype, const ColumnsArgs& args) { LB_DISPATCH_DTYPE(dtype, T, columns<T>(args)); }

void combine_any(DType dtype, const CombineArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(dtype, T, combine<T>(args, begin, end));
}

}  // namespace

extern const ExpertsKernels experts_kernels;
const ExpertsKernels experts_kernels = {to_float_any, columns_any, combine_any};

}  // namespace LB_ISA
}  // namespace liteboost
