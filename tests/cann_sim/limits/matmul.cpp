// What hardware rejects of matrix products. Sources: ops-nn, 8.5.0 to 9.1.0,
// matmul/common/op_host/op_api/{cube_util,matmul_util}.cpp (dtypes, cubeMathType),
// matmul/mat_mul_v3/op_host/op_api/aclnn_{mm,matmul,addmm}.cpp and
// matmul/batch_mat_mul_v3/op_host/op_api/aclnn_batch_matmul.cpp (shapes); for weights in FRACTAL_NZ the documents.
#include "../ops/format.h"
#include "checks.h"

using namespace sim;

namespace {

/// cubeMathType against the dtype of the operands. 910B and 910C ignore float16 (2) for bfloat16 and HF32 (3) for 16 bits
/// with a warning (CheckCubeMathTypeForMm, Dav2201MatMulRule::GetUpperDtypeByLookUpTable).
void check_math(const TensorHandle& a, int8_t math) {
  auto dtype = a->scalar_type();
  int type = math;
  require(type >= 0 && type <= 4, "cubeMathType is ", type, ": 0 to 4");
  if (is_310p()) {
    require(type != 0 || dtype != at::kFloat, "310P takes float32 with cubeMathType 1 or 2 only");
    require(type != 3, "310P has no cubeMathType 3 (HF32)");
  }
}

/// Batches of both operands, those of either of which may be 1.
void check_batches(T a, const char* a_name, T b, const char* b_name) {
  for (int64_t k = 3; k <= std::min(a->dim(), b->dim()); k++) {
    require(a->size(-k) == b->size(-k) || a->size(-k) == 1 || b->size(-k) == 1, a_name, " has shape ",
            a->sizes(), ", ", b_name, " ", b->sizes(), ": the batches do not broadcast");
  }
}

void check_operands(T a, const char* a_name, T b, const char* b_name, const TensorHandle& out, int8_t math) {
  require_all_given({{a, a_name}, {b, b_name}, {out, "out"}});
  require_float(a, a_name);
  require_float(b, b_name);
  require_float(out, "out");
  check_math(a, math);
}

/// CheckDtypeValid in matmul_util.cpp and batch_matmul_util.cpp, CheckWeightNzDtypeValid in aclnn_matmul.cpp, 8.5.0 to
/// master: in mode 0 (KEEP_DTYPE) a product of Float is not rounded to Half.
void check_kept(T a, const TensorHandle& out, int8_t math) {
  require(math != 0 || a->scalar_type() != at::kFloat || out->scalar_type() != at::kHalf,
          "cubeMathType 0 keeps the dtype of self, Float, and out is Half");
}

/// (m, k) x (k, n) -> (m, n).
void check_matrices(T a, const char* a_name, T b, const char* b_name, const TensorHandle& out, int8_t math) {
  check_operands(a, a_name, b, b_name, out, math);
  require_axes(a, a_name, 2, 2);
  require_axes(b, b_name, 2, 2);
  require(a->size(1) == b->size(0), a_name, " has shape ", a->sizes(), ", ", b_name, " ", b->sizes());
  if (a->size(0) && b->size(1)) require_shape(out, "out", {a->size(0), b->size(1)});
  require(a->size(0) && b->size(1) ? true : out->numel() == 0, "out has shape ", out->sizes(),
          ", it must be empty");
}

/// A weight of which the storage is (n1, k1, 16, c0), or (k1, n1, 16, c0) when it is seen transposed; c0 is 32 bytes.
/// GetWeightNzShape, CheckWeightNzStorageShape in aclnn_matmul.cpp, 8.5.0 to 9.1.0: of four axes the product counts.
void check_nz_weight(T b, const char* name) {
  require(is_nz(b), name, " must be in FRACTAL_NZ, it has format ", static_cast<int>(b.format()));
  require(b->size(0) != 1 && b->size(1) != 1, name, " has shape ", b->sizes(),
          ": k and n must not be 1 in FRACTAL_NZ");
  bool transposed = b->stride(0) == 1 && b->stride(1) == b->size(0);
  require(transposed || b->is_contiguous(), name, " is neither contiguous nor a transposed matrix: strides ",
          b->strides(), " of shape ", b->sizes());
  auto stored = transposed ? std::vector<int64_t>{b->size(1), b->size(0)} : b->sizes().vec();
  auto needed = nz_shape(stored, block_width(b->scalar_type()));
  require(b.storage_shape().size() == 4 &&
              c10::multiply_integers(b.storage_shape()) == c10::multiply_integers(needed),
          name, " of shape ", b->sizes(), " has storage shape ", at::IntArrayRef(b.storage_shape()),
          ", it must be as large as ", at::IntArrayRef(needed));
}

void check_nd(const TensorHandle& x, const char* name) {
  require(!is_nz(x), name, " is in FRACTAL_NZ, only the weight may be");
}

/// The documents of aclnnMm and aclnnBatchMatMul name ND alone. ops-nn, 8.5.0 to 9.1.0: beside self in ND the product
/// takes mat2 in FRACTAL_NZ as it is (SetMatmulOpSupportFormat in matmul/common/op_host/op_api/matmul_util.cpp).
void check_formats(T a, T b, const TensorHandle& out) {
  check_nd(a, "self");
  check_nd(out, "out");
  require(!is_nz(b) || !is_310p(), "mat2 in FRACTAL_NZ is not simulated on a 310P");
}

void check_self(T self, const TensorHandle& out) {
  require_given(self, "self");
  require_float(self, "self");
  auto s = self->sizes(), o = out->sizes();
  bool fits = s.size() <= 2 && (s.empty() || s.back() == 1 || s.back() == o[1]) &&
              (s.size() < 2 || s[0] == 1 || s[0] == o[0]);
  require(fits, "self of shape ", s, " does not broadcast to ", o);
}

}  // namespace

LIMITS(aclnnMm, T, a, T, b, O, out, int8_t, math) {
  check_matrices(a, "self", b, "mat2", out, math);
  check_kept(a, out, math);
  check_formats(a, b, out);
}

// CheckShapeValid in aclnn_matmul.cpp: up to 8 axes, one k, batches that broadcast.
LIMITS(aclnnMatmul, T, a, T, b, O, out, int8_t, math) {
  check_operands(a, "self", b, "mat2", out, math);
  require_axes(a, "self", 1, 8);
  require_axes(b, "mat2", 1, 8);
  require(a->size(-1) == b->size(b->dim() == 1 ? 0 : -2), "self has shape ", a->sizes(), ", mat2 ",
          b->sizes());
  check_batches(a, "self", b, "mat2");
}

LIMITS(aclnnBatchMatMul, T, a, T, b, O, out, int8_t, math) {
  check_operands(a, "self", b, "mat2", out, math);
  check_kept(a, out, math);
  require_axes(a, "self", 3, 3);
  require_axes(b, "mat2", 3, 3);
  require(a->size(2) == b->size(1), "self has shape ", a->sizes(), ", mat2 ", b->sizes());
  check_batches(a, "self", b, "mat2");
  require_shape(out, "out", {std::max(a->size(0), b->size(0)), a->size(1), b->size(2)});
  check_formats(a, b, out);
  // CheckShape in aclnn_batch_matmul.cpp, 9.0.0 and 9.1.0.
  require(!is_nz(b) || !release_is("9.0.0") || (b->size(1) != 1 && b->size(2) != 1), "mat2 has shape ",
          b->sizes(), ": k and n must not be 1 in FRACTAL_NZ");
}

LIMITS(aclnnMatmulWeightNz, T, a, T, b, O, out, int8_t, math) {
  check_matrices(a, "self", b, "mat2", out, math);
  check_kept(a, out, math);
  // CheckWeightNzDtypeValid and CheckWeightNzDtype in aclnn_matmul.cpp.
  const bool is_wide = a->scalar_type() == at::kFloat || b->scalar_type() == at::kFloat;
  require(!is_wide || (release_is("9.0.0") && !is_310p()),
          "Float with a weight in FRACTAL_NZ needs a 910B or 910C and CANN 9.0");
  check_nz_weight(b, "mat2");
  check_nd(a, "self");
  check_nd(out, "out");
}

// CheckOutShape and CheckCubeMathTypeForAddMm: an empty product may have any empty output; in mode 4 a 910B or 910C
// takes a self of the output's shape only, from 9.0.0.
LIMITS(aclnnAddmm, T, self, T, a, T, b, S, beta, S, alpha, O, out, int8_t, math) {
  check_matrices(a, "mat1", b, "mat2", out, math);
  if (out->numel()) check_self(self, out);
  require(
      math != 4 || is_310p() || !release_is("9.0.0") || release_is("9.2.0") || self->sizes() == out->sizes(),
      "cubeMathType 4 needs self of the output's shape ", out->sizes(), ", it has ", self->sizes());
  require_given(beta, "beta");
  require_given(alpha, "alpha");
}
LIMITS(aclnnAddmmWeightNz, T, self, T, a, T, b, S, beta, S, alpha, O, out, int8_t, math) {
  check_matrices(a, "mat1", b, "mat2", out, math);
  check_self(self, out);
  require_dtype(a, "mat1", {at::kHalf, at::kBFloat16});
  require_same_dtype(b, "mat2", a, "mat1");
  check_nz_weight(b, "mat2");
  check_nd(self, "self");
  check_nd(a, "mat1");
  check_nd(out, "out");
  require_given(beta, "beta");
  require_given(alpha, "alpha");
}
