// When the instructions of programs ran, while somebody asks for it (liteboost_adaptor/bench/step_profile.py).
#pragma once

#include "program/program.h"

namespace liteboost::program {

// Whether the runs of this process are noted. Costs a load of memory a run where they are not.
bool is_profiled();

// Runs every instruction, and notes when, and what it reads and writes.
void run_profiled(const Program& program, Slots& slots);

}  // namespace liteboost::program
