// Many rows of bf16 by integers, as the CPU shares them out: each task dequantizes some tiles of the weight, a part of
// the columns at a time, and multiplies a block of rows by them (quantized_matrix.h).
#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

#include "common/resources.h"
#include "quantized_linear/quantized_linear.h"

namespace liteboost {

// Steps that are dequantized at once: kMatrixTiles tiles of them stay in the second cache.
constexpr int64_t kMatrixSteps = 256;
// Rows that a task has: few would not be worth what was dequantized, sums of many would not stay in a cache.
constexpr int64_t kLeastMatrixRows = 96, kMostMatrixRows = 510;

// A whole number of packs.
inline int64_t matrix_steps(int64_t steps) {
  const int64_t parts = (steps + kMatrixSteps - 1) / kMatrixSteps, packs = kPack / kStep;
  return ((steps + parts - 1) / parts + packs - 1) / packs * packs;
}

struct MatrixProduct {
  const MatrixKernels& kernels;
  const QuantizedTiles& weight;
  int64_t rows;
  const void* bias;  // [n] or null
  char *packed, *out;
  bool* not_finite;  // set where an output is not finite

  int64_t steps() const { return steps_of(weight.k); }
  int64_t chunk_bytes() const { return steps() * kStep * kMatrixRows * 2; }
  int64_t chunks() const { return (rows + kMatrixRows - 1) / kMatrixRows; }
  int64_t groups() const { return (tiles_of(weight.n) + kMatrixTiles - 1) / kMatrixTiles; }

  void pack(const char* x) const {
    const int64_t grain = std::max<int64_t>(1, (16 << 10) / std::max<int64_t>(1, weight.k * kMatrixRows));
    parallel_for(0, chunks(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t row = chunk * kMatrixRows;
        kernels.pack(x + row * weight.k * 2, std::min(kMatrixRows, rows - row), weight.k, steps() * kStep / 2,
                     packed + chunk * chunk_bytes());
      }
    });
  }

  // Blocks of rows: so many that each thread has a task.
  int64_t row_blocks() const {
    const int64_t threads = (at::get_num_threads() + groups() - 1) / groups();
    const int64_t least = (rows + kMostMatrixRows - 1) / kMostMatrixRows;
    return std::max(least, std::min(threads, rows / kLeastMatrixRows));
  }

  void run() const {
    const int64_t blocks = row_blocks(), in_block = (chunks() + blocks - 1) / blocks;
    parallel_for(0, groups() * blocks, 1, [&](int64_t begin, int64_t end) {
      const int64_t weight_bytes = matrix_steps(steps()) * kStep * kMatrixTiles * kTile * 2;
      const int64_t sum_bytes = in_block * kMatrixRows * kMatrixTiles * kTile * 4;
      const c10::DataPtr memory = c10::GetCPUAllocator()->allocate(weight_bytes + sum_bytes);
      char* const at = static_cast<char*>(memory.get());
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task % blocks * in_block, last = std::min(first + in_block, chunks());
        if (first < last)
          run_task(task / blocks, first, last, at, reinterpret_cast<float*>(at + weight_bytes));
      }
    });
  }

  // The outputs of a group of tiles, of chunks [first, last) of x.
  void run_task(int64_t group, int64_t first, int64_t last, char* pairs, float* sums) const {
    const int64_t output = group * kMatrixTiles * kTile, row = first * kMatrixRows;
    float scales[kMatrixTiles * kTile] = {};
    MatrixArgs args{};
    args.chunk_bytes = chunk_bytes();
    args.weight = pairs;
    args.scales = scales;
    args.sums = sums;
    args.bias = bias ? static_cast<const char*>(bias) + output * 2 : nullptr;
    args.out = out + (row * weight.n + output) * 2;
    args.rows = std::min(last * kMatrixRows, rows) - row;
    args.outputs = std::min(weight.n - output, kMatrixTiles * kTile);
    args.out_stride = weight.n;
    args.not_finite = not_finite;
    const int64_t tiles = tiles_of(args.outputs), part = matrix_steps(steps());
    for (int64_t begin = 0; begin < steps(); begin += part) {
      const int64_t end = std::min(begin + part, steps());
      if (tiles < kMatrixTiles) std::memset(pairs, 0, (end - begin) * kStep * kMatrixTiles * kTile * 2);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        kernels.unpack(weight, group * kMatrixTiles + tile, begin, end, pairs + tile * kTile * 4,
                       scales + tile * kTile);
      }
      args.packed_x = packed + first * chunk_bytes() + begin * kStep * kMatrixRows * 2;
      args.pairs = (end - begin) * kStep / 2;
      args.is_first = begin == 0;
      args.is_last = end == steps();
      kernels.run(args);
    }
  }
};

}  // namespace liteboost
