// Convolution, pooling, padding and resizing.
#include "common.h"

using namespace sim;

OP(aclnnConvolution, T, x, T, w, T, b, IA, st, IA, pad, IA, dil, bool, tr, IA, op, int64_t, g, O, o, int8_t,
   c) {
  put(o, at::convolution(*x, *w, b.opt(), *st, *pad, *dil, tr, *op, g));
}
OP(aclnnUpsampleNearest2d, T, x, IA, s, O, o) { put(o, at::upsample_nearest2d(*x, *s)); }
OP(aclnnUpsampleNearest1d, T, x, IA, s, O, o) { put(o, at::upsample_nearest1d(*x, *s)); }
OP(aclnnUpsampleBilinear2d, T, x, IA, s, bool, ac, double, sh, double, sw, O, o) {
  put(o, at::upsample_bilinear2d(*x, *s, ac));
}
OP(aclnnIm2col, T, x, IA, k, IA, d, IA, p, IA, s, O, o) { put(o, at::im2col(*x, *k, *d, *p, *s)); }
OP(aclnnReflectionPad1d, T, x, IA, p, O, o) { put(o, at::reflection_pad1d(*x, *p)); }
OP(aclnnReflectionPad2d, T, x, IA, p, O, o) { put(o, at::reflection_pad2d(*x, *p)); }
OP(aclnnReplicationPad1d, T, x, IA, p, O, o) { put(o, at::replication_pad1d(*x, *p)); }
OP(aclnnReplicationPad2d, T, x, IA, p, O, o) { put(o, at::replication_pad2d(*x, *p)); }
OP(aclnnAvgPool2d, T, x, IA, k, IA, s, IA, p, bool, c, bool, inc, int64_t, d, int8_t, m, O, o) {
  put(o, at::avg_pool2d(*x, *k, *s, *p, c, inc, d ? std::optional<int64_t>(d) : std::nullopt));
}
OP(aclnnAdaptiveAvgPool2d, T, x, IA, s, O, o) { put(o, at::_adaptive_avg_pool2d(*x, *s)); }
