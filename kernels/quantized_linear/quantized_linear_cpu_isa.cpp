// The loops of quantized_linear.h on raw pointers, compiled once an instruction set.
//
// A tile of weight is multiplied by a *chunk* of rows of x (quantized_chunks.h), with the accumulators in registers: each
// integer is loaded once, and unpacked once a chunk.
#include "quantized_linear/quantized_linear.h"

#include "common/prefetch.h"
#include "common/vec.h"
#if defined(__AMX_BF16__)
#include "quantized_linear/quantized_amx.h"
#endif
#include "quantized_linear/quantized_by_dtype.h"
#include "quantized_linear/quantized_chunks.h"
#include "quantized_linear/quantized_gemm.h"
#include "quantized_linear/quantized_int8.h"
#include "quantized_linear/quantized_int8_rows.h"
#include "quantized_linear/quantized_limbs.h"
#include "quantized_linear/quantized_limbs_madd.h"
#include "quantized_linear/quantized_matrix.h"
#include "quantized_linear/quantized_neon.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// ---- products: on aarch64 those of quantized_neon.h ----

constexpr int64_t kSummedSteps = 16;  // steps summed by themselves: long sums round more

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

// Writes the outputs from `first` on of `rows` rows to those of `out`.
template <typename T, int X>
LB_INLINE void write_sums(const QuantizedLinearArgs& args, const VF (&sums)[X], int64_t first, int64_t rows,
                          T* out) {
  note_not_finite(sums, args.not_finite);
  const auto write = [&](auto lanes) {
    const VF bias = args.bias ? load(static_cast<const T*>(args.bias) + first, lanes) : VF{};
    for (int64_t r = 0; r < rows; ++r) {
      store(out + r * args.out_stride + first, args.bias ? sums[r] + bias : sums[r], lanes);
    }
  };
  const int64_t left = args.weight.n - first;
  left >= kLanes ? write(Full{}) : write(static_cast<int>(left));
}

// The same of tile `tile`, from all[row * kTile + i].
template <typename T, int X>
LB_INLINE void write_tile(const QuantizedLinearArgs& args, const float* all, int64_t tile, int64_t rows,
                          T* out) {
  for (int lane = 0; lane < kTile && tile * kTile + lane < args.weight.n; lane += kLanes) {
    VF sums[X];
    for (int r = 0; r < X; ++r) sums[r] = load(all + r * kTile + lane);
    write_sums(args, sums, tile * kTile + lane, rows, out);
  }
}

// Writes `rows` rows of the outputs of tile `tile` to those of `out`.
template <typename S, typename T, int X>
void tile_gemm(const QuantizedLinearArgs& args, const TileArgs& m, int64_t tile, int64_t rows, T* out) {
  if constexpr (kIsAtOnce<S>) {
    float all[X * kTile];
    LB_DISPATCH_DTYPE(args.weight.scale_dtype, Scale, whole_tile<S, Scale, X>(m, all));
    write_tile<T, X>(args, all, tile, rows, out);
  } else {
    for (int lane = 0; lane < kTile && tile * kTile + lane < args.weight.n; lane += kLanes) {
      VF sums[X];
      LB_DISPATCH_DTYPE(args.weight.scale_dtype, Scale, lane_sums<S, Scale, X>(m, lane, sums));
      write_sums(args, sums, tile * kTile + lane, rows, out);
    }
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

// The first part of a tile's weights and scales; x is still to be set.
LB_INLINE TileArgs tile_args(const QuantizedTiles& weight, int64_t tile) {
  const int64_t steps = steps_of(weight.k), tile_scales = weight.groups * kTile;
  TileArgs m{};
  m.data = static_cast<const char*>(weight.data) + tile * weight.tile_bytes();
  m.scales = static_cast<const char*>(weight.scales) + tile * tile_scales * scale_bytes(weight.scale_dtype);
  m.zero_points = weight.zero_points ? weight.zero_points + tile * tile_scales : nullptr;
  m.groups = weight.groups;
  m.steps = steps / weight.groups;
  return m;
}

#if defined(LB_UNPACKS_INT8)
// From so many rows on weights are unpacked for several rows at a time.
constexpr int64_t kUnpackedRows = 5;
static_assert(kChunkSums == kChunk * kTile, "sums of a whole chunk");

template <typename T>
void run_unpacked(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  const QuantizedTiles& weight = args.weight;
  float sums[kBlockChunks * kChunkSums];
  for (int64_t tile = begin; tile < end; ++tile) {
    const TileArgs m = tile_args(weight, tile);
    const Int8Tile whole{m.data, m.scales, m.zero_points, nullptr, 0, m.groups, m.steps / (kPack / kStep)};
    const char* x = static_cast<const char*>(args.packed_x);
    T* out = static_cast<T*>(args.out);
    for (int64_t left = args.rows; left > 0;) {
      Int8Chunk chunks[kBlockChunks];
      int64_t count = 0;
      for (; count < kBlockChunks && left > 0; ++count) {
        const int64_t rows = next_chunk<W4Int8>(weight, left);
        chunks[count] = {reinterpret_cast<const PackBytes*>(x), loop_rows(rows), rows};
        x += chunk_bytes<W4Int8>(weight, rows);
        left -= rows;
      }
      LB_DISPATCH_DTYPE(weight.scale_dtype, Scale, unpacked_tile<Scale>(whole, chunks, count, sums));
      for (int64_t c = 0; c < count; out += chunks[c++].rows * args.out_stride)
        write_tile<T, kChunk>(args, sums + c * kChunkSums, tile, chunks[c].rows, out);
    }
  }
}
#endif

template <typename S, typename T>
void run(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
#if defined(LB_UNPACKS_INT8)
  if constexpr (__is_same(S, W4Int8)) {
    if (args.rows >= kUnpackedRows) return run_unpacked<T>(args, begin, end);
  }
#endif
  const QuantizedTiles& weight = args.weight;
  for (int64_t tile = begin; tile < end; ++tile) {
    TileArgs m = tile_args(weight, tile);
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
