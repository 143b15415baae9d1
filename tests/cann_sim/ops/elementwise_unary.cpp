// Element-wise functions of one tensor.
#include "common.h"

using namespace sim;

UNARY(Abs, x.abs())
UNARY(Neg, x.neg())
UNARY(Sign, x.sign())
UNARY(Trunc, x.trunc())
UNARY(Silu, at::silu(x))
UNARY(Round, x.round())
UNARY(LogSigmoid, at::log_sigmoid(x))
UNARY(IsFinite, x.isfinite())
UNARY(IsPosInf, at::isposinf(x))
UNARY(IsNegInf, at::isneginf(x))
UNARY(BitwiseNot, x.bitwise_not())
UNARY(Gelu, at::gelu(x))
UNARY(Signbit, at::signbit(x))
UNARY_AND_INPLACE(Rsqrt, x.rsqrt())
UNARY_AND_INPLACE(Sqrt, x.sqrt())
UNARY_AND_INPLACE(Exp, x.exp())
UNARY_AND_INPLACE(Exp2, at::exp2(x))
UNARY_AND_INPLACE(Expm1, x.expm1())
UNARY_AND_INPLACE(Log, x.log())
UNARY_AND_INPLACE(Log2, x.log2())
UNARY_AND_INPLACE(Log10, x.log10())
UNARY_AND_INPLACE(Log1p, x.log1p())
UNARY_AND_INPLACE(Sin, x.sin())
UNARY_AND_INPLACE(Cos, x.cos())
UNARY_AND_INPLACE(Tan, x.tan())
UNARY_AND_INPLACE(Sinh, x.sinh())
UNARY_AND_INPLACE(Cosh, x.cosh())
UNARY_AND_INPLACE(Tanh, x.tanh())
UNARY_AND_INPLACE(Asin, x.asin())
UNARY_AND_INPLACE(Acos, x.acos())
UNARY_AND_INPLACE(Atan, x.atan())
UNARY_AND_INPLACE(Erf, x.erf())
UNARY_AND_INPLACE(Erfc, x.erfc())
UNARY_AND_INPLACE(Erfinv, x.erfinv())
UNARY_AND_INPLACE(Floor, x.floor())
UNARY_AND_INPLACE(Ceil, x.ceil())
UNARY_AND_INPLACE(Reciprocal, x.reciprocal())
UNARY_AND_INPLACE(Sigmoid, x.sigmoid())
UNARY_AND_INPLACE(Relu, x.relu())
UNARY_AND_INPLACE(LogicalNot, x.logical_not())
UNARY_AND_INPLACE(Frac, x.frac())
OP(aclnnGeluV2, T, x, int64_t, mode, O, o) { put(o, at::gelu(*x, mode ? "tanh" : "none")); }
/// x * sigmoid(beta * x), in float32; beta is 1 where it is not given.
OP(aclnnSwish, T, x, S, beta, O, o) {
  auto v = x->to(at::kFloat);
  put(o, v * at::sigmoid(beta ? v * *beta : v));
}
OP(aclnnSoftplus, T, x, S, b, S, t, O, o) { put(o, at::softplus(*x, *b, *t)); }
OP(aclnnLeakyRelu, T, x, S, s, O, o) { put(o, at::leaky_relu(*x, *s)); }
OP(aclnnElu, T, x, S, a, S, b, S, c, O, o) { put(o, at::elu(*x, *a, *b, *c)); }
OP(aclnnHardtanh, T, x, S, a, S, b, O, o) { put(o, at::hardtanh(*x, *a, *b)); }
OP(aclnnNanToNum, T, x, float, n, float, p, float, m, O, o) { put(o, at::nan_to_num(*x, n, p, m)); }
UNARY_AND_INPLACE(Acosh, x.acosh())
UNARY_AND_INPLACE(Asinh, x.asinh())
UNARY_AND_INPLACE(Atanh, x.atanh())
UNARY_AND_INPLACE(Hardswish, at::hardswish(x))
UNARY_AND_INPLACE(Hardsigmoid, at::hardsigmoid(x))
UNARY_AND_INPLACE(Mish, at::mish(x))
UNARY_AND_INPLACE(Sinc, x.sinc())
UNARY(Trace, x.trace())
UNARY(Median, x.median())
UNARY(NanMedian, x.nanmedian())
UNARY(AngleV2, x.angle())
OP(aclnnLogSigmoidForward, T, x, O, o, O, b) { put(o, at::log_sigmoid(*x)); }
OP(aclnnRoundDecimals, T, x, int64_t, d, O, o) { put(o, at::round(*x, d)); }
OP(aclnnCelu, T, x, S, a, O, o) { put(o, at::celu(*x, *a)); }
OP(aclnnThreshold, T, x, S, t, S, v, O, o) { put(o, at::threshold(*x, *t, *v)); }
OP(aclnnSoftshrink, T, x, S, l, O, o) { put(o, at::softshrink(*x, *l)); }
OP(aclnnHardshrink, T, x, S, l, O, o) { put(o, at::hardshrink(*x, *l)); }
OP(aclnnChannelShuffle, T, x, int64_t, g, O, o) { put(o, at::channel_shuffle(*x, g)); }
