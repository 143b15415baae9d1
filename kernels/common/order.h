// In which order the sums of several rows of x are added up. For the torch-free loops.
#pragma once

namespace liteboost {

// The order that is fastest for so many rows, or that of one row: each has the bits that it has alone.
enum class Order { fastest, of_one_row };

}  // namespace liteboost
