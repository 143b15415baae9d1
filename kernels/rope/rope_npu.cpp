// Rotation as an aclnn operator, one launch for each of q and k.
//
// RotaryPositionEmbedding computes in fp32 and rounds once, and wants tables of the dtype of what it turns: where
// they are fp32 and q is not, q is widened, so that the tables are not rounded. It is given [B, S, H, D], in any
// strides; heads before positions (BNSD) it refuses where there are few positions, as in decode.
//
// rope_: ApplyRotaryPosEmb, one launch for both, in place. It takes heads of 64 or 128, contiguous as [B, S, H, D],
// and as many of them as fit into a vector core. In fp16 it computes in fp16, so that has two launches and copies.
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

// queryRef, keyRef, cos, sin, layout
const npu::Operator<Tensor, Tensor, Tensor, Tensor, int64_t> kTurn{"aclnnApplyRotaryPosEmb"};

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
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(rope_npu)>(kOp, why).call(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      kOp,
      [&]() -> std::tuple<at::Tensor, at::Tensor> {
        tables.cos = table_of(cos, tables.layout, tables.rotary_dim);
        tables.sin = table_of(sin, tables.layout, tables.rotary_dim);
        return {rotate_in_order(q, tables, unsqueeze_dim), rotate_in_order(k, tables, unsqueeze_dim)};
      },
      reference);
}

at::Tensor positions_first(const at::Tensor& x, int64_t heads_dim) {
  return heads_dim == 1 ? x.transpose(1, 2) : x;
}

// Whether the angles of one row serve all, and the rows can be taken for heads.
bool is_one_row(const at::Tensor& q, const at::Tensor& cos, int64_t heads_dim) {
  return q.size(3 - heads_dim) == 1 && cos.numel() == cos.size(-1);
}

// Source: the memory that aclnnApplyRotaryPosEmb documents.
bool fits_vector_core(int64_t heads, int64_t head_dim, at::ScalarType dtype) {
  constexpr int64_t kBytes = 192 * 1024;
  const int64_t size = static_cast<int64_t>(c10::elementSize(dtype)), wide = 4;
  const int64_t cast = dtype == at::kBFloat16 ? head_dim * 8 : 0;
  return heads * head_dim * wide * 5 + head_dim * size * 4 + cast <= kBytes;
}

Refusal refusal_of_turn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, int64_t heads_dim,
                        RopeLayout layout, int64_t rotary_dim) {
  if (q.numel() == 0 || k.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "in place on a 310P";
  if (layout != RopeLayout::half) return "pairs in place";
  if (q.scalar_type() == at::kHalf) return "fp16 in place";
  if (cos.scalar_type() != q.scalar_type()) return "tables of another dtype in place";
  const int64_t head_dim = q.size(3);
  if (head_dim != 64 && head_dim != 128) return "a head that is neither 64 nor 128, in place";
  if (rotary_dim != head_dim || cos.size(-1) != head_dim) return "a part of a head in place";
  if (!positions_first(q, heads_dim).is_contiguous() || !positions_first(k, heads_dim).is_contiguous()) {
    return "heads that are not side by side, in place";
  }
  const bool one_row = is_one_row(q, cos, heads_dim);
  const int64_t batch = q.size(0);
  if (!one_row && (cos.dim() == 2 ? 1 : cos.size(0)) != batch) return "one table for all rows, in place";
  const int64_t heads = (q.size(heads_dim) + k.size(heads_dim)) * (one_row ? batch : 1);
  if (!fits_vector_core(heads, head_dim, q.scalar_type())) return "too many heads in place";
  return kTurn.available() ? kServed : "not in this CANN";
}

Refusal refusal_of_turn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                        int64_t unsqueeze_dim, RopeLayout layout, int64_t rotary_dim, const char* op) {
  const int64_t width = rotary_dim == 0 ? cos.size(-1) : rotary_dim;
  const Refusal refusal = refusal_of_turn(q, k, cos, unsqueeze_dim, layout, width);
  return refusal == kServed ? npu::unverified(op, std::string(npu::dtype_name(q.scalar_type())) + " half")
                            : refusal;
}

void turn_npu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
              int64_t unsqueeze_dim, c10::string_view layout, int64_t rotary_dim) {
  constexpr const char* op = "rope_";
  constexpr int64_t kBsnd = 1;
  const RopeLayout which = check_rope(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  const c10::DeviceGuard guard(q.device());
  const Refusal refusal = refusal_of_turn(q, k, cos, unsqueeze_dim, which, rotary_dim, op);
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(turn_npu)>(op, why).call(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> void {
        const bool one_row = is_one_row(q, cos, unsqueeze_dim);
        const auto heads = [&](const at::Tensor& x) {
          const at::Tensor ordered = positions_first(x, unsqueeze_dim);
          return one_row ? ordered.view({1, 1, -1, x.size(3)}) : ordered;
        };
        const auto table = [&](const at::Tensor& x) {
          const at::Tensor rows = one_row ? x.reshape({1, 1, x.size(-1)}) : x.dim() == 2 ? x.unsqueeze(0) : x;
          return rows.contiguous().unsqueeze(2);
        };
        kTurn(heads(q), heads(k), table(cos), table(sin), kBsnd);
      },
      reference);
}

// Why rope_ would not be one launch; empty where it would.
std::string npu_rope_refusal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                             const at::Tensor& sin, int64_t unsqueeze_dim, c10::string_view layout,
                             int64_t rotary_dim) {
  const RopeLayout which = check_rope(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  TORCH_CHECK(q.device().is_privateuseone(),
              "liteboost: _npu_rope_refusal takes tensors on an NPU; pass the arguments of rope_");
  const c10::DeviceGuard guard(q.device());
  const Refusal refusal = refusal_of_turn(q, k, cos, unsqueeze_dim, which, rotary_dim, "rope_");
  return refusal == kServed ? "" : refusal;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "_npu_rope_refusal(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim=1, str "
      "layout=\"half\", "
      "int rotary_dim=0) -> str",
      &liteboost::npu_rope_refusal);
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("rope", &liteboost::rope_npu);
  m.impl("rope_", &liteboost::turn_npu);
}
