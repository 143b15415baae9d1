// Arithmetic the quantized operators share: rounding, saturation, 4-bit packing, hardware scales.
#pragma once
#include <cstring>

#include "format.h"

namespace sim {

// Rounds half to even (CAST_RINT, what the vector unit's quantizing casts do) and saturates to `bits` bits.
// A row of zeros has scale 0 and 0 / 0 = NaN here: its values are 0.
inline at::Tensor quantize(const at::Tensor& x, int bits = 8) {
  const double high = (1 << (bits - 1)) - 1;
  return at::nan_to_num(x).round().clamp(-high - 1, high).to(at::kChar);
}

// int8 values in [-8, 7] of shape (..., n) -> int32 of shape (..., n / 8), value i in bits 4i..4i+3.
inline at::Tensor pack_int4(const at::Tensor& values) {
  auto shape = values.sizes().vec();
  TORCH_CHECK(shape.back() % 8 == 0, "8 int4 values make one int32: the last dimension is ", shape.back());
  shape.back() /= 8;
  auto packed = at::empty(shape, at::kInt);
  auto dense = values.to(at::kChar).contiguous();
  const int8_t* v = dense.const_data_ptr<int8_t>();
  auto* p = reinterpret_cast<uint32_t*>(packed.mutable_data_ptr<int32_t>());
  for (int64_t i = 0; i < packed.numel(); i++) {
    p[i] = 0;
    for (int k = 0; k < 8; k++) p[i] |= (static_cast<uint32_t>(v[8 * i + k]) & 0xF) << (4 * k);
  }
  return packed;
}

// The inverse along `dim`: int32 (..., n / 8, ...) -> int8 (..., n, ...).
inline at::Tensor unpack_int4(const at::Tensor& packed, int64_t dim = -1) {
  auto dense = packed.transpose(dim, -1).contiguous();
  auto shape = dense.sizes().vec();
  shape.back() *= 8;
  auto values = at::empty(shape, at::kChar);
  const int32_t* p = dense.const_data_ptr<int32_t>();
  int8_t* v = values.mutable_data_ptr<int8_t>();
  for (int64_t i = 0; i < values.numel(); i++) {
    int nibble = (static_cast<uint32_t>(p[i / 8]) >> (4 * (i % 8))) & 0xF;
    v[i] = static_cast<int8_t>(nibble >= 8 ? nibble - 16 : nibble);
  }
  return values.transpose(dim, -1);
}

// A matrix of integers: int32 holds 8 int4 along its contiguous dimension (a transposed view: the second last).
inline at::Tensor integers(const at::Tensor& matrix) {
  if (matrix.scalar_type() != at::kInt) return matrix;
  const bool transposed = matrix.dim() > 1 && matrix.stride(-1) != 1 && matrix.stride(-2) == 1;
  return unpack_int4(matrix, transposed ? -2 : -1);
}

// The number of bits a quantized output keeps: int8, or int32 holding 8 int4.
inline int output_bits(const at::Tensor& y) { return y.scalar_type() == at::kInt ? 4 : 8; }
inline void put_quantized(const TensorHandle& y, const at::Tensor& x) {
  const int bits = output_bits(*y);
  auto q = quantize(x, bits);
  put(y, bits == 4 ? pack_int4(q) : q);
}

// What the cube unit's dequantizing store reads from 64 bits: scale = the upper 19 bits of a float32 in bits
// 13..31, offset = 9 signed bits in bits 37..45 (aclnnTransQuantParamV2's documentation).
inline bool hardware_scale(const at::Tensor& scale) {
  return scale.scalar_type() == at::kLong || scale.scalar_type() == at::kUInt64;
}
inline std::pair<at::Tensor, at::Tensor> decode_scale(const at::Tensor& scale) {
  auto dense = scale.contiguous();
  auto value = at::empty(dense.sizes(), at::kFloat), offset = at::empty(dense.sizes(), at::kFloat);
  auto* bits = static_cast<const uint64_t*>(dense.const_data_ptr());
  for (int64_t i = 0; i < dense.numel(); i++) {
    uint32_t low = static_cast<uint32_t>(bits[i]) & 0xFFFFE000u;
    std::memcpy(value.mutable_data_ptr<float>() + i, &low, 4);
    int signed9 = static_cast<int>(bits[i] >> 37 & 0x1FF);
    offset.mutable_data_ptr<float>()[i] = static_cast<float>(signed9 >= 256 ? signed9 - 512 : signed9);
  }
  return {value, offset};
}

/// The values of a tensor of a list, whichever its format.
inline at::Tensor values_of(const TensorListHandle& list, size_t k) {
  TensorHandle t;
  t.p = list.p->v.at(k);
  return values_of(t);
}

// Product of integer matrices as the cube unit's int32 accumulator holds it (float64 keeps it exact).
inline at::Tensor integer_product(const at::Tensor& a, const at::Tensor& b) {
  return at::matmul(a.to(at::kDouble), b.to(at::kDouble));
}

}  // namespace sim
