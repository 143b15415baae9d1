// The library's own entry: what it was built with. Ops live in their families' folders, each of which
// adds a fragment to this namespace.
#include <torch/library.h>

#include <string>

#include "build_info.h"

namespace liteboost {
namespace {

// An object of its own: it is read from the file, too, where a literal may be cut into the compiler's moves.
[[gnu::used]] const char kBuildInfo[] = LB_BUILD_INFO;

std::string build_info() { return kBuildInfo; }

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY(liteboost, m) {
  // JSON with the keys of _build_info.json; from inside the library, so that a stale file is noticed.
  m.def("_build_info() -> str", &liteboost::build_info);
}
