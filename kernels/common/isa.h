// Which instruction set runs: one table of function pointers a family and instruction set, chosen at
// run time. Included by objects of every instruction set: declarations and macros only.
//
// A family declares its table type in X.h and, with LB_DECLARE_KERNELS, one table an instruction set;
// X_cpu_isa.cpp defines it in namespace liteboost::LB_ISA; X_cpu.cpp calls LB_KERNELS(name).rows(...).
#pragma once

#include <stdint.h>

namespace liteboost {

// In rising order; a limit admits everything up to itself.
enum class Isa : int32_t { baseline, avx2, avx512, avx512_bf16 };

// The instruction set in use: the least of the user's limit, torch's own limit
// (at::get_cpu_capability(), which honours ATEN_CPU_CAPABILITY) and what this CPU has.
Isa current_isa();

// What this CPU and operating system can run, by CPUID. In cpu_features.cpp.
Isa detect_isa();

}  // namespace liteboost

#ifdef LB_X86_ISAS
#define LB_DECLARE_KERNELS(Table, name) \
  namespace baseline {                  \
  extern const Table name;              \
  }                                     \
  namespace avx2 {                      \
  extern const Table name;              \
  }                                     \
  namespace avx512 {                    \
  extern const Table name;              \
  }                                     \
  namespace avx512_bf16 {               \
  extern const Table name;              \
  }
#define LB_KERNELS(name)                                                                           \
  (*(::liteboost::current_isa() == ::liteboost::Isa::avx512_bf16 ? &::liteboost::avx512_bf16::name \
     : ::liteboost::current_isa() == ::liteboost::Isa::avx512    ? &::liteboost::avx512::name      \
     : ::liteboost::current_isa() == ::liteboost::Isa::avx2      ? &::liteboost::avx2::name        \
                                                                 : &::liteboost::baseline::name))
#else
#define LB_DECLARE_KERNELS(Table, name) \
  namespace baseline {                  \
  extern const Table name;              \
  }
#define LB_KERNELS(name) (::liteboost::baseline::name)
#endif
