// Softmax, losses, and the gradients of activations.
#include "common.h"

using namespace sim;

OP(aclnnSoftmax, T, x, int64_t, d, O, o) { put(o, at::softmax(x->to(o->scalar_type()), d)); }
OP(aclnnLogSoftmax, T, x, int64_t, d, O, o) { put(o, at::log_softmax(x->to(o->scalar_type()), d)); }
OP(aclnnSoftmaxBackward, T, g, T, y, int64_t, d, O, o) {
  put(o, at::_softmax_backward_data(*g, *y, d, y->scalar_type()));
}
OP(aclnnLogSoftmaxBackward, T, g, T, y, int64_t, d, O, o) {
  put(o, at::_log_softmax_backward_data(*g, *y, d, y->scalar_type()));
}
OP(aclnnSiluBackward, T, g, T, x, O, o) { put(o, at::silu_backward(*g, *x)); }
OP(aclnnGeluBackward, T, g, T, x, O, o) { put(o, at::gelu_backward(*g, *x)); }
OP(aclnnGeluBackwardV2, T, g, T, x, CP, ap, O, o) { put(o, at::gelu_backward(*g, *x, ap)); }
OP(aclnnSigmoidBackward, T, g, T, y, O, o) { put(o, at::sigmoid_backward(*g, *y)); }
OP(aclnnTanhBackward, T, g, T, y, O, o) { put(o, at::tanh_backward(*g, *y)); }
OP(aclnnThresholdBackward, T, g, T, x, S, t, O, o) { put(o, at::threshold_backward(*g, *x, *t)); }
OP(aclnnNLLLoss, T, x, T, t, T, w, int64_t, red, int64_t, ig, O, o, O, tw) {
  put_each(at::nll_loss_forward(*x, t->to(at::kLong), w.opt(), red, ig), o, tw);
}
OP(aclnnNLLLossBackward, T, g, T, x, T, t, T, w, int64_t, red, int64_t, ig, T, tw, O, o) {
  put(o, at::nll_loss_backward(*g, *x, t->to(at::kLong), w.opt(), red, ig, *tw));
}
OP(aclnnMseLoss, T, x, T, t, int64_t, red, O, o) { put(o, at::mse_loss(*x, *t, red)); }
OP(aclnnMseLossBackward, T, g, T, x, T, t, int64_t, red, O, o) {
  put(o, at::mse_loss_backward(*g, *x, *t, red));
}
OP(aclnnL1Loss, T, x, T, t, int64_t, r, O, o) { put(o, at::l1_loss(*x, *t, r)); }
OP(aclnnSmoothL1Loss, T, x, T, t, int64_t, r, float, b, O, o) { put(o, at::smooth_l1_loss(*x, *t, r, b)); }
OP(aclnnSoftMarginLoss, T, x, T, t, int64_t, r, O, o) { put(o, at::soft_margin_loss(*x, *t, r)); }
OP(aclnnBinaryCrossEntropy, T, x, T, t, T, w, int64_t, r, O, o) {
  put(o, at::binary_cross_entropy(*x, *t, w.opt(), r));
}
OP(aclnnBinaryCrossEntropyWithLogits, T, x, T, t, T, w, T, p, int64_t, r, O, o) {
  put(o, at::binary_cross_entropy_with_logits(*x, *t, w.opt(), p.opt(), r));
}
OP(aclnnKlDiv, T, x, T, t, int64_t, r, bool, lt, O, o) { put(o, at::kl_div(*x, *t, r, lt)); }
OP(aclnnNLLLoss2d, T, x, T, t, T, w, int64_t, red, int64_t, ig, O, o, O, tw) {
  put_each(at::nll_loss2d_forward(*x, t->to(at::kLong), w.opt(), red, ig), o, tw);
}
