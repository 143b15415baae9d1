// Faults for `make asan` to find, called through ctypes with pointers into torch's tensors: a job that does not
// see these would not see ours. Compiled once an instruction set, with the flags of the kernels.
#include <stdlib.h>

#include "common/vec.h"

namespace {

using namespace liteboost;
using namespace liteboost::LB_ISA;

}  // namespace

#define LB_PLANT extern "C" __attribute__((visibility("default"), noinline))

// Out of bounds where `index` is, use after free where `data` is no longer anybody's, misaligned where it is.
LB_PLANT float planted_read(const float* data, int64_t index) { return data[index]; }

LB_PLANT void planted_write(float* data, int64_t index) { data[index] = 1.0f; }

// The first n < kLanes elements by the loads and stores that the tails of the loops use.
LB_PLANT float planted_tail_read_f32(const float* data, int n) { return sum(load(data, n)); }
LB_PLANT float planted_tail_read_bf16(const bf16* data, int n) { return sum(load(data, n)); }
LB_PLANT void planted_tail_write_f32(float* data, int n) { store(data, VF{}, n); }
LB_PLANT void planted_tail_write_bf16(bf16* data, int n) { store(data, VF{}, n); }

// Overflows where the sum does.
LB_PLANT int64_t planted_add(int64_t a, int64_t b) { return a + b; }

// Memory from malloc as it is before anything is written to it.
LB_PLANT float planted_uninitialised() {
  float* data = static_cast<float*>(malloc(64 * sizeof(float)));
  asm volatile("" : : "r"(data) : "memory");
  const float first = data[17];
  free(data);
  return first;
}
