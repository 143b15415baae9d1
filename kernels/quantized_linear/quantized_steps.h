// How packed weights are read and meet x, for the loops of quantized_linear_cpu_isa.cpp.
//
// A *step* is the run of columns that one load of weights covers; it has *parts*, each of which meets one vector of
// x. x is packed in the order in which the parts of a step have their columns.
//
//   Steps    weights  x packed as       columns of part j
//   W8       int8     floats            one after the other
//   W8Pairs  int8     pairs of bf16     one after the other
//   W4       4 bits   floats            32 * u + 8 * (j % 4) + 2 * m + j / 4 in lane m (of 4) of 16 bytes u
//   W4Pairs  4 bits   pairs of bf16     32 * u + 8 * j + m in half lane m (of 8) of 16 bytes u
//
// Pairs are for bf16 x where the CPU multiplies pairs of bf16, in which integers of 8 bits are exact.
#pragma once

#include "common/vec.h"
#include "quantized_linear/quantized_linear.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#define LB_UNROLL _Pragma("GCC unroll 8")

// Packs of 16 bytes in a register.
constexpr int kPacks = kVecBytes / 16;

typedef int8_t VB __attribute__((vector_size(kLanes)));

LB_INLINE VF from_int8(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  VB bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, VI), VF);
#endif
}

LB_INLINE VF from_uint8(const uint8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef uint8_t VUB __attribute__((vector_size(kLanes)));
  VUB bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, VI), VF);
#endif
}

// The first n of up to `count` bytes at p, others zero, behind each other in `to`.
template <int count>
LB_INLINE const int8_t* padded(const void* p, int64_t n, int8_t (&to)[count]) {
  memset(to, 0, sizeof(to));
  for (int64_t i = 0; i < n && i < count; ++i) to[i] = static_cast<const int8_t*>(p)[i];
  return to;
}

LB_INLINE VF multiply_add_floats(VF sum, VF w, const char* x) {
  VF xs;
  memcpy(&xs, x, sizeof(xs));
  return fma(w, xs, sum);
}

struct W8 {
  static constexpr int kBits = 8, kColumns = kLanes, kParts = 1;
  static constexpr bool kGrouped = false, kPairs = false;
  typedef VF Loaded;
  typedef VF Part;
  static LB_INLINE Loaded read(const char* p) { return from_int8(reinterpret_cast<const int8_t*>(p)); }
  static LB_INLINE Loaded read(const char* p, int64_t columns) {
    int8_t bytes[kLanes];
    return from_int8(padded(p, columns, bytes));
  }
  template <int j>
  static LB_INLINE Part part(Loaded w) {
    return w;
  }
  static LB_INLINE VF multiply_add(VF sum, Part w, const char* x) { return multiply_add_floats(sum, w, x); }
  static LB_INLINE int column(int, int lane) { return lane; }
};

struct W4 {
  static constexpr int kBits = 4, kColumns = kPacks * static_cast<int>(kPack), kParts = 8;
  static constexpr bool kGrouped = true, kPairs = false;
  typedef VU Loaded;
  typedef VF Part;
  static LB_INLINE Loaded read(const char* p) {
    VU v;
    memcpy(&v, p, sizeof(v));
    return v;
  }
  static LB_INLINE Loaded read(const char* p, int64_t columns) {
    int8_t bytes[kVecBytes];
    return read(reinterpret_cast<const char*>(padded(p, columns / 2, bytes)));
  }
  template <int j>
  static LB_INLINE Part part(Loaded w) {
#if defined(__AVX512F__)
    // The permutation looks at four bits of an index only.
    const VF table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return _mm512_permutexvar_ps((__m512i)(w >> (4 * j)), table);
#else
    const VI q = (VI)((w >> (4 * j)) & 15u) - 8;
    return __builtin_convertvector(q, VF);
#endif
  }
  static LB_INLINE VF multiply_add(VF sum, Part w, const char* x) { return multiply_add_floats(sum, w, x); }
  static LB_INLINE int column(int j, int lane) {
    return lane / 4 * static_cast<int>(kPack) + 8 * (j % 4) + 2 * (lane % 4) + j / 4;
  }
};

#if defined(__AVX512BF16__)
typedef uint16_t VPairs __attribute__((vector_size(kVecBytes)));

LB_INLINE VF multiply_add_pairs(VF sum, __m512bh w, const char* x) {
  __m512i xs;
  memcpy(&xs, x, sizeof(xs));
  return _mm512_dpbf16_ps(sum, w, (__m512bh)xs);
}

struct W8Pairs {
  static constexpr int kBits = 8, kColumns = 2 * kLanes, kParts = 1;
  static constexpr bool kGrouped = false, kPairs = true;
  typedef __m512bh Loaded;
  typedef __m512bh Part;
  static LB_INLINE Loaded read(const char* p) {
    const int8_t* bytes = reinterpret_cast<const int8_t*>(p);
    return _mm512_cvtne2ps_pbh(from_int8(bytes + kLanes), from_int8(bytes));
  }
  static LB_INLINE Loaded read(const char* p, int64_t columns) {
    int8_t bytes[kColumns];
    return read(reinterpret_cast<const char*>(padded(p, columns, bytes)));
  }
  template <int j>
  static LB_INLINE Part part(Loaded w) {
    return w;
  }
  static LB_INLINE VF multiply_add(VF sum, Part w, const char* x) { return multiply_add_pairs(sum, w, x); }
  static LB_INLINE int column(int, int lane) { return lane; }
};

struct W4Pairs {
  static constexpr int kBits = 4, kColumns = kPacks * static_cast<int>(kPack), kParts = 4;
  static constexpr bool kGrouped = true, kPairs = true;
  typedef VPairs Loaded;
  typedef __m512bh Part;
  static LB_INLINE Loaded read(const char* p) {
    VPairs v;
    memcpy(&v, p, sizeof(v));
    return v;
  }
  static LB_INLINE Loaded read(const char* p, int64_t columns) {
    int8_t bytes[kVecBytes];
    return read(reinterpret_cast<const char*>(padded(p, columns / 2, bytes)));
  }
  template <int j>
  static LB_INLINE Part part(Loaded w) {
    // -8 to 7 as bf16, twice: the permutation looks at five bits of an index, of which the fifth says nothing.
    const VPairs table = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                          0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                          0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                          0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return (__m512bh)_mm512_permutexvar_epi16((__m512i)(w >> (4 * j)), (__m512i)table);
  }
  static LB_INLINE VF multiply_add(VF sum, Part w, const char* x) { return multiply_add_pairs(sum, w, x); }
  static LB_INLINE int column(int j, int lane) {
    return lane / 8 * static_cast<int>(kPack) + 8 * j + lane % 8;
  }
};
#endif

// Lane l: the scale of pack l / 4 of those from p on.
LB_INLINE VF spread(const float* p) {
#if defined(__AVX512F__)
  const VI packs = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  return _mm512_permutexvar_ps((__m512i)packs, _mm512_broadcast_f32x4(_mm_loadu_ps(p)));
#elif defined(__AVX2__)
  return _mm256_set_m128(_mm_broadcast_ss(p + 1), _mm_broadcast_ss(p));
#else
  return splat(p[0]);
#endif
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
