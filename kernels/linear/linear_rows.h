// Rows of x in groups, and rows of outputs as they are written, for all products of linear.h. Compiled once an instruction set.
#pragma once

#include "common/vec.h"
#include "linear/linear.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#define LB_UNROLL16 _Pragma("GCC unroll 16")

constexpr int kLine = 64;  // bytes a cache line

// Rows in the next group of up to `most`, where `rows` are left: all of about the same size.
template <int most>
LB_INLINE int64_t group_of(int64_t rows) {
  const int64_t groups = (rows + most - 1) / most;
  return (rows + groups - 1) / groups;
}

// Outputs [begin, begin + count) of one row of x from their sums.
template <typename T>
void write_row(const LinearArgs& args, int64_t row, int64_t begin, int64_t count, const float* sums) {
  const T* bias = static_cast<const T*>(args.bias);
  T* out = static_cast<T*>(args.out) + row * args.n + begin;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const VF v = load(sums + i);
    store(out + i, bias ? v + load(bias + begin + i) : v);
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    const VF v = load(sums + i, rest);
    store(out + i, bias ? v + load(bias + begin + i, rest) : v, rest);
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
