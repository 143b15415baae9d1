#include "quantized_linear/quantized_linear_checks.h"

#include "quantized_linear/quantized_linear.h"

namespace liteboost {
namespace {

void check_tiles(const char* op, const at::Tensor& x, const at::Tensor& tiles, const char* advice,
                 const char* owner) {
  const bool is_w8 = tiles.scalar_type() == at::kChar;
  LB_CHECK_TYPE(is_w8 || tiles.scalar_type() == at::kByte, op, "tiles must be int8 or uint8, got ",
                tiles.scalar_type(), "; ", advice);
  check_same_device(op, "tiles", tiles, "x", x);
  const int64_t columns = columns_of_line(is_w8);
  LB_CHECK_VALUE(
      tiles.dim() == 3 && tiles.sym_size(2) == kTileLine && tiles.sym_size(1) % (kPack / columns) == 0, op,
      "tiles must have shape ",
      is_w8 ? "[tiles, in_features rounded up to 32 / 4, 64]"
            : "[tiles, in_features / 8, 64] with in_features a multiple of 32",
      ", got ", tiles.sym_sizes(), "; ", advice);
  const c10::SymInt given = is_w8 ? (x.sym_size(-1) + kPack - 1) / kPack * kPack : x.sym_size(-1);
  LB_CHECK_VALUE(given == tiles.sym_size(1) * columns, op, "x must have in_features last, those of tiles ",
                 tiles.sym_sizes(), ", got ", x.sym_sizes(), "; pass the tiles of ", owner);
}

}  // namespace

void check_packed(const char* op, const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                  const std::optional<at::Tensor>& zero_points, const char* advice, const char* owner) {
  check_tiles(op, x, tiles, advice, owner);
  check_dtype(op, "scales", scales);
  check_same_device(op, "scales", scales, "x", x);
  LB_CHECK_NO_GRAD(op, "scales", scales);
  LB_CHECK_VALUE(scales.dim() == 3 && scales.sym_size(0) == tiles.sym_size(0) &&
                     scales.sym_size(2) == kTile && scales.sym_size(1) > 0 &&
                     (scales.sym_size(1) == 1 || x.sym_size(-1) % (scales.sym_size(1) * kPack) == 0),
                 op, "scales must have shape [tiles, groups, 16], one group or groups of ", kPack,
                 " columns or a multiple of it, for tiles ", tiles.sym_sizes(), ", got ", scales.sym_sizes(),
                 "; pass the scales of ", owner);
  if (!zero_points.has_value()) return;
  LB_CHECK_VALUE(tiles.scalar_type() == at::kByte, op,
                 "zero_points are for tiles of 4 bits, got int8; leave them out");
  LB_CHECK_TYPE(zero_points->scalar_type() == at::kByte, op, "zero_points must be uint8, got ",
                zero_points->scalar_type(), "; convert them");
  check_same_device(op, "zero_points", *zero_points, "x", x);
  check_same_shape(op, "zero_points", *zero_points, "scales", scales);
}

void check_linear_packed(const char* op, const at::Tensor& x, const at::Tensor& tiles,
                         const at::Tensor& scales, const std::optional<at::Tensor>& zero_points,
                         const std::optional<at::Tensor>& bias, const c10::SymInt& out_features) {
  LB_CHECK_VALUE(x.dim() >= 1, op, "x must have shape [..., in_features], got a scalar; add a dimension");
  check_dtype(op, "x", x);
  LB_CHECK_NO_GRAD(op, "x", x);
  check_packed(op, x, tiles, scales, zero_points, "prepack the weight with QuantizedLinear.prepack",
               "this layer");
  LB_CHECK_VALUE(out_features >= 0 && (out_features + kTile - 1) / kTile == tiles.sym_size(0), op,
                 "out_features must be those of ", tiles.sym_size(0), " tiles of 16, got ", out_features,
                 "; pass those of this layer");
  if (!bias.has_value()) return;
  check_same_dtype(op, "bias", *bias, "x", x);
  check_same_device(op, "bias", *bias, "x", x);
  check_vector(op, "bias", *bias, out_features, "out_features");
  LB_CHECK_NO_GRAD(op, "bias", *bias);
}

void check_linear_w4a8(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                       const std::optional<at::Tensor>& zero_points, const std::optional<at::Tensor>& bias,
                       const c10::SymInt& out_features) {
  constexpr const char* op = "linear_w4a8";
  LB_CHECK_TYPE(tiles.scalar_type() == at::kByte, op, "tiles must be uint8, of 4 bits, got ",
                tiles.scalar_type(), "; prepack the weight with QuantizedLinear.prepack");
  check_linear_packed(op, x, tiles, scales, zero_points, bias, out_features);
}

void check_linears_packed(const at::Tensor& x, at::TensorList tiles, at::TensorList scales,
                          const OptionalTensors& zero_points, const OptionalTensors& biases,
                          at::IntArrayRef out_features, bool rounds_x) {
  const size_t count = tiles.size();
  LB_CHECK_VALUE(count > 0 && scales.size() == count && zero_points.size() == count &&
                     biases.size() == count && out_features.size() == count,
                 "_linears_packed", "all lists must have one element for each layer, at least one, got ",
                 count, " tiles, ", scales.size(), " scales, ", zero_points.size(), " zero_points, ",
                 biases.size(), " biases, ", out_features.size(),
                 " out_features; pass None for what a layer lacks");
  for (size_t i = 0; i < count; ++i) {
    if (rounds_x) {
      check_linear_w4a8(x, tiles[i], scales[i], zero_points.get(i), biases.get(i), out_features[i]);
    } else {
      check_linear_packed("linear_packed", x, tiles[i], scales[i], zero_points.get(i), biases.get(i),
                          out_features[i]);
    }
  }
}

}  // namespace liteboost
