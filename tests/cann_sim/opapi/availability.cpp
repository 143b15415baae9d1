// Which SoC is simulated, and whether it runs an operator.
#include <cstdlib>
#include <map>
#include <sstream>
#include <vector>

#include "operator.h"

namespace sim {
namespace {

const char* soc_name() {
  const char* name = getenv("SIMCANN_SOC");
  return name && *name ? name : "Ascend910B2";
}

// "8.1.RC1" -> {8, 1, -999}: a release candidate comes before the release.
std::vector<int> numbers_of(const char* release) {
  std::vector<int> all;
  std::stringstream parts(release);
  for (std::string part; std::getline(parts, part, '.');) {
    all.push_back(part.rfind("RC", 0) == 0 ? atoi(part.c_str() + 2) - 1000 : atoi(part.c_str()));
  }
  all.resize(3);
  return all;
}

#define AVAILABLE(name, release, socs) {#name, socs},
const std::map<std::string, std::string> socs_of = {
#include "availability.inc"
};
#undef AVAILABLE

}  // namespace

Soc soc() {
  static const Soc value = [] {
    std::string name = soc_name();
    if (name.rfind("Ascend910_93", 0) == 0) return Soc::ascend910c;
    if (name.rfind("Ascend310P", 0) == 0) return Soc::ascend310p;
    if (name.rfind("Ascend950", 0) == 0) return Soc::ascend950;
    return Soc::ascend910b;
  }();
  return value;
}

bool release_is(const char* at_least) {
  const char* name = getenv("SIMCANN_VERSION");
  static const std::vector<int> simulated = numbers_of(name && *name ? name : "9.1.0");
  return simulated >= numbers_of(at_least);
}

void require_soc(const char* name) {
  static const char* names[] = {"910B", "910C", "310P", "950"};
  auto found = socs_of.find(name);
  if (found == socs_of.end()) return;
  require(found->second.find(names[static_cast<int>(soc())]) != std::string::npos, "not supported on ",
          soc_name(), ", only on ", found->second);
}

}  // namespace sim
