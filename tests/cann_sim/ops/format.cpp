// Conversion between ND and FRACTAL_NZ. Source: NpuFormatCast of ops-math.
#include "format.h"

#include "../opapi/errors.h"

namespace sim {

using at::Tensor;

static int64_t aligned(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

std::vector<int64_t> nz_shape(at::IntArrayRef shape, int64_t width) {
  std::vector<int64_t> all(shape.begin(), shape.end() - 2);
  auto rows = shape[shape.size() - 2], columns = shape[shape.size() - 1];
  all.insert(all.end(), {aligned(columns, width) / width, aligned(rows, kCube) / kCube, kCube, width});
  return all;
}

Tensor to_nz(const Tensor& x, int64_t width) {
  auto rows = x.size(-2), columns = x.size(-1);
  auto padded =
      at::constant_pad_nd(x, {0, aligned(columns, width) - columns, 0, aligned(rows, kCube) - rows});
  auto split = padded.unflatten(-1, {-1, width}).unflatten(-3, {-1, kCube});  // [..., r1, 16, c1, width]
  return split.movedim(-2, -4).contiguous();
}

Tensor from_nz(const Tensor& storage, at::IntArrayRef shape) {
  auto padded = storage.movedim(-4, -2).flatten(-2).flatten(-3, -2);
  return padded.narrow(-2, 0, shape[shape.size() - 2]).narrow(-1, 0, shape[shape.size() - 1]);
}

Tensor nz_storage(const TensorHandle& x) {
  TORCH_CHECK(x.storage_shape().size() == x->sizes().size() + 2, "a FRACTAL_NZ tensor of shape ", x->sizes(),
              " needs a storage shape of two axes more, it has ", at::IntArrayRef(x.storage_shape()));
  return at::from_blob(x->data_ptr(), x.storage_shape(), x->options());
}

Tensor values_of(const TensorHandle& x) {
  if (!is_nz(x)) return *x;
  auto shape = x->sizes().vec();
  // The strides of the view tell whether the stored matrix is seen transposed.
  bool transposed = x->stride(-1) != 1 && x->stride(-2) == 1 && x->size(-1) != 1;
  if (transposed) std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  auto values = from_nz(nz_storage(x), shape);
  return transposed ? values.transpose(-1, -2) : values;
}

}  // namespace sim

using namespace sim;

OP(aclnnNpuFormatCast, T, source, O, out) {
  if (is_nz(out)) {
    auto width = out.storage_shape().back();
    nz_storage(out).copy_(to_nz(values_of(source), width));
  } else {
    put(out, values_of(source));
  }
}

/// The caller frees `shape` with delete[]. `additional_dtype` (-1: that of the source) chooses the width of a block.
SIM_EXPORT int aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor* source, const int format,
                                                        const int additional_dtype, int64_t** shape,
                                                        uint64_t* axes, int* actual_format) {
  return guarded("aclnnNpuFormatCastCalculateSizeAndFormat", [&] {
    if (!source) throw NullError("srcTensor is null");
    expect(source, Kind::tensor);
    require(soc() != Soc::ascend310p, "Atlas inference products (310P) do not have NpuFormatCast");
    auto& view = source->i->view;
    require(view.size() >= 2 && view.size() <= 6, "srcTensor has ", view.size(), " axes, 2 to 6 are needed");
    require(source->i->t.numel() > 0, "srcTensor is empty");
    require(format == ACL_FORMAT_FRACTAL_NZ || format == ACL_FORMAT_ND || format == ACL_FORMAT_NCHW ||
                format == ACL_FORMAT_NCL || format == ACL_FORMAT_NCDHW,
            "format ", format, " is not simulated: ND, NCL, NCHW, NCDHW and FRACTAL_NZ are");
    auto dtype = additional_dtype < 0 ? source->i->dtype : static_cast<aclDataType>(additional_dtype);
    auto all = format == ACL_FORMAT_FRACTAL_NZ ? nz_shape(view, block_width(scalar_type(dtype))) : view;
    *shape = new int64_t[all.size()];
    std::copy(all.begin(), all.end(), *shape);
    *axes = all.size();
    *actual_format = format;
  });
}
