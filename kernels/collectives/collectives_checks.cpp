#include "collectives/collectives_checks.h"

namespace liteboost {

void check_all_reduce(const at::Tensor& x) {
  check_dtype("all_reduce", "x", x);
  LB_CHECK_NO_GRAD("all_reduce", "x", x);
}

void check_all_gather(const at::Tensor& x, c10::SymIntArrayRef sizes, int64_t rank, int64_t ranks) {
  constexpr const char* op = "all_gather";
  check_dtype(op, "x", x);
  LB_CHECK_NO_GRAD(op, "x", x);
  LB_CHECK_VALUE(x.dim() >= 1, op, "x must have shape [..., n], got a scalar; add a dimension");
  LB_CHECK_VALUE(!sizes.empty(), op, "sizes must have one entry a rank, got none");
  for (const auto& size : sizes) {
    LB_CHECK_VALUE(size >= 0, op, "sizes must not be negative, got ", sizes);
  }
  if (rank < 0) return;
  LB_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == ranks, op,
                 "sizes must have one entry for each of the ", ranks, " ranks of the group, got ", sizes);
  LB_CHECK_VALUE(x.sym_size(-1) == sizes[rank], op, "x must have ", sizes[rank],
                 " elements in its last dimension, as sizes ", sizes, " says of rank ", rank, ", got ",
                 x.sym_sizes());
}

}  // namespace liteboost
