#include "quantized_experts/quantized_experts_checks.h"

#include "quantized_experts/quantized_experts.h"
#include "quantized_linear/quantized_linear_checks.h"

namespace liteboost {
namespace {

constexpr const char* op = "experts_packed";

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

}  // namespace

void check_experts_packed(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                          const std::optional<at::Tensor>& zero_points, const std::optional<at::Tensor>& bias,
                          const at::Tensor& index, const c10::SymInt& out_features) {
  check_tokens(x, index);
  check_packed(op, x, tiles, scales, zero_points, "prepack the weights with QuantizedExperts.prepack",
               "these experts");
  LB_CHECK_VALUE(tiles.sym_size(1) > 0, op, "tiles must have columns, got ", tiles.sym_sizes(),
                 "; prepack the weights with QuantizedExperts.prepack");
  LB_CHECK_VALUE(
      out_features > 0 && out_features % kTile == 0 && tiles.sym_size(0) % (out_features / kTile) == 0, op,
      "out_features must be those of an expert, a multiple of 16, in ", tiles.sym_size(0),
      " tiles of 16, got ", out_features, "; pass those of these experts");
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
