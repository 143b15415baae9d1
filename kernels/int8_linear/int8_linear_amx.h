// linear_w8a8 by the tiles of AMX: the sums that vectors make, of the same integers. Part of
// int8_linear_cpu_isa.cpp; compiled where there are tiles.
//
// Some rows of x (`run_some`): x is packed as [group of up to two tiles of 16 rows][step][tile][word][row], the
// weight read as it lies
// (common/tiles.h). Many rows (`run_panels_of_tiles`): x is read as it lies, 64 bytes of 16 rows, and of the weight
// panels, each of which has the words of 16 outputs side by side.
#pragma once

#include "common/tiles.h"
#include "common/vec_transpose.h"
#include "int8_linear/int8_products.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Words and sums of a tile in 32 bits, and bytes of a step.
constexpr int64_t kTileWords = kTileBytes / 4, kStepBytes = 64;
static_assert(kLanes == kTileRows && kPanel % (2 * kTileRows) == 0, "pairs of tiles across a panel");

// ---- some rows ----

// Rows of x that are multiplied together, and the most that `run_some` takes: beyond, panels are faster.
constexpr int64_t kGroupRows = 2 * kTileRows;
constexpr int64_t kSomeRows = 4 * kGroupRows;

int64_t some_words(int64_t rows, int64_t k) { return tiles_of(rows) * words(k) * kTileRows; }

// The words of all rows of x to `packed`, zero beyond the rows.
void pack_some(const Int8LinearArgs& args, int32_t* packed) {
  const int64_t count = words(args.k);
  for (int64_t group = 0; group < args.rows; group += kGroupRows) {
    for (int64_t w = 0; w < count; w += kLanes) {
      for (int64_t row = group; row < args.rows && row < group + kGroupRows; row += kTileRows) {
        VF block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          block[i] = row + i < args.rows ? (VF)load_words(args.words + (row + i) * count + w) : VF{};
        transpose(block);
        memcpy(packed, block, sizeof(block));
        packed += kTileWords;
      }
    }
  }
}

// Outputs [at, at + 16 N) of which `count` of the last 16 are there, and where the weight of those that are next lies.
struct SomeOutputs {
  int64_t at, count;
  const int8_t* next;
};

// The last columns of rows of weight, fewer than a step, with zeros behind them.
template <int N>
void stage_rest(const Int8LinearArgs& args, const SomeOutputs& outputs, int8_t* staged) {
  const int64_t rest = args.k % kStepBytes, rows = (N - 1) * kTileRows + outputs.count;
  const int8_t* weight = args.weight + outputs.at * args.k + args.k - rest;
  memset(staged, 0, static_cast<size_t>(N * kTileBytes));
  for (int64_t row = 0; row < rows; ++row)
    memcpy(staged + row * kStepBytes, weight + row * args.k, static_cast<size_t>(rest));
}

// These outputs of X tiles of rows of x from `row` on. With the first rows of x, what is next is fetched.
template <int N, int X, typename Finish>
void run_outputs(const Int8LinearArgs& args, const SomeOutputs& outputs, int64_t row, Finish finish) {
  const int64_t whole = args.k / kStepBytes;
  const char* x = reinterpret_cast<const char*>(args.packed + row * words(args.k));
  alignas(64) int32_t sums[N * X * kTileWords];
  const int8_t* weight = args.weight + outputs.at * args.k;
  const TilePart part = {reinterpret_cast<const char*>(weight), args.k, kStepBytes, whole};
  TileFetch fetch(outputs.next, args.k, whole, N * kTileRows);
  row == 0 ? multiply_tiles<MultiplyInt8, N, X, true>(part, fetch, x, sums, true)
           : multiply_tiles<MultiplyInt8, N, X, false>(part, fetch, x, sums, true);
  if (whole * kStepBytes < args.k) {
    alignas(64) int8_t staged[N * kTileBytes];
    stage_rest<N>(args, outputs, staged);
    const TilePart rest = {reinterpret_cast<const char*>(staged), kStepBytes, 0, 1};
    multiply_tiles<MultiplyInt8, N, X, false>(rest, fetch, x + whole * X * kTileBytes, sums, false);
  }
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t tile = 0; tile < X; ++tile, row += kTileRows) {
      VF block[kLanes];
      const int32_t* from = sums + (n * X + tile) * kTileWords;
      const int64_t count = n + 1 < N ? kTileRows : outputs.count;
      for (int i = 0; i < kLanes; ++i) block[i] = i < count ? (VF)load_words(from + i * kLanes) : VF{};
      transpose(block);
      for (int64_t r = 0; r < kLanes && row + r < args.rows; ++r) {
        // `finish` takes off what the offset of weights adds, which these do not have.
        finish((VI)block[r] + args.row_offsets[row + r], row + r, outputs.at + n * kTileRows);
      }
    }
    row -= X * kTileRows;
  }
}

template <int N, typename Finish>
void run_all_rows(const Int8LinearArgs& args, const SomeOutputs& outputs, Finish finish) {
  for (int64_t row = 0; row < args.rows; row += kGroupRows) {
    args.rows - row > kTileRows ? run_outputs<N, 2>(args, outputs, row, finish)
                                : run_outputs<N, 1>(args, outputs, row, finish);
  }
}

// out[:, begin:end]; `finish(sums, row, column)` takes kLanes outputs.
template <typename Finish>
void run_some(const Int8LinearArgs& args, int64_t begin, int64_t end, Finish finish) {
  configure_tiles(kTileRows);
  // Of those that are next, or of these once more where none are.
  const auto outputs = [&](int64_t columns) {
    const int64_t next = begin + 2 * columns <= end ? begin + columns : begin;
    return SomeOutputs{begin, kTileRows, args.weight + next * args.k};
  };
  if (args.rows <= kTileRows) {
    for (; begin + 4 * kTileRows <= end; begin += 4 * kTileRows)
      run_outputs<4, 1>(args, outputs(4 * kTileRows), 0, finish);
  }
  for (; begin + 2 * kTileRows <= end; begin += 2 * kTileRows)
    run_all_rows<2>(args, outputs(2 * kTileRows), finish);
  for (; begin < end; begin += kTileRows) {
    SomeOutputs last = outputs(kTileRows);
    if (end - begin < kTileRows) {
      last.count = end - begin;
      configure_tiles(last.count);
    }
    run_all_rows<1>(args, last, finish);
  }
  _tile_release();
}

// ---- many rows ----

// As configure_tiles, where x is what is read by rows: two tiles of it with so many rows in each.
void configure_rows(int64_t first_rows, int64_t second_rows) {
  load_tile_config(
      {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, kTileRows, kTileRows});
}

constexpr int64_t kPair = 2 * kTileRows;

// Sums [row][two tiles of outputs] of up to two tiles of rows, and which rows and columns of `out` they are of.
struct PairOfSums {
  alignas(64) int32_t sums[kPair * kPair];
  int64_t row, rows = 0, column, finished = 0;

  // The next `count` vectors of outputs, row after row, as far as there are any.
  template <typename Finish>
  LB_INLINE void finish_some(int64_t n, int64_t count, Finish finish) {
    const int64_t end = finished + count < 2 * rows ? finished + count : 2 * rows;
    for (; finished < end; ++finished) {
      const int64_t at = column + finished % 2 * kTileRows;
      if (at < n) finish(load_words(sums + finished * kTileRows), row + finished / 2, at);
    }
  }
};

// Sums of x, `count` words a row, times two tiles of a panel. `beside` is called after each step of 64 bytes, all of
// them before the sums are written: vectors are idle while tiles multiply.
template <bool has_second, typename Beside>
LB_INLINE void multiply_pair(const int32_t* x, int64_t count, const int32_t* packed, int32_t* sums,
                             Beside beside) {
  constexpr int64_t kRowBytes = kPanel * 4, kSumBytes = kPair * 4;
  const int64_t x_bytes = count * 4;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (has_second) _tile_zero(2);
  if constexpr (has_second) _tile_zero(3);
  for (int64_t w = 0; w < count; w += kTileRows, packed += kTileRows * kPanel) {
    _tile_loadd(4, x + w, x_bytes);
    _tile_loadd(6, packed, kRowBytes);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, packed + kTileRows, kRowBytes);
    _tile_dpbsud(1, 4, 7);
    if constexpr (has_second) _tile_loadd(5, x + kTileRows * count + w, x_bytes);
    if constexpr (has_second) _tile_dpbsud(2, 5, 6);
    if constexpr (has_second) _tile_dpbsud(3, 5, 7);
    beside();
  }
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kTileRows, kSumBytes);
  if constexpr (has_second) _tile_stored(2, sums + 2 * kTileWords, kSumBytes);
  if constexpr (has_second) _tile_stored(3, sums + 2 * kTileWords + kTileRows, kSumBytes);
  __asm__ volatile("" ::: "memory");
}

// Rows [begin, end) with all of these panels; `finish(sums, row, column)` takes kLanes outputs. The sums of one pair
// of tiles are finished beside the products of the next.
template <typename Finish>
void run_panels_of_tiles(const Int8LinearArgs& args, const Int8Panels& panels, int64_t begin, int64_t end,
                         Finish finish) {
  const int64_t count = words(args.k), steps = count / kTileRows;
  const int64_t first = panels.first * kPanel, last = first + panels.count * kPanel;
  const int64_t columns = last < args.n ? last : args.n;
  const int64_t a_step = (2 * kPair + steps - 1) / steps;
  PairOfSums pair;
  const auto beside = [&]() __attribute__((always_inline)) { pair.finish_some(args.n, a_step, finish); };
  for (int64_t row = begin, rows, configured = 0; row < end; row += rows) {
    rows = end - row < kPair ? end - row : kPair;
    const bool has_second = rows > kTileRows;
    if (rows != configured) configure_rows(has_second ? kTileRows : rows, has_second ? rows - kTileRows : 0);
    configured = rows;
    const int32_t* x = args.words + row * count;
    for (int64_t column = first; column < columns; column += kPair) {
      const int64_t at = column - first;
      const int32_t* packed = panels.packed + at / kPanel * kPanel * count + at % kPanel;
      has_second ? multiply_pair<true>(x, count, packed, pair.sums, beside)
                 : multiply_pair<false>(x, count, packed, pair.sums, beside);
      pair.row = row, pair.rows = rows, pair.column = column, pair.finished = 0;
    }
  }
  _tile_release();
  pair.finish_some(args.n, 2 * kPair, finish);
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
