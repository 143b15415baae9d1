// The library's own entry: what it was built with. Ops live in their families' folders, each of which
// adds a fragment to this namespace.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>

#include "build_info.h"
#include "common/autocast.h"
#include "common/caching_allocator.h"

namespace liteboost {
namespace {

// Read from the file, too. Through a pointer that the compiler does not see through: known, the text is cut into
// the moves that copy it.
const char* volatile build_info_text = LB_BUILD_INFO;

std::string build_info() { return build_info_text; }

// By what the memory of a tensor is freed: tells memory of torch's own from what somebody else has lent to it.
int64_t deleter_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.storage().data_ptr().get_deleter());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY(liteboost, m) {
  // JSON with the keys of _build_info.json; from inside the library, so that a stale file is noticed.
  m.def("_build_info() -> str", &liteboost::build_info);
  m.def("_deleter_of(Tensor tensor) -> int", &liteboost::deleter_of);
  m.def("_autocast_weight(Tensor weight, ScalarType dtype) -> Tensor");
  m.def("_set_caching_allocator(int bytes) -> bool", &liteboost::set_caching_allocator);
  m.def("_caching_allocator_counts() -> int[]", &liteboost::caching_allocator_counts);
  m.def("_caching_allocator_deleter() -> int", &liteboost::caching_allocator_deleter);
  m.def("_kept_zeros(int bytes) -> Tensor[]", &liteboost::kept_zeros);
}

TORCH_LIBRARY_IMPL(liteboost, CPU, m) { m.impl("_autocast_weight", &liteboost::autocast_weight); }

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("_autocast_weight", &liteboost::autocast_weight); }

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("_autocast_weight", [](const at::Tensor& weight, at::ScalarType dtype) { return weight.to(dtype); });
}
