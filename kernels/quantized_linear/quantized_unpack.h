// Rows of a packed weight, multiplied out: for the product of many rows of x.
#pragma once

#include "common/vec.h"
#include "quantized_linear/quantized_linear.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

LB_INLINE float as_number(float x) { return x; }
LB_INLINE float as_number(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
LB_INLINE float as_number(f16 x) { return load(&x, 1)[0]; }

// Calls f with a pointer of the type of the scales.
template <typename F>
LB_INLINE void with_scales(const QuantizedWeight& weight, const F& f) {
  LB_DISPATCH_DTYPE(weight.scale_dtype, T, f(static_cast<const T*>(weight.scales)));
}

template <typename T>
void unpack_w8(const QuantizedWeight& weight, int64_t row, T* out) {
  const int8_t* data = static_cast<const int8_t*>(weight.data) + row * weight.k;
  float scale = 0.0f;
  with_scales(weight, [&](const auto* all) { scale = as_number(all[row]); });
  int64_t i = 0;
  for (; i + kLanes <= weight.k; i += kLanes) store(out + i, from_int8(data + i) * splat(scale));
  if (i < weight.k) {
    int8_t bytes[kLanes];
    store(out + i, from_int8(padded(data + i, weight.k - i, bytes)) * splat(scale),
          static_cast<int>(weight.k - i));
  }
}

// The kLanes columns from part * kLanes on of a pack.
LB_INLINE VI nibbles(const char* pack, int part) {
#if defined(__AVX512F__)
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pack));
  const VU twice = (VU)_mm512_cvtepu16_epi32(_mm256_broadcastsi128_si256(words));
  const VU shifts = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
  return (VI)((twice >> (shifts + static_cast<uint32_t>(8 * part))) & 15u);
#elif defined(__AVX2__)
  return (VI)((widen(load_half(pack)) >> static_cast<uint32_t>(4 * part)) & 15u);
#else
  return (VI)((widen(load_half(pack + 8 * (part % 2))) >> static_cast<uint32_t>(4 * (part / 2))) & 15u);
#endif
}

template <typename T>
void unpack_w4(const QuantizedWeight& weight, int64_t row, T* out) {
  const char* data = static_cast<const char*>(weight.data) + row * weight.k / 2;
  const int64_t in_group = weight.k / weight.groups;
  for (int64_t at = 0; at < weight.k; at += kPack, data += kPack / 2) {
    const int64_t group = row * weight.groups + at / in_group;
    float scale = 0.0f;
    with_scales(weight, [&](const auto* all) { scale = as_number(all[group]); });
    const int zero = weight.zero_points ? weight.zero_points[group] : 8;
    for (int part = 0; part * kLanes < kPack; ++part) {
      const VF q = __builtin_convertvector(nibbles(data, part) - zero, VF);
      store(out + at + part * kLanes, q * splat(scale));
    }
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
