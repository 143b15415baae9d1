#include "quantize_weight/quantize_weight.h"

#include "common/vec.h"
#include "common/vec_double.h"
#include "common/vec_integers.h"
#include "common/vec_math.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Where the largest magnitude of a group may come to lie, in integers. Less than the end of the range keeps all of it;
// more clips the largest weights, so that the others are rounded finer.
constexpr float kW8Ends[] = {127.0f, 130.0f, 134.0f};
constexpr float kW4Ends[] = {7.0f, 7.5f, 8.0f, 8.5f, 9.0f};
// How much of the range of a group an asymmetric scale covers.
constexpr float kW4Shares[] = {1.0f, 0.95f, 0.9f, 0.85f};

// Integers that a group is rounded to, less its zero point.
struct Limits {
  float low, high;
};

// What stands for zero in a group of zeros with zero points: integers less 8 are what kernels multiply, and add up to none.
constexpr float kMiddle = 8.0f;

LB_INLINE float no_zero(float divisor) { return divisor == 0.0f ? 1.0f : divisor; }

// Clamped before they are rounded, which gives the same integers.
LB_INLINE VF quotients(VF weights, float divisor, Limits limits) {
  return min(max(weights / splat(divisor), splat(limits.low)), splat(limits.high));
}

LB_INLINE VF rounded(VF weights, float divisor, Limits limits) {
  return (quotients(weights, divisor, limits) + kToInteger) - kToInteger;
}

// Scales of as many candidates as there may be.
constexpr int kCandidates = 8;

template <typename T>
void round_scales(float (&scales)[kCandidates]) {
  for_lanes(kCandidates, [&](int64_t i, auto n) { store(scales + i, round_to<T>(load(scales + i, n)), n); });
}

void store_scale(void* scales, int64_t at, float scale, DType dtype) {
  LB_DISPATCH_DTYPE(dtype, T, store(static_cast<T*>(scales) + at, splat(scale), 1));
}

struct Sums {
  double products, squares;  // of weights and integers; of integers
};

// Sums of so many squares of integers, 127^2 at most, are exact in each lane.
constexpr int64_t kExactColumns = 1024 * kLanes;

template <typename T>
LB_INLINE Sums sums_of(const T* weights, int64_t count, float divisor, Limits limits) {
  VD products[2] = {};
  double squares = 0.0;
  for (int64_t first = 0; first < count; first += kExactColumns) {
    const int64_t columns = count - first < kExactColumns ? count - first : kExactColumns;
    VF exact{};
    for_lanes(columns, [&](int64_t i, auto n) {
      const VF w = load(weights + first + i, n), q = rounded(w, divisor, limits);
      products[0] = fma(low_half(w), low_half(q), products[0]);
      products[1] = fma(high_half(w), high_half(q), products[1]);
      exact = fma(q, q, exact);
    });
    squares += sum(low_half(exact) + high_half(exact));
  }
  return {sum(products[0] + products[1]), squares};
}

// What is known of a group before it is rounded.
struct Extent {
  float lowest, highest;
  double squares;  // not finite where a weight is not
};

template <typename T>
LB_INLINE Extent extent_of(const T* weights, int64_t count) {
  VF least{}, largest{};  // zero is in the range of every group
  VD squares[2] = {};
  for_lanes(count, [&](int64_t i, auto n) {
    const VF w = load(weights + i, n);
    least = min(w, least);
    largest = max(w, largest);
    squares[0] = fma(low_half(w), low_half(w), squares[0]);
    squares[1] = fma(high_half(w), high_half(w), squares[1]);
  });
  return {-hmax(-least), hmax(largest), sum(squares[0] + squares[1])};
}

struct Fit {
  float scale, zero;
};

// What comes of each place where the largest weight may lie. Those that are not used have no scale.
struct Candidates {
  float scales[kCandidates], zeros[kCandidates];
  double products[kCandidates], squares[kCandidates];

  Candidates() {
    for (int i = 0; i < kCandidates; ++i) {
      scales[i] = __builtin_nanf("");
      zeros[i] = 0.0f;
      products[i] = squares[i] = 0.0;
    }
  }
  void set(int i, float scale, float zero, const Sums& sums) {
    scales[i] = scale;
    zeros[i] = zero;
    products[i] = sums.products;
    squares[i] = sums.squares;
  }
};

// The candidate of least squared error, of a group whose squares add up to `total`. Without branches on errors, of which
// a CPU would guess half wrong.
LB_INLINE Fit best_of(const Candidates& candidates, double total, DType scale_dtype) {
  float scales[kCandidates];
  for (int i = 0; i < kCandidates; ++i) {
    // Of all scales for these integers, the one of least squares.
    const double fitted = candidates.products[i] / candidates.squares[i];
    scales[i] = candidates.squares[i] > 0.0 ? static_cast<float>(fitted) : candidates.scales[i];
  }
  LB_DISPATCH_DTYPE(scale_dtype, T, round_scales<T>(scales));
  double errors[kCandidates], least = __builtin_inf();
  for (int i = 0; i < kCandidates; ++i) {
    const double scale = scales[i];
    errors[i] = total - scale * (2.0 * candidates.products[i] - scale * candidates.squares[i]);
    least = errors[i] < least ? errors[i] : least;
  }
  int best = kCandidates;
  for (int i = kCandidates; i-- > 0;) best = errors[i] == least ? i : best;
  if (best == kCandidates || least == __builtin_inf()) return {__builtin_nanf(""), kMiddle};
  // Of numbers so small that no scale is left of them, it is 1.
  return scales[best] == 0.0f ? Fit{1.0f, kMiddle} : Fit{scales[best], candidates.zeros[best]};
}

template <typename T>
LB_INLINE Fit symmetric_fit(const T* weights, int64_t count, const Extent& extent, const float* ends,
                            int ways, Limits limits, DType scale_dtype) {
  float largest = max(splat(-extent.lowest), splat(extent.highest))[0];
  // The largest magnitude goes to the end that reaches further: scales may be negative.
  if (-limits.low > limits.high && -extent.lowest < extent.highest) largest = -largest;
  Candidates candidates;
  for (int i = 0; i < ways; ++i) {
    const float scale = largest / ends[i];
    candidates.set(i, scale, 0.0f, sums_of(weights, count, no_zero(scale), limits));
  }
  return best_of(candidates, extent.squares, scale_dtype);
}

template <typename T>
LB_INLINE Fit asymmetric_fit(const T* weights, int64_t count, const Extent& extent, DType scale_dtype) {
  Candidates candidates;
  int i = 0;
  for (const float share : kW4Shares) {
    const float lowest = extent.lowest * share, highest = extent.highest * share;
    const float scale = (highest - lowest) / 15.0f;
    const float zero = rounded(splat(-lowest), no_zero(scale), {0.0f, 15.0f})[0];
    candidates.set(i++, scale, zero, sums_of(weights, count, no_zero(scale), {-zero, 15.0f - zero}));
  }
  return best_of(candidates, extent.squares, scale_dtype);
}

LB_INLINE bool is_finite(double x) { return x - x == 0.0; }

template <typename T>
void w8_rows(const QuantizeWeightArgs& args, int64_t begin, int64_t end) {
  constexpr Limits limits = {-127.0f, 127.0f};
  for (int64_t row = begin; row < end; ++row) {
    const T* weights = static_cast<const T*>(args.weight) + row * args.stride;
    int8_t* integers = static_cast<int8_t*>(args.integers) + row * args.cols;
    const Extent extent = extent_of(weights, args.cols);
    Fit fit = {extent.squares == 0.0 ? 1.0f : __builtin_nanf(""), 0.0f};
    if (is_finite(extent.squares) && extent.squares > 0.0) {
      fit = symmetric_fit(weights, args.cols, extent, kW8Ends, 3, limits, args.scale_dtype);
    }
    store_scale(args.scales, row, fit.scale, args.scale_dtype);
    if (fit.scale != fit.scale) {
      memset(integers, 0, static_cast<size_t>(args.cols));
      continue;
    }
    for_lanes(args.cols, [&](int64_t i, auto n) {
      store(integers + i, round_bytes(quotients(load(weights + i, n), fit.scale, limits)), n);
    });
  }
}

// 32 integers of 0 to 15 in 16 bytes.
LB_INLINE void pack(const int32_t (&integers)[kPackedColumns], uint8_t* out) {
  typedef int32_t Words __attribute__((vector_size(32)));
  typedef uint16_t Halves __attribute__((vector_size(16)));
  Words nibbles[4];
  memcpy(nibbles, integers, sizeof(nibbles));
  const Words words = nibbles[0] | nibbles[1] << 4 | nibbles[2] << 8 | nibbles[3] << 12;
  const Halves halves = __builtin_convertvector(words, Halves);
  memcpy(out, &halves, sizeof(halves));
}

template <typename T>
LB_INLINE void pack_group(const T* weights, int64_t count, const Fit& fit, Limits limits, float zero,
                          uint8_t* out) {
  for (int64_t first = 0; first < count; first += kPackedColumns) {
    int32_t integers[kPackedColumns];
    for (int i = 0; i < kPackedColumns; i += kLanes) {
      const VF q = rounded(load(weights + first + i), fit.scale, limits) + splat(zero);
      const VI whole = __builtin_convertvector(q, VI);
      memcpy(integers + i, &whole, sizeof(whole));
    }
    pack(integers, out + first / 2);
  }
}

// `kGroup`: the size of a group where it is known here, else 0.
template <typename T, int64_t kGroup>
void w4_rows(const QuantizeWeightArgs& args, int64_t begin, int64_t end) {
  const int64_t size = kGroup != 0 ? kGroup : args.group_size, groups = args.cols / size;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const T* weights = static_cast<const T*>(args.weight) + row * args.stride + group * size;
      uint8_t* out = static_cast<uint8_t*>(args.integers) + (row * args.cols + group * size) / 2;
      const Extent extent = extent_of(weights, size);
      Fit fit = {extent.squares == 0.0 ? 1.0f : __builtin_nanf(""), kMiddle};
      if (is_finite(extent.squares) && extent.squares > 0.0) {
        fit = args.symmetric
                  ? symmetric_fit(weights, size, extent, kW4Ends, 5, {-8.0f, 7.0f}, args.scale_dtype)
                  : asymmetric_fit(weights, size, extent, args.scale_dtype);
      }
      const float zero = args.symmetric ? kMiddle : fit.zero;
      const int64_t at = row * groups + group;
      store_scale(args.scales, at, fit.scale, args.scale_dtype);
      args.zero_points[at] = static_cast<uint8_t>(zero);
      if (fit.scale != fit.scale) {
        memset(out, static_cast<int>(zero) * 0x11, static_cast<size_t>(size / 2));
      } else {
        pack_group(weights, size, fit, {-zero, 15.0f - zero}, zero, out);
      }
    }
  }
}

void w8(const QuantizeWeightArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T, w8_rows<T>(args, begin, end));
}

void w4(const QuantizeWeightArgs& args, int64_t begin, int64_t end) {
  if (args.group_size == 32) {
    LB_DISPATCH_DTYPE(args.dtype, T, w4_rows<T, 32>(args, begin, end));
  } else {
    LB_DISPATCH_DTYPE(args.dtype, T, w4_rows<T, 0>(args, begin, end));
  }
}

}  // namespace

extern const QuantizeWeightKernels quantize_weight_kernels = {w8, w4};

}  // namespace LB_ISA
}  // namespace liteboost
