#include "common/isa.h"

#include <ATen/Version.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <string>
#include <vector>

#include "common/checks.h"

namespace liteboost {
namespace {

// Those compiled.
#define LB_ISA_NAME(isa, ...) #isa,
#define LB_ISA_VALUE(isa, ...) Isa::isa,
constexpr const char* kNames[] = {LB_EACH_ISA(LB_ISA_NAME)};
constexpr Isa kIsas[] = {LB_EACH_ISA(LB_ISA_VALUE)};
#undef LB_ISA_NAME
#undef LB_ISA_VALUE

#ifdef LB_X86_ISAS
// Torch's own limit and the CPU's features, read once. Torch has no level for BF16 or AMX, so its "AVX512"
// admits them, too.
Isa supported_isa() {
  const std::string torch_limit = at::get_cpu_capability();
  const Isa detected = detect_isa();
  if (torch_limit == "AVX512") return detected;
  return std::min(torch_limit == "AVX2" ? Isa::avx2 : Isa::baseline, detected);
}
#else
// Torch's levels are of SVE, which none of ours are: "DEFAULT" is what it says of most Arm CPUs, whatever they have.
Isa supported_isa() { return detect_isa(); }
#endif

// How many of those compiled may run here: none where they were compiled for another CPU alone.
size_t count_allowed() {
  static const size_t count =
      std::upper_bound(std::begin(kIsas), std::end(kIsas), supported_isa()) - std::begin(kIsas);
  return count;
}

std::atomic<Isa>& state() {
  static std::atomic<Isa> isa{[] {
    TORCH_CHECK(count_allowed() > 0, "liteboost: the kernels were compiled for ", kNames[0],
                ", which this CPU, or ATEN_CPU_CAPABILITY if it is set, does not allow");
    return kIsas[count_allowed() - 1];
  }()};
  return isa;
}

std::vector<std::string> isas() { return {kNames, kNames + count_allowed()}; }

std::string isa() { return kNames[std::find(std::begin(kIsas), std::end(kIsas), current_isa()) - kIsas]; }

void limit_isa(c10::string_view name) {
  const auto allowed = isas();
  if (name.empty() && !allowed.empty()) {
    state().store(kIsas[allowed.size() - 1], std::memory_order_relaxed);
    return;
  }
  for (size_t i = 0; i < allowed.size(); ++i) {
    if (name == c10::string_view(allowed[i])) {
      state().store(kIsas[i], std::memory_order_relaxed);
      return;
    }
  }
  std::string list;
  for (const auto& entry : allowed) list += (list.empty() ? "" : ", ") + entry;
  LB_CHECK_VALUE(false, "_limit_isa", "name must be one of ", list, " (or '' for no limit), got '", name,
                 "'; this CPU, and ATEN_CPU_CAPABILITY if it is set, allow no other that is compiled");
}

}  // namespace

Isa current_isa() { return state().load(std::memory_order_relaxed); }

}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_isa() -> str", &liteboost::isa);
  m.def("_isas() -> str[]", &liteboost::isas);
  m.def("_limit_isa(str name) -> ()", &liteboost::limit_isa);
}
