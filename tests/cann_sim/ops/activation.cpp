// Gated activations: float32 inside, rounded once to the output dtype (swi_glu and ge_glu_v2 kernels of ops-nn).
#include "fused.h"

using namespace sim;

using at::Tensor;

OP(aclnnSwiGlu, T, x, int64_t, dim, O, out) {
  auto halves = fp32(*x).chunk(2, dim);
  put(out, at::silu(halves[0]) * halves[1]);
}

OP(aclnnGlu, T, x, int64_t, dim, O, out) { put(out, at::glu(*x, dim)); }

/// `gelu` keeps the activated half, which a backward pass needs.
OP(aclnnGeGluV3, T, x, int64_t, dim, int64_t, approximate, bool, left, O, out, O, gelu) {
  auto halves = fp32(*x).chunk(2, dim);
  auto activated = at::gelu(halves[left ? 0 : 1], approximate == 1 ? "tanh" : "none");
  put(out, activated * halves[left ? 1 : 0]);
  put(gelu, activated);
}

/// The variant of gpt-oss: A = min(A, limit), B = clamp(B, -limit, limit), A * sigmoid(alpha * A) * (B + bias). With
/// `groups`, only the first sum(groups) rows (of all axes before `dim` as one) are computed; the others keep what they
/// held.
OP(aclnnClippedSwiglu, T, x, T, groups, int64_t, dim, double, alpha, double, limit, double, bias, bool,
   interleaved, O, out) {
  auto axis = dim < 0 ? dim + x->dim() : dim;
  auto x32 = fp32(*x);
  Tensor a, b;
  if (interleaved) {
    // Every second element of [cut axis and all axes after it], as documented.
    auto flat = x32.flatten(axis);
    auto shape = out->sizes();
    a = flat.slice(-1, 0, std::nullopt, 2).reshape(shape);
    b = flat.slice(-1, 1, std::nullopt, 2).reshape(shape);
  } else {
    auto halves = x32.chunk(2, axis);
    a = halves[0];
    b = halves[1];
  }
  a = at::clamp_max(a, limit);
  b = at::clamp(b, -limit, limit);
  auto y = (a * at::sigmoid(a * alpha) * (b + bias)).to(out->scalar_type());
  if (!groups) return put(out, y);
  auto rows = groups->sum().item<int64_t>();
  auto leading = at::IntArrayRef(y.sizes()).slice(0, static_cast<size_t>(axis));
  int64_t all = 1;
  for (auto n : leading) all *= n;
  TORCH_CHECK(rows <= all, "groupIndex sums to ", rows, " of ", all, " rows");
  auto kept = out->contiguous().view({all, -1});
  kept.slice(0, 0, rows).copy_(y.reshape({all, -1}).slice(0, 0, rows));
  put(out, kept.view(out->sizes()));
}
