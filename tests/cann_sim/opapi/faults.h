// Faults that tests plant: error codes, and operators that compute wrong numbers.
#pragma once
#include "launch.h"

namespace sim {

/// Where an operator fails: in a phase, or on the device once it was launched, which loses the device or never ends.
enum Where { kPhaseOne = 1, kPhaseTwo = 2, kOnDevice = 3, kHangs = 4 };
/// The code with which this operator shall fail there now, or 0.
int injected_error(const std::string& name, Where where);
/// Whether the operator shall compute wrong numbers.
bool is_wrong(const std::string& name);
/// Changes every output.
void make_wrong(const std::vector<Argument>& arguments);

}  // namespace sim
