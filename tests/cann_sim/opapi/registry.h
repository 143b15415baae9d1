// The operators and limits there are, by name.
#pragma once
#include <string>

#include "arguments.h"

namespace sim {

void register_operator(const char* name, std::string signature, std::string directions);
void register_limits(const char* name, std::string signature, std::string directions, void (*check)());
/// The limits of an operator (cast it to the operator's own type), or null.
void (*limits_of(const std::string& name))();

struct RegisterOperator {
  template <class... A>
  RegisterOperator(const char* name, void (*)(A...)) {
    register_operator(name, signature_of<A...>(), directions_of<A...>());
  }
};
struct RegisterLimits {
  template <class... A>
  RegisterLimits(const char* name, void (*check)(A...)) {
    register_limits(name, signature_of<A...>(), directions_of<A...>(), reinterpret_cast<void (*)()>(check));
  }
};

}  // namespace sim
