// Rotation as an aclnn operator, one launch for each of q and k.
//
// RotaryPositionEmbedding computes in fp32 and rounds once, and wants tables of the dtype of what it turns: where
// they are fp32 and q is not, q is widened, so that the tables are not rounded. It is given [B, S, H, D], in any
// strides; heads before positions (BNSD) it refuses where there are few positions, as in decode.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "npu/aclnn.h"
#include "npu/serve.h"
#include "rope/rope_checks.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;

constexpr const char* kOp = "rope";

// x, cos, sin, mode, out
const npu::Operator<Tensor, Tensor, Tensor, int64_t, Tensor> kRotate{"aclnnRotaryPositionEmbedding"};

enum Mode : int64_t { kHalves = 0, kPairs = 1 };

constexpr int64_t kMost = 1000;  // heads and sequences the operator takes are fewer
constexpr int64_t kMostChannels = 896;

// The tables as [B or 1, S, 1, rotary_dim], contiguous.
struct Tables {
  at::Tensor cos, sin;
  RopeLayout layout;
  int64_t rotary_dim;
};

Refusal refusal_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, int64_t heads_dim,
                   RopeLayout layout, int64_t rotary_dim) {
  if (q.numel() == 0 || rotary_dim == 0) return "no elements";
  const int64_t heads = std::max(q.size(heads_dim), k.size(heads_dim)), batch = q.size(0);
  if (heads >= kMost || batch >= kMost) return "a thousand heads or sequences";
  const bool is_shared = cos.dim() == 2 || cos.size(0) == 1;
  if (layout == RopeLayout::interleaved && is_shared && batch * heads >= kMost) {
    return "a thousand heads of all sequences";
  }
  if (rotary_dim >= kMostChannels) return "a head beyond the operator's";
  if (npu::soc() == npu::Soc::a310p) {
    if (q.scalar_type() == at::kBFloat16) return "bf16 on a 310P";
    if (layout == RopeLayout::interleaved) return "interleaved on a 310P";
    if (rotary_dim > 128 || rotary_dim % 32 != 0) return "this head size on a 310P";
  }
  return kRotate.available() ? kServed : "not in this CANN";
}

std::string kind(const at::Tensor& q, const Tables& tables) {
  std::string text = npu::dtype_name(q.scalar_type());
  text += tables.layout == RopeLayout::half          ? " half"
          : tables.layout == RopeLayout::interleaved ? " interleaved"
                                                     : " deinterleave";
  if (tables.cos.scalar_type() != q.scalar_type()) text += " widened";
  return text;
}

at::Tensor table_of(const at::Tensor& given, RopeLayout layout, int64_t rotary_dim) {
  at::Tensor table = given.dim() == 2 ? given.unsqueeze(0) : given;
  if (table.size(-1) != rotary_dim) {
    table = layout == RopeLayout::interleaved
                ? table.unsqueeze(-1).expand({-1, -1, -1, 2}).reshape({table.size(0), table.size(1), -1})
                : at::cat({table, table}, -1);
  }
  return table.contiguous().unsqueeze(2);
}

// Batch and positions as one dimension, with tables for each: pairs are turned with tables shared by all sequences only.
at::Tensor launch(const at::Tensor& x, const Tables& tables) {
  const bool is_pairs = tables.layout == RopeLayout::interleaved;
  const auto as_one = [&](const at::Tensor& each) {
    const bool must = is_pairs && tables.cos.size(0) > 1;
    return must ? each.reshape({1, -1, each.size(2), each.size(3)}) : each;
  };
  const at::Tensor in = as_one(x), out = at::empty(in.sizes(), in.options());
  kRotate(in, as_one(tables.cos), as_one(tables.sin), is_pairs ? kPairs : kHalves, out);
  return out.view(x.sizes());
}

// x [B, S, H, D] turned, contiguous.
at::Tensor rotate(const at::Tensor& x, const Tables& tables) {
  const int64_t width = tables.rotary_dim, rest = x.size(3) - width;
  at::Tensor part = rest > 0 ? x.narrow(3, 0, width) : x;
  if (tables.layout == RopeLayout::deinterleave) {
    const auto sizes = part.sizes();
    part = part.reshape({sizes[0], sizes[1], sizes[2], width / 2, 2}).transpose(3, 4).reshape(sizes);
  }
  const at::Tensor turned = launch(part.to(tables.cos.scalar_type()), tables).to(x.scalar_type());
  return rest > 0 ? at::cat({turned, x.narrow(3, width, rest)}, 3) : turned;
}

// The same for x with its heads in dimension 1 or 2, in whose order the result is contiguous.
at::Tensor rotate_in_order(const at::Tensor& x, const Tables& tables, int64_t heads_dim) {
  if (x.numel() == 0) return at::empty(x.sizes(), x.options());
  if (heads_dim == 2) return rotate(x, tables);
  const at::Tensor turned = rotate(x.transpose(1, 2), tables);
  // One position or one head: the two orders are the same memory.
  if (x.size(1) == 1 || x.size(2) == 1) return turned.view(x.sizes());
  return turned.transpose(1, 2).contiguous();
}

std::tuple<at::Tensor, at::Tensor> rope_npu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                            const at::Tensor& sin, int64_t unsqueeze_dim,
                                            c10::string_view layout, int64_t rotary_dim) {
  Tables tables;
  tables.layout = check_rope(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  tables.rotary_dim = rotary_dim == 0 ? cos.size(-1) : rotary_dim;
  const c10::DeviceGuard guard(q.device());
  tables.cos = cos;
  Refusal refusal = refusal_of(q, k, cos, unsqueeze_dim, tables.layout, tables.rotary_dim);
  if (refusal == kServed) refusal = npu::unverified(kOp, kind(q, tables));
  if (refusal != kServed) {
    return fall_back<decltype(rope_npu)>(kOp, refusal)
        .call(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  }
  npu::count_served(kOp);
  tables.cos = table_of(cos, tables.layout, tables.rotary_dim);
  tables.sin = table_of(sin, tables.layout, tables.rotary_dim);
  return {rotate_in_order(q, tables, unsqueeze_dim), rotate_in_order(k, tables, unsqueeze_dim)};
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("rope", &liteboost::rope_npu); }
