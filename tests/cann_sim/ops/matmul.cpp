// Matrix products of the cube unit: operands of 16 bits, a float32 sum, one rounding to the output dtype.
#include "format.h"

using namespace sim;

using at::Tensor;

namespace {

enum CubeMath : int8_t { keep_dtype = 0, allow_down = 1, use_fp16 = 2, use_hf32 = 3, fp32_add = 4 };

/// HF32: float32 with 11 bits of mantissa, rounded to nearest.
Tensor hf32(const Tensor& x) {
  auto bits = x.to(at::kFloat).contiguous().view(at::kInt);
  return at::bitwise_and(bits + (1 << 11), at::full({}, ~0xfff, at::kInt)).view(at::kFloat);
}

/// An operand as the cube unit takes it; what cubeMathType does to float32 depends on the chip (documents of aclnnMm).
Tensor operand(const Tensor& x, int8_t math) {
  if (math == use_fp16) return rounded(x, at::kHalf);
  if (x.scalar_type() == at::kFloat && math == allow_down && soc() == Soc::ascend310p)
    return rounded(x, at::kHalf);
  if (x.scalar_type() == at::kFloat && (math == allow_down || math == use_hf32)) return hf32(x);
  return fp32(x);
}

Tensor product(const Tensor& a, const Tensor& b, int8_t math) {
  if (!at::isFloatingType(a.scalar_type())) return at::matmul(a, b);
  // GetUpperDtypeByLookUpTable in ops-nn, matmul/common/op_host/op_api/matmul_util.cpp: of bfloat16 alone it is ignored.
  if (math == use_fp16 && a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16)
    math = keep_dtype;
  return at::matmul(operand(a, math), operand(b, math));
}

/// beta * self + alpha * product. A bias [n] or [1, n] with both factors 1 is added in the float32 sum; otherwise the
/// product is rounded first (documents of aclnnAddmm; cubeMathType 4 keeps float32).
Tensor added(const Tensor& self, const Tensor& a, const Tensor& b, S beta, S alpha, int8_t math,
             at::ScalarType dtype) {
  auto r = product(a, b, math);
  bool bias = self.dim() < 2 || self.size(0) == 1;
  bool plain = (*beta).toDouble() == 1.0 && (*alpha).toDouble() == 1.0;
  if (!at::isFloatingType(dtype)) return self * *beta + r * *alpha;
  if (!(bias && plain) && math != fp32_add) r = rounded(r, dtype);
  return fp32(self) * *beta + r * *alpha;
}

/// A weight in FRACTAL_NZ, of which there may be a batch. Its memory is taken as GetWeightNzShape of aclnn_matmul.cpp has
/// it, whatever the axes of its storage.
Tensor nz_weight(const TensorHandle& b) {
  const bool transposed = b->stride(-2) == 1 && b->stride(-1) == b->size(-2);
  auto stored = b->sizes().vec();
  if (transposed) std::swap(stored.back(), stored[stored.size() - 2]);
  const auto shape = nz_shape(stored, block_width(b->scalar_type()));
  const auto have = c10::multiply_integers(b.storage_shape());
  TORCH_CHECK(have >= c10::multiply_integers(shape), "a weight of shape ", b->sizes(),
              " in FRACTAL_NZ has memory of ", have, " elements, it lies in ", at::IntArrayRef(shape));
  const auto memory = at::from_blob(b->data_ptr(), shape, b->options());
  return transposed ? from_nz(memory, stored).transpose(-1, -2) : from_nz(memory, stored);
}

Tensor weight_of(const TensorHandle& b) { return is_nz(b) ? nz_weight(b) : *b; }

}  // namespace

OP(aclnnMm, T, a, T, b, O, out, int8_t, math) { put(out, product(*a, weight_of(b), math)); }
OP(aclnnMatmul, T, a, T, b, O, out, int8_t, math) { put(out, product(*a, *b, math)); }
OP(aclnnBatchMatMul, T, a, T, b, O, out, int8_t, math) { put(out, product(*a, weight_of(b), math)); }
OP(aclnnMatmulWeightNz, T, a, T, b, O, out, int8_t, math) { put(out, product(*a, nz_weight(b), math)); }

OP(aclnnAddmm, T, self, T, a, T, b, S, beta, S, alpha, O, out, int8_t, math) {
  put(out, added(*self, *a, *b, beta, alpha, math, out->scalar_type()));
}
OP(aclnnInplaceAddmm, R, self, T, a, T, b, S, beta, S, alpha, int8_t, math) {
  put(self, added(*self, *a, *b, beta, alpha, math, self->scalar_type()));
}
OP(aclnnAddmmWeightNz, T, self, T, a, T, b, S, beta, S, alpha, O, out, int8_t, math) {
  put(out, added(*self, *a, nz_weight(b), beta, alpha, math, out->scalar_type()));
}
OP(aclnnBaddbmm, T, self, T, a, T, b, S, beta, S, alpha, O, out, int8_t, math) {
  put(out, at::baddbmm(*self, *a, *b, *beta, *alpha));
}
