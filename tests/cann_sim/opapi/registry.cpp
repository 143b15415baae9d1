// The operators and limits there are, and the functions by which tests read them.
#include "registry.h"

#include <map>
#include <stdexcept>

#include "operator.h"

namespace sim {
namespace {

struct Operator {
  std::string signature, directions, declaration;
};
struct Limits {
  std::string signature, directions;
  void (*check)();
};
// Function statics: registrations run before main, in no order.
std::map<std::string, Operator>& operators() {
  static std::map<std::string, Operator> all;
  return all;
}
std::map<std::string, Limits>& limits() {
  static std::map<std::string, Limits> all;
  return all;
}

}  // namespace

void register_operator(const char* name, std::string signature, std::string directions,
                       const char* declaration) {
  operators()[name] = {std::move(signature), std::move(directions), declaration};
}

std::vector<std::string> argument_names(const std::string& name) {
  std::vector<std::string> names;
  auto found = operators().find(name);
  if (found == operators().end()) return names;
  std::stringstream parts(found->second.declaration);
  int k = 0;
  for (std::string part; std::getline(parts, part, ',');) {
    if (k++ % 2) names.push_back(part.substr(part.find_first_not_of(' ')));
  }
  return names;
}

void register_limits(const char* name, std::string signature, std::string directions, void (*check)()) {
  limits()[name] = {std::move(signature), std::move(directions), check};
}

void (*limits_of(const std::string& name))() {
  auto found = limits().find(name);
  if (found == limits().end()) return nullptr;
  const Operator& op = operators().at(name);
  if (found->second.signature != op.signature || found->second.directions != op.directions) {
    throw std::logic_error("LIMITS has (" + found->second.signature + "), OP has (" + op.signature +
                           "), or the directions differ");
  }
  return found->second.check;
}

}  // namespace sim

/// The kinds of the arguments in order, "tensor,tensor,double,tensor,tensor"; null for an unknown operator.
SIM_EXPORT const char* simcann_signature(const char* op) {
  auto found = sim::operators().find(op);
  return found == sim::operators().end() ? nullptr : found->second.signature.c_str();
}
/// The name of operator `k`, in the order of names; null past the end.
SIM_EXPORT const char* simcann_operator(size_t k) {
  auto& all = sim::operators();
  if (k >= all.size()) return nullptr;
  return std::next(all.begin(), static_cast<std::ptrdiff_t>(k))->first.c_str();
}
