#include "common/batch_invariant.h"

#include <algorithm>
#include <atomic>
#include <utility>

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

static thread_local int64_t rows_here = 1;

static void check_rows(int64_t rows, const char* name) {
  LB_CHECK_VALUE(rows >= 1, name, "rows must be 1 or more, got ", rows,
                 "; 1 is what it is before the first call");
}

int64_t batch_invariant_rows() {
  return std::max(invariant_rows().load(std::memory_order_relaxed), rows_here);
}

bool is_length_invariant() { return any_length_asked().load(std::memory_order_relaxed); }

void set_batch_invariant_rows(int64_t rows, bool any_length) {
  check_rows(rows, "_set_batch_invariant_rows");
  invariant_rows().store(rows, std::memory_order_relaxed);
  any_length_asked().store(rows > 1 && any_length, std::memory_order_relaxed);
}

int64_t set_batch_invariant_rows_here(int64_t rows) {
  check_rows(rows, "_set_batch_invariant_rows_here");
  return std::exchange(rows_here, rows);
}

}  // namespace liteboost
