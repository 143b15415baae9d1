// The loops of linear.h on raw pointers, compiled once an instruction set.
//
// Words: a *step* is the run of K that one vector of weights covers; a *tile* is kTileN rows of weight times
// up to kTileX rows of x, whose sums stay in registers over all of K; a *panel* is the rows of weight whose
// sums are collected as fp32 before they are rounded and written in one go.
//
// x is packed in groups of kTileX rows as [group][step][row][lanes]: the rows of a group are then one
// stream. Read where they lie, rows that are a multiple of 4 KiB apart would fall into one set of the first
// cache together with the rows of weight.
#include "linear/linear.h"

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// 16 sums, 4 weights and one x fit 32 registers; 8 sums, 4 halves of weights and one x fit 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileN = 4;
#else
constexpr int kTileN = 2;
#endif
constexpr int kTileX = 4;
constexpr int kPanel = 64;
constexpr int kLine = 64;  // bytes a cache line
// A long sum is made of sums of this many steps: its rounding errors grow with the longest chain of
// additions.
constexpr int kPart = 64;

#define LB_UNROLL _Pragma("GCC unroll 8")

// What one step is for each element type: how weights are read, what x becomes when packed, and how the two
// meet. Packed rows are zero beyond K, and so are the lanes of a partial load.
template <typename T>
struct Step {
  typedef VF Weights;
  static constexpr int kSize = kLanes;            // elements of K
  static constexpr int kPackedBytes = kVecBytes;  // of packed x a row
  static LB_INLINE Weights read(const T* p) { return load(p); }
  static LB_INLINE Weights read(const T* p, int n) { return load(p, n); }
  static LB_INLINE void pack(char* packed, Weights x) { memcpy(packed, &x, sizeof(x)); }
  static LB_INLINE VF multiply_add(VF sum, Weights w, const char* x) {
    VF xs;
    memcpy(&xs, x, sizeof(xs));
    return fma(w, xs, sum);
  }
};

// A full vector of bf16: pairs of neighbours.
typedef uint16_t VPairs __attribute__((vector_size(kVecBytes)));

LB_INLINE VPairs read_pairs(const bf16* p) {
  VPairs v;
  memcpy(&v, p, sizeof(v));
  return v;
}
LB_INLINE VPairs read_pairs(const bf16* p, int n) {
#if defined(__AVX512BW__)
  return (VPairs)_mm512_maskz_loadu_epi16((1u << n) - 1u, p);
#else
  bf16 lanes[2 * kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return read_pairs(lanes);
#endif
}

#if defined(__AVX512BF16__)
// Both of a pair at once, summed in fp32.
template <>
struct Step<bf16> {
  typedef VPairs Weights;
  static constexpr int kSize = 2 * kLanes;
  static constexpr int kPackedBytes = kVecBytes;
  static LB_INLINE Weights read(const bf16* p) { return read_pairs(p); }
  static LB_INLINE Weights read(const bf16* p, int n) { return read_pairs(p, n); }
  static LB_INLINE void pack(char* packed, Weights x) { memcpy(packed, &x, sizeof(x)); }
  static LB_INLINE VF multiply_add(VF sum, Weights w, const char* x) {
    Weights xs;
    memcpy(&xs, x, sizeof(xs));
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)xs);
  }
};
#else
// bf16 is the upper half of fp32, so of a pair a shift makes the first a float and a mask the second,
// with no lane crossing another. x is packed in that same order: firsts, then seconds.
template <>
struct Step<bf16> {
  struct Weights {
    VF first, second;
  };
  static constexpr int kSize = 2 * kLanes;
  static constexpr int kPackedBytes = 2 * kVecBytes;
  static LB_INLINE Weights split(VPairs v) {
    const VU bits = (VU)v;
    return {as_float(bits << 16), as_float(bits & 0xffff0000u)};
  }
  static LB_INLINE Weights read(const bf16* p) { return split(read_pairs(p)); }
  static LB_INLINE Weights read(const bf16* p, int n) { return split(read_pairs(p, n)); }
  static LB_INLINE void pack(char* packed, Weights x) {
    memcpy(packed, &x.first, kVecBytes);
    memcpy(packed + kVecBytes, &x.second, kVecBytes);
  }
  static LB_INLINE VF multiply_add(VF sum, Weights w, const char* x) {
    VF first, second;
    memcpy(&first, x, kVecBytes);
    memcpy(&second, x + kVecBytes, kVecBytes);
    return fma(w.second, second, fma(w.first, first, sum));
  }
};
#endif

template <typename T>
int64_t steps_of(int64_t k) {
  return (k + Step<T>::kSize - 1) / Step<T>::kSize;
}

template <typename T>
void pack(const T* x, int64_t rows, int64_t k, char* packed) {
  typedef Step<T> S;
  for (int64_t group = 0; group < rows; group += kTileX) {
    const int64_t width = rows - group < kTileX ? rows - group : kTileX;
    for (int64_t at = 0; at < k; at += S::kSize) {
      for (int64_t row = group; row < group + width; ++row) {
        const T* source = x + row * k + at;
        S::pack(packed, k - at < S::kSize ? S::read(source, static_cast<int>(k - at)) : S::read(source));
        packed += S::kPackedBytes;
      }
    }
  }
}

// One step of a tile: N rows of weight, X rows of x.
template <typename T, int N, int X>
LB_INLINE void tile_step(VF (&sums)[X][N], const typename Step<T>::Weights (&w)[N], const char* x) {
  LB_UNROLL for (int r = 0; r < X; ++r) {
    LB_UNROLL for (int n = 0; n < N; ++n) {
      sums[r][n] = Step<T>::multiply_add(sums[r][n], w[n], x + r * Step<T>::kPackedBytes);
    }
  }
}

// sums[r * kPanel + n] = weight row n times x row r. Meanwhile fetches the same columns of Ahead rows
// of weight from `next` on: a tile reads several rows at once, and the hardware's own prefetching, which
// follows each of them to its end, would begin anew with every tile.
template <typename T, int N, int X, int Ahead>
__attribute__((noinline)) void tile(const T* weight, int64_t stride, const char* x, int64_t k, const T* next,
                                    float* sums) {
  typedef Step<T> S;
  constexpr int kUnroll = kLine / (S::kSize * static_cast<int>(sizeof(T)));
  constexpr int kXBytes = X * S::kPackedBytes;
  VF parts[X][N], totals[X][N];
  typename S::Weights w[N];
  LB_UNROLL for (int r = 0; r < X; ++r) {
    LB_UNROLL for (int n = 0; n < N; ++n) totals[r][n] = parts[r][n] = VF{};
  }
  int64_t at = 0;
  while (at + kUnroll * S::kSize <= k) {
    const int64_t rest = k - at - (k - at) % (kUnroll * S::kSize);
    const int64_t stop = at + (rest < kPart * S::kSize ? rest : kPart * S::kSize);
    for (; at < stop; at += kUnroll * S::kSize, x += kUnroll * kXBytes) {
      LB_UNROLL for (int n = 0; n < Ahead; ++n) __builtin_prefetch(next + n * stride + at);
      LB_UNROLL for (int u = 0; u < kUnroll; ++u) {
        LB_UNROLL for (int n = 0; n < N; ++n) w[n] = S::read(weight + n * stride + at + u * S::kSize);
        tile_step<T, N, X>(parts, w, x + u * kXBytes);
      }
    }
    LB_UNROLL for (int r = 0; r < X; ++r) {
      LB_UNROLL for (int n = 0; n < N; ++n) {
        totals[r][n] += parts[r][n];
        parts[r][n] = VF{};
      }
    }
  }
  for (; at + S::kSize <= k; at += S::kSize, x += kXBytes) {
    LB_UNROLL for (int n = 0; n < N; ++n) w[n] = S::read(weight + n * stride + at);
    tile_step<T, N, X>(parts, w, x);
  }
  if (at < k) {
    LB_UNROLL for (int n = 0; n < N; ++n) w[n] = S::read(weight + n * stride + at, static_cast<int>(k - at));
    tile_step<T, N, X>(parts, w, x);
  }
  LB_UNROLL for (int r = 0; r < X; ++r) {
    LB_UNROLL for (int n = 0; n < N; ++n) sums[r * kPanel + n] = sum(totals[r][n] + parts[r][n]);
  }
}

// One row of x. The rows of weight are walked one after the other, so that the reads are a single stream,
// which the hardware prefetches best; four sums hide the latency of the addition.
template <typename T>
float dot(const T* weight, const char* x, int64_t k) {
  typedef Step<T> S;
  constexpr int kSums = 4;
  VF sums[1][kSums] = {};
  int64_t at = 0;
  for (; at + kSums * S::kSize <= k; at += kSums * S::kSize, x += kSums * S::kPackedBytes) {
    LB_UNROLL for (int i = 0; i < kSums; ++i) {
      sums[0][i] = S::multiply_add(sums[0][i], S::read(weight + at + i * S::kSize), x + i * S::kPackedBytes);
    }
  }
  for (; at + S::kSize <= k; at += S::kSize, x += S::kPackedBytes) {
    sums[0][0] = S::multiply_add(sums[0][0], S::read(weight + at), x);
  }
  if (at < k) {
    sums[0][1] = S::multiply_add(sums[0][1], S::read(weight + at, static_cast<int>(k - at)), x);
  }
  return sum((sums[0][0] + sums[0][1]) + (sums[0][2] + sums[0][3]));
}

// All rows of x against N rows of weight; `next` is where the rows of the next tile begin.
template <typename T, int N>
void tile_rows(const LinearArgs& args, const T* weight, const T* next, float* sums) {
  const int64_t group_bytes = kTileX * steps_of<T>(args.k) * Step<T>::kPackedBytes;
  const char* x = static_cast<const char*>(args.packed_x);
  const int64_t stride = args.weight_stride, k = args.k;
  for (int64_t row = 0; row < args.rows; row += kTileX, x += group_bytes, sums += kTileX * kPanel) {
    // The next tile is fetched while the first group passes; the others find this tile in the cache.
    const bool fetch = row == 0;
    switch (args.rows - row) {
      case 1:
        tile<T, N, 1, 0>(weight, stride, x, k, next, sums);
        break;
      case 2:
        fetch ? tile<T, N, 2, N>(weight, stride, x, k, next, sums)
              : tile<T, N, 2, 0>(weight, stride, x, k, next, sums);
        break;
      case 3:
        fetch ? tile<T, N, 3, N>(weight, stride, x, k, next, sums)
              : tile<T, N, 3, 0>(weight, stride, x, k, next, sums);
        break;
      default:
        fetch ? tile<T, N, 4, N>(weight, stride, x, k, next, sums)
              : tile<T, N, 4, 0>(weight, stride, x, k, next, sums);
    }
  }
}

template <typename T>
void write_panel(const LinearArgs& args, int64_t begin, int64_t count, const float* sums) {
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t row = 0; row < args.rows; ++row, sums += kPanel) {
    T* out = static_cast<T*>(args.out) + row * args.n + begin;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const VF v = load(sums + i);
      store(out + i, bias ? v + load(bias + begin + i) : v);
    }
    if (i < count) {
      const int rest = static_cast<int>(count - i);
      const VF v = load(sums + i, rest);
      store(out + i, bias ? v + load(bias + begin + i, rest) : v, rest);
    }
  }
}

template <typename T>
void run(const LinearArgs& args, int64_t begin, int64_t end) {
  float sums[kLinearRows * kPanel];
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    const T* weight = static_cast<const T*>(args.weight) + begin * args.weight_stride;
    int64_t i = 0;
    if (args.rows == 1) {
      const char* x = static_cast<const char*>(args.packed_x);
      for (; i < count; ++i) sums[i] = dot(weight + i * args.weight_stride, x, args.k);
    } else {
      for (; i + kTileN <= count; i += kTileN) {
        const T* tile_weight = weight + i * args.weight_stride;
        // Behind the last tile lies no other: fetch what is there already.
        const bool last = begin + i + 2 * kTileN > end;
        tile_rows<T, kTileN>(args, tile_weight,
                             last ? tile_weight : tile_weight + kTileN * args.weight_stride, sums + i);
      }
      for (; i < count; ++i) {
        const T* tile_weight = weight + i * args.weight_stride;
        tile_rows<T, 1>(args, tile_weight, tile_weight, sums + i);
      }
    }
    write_panel<T>(args, begin, count, sums);
  }
}

double stream_sum(const float* x, int64_t count) {
  constexpr int kSums = 8;
  VF sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= count; i += kSums * kLanes) {
    LB_UNROLL for (int j = 0; j < kSums; ++j) sums[j] += load(x + i + j * kLanes);
  }
  double total = 0.0;
  for (int j = 0; j < kSums; ++j) total += sum(sums[j]);
  for (; i < count; ++i) total += x[i];
  return total;
}

int64_t packed_bytes_any(DType dtype, int64_t rows, int64_t k) {
  LB_DISPATCH_DTYPE(dtype, T, return rows * steps_of<T>(k) * Step<T>::kPackedBytes);
  return 0;
}

void pack_any(DType dtype, const void* x, int64_t rows, int64_t k, void* packed) {
  LB_DISPATCH_DTYPE(dtype, T, pack<T>(static_cast<const T*>(x), rows, k, static_cast<char*>(packed)));
}

void run_any(DType dtype, const LinearArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(dtype, T, run<T>(args, begin, end));
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {packed_bytes_any, pack_any, run_any, stream_sum};

}  // namespace LB_ISA
}  // namespace liteboost
