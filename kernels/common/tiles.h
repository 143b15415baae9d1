// Products of few rows of x by the tiles of AMX, for loops that are compiled where there are tiles.
//
// A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of weight, 64 bytes of K as they lie in
// memory, by as many bytes of 16 rows of x, and adds to 256 sums of 32 bits:
//
//   sums [row of weight][row of x] += weight [row of weight][word] . x [word][row of x]
//
// A *word* is 32 bits: two elements of bf16, or four integers. A *step* is 64 bytes of K.
#pragma once

#include "common/prefetch.h"
#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;

LB_INLINE int64_t tiles_of(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// The rows of each tile register, and the bytes of one; a register without rows is not there at all.
void load_tile_config(const int64_t (&rows)[8],
                      const int64_t (&row_bytes)[8] = {64, 64, 64, 64, 64, 64, 64, 64}) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = static_cast<uint16_t>(rows[i] > 0 ? row_bytes[i] : 0);
    config.rows[i] = static_cast<uint8_t>(rows[i]);
  }
  // The intrinsic of GCC says that it reads the first bytes only.
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Which tile registers are what: 0 to 3 sums, 4 and 5 x, 6 and 7 weights, of which there are `rows` rows in each.
LB_INLINE void configure_tiles(int64_t rows) {
  load_tile_config({rows, rows, rows, rows, kTileRows, kTileRows, rows, rows});
}

// The instruction that multiplies and adds: registers of sums, of weights and of x. The intrinsics take numbers only.
struct MultiplyBf16 {
  template <int sums, int weight, int x>
  LB_INLINE static void add() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(weight), "i"(x));
  }
};
struct MultiplyInt8 {
  template <int sums, int weight, int x>
  LB_INLINE static void add() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(weight), "i"(x));
  }
};

// The rows of a tile, `row_bytes` apart.
template <int tile>
LB_INLINE void load_tile(const void* from, int64_t row_bytes = 64) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(tile));
}

template <int tile>
LB_INLINE void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
}

// The same of what is stored, in rows of 64 bytes, which are read by others then.
template <int tile>
LB_INLINE void store_tile(void* to) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{64}), "i"(tile) : "memory");
}

// A part of a panel: `steps` steps of K of N tiles of rows of weight, whose rows are `row_bytes` apart and steps
// `step_bytes`.
struct TilePart {
  const char* weight;
  int64_t row_bytes, step_bytes, steps;
};

// Asks for `steps` cache lines of each of the rows at `row`: of a quarter of them one row after the other, and of each
// quarter in turn. Memory delivers four streams of as many pages a third faster than one.
struct TileFetch {
  const char* row;
  int64_t row_bytes, steps, quarter_bytes;
  int64_t step = 0, quarter = 0;

  LB_INLINE TileFetch(const void* rows, int64_t row_bytes, int64_t steps, int64_t count)
      : row(static_cast<const char*>(rows)),
        row_bytes(row_bytes),
        steps(steps),
        quarter_bytes(count / 4 * row_bytes) {}

  LB_INLINE void lines(int count) {
    for (int i = 0; i < count; ++i) {
      fetch_ahead(row + quarter * quarter_bytes + step * 64);
      quarter = (quarter + 1) & 3;
      if (quarter == 0 && ++step == steps) {
        step = 0;
        row += row_bytes;
      }
    }
  }
};

// sums[N][X] (tiles) += the part times x [step][X], from zero on where it `is_first`. Meanwhile fetches as many lines, or
// without `fetches` so many a step.
template <typename Product, int N, int X, bool fetches>
void multiply_tiles(const TilePart& part, TileFetch& fetch, const char* x, void* sums, bool is_first,
                    int lines = 0) {
  static_assert((N == 4 && X == 1) || (N <= 2 && X <= 2), "as many sums as registers");
  const int64_t row_bytes = part.row_bytes;
  const char* weight = part.weight;
  char* const tile = static_cast<char*>(sums);
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, tile, 64);
    if constexpr (N * X > 1) _tile_loadd(1, tile + kTileBytes, 64);
    if constexpr (N * X > 2) _tile_loadd(2, tile + 2 * kTileBytes, 64);
    if constexpr (N * X > 2) _tile_loadd(3, tile + 3 * kTileBytes, 64);
  }
  // Before each tile as many lines as it has: asked for in one go, those of a whole step wait for each other, and memory
  // delivers a sixth less.
  const auto ask = [&] {
    if constexpr (fetches) fetch.lines(static_cast<int>(kTileRows));
  };
  for (int64_t step = 0; step < part.steps; ++step, weight += part.step_bytes, x += X * kTileBytes) {
    ask();
    if constexpr (!fetches) {
      // Many rows of x come from the second cache.
      for (int i = 0; i < X * static_cast<int>(kTileRows); ++i)
        __builtin_prefetch(x + X * kTileBytes + i * 64, 0, 3);
      fetch.lines(lines);
    }
    _tile_loadd(4, x, 64);
    if constexpr (X == 2) _tile_loadd(5, x + kTileBytes, 64);
    _tile_loadd(6, weight, row_bytes);
    Product::template add<0, 6, 4>();
    if constexpr (X == 2) Product::template add<1, 6, 5>();
    if constexpr (N > 1) {
      ask();
      _tile_loadd(7, weight + kTileRows * row_bytes, row_bytes);
      if constexpr (X == 1) Product::template add<1, 7, 4>();
      if constexpr (X == 2) Product::template add<2, 7, 4>();
      if constexpr (X == 2) Product::template add<3, 7, 5>();
    }
    if constexpr (N > 2) {
      ask();
      _tile_loadd(6, weight + 2 * kTileRows * row_bytes, row_bytes);
      Product::template add<2, 6, 4>();
      ask();
      _tile_loadd(7, weight + 3 * kTileRows * row_bytes, row_bytes);
      Product::template add<3, 7, 4>();
    }
  }
  _tile_stored(0, tile, 64);
  if constexpr (N * X > 1) _tile_stored(1, tile + kTileBytes, 64);
  if constexpr (N * X > 2) _tile_stored(2, tile + 2 * kTileBytes, 64);
  if constexpr (N * X > 2) _tile_stored(3, tile + 3 * kTileBytes, 64);
  // Loads and stores of tiles are none to the compiler.
  __asm__ volatile("" ::: "memory");
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
