// Products of many rows, for quantized_linear_cpu_isa.cpp, with AVX2 alone: weights become the panels of floats of linear_gemm.h,
// of which a tile is a strip as it lies. They are converted once for all rows, by the loops of chunks once for every eight.
#pragma once

#include "linear/linear_gemm.h"
#include "quantized_linear/quantized_linear.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
static_assert(kGemmStrip == kTile && kGemmColumns == kPanelTiles * kTile);

// Part j of a step and those behind it, whose first column is `column`, of kLanes outputs.
template <typename S, int j = 0>
LB_INLINE void store_parts(typename S::Loaded w, VF offset, VF factor, int64_t step, int64_t k,
                           float* strip) {
  const int64_t column = S::first_column(step, j, 1);
  if (column < k) store(strip + column * kTile, (S::template part<j>(w) + offset) * factor);
  if constexpr (j + 1 < S::kParts) store_parts<S, j + 1>(w, offset, factor, step, k, strip);
}

// strip[column][output] of a tile, dequantized.
template <typename S, typename T>
void unpack_strip(const QuantizedTiles& weight, int64_t tile, float* strip) {
  const int64_t steps = steps_of(weight.k), in_group = steps / weight.groups;
  const char* data = static_cast<const char*>(weight.data) + tile * steps * S::kBytes;
  for (int lane = 0; lane < kTile; lane += kLanes) {
    for (int64_t group = 0; group < weight.groups; ++group) {
      const int64_t at = (tile * weight.groups + group) * kTile + lane;
      const VF factor = load(static_cast<const T*>(weight.scales) + at);
      const VF offset = weight.zero_points ? splat(8.0f) - from_uint8(weight.zero_points + at) : VF{};
      for (int64_t step = group * in_group; step < (group + 1) * in_group; ++step)
        store_parts<S>(S::read(data + step * S::kBytes, lane), offset, factor, step, weight.k, strip + lane);
    }
  }
}

int64_t quantized_gemm_scratch(int64_t k, int64_t panels) { return gemm_scratch<float>(k, panels); }

void quantized_gemm(DType dtype, const QuantizedLinearArgs& args, const float* x, int64_t panel, int64_t end,
                    int64_t row_begin, int64_t row_end, float* scratch) {
  if (row_begin >= row_end) return;
  const QuantizedTiles& weight = args.weight;
  GemmArgs gemm{};
  gemm.x = x;
  gemm.bias = args.bias;
  gemm.out = args.out;
  gemm.rows = args.rows;
  gemm.n = weight.n;
  gemm.k = weight.k;
  const auto pack = [&](int64_t column, int64_t columns, float* packed) {
    for (int64_t i = 0; i < columns; i += kTile, packed += weight.k * kTile) {
      LB_DISPATCH_DTYPE(weight.scale_dtype, T, {
        weight.bits == 8 ? unpack_strip<W8, T>(weight, (column + i) / kTile, packed)
                         : unpack_strip<W4, T>(weight, (column + i) / kTile, packed);
      });
    }
  };
  const int64_t tiles = tiles_of(weight.n), next = end * kPanelTiles < tiles ? end * kPanelTiles : tiles;
  const int64_t behind = tiles - next, as_many = (end - panel) * kPanelTiles;
  const LinesAhead ahead{static_cast<const char*>(weight.data) + next * weight.tile_bytes(),
                         weight.tile_bytes(), weight.tile_bytes(), behind < as_many ? behind : as_many};
  LB_DISPATCH_DTYPE(dtype, T, gemm_packed<T>(gemm, panel, end, row_begin, row_end, scratch, ahead, pack));
}

constexpr QuantizedGemmKernels kQuantizedGemm = {quantized_gemm_scratch, quantized_gemm};
#else
constexpr QuantizedGemmKernels kQuantizedGemm = {nullptr, nullptr};
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
