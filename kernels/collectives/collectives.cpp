#include "collectives/collectives.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "collectives/collectives_checks.h"

namespace liteboost {
namespace {

at::Tensor all_reduce_meta(const at::Tensor& x, const std::string&) {
  check_all_reduce(x);
  return at::empty_symint(x.sym_sizes(), x.options());
}

at::Tensor all_reduce_of_meta(const at::Tensor& x, const at::Tensor&, const std::string& group) {
  return all_reduce_meta(x, group);
}

at::Tensor& all_reduce_in_place_meta(at::Tensor& x, const std::string&) {
  check_all_reduce(x);
  return x;
}

at::Tensor all_gather_meta(const at::Tensor& x, c10::SymIntArrayRef sizes, const std::string&) {
  check_all_gather(x, sizes, -1, -1);
  c10::SymInt total = 0;
  for (const auto& size : sizes) total += size;
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  shape.back() = total;
  return at::empty_symint(shape, x.options());
}

}  // namespace
}  // namespace liteboost

// A namespace of their own: what several processes compute together has no reference that one could call alone.
TORCH_LIBRARY(liteboost_parallel, m) {
  m.def("all_reduce(Tensor x, str group) -> Tensor");
  m.def("all_reduce_of(Tensor x, Tensor same, str group) -> Tensor");
  m.def("all_reduce_(Tensor(a!) x, str group) -> Tensor(a!)");
  m.def("all_gather(Tensor x, SymInt[] sizes, str group) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost_parallel, Meta, m) {
  m.impl("all_reduce", &liteboost::all_reduce_meta);
  m.impl("all_reduce_of", &liteboost::all_reduce_of_meta);
  m.impl("all_reduce_", &liteboost::all_reduce_in_place_meta);
  m.impl("all_gather", &liteboost::all_gather_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost_parallel, Autograd, m) {
  m.impl("all_reduce", torch::CppFunction::makeFallthrough());
  m.impl("all_reduce_of", torch::CppFunction::makeFallthrough());
  m.impl("all_reduce_", torch::CppFunction::makeFallthrough());
  m.impl("all_gather", torch::CppFunction::makeFallthrough());
}
