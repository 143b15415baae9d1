// Products of many rows of x (prefill): of fp32, of bf16 where a CPU multiplies pairs of it and has no tiles, and with AVX2
// alone of bf16 and f16 as floats, to which x is widened by the caller. Part of linear_cpu_isa.cpp; compiled once an
// instruction set.
//
// A word is a float, or a pair of bf16 that are neighbors in K. A *panel* is kGemmColumns rows of weight, packed in
// strips so that one vector holds a word of kLanes of them. It is packed once for all rows of x, one or several at a
// time; a block of a strip, kGemmWords of K, stays in the first cache while all rows of a *chunk* of x are multiplied by
// it. x is not packed. Sums of a block are accumulated in registers and then added to those of the chunk, which stay in
// the second cache. The loops of linear_gemm_one_row.h, which pack x, share gemm_blocks.
#pragma once

#include "common/prefetch.h"
#include "common/vec.h"
#include "common/vec_bf16.h"
#include "common/vec_transpose.h"
#include "linear/linear_rows.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// 24 sums, 4 vectors of weights and a word of x fit 32 registers; 12 sums, 2 vectors and a word fit 16.
#if defined(__AVX512F__)
constexpr int kGemmRows = 6, kGemmVectors = 4;
#else
constexpr int kGemmRows = 6, kGemmVectors = 2;
#endif
constexpr int64_t kGemmColumns = 64, kGemmStrip = kGemmVectors * kLanes;
constexpr int64_t kGemmWords = 128;
constexpr int64_t kGemmChunk = 32 * kGemmRows;

template <typename T>
struct GemmWords {
  typedef float X;                 // elements of x
  static constexpr int kSize = 1;  // elements of K
  static LB_INLINE VF load_some(const T* row, int64_t n) {
    return n >= kLanes ? load(row) : load(row, static_cast<int>(n));
  }
  static LB_INLINE VF multiply_add(VF sum, VF x, VF weight) { return fma(x, weight, sum); }
};
#if defined(__AVX512BF16__)
template <>
struct GemmWords<bf16> {
  typedef bf16 X;
  static constexpr int kSize = 2;
  static LB_INLINE VF load_some(const bf16* row, int64_t n) {
    return n >= 2 * kLanes ? (VF)_mm512_loadu_si512(row) : (VF)_mm512_maskz_loadu_epi16((1u << n) - 1u, row);
  }
  static LB_INLINE VF multiply_add(VF sum, VF x, VF weight) { return dot_pairs(sum, x, weight); }
};
#endif

template <typename T>
LB_INLINE int64_t gemm_words(int64_t k) {
  return k / GemmWords<T>::kSize;
}

// Whether 16-bit elements become floats.
#if defined(__AVX512F__)
constexpr bool kGemmWidens = false;
#else
constexpr bool kGemmWidens = true;
#endif

// Whether K is whole words.
LB_INLINE bool gemm_serves(DType dtype, int64_t k) {
#if defined(LB_GEMM_BF16)
  if (dtype == DType::bf16) return k > 0 && k % 2 == 0;
#endif
  return (dtype == DType::f32 || kGemmWidens) && k > 0;
}

// Whether at most a quarter of what is multiplied lies behind the last of n outputs: strips are whole.
LB_INLINE bool gemm_fills_strips(int64_t n) {
  return 4 * n >= 3 * ((n + kGemmStrip - 1) / kGemmStrip * kGemmStrip);
}

// How a panel is packed, and multiplied: words of a strip and of a block of it, and how many sums of a chunk are kept.
struct GemmBlocks {
  int64_t words, block_words, sums;
};

// Floats that gemm_blocks needs beside its arguments: the panels, and the sums of a chunk.
LB_INLINE int64_t gemm_scratch(const GemmBlocks& blocks, int64_t panels) {
  return (blocks.words * panels + kGemmChunk * blocks.sums) * kGemmColumns;
}
template <typename T>
LB_INLINE GemmBlocks gemm_words_in_order(int64_t k) {
  return {gemm_words<T>(k), kGemmWords, 1};
}
template <typename T>
LB_INLINE int64_t gemm_scratch(int64_t k, int64_t panels) {
  return gemm_scratch(gemm_words_in_order<T>(k), panels);
}

// panel[strip][place(word)][column] of `columns` rows of weight, of so many words a strip; zero behind the last row, as far
// as its strip goes.
template <typename T, typename Place>
void pack_gemm_panel(const T* weight, int64_t stride, int64_t columns, int64_t k, int64_t strip_words,
                     float* panel, const Place& place) {
  typedef GemmWords<T> W;
  const int64_t words = gemm_words<T>(k);
  const int64_t end = (columns + kGemmStrip - 1) / kGemmStrip * kGemmStrip;
  for (int64_t first = 0; first < end; first += kLanes) {
    const T* rows = weight + first * stride;
    const int64_t count = columns - first;
    float* strip = panel + first / kGemmStrip * kGemmStrip * strip_words + first % kGemmStrip;
    for (int64_t w = 0; w < words; w += kLanes) {
      const int64_t at = w * W::kSize;
      VF block[kLanes];
      LB_UNROLL16 for (int i = 0; i < kLanes; ++i) {
        block[i] = i < count ? W::load_some(rows + i * stride + at, k - at) : VF{};
      }
      transpose(block);
      const int64_t valid = words - w < kLanes ? words - w : kLanes;
      for (int64_t i = 0; i < valid; ++i) store(strip + place(w + i) * kGemmStrip, block[i]);
    }
  }
}

// totals[rows][kGemmStrip of kGemmColumns] = (is_first ? 0 : totals) + x[rows][words] strip[words][kGemmStrip].
template <typename T, int rows>
void gemm_tile(const typename GemmWords<T>::X* x, int64_t k, const float* strip, int64_t words, bool is_first,
               float* totals) {
  typedef GemmWords<T> W;
  VF sums[rows][kGemmVectors] = {};
  for (int64_t w = 0; w < words; ++w) {
    VF columns[kGemmVectors];
    LB_UNROLL16 for (int v = 0; v < kGemmVectors; ++v) columns[v] = load(strip + w * kGemmStrip + v * kLanes);
    LB_UNROLL16 for (int r = 0; r < rows; ++r) {
      float word;
      memcpy(&word, x + r * k + w * W::kSize, sizeof(word));
      const VF splatted = splat(word);
      LB_UNROLL16 for (int v = 0; v < kGemmVectors; ++v) sums[r][v] =
          W::multiply_add(sums[r][v], splatted, columns[v]);
    }
  }
  LB_UNROLL16 for (int r = 0; r < rows; ++r) {
    LB_UNROLL16 for (int v = 0; v < kGemmVectors; ++v) {
      float* to = totals + r * kGemmColumns + v * kLanes;
      store(to, is_first ? sums[r][v] : load(to) + sums[r][v]);
    }
  }
}

// By number of rows - 1.
template <typename T>
constexpr void (*kGemmTiles[kGemmRows])(const typename GemmWords<T>::X*, int64_t, const float*, int64_t, bool,
                                        float*) = {gemm_tile<T, 1>, gemm_tile<T, 2>, gemm_tile<T, 3>,
                                                   gemm_tile<T, 4>, gemm_tile<T, 5>, gemm_tile<T, 6>};

// out[row_begin:row_end] of the columns of panels [panel, end). pack(column, columns, packed) packs the panel of that many
// rows of weight, from row `column` on; `ahead` are lines that will be read when these panels are done. tile(rows, x, block,
// word, words, totals) multiplies up to kRows by a block of a strip, which begins at `word`, as gemm_tile does. Rows of x have
// the words of a strip.
template <typename T, int kRows, typename X, typename Pack, typename Tile>
void gemm_blocks(const GemmArgs& args, int64_t panel, int64_t end, int64_t row_begin, int64_t row_end,
                 float* scratch, LinesAhead ahead, const GemmBlocks& of, const X* all_x, const Pack& pack,
                 const Tile& tile) {
  const int64_t words = of.words, block_words = of.block_words, first = panel * kGemmColumns;
  const int64_t last = args.n < end * kGemmColumns ? args.n : end * kGemmColumns;
  float* packed = scratch + of.sums * kGemmChunk * kGemmColumns;
  for (int64_t column = first; column < last; column += kGemmColumns) {
    pack(column, last - column < kGemmColumns ? last - column : kGemmColumns,
         packed + (column - first) * words);
  }

  constexpr int64_t kWordSize = static_cast<int64_t>(sizeof(float) / sizeof(X));
  const int64_t row_size = words * kWordSize;
  constexpr int64_t kStrips = kGemmColumns / kGemmStrip;
  const int64_t blocks = (words + block_words - 1) / block_words * kStrips * (end - panel);
  const int64_t tiles = (row_end - row_begin + kRows - 1) / kRows * blocks;
  const int64_t lines = (ahead.rows * (ahead.row_bytes / kLine + 1) + tiles - 1) / tiles;

  LinearArgs written{};
  written.bias = args.bias;
  written.out = args.out;
  written.n = args.n;
  for (int64_t chunk = row_begin; chunk < row_end; chunk += kGemmChunk) {
    const int64_t rows = row_end - chunk < kGemmChunk ? row_end - chunk : kGemmChunk;
    const X* x = all_x + chunk * row_size;
    for (int64_t column = 0; column < last - first; column += kGemmColumns) {
      const int64_t left = last - first - column < kGemmColumns ? last - first - column : kGemmColumns;
      for (int64_t w = 0; w < words; w += block_words) {
        const int64_t some = words - w < block_words ? words - w : block_words;
        for (int64_t strip = 0; strip < left; strip += kGemmStrip) {
          const float* block = packed + (column + strip) * words + w * kGemmStrip;
          for (int64_t row = 0, width; row < rows; row += width) {
            width = group_of<kRows>(rows - row);
            tile(width, x + row * row_size, block, w, some, scratch + row * kGemmColumns + strip);
            ahead.ask(lines);
          }
        }
      }
      for (int64_t row = 0; row < rows; ++row)
        write_row<T>(written, chunk + row, first + column, left, scratch + row * kGemmColumns);
    }
  }
}

// The same, of words in the order of K.
template <typename T, typename Pack>
void gemm_packed(const GemmArgs& args, int64_t panel, int64_t end, int64_t row_begin, int64_t row_end,
                 float* scratch, LinesAhead ahead, const Pack& pack) {
  typedef GemmWords<T> W;
  gemm_blocks<T, kGemmRows>(args, panel, end, row_begin, row_end, scratch, ahead,
                            gemm_words_in_order<T>(args.k), static_cast<const typename W::X*>(args.x), pack,
                            [&](int64_t rows, const typename W::X* x, const float* block, int64_t word,
                                int64_t words, float* totals) {
                              kGemmTiles<T>[rows - 1](x + word* W::kSize, args.k, block, words, word == 0,
                                                      totals);
                            });
}

// What is read when panels [panel, end) are done.
template <typename T>
LB_INLINE LinesAhead rows_behind(const GemmArgs& args, int64_t panel, int64_t end) {
  const int64_t last = args.n < end * kGemmColumns ? args.n : end * kGemmColumns;
  const int64_t next = last - panel * kGemmColumns, behind = args.n - last;
  return {reinterpret_cast<const char*>(static_cast<const T*>(args.weight) + last * args.weight_stride),
          args.weight_stride * static_cast<int64_t>(sizeof(T)), args.k * static_cast<int64_t>(sizeof(T)),
          behind < next ? behind : next};
}

// gemm_packed of weights as they lie.
template <typename T>
void gemm_panels(const GemmArgs& args, int64_t panel, int64_t end, int64_t row_begin, int64_t row_end,
                 float* scratch) {
  if (row_begin >= row_end) return;
  const int64_t stride = args.weight_stride;
  gemm_packed<T>(args, panel, end, row_begin, row_end, scratch, rows_behind<T>(args, panel, end),
                 [&](int64_t column, int64_t columns, float* packed) {
                   pack_gemm_panel(static_cast<const T*>(args.weight) + column * stride, stride, columns,
                                   args.k, gemm_words<T>(args.k), packed, [](int64_t word) { return word; });
                 });
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
