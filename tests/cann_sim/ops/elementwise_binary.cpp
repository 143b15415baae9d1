// Element-wise arithmetic, comparison and selection of two or more operands.
#include "common.h"

using namespace sim;

OP(aclnnAdd, T, a, T, b, S, al, O, o) { put(o, at::add(*a, *b, *al)); }
OP(aclnnAdds, T, a, S, b, S, al, O, o) { put(o, at::add(*a, *b, *al)); }
OP(aclnnAddV3, S, a, T, b, S, al, O, o) { put(o, at::add(at::mul(*b, *al), *a)); }
OP(aclnnInplaceAdd, R, a, T, b, S, al) { put(a, at::add(*a, *b, *al)); }
OP(aclnnInplaceAdds, R, a, S, b, S, al) { put(a, at::add(*a, *b, *al)); }
OP(aclnnSub, T, a, T, b, S, al, O, o) { put(o, at::sub(*a, *b, *al)); }
OP(aclnnSubs, T, a, S, b, S, al, O, o) { put(o, at::sub(*a, *b, *al)); }
OP(aclnnInplaceSub, R, a, T, b, S, al) { put(a, at::sub(*a, *b, *al)); }
OP(aclnnInplaceSubs, R, a, S, b, S, al) { put(a, at::sub(*a, *b, *al)); }
OP(aclnnRsub, T, a, T, b, S, al, O, o) { put(o, at::rsub(*a, *b, *al)); }
OP(aclnnRsubs, T, a, S, b, S, al, O, o) { put(o, at::rsub(*a, *b, *al)); }
BINARY_AND_INPLACE(Mul, at::mul(a, b))
WITH_SCALAR_AND_INPLACE(Muls, at::mul(a, b))
BINARY_AND_INPLACE(Div, at::div(a, b))
WITH_SCALAR_AND_INPLACE(Divs, at::div(a, b))
BINARY_AND_INPLACE(FloorDivide, at::floor_divide(a, b))
WITH_SCALAR_AND_INPLACE(FloorDivides, at::floor_divide(a, b))
WITH_SCALAR_AND_INPLACE(PowTensorScalar, at::pow(a, b))
BINARY_AND_INPLACE(PowTensorTensor, at::pow(a, b))
OP(aclnnPowScalarTensor, S, a, T, b, O, o) { put(o, at::pow(*a, *b)); }
WITH_SCALAR_AND_INPLACE(RemainderTensorScalar, at::remainder(a, b))
BINARY_AND_INPLACE(RemainderTensorTensor, at::remainder(a, b))
OP(aclnnRemainderScalarTensor, S, a, T, b, O, o) { put(o, at::remainder(*a, *b)); }
WITH_SCALAR_AND_INPLACE(FmodScalar, at::fmod(a, b))
BINARY_AND_INPLACE(FmodTensor, at::fmod(a, b))
static std::optional<c10::string_view> dmode(int m) {
  if (m == 1) return "trunc";
  if (m == 2) return "floor";
  return std::nullopt;
}
OP(aclnnDivMod, T, a, T, b, int, m, O, o) { put(o, at::div(*a, *b, dmode(m))); }
OP(aclnnDivMods, T, a, S, b, int, m, O, o) { put(o, at::div(*a, *b, dmode(m))); }
OP(aclnnInplaceDivMod, R, a, T, b, int, m) { put(a, at::div(*a, *b, dmode(m))); }
OP(aclnnInplaceDivMods, R, a, S, b, int, m) { put(a, at::div(*a, *b, dmode(m))); }
BINARY(Maximum, at::maximum(a, b))
BINARY(Minimum, at::minimum(a, b))
BINARY(Atan2, at::atan2(a, b))
BINARY_AND_INPLACE(LogicalAnd, at::logical_and(a, b))
BINARY_AND_INPLACE(LogicalOr, at::logical_or(a, b))
BINARY(LogicalXor, at::logical_xor(a, b))
BINARY_AND_INPLACE(BitwiseAndTensor, at::bitwise_and(a, b))
WITH_SCALAR_AND_INPLACE(BitwiseAndScalar, at::bitwise_and(a, b))
BINARY(BitwiseOrTensor, at::bitwise_or(a, b))
WITH_SCALAR(BitwiseOrScalar, at::bitwise_or(a, b))
BINARY_AND_INPLACE(BitwiseXorTensor, at::bitwise_xor(a, b))
WITH_SCALAR_AND_INPLACE(BitwiseXorScalar, at::bitwise_xor(a, b))
BINARY(LeftShift, at::bitwise_left_shift(a, b))
WITH_SCALAR(LeftShifts, at::bitwise_left_shift(a, b))
BINARY(RightShift, at::bitwise_right_shift(a, b))
COMPARE(Eq, eq)
COMPARE(Ne, ne)
COMPARE(Lt, lt)
COMPARE(Le, le)
COMPARE(Gt, gt)
COMPARE(Ge, ge)
WITH_SCALAR(LessScalar, at::lt(a, b))
OP(aclnnEqual, T, a, T, b, O, o) { o->fill_(at::equal(*a, *b)); }
OP(aclnnIsClose, T, a, T, b, double, rt, double, at_, bool, en, O, o) {
  put(o, at::isclose(*a, *b, rt, at_, en));
}
OP(aclnnIsInTensorScalar, T, e, S, t, bool, au, bool, inv, O, o) { put(o, at::isin(*e, *t, au, inv)); }
OP(aclnnIsInScalarTensor, S, e, T, t, bool, au, bool, inv, O, o) { put(o, at::isin(*e, *t, au, inv)); }
OP(aclnnClamp, T, x, S, lo, S, hi, O, o) { put(o, at::clamp(*x, lo.opt(), hi.opt())); }
OP(aclnnClampTensor, T, x, T, lo, T, hi, O, o) { put(o, at::clamp(*x, lo.opt(), hi.opt())); }
OP(aclnnClampMin, T, x, S, lo, O, o) { put(o, at::clamp_min(*x, *lo)); }
OP(aclnnClampMax, T, x, S, hi, O, o) { put(o, at::clamp_max(*x, *hi)); }
OP(aclnnClampMinTensor, T, x, T, lo, O, o) { put(o, at::clamp_min(*x, *lo)); }
OP(aclnnClampMaxTensor, T, x, T, hi, O, o) { put(o, at::clamp_max(*x, *hi)); }
OP(aclnnInplaceClampMax, R, x, S, hi) { put(x, at::clamp_max(*x, *hi)); }
OP(aclnnAddcmul, T, a, T, b, T, c, S, v, O, o) { put(o, at::addcmul(*a, *b, *c, *v)); }
OP(aclnnAddcdiv, T, a, T, b, T, c, S, v, O, o) { put(o, at::addcdiv(*a, *b, *c, *v)); }
OP(aclnnInplaceAddcmul, R, a, T, b, T, c, S, v) { put(a, at::addcmul(*a, *b, *c, *v)); }
OP(aclnnInplaceAddcdiv, R, a, T, b, T, c, S, v) { put(a, at::addcdiv(*a, *b, *c, *v)); }
OP(aclnnLerp, T, a, T, b, T, w, O, o) { put(o, at::lerp(*a, *b, *w)); }
OP(aclnnLerps, T, a, T, b, S, w, O, o) { put(o, at::lerp(*a, *b, *w)); }
OP(aclnnInplaceLerps, R, a, T, b, S, w) { put(a, at::lerp(*a, *b, *w)); }
OP(aclnnSWhere, T, c, T, a, T, b, O, o) { put(o, at::where(c->to(at::kBool), *a, *b)); }
OP(aclnnInplaceMaskedFillScalar, R, x, T, m, S, v) { x->masked_fill_(m->to(at::kBool), *v); }
OP(aclnnInplaceMaskedFillTensor, R, x, T, m, T, v) { x->masked_fill_(m->to(at::kBool), v->reshape({})); }
OP(aclnnInplaceMaskedScatter, R, x, T, m, T, v) { x->masked_scatter_(m->to(at::kBool), *v); }
BINARY(XLogYTensor, at::xlogy(a, b))
BINARY(LogAddExp, at::logaddexp(a, b))
BINARY(LogAddExp2, at::logaddexp2(a, b))
BINARY(Polar, at::polar(a, b))
BINARY(Complex, at::complex(a, b))
BINARY(Prelu, at::_prelu_kernel(a, b.dim() == 1 && a.dim() > 1 ? b.reshape([&] {
         std::vector<int64_t> s(a.dim(), 1);
         s[1] = b.size(0);
         return s;
       }())
                                                               : b))
BINARY(Gcd, at::gcd(a, b))
OP(aclnnXLogYScalarOther, T, a, S, b, O, o) { put(o, at::xlogy(*a, *b)); }
OP(aclnnXLogYScalarSelf, S, a, T, b, O, o) { put(o, at::xlogy(*a, *b)); }
OP(aclnnInplaceLerp, R, a, T, b, T, w) { put(a, at::lerp(*a, *b, *w)); }
OP(aclnnInplaceClampMinTensor, R, x, T, m) { put(x, at::clamp_min(*x, *m)); }
