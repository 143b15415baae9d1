// Sums of some rows of x with the weight as it lies, in registers: a tile is four rows of weight by up to four of x; with
// four rows of x or fewer, which wait for memory, it is one row of weight after the other. Part of int8_linear_cpu_isa.cpp;
// compiled where there are 32 registers of 16 lanes, and no tiles of AMX.
#pragma once

#include "common/prefetch.h"
#include "common/vec_sums.h"
#include "int8_linear/int8_linear.h"
#include "int8_linear/int8_products.h"

namespace liteboost {
namespace LB_ISA {
namespace {

constexpr int kTileWeights = 4, kTileRows = 4;
// The most rows: for more, panels are faster.
constexpr int64_t kTiledRows = 64;
// Outputs whose sums are collected while x is read in blocks of columns, which stay in the first cache beside weights.
constexpr int64_t kTiledOutputs = 64, kBlockBytes = 32 << 10;
constexpr int64_t kLeastSteps = 8;
// How far ahead rows of weight are asked for, at least.
constexpr int64_t kTileAhead = 8 << 10;

typedef int32_t Four __attribute__((vector_size(4 * sizeof(int32_t))));
static_assert(kTileWeights == 4 && kTileWeights * kTileRows == kLanes, "sums of a tile fill one vector");

// Adds a tile's sums over k columns to totals[row * kTiledOutputs + weight]. `x_words` and `stride` lie between rows of x and
// of weight. Meanwhile asks for as many columns of `ahead` rows from `next` on.
template <int rows, int ahead>
LB_INLINE void tile_sums(const int8_t* weight, int64_t stride, int64_t k, const int32_t* x, int64_t x_words,
                         const int8_t* next, int32_t* totals) {
  VI sums[kLanes] = {};
  VI weights[kTileWeights];
  const auto multiply = [&](int64_t w) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const VI words = load_words(x + r * x_words + w);
#pragma GCC unroll 4
      for (int i = 0; i < kTileWeights; ++i) {
        VI& sum = sums[r * kTileWeights + i];
        sum = multiply_add(sum, weights[i], words);
      }
    }
  };
  int64_t w = 0, column = 0;
  for (; column + kColumns <= k; w += kLanes, column += kColumns) {
#pragma GCC unroll 4
    for (int i = 0; i < ahead; ++i) fetch_ahead(next + i * stride + column);
#pragma GCC unroll 4
    for (int i = 0; i < kTileWeights; ++i) weights[i] = read(weight + i * stride + column);
    multiply(w);
  }
  if (column < k) {
    for (int i = 0; i < kTileWeights; ++i) weights[i] = read(weight + i * stride + column, k - column);
    multiply(w);
  }
  const VI each = sum_each(sums);
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
    Four total, more;
    memcpy(&total, totals + r * kTiledOutputs, sizeof(total));
    memcpy(&more, reinterpret_cast<const char*>(&each) + r * sizeof(more), sizeof(more));
    total += more;
    memcpy(totals + r * kTiledOutputs, &total, sizeof(total));
  }
}

// k columns of kTileWeights rows of weight and of all rows of x. Each group of rows of x asks for `ahead` rows of weight
// from `next` on, until it is kTileWeights.
template <int ahead>
void tile_rows(const Int8LinearArgs& args, const int8_t* weight, const int32_t* x, int64_t k,
               const int8_t* next, int32_t* totals) {
  const int64_t count = words(args.k), stride = args.k;
  int asked = 0;
  for (int64_t row = 0, width; row < args.rows; row += width) {
    // All groups are of about the same size.
    const int64_t groups = (args.rows - row + kTileRows - 1) / kTileRows;
    width = (args.rows - row + groups - 1) / groups;
    const bool asks = asked < kTileWeights;
    switch (width) {
      case 2:
        asks ? tile_sums<2, ahead>(weight, stride, k, x, count, next, totals)
             : tile_sums<2, 0>(weight, stride, k, x, count, next, totals);
        break;
      case 3:
        asks ? tile_sums<3, ahead>(weight, stride, k, x, count, next, totals)
             : tile_sums<3, 0>(weight, stride, k, x, count, next, totals);
        break;
      default:
        asks ? tile_sums<4, ahead>(weight, stride, k, x, count, next, totals)
             : tile_sums<4, 0>(weight, stride, k, x, count, next, totals);
    }
    x += width * count;
    totals += width * kTiledOutputs;
    next += ahead * stride;
    asked += ahead;
  }
}

// Columns in a block: all blocks are of about the same size.
LB_INLINE int64_t tile_block(int64_t rows, int64_t k) {
  const int64_t steps = (k + kColumns - 1) / kColumns;
  const int64_t in_cache = kBlockBytes / (rows * static_cast<int64_t>(sizeof(VI)));
  const int64_t most = in_cache < kLeastSteps ? kLeastSteps : in_cache;
  const int64_t blocks = (steps + most - 1) / most;
  return (steps + blocks - 1) / blocks * kColumns;
}

// Sums of up to kTileRows rows of x with kLanes rows of weight from `weight` on, all of k columns, to totals[row]. The
// weight is read in the order of memory, each of its rows in as many parts as hide the latency of the sums.
template <int rows>
LB_INLINE void stream_sums(const int8_t* weight, int64_t k, const int32_t* x, int64_t x_words,
                           VI (&totals)[rows]) {
  constexpr int kParts = kTileRows / rows;
  VI each[rows][kLanes];
  for (int i = 0; i < kLanes; ++i, weight += k) {
    VI sums[kParts][rows] = {};
    const auto multiply = [&](int part, VI weights, int64_t w) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r)
        sums[part][r] = multiply_add(sums[part][r], weights, load_words(x + r * x_words + w));
    };
    int64_t w = 0, column = 0;
    for (; column + kParts * kColumns <= k; w += kParts * kLanes, column += kParts * kColumns) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const int8_t* at = weight + column + part * kColumns;
        fetch_ahead(at + kTileAhead);
        multiply(part, read(at), w + part * kLanes);
      }
    }
    for (; column < k; w += kLanes, column += kColumns) multiply(0, read(weight + column, k - column), w);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      each[r][i] = sums[0][r];
#pragma GCC unroll 4
      for (int part = 1; part < kParts; ++part) each[r][i] += sums[part][r];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) totals[r] = sum_each(each[r]);
}

// More than kTileRows rows of x, up to kTiledRows. `one(weight, x)` is the sum of one row of each;
// `finish(sums, row, column)` takes the kLanes outputs from `column` on.
template <int ahead, typename One, typename Finish>
void run_tiles(const Int8LinearArgs& args, int64_t begin, int64_t end, One one, Finish finish) {
  const int64_t count = words(args.k), stride = args.k;
  const int64_t block = tile_block(args.rows, args.k);
  alignas(64) int32_t totals[kTiledRows * kTiledOutputs];
  for (int64_t first = begin; first < end; first += kTiledOutputs) {
    const int64_t n = end - first < kTiledOutputs ? end - first : kTiledOutputs;
    memset(totals, 0, sizeof(int32_t) * static_cast<size_t>(args.rows * kTiledOutputs));
    const int8_t* weight = args.weight + first * stride;
    for (int64_t column = 0; column < args.k; column += block) {
      const int64_t k = args.k - column < block ? args.k - column : block;
      const int64_t tiles_ahead = kTileAhead / (kTileWeights * k);
      const int64_t rows_ahead = kTileWeights * (tiles_ahead < 1 ? 1 : tiles_ahead);
      for (int64_t i = 0; i + kTileWeights <= n; i += kTileWeights) {
        // In this block, in the next, or in the next panel.
        const int8_t* at = weight + i * stride + column;
        const int8_t* next = at + rows_ahead * stride;
        if (i + rows_ahead >= n) next += column + block < args.k ? block - n * stride : -column;
        tile_rows<ahead>(args, at, args.words + column / kColumns * kLanes, k, next, totals + i);
      }
    }
    for (int64_t i = n / kTileWeights * kTileWeights; i < n; ++i) {
      for (int64_t row = 0; row < args.rows; ++row)
        totals[row * kTiledOutputs + i] = one(weight + i * stride, args.words + row * count);
    }
    for (int64_t row = 0; row < args.rows; ++row) {
      for (int64_t i = 0; i < n; i += kLanes)
        finish(load_words(totals + row * kTiledOutputs + i), row, first + i);
    }
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
