#include "common/batch_invariant.h"

#include <atomic>

#include "common/checks.h"

namespace liteboost {

static std::atomic<int64_t>& invariant_rows() {
  static std::atomic<int64_t> rows{1};
  return rows;
}

int64_t batch_invariant_rows() { return invariant_rows().load(std::memory_order_relaxed); }

void set_batch_invariant_rows(int64_t rows) {
  LB_CHECK_VALUE(rows >= 1, "_set_batch_invariant_rows", "rows must be 1 or more, got ", rows,
                 "; 1 is what it is before the first call");
  invariant_rows().store(rows, std::memory_order_relaxed);
}

}  // namespace liteboost
