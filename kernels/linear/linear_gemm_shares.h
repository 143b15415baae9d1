// How threads share the products of many rows (linear_gemm.h).
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "common/resources.h"

namespace liteboost {

// Rows from which a panel of weight is multiplied by another thread, too, where there are more threads than panels: to
// pack it again takes as long as to multiply some ten rows.
constexpr int64_t kGemmShare = 192;
constexpr int64_t kGemmManyRows = 1024, kGemmTogether = 4;

// Whether share_gemm has work for all threads, of panels of 64 outputs: with fewer, several products at once are faster.
inline bool gemm_fills_threads(int64_t n, int64_t rows) {
  return (n + 63) / 64 * std::max<int64_t>(1, rows / kGemmShare) >= at::get_num_threads();
}

// run(panel, end, row_begin, row_end, scratch) for all panels of a product and all of its rows. scratch has as many floats as
// floats_of(panels) says.
template <typename Floats, typename Run>
void share_gemm(int64_t panels, int64_t rows, const Floats& floats_of, const Run& run) {
  const int64_t threads = at::get_num_threads();
  // Of many rows, x is read once for several panels; of few panels, each goes to several threads.
  const int64_t together =
      rows < kGemmManyRows ? 1 : std::clamp<int64_t>(panels / (2 * threads), 1, kGemmTogether);
  const int64_t groups = (panels + together - 1) / together;
  const int64_t shares =
      std::clamp<int64_t>((2 * threads + groups - 1) / groups, 1, std::max<int64_t>(1, rows / kGemmShare));
  const size_t bytes = static_cast<size_t>(floats_of(together)) * sizeof(float);
  parallel_for(0, groups * shares, 1, [&](int64_t begin, int64_t end) {
    const c10::DataPtr scratch = c10::GetCPUAllocator()->allocate(bytes);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t panel = at / shares * together, share = at % shares;
      run(panel, std::min(panel + together, panels), rows * share / shares, rows * (share + 1) / shares,
          static_cast<float*>(scratch.get()));
    }
  });
}

// run(x, first row) for all rows of a matrix as float32, some at a time: floats of a long prompt take twice its memory.
template <typename Run>
void for_widened_rows(const at::Tensor& matrix, const Run& run) {
  constexpr int64_t kMostRows = 2048;
  const int64_t rows = matrix.size(0);
  for (int64_t row = 0; row < rows; row += kMostRows)
    run(matrix.narrow(0, row, std::min(kMostRows, rows - row)).to(at::kFloat).contiguous(), row);
}

}  // namespace liteboost
