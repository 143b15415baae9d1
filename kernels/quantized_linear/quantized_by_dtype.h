// Whether floats, pairs or limbs multiply rows of a dtype, for quantized_linear_cpu_isa.cpp.
#pragma once

#include "quantized_linear/quantized_limbs.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// f with the steps, or limbs, that serve `rows` rows of x of dtype T and weights of this many bits.
template <typename T, typename F>
LB_INLINE void with_steps(int32_t bits, int64_t, const F& f) {
  bits == 8 ? f(W8{}) : f(W4{});
}
#if defined(__AVX512BF16__)
// The most rows that limbs serve: to take integers out of their bytes is most of the work then.
constexpr int64_t kLimbRowsOfW8 = 3, kLimbRowsOfW4 = 1;
typedef W8Pairs ManyRowsW8;
typedef W4Pairs ManyRowsW4;
template <typename T>
constexpr bool kHasLimbs = __is_same(T, bf16);
#elif defined(LB_LIMBS_BY_MADD)
// Time of floats over that of limbs, weights in a core's caches, Zen 3: w8 2.4 for one row, 1.2 for two, 0.97 for three; w4
// 2.9, 1.6, 1.3 and 1.3 for one to four, 1.1 for five to eight, 1.0 for sixteen.
constexpr int64_t kLimbRowsOfW8 = 2, kLimbRowsOfW4 = 8;
typedef W8 ManyRowsW8;
typedef W4 ManyRowsW4;
template <typename T>
constexpr bool kHasLimbs = !__is_same(T, float);
#endif

#if defined(__AVX512BF16__) || defined(LB_LIMBS_BY_MADD)
template <typename T, typename F>
  requires(kHasLimbs<T>)
LB_INLINE void with_steps(int32_t bits, int64_t rows, const F& f) {
  if (bits == 8) {
    rows <= kLimbRowsOfW8 ? f(W8Limbs{}) : f(ManyRowsW8{});
  } else {
    rows <= kLimbRowsOfW4 ? f(W4Limbs{}) : f(ManyRowsW4{});
  }
}
#elif defined(LB_LIMBS)
// Limbs serve every number of rows: four bytes in an instruction are less work than floats, whatever the rows share.
template <typename T, typename F>
  requires(!__is_same(T, float))
LB_INLINE void with_steps(int32_t bits, int64_t, const F& f) {
  bits == 8 ? f(W8Limbs{}) : f(W4Limbs{});
}
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
