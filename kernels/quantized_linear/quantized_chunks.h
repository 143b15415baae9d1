// Rows of x in chunks, up to kChunk rows each, for quantized_linear_cpu_isa.cpp: how many a chunk has, and how it is packed.
//
// x is packed as [chunk][step][part][row][columns of a part] (quantized_steps.h), or as [chunk][pack][row] limbs
// (quantized_limbs.h) or bytes (quantized_int8.h), and behind each chunk of floats, where the weight has zero points, the sums
// of its groups of columns, [group][row]: they need no more of x than these. A chunk has rows of zeros where there are fewer
// than the loop for it takes, and a row ends in zeros.
#pragma once

#include <string.h>

#include "common/order.h"
#include "common/vec.h"
#include "quantized_linear/quantized_int8.h"
#include "quantized_linear/quantized_limbs.h"
#include "quantized_linear/quantized_linear.h"
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

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
