// The loops of batch_invariant.h, on raw pointers; compiled once an instruction set.
#include "batch_invariant/batch_invariant.h"
#include "common/vec.h"
#include "common/vec_double.h"
#include "common/vec_math.h"

#define LB_UNROLL _Pragma("GCC unroll 8")

namespace liteboost {
namespace LB_ISA {
namespace {

constexpr int kRows = 4;
// Of k: rows of x in double stay in the first cache.
constexpr int64_t kStep = 256;
static_assert(kStep % kLanes == 0 && kProductColumns % kLanes == 0, "whole vectors");

LB_INLINE VD load_doubles(const double* p) {
  VD v;
  memcpy(&v, p, sizeof(v));
  return v;
}
LB_INLINE void store_doubles(double* p, VD v) { memcpy(p, &v, sizeof(v)); }

// x[0, n) in double, and zeros up to a whole vector.
template <typename T>
LB_INLINE void widen_row(const T* x, int64_t n, double* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const VF v = n - i < kLanes ? load(x + i, static_cast<int>(n - i)) : load(x + i);
    store_doubles(out + i, low_half(v));
    store_doubles(out + i + kLanes / 2, high_half(v));
  }
}

// sums[r][j] += x[r][0, n) * y[0, n)[j], where outputs lie side by side.
template <typename T, int rows>
void add_columns(const double (&x)[kRows][kStep], int64_t n, const T* y, int64_t row_step, int64_t columns,
                 double (&sums)[kRows][kProductColumns]) {
  for (int64_t j = 0; j < columns; j += kLanes) {
    const int left = static_cast<int>(columns - j < kLanes ? columns - j : kLanes);
    VD low[rows], high[rows];
    LB_UNROLL for (int r = 0; r < rows; ++r) {
      low[r] = load_doubles(sums[r] + j);
      high[r] = load_doubles(sums[r] + j + kLanes / 2);
    }
    for (int64_t i = 0; i < n; ++i) {
      const T* from = y + i * row_step + j;
      const VF v = left < kLanes ? load(from, left) : load(from);
      const VD v_low = low_half(v), v_high = high_half(v);
      LB_UNROLL for (int r = 0; r < rows; ++r) {
        const VD by = VD{} + x[r][i];
        low[r] = fma(by, v_low, low[r]);
        high[r] = fma(by, v_high, high[r]);
      }
    }
    LB_UNROLL for (int r = 0; r < rows; ++r) {
      store_doubles(sums[r] + j, low[r]);
      store_doubles(sums[r] + j + kLanes / 2, high[r]);
    }
  }
}

// The same where the elements of one output lie side by side.
template <typename T, int rows>
void add_dots(const double (&x)[kRows][kStep], int64_t n, const T* y, int64_t column_step, int64_t columns,
              double (&sums)[kRows][kProductColumns]) {
  for (int64_t j = 0; j < columns; ++j) {
    VD low[rows] = {}, high[rows] = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      const T* from = y + j * column_step + i;
      const VF v = n - i < kLanes ? load(from, static_cast<int>(n - i)) : load(from);
      const VD v_low = low_half(v), v_high = high_half(v);
      LB_UNROLL for (int r = 0; r < rows; ++r) {
        low[r] = fma(load_doubles(x[r] + i), v_low, low[r]);
        high[r] = fma(load_doubles(x[r] + i + kLanes / 2), v_high, high[r]);
      }
    }
    LB_UNROLL for (int r = 0; r < rows; ++r) sums[r][j] += sum(low[r] + high[r]);
  }
}

template <typename T>
void write_row(const BatchedProductArgs& args, const double* sums, int64_t batch, int64_t row, int64_t begin,
               int64_t columns) {
  float found[kProductColumns];
  if (args.add == nullptr) {
    for (int64_t j = 0; j < columns; ++j) found[j] = static_cast<float>(args.alpha * sums[j]);
  } else {
    const T* add = static_cast<const T*>(args.add) + batch * args.add_strides[0] + row * args.add_strides[1] +
                   begin * args.add_strides[2];
    for (int64_t j = 0; j < columns; ++j) {
      const T one[kLanes] = {add[j * args.add_strides[2]]};
      found[j] = static_cast<float>(args.beta * static_cast<double>(load(one)[0]) + args.alpha * sums[j]);
    }
  }
  T* out = static_cast<T*>(args.out) + (batch * args.rows + row) * args.columns + begin;
  int64_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) store(out + j, load(found + j));
  if (j < columns)
    store(out + j, load(found + j, static_cast<int>(columns - j)), static_cast<int>(columns - j));
}

template <typename T, int rows>
void product_rows(const BatchedProductArgs& args, int64_t batch, int64_t row, int64_t begin,
                  int64_t columns) {
  const T* x = static_cast<const T*>(args.x) + batch * args.x_batch_stride + row * args.x_row_stride;
  const T* y = static_cast<const T*>(args.y) + batch * args.y_batch_stride + begin * args.y_column_step;
  double sums[kRows][kProductColumns] = {};
  double wide[kRows][kStep];
  for (int64_t at = 0; at < args.k; at += kStep) {
    const int64_t n = args.k - at < kStep ? args.k - at : kStep;
    for (int r = 0; r < rows; ++r) widen_row(x + r * args.x_row_stride + at, n, wide[r]);
    const T* from = y + at * args.y_row_step;
    if (args.y_column_step == 1) {
      add_columns<T, rows>(wide, n, from, args.y_row_step, columns, sums);
    } else {
      add_dots<T, rows>(wide, n, from, args.y_column_step, columns, sums);
    }
  }
  for (int r = 0; r < rows; ++r) write_row<T>(args, sums[r], batch, row + r, begin, columns);
}

template <typename T>
void product_of(const BatchedProductArgs& args, int64_t begin, int64_t end) {
  const int64_t blocks = (args.columns + kProductColumns - 1) / kProductColumns;
  for (; begin < end; ++begin) {
    const int64_t batch = begin / blocks, first = begin % blocks * kProductColumns;
    const int64_t left = args.columns - first;
    const int64_t columns = left < kProductColumns ? left : kProductColumns;
    int64_t row = 0;
    for (; row + kRows <= args.rows; row += kRows) product_rows<T, kRows>(args, batch, row, first, columns);
    for (; row < args.rows; ++row) product_rows<T, 1>(args, batch, row, first, columns);
  }
}

typedef int64_t VL __attribute__((vector_size(kVecBytes)));

// Added to e in [0, 1] it leaves e, rounded to a multiple of 2^-40, as an integer in the low bits.
constexpr double kToMultiple = 6144.0;  // 1.5 * 2^12
constexpr double kMultiple = 1.0 / (1LL << 40);

LB_INLINE VL multiples_of(VD e) {
  const VD magic = VD{} + kToMultiple;
  return reinterpret_cast<VL>(e + magic) - reinterpret_cast<VL>(magic);
}

// The first n lanes of v, and `other` in those behind.
LB_INLINE VF first_lanes(VF v, int n, float other) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = n; i < kLanes; ++i) lanes[i] = other;
  return load(lanes);
}

// Calls f(i, v, n) for each vector of x, of which n lanes hold elements and the others -inf.
template <typename T, typename F>
LB_INLINE void each_vector(const T* x, int64_t columns, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) f(i, load(x + i), kLanes);
  if (i < columns) {
    const int n = static_cast<int>(columns - i);
    f(i, first_lanes(load(x + i, n), n, -__builtin_inff()), n);
  }
}

template <typename T>
void softmax_of(const SoftmaxArgs& args, int64_t begin, int64_t end) {
  for (; begin < end; ++begin) {
    const T* x = static_cast<const T*>(args.x) + begin * args.columns;
    T* out = static_cast<T*>(args.out) + begin * args.columns;
    VF most = splat(-__builtin_inff());
    VI nan = {};
    each_vector(x, args.columns, [&](int64_t, VF v, int) __attribute__((always_inline)) {
      most = max(v, most);
      nan |= v != v;
    });
    const float largest = hmax(most);
    bool is_nan = !(largest - largest == 0.0f);
    for (int i = 0; i < kLanes; ++i) is_nan = is_nan || nan[i] != 0;
    VL low = {}, high = {};
    each_vector(x, args.columns, [&](int64_t, VF v, int) __attribute__((always_inline)) {
      const VF e = exp(v - splat(largest));
      low += multiples_of(low_half(e));
      high += multiples_of(high_half(e));
    });
    int64_t total = 0;
    for (int i = 0; i < kLanes / 2; ++i) total += low[i] + high[i];
    const VF sum =
        splat(is_nan ? __builtin_nanf("") : static_cast<float>(static_cast<double>(total) * kMultiple));
    each_vector(x, args.columns, [&](int64_t i, VF v, int n) __attribute__((always_inline)) {
      const VF share = exp(v - splat(largest)) / sum;
      n < kLanes ? store(out + i, share, n) : store(out + i, share);
    });
  }
}

void product(const BatchedProductArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T, product_of<T>(args, begin, end));
}

void softmax(const SoftmaxArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T, softmax_of<T>(args, begin, end));
}

}  // namespace

const BatchInvariantKernels batch_invariant_kernels = {&product, &softmax};

}  // namespace LB_ISA
}  // namespace liteboost
