// Error codes for functions of one phase, that OP does not define.
#pragma once
#include <functional>

namespace sim {

/// Runs `body`; what it throws becomes the error that phase 1 of an operator would return.
int guarded(const char* name, const std::function<void()>& body);

}  // namespace sim
