// How integers in tiles are loaded and multiplied by x, for the loops of quantized_linear_cpu_isa.cpp.
//
// A *step* is kStep columns of the 16 rows of a tile. Its *parts* are vectors of kLanes rows, each multiplied by what
// is broadcast of x: one column of it, or a pair of columns. x is packed in the order of steps and parts.
//
//   Steps    weights  a part is              columns of part j of step s
//   W8       int8     floats, one column     8 * s + j
//   W8Pairs  int8     pairs of bf16          8 * s + 2 * j, and the next
//   W4       4 bits   floats, one column     32 * (s / 4) + 2 * (s % 4) + 8 * (j % 4) + j / 4
//   W4Pairs  4 bits   pairs of bf16          32 * (s / 4) + 2 * (s % 4) + 8 * j, and the next
//
// Pairs are for bf16 x where the CPU multiplies pairs of bf16, in which integers of 8 bits are exact. For few rows
// limbs are used instead (quantized_limbs.h).
#pragma once

#include "common/prefetch.h"
#include "common/vec.h"
#include "quantized_linear/quantized_linear.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#define LB_UNROLL _Pragma("GCC unroll 16")

LB_INLINE VF from_uint8(const uint8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
  uint32_t bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return (VF)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes)))));
#else
  typedef uint8_t VUB __attribute__((vector_size(kLanes)));
  VUB bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, VI), VF);
#endif
}

LB_INLINE VU load_uint(const char* p) {
  VU v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// Bytes that are asked for ahead into the first and the second cache: arithmetic takes nearly as long as memory.
constexpr int64_t kNear = 2048, kFar = 16384;

template <int64_t bytes>
LB_INLINE void fetch_weights(const char* data) {
  LB_UNROLL for (int64_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(data + kNear + line);
    fetch_stream_ahead<kFar>(data + line);
  }
}

// Notes in `not_finite`, which several threads may set, where one of `sums` is not finite.
template <int n>
LB_INLINE void note_not_finite(const VF (&sums)[n], bool* not_finite) {
  VF spoiled{};
  LB_UNROLL for (int i = 0; i < n; ++i) spoiled = fma(sums[i], VF{}, spoiled);
  if (sum(spoiled) != 0.0f && not_finite != nullptr) __atomic_store_n(not_finite, true, __ATOMIC_RELAXED);
}

// What the steps of floats have in common.
struct Floats {
  typedef float Element;
  static constexpr bool kIsLimbs = false;
  static constexpr int kColumns = 1, kParts = kStep;                            // of a part; of a step
  static constexpr int64_t elements(int64_t k) { return steps_of(k) * kStep; }  // of a row of x
  static LB_INLINE VF multiply_add(VF sum, VF w, const Element* x) { return fma(w, splat(*x), sum); }
};

// Bytes of a step, and the columns of a part, by the number of bits.
struct Bytes {
  static constexpr int64_t kBytes = kStep * kTile;
  static constexpr int64_t first_column(int64_t step, int j, int columns) {
    return kStep * step + j * columns;
  }
};
struct Nibbles {
  static constexpr int64_t kBytes = kStep * kTile / 2;
  static constexpr int64_t first_column(int64_t step, int j, int) {
    return step / 4 * kPack + step % 4 * 2 + j % 4 * 8 + j / 4;
  }
};

// `read` takes the lanes from `lane` on of a step.
struct W8 : Floats, Bytes {
  struct Loaded {
    VU words[2];
  };
  static LB_INLINE Loaded read(const char* step, int lane) {
    return {load_uint(step + 4 * lane), load_uint(step + kTileLine + 4 * lane)};
  }
  template <int j>
  static LB_INLINE VF part(Loaded w) {
    return __builtin_convertvector((VI)(w.words[j / 4] << (24 - 8 * (j % 4))) >> 24, VF);
  }
};

struct W4 : Floats, Nibbles {
  typedef VU Loaded;
  static LB_INLINE Loaded read(const char* step, int lane) { return load_uint(step + 4 * lane); }
  template <int j>
  static LB_INLINE VF part(Loaded w) {
    constexpr uint32_t shift = 4 * (j % 4) + 16 * (j / 4);
#if defined(__AVX512F__)
    // The permutation looks at four bits of an index only.
    const VF table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return _mm512_permutexvar_ps((__m512i)(w >> shift), table);
#else
    return __builtin_convertvector((VI)((w >> shift) & 15u) - 8, VF);
#endif
  }
};

#if defined(__AVX512BF16__)
typedef uint16_t VPairs __attribute__((vector_size(kVecBytes)));

struct Pairs {
  typedef bf16 Element;
  static constexpr bool kIsLimbs = false;
  static constexpr int kColumns = 2, kParts = kStep / 2;
  static constexpr int64_t elements(int64_t k) { return steps_of(k) * kStep; }
  static LB_INLINE VF multiply_add(VF sum, __m512bh w, const Element* x) {
    int32_t pair;
    memcpy(&pair, x, sizeof(pair));
    return _mm512_dpbf16_ps(sum, w, (__m512bh)_mm512_set1_epi32(pair));
  }
};

struct W8Pairs : Pairs, Bytes {
  typedef W8::Loaded Loaded;
  static LB_INLINE Loaded read(const char* step, int lane) { return W8::read(step, lane); }
  template <int j>
  static LB_INLINE __m512bh part(Loaded w) {
    // Integers of 8 bits as floats are zero in the half that bf16 leaves out.
    const VU low = as_uint(W8::part<2 * j>(w)) >> 16;
    return (__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, (__m512i)W8::part<2 * j + 1>(w));
  }
};

struct W4Pairs : Pairs, Nibbles {
  typedef VPairs Loaded;
  static LB_INLINE Loaded read(const char* step, int) { return (VPairs)load_uint(step); }
  template <int j>
  static LB_INLINE __m512bh part(Loaded w) {
    // -8 to 7 as bf16, twice: the permutation looks at five bits of an index, of which the fifth says nothing.
    const VPairs table = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                          0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                          0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                          0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return (__m512bh)_mm512_permutexvar_epi16((__m512i)(w >> (4 * j)), (__m512i)table);
  }
};
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
