// Linear layers whose weights are integers of 8 or 4 bits, with activations of 16 or 32 bits, or rounded to 8.
//
// linear_packed(x, tiles, scales, zero_points, bias, out_features) = x @ ((q - zero_point) * scale)^T + bias
// linear_w4a8(x, tiles, scales, zero_points, bias, out_features), of 4 bits: the same, with every 32 columns of a row
//                                  of x rounded to int8 with a scale of largest / 127, where largest is their largest
//                                  magnitude, or 2^-100 if that is more
//
//   x            [..., K]          float32, bfloat16 or float16; any strides
//   tiles        [T, K32 / 4, 64]  int8, K32 being K rounded up to 32: four columns of each of 16 rows; or
//                [T, K / 8, 64]    uint8: four bytes of packing 1 (eight columns) of each of 16 rows
//   scales       [T, G, 16]        float32, bfloat16 or float16, whatever x is; G is 1, or groups of K / G columns,
//                                  which is 32 or a multiple of it
//   zero_points  [T, G, 16]        uint8, for 4 bits; none stands for 8. 0 to 15 in files; the loops take 16, too.
//                                  8 bits have none: q is signed
//   bias         [N] or none, of x's dtype
//   result       [..., N]          contiguous; x.dtype
//
// A tile holds what belongs to 16 outputs, side by side: the lanes of a register are 16 outputs, so no horizontal sum
// over lanes is needed at the end, and their scales are one load. The last of T tiles is filled up with zeros. Files
// have plain rows instead, which layers prepack (liteboost_adaptor/ops/quantized_linear.py): int8 [N, K] and scales
// [N], or uint8 [N, K / 2] and scales [N, G].
//
// Packing 1 of 4 bits: 16 bytes hold 32 columns, as eight little-endian 16-bit words; nibble j (of 4, lowest first) of
// word i is column 8 * j + i. A line of a tile is 64 bytes, four of each of its 16 outputs: two words, eight columns.
// Of 32 columns, line m (0 to 3) has
//
//   byte     0              1              2              3            | 4 to 7           | ... | 60 to 63
//   output   0                                                         | 1                | ... | 15
//   word     2m                            2m + 1                      | the same columns | ... | the same columns
//   nibble   j=0    j=1     j=2    j=3     j=0    j=1     j=2    j=3   |                  |     |
//   column   2m     2m+8    2m+16  2m+24   2m+1   2m+9    2m+17  2m+25 |                  |     |
//
// This order is for bf16: one shift of 16-bit lanes by 4 * j leaves columns 8 * j + 2 * m and the next in the lowest
// bits of an output's two lanes. As they are, these are the indices of one vpermw into a table of bf16, which gives the
// pairs that vdpbf16ps multiplies by a pair of x (W4Pairs in quantized_steps.h).
//
// _linears_packed is linear_packed or linear_w4a8 for each of several weights; threads share out all their tiles as if
// they were those of one weight.
//
// Rounding of linear_packed: products of integers and x are summed in fp32 over up to 128 columns of a group. These
// sums times the scale are summed in fp32, the bias is added, and the result is rounded once to x.dtype. The number of
// threads changes no bit. Exceptions:
//
//   AMX, which multiplies bf16 from a few       sums are of up to 256 columns of a group, and added fused
//   rows on
//   more than kQuantizedRows rows               weights are rounded to x.dtype first, where torch's product of this
//                                               dtype has units that the loops do not use (quantized_linear_cpu.cpp),
//                                               and for bf16 with vdpbf16ps but no AMX, there with several groups only
//   more than kQuantizedRows rows with AVX2     weights are dequantized to fp32 first, sums are of up to 128 columns
//   alone
//   bf16 with vdpbf16ps                         values below 2^-126 in magnitude count as zero
//   the same, one row (of w8 up to three)       limbs: 32 columns at a time become integers of 24 bits times a power of
//                                               two, whose products are summed exactly (quantized_limbs.h); each column
//                                               is rounded to a multiple of at most 2^-22 of the largest of them, or of
//                                               2^-100 if that is more
//   bf16 and f16 with AVX2 alone, one row (of   the same limbs
//   w4 up to four)
//   bf16 and f16 with dotprod or i8mm_bf16      limbs in all loops on integers, whatever the number of rows
//
// linear_w4a8 sums in one order for all numbers of rows: x is multiplied by 127 / largest in fp32 and rounded to the
// nearest integer, ties to even; the products of 32 columns with q - zero_point are summed exactly; that sum, in fp32,
// times (scale * largest / 127, rounded) is added to those before, fused where the CPU has fma; then bias, then one
// rounding. If one of 32 columns is NaN or infinity, the row's outputs are NaN. Source: Dettmers et al. 2022,
// arXiv:2208.07339 (absmax, here by 32 columns); Frantar et al. 2022, arXiv:2210.17323 (groups).
//
// Outputs of linear_packed that are not finite are those of the weight dequantized to fp32: scaling after a sum,
// subtracting a zero point from it, or limbs would make NaN of infinities that x @ weight^T never combines.
//
// No backward: an input that requires grad is an error in grad mode.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"
#include "common/order.h"

namespace liteboost {

// Outputs of a tile.
constexpr int64_t kTile = 16;
// Columns that are read together.
constexpr int64_t kStep = 8;
// Columns of 4 bits that are packed together; those of 8 are filled up to a multiple of it.
constexpr int64_t kPack = 32;
// Steps of k columns in a tile.
constexpr int64_t steps_of(int64_t k) { return (k + kPack - 1) / kPack * (kPack / kStep); }
// Bytes of a line of a tile: four of each of its rows.
constexpr int64_t kTileLine = 4 * kTile;
// Tiles of n outputs.
constexpr int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }
// Columns that these four bytes have.
constexpr int64_t columns_of_line(bool is_w8) { return is_w8 ? 4 : 8; }
// The most rows that the loops on integers serve where something else is faster for more.
constexpr int64_t kQuantizedRows = 32;

// Weights in tiles, with their scales.
struct QuantizedTiles {
  const void* data;
  const void* scales;
  const uint8_t* zero_points;  // or null for none
  int64_t n, k, groups;        // k as it is, not filled up
  int32_t bits;
  DType scale_dtype;
  bool rounds_x = false;  // to 8 bits, as linear_w4a8 does; with 4 bits only
  Order order = Order::fastest;

  int64_t tile_bytes() const { return steps_of(k) * kStep * kTile * bits / 8; }
};

struct QuantizedLinearArgs {
  QuantizedTiles weight;
  const void* packed_x;  // as QuantizedLinearKernels::pack wrote it
  const void* bias;      // [n] or null
  void* out;             // [rows, n], rows out_stride elements apart
  int64_t rows, out_stride;
  bool* not_finite;  // set where one of `out` is not finite, else left; or null
};

// Tiles of a panel of quantized_gemm.h.
constexpr int64_t kPanelTiles = 4;
// Many rows of bf16 are multiplied by this much of a weight at a time; see quantized_matrix.h.
constexpr int64_t kMatrixTiles = 4, kMatrixRows = 6;

struct MatrixArgs {
  const void* packed_x;  // as MatrixKernels::pack wrote it, from the first pair of these columns on
  int64_t chunk_bytes;   // from one chunk to the next
  const void* weight;    // as MatrixKernels::unpack wrote it
  const float* scales;   // [kMatrixTiles * kTile]
  float* sums;  // [rows rounded up to chunks, kMatrixTiles * kTile], from the columns before to those behind
  bool is_first, is_last;
  const void* bias;  // of these outputs, or null
  void* out;         // [rows, outputs], rows out_stride elements apart
  int64_t rows, pairs, outputs, out_stride;
  bool* not_finite;  // as of QuantizedLinearArgs
};

// All null where the CPU has no product of pairs of bf16.
struct MatrixKernels {
  // A chunk of x: up to kMatrixRows rows of k columns, contiguous.
  void (*pack)(const void* x, int64_t rows, int64_t k, int64_t pairs, void* packed);
  // Steps [begin, end) of one of the tiles, whole packs; 64 bytes in each of kMatrixTiles * 64.
  void (*unpack)(const QuantizedTiles& weight, int64_t tile, int64_t begin, int64_t end, void* pairs,
                 float* scales);
  void (*run)(const MatrixArgs& args);
};

// All of x, multiplied by a weight that is dequantized to float32 (quantized_gemm.h). All null where another product is faster.
struct QuantizedGemmKernels {
  // Floats that run needs as scratch for so many panels of kPanelTiles tiles, aligned to 64 bytes.
  int64_t (*scratch)(int64_t k, int64_t panels);
  // out[row_begin:row_end] of the outputs of panels [panel, end). x [rows, k] is float32, contiguous; bias and out are of dtype.
  void (*run)(DType dtype, const QuantizedLinearArgs& args, const float* x, int64_t panel, int64_t end,
              int64_t row_begin, int64_t row_end, float* scratch);
};

// Torch-free loops. `dtype` is that of x, bias and out.
struct QuantizedLinearKernels {
  // Bytes that pack writes. The buffer must be aligned to 64.
  int64_t (*packed_bytes)(DType dtype, const QuantizedTiles& weight, int64_t rows);
  // x [rows, weight.k], contiguous, converted and interleaved as the loops want it for this weight.
  void (*pack)(DType dtype, const QuantizedTiles& weight, const void* x, int64_t rows, void* packed);
  // The same in parts: chunks [begin, end) of as many as there are.
  int64_t (*chunks)(DType dtype, const QuantizedTiles& weight, int64_t rows);
  void (*pack_chunks)(DType dtype, const QuantizedTiles& weight, const void* x, int64_t rows, int64_t begin,
                      int64_t end, void* packed);
  // The outputs of tiles [begin, end).
  void (*run)(DType dtype, const QuantizedLinearArgs& args, int64_t begin, int64_t end);
  // Tile `tile` of the weight, dequantized and rounded to dtype: rows of k, as many as the tile has.
  void (*unpack)(DType dtype, const QuantizedTiles& weight, int64_t tile, void* out);
  MatrixKernels matrix;
  QuantizedGemmKernels gemm;
  // Whether `run` multiplies rows of bf16 by the tiles of AMX (quantized_amx.h): nothing else is faster for many.
  bool has_matrix_unit;
};

LB_DECLARE_KERNELS(QuantizedLinearKernels, quantized_linear_kernels)

}  // namespace liteboost
