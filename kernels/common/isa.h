// Which instruction set runs: one table of function pointers a family and instruction set, chosen at
// run time. Included by objects of every instruction set: declarations and macros only.
//
// A family declares its table type in X.h and, with LB_DECLARE_KERNELS, one table an instruction set;
// X_cpu_isa.cpp defines it in namespace liteboost::LB_ISA; X_cpu.cpp calls LB_KERNELS(name).rows(...).
#pragma once

#include <stdint.h>

// LB_EACH_ISA(X, ...): X(isa, ...) for each instruction set that is compiled, in rising order; LB_LEAST_ISA is the first
// of them. CMake writes both.
#include "isas.h"

namespace liteboost {

// All of this architecture, in rising order: a limit admits everything up to itself. Also listed, with their compiler
// flags, in kernels/CMakeLists.txt and, all together, in liteboost_adaptor/config.py.
#if defined(LB_X86_ISAS)
enum class Isa : int32_t { baseline, avx2, avx512, avx512_bf16, amx_bf16 };
#elif defined(LB_ARM_ISAS)
enum class Isa : int32_t { baseline, dotprod, i8mm_bf16 };
#else
enum class Isa : int32_t { baseline };
#endif

// The instruction set in use: the best compiled that is within the user's limit, torch's own limit on x86-64
// (at::get_cpu_capability(), which honours ATEN_CPU_CAPABILITY) and what this CPU has. Throws where none is.
Isa current_isa();

// What this CPU and operating system can run: by CPUID, or by what the operating system says of an Arm CPU. In
// cpu_features.cpp.
Isa detect_isa();

}  // namespace liteboost

#define LB_DECLARE_TABLE(isa, Table, name) \
  namespace isa {                          \
  extern const Table name;                 \
  }
#define LB_DECLARE_KERNELS(Table, name) LB_EACH_ISA(LB_DECLARE_TABLE, Table, name)

#define LB_TABLE_IF_CURRENT(isa, name) \
  ::liteboost::current_isa() == ::liteboost::Isa::isa ? &::liteboost::isa::name:
#define LB_KERNELS(name) (*(LB_EACH_ISA(LB_TABLE_IF_CURRENT, name) & ::liteboost::LB_LEAST_ISA::name))
