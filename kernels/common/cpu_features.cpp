// An object of its own, without instruction-set flags and without link-time optimisation: it decides
// what may run, so it must itself run on every CPU.
#include "common/isa.h"

#if defined(LB_X86_ISAS)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(LB_ARM_ISAS) && defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>
#elif defined(LB_ARM_ISAS)
#include <sys/auxv.h>
#endif

namespace liteboost {

#if defined(LB_X86_ISAS)
namespace {

bool bit(unsigned value, int index) { return (value >> index) & 1u; }

// The registers that the operating system saves: without them a context switch would corrupt data.
unsigned saved_state() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Whether the operating system lets this process use tiles (Linux, Documentation/arch/x86/xstate.rst): of their 8 KB a
// thread it saves only what was asked for. It refuses where a thread's stack for signals has no room for them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
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
  const bool tiles = bit(edx, 22) && bit(edx, 24) && (saved & 0x60000u) == 0x60000u;
  unsigned sub_eax = 0;
  // Sub-leaf 1 exists only where sub-leaf 0 says so in eax.
  if (eax < 1 || !__get_cpuid_count(7, 1, &sub_eax, &ebx, &ecx, &edx)) return Isa::avx512;
  if (!vnni || !bit(sub_eax, 5)) return Isa::avx512;
  return tiles && may_use_tiles() ? Isa::amx_bf16 : Isa::avx512_bf16;
}
#elif defined(LB_ARM_ISAS)
namespace {

// Beside the instructions that the loops ask for by name, -march=armv8.2-a lets a compiler use atomics of Armv8.1 (LSE) and
// its rounding multiplications (RDM), so these are asked for, too.
#if defined(__APPLE__)
// Written after Apple's documentation of these names; no Mac has run it.
bool has(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

bool has_dot_products() {
  return has("hw.optional.arm.FEAT_DotProd") && has("hw.optional.arm.FEAT_LSE") &&
         has("hw.optional.arm.FEAT_RDM");
}
bool has_matrices() { return has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16"); }
#else
// Bits of AT_HWCAP and AT_HWCAP2 (Linux, Documentation/arch/arm64/elf_hwcaps.rst), of which headers of older systems lack
// some.
constexpr unsigned long kAtomics = 1ul << 8, kAsimdRdm = 1ul << 12, kAsimdDp = 1ul << 20;
constexpr unsigned long kI8mm = 1ul << 13, kBf16 = 1ul << 14;

bool has_all(unsigned long type, unsigned long bits) { return (getauxval(type) & bits) == bits; }

bool has_dot_products() { return has_all(AT_HWCAP, kAtomics | kAsimdRdm | kAsimdDp); }
bool has_matrices() { return has_all(AT_HWCAP2, kI8mm | kBf16); }
#endif

}  // namespace

Isa detect_isa() {
  if (!has_dot_products()) return Isa::baseline;
  return has_matrices() ? Isa::i8mm_bf16 : Isa::dotprod;
}
#else
Isa detect_isa() { return Isa::baseline; }
#endif

}  // namespace liteboost
