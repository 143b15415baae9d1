// Splits rows over torch's threads by the work in them.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

namespace liteboost {

// Below about this many elements, waking a second thread (some microseconds) costs more than it saves.
constexpr int64_t kGrainElements = 16384;

// Calls f(begin, end) over [0, rows), in parallel when rows * work_per_row is worth it.
template <typename F>
void parallel_rows(int64_t rows, int64_t work_per_row, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, work_per_row));
  at::parallel_for(0, rows, grain, f);
}

}  // namespace liteboost
