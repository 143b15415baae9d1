// The loops of linear_w8a8. Compiled once an instruction set.
//
#include "int8_linear/int8_linear.h"

#include "common/largest.h"
#include "common/prefetch.h"
#include "common/vec.h"
#include "int8_linear/int8_products.h"
#if defined(__AMX_INT8__)
#include "int8_linear/int8_linear_amx.h"
#elif defined(__AVX512F__)
#include "int8_linear/int8_linear_tiles.h"
#endif

namespace liteboost {
namespace LB_ISA {
namespace {

// ---- x ----

// 1.5 * 2^23: added to a number of small magnitude, it leaves that rounded to an integer in the lowest bits.
constexpr float kRounder = 12582912.0f;

#if defined(__aarch64__)
LB_INLINE VI rounded(VF v) { return (VI)vcvtnq_s32_f32((float32x4_t)v); }
#else
LB_INLINE VI rounded(VF v) { return (VI)as_uint(v + splat(kRounder)) << 24 >> 24; }
#endif

#if defined(__aarch64__)
LB_INLINE int32_t sum_of(VI v) { return vaddvq_s32((int32x4_t)v); }
#else
LB_INLINE int32_t sum_of(VI v) {
  int32_t lanes[kLanes], total = 0;
  memcpy(lanes, &v, sizeof(v));
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}
#endif

template <typename T>
void quantize_row(const Int8LinearArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.x) + row * args.k;
  const float limit = largest_of(x, args.k);
  const bool is_finite = limit == limit;
  const int64_t count = words(args.k);
  int32_t* to = args.words + row * count;
  args.row_scales[row] = limit / 127.0f;
  args.row_offsets[row] = 0;
  memset(to + count - kLanes, 0, kLanes * sizeof(int32_t));
  if (!is_finite) {
    memset(to, 0, static_cast<size_t>(count) * sizeof(int32_t));
    return;
  }
  Integer* integers = reinterpret_cast<Integer*>(to);
  const VF factor = splat(127.0f / limit);
  VI total{};
  for_lanes(args.k, [&](int64_t i, auto n) {
    const VI q = rounded(load(x + i, n) * factor);
#if defined(__ARM_FEATURE_DOTPROD)
    const VB narrow = narrow_bytes(q);
#else
    typedef Integer Narrow __attribute__((vector_size(kLanes * sizeof(Integer))));
    const Narrow narrow = __builtin_convertvector(q, Narrow);
#endif
    memcpy(integers + i, &narrow, sizeof(narrow));
    total += q;
  });
  if constexpr (kOffset != 0) args.row_offsets[row] = kOffset * sum_of(total);
}

// ---- results ----

template <typename T>
LB_INLINE VF load_some(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load(p, static_cast<int>(n));
}

// Sums of row `row` and the outputs from `column` on, of which those below n are there.
template <typename T>
LB_INLINE void finish(const Int8LinearArgs& args, VI sums, int64_t row, int64_t column) {
  const int64_t n = args.n - column;
  VF value = __builtin_convertvector(sums - args.row_offsets[row], VF);
  value = value * load_some(args.scales + column, n) * splat(args.row_scales[row]);
  if (args.bias != nullptr) value += load_some(static_cast<const T*>(args.bias) + column, n);
  T* out = static_cast<T*>(args.out) + row * args.n + column;
  n >= kLanes ? store(out, value) : store(out, value, static_cast<int>(n));
}

// ---- few rows: the weight as it lies ----

constexpr int kFewWeights = 4;
#if defined(__AVX512F__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int kFewRows = 4;
#else
constexpr int kFewRows = 2;
#endif

// Sums of kFewWeights rows of weight with `rows` rows of x, to totals[row * kLanes + weight].
#if defined(__ARM_FEATURE_DOTPROD)
template <int rows>
LB_INLINE void dot(const int8_t* weight, int64_t k, const int32_t* x, int64_t count, int32_t* totals) {
  // With few rows several sums each hide the latency of the addition.
  constexpr int kSets = 4 / rows;
  VI sums[kSets][kFewWeights][rows] = {};
  const auto add = [&](int64_t w, int64_t column, int set, auto load_weights) __attribute__((always_inline)) {
    VI words[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) words[r] = load_words(x + r * count + w);
#pragma GCC unroll 4
    for (int i = 0; i < kFewWeights; ++i) {
      const VI q = load_weights(weight + i * k + column);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) sums[set][i][r] = multiply_add(sums[set][i][r], q, words[r]);
    }
  };
  // A line of 64 bytes at a time, for each of which the one that is next is asked for once.
  constexpr int64_t kLine = 64 / sizeof(VI);
  int64_t w = 0, column = 0;
  for (; column + kLine * kColumns <= k; w += kLine * kLanes, column += kLine * kColumns) {
#pragma GCC unroll 4
    for (int i = 0; i < kFewWeights; ++i) __builtin_prefetch(weight + (kFewWeights + i) * k + column);
#pragma GCC unroll 4
    for (int j = 0; j < kLine; ++j)
      add(w + j * kLanes, column + j * kColumns, j % kSets, [](const int8_t* p) { return read(p); });
  }
  for (; w < count; w += kLanes, column += kColumns)
    add(w, column, 0, [&](const int8_t* p) { return read(p, k - column); });
  for (int i = 0; i < kFewWeights; ++i) {
    for (int r = 0; r < rows; ++r) {
      VI sum = sums[0][i][r];
      for (int set = 1; set < kSets; ++set) sum += sums[set][i][r];
      totals[r * kLanes + i] = sum_of(sum);
    }
  }
}
#else
template <int rows>
LB_INLINE void dot(const int8_t* weight, int64_t k, const int32_t* x, int64_t count, int32_t* totals) {
  VI sums[kFewWeights][rows] = {};
  for (int64_t w = 0, column = 0; w < count; w += kLanes, column += kColumns) {
#pragma GCC unroll 4
    for (int i = 0; i < kFewWeights; ++i) {
      const int8_t* at = weight + i * k + column;
      // The rows that are next.
      __builtin_prefetch(at + kFewWeights * k);
#if defined(__AMX_BF16__)
      fetch_stream_ahead<0>(reinterpret_cast<const char*>(at));
#endif
      const VI q = read(at, k - column);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) sums[i][r] = multiply_add(sums[i][r], q, load_words(x + r * count + w));
    }
  }
  for (int i = 0; i < kFewWeights; ++i) {
    for (int r = 0; r < rows; ++r) {
#if defined(__AVX512F__)
      totals[r * kLanes + i] = _mm512_reduce_add_epi32((__m512i)sums[i][r]);
#else
      totals[r * kLanes + i] = sum_of(sums[i][r]);
#endif
    }
  }
}
#endif

// One row of weight at a time: the last ones of a layer.
template <int rows>
void dot_one(const int8_t* weight, int64_t k, const int32_t* x, int64_t count, int32_t* totals) {
  VI sums[rows] = {};
  for (int64_t w = 0, column = 0; w < count; w += kLanes, column += kColumns) {
    const VI q = read(weight + column, k - column);
    for (int r = 0; r < rows; ++r) sums[r] = multiply_add(sums[r], q, load_words(x + r * count + w));
  }
  for (int r = 0; r < rows; ++r) totals[r * kLanes] = sum_of(sums[r]);
}

// The kLanes outputs from `column` on, of rows [row, row + rows).
template <typename T, int rows>
void few_rows(const Int8LinearArgs& args, int64_t row, int64_t column) {
  const int64_t count = words(args.k), n = args.n - column < kLanes ? args.n - column : kLanes;
  const int32_t* x = args.words + row * count;
  const int8_t* weight = args.weight + column * args.k;
  int32_t totals[rows * kLanes] = {};
  int64_t i = 0;
  for (; i + kFewWeights <= n; i += kFewWeights) dot<rows>(weight + i * args.k, args.k, x, count, totals + i);
  for (; i < n; ++i) dot_one<rows>(weight + i * args.k, args.k, x, count, totals + i);
  for (int r = 0; r < rows; ++r) finish<T>(args, load_words(totals + r * kLanes), row + r, column);
}

#if defined(__AVX512F__) && !defined(__AMX_INT8__)
// All rows, of which there are few, with outputs [begin, end): rows of weight in the order of memory.
template <typename T, int rows>
void stream(const Int8LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t count = words(args.k);
  for (int64_t column = begin; column < end; column += kLanes) {
    if (column + kLanes > end) return few_rows<T, rows>(args, 0, column);
    VI totals[rows];
    stream_sums<rows>(args.weight + column * args.k, args.k, args.words, count, totals);
    for (int r = 0; r < rows; ++r) finish<T>(args, totals[r], r, column);
  }
}
#endif

template <typename T>
void few(const Int8LinearArgs& args, int64_t begin, int64_t end) {
#if defined(__AMX_INT8__)
  if (args.packed != nullptr) {
    return run_some(args, begin, end,
                    [&](VI sums, int64_t row, int64_t column) { finish<T>(args, sums, row, column); });
  }
#endif
#if defined(__AVX512F__) && !defined(__AMX_INT8__)
  static_assert(kTileRows == 4, "all of these are streamed");
  switch (args.rows) {
    case 1:
      return stream<T, 1>(args, begin, end);
    case 2:
      return stream<T, 2>(args, begin, end);
    case 3:
      return stream<T, 3>(args, begin, end);
    case 4:
      return stream<T, 4>(args, begin, end);
    default:
      break;
  }
  if (args.rows > kTileRows && args.rows <= kTiledRows) {
    const auto one = [&](const int8_t* weight, const int32_t* x) {
      int32_t total;
      dot_one<1>(weight, args.k, x, words(args.k), &total);
      return total;
    };
    const auto to_out = [&](VI sums, int64_t row, int64_t column) { finish<T>(args, sums, row, column); };
    return args.rows <= 3 * kTileRows ? run_tiles<2>(args, begin, end, one, to_out)
                                      : run_tiles<1>(args, begin, end, one, to_out);
  }
#endif
  for (int64_t column = begin; column < end; column += kLanes) {
    int64_t row = 0;
    for (; row + kFewRows <= args.rows; row += kFewRows) few_rows<T, kFewRows>(args, row, column);
    for (; row < args.rows; ++row) few_rows<T, 1>(args, row, column);
  }
}

// ---- many rows: panels ----

void pack(const Int8LinearArgs& args, int64_t panel, int32_t* packed) {
  const int64_t count = words(args.k);
  for (int v = 0; v < kBlockVectors; ++v) {
    const int64_t first = panel * kPanel + v * kLanes;
    for (int64_t w = 0, column = 0; w < count; w += kLanes, column += kColumns) {
      VF block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        block[i] = first + i < args.n ? (VF)read(args.weight + (first + i) * args.k + column, args.k - column)
                                      : VF{};
      }
      pack_block(block, w, v, packed);
    }
  }
}

// Rows [row, row + kBlockRows) with all of the panel from `first` on.
template <typename T>
void tile(const Int8LinearArgs& args, int64_t first, const int32_t* packed, int64_t row) {
  const int64_t count = words(args.k);
  const int32_t* x = args.words + row * count;
  VI sums[kBlockRows][kBlockVectors] = {};
  multiply_panel(x, count, packed, sums);
  for (int r = 0; r < kBlockRows; ++r) {
    for (int v = 0; v < kBlockVectors; ++v) {
      const int64_t column = first + v * kLanes;
      if (column < args.n) finish<T>(args, sums[r][v], row + r, column);
    }
  }
}

// The last tile begins early enough to be a whole one: rows that two tiles write get the same bits twice.
template <typename T>
void run_panels(const Int8LinearArgs& args, const Int8Panels& panels, int64_t begin, int64_t end) {
#if defined(__AMX_INT8__)
  run_panels_of_tiles(args, panels, begin, end,
                      [&](VI sums, int64_t row, int64_t column) { finish<T>(args, sums, row, column); });
  return;
#endif
  const int64_t panel_words = words(args.k) * kPanel;
  for (int64_t row = begin; row < end; row += kBlockRows) {
    for (int64_t i = 0; i < panels.count; ++i) {
      tile<T>(args, (panels.first + i) * kPanel, panels.packed + i * panel_words,
              row + kBlockRows <= end ? row : end - kBlockRows);
    }
  }
}

// ---- by dtype ----

void quantize_any(DType dtype, const Int8LinearArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(dtype, T, for (int64_t row = begin; row < end; ++row) quantize_row<T>(args, row));
}

void few_any(DType dtype, const Int8LinearArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(dtype, T, few<T>(args, begin, end));
}

void panels_any(DType dtype, const Int8LinearArgs& args, const Int8Panels& panels, int64_t begin,
                int64_t end) {
  LB_DISPATCH_DTYPE(dtype, T, run_panels<T>(args, panels, begin, end));
}

#if defined(__AMX_INT8__)
// Tiles are so fast that reading x again for each panel would hold them up.
constexpr int64_t kMostFewRows = 8, kMostPackedRows = kSomeRows, kMostPanels = 4;
#else
#if defined(__AVX512F__)
constexpr int64_t kMostFewRows = kTiledRows;
#else
constexpr int64_t kMostFewRows = 8;
#endif
constexpr int64_t kMostPackedRows = 0, kMostPanels = 1;
int64_t some_words(int64_t, int64_t) { return 0; }
void pack_some(const Int8LinearArgs&, int32_t*) {}
#endif

}  // namespace

extern const Int8LinearKernels int8_linear_kernels;
const Int8LinearKernels int8_linear_kernels = {words,       quantize_any, kMostFewRows, kMostPackedRows,
                                               some_words,  pack_some,    few_any,      kPanel,
                                               kMostPanels, kBlockRows,   pack,         panels_any};

}  // namespace LB_ISA
}  // namespace liteboost
