// What hardware rejects of format conversions: documents of ops-math (conversion/npu_format_cast, conversion/trans_data).
#include "../ops/format.h"
#include "checks.h"

using namespace sim;

LIMITS(aclnnNpuFormatCast, T, source, O, out) {
  require_all_given({{source, "srcTensor"}, {out, "dstTensor"}});
  Dtypes all = {at::kChar, at::kByte, at::kFloat, at::kHalf, at::kBFloat16, at::kInt};
  require_dtype(source, "srcTensor", all);
  require_same_dtype(out, "dstTensor", source, "srcTensor");
  require_axes(source, "srcTensor", 2, 6);
  require_not_empty(source, "srcTensor");
  require_contiguous(source, "srcTensor");
  require_contiguous(out, "dstTensor");
  require_shape(out, "dstTensor", source->sizes());
  for (auto& [tensor, name] : Tensors{{source, "srcTensor"}, {out, "dstTensor"}}) {
    if (!is_nz(tensor)) continue;
    auto& storage = tensor.storage_shape();
    require(storage.size() >= 4 && storage.size() <= 8, name, " has a storage shape of ", storage.size(),
            " axes, FRACTAL_NZ has 4 to 8");
    auto width = storage.back();
    require(width == 8 || width == 16 || width == 32, name, ": blocks of ", width, " columns");
    require(storage == nz_shape(tensor->sizes(), width), name, " of shape ", tensor->sizes(),
            " has storage shape ", at::IntArrayRef(storage), ", it must be ",
            at::IntArrayRef(nz_shape(tensor->sizes(), width)));
  }
}
