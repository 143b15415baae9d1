#include "common/batch_invariant.h"

#include <atomic>

#include "common/checks.h"

namespace liteboost {

static std::atomic<int64_t>& invariant_rows() {
  static std::atomic<int64_t> rows{1};
  return rows;
}

static std::atomic<bool>& any_length_asked() {
  static std::atomic<bool> asked{false};
  return asked;
}

int64_t batch_invariant_rows() { return invariant_rows().load(std::memory_order_relaxed); }

bool is_length_invariant() { return any_length_asked().load(std::memory_order_relaxed); }

void set_batch_invariant_rows(int64_t rows, bool any_length) {
  LB_CHECK_VALUE(rows >= 1, "_set_batch_invariant_rows", "rows must be 1 or more, got ", rows,
                 "; 1 is what it is before the first call");
  invariant_rows().store(rows, std::memory_order_relaxed);
  any_length_asked().store(rows > 1 && any_length, std::memory_order_relaxed);
}

}  // namespace liteboost
