// Strict memory: the window of device addresses, and its alias.
#include <sys/mman.h>

#include "state.h"

namespace sim {
namespace {

constexpr size_t kWindow = static_cast<size_t>(1) << 40;
constexpr size_t kStep = 0x200000;  // allocations start at multiples of 2 MiB, with a gap between them

struct Window {
  uintptr_t base = 0, next = 0;
  ptrdiff_t to_alias = 0;
};

Window& window() {
  static Window made = [] {
    Window w;
    if (!env_int("SIMCANN_STRICT", 1)) return w;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* addresses = mmap(reinterpret_cast<void*>(0x12c000000000), kWindow, PROT_NONE, flags, -1, 0);
    void* bytes = mmap(reinterpret_cast<void*>(0x34c000000000), kWindow, PROT_NONE, flags, -1, 0);
    if (addresses == MAP_FAILED || bytes == MAP_FAILED) return w;
    w.base = w.next = reinterpret_cast<uintptr_t>(addresses);
    w.to_alias = static_cast<char*>(bytes) - static_cast<char*>(addresses);
    return w;
  }();
  return made;
}

}  // namespace

bool strict() { return window().base != 0; }

void* alias(const void* p) {
  auto& w = window();
  bool inside = w.base && reinterpret_cast<uintptr_t>(p) - w.base < kWindow;
  return const_cast<char*>(static_cast<const char*>(p)) + (inside ? w.to_alias : 0);
}

void* take_addresses(size_t bytes) {
  auto& w = window();
  uintptr_t taken = w.next;
  w.next += (bytes + kStep - 1 + 4096) & ~(kStep - 1);
  return w.next > w.base + kWindow ? nullptr : reinterpret_cast<void*>(taken);
}

}  // namespace sim

extern "C" void* simcann_ptr(const void* p) { return sim::alias(p); }
