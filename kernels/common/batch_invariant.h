// How many rows have, in one call, the bits that each has in a call of its own: of products (linear) and, counted in new
// tokens, of attention. 1 unless _set_batch_invariant_rows, or by this thread _set_batch_invariant_rows_here, has been called:
// sums are added up in another order where there are more rows, which is faster for some numbers of rows.
#pragma once

#include <cstdint>

#include "common/order.h"

namespace liteboost {

int64_t batch_invariant_rows();
// Whether a row's bits are to depend on nothing but its own elements: not on keys it does not see, nor on how its tokens
// are grouped, also where a single row then has others than without.
bool is_length_invariant();
void set_batch_invariant_rows(int64_t rows, bool any_length);
// The same for what this thread calls; returns what it was before. The larger number counts.
int64_t set_batch_invariant_rows_here(int64_t rows);

// Of the sums of `rows` rows, or tokens.
inline Order order_of(int64_t rows) {
  const int64_t most = batch_invariant_rows();
  return most > 1 && rows <= most ? Order::of_one_row : Order::fastest;
}

}  // namespace liteboost
