// Register tiles on aarch64: words of the left operand as elements of registers, and, where the CPU multiplies small
// matrices of bf16, squares. Part of attention_tile.h; compiled once an instruction set.
//
// A square is two rows by two columns of the result, to which an instruction adds two rows by four values of the left
// operand times four values by two columns of the right one. For that the words 2 * k and 2 * k + 1 of a column lie side by
// side: of two lines of a panel, vector v of columns has the words [2 * v * kLanes, 2 * (v + 1) * kLanes).
#pragma once

namespace liteboost {
namespace LB_ISA {
namespace {

// sum + b times one word of a row, out of a vector of them: an element, which costs no instruction.
template <int word>
LB_INLINE VF multiply_element(Words32, VF a, VF b, VF sum) {
  return (VF)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)b, (float32x4_t)a, word);
}

// kLanes words of each row.
template <typename Words, int rows, int vectors, int word = 0>
LB_INLINE void multiply_words(const VF (&a)[rows], const float* b, VF (&sums)[rows][vectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const VF column = load(b + word * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sums[r][v] = multiply_element<word>(Words{}, a[r], column, sums[r][v]);
  }
  if constexpr (word + 1 < kLanes) multiply_words<Words, rows, vectors, word + 1>(a, b, sums);
}

#if defined(LB_SQUARES)
// Words of two rows, or of two lines, in turn.
LB_INLINE VF low_halves(VF a, VF b) { return (VF)vzip1q_f64((float64x2_t)a, (float64x2_t)b); }
LB_INLINE VF high_halves(VF a, VF b) { return (VF)vzip2q_f64((float64x2_t)a, (float64x2_t)b); }

// The words 2 * k and 2 * k + 1 of kLanes columns to where they lie in a panel.
LB_INLINE void store_lines(VF first, VF second, float* out) {
  store(out, (VF)vzip1q_f32((float32x4_t)first, (float32x4_t)second));
  store(out + kLanes, (VF)vzip2q_f32((float32x4_t)first, (float32x4_t)second));
}

// Two lines of a panel.
template <int pairs, int vectors>
LB_INLINE void multiply_lines(const VF (&a)[pairs], const float* b, VF (&squares)[pairs][2 * vectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < 2 * vectors; ++v) {
    const VF columns = load(b + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < pairs; ++r) {
      squares[r][v] = (VF)vbfmmlaq_f32((float32x4_t)squares[r][v], (bfloat16x8_t)a[r], (bfloat16x8_t)columns);
    }
  }
}

// `words` is even. A row that is alone is multiplied twice.
template <int rows, int vectors>
LB_INLINE void multiply_squares(const float* a, int64_t a_stride, const float* b, int64_t words,
                                VF (&sums)[rows][vectors]) {
  constexpr int pairs = (rows + 1) / 2;
  VF squares[pairs][2 * vectors] = {};
  const auto second = [](int r) __attribute__((always_inline)) { return r + 1 < rows ? r + 1 : r; };
  int64_t k = 0;
  for (; k + kLanes <= words; k += kLanes) {
    VF low[pairs], high[pairs];
#pragma GCC unroll 4
    for (int r = 0; r < pairs; ++r) {
      const VF even = load(a + 2 * r * a_stride + k), odd = load(a + second(2 * r) * a_stride + k);
      low[r] = low_halves(even, odd);
      high[r] = high_halves(even, odd);
    }
    multiply_lines<pairs, vectors>(low, b + k * kPanel, squares);
    multiply_lines<pairs, vectors>(high, b + (k + 2) * kPanel, squares);
  }
  if (k < words) {
    VF low[pairs];
#pragma GCC unroll 4
    for (int r = 0; r < pairs; ++r)
      low[r] = low_halves(load(a + 2 * r * a_stride + k, 2), load(a + second(2 * r) * a_stride + k, 2));
    multiply_lines<pairs, vectors>(low, b + k * kPanel, squares);
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const VF left = squares[r / 2][2 * v], right = squares[r / 2][2 * v + 1];
      sums[r][v] = r % 2 == 0 ? low_halves(left, right) : high_halves(left, right);
    }
  }
}
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
