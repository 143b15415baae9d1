// Bytes moved and FLOPs of a launch, from its arguments alone.
#pragma once
#include "launch.h"

namespace sim {

/// The elements of one argument that a launch touches: all of them by default.
struct Touch {
  std::vector<at::Tensor> read, written;     // views
  uint64_t more_read = 0, more_written = 0;  // bytes of elements that have no view
};

/// Touches by argument. Operators that use part of a tensor (gathers, scatters, attention over a cache, experts) have a
/// rule in extent.cpp.
std::vector<Touch> touches_of(const std::string& name, const std::vector<Argument>& arguments);

/// Bytes of the union of the elements of the views: an element is counted once, however often the views have it.
uint64_t bytes_of(const std::vector<at::Tensor>& views);

/// Multiplications and additions of matrix products and attention; 0 for everything else.
uint64_t flops_of(const std::string& name, const std::vector<Argument>& arguments);

/// One sequence of an inference attention: rows of queries, and the rows of the cache it sees.
struct Sequence {
  int64_t queries, keys, first_key;
};
struct AttentionShape {
  std::vector<Sequence> sequences;
  int64_t heads = 0, sparse = 0, pre = 0, next = 0;
  double dims = 0;  // D of keys + D of values
};
/// What an attention operator does, from its arguments; no heads for other operators.
AttentionShape attention_shape(const std::string& name, const std::vector<Argument>& arguments);
/// The rows of the keys (or values, `which` 1 or 2) that it reads.
std::vector<at::Tensor> attention_rows(const std::string& name, const std::vector<Argument>& arguments,
                                       size_t which);

}  // namespace sim
