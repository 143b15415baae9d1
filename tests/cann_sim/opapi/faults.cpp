// SIMCANN_FAIL and SIMCANN_WRONG, and the functions that change them while a program runs.
#include "faults.h"

#include <fnmatch.h>

#include <mutex>
#include <sstream>

#include "operator.h"

namespace sim {
namespace {

struct Fault {
  std::string pattern;  // of names, as a shell has them
  int phase, code;
  int only;  // the call that fails, from 1; 0: every call
  int calls = 0;
};

std::mutex mutex;
std::vector<Fault> faults;
std::vector<std::string> wrong;

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> all;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) {
    if (!part.empty()) all.push_back(part);
  }
  return all;
}

/// "aclnnX:561002", "aclnnX@2:361001" (phase 2), "aclnnX@3:507015" (on the device), "aclnnX:561002:3" (the third call only), comma between several.
void set_faults(const char* text) {
  std::vector<Fault> parsed;
  for (const auto& one : split(text ? text : "", ',')) {
    auto parts = split(one, ':');
    auto at = parts[0].find('@');
    parsed.push_back({parts[0].substr(0, at), at == std::string::npos ? 1 : atoi(parts[0].c_str() + at + 1),
                      parts.size() > 1 ? atoi(parts[1].c_str()) : 561002,
                      parts.size() > 2 ? atoi(parts[2].c_str()) : 0});
  }
  faults = std::move(parsed);
}

void read_environment() {
  static const bool done = [] {
    set_faults(getenv("SIMCANN_FAIL"));
    const char* names = getenv("SIMCANN_WRONG");
    wrong = split(names ? names : "", ',');
    return true;
  }();
  (void)done;
}

}  // namespace

int injected_error(const std::string& name, int phase) {
  std::lock_guard<std::mutex> lock(mutex);
  read_environment();
  for (auto& fault : faults) {
    if (fault.phase != phase || fnmatch(fault.pattern.c_str(), name.c_str(), 0)) continue;
    fault.calls++;
    if (!fault.only || fault.calls == fault.only) return fault.code;
  }
  return 0;
}

bool is_wrong(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  read_environment();
  for (const auto& pattern : wrong) {
    if (!fnmatch(pattern.c_str(), name.c_str(), 0)) return true;
  }
  return false;
}

void make_wrong(const std::vector<Argument>& arguments) {
  for (const auto& argument : arguments) {
    if (std::string(argument.direction) == "in") continue;
    for (auto* tensor : argument.tensors) {
      if (!tensor) continue;
      at::Tensor& t = tensor->i->t;
      if (t.scalar_type() == at::kBool) {
        t.logical_not_();
      } else if (c10::isIntegralType(t.scalar_type(), false)) {
        t.bitwise_xor_(1);
      } else {
        t.copy_(t.to(at::kFloat).mul(1.25).add(0.125));
      }
    }
  }
}

}  // namespace sim

/// Replaces what SIMCANN_FAIL said; an empty text ends it.
SIM_EXPORT void simcann_fail(const char* text) {
  std::lock_guard<std::mutex> lock(sim::mutex);
  sim::read_environment();
  sim::set_faults(text);
}
/// Replaces what SIMCANN_WRONG said.
SIM_EXPORT void simcann_wrong(const char* names) {
  std::lock_guard<std::mutex> lock(sim::mutex);
  sim::read_environment();
  sim::wrong = sim::split(names ? names : "", ',');
}
