// Products of many rows of x that have the bits of one row (linear_one_row.h): of fp32, and of bf16 where a CPU multiplies
// pairs of it. Part of linear_cpu_isa.cpp; compiled once an instruction set.
//
// One row is multiplied lane by lane: each lane of each of its kRowSums sums is a chain of additions, and these *chains* are
// added up in pairs. Here a vector holds a word of kLanes rows of weight, as in linear_gemm.h, and the chains come one after
// the other, in the order in which they meet: what two of them add up to waits for what the next two do. Rows of weight and
// of x are packed in that order.
#pragma once

#include "linear/linear_gemm.h"
#include "linear/linear_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Chains are a few words long at least: with fewer there is more to add up than to multiply.
LB_INLINE bool gemm_of_one_row_serves(DType dtype, int64_t k) {
  constexpr int64_t kLeastTurns = 4;
#if defined(__AVX512BF16__)
  if (dtype == DType::bf16) return k % 2 == 0 && k >= kLeastTurns * kRowSums * Step<bf16>::kSize;
#endif
  return dtype == DType::f32 && k >= kLeastTurns * kRowSums * Step<float>::kSize;
}

constexpr int kPairs = kLanes * kRowSums / 2;
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }
constexpr int kPairLevels = log2_of(kPairs);
// 12 sums of each chain of a pair, 4 vectors of weights and a word of x fit 32 registers; 6, 2 and a word fit 16.
constexpr int kPairRows = kGemmRows / 2;
// Words of a block, unless a single pair has more: they stay in the first cache.
constexpr int64_t kPairsWords = 112;

// Which words are those of a chain: word `lane` of step i is of sum i % kRowSums, what is left of K behind whole kRowSums of the
// first, and a part of a step of the second. A row, of x as of weight, is packed pair by pair, in the order in which they
// meet, the words of both in turn, and zeros where only one has a word.
struct Chains {
  int64_t steps;   // whole ones
  int64_t turns;   // whole kRowSums of them
  int64_t length;  // of a chain with zeros
  // Words from one pair to the next. Odd, as lanes that lie a multiple of a page apart would be packed into the same few lines
  // of a cache.
  int64_t stride;
  int64_t pairs;  // of a block
  int64_t begin[kRowSums][kLanes];

  // Where word `word` of a row lies.
  LB_INLINE int64_t place(int64_t word) const {
    const int64_t step = word / kLanes, lane = word % kLanes;
    if (step < turns * kRowSums) return begin[step % kRowSums][lane] + step / kRowSums * 2;
    if (step < steps) return begin[0][lane] + (turns + step % kRowSums) * 2;
    return begin[1][lane] + turns * 2;
  }
  LB_INLINE bool has_zeros() const { return length > turns; }
  LB_INLINE GemmBlocks blocks() const {
    return {kPairs * stride, pairs * stride, 1 + kPairLevels - log2_of(static_cast<int>(pairs))};
  }
};

// The n-th of `count` lanes in the order in which they meet: first those half of the lanes apart, then a quarter.
constexpr int meeting(int n, int count) {
  return count == 1 ? 0 : meeting(n / 2, count / 2) + n % 2 * (count / 2);
}

LB_INLINE Chains chains_of(int64_t words) {
  Chains chains;
  chains.steps = words / kLanes;
  chains.turns = chains.steps / kRowSums;
  const int64_t rest = chains.steps % kRowSums;
  chains.length = chains.turns + (rest > 0 ? rest : words % kLanes > 0 ? 1 : 0);
  chains.stride = 2 * chains.length + 1;
  chains.pairs = 1;
  while (chains.pairs < kPairs && 2 * chains.pairs * chains.stride <= kPairsWords) chains.pairs *= 2;
  for (int pair = 0; pair < kPairs; ++pair) {
    // Sums meet as neighbors, but where there are more than four: those first meet the fourth behind them.
    const int of_lane = pair % (kRowSums / 2);
    for (int i = 0; i < 2; ++i) {
      chains.begin[kRowSums > 4 ? of_lane + 4 * i : 2 * of_lane + i][meeting(pair / (kRowSums / 2), kLanes)] =
          pair * chains.stride + i;
    }
  }
  return chains;
}

// One row of x.
template <typename T>
void pack_chains(const T* x, int64_t k, const Chains& chains, float* packed) {
  const int64_t words = gemm_words<T>(k);
  if (chains.has_zeros()) {
    // Times the zeros of a weight nothing is added to a chain, not even to one that is -0; one row adds 0 in the lanes behind
    // a part of a step.
    const uint32_t negative = GemmWords<T>::kSize == 2 ? 0x80008000u : 0x80000000u;
    for (int64_t at = 0; at < kPairs * chains.stride; ++at) memcpy(packed + at, &negative, sizeof(float));
    for (int64_t lane = words % kLanes; lane % kLanes != 0; ++lane)
      packed[chains.begin[1][lane] + chains.turns * 2] = 0.0f;
  }
  for (int64_t word = 0; word < words; ++word)
    memcpy(packed + chains.place(word), x + word * GemmWords<T>::kSize, sizeof(float));
}

// A vector of each sum of a tile is added up with `from`, where that of row r is r * row_floats behind.
template <int rows>
LB_INLINE void add_waiting(VF (&sums)[rows][kGemmVectors], const float* from, int64_t row_floats) {
  LB_UNROLL16 for (int r = 0; r < rows; ++r) {
    LB_UNROLL16 for (int v = 0; v < kGemmVectors; ++v) sums[r][v] += load(from + r * row_floats + v * kLanes);
  }
}
template <int rows>
LB_INLINE void store_sums(const VF (&sums)[rows][kGemmVectors], float* to, int64_t row_floats) {
  LB_UNROLL16 for (int r = 0; r < rows; ++r) {
    LB_UNROLL16 for (int v = 0; v < kGemmVectors; ++v) store(to + r * row_floats + v * kLanes, sums[r][v]);
  }
}

// sums[chain] = x[rows][words of a pair] times those words of a strip. Rows of x are `stride` apart.
template <typename T, int rows>
LB_INLINE void multiply_pair(int64_t length, const float* x, int64_t stride, const float* strip,
                             VF (&sums)[2][rows][kGemmVectors]) {
  for (int64_t n = 0; n < length; ++n) {
    LB_UNROLL16 for (int i = 0; i < 2; ++i, ++x, strip += kGemmStrip) {
      VF columns[kGemmVectors];
      LB_UNROLL16 for (int v = 0; v < kGemmVectors; ++v) {
        columns[v] = load(strip + v * kLanes);
        asm("" : "+v"(columns[v]));  // or GCC 12 reads it again for each row
      }
      LB_UNROLL16 for (int r = 0; r < rows; ++r) {
        const VF splatted = splat(x[r * stride]);
        LB_UNROLL16 for (int v = 0; v < kGemmVectors; ++v) sums[i][r][v] =
            GemmWords<T>::multiply_add(sums[i][r][v], splatted, columns[v]);
      }
    }
  }
}

// The pairs of block `number` are added up, and with what waits for them above: that of level n waits in sum n + 1 of a
// chunk, and what all add up to is in the first.
template <typename T, int rows>
void one_row_tile(const Chains& chains, int64_t number, const float* x, const float* block, float* totals) {
  alignas(64) float waiting[kPairLevels][rows * kGemmStrip];
  const int64_t x_stride = kPairs * chains.stride;
  for (int64_t pair = 0; pair < chains.pairs; ++pair) {
    VF sums[2][rows][kGemmVectors] = {};
    multiply_pair<T, rows>(chains.length, x, x_stride, block, sums);
    x += chains.stride;
    block += chains.stride * kGemmStrip;
    LB_UNROLL16 for (int r = 0; r < rows; ++r) {
      LB_UNROLL16 for (int v = 0; v < kGemmVectors; ++v) sums[0][r][v] += sums[1][r][v];
    }
    int level = 0;
    for (int64_t n = pair; n % 2 == 1; n /= 2, ++level)
      add_waiting<rows>(sums[0], waiting[level], kGemmStrip);
    if (pair + 1 < chains.pairs) {
      store_sums<rows>(sums[0], waiting[level], kGemmStrip);
      continue;
    }
    float* above = totals + kGemmChunk * kGemmColumns;
    for (int64_t n = number; n % 2 == 1; n /= 2, above += kGemmChunk * kGemmColumns)
      add_waiting<rows>(sums[0], above, kGemmColumns);
    const bool is_last = (number + 1) * chains.pairs == kPairs;
    store_sums<rows>(sums[0], is_last ? totals : above, kGemmColumns);
  }
}

// By number of rows - 1.
template <typename T>
constexpr void (*kOneRowTiles[kPairRows])(const Chains&, int64_t, const float*, const float*, float*) = {
    one_row_tile<T, 1>, one_row_tile<T, 2>, one_row_tile<T, 3>};

// gemm_panels, with the bits of one row, of rows that pack_chains has packed.
template <typename T>
void gemm_panels_of_one_row(const GemmArgs& args, int64_t panel, int64_t end, int64_t row_begin,
                            int64_t row_end, float* scratch) {
  if (row_begin >= row_end) return;
  const Chains chains = chains_of(gemm_words<T>(args.k));
  const GemmBlocks blocks = chains.blocks();
  const int64_t stride = args.weight_stride;
  gemm_blocks<T, kPairRows>(
      args, panel, end, row_begin, row_end, scratch, rows_behind<T>(args, panel, end), blocks,
      static_cast<const float*>(args.x),
      [&](int64_t column, int64_t columns, float* packed) {
        if (chains.has_zeros())
          memset(packed, 0, static_cast<size_t>(blocks.words * kGemmColumns) * sizeof(float));
        pack_gemm_panel(static_cast<const T*>(args.weight) + column * stride, stride, columns, args.k,
                        blocks.words, packed, [&](int64_t word) { return chains.place(word); });
      },
      [&](int64_t rows, const float* x, const float* block, int64_t word, int64_t, float* totals) {
        kOneRowTiles<T>[rows - 1](chains, word / blocks.block_words, x + word, block, totals);
      });
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
