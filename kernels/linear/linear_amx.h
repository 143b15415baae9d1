// Products of bf16 by the tiles of AMX, for two rows of x and more. Part of linear_cpu_isa.cpp; compiled where there are
// tiles.
//
// The weight, which is large, is not packed (common/tiles.h), and x is: as [group of up to two tiles of 16 rows][step][tile][word][row],
// zero beyond its rows and beyond K. A step is 32 elements of K.
//
// A *panel* is the rows of weight whose sums are in registers together; it is walked in *blocks* of K for all groups of
// x. Sums wait in memory from one block to the next.
#pragma once

#include "common/tiles.h"
#include "common/vec.h"
#include "common/vec_transpose.h"
#include "linear/linear.h"

namespace liteboost {
namespace LB_ISA {
namespace {

constexpr int64_t kStepK = 32;
constexpr int64_t kTileFloats = kTileBytes / 4;
// Rows of x whose sums wait in memory: beside them weights are read once.
constexpr int64_t kMostTiledRows = 256;
constexpr int64_t kMostGroups = kMostTiledRows / (2 * kTileRows);
static_assert(kMostTiledRows >= kLinearRows && kMostTiledRows % (2 * kTileRows) == 0, "whole groups");
// The most steps of a block; of several groups of x, those that stay in the first cache beside them.
constexpr int64_t kBlockSteps = 32, kStagedSteps = 8;

LB_INLINE int64_t tile_steps(int64_t k) { return (k + kStepK - 1) / kStepK; }

int64_t packed_tile_bytes(int64_t rows, int64_t k) { return tiles_of(rows) * tile_steps(k) * kTileBytes; }

// Groups [begin, end) of two tiles.
void pack_tiles(const bf16* x, int64_t rows, int64_t k, int64_t begin, int64_t end, char* packed) {
  const int64_t tiles = tiles_of(rows);
  packed += 2 * begin * tile_steps(k) * kTileBytes;
  for (int64_t group = 2 * begin; group < 2 * end; group += 2) {
    for (int64_t at = 0; at < k; at += kStepK) {
      for (int64_t tile = group; tile < tiles && tile < group + 2; ++tile, packed += kTileBytes) {
        VF words[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int64_t row = tile * kTileRows + i;
          const bf16* source = x + row * k + at;
          const auto left = static_cast<unsigned>(k - at < kStepK ? k - at : kStepK);
          const __mmask32 there = row < rows ? 0xffffffffu >> (32 - left) : 0u;
          if (row < rows) watch(source, static_cast<int64_t>(left * sizeof(bf16)));
          words[i] = (VF)_mm512_maskz_loadu_epi16(there, source);
        }
        transpose(words);
        memcpy(packed, words, kTileBytes);
      }
    }
  }
}

// Copies `k` elements of `rows` rows of weight to `staged` [step][row of N tiles][32], zero beyond them. In place, rows a power of two apart would share a few sets of the first cache.
template <int N>
void stage_part(const bf16* weight, int64_t stride, int64_t rows, int64_t k, bf16* staged) {
  constexpr int64_t kStepElements = N * kTileRows * kStepK;
  for (int64_t row = 0; row < rows; ++row, weight += stride) {
    bf16* to = staged + row * kStepK;
    int64_t at = 0;
    for (; at + kStepK <= k; at += kStepK, to += kStepElements) {
      _mm512_store_si512(to, _mm512_loadu_si512(weight + at));
    }
    if (at < k) {
      const int64_t left = k - at;
      watch(weight + at, left * static_cast<int64_t>(sizeof(bf16)));
      _mm512_store_si512(to, _mm512_maskz_loadu_epi16(0xffffffffu >> (kStepK - left), weight + at));
    }
  }
  for (int64_t row = rows; row < N * kTileRows; ++row) {
    for (int64_t at = 0; at < k; at += kStepK)
      _mm512_store_si512(staged + at * N * kTileRows + row * kStepK, _mm512_setzero_si512());
  }
  // Loads of tiles are no reads to the compiler.
  __asm__ volatile("" ::: "memory");
}

// out[rows of x of a tile, at .. at + count], of whose rows of weight, at most 16, the sums are [row of weight][row of x].
void write_tile(const LinearArgs& args, int64_t row, int64_t at, int64_t count, const float* sums) {
  const auto* bias = static_cast<const bf16*>(args.bias);
  auto* out = static_cast<bf16*>(args.out) + row * args.n + at;
  VF values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = i < count ? load(sums + i * kTileRows) : VF{};
  transpose(values);
  const int lanes = static_cast<int>(count);
  const VF added = bias == nullptr ? VF{} : count < kLanes ? load(bias + at, lanes) : load(bias + at);
  for (int i = 0; i < kLanes && row + i < args.rows; ++i, out += args.n) {
    const VF value = bias == nullptr ? values[i] : values[i] + added;
    count < kLanes ? store(out, value, lanes) : store(out, value);
  }
}

// Asks for where a group of two tiles of x writes `N` tiles of outputs: the lines come while it is multiplied.
template <int N>
void fetch_outputs(const LinearArgs& args, int64_t row, int64_t at) {
  const char* out =
      static_cast<const char*>(args.out) + (row * args.n + at) * static_cast<int64_t>(sizeof(bf16));
  const int64_t left = args.rows - row, rows = left < 2 * kTileRows ? left : 2 * kTileRows;
  for (int64_t i = 0; i < rows; ++i, out += args.n * static_cast<int64_t>(sizeof(bf16))) {
    for (int line = 0; line < N * kTileRows * static_cast<int>(sizeof(bf16)); line += 64)
      __asm__ volatile("prefetchw %0" ::"m"(out[line]));
  }
}

// All of x times `N` tiles of rows of weight from `at` on, each of `count` rows, of which more follow before `end`.
template <int N>
void run_panel_of_tiles(const LinearArgs& args, int64_t at, int64_t count, int64_t end) {
  constexpr int kWide = N == 4 ? 1 : 2;
  const int64_t tiles = tiles_of(args.rows), steps = tile_steps(args.k), stride = args.weight_stride;
  const int64_t groups = (tiles + 1) / 2, whole = args.k / kStepK;
  // Of about the same size, so that while one is multiplied the next one is fetched whole.
  const int64_t most = groups > 1 ? kStagedSteps : kBlockSteps, blocks = (steps + most - 1) / most;
  const int64_t block = (steps + blocks - 1) / blocks;
  const auto* weight = static_cast<const bf16*>(args.weight) + at * stride;
  alignas(64) float sums[kMostGroups * 4 * kTileFloats];
  alignas(64) bf16 staged[N * kTileRows * kStepK * kBlockSteps];
  for (int64_t step = 0, size; step < steps; step += size) {
    // Read once, only what is no whole step is staged: a block of its own.
    const bool is_staged = groups > 1 || step >= whole;
    const int64_t behind = groups > 1 ? steps : step < whole ? whole : steps;
    size = behind - step < block ? behind - step : block;
    const bf16* from = weight + step * kStepK;
    const bf16* next = from;
    if (step + size < steps) {
      next += size * kStepK;
    } else if (at + 2 * N * kTileRows <= end) {
      next = weight + N * kTileRows * stride;
    }
    TileFetch fetch(next, stride * 2, size, N * kTileRows);
    TilePart part = {reinterpret_cast<const char*>(from), stride * 2, 64, size};
    if (is_staged) {
      const int64_t k = args.k - step * kStepK < size * kStepK ? args.k - step * kStepK : size * kStepK;
      stage_part<N>(from, stride, (N - 1) * kTileRows + count, k, staged);
      part = {reinterpret_cast<const char*>(staged), 64, N * kTileBytes, size};
    }
    // All groups together fetch the next block.
    const int lines = static_cast<int>((N * kTileRows + groups - 1) / groups);
    const char* x = static_cast<const char*>(args.packed_x);
    const bool is_last = step + size == steps;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = 2 * group, width = tiles - first < 2 ? 1 : 2;
      const char* x_part = x + (first * steps + width * step) * kTileBytes;
      float* into = sums + group * 4 * kTileFloats;
      if (is_last) fetch_outputs<N>(args, first * kTileRows, at);
      if (width == kWide) {
        is_staged ? multiply_tiles<MultiplyBf16, N, kWide, false>(part, fetch, x_part, into, step == 0, lines)
                  : multiply_tiles<MultiplyBf16, N, kWide, true>(part, fetch, x_part, into, step == 0);
      } else if constexpr (N <= 2) {
        multiply_tiles<MultiplyBf16, N, 1, false>(part, fetch, x_part, into, step == 0, lines);
      }
      if (!is_last) continue;
      for (int64_t tile = 0; tile < width; ++tile) {
        for (int64_t n = 0; n < N; ++n)
          write_tile(args, (first + tile) * kTileRows, at + n * kTileRows, count,
                     into + (n * width + tile) * kTileFloats);
      }
    }
  }
}

// out[:, begin:end], of two rows of x and more.
void run_tiles(const LinearArgs& args, int64_t begin, int64_t end) {
  configure_tiles(kTileRows);
  if (args.rows <= kTileRows) {
    for (; begin + 4 * kTileRows <= end; begin += 4 * kTileRows)
      run_panel_of_tiles<4>(args, begin, kTileRows, end);
  }
  for (; begin + 2 * kTileRows <= end; begin += 2 * kTileRows)
    run_panel_of_tiles<2>(args, begin, kTileRows, end);
  for (; begin < end; begin += kTileRows) {
    const int64_t count = end - begin < kTileRows ? end - begin : kTileRows;
    if (count < kTileRows) configure_tiles(count);
    run_panel_of_tiles<1>(args, begin, count, end);
  }
  _tile_release();
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
