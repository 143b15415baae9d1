#include "rope/rope_checks.h"

namespace liteboost {
namespace {

constexpr const char* kOp = "rope";

void check_key(const at::Tensor& q, const at::Tensor& k, int64_t seq_dim) {
  LB_CHECK_VALUE(k.dim() == 4, kOp, "k must have 4 dimensions like q, got shape ", k.sym_sizes(),
                 "; split its channels into heads as those of q are");
  check_same_dtype(kOp, "k", k, "q", q);
  check_same_device(kOp, "k", k, "q", q);
  LB_CHECK_NO_GRAD(kOp, "k", k);
  for (const int64_t dim : {int64_t{0}, seq_dim, int64_t{3}}) {
    LB_CHECK_VALUE(k.sym_size(dim) == q.sym_size(dim), kOp, "k must match q in all but the heads: q is ",
                   q.sym_sizes(), ", got ", k.sym_sizes(), "; check unsqueeze_dim");
  }
}

void check_table(const char* argument, const at::Tensor& q, const at::Tensor& table, int64_t seq_dim) {
  check_same_dtype(kOp, argument, table, "q", q, /*or_float32=*/true);
  check_same_device(kOp, argument, table, "q", q);
  LB_CHECK_NO_GRAD(kOp, argument, table);
  LB_CHECK_VALUE(table.dim() == 2 || table.dim() == 3, kOp, argument,
                 " must have shape [batch or 1, q_len, rotary_dim] or [q_len, rotary_dim], got ",
                 table.sym_sizes(), "; pass one row a position, without a dimension for the heads");
  const auto batch = table.dim() == 3 ? table.sym_size(0) : c10::SymInt(1);
  LB_CHECK_VALUE((batch == 1 || batch == q.sym_size(0)) && table.sym_size(-2) == q.sym_size(seq_dim), kOp,
                 argument, " must have batch 1 or ", q.sym_size(0), " and q_len = ", q.sym_size(seq_dim),
                 ", got ", table.sym_sizes(), "; pass the rows of the positions of this call");
}

}  // namespace

RopeLayout check_rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                      int64_t unsqueeze_dim, c10::string_view layout, int64_t rotary_dim) {
  LB_CHECK_VALUE(unsqueeze_dim == 1 || unsqueeze_dim == 2, kOp, "unsqueeze_dim must be 1 or 2, got ",
                 unsqueeze_dim, "; pass the dimension of q that counts the heads");
  LB_CHECK_VALUE(q.dim() == 4, kOp, "q must have 4 dimensions, got shape ", q.sym_sizes(),
                 "; split its channels into heads, and add a batch of 1 where there is none");
  check_dtype(kOp, "q", q);
  LB_CHECK_NO_GRAD(kOp, "q", q);
  const int64_t seq_dim = unsqueeze_dim == 1 ? 2 : 1;
  check_key(q, k, seq_dim);
  check_table("cos", q, cos, seq_dim);
  check_table("sin", q, sin, seq_dim);
  check_same_shape(kOp, "sin", sin, "cos", cos);
  check_same_dtype(kOp, "sin", sin, "cos", cos);
  const auto width = cos.sym_size(-1);
  const auto rotated = rotary_dim == 0 ? width : c10::SymInt(rotary_dim);
  LB_CHECK_VALUE(rotary_dim >= 0 && rotated % 2 == 0 && rotated <= q.sym_size(3), kOp,
                 "rotary_dim must be even and at most head_dim = ", q.sym_size(3), ", got ", rotated,
                 "; pass how many channels of each head are rotated");
  LB_CHECK_VALUE(width == rotated || width * 2 == rotated, kOp, "cos must have rotary_dim = ", rotated,
                 " or half as many columns, got ", width, "; rotary_dim tells how many channels are rotated");
  if (layout == "half") return RopeLayout::half;
  if (layout == "interleaved") return RopeLayout::interleaved;
  LB_CHECK_VALUE(layout == "deinterleave", kOp, "layout must be half, interleaved or deinterleave, got '",
                 layout, "'; pass the one whose pairs of channels are the model's");
  return RopeLayout::deinterleave;
}

}  // namespace liteboost
