// Quantization and dequantization of tensors, and of scales into the cube unit's form.
// Formulas: CANN operator documentation (ops-nn, quant/*/docs/*.md); rounding is half to even (CAST_RINT).
#include "quantize.h"

using namespace sim;
using at::Tensor;

// x times its smoothing factors; with groups (experts) each range of rows has a row of factors of its own.
static Tensor smoothed(const Tensor& x, const TensorHandle& scales, const TensorHandle& group_index) {
  auto input = fp32(x);
  if (!scales) return input;
  if (!group_index) return input * fp32(*scales);
  const int64_t rows = x.numel() / std::max<int64_t>(x.size(-1), 1);
  return input * rows_by_group(fp32(*scales), *group_index, rows, 1).reshape(x.sizes());
}

// scale = max|x| / max of the type, y = round(x / scale); with an offset: scale = (max - min) / range,
// offset = max of the type - max / scale, y = round(x / scale + offset).
static void dynamic_quant(const Tensor& input, const TensorHandle& y, const TensorHandle& scale,
                          const TensorHandle& offset) {
  const double high = output_bits(*y) == 4 ? 7 : 127;
  if (!offset) {
    auto s = input.abs().amax(-1, true) / high;
    put_quantized(y, input / s);
    put(scale, s);
    return;
  }
  auto top = input.amax(-1, true);
  auto s = (top - input.amin(-1, true)) / (2 * high + 1), o = high - top / s;
  put_quantized(y, input / s + o);
  put(scale, s);
  put(offset, o);
}

OP(aclnnDynamicQuant, T, x, T, smooth, O, y, O, scale) {
  dynamic_quant(smoothed(*x, smooth, T{}), y, scale, O{});
}
OP(aclnnDynamicQuantV2, T, x, T, smooth, T, group_index, int64_t, dst_type, O, y, O, scale, O, offset) {
  dynamic_quant(smoothed(*x, smooth, group_index), y, scale, offset);
}
// Only the Ascend 950 has it: its limits refuse every chip simulated.
OP(aclnnDynamicQuantV3, T, x, T, smooth, T, group_index, int64_t, dst_type, bool, symmetrical, CP, mode, O, y,
   O, scale, O, offset) {
  TORCH_CHECK(false, "aclnnDynamicQuantV3 is not simulated");
}

// y = round(x * scale + offset), the scale along `axis` (or one value); sqrtMode multiplies by scale twice.
OP(aclnnAscendQuantV3, T, x, T, scale, T, offset, bool, sqrt_mode, CP, round_mode, int32_t, dst_type, int32_t,
   axis, O, y) {
  auto along_axis = [&](const Tensor& t) {
    if (t.numel() == 1) return fp32(t).reshape({});
    std::vector<int64_t> shape(x->dim(), 1);
    shape[axis < 0 ? axis + x->dim() : axis] = t.numel();
    return fp32(t).reshape(shape);
  };
  auto s = along_axis(*scale);
  auto v = fp32(*x) * s;
  if (sqrt_mode) v = v * s;
  if (offset) v = v + along_axis(*offset);
  const std::string mode = round_mode;
  put_quantized(y, mode == "ceil"    ? v.ceil()
                   : mode == "floor" ? v.floor()
                   : mode == "trunc" ? v.trunc()
                                     : v.round());
}

// y = (x + offset) * scale, cast to the 16-bit type of y; int32 holds 8 int4.
OP(aclnnAscendAntiQuant, T, x, T, scale, T, offset, int64_t, dst_type, bool, sqrt_mode, O, y) {
  auto v = integers(*x).to(at::kFloat);
  if (offset) v = v + fp32(*offset);
  v = v * fp32(*scale);
  put(y, sqrt_mode ? v * fp32(*scale) : v);
}

OP(aclnnTransQuantParamV2, T, scale, T, offset, O, out) {
  auto s = fp32(*scale).expand(out->sizes()).contiguous();
  auto o = offset ? fp32(*offset).round().clamp(-256, 255).to(at::kInt).expand(out->sizes()).contiguous()
                  : Tensor();
  auto result = at::empty(out->sizes(), at::kLong);
  for (int64_t i = 0; i < s.numel(); i++) {
    uint32_t low;
    std::memcpy(&low, s.const_data_ptr<float>() + i, 4);
    uint64_t bits = (low & 0xFFFFE000u) | (1ull << 46);
    if (offset)
      bits = (bits & 0x4000FFFFFFFFull) | (static_cast<uint64_t>(o.const_data_ptr<int>()[i] & 0x1FF) << 37);
    result.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(bits);
  }
  put(out, out->scalar_type() == at::kUInt64 ? result.view(at::kUInt64) : result);
}

// int32 values -8..7 -> 8 int4 in an int32, in ND or in the blocks of FRACTAL_NZ (64 int4 wide).
OP(aclnnConvertWeightToINT4Pack, T, weight, O, packed) {
  auto values = pack_int4(*weight);
  if (is_nz(packed)) {
    nz_storage(packed).copy_(to_nz(values, block_width(at::kInt)));
  } else {
    put(packed, values);
  }
}
