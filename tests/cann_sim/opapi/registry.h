// The operators and limits there are, by name.
#pragma once
#include <string>
#include <vector>

#include "arguments.h"

namespace sim {

/// `declaration` is the text between the parentheses of OP.
void register_operator(const char* name, std::string signature, std::string directions,
                       const char* declaration);
void register_limits(const char* name, std::string signature, std::string directions, void (*check)());
/// The names that OP gives the arguments.
std::vector<std::string> argument_names(const std::string& name);
/// The limits of an operator (cast it to the operator's own type), or null.
void (*limits_of(const std::string& name))();

struct RegisterOperator {
  template <class... A>
  RegisterOperator(const char* name, void (*)(A...), const char* declaration) {
    register_operator(name, signature_of<A...>(), directions_of<A...>(), declaration);
  }
};
struct RegisterLimits {
  template <class... A>
  RegisterLimits(const char* name, void (*check)(A...)) {
    register_limits(name, signature_of<A...>(), directions_of<A...>(), reinterpret_cast<void (*)()>(check));
  }
};

}  // namespace sim
