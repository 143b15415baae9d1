// An object of its own, without instruction-set flags and without link-time optimisation: it decides
// what may run, so it must itself run on every CPU.
#include "common/isa.h"

#ifdef LB_X86_ISAS
#include <cpuid.h>
#endif

namespace liteboost {

#ifdef LB_X86_ISAS
namespace {

bool bit(unsigned value, int index) { return (value >> index) & 1u; }

// The registers that the operating system saves: without them a context switch would corrupt data.
unsigned saved_state() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace

Isa detect_isa() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return Isa::baseline;
  const bool fma = bit(ecx, 12), osxsave = bit(ecx, 27), avx = bit(ecx, 28), f16c = bit(ecx, 29);
  if (!(fma && osxsave && avx && f16c)) return Isa::baseline;
  const unsigned saved = saved_state();
  if ((saved & 0x6u) != 0x6u) return Isa::baseline;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !bit(ebx, 5)) return Isa::baseline;
  const bool avx512 = bit(ebx, 16) && bit(ebx, 17) && bit(ebx, 28) && bit(ebx, 30) && bit(ebx, 31);
  if (!avx512 || (saved & 0xe6u) != 0xe6u) return Isa::avx2;
  const bool vnni = bit(ecx, 11);
  unsigned sub_eax = 0;
  // Sub-leaf 1 exists only where sub-leaf 0 says so in eax.
  if (eax < 1 || !__get_cpuid_count(7, 1, &sub_eax, &ebx, &ecx, &edx)) return Isa::avx512;
  return vnni && bit(sub_eax, 5) ? Isa::avx512_bf16 : Isa::avx512;
}
#else
Isa detect_isa() { return Isa::baseline; }
#endif

}  // namespace liteboost
