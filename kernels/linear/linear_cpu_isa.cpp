// The loops of linear.h on raw pointers, compiled once an instruction set.
//
// Words: a *step* is the run of K that one vector of weights covers; a *tile* is kTileN rows of weight times
// up to kTileX rows of x, whose sums are in registers; a *panel* is the rows of weight whose sums are collected
// as fp32 before they are rounded and written in one go; a *block* is the part of K that is summed for all tiles
// of a panel before the next. Without blocks, many long rows of x would be read from the second cache, and those
// reads wait behind the weights that are being fetched from memory.
//
// x is packed as [block][group of up to kTileX rows][step][row][lanes]: what a tile is multiplied by is then one stream. Tiles of
// other sizes are in linear_few_rows.h, linear_lanes.h and linear_more_rows.h.
#include "linear/linear.h"

#include "common/prefetch.h"
#include "common/vec.h"
#include "common/vec_sums.h"
#include "linear/linear_few_rows.h"
#include "linear/linear_lanes.h"
#include "linear/linear_more_rows.h"
#include "linear/linear_one_row.h"
#include "linear/linear_steps.h"
#include "linear/linear_tile.h"
#if defined(__AMX_BF16__)
#include "linear/linear_amx.h"
#elif defined(__AVX512BF16__)
#define LB_GEMM_BF16 1
#endif
#if defined(__AVX2__)
#define LB_HAS_GEMM 1
#include "linear/linear_gemm.h"
#include "linear/linear_gemm_one_row.h"
#endif

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
// A block of x leaves room for weights in the first cache. A row of weight is read in runs that are not too short,
// and whole where it is short itself and x with it: memory is read fastest in one go.
constexpr int64_t kBlockBytesX = 8 << 10;
constexpr int64_t kWholeBytesX = 16 << 10;
constexpr int64_t kLeastRun = 8 * kLine;
constexpr int64_t kWholeRun = 32 * kLine;
// How far ahead weights are fetched. Memory delivers at its full rate only while this much is on its way, which
// takes more than the processor looks ahead by itself when there is much to compute between two reads.
constexpr int64_t kAheadBytes = 16 << 10;

// Rows of x in the next group: all of about the same size, so that none is left with little to do for each weight.
LB_INLINE int64_t group_rows(int64_t rows) { return group_of<kTileX>(rows); }

// Steps of K in a block: whole cache lines of weight.
template <typename T>
int64_t block_steps(int64_t rows, int64_t k) {
  typedef Step<T> S;
  if (is_stream<T>(rows, k)) return steps_of<T>(k);
  if (is_more_rows<T>(rows)) return kMoreSteps;
  constexpr int64_t kStepBytes = S::kSize * static_cast<int64_t>(sizeof(T));
  constexpr int64_t kLeast = kLeastRun / kStepBytes;
  constexpr int64_t kLineSteps = kLine / kStepBytes;
  const int64_t row_bytes = rows * S::kPackedBytes;
  const int64_t whole = (steps_of<T>(k) + kLineSteps - 1) / kLineSteps * kLineSteps;
  if (whole * row_bytes <= kWholeBytesX && whole * kStepBytes <= kWholeRun && whole <= kMostSteps)
    return whole;
  const int64_t steps = kBlockBytesX / row_bytes;
  const int64_t bounded = steps < kLeast ? kLeast : steps > kMostSteps ? kMostSteps : steps;
  return bounded / kLineSteps * kLineSteps;
}

template <typename T>
void pack(const T* x, int64_t rows, int64_t k, Order order, char* packed) {
  typedef Step<T> S;
  const bool is_each = order == Order::of_one_row;
  const int64_t block = (is_each ? steps_of<T>(k) : block_steps<T>(rows, k)) * S::kSize;
  for (int64_t begin = 0; begin < k; begin += block) {
    const int64_t end = k - begin < block ? k : begin + block;
    for (int64_t group = 0, width; group < rows; group += width) {
      width = is_each                 ? group_of<kRowsAtOnce>(rows - group)
              : is_more_rows<T>(rows) ? group_of<kMoreX>(rows - group)
                                      : group_rows(rows - group);
      for (int64_t at = begin; at < end; at += S::kSize) {
        for (int64_t row = group; row < group + width; ++row) {
          const T* source = x + row * k + at;
          S::pack(packed, k - at < S::kSize ? S::read(source, static_cast<int>(k - at)) : S::read(source));
          packed += S::kPackedBytes;
        }
      }
    }
  }
}

// Asks for `rows` lines at a time from `next` on, up to k elements of a row and then of the row behind it: memory delivers that
// faster than lines of several rows in turn.
template <typename T, int rows>
struct RowsAhead {
  const T *next, *end;
  int64_t stride, k;

  LB_INLINE void operator()() {
    constexpr int64_t kElements = kLine / static_cast<int64_t>(sizeof(T));
    LB_UNROLL for (int i = 0; i < rows; ++i) fetch_ahead(next + i * kElements);
    if (rows > 0) next += rows * kElements;
    if (rows > 1 && next >= end) {
      next += stride - k;
      end += stride;
    }
  }
};

// A block of all rows of x against the same columns of N rows of weight. Each group of rows fetches `Ahead` of
// the N rows from `next` on, until all are fetched.
template <typename T, int N, int Ahead>
void tile_rows(const LinearArgs& args, const T* weight, const char* x, int64_t k, const T* next,
               float* totals) {
  const int64_t row_bytes = steps_of<T>(k) * Step<T>::kPackedBytes;
  const int64_t stride = args.weight_stride;
  int fetched = 0;
  for (int64_t row = 0, width; row < args.rows; row += width) {
    const bool fetch = fetched < N;
    RowsAhead<T, Ahead> ask{next, next + k, stride, k};
    RowsAhead<T, 0> none{next, next + k, stride, k};
    width = group_rows(args.rows - row);
    switch (width) {
      case 1:
        fetch ? tile<T, N, 1>(weight, stride, x, k, ask, totals)
              : tile<T, N, 1>(weight, stride, x, k, none, totals);
        break;
      case 2:
        fetch ? tile<T, N, 2>(weight, stride, x, k, ask, totals)
              : tile<T, N, 2>(weight, stride, x, k, none, totals);
        break;
      case 3:
        fetch ? tile<T, N, 3>(weight, stride, x, k, ask, totals)
              : tile<T, N, 3>(weight, stride, x, k, none, totals);
        break;
      default:
        fetch ? tile<T, N, 4>(weight, stride, x, k, ask, totals)
              : tile<T, N, 4>(weight, stride, x, k, none, totals);
    }
    x += width * row_bytes;
    totals += width * N;
    fetched += Ahead;
    next += Ahead * stride;
  }
}

// Fetches where a panel will be written, which would else be waited for line by line.
template <typename T>
void fetch_panel(const LinearArgs& args, int64_t begin, int64_t count) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const T* out = static_cast<const T*>(args.out) + row * args.n + begin;
    for (int64_t i = 0; i < count; i += kLine / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(out + i, 1);
  }
}

template <typename T, int Ahead>
void run_rows(const LinearArgs& args, int64_t begin, int64_t end) {
  typedef Step<T> S;
  const int64_t stride = args.weight_stride;
  const int64_t block = block_steps<T>(args.rows, args.k) * S::kSize;
  const int64_t tile_bytes = (args.k < block ? args.k : block) * static_cast<int64_t>(sizeof(T)) * kTileN;
  const int64_t ahead = tile_bytes > 0 ? kAheadBytes / tile_bytes : 0;
  const int64_t ahead_rows = kTileN * (ahead < 1 ? 1 : ahead);
  float totals[kLinearRows * kPanel];
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    const T* panel = static_cast<const T*>(args.weight) + begin * stride;
    const char* x = static_cast<const char*>(args.packed_x);
    fetch_panel<T>(args, begin, count);
    memset(totals, 0, sizeof(float) * static_cast<size_t>(args.rows * kPanel));
    for (int64_t k = 0; k < args.k; k += block) {
      const int64_t size = args.k - k < block ? args.k - k : block;
      int64_t i = 0;
      for (; i + kTileN <= count; i += kTileN) {
        const T* weight = panel + i * stride + k;
        // What comes so many rows later: in this block, in the next, or in the next panel. Behind the last rows
        // lies nothing: fetch what is there already.
        const T* next = weight + ahead_rows * stride;
        if (i + ahead_rows + kTileN > count) {
          if (k + block < args.k) {
            next += block - count * stride;
          } else if (begin + i + ahead_rows + kTileN <= end) {
            next -= k;
          } else {
            next = weight;
          }
        }
        tile_rows<T, kTileN, Ahead>(args, weight, x, size, next, totals + i * args.rows);
      }
      for (; i < count; ++i) {
        const T* weight = panel + i * stride + k;
        tile_rows<T, 1, 0>(args, weight, x, size, weight, totals + i * args.rows);
      }
      x += args.rows * steps_of<T>(size) * S::kPackedBytes;
    }
    write_panel<T, kTileN>(args, begin, count, totals);
  }
}

template <typename T>
void run(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.rows == 1) {
    run_one_row<T>(args, begin, end);
  } else if (args.order == Order::of_one_row) {
    run_each_row<T>(args, begin, end);
  } else if (is_stream<T>(args.rows, args.k)) {
    run_streams<T>(args, begin, end);
  } else if (is_more_rows<T>(args.rows)) {
    if constexpr (kHasMoreRows<T>) run_more_rows<T>(args, begin, end);
  } else if (args.rows <= kTileX) {
    run_rows<T, kTileN>(args, begin, end);
  } else if (args.rows < kTileN * kTileX - kTileX + 1) {
    run_rows<T, kTileN / 2>(args, begin, end);
  } else {
    run_rows<T, 1>(args, begin, end);
  }
}

double stream_sum(const float* x, int64_t count) {
  constexpr int kSums = 4;
  VF sums[kStreams][kSums] = {};
  const int64_t distance = count / kStreams / (kSums * kLanes) * (kSums * kLanes);
  for (int64_t i = 0; i < distance; i += kSums * kLanes) {
    LB_UNROLL for (int n = 0; n < kStreams; ++n) {
      LB_UNROLL for (int j = 0; j < kSums; ++j) {
        const float* from = x + n * distance + i + j * kLanes;
        if (kStreams > 1) fetch_ahead(reinterpret_cast<const char*>(from) + kStreamAhead);
        sums[n][j] += load(from);
      }
    }
  }
  double total = 0.0;
  for (int n = 0; n < kStreams; ++n) {
    for (int j = 0; j < kSums; ++j) total += sum(sums[n][j]);
  }
  for (int64_t i = kStreams * distance; i < count; ++i) total += x[i];
  return total;
}

#if defined(__AMX_BF16__)
// One row is bound by reading the weight, which one stream does best.
bool has_tiles(DType dtype, int64_t rows, int64_t k, Order order) {
  return dtype == DType::bf16 && rows > 1 && k > 0 && order == Order::fastest;
}
#endif

#if defined(LB_HAS_LANES)
bool in_lanes(DType dtype, int64_t rows, Order order) {
  return dtype == DType::bf16 && rows > 1 && rows <= kMostLaneRows && order == Order::fastest;
}
#endif

int64_t most_rows_any([[maybe_unused]] DType dtype, [[maybe_unused]] Order order) {
#if defined(__AMX_BF16__)
  if (dtype == DType::bf16 && order == Order::fastest) return kMostTiledRows;
#elif defined(__AVX512BF16__)
  if (dtype == DType::bf16 && order == Order::fastest) return kMoreRows;
#endif
  return kLinearRows;
}

int64_t packed_bytes_any(DType dtype, int64_t rows, int64_t k, [[maybe_unused]] Order order) {
#if defined(__AMX_BF16__)
  if (has_tiles(dtype, rows, k, order)) return packed_tile_bytes(rows, k);
#endif
#if defined(LB_HAS_LANES)
  if (in_lanes(dtype, rows, order)) return packed_lanes_bytes(rows, k);
#endif
  LB_DISPATCH_DTYPE(dtype, T, return rows * steps_of<T>(k) * Step<T>::kPackedBytes);
  return 0;
}

int64_t pack_parts_any([[maybe_unused]] DType dtype, [[maybe_unused]] int64_t rows,
                       [[maybe_unused]] int64_t k, [[maybe_unused]] Order order) {
#if defined(__AMX_BF16__)
  if (has_tiles(dtype, rows, k, order)) return (tiles_of(rows) + 1) / 2;
#endif
  return 1;
}

void pack_some_any(DType dtype, const void* x, int64_t rows, int64_t k, Order order, int64_t begin,
                   int64_t end, void* packed) {
#if defined(__AMX_BF16__)
  if (has_tiles(dtype, rows, k, order))
    return pack_tiles(static_cast<const bf16*>(x), rows, k, begin, end, static_cast<char*>(packed));
#endif
  if (begin == end) return;
#if defined(LB_HAS_LANES)
  if (in_lanes(dtype, rows, order))
    return pack_lanes(static_cast<const bf16*>(x), rows, k, static_cast<char*>(packed));
#endif
  LB_DISPATCH_DTYPE(dtype, T, pack<T>(static_cast<const T*>(x), rows, k, order, static_cast<char*>(packed)));
}

void pack_any(DType dtype, const void* x, int64_t rows, int64_t k, Order order, void* packed) {
  pack_some_any(dtype, x, rows, k, order, 0, pack_parts_any(dtype, rows, k, order), packed);
}

void run_any(DType dtype, const LinearArgs& args, int64_t begin, int64_t end) {
#if defined(__AMX_BF16__)
  if (has_tiles(dtype, args.rows, args.k, args.order)) return run_tiles(args, begin, end);
#endif
#if defined(LB_HAS_LANES)
  if (in_lanes(dtype, args.rows, args.order)) {
    with_lanes(args.rows, [&](auto of) { run_lanes<decltype(of)>(args, begin, end); });
    return;
  }
#endif
  LB_DISPATCH_DTYPE(dtype, T, run<T>(args, begin, end));
}

#if defined(LB_HAS_GEMM)
// f with the dtypes of which gemm_panels is compiled.
template <typename F>
LB_INLINE void with_gemm(DType dtype, const F& f) {
#if defined(LB_GEMM_BF16)
  if (dtype == DType::bf16) return f(bf16{});
#endif
  if constexpr (kGemmWidens) {
    if (dtype == DType::bf16) return f(bf16{});
    if (dtype == DType::f16) return f(f16{});
  }
  f(float{});
}
// The same of gemm_panels_of_one_row.
template <typename F>
LB_INLINE void with_gemm_of_one_row([[maybe_unused]] DType dtype, const F& f) {
#if defined(__AVX512BF16__)
  if (dtype == DType::bf16) return f(bf16{});
#endif
  f(float{});
}
int64_t gemm_columns_any(DType dtype, int64_t n, int64_t k, Order order) {
  const bool serves = order == Order::fastest ? gemm_serves(dtype, k) : gemm_of_one_row_serves(dtype, k);
  return serves && gemm_fills_strips(n) ? kGemmColumns : 0;
}
int64_t gemm_row_floats_any(DType dtype, int64_t k) {
  int64_t floats = 0;
  with_gemm_of_one_row(dtype, [&](auto t) { floats = chains_of(gemm_words<decltype(t)>(k)).blocks().words; });
  return floats;
}
void gemm_pack_rows_any(DType dtype, const void* x, int64_t rows, int64_t k, float* packed) {
  with_gemm_of_one_row(dtype, [&](auto t) {
    typedef decltype(t) T;
    const Chains chains = chains_of(gemm_words<T>(k));
    for (int64_t row = 0; row < rows; ++row)
      pack_chains(static_cast<const T*>(x) + row * k, k, chains, packed + row * chains.blocks().words);
  });
}
int64_t gemm_scratch_any(DType dtype, int64_t k, int64_t panels, Order order) {
  int64_t floats = 0;
  if (order == Order::of_one_row) {
    with_gemm_of_one_row(dtype, [&](auto t) {
      floats = gemm_scratch(chains_of(gemm_words<decltype(t)>(k)).blocks(), panels);
    });
  } else {
    with_gemm(dtype, [&](auto t) { floats = gemm_scratch<decltype(t)>(k, panels); });
  }
  return floats;
}
void gemm_any(DType dtype, const GemmArgs& args, int64_t panel, int64_t end, int64_t row_begin,
              int64_t row_end, float* scratch) {
  if (args.order == Order::of_one_row) {
    with_gemm_of_one_row(dtype, [&](auto t) {
      gemm_panels_of_one_row<decltype(t)>(args, panel, end, row_begin, row_end, scratch);
    });
  } else {
    with_gemm(dtype,
              [&](auto t) { gemm_panels<decltype(t)>(args, panel, end, row_begin, row_end, scratch); });
  }
}
#else
constexpr bool kGemmWidens = false;
int64_t gemm_columns_any(DType, int64_t, int64_t, Order) { return 0; }
int64_t gemm_row_floats_any(DType, int64_t) { return 0; }
void gemm_pack_rows_any(DType, const void*, int64_t, int64_t, float*) {}
int64_t gemm_scratch_any(DType, int64_t, int64_t, Order) { return 0; }
void gemm_any(DType, const GemmArgs&, int64_t, int64_t, int64_t, int64_t, float*) {}
#endif

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {
    most_rows_any,    packed_bytes_any,    pack_any,           pack_parts_any,   pack_some_any, run_any,
    gemm_columns_any, gemm_row_floats_any, gemm_pack_rows_any, gemm_scratch_any, gemm_any,      kGemmWidens,
    stream_sum};

}  // namespace LB_ISA
}  // namespace liteboost
