#include "quantized_experts/quantized_experts_checks.h"

#include "quantized_experts/quantized_experts.h"

namespace liteboost {
namespace {

constexpr const char* op = "experts_packed";
constexpr const char* advice = "; prepack the weights with QuantizedExperts.prepack";

void check_tokens(const at::Tensor& x, const at::Tensor& index) {
  LB_CHECK_VALUE(index.dim() == 2, op, "index must have shape [tokens, slots], got ", index.sym_sizes(),
                 "; flatten batch and length");
  LB_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, op,
                 "x must have shape [tokens, in_features] or [tokens, slots, in_features], got ",
                 x.sym_sizes(), "; flatten batch and length");
  check_dtype(op, "x", x);
  LB_CHECK_TYPE(index.scalar_type() == at::kLong, op, "index must be int64, got ", index.scalar_type(),
                "; convert it");
  check_same_device(op, "index", index, "x", x);
  LB_CHECK_VALUE(x.sym_size(0) == index.sym_size(0), op, "x must have tokens = ", index.sym_size(0),
                 " first, as index ", index.sym_sizes(), " has, got ", x.sym_sizes(),
                 "; pass the index of these tokens");
  LB_CHECK_VALUE(x.dim() == 2 || x.sym_size(1) == index.sym_size(1), op,
                 "x must have slots = ", index.sym_size(1), " second, as index ", index.sym_sizes(),
                 " has, got ", x.sym_sizes(), "; pass the index of these tokens");
  LB_CHECK_NO_GRAD(op, "x", x);
}

void check_tiles(const at::Tensor& x, const at::Tensor& tiles, const c10::SymInt& out_features) {
  const bool is_w8 = tiles.scalar_type() == at::kChar;
  LB_CHECK_TYPE(is_w8 || tiles.scalar_type() == at::kByte, op, "tiles must be int8 or uint8, got ",
                tiles.scalar_type(), advice);
  check_same_device(op, "tiles", tiles, "x", x);
  const int64_t columns = columns_of_line(is_w8);
  LB_CHECK_VALUE(tiles.dim() == 3 && tiles.sym_size(2) == kTileLine && tiles.sym_size(1) > 0 &&
                     tiles.sym_size(1) % (kPack / columns) == 0,
                 op, "tiles must have shape ",
                 is_w8 ? "[tiles, in_features rounded up to 32 / 4, 64]"
                       : "[tiles, in_features / 8, 64] with in_features a multiple of 32",
                 ", got ", tiles.sym_sizes(), advice);
  LB_CHECK_VALUE(
      out_features > 0 && out_features % kTile == 0 && tiles.sym_size(0) % (out_features / kTile) == 0, op,
      "out_features must be those of an expert, a multiple of 16, in ", tiles.sym_size(0),
      " tiles of 16, got ", out_features, "; pass those of these experts");
  const c10::SymInt width = tiles.sym_size(1) * columns;
  const c10::SymInt given = is_w8 ? (x.sym_size(-1) + kPack - 1) / kPack * kPack : x.sym_size(-1);
  LB_CHECK_VALUE(given == width, op, "x must have in_features last, those of tiles ", tiles.sym_sizes(),
                 ", got ", x.sym_sizes(), "; pass the tiles of these experts");
}

void check_scales(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                  const std::optional<at::Tensor>& zero_points) {
  check_dtype(op, "scales", scales);
  check_same_device(op, "scales", scales, "x", x);
  LB_CHECK_NO_GRAD(op, "scales", scales);
  LB_CHECK_VALUE(scales.dim() == 3 && scales.sym_size(0) == tiles.sym_size(0) &&
                     scales.sym_size(2) == kTile && scales.sym_size(1) > 0 &&
                     (scales.sym_size(1) == 1 || x.sym_size(-1) % (scales.sym_size(1) * kPack) == 0),
                 op, "scales must have shape [tiles, groups, 16], one group or groups of ", kPack,
                 " columns or a multiple of it, for tiles ", tiles.sym_sizes(), ", got ", scales.sym_sizes(),
                 "; pass the scales of these experts");
  if (!zero_points.has_value()) return;
  LB_CHECK_VALUE(tiles.scalar_type() == at::kByte, op,
                 "zero_points are for tiles of 4 bits, got int8; leave them out");
  LB_CHECK_TYPE(zero_points->scalar_type() == at::kByte, op, "zero_points must be uint8, got ",
                zero_points->scalar_type(), "; convert them");
  check_same_device(op, "zero_points", *zero_points, "x", x);
  check_same_shape(op, "zero_points", *zero_points, "scales", scales);
}

}  // namespace

void check_experts_packed(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                          const std::optional<at::Tensor>& zero_points, const std::optional<at::Tensor>& bias,
                          const at::Tensor& index, const c10::SymInt& out_features) {
  check_tokens(x, index);
  check_tiles(x, tiles, out_features);
  check_scales(x, tiles, scales, zero_points);
  if (!bias.has_value()) return;
  check_same_dtype(op, "bias", *bias, "x", x);
  check_same_device(op, "bias", *bias, "x", x);
  const c10::SymInt experts = tiles.sym_size(0) / (out_features / kTile);
  LB_CHECK_VALUE(bias->dim() == 2 && bias->sym_size(0) == experts && bias->sym_size(1) == out_features, op,
                 "bias must have shape [experts, out_features] = [", experts, ", ", out_features, "], got ",
                 bias->sym_sizes(), "; pass the biases of these experts");
  LB_CHECK_NO_GRAD(op, "bias", *bias);
}

}  // namespace liteboost
