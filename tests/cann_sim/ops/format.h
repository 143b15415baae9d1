// FRACTAL_NZ (format 29), the private layout of matrices: [..., r, c] is stored as [..., c / width, r / 16, 16, width],
// both axes padded, `width` 16 elements of 16 bits or 32 of 8. The storage really is permuted: who reads it as ND reads
// garbage.
#pragma once
#include "fused.h"

namespace sim {

constexpr int64_t kCube = 16;

inline bool is_nz(const TensorHandle& x) { return x && x.format() == ACL_FORMAT_FRACTAL_NZ; }

/// Elements of one row of a block for this dtype: 32 bytes.
inline int64_t block_width(at::ScalarType dtype) {
  return 32 / static_cast<int64_t>(c10::elementSize(dtype));
}

/// Shape of the storage for [..., r, c].
std::vector<int64_t> nz_shape(at::IntArrayRef shape, int64_t width);
/// The values of [..., r, c] in that order, padding zero.
at::Tensor to_nz(const at::Tensor& x, int64_t width);
/// The values of an NZ tensor of that shape.
at::Tensor from_nz(const at::Tensor& storage, at::IntArrayRef shape);
/// The storage of a tensor that is NZ, as a tensor of its storage shape.
at::Tensor nz_storage(const TensorHandle& x);
/// The values of a matrix whichever its format; an NZ one may be seen transposed.
at::Tensor values_of(const TensorHandle& x);

}  // namespace sim
