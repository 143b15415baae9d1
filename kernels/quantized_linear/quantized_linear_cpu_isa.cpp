// The loops of quantized_linear.h on raw pointers, compiled once an instruction set.
//
// A tile of weight is multiplied by a *chunk* of rows of x, up to kChunk, with the accumulators in registers: each
// integer is loaded once, and unpacked once a chunk.
//
// x is packed as [chunk][step][part][row][columns of a part] (quantized_steps.h), or as [chunk][pack][row] limbs
// (quantized_limbs.h) or bytes (quantized_int8.h), and behind each chunk of floats, where the weight has zero points, the sums of its groups of columns,
// [group][row]: they need no more of x than these. A chunk has rows of zeros where there are fewer than the loop for it
// takes, and a row ends in zeros.
#include "quantized_linear/quantized_linear.h"

#include "common/prefetch.h"
#include "common/vec.h"
#if defined(__AMX_BF16__)
#include "quantized_linear/quantized_amx.h"
#endif
#include "quantized_linear/quantized_by_dtype.h"
#include "quantized_linear/quantized_gemm.h"
#include "quantized_linear/quantized_int8.h"
#include "quantized_linear/quantized_limbs.h"
#include "quantized_linear/quantized_limbs_madd.h"
#include "quantized_linear/quantized_matrix.h"
#include "quantized_linear/quantized_neon.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Sums of a chunk and a part of the weight fit the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kChunk = 16;
#else
constexpr int kChunk = 8;
#endif
// Vectors of a tile.
constexpr int kVectors = static_cast<int>(kTile) / kLanes;
constexpr int64_t kSummedSteps = 16;  // steps summed by themselves: long sums round more
int64_t groups_with_sums(const QuantizedTiles& weight) {
  return weight.zero_points && !weight.rounds_x ? weight.groups : 0;
}

// The most rows of a chunk. Floats are added up in an order of its own for each number of them, on aarch64 limbs, too.
template <typename S>
LB_INLINE int64_t most_of_chunk(const QuantizedTiles& weight) {
#if defined(__aarch64__)
  constexpr bool has_one_order = __is_same(S, W4Int8);
#else
  constexpr bool has_one_order = S::kIsLimbs || __is_same(S, W4Int8);
#endif
  return weight.order == Order::of_one_row && !has_one_order ? 1 : kChunk;
}

// Of rows of x of which `left` are left, those in the next chunk: all chunks of about the same size.
template <typename S>
LB_INLINE int64_t next_chunk(const QuantizedTiles& weight, int64_t left) {
  const int64_t most = most_of_chunk<S>(weight), chunks = (left + most - 1) / most;
  return (left + chunks - 1) / chunks;
}

// f with the number of rows, as a constant, that the loop for a chunk of `rows` takes.
template <typename F>
LB_INLINE void with_rows(int64_t rows, const F& f) {
#define LB_ROWS(n)        \
  if (rows <= n) {        \
    f.template call<n>(); \
    return;               \
  }
  LB_ROWS(1)
  LB_ROWS(2)
  LB_ROWS(3)
  LB_ROWS(4)
  LB_ROWS(6)
  LB_ROWS(8)
  if constexpr (kChunk > 8) {
    LB_ROWS(12)
    LB_ROWS(16)
  }
#undef LB_ROWS
}

constexpr int64_t loop_rows(int64_t rows) {
  return rows <= 4 ? rows : rows <= 6 ? 6 : rows <= 8 ? 8 : rows <= 12 ? 12 : 16;
}

// ---- packing x ----

template <typename S>
int64_t chunk_bytes(const QuantizedTiles& weight, int64_t rows) {
  const int64_t row = S::elements(weight.k) * static_cast<int64_t>(sizeof(typename S::Element)) +
                      groups_with_sums(weight) * static_cast<int64_t>(sizeof(float));
  return (loop_rows(rows) * row + 63) / 64 * 64;
}

template <typename S>
int64_t packed_bytes(const QuantizedTiles& weight, int64_t rows) {
  int64_t bytes = 0;
  for (int64_t row = 0, width; row < rows; row += width) {
    width = next_chunk<S>(weight, rows - row);
    bytes += chunk_bytes<S>(weight, width);
  }
  return bytes;
}

// One row of x of `rows`, k columns, to where its first part lies. What is behind the last step is zero already.
template <typename S>
LB_INLINE void pack_row(const typename S::Element* x, int64_t k, int64_t rows, typename S::Element* to) {
  constexpr int columns = S::kColumns;
  const auto put = [&](const typename S::Element* from, int64_t step, int64_t base) {
    LB_UNROLL for (int j = 0; j < S::kParts; ++j) {
      memcpy(to + (step * S::kParts + j) * rows * columns, from + S::first_column(step, j, columns) - base,
             sizeof(typename S::Element) * columns);
    }
  };
  const int64_t whole = k / kStep;
  for (int64_t step = 0; step < whole; ++step) put(x, step, 0);
  if (whole * kStep < k) {  // of w8 only, whose columns are in order
    typename S::Element rest[kStep] = {};
    memcpy(rest, x + whole * kStep, sizeof(rest[0]) * static_cast<size_t>(k - whole * kStep));
    put(rest, whole, whole * kStep);
  }
}

template <typename T>
LB_INLINE float sum_of(const T* x, int64_t count) {
  return sum_lanes(count, [&](int64_t i, auto n) { return load(x + i, n); });
}

// Chunks [begin, end) of x.
template <typename S, typename T>
void pack(const QuantizedTiles& weight, const T* x, int64_t rows, int64_t begin, int64_t end, char* packed) {
  typedef typename S::Element Element;
  const int64_t k = weight.k, groups = groups_with_sums(weight);
  for (int64_t row = 0, width, chunk = 0; row < rows && chunk < end; row += width, ++chunk) {
    width = next_chunk<S>(weight, rows - row);
    if (chunk < begin) {
      packed += chunk_bytes<S>(weight, width);
      continue;
    }
    const int64_t lanes = loop_rows(width);
    Element* to = reinterpret_cast<Element*>(packed);
    float* sums = reinterpret_cast<float*>(to + lanes * S::elements(k));
    if (lanes > width || k % kPack != 0)
      memset(packed, 0, static_cast<size_t>(chunk_bytes<S>(weight, width)));
    for (int64_t i = 0; i < width; ++i) {
      const T* from = x + (row + i) * k;
      if constexpr (__is_same(S, W4Int8)) {
        pack_int8_row(from, k, lanes, to + i);
      } else if constexpr (S::kIsLimbs) {
        pack_limbs_row<S>(from, k, lanes, to + i);
      } else if constexpr (__is_same(T, Element)) {
        pack_row<S>(from, k, lanes, to + i * S::kColumns);
      } else {
        constexpr int64_t kBlock = 512;  // whole packs, converted in one go
        for (int64_t at = 0; at < k; at += kBlock) {
          float block[kBlock];
          const int64_t count = k - at < kBlock ? k - at : kBlock;
          for_lanes(count, [&](int64_t j, auto n) { store(block + j, load(from + at + j, n), n); });
          pack_row<S>(block, count, lanes, to + at * lanes + i);
        }
      }
      for (int64_t g = 0; g < groups; ++g) sums[g * lanes + i] = sum_of(from + g * (k / groups), k / groups);
    }
    packed += chunk_bytes<S>(weight, width);
  }
}

// ---- products: on aarch64 those of quantized_neon.h ----

// A tile, and a chunk of x.
struct TileArgs {
  const char* data;
  const void* scales;          // [groups, kTile]
  const uint8_t* zero_points;  // [groups, kTile] or null
  const void* x;
  const float* x_sums;
  int64_t groups, steps;  // steps of a group
};

#if !defined(__aarch64__)
template <typename S, int X, int C, int j>
LB_INLINE void add_parts(VF (&d)[C][X], typename S::Loaded w, const typename S::Element* x) {
  const auto part = S::template part<j>(w);
  LB_UNROLL for (int r = 0; r < X; ++r) {
    d[j % C][r] = S::multiply_add(d[j % C][r], part, x + (j * X + r) * S::kColumns);
  }
  if constexpr (j + 1 < S::kParts) add_parts<S, X, C, j + 1>(d, w, x);
}

// sums[r] = the outputs from `lane` on of a tile for X rows of x. Scales are of type T.
template <typename S, typename T, int X>
LB_INLINE void tile_sums(const TileArgs& m, int lane, VF (&sums)[X]) {
  // With few rows, several sums each hide the latency of the addition.
  constexpr int kSums = X == 1 ? 8 : X == 2 ? 4 : X <= kChunk / 2 ? 2 : 1;
  constexpr int C = kSums < S::kParts ? kSums : S::kParts;
  const char* data = m.data;
  const auto* x = static_cast<const typename S::Element*>(m.x);
  const T* scales = static_cast<const T*>(m.scales) + lane;
  LB_UNROLL for (int r = 0; r < X; ++r) sums[r] = VF{};
  const int64_t blocks = (m.steps + kSummedSteps - 1) / kSummedSteps;
  for (int64_t block = 0; block < m.groups * blocks; ++block) {
    const int64_t group = block / blocks, begin = block % blocks * kSummedSteps;
    const int64_t end = m.steps - begin < kSummedSteps ? m.steps : begin + kSummedSteps;
    VF d[C][X];
    LB_UNROLL for (int c = 0; c < C; ++c) { LB_UNROLL for (int r = 0; r < X; ++r) d[c][r] = VF{}; }
    fetch_ahead(reinterpret_cast<const char*>(scales + group * kTile) + kFar / 8);
    for (int64_t step = begin; step < end; ++step) {
      fetch_weights<S::kBytes>(data);
      add_parts<S, X, C, 0>(d, S::read(data, lane), x);
      data += S::kBytes;
      x += kStep * X;
    }
    const VF scale = load(scales + group * kTile);
    LB_UNROLL for (int r = 0; r < X; ++r) {
      LB_UNROLL for (int width = C / 2; width > 0; width /= 2) {
        LB_UNROLL for (int c = 0; c < width; ++c) d[c][r] += d[c + width][r];
      }
      if (m.zero_points && begin == 0) {
        const VF offset = splat(8.0f) - from_uint8(m.zero_points + group * kTile + lane);
        d[0][r] = fma(offset, splat(m.x_sums[group * X + r]), d[0][r]);
      }
      sums[r] = fma(d[0][r], scale, sums[r]);
    }
  }
}
#endif

// The same of limbs.
#if defined(__AVX512BF16__)
template <typename S, typename T, int X>
LB_INLINE void limb_sums(const TileArgs& m, VF (&sums)[X]) {
  const auto* x = static_cast<const PackLimbs*>(m.x);
  const T* scales = static_cast<const T*>(m.scales);
  const char* data = m.data;
  const int64_t packs = m.steps / (kPack / kStep);  // of a group
  LB_UNROLL for (int r = 0; r < X; ++r) sums[r] = VF{};
  for (int64_t group = 0; group < m.groups; ++group, scales += kTile) {
    const VF scale = load(scales);
    fetch_ahead(reinterpret_cast<const char*>(scales) + kFar / 8);
    if (m.zero_points) {
      const VF offset = (splat(8.0f) - from_uint8(m.zero_points + group * kTile)) * scale;
      LB_UNROLL for (int r = 0; r < X; ++r) sums[r] = fma(offset, splat(m.x_sums[group * X + r]), sums[r]);
    }
    for (int64_t pack = 0; pack < packs; ++pack, data += S::kPackBytes, x += X) {
      fetch_weights<S::kPackBytes>(data);
      VI weights[8];
      load_weights(S{}, data, weights);
      LB_UNROLL for (int r = 0; r < X; ++r) sums[r] = fma(limb_products(weights, x[r]), scale, sums[r]);
    }
  }
}
#endif

// The outputs from `lane` on of a tile, or all[row * kTile + i] of all of them.
#if defined(__aarch64__)
template <typename S>
constexpr bool kIsAtOnce = true;
template <typename S, typename T, int X>
LB_INLINE void lane_sums(const TileArgs&, int, VF (&)[X]) {}
#else
#if defined(__AVX512BF16__)
template <typename S>
constexpr bool kIsAtOnce = __is_same(S, W4Int8);
#else
template <typename S>
constexpr bool kIsAtOnce = __is_same(S, W4Int8) || S::kIsLimbs;
#endif
template <typename S, typename T, int X>
LB_INLINE void lane_sums(const TileArgs& m, int lane, VF (&sums)[X]) {
#if defined(__AVX512BF16__)
  if constexpr (S::kIsLimbs) return limb_sums<S, T>(m, sums);
#endif
  if constexpr (!S::kIsLimbs) tile_sums<S, T, X>(m, lane, sums);
}
#endif

template <typename S, typename T, int X>
LB_INLINE void whole_tile(const TileArgs& m, float* all) {
  if constexpr (__is_same(S, W4Int8)) {
    int8_tile<T, X>({m.data, m.scales, m.zero_points, static_cast<const PackBytes*>(m.x), X, m.groups,
                     m.steps / (kPack / kStep)},
                    all);
  } else {
#if defined(LB_LIMBS_BY_MADD)
    if constexpr (S::kIsLimbs) {
      limb_tile<S, T, X>({m.data, m.scales, m.zero_points, static_cast<const PackLimbs*>(m.x), m.x_sums, X,
                          m.groups, m.steps / (kPack / kStep)},
                         all);
    }
#elif defined(__aarch64__)
    neon_tile<S, T>({m.data, m.scales, m.zero_points, m.x, m.x_sums, X, m.groups, m.steps}, all);
#endif
  }
}

// Writes `rows` rows of the outputs of tile `tile` to those of `out`.
template <typename S, typename T, int X>
void tile_gemm(const QuantizedLinearArgs& args, const TileArgs& m, int64_t tile, int64_t rows, T* out) {
  const int64_t n = args.weight.n;
  constexpr bool is_at_once = kIsAtOnce<S>;
  float all[is_at_once ? X * kTile : 1];
  if constexpr (is_at_once)
    LB_DISPATCH_DTYPE(args.weight.scale_dtype, Scale, whole_tile<S, Scale, X>(m, all));
  for (int lane = 0; lane < kTile && tile * kTile + lane < n; lane += kLanes) {
    VF sums[X];
    if constexpr (is_at_once) {
      for (int r = 0; r < X; ++r) sums[r] = load(all + r * kTile + lane);
    } else {
      LB_DISPATCH_DTYPE(args.weight.scale_dtype, Scale, lane_sums<S, Scale, X>(m, lane, sums));
    }
    note_not_finite(sums, args.not_finite);
    const int64_t first = tile * kTile + lane;
    const auto write = [&](auto lanes) {
      const VF bias = args.bias ? load(static_cast<const T*>(args.bias) + first, lanes) : VF{};
      for (int64_t r = 0; r < rows; ++r) {
        store(out + r * args.out_stride + first, args.bias ? sums[r] + bias : sums[r], lanes);
      }
    };
    n - first >= kLanes ? write(Full{}) : write(static_cast<int>(n - first));
  }
}

template <typename S, typename T>
struct TileGemm {
  const QuantizedLinearArgs& args;
  const TileArgs& m;
  int64_t tile, rows;
  T* out;
  template <int X>
  LB_INLINE void call() const {
    tile_gemm<S, T, X>(args, m, tile, rows, out);
  }
};

int64_t scale_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

template <typename S, typename T>
void run(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  const QuantizedTiles& weight = args.weight;
  const int64_t steps = steps_of(weight.k), tile_scales = weight.groups * kTile;
  for (int64_t tile = begin; tile < end; ++tile) {
    TileArgs m;
    m.data = static_cast<const char*>(weight.data) + tile * steps * S::kBytes;
    m.scales = static_cast<const char*>(weight.scales) + tile * tile_scales * scale_bytes(weight.scale_dtype);
    m.zero_points = weight.zero_points ? weight.zero_points + tile * tile_scales : nullptr;
    m.groups = weight.groups;
    m.steps = steps / weight.groups;
    const char* x = static_cast<const char*>(args.packed_x);
    for (int64_t row = 0, width; row < args.rows; row += width) {
      width = next_chunk<S>(weight, args.rows - row);
      m.x = x;
      m.x_sums = reinterpret_cast<const float*>(x + loop_rows(width) * S::elements(weight.k) *
                                                        static_cast<int64_t>(sizeof(typename S::Element)));
      T* out = static_cast<T*>(args.out) + row * args.out_stride;
      with_rows(width, TileGemm<S, T>{args, m, tile, width, out});
      x += chunk_bytes<S>(weight, width);
    }
  }
}

// ---- dequantization ----

template <typename S, int j>
LB_INLINE void unpack_parts(typename S::Loaded w, VF offset, VF scale, int64_t step, float (*to)[kTile]) {
  store(to[S::first_column(step, j, 1)], (S::template part<j>(w) + offset) * scale);
  if constexpr (j + 1 < S::kParts) unpack_parts<S, j + 1>(w, offset, scale, step, to);
}

template <typename S, typename T>
void unpack(const QuantizedTiles& weight, int64_t tile, T* out) {
  const int64_t steps = steps_of(weight.k), k = weight.k, steps_in_group = steps / weight.groups;
  const int64_t rows = weight.n - tile * kTile < kTile ? weight.n - tile * kTile : kTile;
  const char* data = static_cast<const char*>(weight.data) + tile * steps * S::kBytes;
  constexpr int64_t kBlock = kPack / kStep;  // steps
  for (int64_t step = 0; step < steps; step += kBlock) {
    float block[kPack][kTile];
    const int64_t count = steps - step < kBlock ? steps - step : kBlock;
    for (int64_t i = 0; i < count; ++i, data += S::kBytes) {
      const int64_t at = (tile * weight.groups + (step + i) / steps_in_group) * kTile;
      for (int lane = 0; lane < kTile; lane += kLanes) {
        VF scale{}, offset{};
        LB_DISPATCH_DTYPE(weight.scale_dtype, Scale,
                          scale = load(static_cast<const Scale*>(weight.scales) + at + lane));
        if (weight.zero_points) offset = splat(8.0f) - from_uint8(weight.zero_points + at + lane);
        unpack_parts<S, 0>(S::read(data, lane), offset, scale, i,
                           reinterpret_cast<float (*)[kTile]>(&block[0][lane]));
      }
    }
    const int64_t columns = k - step * kStep < kPack ? k - step * kStep : kPack;
    for (int64_t row = 0; row < rows; ++row) {
      float numbers[kPack];
      for (int64_t c = 0; c < columns; ++c) numbers[c] = block[c][row];
      T* to = out + row * k + step * kStep;
      for_lanes(columns, [&](int64_t i, auto n) { store(to + i, load(numbers + i, n), n); });
    }
  }
}

// ---- by dtype ----

#if defined(__AMX_BF16__)
constexpr bool kHasMatrixUnit = true;
#else
constexpr bool kHasMatrixUnit = false;
#endif

// f with what multiplies `rows` rows of x of dtype T by this weight.
template <typename T, typename F>
LB_INLINE void with_products(const QuantizedTiles& weight, int64_t rows, const F& f) {
  // Those of one row, where each row is to have its bits.
  const int64_t as = weight.order == Order::of_one_row ? 1 : rows;
  weight.rounds_x ? f(W4Int8{}) : with_steps<T>(weight.bits, as, f);
}

int64_t packed_bytes_any(DType dtype, const QuantizedTiles& weight, int64_t rows) {
#if defined(__AMX_BF16__)
  if (is_tiled(dtype, weight, rows)) return tiled_bytes(weight, rows);
#endif
  int64_t bytes = 0;
  LB_DISPATCH_DTYPE(dtype, T, with_products<T>(weight, rows, [&](auto s) {
                      bytes = packed_bytes<decltype(s)>(weight, rows);
                    }));
  return bytes;
}

int64_t chunks_any(DType dtype, const QuantizedTiles& weight, int64_t rows) {
#if defined(__AMX_BF16__)
  if (is_tiled(dtype, weight, rows)) return chunks_of(rows);
#endif
  int64_t most = 0;
  LB_DISPATCH_DTYPE(
      dtype, T, with_products<T>(weight, rows, [&](auto s) { most = most_of_chunk<decltype(s)>(weight); }));
  return (rows + most - 1) / most;
}

void pack_chunks_any(DType dtype, const QuantizedTiles& weight, const void* x, int64_t rows, int64_t begin,
                     int64_t end, void* packed) {
#if defined(__AMX_BF16__)
  if (is_tiled(dtype, weight, rows)) {
    const auto pack_all = weight.rounds_x ? pack_tiled_int8 : pack_tiled;
    return pack_all(static_cast<const bf16*>(x), rows, weight.k, begin, end, static_cast<bf16*>(packed));
  }
#endif
  LB_DISPATCH_DTYPE(dtype, T, with_products<T>(weight, rows, [&](auto s) {
                      pack<decltype(s)>(weight, static_cast<const T*>(x), rows, begin, end,
                                        static_cast<char*>(packed));
                    }));
}

void pack_any(DType dtype, const QuantizedTiles& weight, const void* x, int64_t rows, void* packed) {
  pack_chunks_any(dtype, weight, x, rows, 0, chunks_any(dtype, weight, rows), packed);
}

void run_any(DType dtype, const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
#if defined(__AMX_BF16__)
  if (is_tiled(dtype, args.weight, args.rows)) return run_tiled(args, begin, end);
#endif
  LB_DISPATCH_DTYPE(dtype, T, with_products<T>(args.weight, args.rows, [&](auto s) {
                      run<decltype(s), T>(args, begin, end);
                    }));
}

void unpack_any(DType dtype, const QuantizedTiles& weight, int64_t tile, void* out) {
  LB_DISPATCH_DTYPE(dtype, T, {
    weight.bits == 8 ? unpack<W8>(weight, tile, static_cast<T*>(out))
                     : unpack<W4>(weight, tile, static_cast<T*>(out));
  });
}

}  // namespace

extern const QuantizedLinearKernels quantized_linear_kernels;
const QuantizedLinearKernels quantized_linear_kernels = {packed_bytes_any, pack_any,       chunks_any,
                                                         pack_chunks_any,  run_any,        unpack_any,
                                                         kMatrixKernels,   kQuantizedGemm, kHasMatrixUnit};

}  // namespace LB_ISA
}  // namespace liteboost
