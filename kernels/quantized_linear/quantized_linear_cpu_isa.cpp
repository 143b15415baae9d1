// The loops of quantized_linear.h on raw pointers, compiled once an instruction set.
//
// Words as in linear_cpu_isa.cpp: a *tile* is some rows of weight times up to kTileX rows of x, whose sums are in
// registers; a *panel* is the rows of weight whose sums are collected before they are rounded and written; a *block*
// is the part of K that is summed for all tiles of a panel before the next, so that x stays in the first cache.
//
// x is packed as [block][group of up to kTileX rows][step][row][part][lanes], and behind that, for w4, as the sums of
// its packs of 32 columns, [row][pack]: zero points other than 8 need no more of x than these.
#include "quantized_linear/quantized_linear.h"

#include "common/vec.h"
#include "common/vec_sums.h"
#include "quantized_linear/quantized_steps.h"
#include "quantized_linear/quantized_unpack.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// The sums of a tile and, of groups of columns, of one step, the weights and a scale fit the registers. More rows of x
// than kTileX make tiles of more of them and fewer of weight, which is then taken apart less often.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileN = 4;
constexpr int kWideX = 8;
#else
constexpr int kTileN = 2;
constexpr int kWideX = 4;
#endif
constexpr int kTileX = 4;
constexpr int kPanel = 64;
// x of a block leaves room for weights in the first cache; the scales of a row's block are in an array of this size.
constexpr int64_t kBlockBytesX = 16 << 10;
constexpr int64_t kMostColumns = 8192;
constexpr int64_t kLeastColumns = 512;
constexpr int64_t kMostPacks = kMostColumns / kPack;
constexpr int64_t kAhead = 2048;  // bytes that are fetched ahead: arithmetic takes as long as memory

template <typename S>
constexpr int64_t kStepBytes = S::kColumns * S::kBits / 8;
template <typename S>
constexpr int64_t kPackedBytes = S::kParts * kVecBytes;  // of x a row and step

template <typename S>
int64_t steps_of(int64_t k) {
  return (k + S::kColumns - 1) / S::kColumns;
}

int64_t packs_of(int64_t k) { return (k + kPack - 1) / kPack; }

// Of `rows` of x of which `left` are left, those in the next group: all groups of about the same size, so that none
// is left with little to do for each weight.
LB_INLINE int64_t group_rows(int64_t rows, int64_t left) {
  const int64_t most = rows > kTileX ? kWideX : kTileX;
  const int64_t groups = (left + most - 1) / most;
  return (left + groups - 1) / groups;
}

// Columns of a block: whole steps of every kind.
template <typename S>
int64_t block_columns(int64_t rows) {
  const int64_t columns = kBlockBytesX / (rows * kPackedBytes<S>)*S::kColumns;
  const int64_t bounded = columns < kLeastColumns  ? kLeastColumns
                          : columns > kMostColumns ? kMostColumns
                                                   : columns;
  return bounded / kLeastColumns * kLeastColumns;
}

template <typename S>
int64_t packed_bytes(int64_t rows, int64_t k) {
  const int64_t sums = S::kGrouped ? packs_of(k) * static_cast<int64_t>(sizeof(float)) : 0;
  return rows * (steps_of<S>(k) * kPackedBytes<S> + sums);
}

// One step of one row of x, of which `columns` are left.
template <typename S, typename T>
LB_INLINE void pack_step(const T* x, int64_t columns, char* packed) {
  T row[S::kColumns] = {};
  memcpy(row, x, sizeof(T) * static_cast<size_t>(columns < S::kColumns ? columns : S::kColumns));
  if constexpr (S::kPairs) {
    T* to = reinterpret_cast<T*>(packed);
    for (int j = 0; j < S::kParts; ++j) {
      for (int lane = 0; lane < 2 * kLanes; ++lane) to[j * 2 * kLanes + lane] = row[S::column(j, lane)];
    }
  } else {
    float numbers[S::kColumns];
    for (int i = 0; i < S::kColumns; i += kLanes) store(numbers + i, load(row + i));
    float* to = reinterpret_cast<float*>(packed);
    for (int j = 0; j < S::kParts; ++j) {
      for (int lane = 0; lane < kLanes; ++lane) to[j * kLanes + lane] = numbers[S::column(j, lane)];
    }
  }
}

template <typename S, typename T>
void pack(const T* x, int64_t rows, int64_t k, char* packed) {
  const int64_t block = block_columns<S>(rows);
  for (int64_t begin = 0; begin < k; begin += block) {
    const int64_t end = k - begin < block ? k : begin + block;
    for (int64_t group = 0, width; group < rows; group += width) {
      width = group_rows(rows, rows - group);
      for (int64_t at = begin; at < end; at += S::kColumns) {
        for (int64_t row = group; row < group + width; ++row) {
          pack_step<S>(x + row * k + at, k - at, packed);
          packed += kPackedBytes<S>;
        }
      }
    }
  }
  if constexpr (S::kGrouped) {
    float* sums = reinterpret_cast<float*>(packed);
    for (int64_t i = 0; i < rows * packs_of(k); ++i) {  // k is a multiple of kPack
      const T* columns = x + i * kPack;
      VF total{};
      for (int j = 0; j < kPack; j += kLanes) total += load(columns + j);
      sums[i] = sum(total);
    }
  }
}

// The scales of `packs` packs from pack `first` on of a row, as floats, and zeros up to a whole step; to `offsets`,
// if the weight has zero points, what 8 - zero_point is worth.
template <typename T>
LB_INLINE void read_scales(const T* scales, const uint8_t* zeros, int64_t in_group, int64_t first,
                           int64_t packs, float* to, float* offsets) {
  if (in_group == 1) {
    for_lanes(packs, [&](int64_t i, auto n) { store(to + i, load(scales + first + i, n), n); });
    int64_t i = 0;
    for (; zeros && i + kLanes <= packs; i += kLanes) {
      store(offsets + i, (splat(8.0f) - from_uint8(zeros + first + i)) * load(to + i));
    }
    for (; zeros && i < packs; ++i) offsets[i] = static_cast<float>(8 - zeros[first + i]) * to[i];
  } else {
    for (int64_t i = 0; i < packs;) {
      const int64_t group = (first + i) / in_group;
      const float scale = as_number(scales[group]);
      const float offset = zeros ? static_cast<float>(8 - zeros[group]) * scale : 0.0f;
      for (const int64_t end = (group + 1) * in_group - first; i < end && i < packs; ++i) {
        to[i] = scale;
        offsets[i] = offset;
      }
    }
  }
  for (int64_t i = packs; i % kPacks != 0; ++i) to[i] = 0.0f;
}

// Parts j and on of a step of N rows of weight and X of x: d[n][r] += weights times x.
template <typename S, int N, int X, int j>
LB_INLINE void add_parts(VF (&d)[N][X], const typename S::Loaded (&w)[N], const char* x) {
  typename S::Part part[N];
  LB_UNROLL for (int n = 0; n < N; ++n) part[n] = S::template part<j>(w[n]);
  LB_UNROLL for (int r = 0; r < X; ++r) {
    const char* xs = x + r * kPackedBytes<S> + j * kVecBytes;
    LB_UNROLL for (int n = 0; n < N; ++n) d[n][r] = S::multiply_add(d[n][r], part[n], xs);
  }
  if constexpr (j + 1 < S::kParts) add_parts<S, N, X, j + 1>(d, w, x);
}

// One step of N rows of weight, whose scales are kMostPacks apart, and X of x.
template <typename S, int N, int X>
LB_INLINE void add_step(VF (&sums)[N][X], const typename S::Loaded (&w)[N], const char* x,
                        const float* scales) {
  if constexpr (S::kGrouped) {
    VF d[N][X];
    LB_UNROLL for (int n = 0; n < N; ++n) { LB_UNROLL for (int r = 0; r < X; ++r) d[n][r] = VF{}; }
    add_parts<S, N, X, 0>(d, w, x);
    LB_UNROLL for (int n = 0; n < N; ++n) {
      const VF scale = spread(scales + n * kMostPacks);
      LB_UNROLL for (int r = 0; r < X; ++r) sums[n][r] = fma(d[n][r], scale, sums[n][r]);
    }
  } else {
    add_parts<S, N, X, 0>(sums, w, x);
  }
}

// The scales of a block, kMostPacks a row of weight, and what its zero points come to: `offsets`, or null, times the
// sums of x.
struct Scales {
  const float* scales;
  const float* offsets;
  const float* x_sums;  // rows x_stride apart
  int64_t x_stride, packs;
};

// sums[n][r] = what the zero points add, spread over the lanes.
template <int N, int X>
LB_INLINE void begin_sums(VF (&sums)[N][X], const Scales& scales) {
  LB_UNROLL for (int n = 0; n < N; ++n) { LB_UNROLL for (int r = 0; r < X; ++r) sums[n][r] = VF{}; }
  if (!scales.offsets) return;
  for_lanes(scales.packs, [&](int64_t i, auto lanes) {
    for (int r = 0; r < X; ++r) {
      const VF x = load(scales.x_sums + r * scales.x_stride + i, lanes);
      for (int n = 0; n < N; ++n)
        sums[n][r] = fma(load(scales.offsets + n * kMostPacks + i, lanes), x, sums[n][r]);
    }
  });
}

// totals[r * N + n] += the lanes of sums[n][r], added up.
template <int N, int X>
LB_INLINE void add_sums(const VF (&sums)[N][X], float* totals) {
  LB_UNROLL for (int first = 0; first < N * X; first += kLanes) {
    VF some[kLanes];
    _Pragma("GCC unroll 16") for (int i = 0; i < kLanes; ++i) {
      const int at = first + i;
      some[i] = at < N * X ? sums[at % N][at / N] : VF{};
    }
    if (first + kLanes <= N * X) {
      store(totals + first, load(totals + first) + sum_each(some));
    } else {
      const int rest = N * X - first;
      store(totals + first, load(totals + first, rest) + sum_each(some), rest);
    }
  }
}

// totals[r * N + n] += weight row n times x row r over k columns. What lies `ahead`
// bytes further is fetched: memory delivers at its full rate only while enough is on its way.
template <typename S, int N, int X>
LB_INLINE void tile(const char* weight, int64_t stride, const char* x, int64_t k, const Scales& given,
                    int64_t ahead, float* totals) {
  VF sums[N][X];
  begin_sums(sums, given);
  const float* scales = given.scales;
  typename S::Loaded w[N];
  int64_t at = 0;
  for (; at + S::kColumns <= k; at += S::kColumns) {
    LB_UNROLL for (int n = 0; n < N; ++n) {
      __builtin_prefetch(weight + n * stride + ahead);
      w[n] = S::read(weight + n * stride);
    }
    add_step<S, N, X>(sums, w, x, scales);
    weight += kStepBytes<S>;
    x += X * kPackedBytes<S>;
    scales += kPacks;
  }
  if (at < k) {
    LB_UNROLL for (int n = 0; n < N; ++n) w[n] = S::read(weight + n * stride, k - at);
    add_step<S, N, X>(sums, w, x, scales);
  }
  add_sums<N, X>(sums, totals);
}

// One row of x and one of weight, which are walked one after the other: reads are a single stream, which the hardware
// fetches ahead best. Four sums hide the latency of the addition; the lanes of the result are still to be added up.
template <typename S>
LB_INLINE VF dot(const char* weight, const char* x, int64_t k, const Scales& given) {
  constexpr int kSums = 4;
  VF sums[kSums][1][1] = {};
  begin_sums(sums[3], given);
  const float* scales = given.scales;
  int64_t at = 0;
  for (; at + kSums * S::kColumns <= k; at += kSums * S::kColumns) {
    LB_UNROLL for (int i = 0; i < kSums; ++i) {
      __builtin_prefetch(weight + i * kStepBytes<S> + kAhead);
      const typename S::Loaded w[1] = {S::read(weight + i * kStepBytes<S>)};
      add_step<S, 1, 1>(sums[i], w, x + i * kPackedBytes<S>, scales + i * kPacks);
    }
    weight += kSums * kStepBytes<S>;
    x += kSums * kPackedBytes<S>;
    scales += kSums * kPacks;
  }
  for (; at + S::kColumns <= k; at += S::kColumns) {
    const typename S::Loaded w[1] = {S::read(weight)};
    add_step<S, 1, 1>(sums[0], w, x, scales);
    weight += kStepBytes<S>;
    x += kPackedBytes<S>;
    scales += kPacks;
  }
  if (at < k) {
    const typename S::Loaded w[1] = {S::read(weight, k - at)};
    add_step<S, 1, 1>(sums[1], w, x, scales);
  }
  return (sums[0][0][0] + sums[1][0][0]) + (sums[2][0][0] + sums[3][0][0]);
}

// tile, for `width` rows of x, which is from X to most.
template <typename S, int N, int X, int most>
LB_INLINE void tile_of(int64_t width, const char* weight, int64_t stride, const char* x, int64_t k,
                       const Scales& scales, int64_t ahead, float* totals) {
  if constexpr (X < most) {
    if (width > X) {
      tile_of<S, N, X + 1, most>(width, weight, stride, x, k, scales, ahead, totals);
      return;
    }
  }
  tile<S, N, X>(weight, stride, x, k, scales, ahead, totals);
}

// A block of all rows of x, which are in groups of `least` to `most`, against the same columns of N rows of weight.
template <typename S, int N, int least, int most>
void tile_rows(const char* weight, int64_t stride, const char* x, int64_t rows, int64_t k, Scales scales,
               int64_t ahead, float* totals) {
  const int64_t row_bytes = steps_of<S>(k) * kPackedBytes<S>;
  for (int64_t row = 0, width; row < rows; row += width) {
    width = group_rows(rows, rows - row);
    tile_of<S, N, least, most>(width, weight, stride, x, k, scales, ahead, totals);
    x += width * row_bytes;
    totals += width * N;
    scales.x_sums += width * scales.x_stride;
    ahead = 0;  // the first group has fetched it
  }
}

// Outputs [0, count) of a panel, whose totals are [tile][row][row of weight in the tile], in tiles of N rows.
template <typename S, typename T>
void write_panel(const QuantizedLinearArgs& args, int64_t tile_n, int64_t begin, int64_t count,
                 const float* totals) {
  const int64_t n = args.weight.n;
  const T* bias = static_cast<const T*>(args.bias);
  float scales[kPanel];
  if constexpr (!S::kGrouped) {
    with_scales(args.weight, [&](const auto* all) {
      for_lanes(count,
                [&](int64_t i, auto lanes) { store(scales + i, load(all + begin + i, lanes), lanes); });
    });
  }
  const int64_t whole = count / tile_n * tile_n;
  for (int64_t row = 0; row < args.rows; ++row) {
    float sums[kPanel];
    for (int64_t i = 0; i < whole; ++i) {
      sums[i] = totals[i / tile_n * tile_n * args.rows + row * tile_n + i % tile_n];
    }
    for (int64_t i = whole; i < count; ++i) sums[i] = totals[i * args.rows + row];
    T* out = static_cast<T*>(args.out) + row * n + begin;
    for_lanes(count, [&](int64_t i, auto lanes) {
      VF v = load(sums + i, lanes);
      if constexpr (!S::kGrouped) v = v * load(scales + i, lanes);
      store(out + i, bias ? v + load(bias + begin + i, lanes) : v, lanes);
    });
  }
}

// The scales of columns [begin, begin + k) of `rows` rows of weight from `row` on, to arrays of kMostPacks a row.
template <typename S>
LB_INLINE void scales_of(const QuantizedWeight& weight, int64_t row, int64_t rows, int64_t begin, int64_t k,
                         float* to, float* offsets) {
  const int64_t first = begin / kPack, packs = packs_of(k);
  with_scales(weight, [&](const auto* all) {
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = (row + n) * weight.groups;
      const uint8_t* zeros = weight.zero_points ? weight.zero_points + at : nullptr;
      read_scales(all + at, zeros, weight.k / weight.groups / kPack, first, packs, to + n * kMostPacks,
                  offsets + n * kMostPacks);
    }
  });
}

template <typename S, int N, int least, int most>
LB_INLINE void block_of_tile(const QuantizedLinearArgs& args, int64_t row, int64_t begin, int64_t k,
                             const char* x, const float* x_sums, float* totals) {
  const QuantizedWeight& weight = args.weight;
  const int64_t stride = weight.k * S::kBits / 8;
  const char* data = static_cast<const char*>(weight.data) + row * stride + begin * S::kBits / 8;
  Scales given{};
  float scales[S::kGrouped ? N * kMostPacks : 1], offsets[S::kGrouped ? N * kMostPacks : 1];
  if constexpr (S::kGrouped) {
    scales_of<S>(weight, row, N, begin, k, scales, offsets);
    given = {scales, weight.zero_points ? offsets : nullptr, x_sums + begin / kPack, packs_of(weight.k),
             packs_of(k)};
  } else {
    given.scales = scales;
  }
  tile_rows<S, N, least, most>(data, stride, x, args.rows, k, given, N * stride, totals);
}

// A block of the one row of x against the same columns of up to kLanes rows of weight, whose lanes are added up
// together: that alone would otherwise take as long as the products of a short row.
template <typename S>
LB_INLINE void block_of_rows(const QuantizedLinearArgs& args, int64_t row, int64_t rows, int64_t begin,
                             int64_t k, const char* x, const float* x_sums, float* totals) {
  const QuantizedWeight& weight = args.weight;
  const int64_t stride = weight.k * S::kBits / 8;
  const char* data = static_cast<const char*>(weight.data) + row * stride + begin * S::kBits / 8;
  float scales[S::kGrouped ? kMostPacks : 1], offsets[S::kGrouped ? kMostPacks : 1];
  const Scales given = {scales, S::kGrouped && weight.zero_points ? offsets : nullptr, x_sums + begin / kPack,
                        packs_of(weight.k), packs_of(k)};
  VF sums[kLanes] = {};
  for (int64_t i = 0; i < rows; ++i) {
    if constexpr (S::kGrouped) scales_of<S>(weight, row + i, 1, begin, k, scales, offsets);
    sums[i] = dot<S>(data + i * stride, x, k, given);
  }
  store(totals, load(totals) + sum_each(sums));
}

// In tiles of N rows of weight and `least` to `most` of x.
template <typename S, typename T, int N, int least, int most>
void run_tiles(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  const int64_t k = args.weight.k;
  const int64_t block = block_columns<S>(args.rows);
  const char* packed = static_cast<const char*>(args.packed_x);
  const float* x_sums = reinterpret_cast<const float*>(packed + args.rows * steps_of<S>(k) * kPackedBytes<S>);
  float totals[kQuantizedChunk * kPanel];
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    const char* x = packed;
    memset(totals, 0, sizeof(float) * static_cast<size_t>(args.rows * kPanel));
    for (int64_t at = 0; at < k; at += block) {
      const int64_t size = k - at < block ? k - at : block;
      int64_t i = 0;
      for (; i + N <= count; i += N) {
        block_of_tile<S, N, least, most>(args, begin + i, at, size, x, x_sums, totals + i * args.rows);
      }
      for (; i < count; ++i) {
        block_of_tile<S, 1, least, most>(args, begin + i, at, size, x, x_sums, totals + i * args.rows);
      }
      x += args.rows * steps_of<S>(size) * kPackedBytes<S>;
    }
    write_panel<S, T>(args, N, begin, count, totals);
  }
}

// One row of x.
template <typename S, typename T>
void run_row(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  const int64_t k = args.weight.k, block = block_columns<S>(1);
  const char* packed = static_cast<const char*>(args.packed_x);
  const float* x_sums = reinterpret_cast<const float*>(packed + steps_of<S>(k) * kPackedBytes<S>);
  static_assert(kPanel % kLanes == 0);
  for (; begin < end; begin += kPanel) {
    const int64_t count = end - begin < kPanel ? end - begin : kPanel;
    float totals[kPanel] = {};
    const char* x = packed;
    for (int64_t at = 0; at < k; at += block) {
      const int64_t size = k - at < block ? k - at : block;
      for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t rows = count - i < kLanes ? count - i : kLanes;
        block_of_rows<S>(args, begin + i, rows, at, size, x, x_sums, totals + i);
      }
      x += steps_of<S>(size) * kPackedBytes<S>;
    }
    write_panel<S, T>(args, 1, begin, count, totals);
  }
}

template <typename S, typename T>
void run(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  // With groups, sums over a group take registers, too.
  constexpr int kRows = S::kGrouped ? kTileN / 2 : kTileN;
  constexpr int kWideRows = kWideX > kTileX && kRows > 1 ? kRows / 2 : kRows;
  if (args.rows == 1) {
    run_row<S, T>(args, begin, end);
  } else if (args.rows <= kTileX) {
    run_tiles<S, T, kRows, 2, kTileX>(args, begin, end);
  } else {
    run_tiles<S, T, kWideRows, kWideX / 2 - 1, kWideX>(args, begin, end);
  }
}

// f with the steps that serve x of dtype T and weights of this many bits.
template <typename T, typename F>
LB_INLINE void with_steps(int32_t bits, const F& f) {
  bits == 8 ? f(W8{}) : f(W4{});
}
#if defined(__AVX512BF16__)
template <typename T, typename F>
  requires(__is_same(T, bf16))
LB_INLINE void with_steps(int32_t bits, const F& f) {
  bits == 8 ? f(W8Pairs{}) : f(W4Pairs{});
}
#endif

// ---- by dtype ----

int64_t packed_bytes_any(DType dtype, int32_t bits, int64_t rows, int64_t k) {
  int64_t bytes = 0;
  LB_DISPATCH_DTYPE(dtype, T,
                    with_steps<T>(bits, [&](auto s) { bytes = packed_bytes<decltype(s)>(rows, k); }));
  return bytes;
}

void pack_any(DType dtype, int32_t bits, const void* x, int64_t rows, int64_t k, void* packed) {
  LB_DISPATCH_DTYPE(dtype, T, with_steps<T>(bits, [&](auto s) {
                      pack<decltype(s)>(static_cast<const T*>(x), rows, k, static_cast<char*>(packed));
                    }));
}

void run_any(DType dtype, const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(dtype, T,
                    with_steps<T>(args.weight.bits, [&](auto s) { run<decltype(s), T>(args, begin, end); }));
}

void unpack_any(DType dtype, const QuantizedWeight& weight, int64_t begin, int64_t end, void* out) {
  LB_DISPATCH_DTYPE(dtype, T, {
    T* to = static_cast<T*>(out);
    for (int64_t row = begin; row < end; ++row, to += weight.k) {
      weight.bits == 8 ? unpack_w8(weight, row, to) : unpack_w4(weight, row, to);
    }
  });
}

}  // namespace

extern const QuantizedLinearKernels quantized_linear_kernels;
const QuantizedLinearKernels quantized_linear_kernels = {packed_bytes_any, pack_any, run_any, unpack_any};

}  // namespace LB_ISA
}  // namespace liteboost
