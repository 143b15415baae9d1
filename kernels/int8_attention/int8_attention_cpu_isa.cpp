// The loop of quantize_kv. Compiled once an instruction set. int8_attention runs those of attention/.
#include "common/largest.h"
#include "common/vec.h"
#include "common/vec_integers.h"
#include "int8_attention/int8_attention.h"

namespace liteboost {
namespace LB_ISA {
namespace {

template <typename T>
void quantize_row(const T* x, int64_t cols, int8_t* out) {
  const float limit = largest_of(x, cols);
  const bool is_finite = limit == limit;
  const float scale = limit / 127.0f;
  memcpy(out + cols, &scale, sizeof(scale));
  if (!is_finite) {
    memset(out, 0, static_cast<size_t>(cols));
    return;
  }
  const VF factor = splat(127.0f / limit);
  for_lanes(cols, [&](int64_t i, auto n) { store(out + i, round_bytes(load(x + i, n) * factor), n); });
}

void quantize(DType dtype, const Int8RowsArgs& args, int64_t begin, int64_t end) {
  const int64_t bytes = args.cols + kInt8ScaleBytes;
  LB_DISPATCH_DTYPE(
      dtype, T,
      for (int64_t row = begin; row < end; ++row)
          quantize_row(static_cast<const T*>(args.x) + row * args.stride, args.cols, args.out + row * bytes));
}

}  // namespace

extern const Int8RowsKernels quantize_kv_kernels;
const Int8RowsKernels quantize_kv_kernels = {&quantize};

}  // namespace LB_ISA
}  // namespace liteboost
