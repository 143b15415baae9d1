#include "causal_conv/causal_conv_checks.h"

namespace liteboost {
namespace {

bool check(const char* op, const at::Tensor& x, const at::Tensor& weight,
           const std::optional<at::Tensor>& bias, c10::string_view activation) {
  LB_CHECK_VALUE(x.dim() == 3, op, "x must have shape [batch, channels, tokens], got ", x.sym_sizes(),
                 "; channels stand before tokens, as in torch's convolutions");
  check_dtype(op, "x", x);
  LB_CHECK_NO_GRAD(op, "x", x);
  check_same_dtype(op, "weight", weight, "x", x);
  check_same_device(op, "weight", weight, "x", x);
  LB_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(0) == x.sym_size(1) && weight.sym_size(1) >= 1, op,
                 "weight must have shape [channels, taps] with channels = ", x.sym_size(1),
                 " and a tap at least, got ", weight.sym_sizes(), "; squeeze nn.Conv1d's in dimension 1");
  LB_CHECK_NO_GRAD(op, "weight", weight);
  if (bias.has_value()) {
    check_same_dtype(op, "bias", *bias, "x", x);
    check_same_device(op, "bias", *bias, "x", x);
    check_vector(op, "bias", *bias, x.sym_size(1), "channels");
    LB_CHECK_NO_GRAD(op, "bias", *bias);
  }
  LB_CHECK_VALUE(activation == "none" || activation == "silu", op, "activation must be none or silu, got '",
                 activation, "'; apply another one behind the op");
  return activation == "silu";
}

}  // namespace

bool check_causal_conv1d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         c10::string_view activation) {
  return check("causal_conv1d", x, weight, bias, activation);
}

bool check_causal_conv1d_update(const at::Tensor& x, const at::Tensor& state, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, c10::string_view activation) {
  constexpr const char* op = "causal_conv1d_update";
  const bool silu = check(op, x, weight, bias, activation);
  check_same_dtype(op, "state", state, "x", x);
  check_same_device(op, "state", state, "x", x);
  LB_CHECK_VALUE(state.dim() == 3 && state.sym_size(0) == x.sym_size(0) &&
                     state.sym_size(1) == x.sym_size(1) && state.sym_size(2) >= weight.sym_size(1) - 1,
                 op, "state must have shape [batch, channels, at least taps - 1] = [", x.sym_size(0), ", ",
                 x.sym_size(1), ", ", weight.sym_size(1) - 1, "], got ", state.sym_sizes(),
                 "; pass the state of this layer");
  LB_CHECK_NO_GRAD(op, "state", state);
  return silu;
}

}  // namespace liteboost
