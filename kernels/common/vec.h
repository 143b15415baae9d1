// A vector of fp32 lanes, for the torch-free loops: one source, compiled once an instruction set.
//
// Built on GCC's vector extensions, so + - * / < and ?: work lane by lane on VF and VI; only what those
// cannot say (fused multiply-add, conversions, masked tails) differs by instruction set. Everything is in
// an unnamed namespace inside liteboost::LB_ISA: a function compiled here with AVX-512 must never become
// the copy that the linker keeps for everybody. For the same reason there are no std headers.
//
//   VF, VI, VU            kLanes lanes of float, int32_t, uint32_t
//   load(p) store(p, v)   p of float, bf16 or f16 at any alignment; store rounds to nearest even. load also of int8
//   load(p, n)            the first n < kLanes elements, other lanes zero; store(p, v, n) writes n
//   splat(x)              all lanes x
//   fma(a, b, c)          a * b + c with one rounding where the CPU has it, two on baseline x86-64
//   min max sqrt abs      a NaN in the first argument of min and max is returned
//   sum(v) hmax(v)        across lanes
//   for_lanes sum_lanes   loops over any length, tail included
//   round_to<T>(v)        the precision of T, still in fp32 lanes
// exp, tanh, sigmoid and normal_cdf are in vec_math.h, interleaved pairs in vec_pairs.h.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LB_INLINE inline __attribute__((always_inline, unused))

#include "common/dtype.h"
#if defined(__aarch64__)
#include "common/vec_bytes.h"
#endif

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif
constexpr int kLanes = kVecBytes / 4;

typedef float VF __attribute__((vector_size(kVecBytes)));
typedef int32_t VI __attribute__((vector_size(kVecBytes)));
typedef uint32_t VU __attribute__((vector_size(kVecBytes)));
// Half a vector in bytes: kLanes 16-bit elements.
typedef uint16_t VH __attribute__((vector_size(kVecBytes / 2)));

// Not VF{} + x: that is an addition, which loses the sign of -0 and, where denormals are flushed, other bits.
#if defined(__AVX512F__)
LB_INLINE VF splat(float x) { return _mm512_set1_ps(x); }
#elif defined(__AVX2__)
LB_INLINE VF splat(float x) { return _mm256_set1_ps(x); }
#elif defined(__SSE2__)
LB_INLINE VF splat(float x) { return _mm_set1_ps(x); }
#elif defined(__aarch64__)
LB_INLINE VF splat(float x) { return (VF)vdupq_n_f32(x); }
#else
LB_INLINE VF splat(float x) { return x - VF{}; }
#endif
LB_INLINE VI splat_i(int32_t x) { return VI{} + x; }
LB_INLINE VU splat_u(uint32_t x) { return VU{} + x; }
LB_INLINE VU as_uint(VF v) { return reinterpret_cast<VU>(v); }
LB_INLINE VF as_float(VU v) { return reinterpret_cast<VF>(v); }

// ---- arithmetic that the operators cannot express ----

#if defined(__AVX512F__)
LB_INLINE VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
LB_INLINE VF min(VF a, VF b) { return _mm512_min_ps(b, a); }
LB_INLINE VF max(VF a, VF b) { return _mm512_max_ps(b, a); }
LB_INLINE VF sqrt(VF v) { return _mm512_sqrt_ps(v); }
#elif defined(__AVX2__)
LB_INLINE VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
LB_INLINE VF min(VF a, VF b) { return _mm256_min_ps(b, a); }
LB_INLINE VF max(VF a, VF b) { return _mm256_max_ps(b, a); }
LB_INLINE VF sqrt(VF v) { return _mm256_sqrt_ps(v); }
#elif defined(__SSE2__)
LB_INLINE VF fma(VF a, VF b, VF c) { return a * b + c; }
LB_INLINE VF min(VF a, VF b) { return _mm_min_ps(b, a); }
LB_INLINE VF max(VF a, VF b) { return _mm_max_ps(b, a); }
LB_INLINE VF sqrt(VF v) { return _mm_sqrt_ps(v); }
#elif defined(__aarch64__)
LB_INLINE VF fma(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
LB_INLINE VF min(VF a, VF b) { return b < a ? b : a; }
LB_INLINE VF max(VF a, VF b) { return b > a ? b : a; }
LB_INLINE VF sqrt(VF v) { return (VF)vsqrtq_f32((float32x4_t)v); }
#else
LB_INLINE VF fma(VF a, VF b, VF c) { return a * b + c; }
LB_INLINE VF min(VF a, VF b) { return b < a ? b : a; }
LB_INLINE VF max(VF a, VF b) { return b > a ? b : a; }
LB_INLINE VF sqrt(VF v) {
  for (int i = 0; i < kLanes; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
}
#endif

LB_INLINE VF abs(VF v) { return as_float(as_uint(v) & 0x7fffffffu); }
// Magnitude of a with the sign of b.
LB_INLINE VF copysign(VF a, VF b) {
  return as_float((as_uint(a) & 0x7fffffffu) | (as_uint(b) & 0x80000000u));
}

#if defined(__AVX512F__)
LB_INLINE float sum(VF v) { return _mm512_reduce_add_ps(v); }
LB_INLINE float hmax(VF v) { return _mm512_reduce_max_ps(v); }
#elif defined(__aarch64__)
LB_INLINE float sum(VF v) {
  // In the order of the loop below.
  const float32x2_t halves = vadd_f32(vget_low_f32((float32x4_t)v), vget_high_f32((float32x4_t)v));
  return vaddv_f32(halves);
}
// A NaN may be lost to a number.
LB_INLINE float hmax(VF v) { return vmaxnmvq_f32((float32x4_t)v); }
#else
LB_INLINE float sum(VF v) {
  // Pairwise, so that the order does not depend on how the compiler unrolls.
  float lanes[kLanes];
  memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
LB_INLINE float hmax(VF v) {
  float result = v[0];
  for (int i = 1; i < kLanes; ++i) result = v[i] > result ? v[i] : result;
  return result;
}
#endif

// ---- 16-bit formats ----

LB_INLINE VU widen(VH v) {
#if defined(__AVX512F__)
  return (VU)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (VU)_mm256_cvtepu16_epi32((__m128i)v);
#elif defined(__aarch64__)  // GCC 12 converts these vectors lane by lane
  return (VU)vmovl_u16((uint16x4_t)v);
#else
  return __builtin_convertvector(v, VU);
#endif
}

// The low halves of lanes whose high halves are zero.
LB_INLINE VH narrow(VU v) {
#if defined(__AVX512F__)
  return (VH)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (VH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#elif defined(__SSE2__)
  // There is no unsigned pack before SSE4.1: sign-extend, so that the signed one does not saturate.
  const __m128i wide = _mm_srai_epi32(_mm_slli_epi32((__m128i)v, 16), 16);
  VH result;
  _mm_storel_epi64(reinterpret_cast<__m128i*>(&result), _mm_packs_epi32(wide, wide));
  return result;
#elif defined(__aarch64__)
  return (VH)vmovn_u32((uint32x4_t)v);
#else
  return __builtin_convertvector(v, VH);
#endif
}

#if defined(__aarch64__)
LB_INLINE VF bf16_to_float(VH v) { return as_float((VU)vshll_n_u16((uint16x4_t)v, 16)); }
#else
LB_INLINE VF bf16_to_float(VH v) { return as_float(widen(v) << 16); }
#endif

// To nearest even, as torch does it. Not vcvtneps2bf16 where that exists: it flushes denormals, and the
// result of an op should not depend on the instruction set. Arm's does not, but keeps what a NaN says.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
LB_INLINE VH float_to_bf16(VF v) {
  const uint16x4_t rounded = vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)v));
  const uint16x4_t is_number = vmovn_u32(vceqq_f32((float32x4_t)v, (float32x4_t)v));
  return (VH)vbsl_u16(is_number, rounded, vdup_n_u16(0x7fc0));
}
#else
LB_INLINE VH float_to_bf16(VF v) {
  const VU bits = as_uint(v);
  const VU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return narrow(v == v ? rounded : splat_u(0x7fc0u));
}
#endif

#if defined(__AVX512F__)
LB_INLINE VF f16_to_float(VH v) { return _mm512_cvtph_ps((__m256i)v); }
LB_INLINE VH float_to_f16(VF v) {
  return (VH)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
LB_INLINE VF f16_to_float(VH v) { return _mm256_cvtph_ps((__m128i)v); }
LB_INLINE VH float_to_f16(VF v) {
  return (VH)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__aarch64__)
LB_INLINE VF f16_to_float(VH v) { return (VF)vcvt_f32_f16((float16x4_t)v); }
LB_INLINE VH float_to_f16(VF v) { return (VH)vcvt_f16_f32((float32x4_t)v); }
#else
// By integer arithmetic, after F. Giesen, "float->half variants" (2016, public domain).
LB_INLINE VF f16_to_float(VH v) {
  const VU half = widen(v);
  const VU exponent_mask = splat_u(0x7c00u << 13);
  VU bits = (half & 0x7fffu) << 13;
  const VU exponent = bits & exponent_mask;
  bits += (127u - 15u) << 23;
  // Infinity and NaN need the rest of the exponent; denormals are normalised by a subtraction.
  bits = exponent == exponent_mask ? bits + ((128u - 16u) << 23) : bits;
  const VF normalised = as_float(bits + (1u << 23)) - as_float(splat_u(113u << 23));
  bits = exponent == splat_u(0u) ? as_uint(normalised) : bits;
  return as_float(bits | ((half & 0x8000u) << 16));
}
LB_INLINE VH float_to_f16(VF v) {
  const VU sign = as_uint(v) & 0x80000000u;
  const VU bits = as_uint(v) ^ sign;
  const VU normal = (bits + ((15u - 127u) << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  // Adding this constant shifts a denormal's bits into place, rounded by the addition itself.
  const VU magic = splat_u(((127u - 15u) + (23u - 10u) + 1u) << 23);
  const VU denormal = as_uint(as_float(bits) + as_float(magic)) - magic;
  VU half = bits < splat_u(113u << 23) ? denormal : normal;
  half = bits >= splat_u((127u + 16u) << 23) ? splat_u(0x7c00u) : half;
  half = bits > splat_u(255u << 23) ? splat_u(0x7e00u) : half;
  return narrow(half | (sign >> 16));
}
#endif

// ---- memory ----

LB_INLINE VH load_half(const void* p) {
  VH v;
  memcpy(&v, p, sizeof(v));
  return v;
}
LB_INLINE VF load(const float* p) {
  VF v;
  memcpy(&v, p, sizeof(v));
  return v;
}
LB_INLINE VF load(const bf16* p) { return bf16_to_float(load_half(p)); }
LB_INLINE VF load(const f16* p) { return f16_to_float(load_half(p)); }
#if defined(__aarch64__)
// The four integers of 8 bits of a word.
LB_INLINE VF from_int8(uint32_t bytes) {
  const int16x8_t words = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes)));
  return (VF)vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}
#endif
// kLanes integers of 8 bits.
typedef int8_t VB __attribute__((vector_size(kLanes)));
LB_INLINE VF load(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
  uint32_t bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return from_int8(bytes);
#else
  VB bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, VF);
#endif
}
// kLanes integers that 8 bits hold.
LB_INLINE VB narrow_bytes(VI v) {
#if defined(__aarch64__)
  const int16x4_t words = vmovn_s32((int32x4_t)v);
  const uint32x2_t bytes = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(words, words)));
  VB result;
  memcpy(&result, &bytes, sizeof(result));
  return result;
#else
  return __builtin_convertvector(v, VB);
#endif
}
LB_INLINE void store(float* p, VF v) { memcpy(p, &v, sizeof(v)); }
LB_INLINE void store(bf16* p, VF v) {
  const VH half = float_to_bf16(v);
  memcpy(p, &half, sizeof(half));
}
LB_INLINE void store(f16* p, VF v) {
  const VH half = float_to_f16(v);
  memcpy(p, &half, sizeof(half));
}

// Compilers do not instrument masked loads and stores: where the address sanitizer watches, the first and the
// last byte of what they touch is read as well.
#if defined(__SANITIZE_ADDRESS__)
LB_INLINE void watch(const void* p, int64_t bytes) {
  const volatile char* at = static_cast<const volatile char*>(p);
  if (bytes > 0) static_cast<void>(at[0] + at[bytes - 1]);
}
#else
LB_INLINE void watch(const void*, int64_t) {}
#endif

#if defined(__AVX512F__)
LB_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
LB_INLINE VH load_half(const void* p, int n) {
  watch(p, 2 * n);
  return (VH)_mm256_maskz_loadu_epi16(first_lanes(n), p);
}
LB_INLINE void store_half(void* p, VH v, int n) {
  watch(p, 2 * n);
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)v);
}
LB_INLINE VF load(const float* p, int n) {
  watch(p, 4 * n);
  return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
LB_INLINE VF load(const int8_t* p, int n) {
  watch(p, n);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)));
}
LB_INLINE void store(float* p, VF v, int n) {
  watch(p, 4 * n);
  _mm512_mask_storeu_ps(p, first_lanes(n), v);
}
#elif defined(__aarch64__)
LB_INLINE VH load_half(const void* p, int n) { return (VH)vcreate_u16(load_word(p, 2 * n)); }
LB_INLINE void store_half(void* p, VH v, int n) {
  store_word(p, vget_lane_u64(vreinterpret_u64_u16((uint16x4_t)v), 0), 2 * n);
}
LB_INLINE VF load(const float* p, int n) { return (VF)load_bytes(p, 4 * n); }
LB_INLINE VF load(const int8_t* p, int n) { return from_int8(static_cast<uint32_t>(load_word(p, n))); }
LB_INLINE void store(float* p, VF v, int n) {
  const uint64x2_t words = (uint64x2_t)v;
  if (n < 2) {
    store_word(p, vgetq_lane_u64(words, 0), 4 * n);
  } else {
    const uint64x1_t low = vget_low_u64(words);
    memcpy(p, &low, sizeof(low));
    store_word(p + 2, vgetq_lane_u64(words, 1), 4 * n - 8);
  }
}
#else
// Lane by lane through the stack: a tail is at most 7 elements here, and nothing beyond it is touched.
// The second bound says what n is to GCC, which else warns of an overflow on aarch64.
LB_INLINE VH load_half(const void* p, int n) {
  uint16_t lanes[kLanes] = {};
  for (int i = 0; i < n && i < kLanes; ++i) memcpy(lanes + i, static_cast<const char*>(p) + 2 * i, 2);
  return load_half(lanes);
}
LB_INLINE void store_half(void* p, VH v, int n) {
  uint16_t lanes[kLanes];
  memcpy(lanes, &v, sizeof(v));
  for (int i = 0; i < n && i < kLanes; ++i) memcpy(static_cast<char*>(p) + 2 * i, lanes + i, 2);
}
LB_INLINE VF load(const float* p, int n) {
  float lanes[kLanes] = {};
  for (int i = 0; i < n && i < kLanes; ++i) lanes[i] = p[i];
  return load(lanes);
}
LB_INLINE VF load(const int8_t* p, int n) {
  int8_t lanes[kLanes] = {};
  for (int i = 0; i < n && i < kLanes; ++i) lanes[i] = p[i];
  return load(lanes);
}
LB_INLINE void store(float* p, VF v, int n) {
  float lanes[kLanes];
  memcpy(lanes, &v, sizeof(v));
  for (int i = 0; i < n && i < kLanes; ++i) p[i] = lanes[i];
}
#endif
LB_INLINE VF load(const bf16* p, int n) { return bf16_to_float(load_half(p, n)); }
LB_INLINE VF load(const f16* p, int n) { return f16_to_float(load_half(p, n)); }
LB_INLINE void store(bf16* p, VF v, int n) { store_half(p, float_to_bf16(v), n); }
LB_INLINE void store(f16* p, VF v, int n) { store_half(p, float_to_f16(v), n); }

// Stands for a number of lanes in place of kLanes, so that one generic lambda serves whole vectors and the
// tail: load(p + i, n), store(p + i, v, n).
struct Full {};

template <typename T>
LB_INLINE VF load(const T* p, Full) {
  return load(p);
}
template <typename T>
LB_INLINE void store(T* p, VF v, Full) {
  store(p, v);
}

// body(i, n) for each vector of [0, count): n is Full, and an int for the tail.
template <typename Body>
LB_INLINE void for_lanes(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, Full{});
  if (i < count) body(i, static_cast<int>(count - i));
}

// The sum over [0, count) of term(i, n), of which lanes from n on must be zero. Four accumulators, because
// one would wait for each addition.
template <typename Term>
LB_INLINE float sum_lanes(int64_t count, const Term& term) {
  VF a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    a += term(i, Full{});
    b += term(i + kLanes, Full{});
    c += term(i + 2 * kLanes, Full{});
    d += term(i + 3 * kLanes, Full{});
  }
  for (; i + kLanes <= count; i += kLanes) a += term(i, Full{});
  if (i < count) b += term(i, static_cast<int>(count - i));
  return sum((a + b) + (c + d));
}

// v with the lanes from n on set to zero.
LB_INLINE VF first(VF v, Full) { return v; }
#if defined(__aarch64__)
LB_INLINE VF first(VF v, int n) { return as_float(as_uint(v) & (VU)(VI{0, 1, 2, 3} < n)); }
#else
LB_INLINE VF first(VF v, int n) {
  float lanes[kLanes];
  store(lanes, v);
  return load(lanes, n);
}
#endif

// ---- rounding between steps ----

// v rounded to the precision of T, still as fp32 lanes: for the roundings that an op's order demands
// between two steps.
template <typename T>
LB_INLINE VF round_to(VF v);
template <>
LB_INLINE VF round_to<float>(VF v) {
  return v;
}
template <>
LB_INLINE VF round_to<bf16>(VF v) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return bf16_to_float(float_to_bf16(v));
#endif
  const VU bits = as_uint(v);
  const VU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return as_float(v == v ? rounded : splat_u(0x7fc00000u));
}
template <>
LB_INLINE VF round_to<f16>(VF v) {
  return f16_to_float(float_to_f16(v));
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
