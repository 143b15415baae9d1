// The executor cache that torch_npu uses when the library has its functions.
#pragma once
#include "launch.h"

namespace sim {

/// After phase 1: keeps a copy of the executor under the key that the thread has set, if it has set one.
void remember_executor(Prepared& prepared);

}  // namespace sim
