// Faults that tests plant: error codes, and operators that compute wrong numbers.
#pragma once
#include "launch.h"

namespace sim {

/// The code that phase 1 or 2 of this operator shall return now, or 0.
int injected_error(const std::string& name, int phase);
/// Whether the operator shall compute wrong numbers.
bool is_wrong(const std::string& name);
/// Changes every output.
void make_wrong(const std::vector<Argument>& arguments);

}  // namespace sim
