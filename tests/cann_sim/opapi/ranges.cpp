// Bytes of a set of views, every element once.
#include <algorithm>
#include <numeric>

#include "cost.h"

namespace sim {
namespace {

struct Range {
  uintptr_t low, high;
};

struct Axis {
  int64_t size, stride;
};

/// The axes along which elements differ, from the smallest step, with axes merged that continue each other.
std::vector<Axis> axes_of(const at::Tensor& t) {
  std::vector<Axis> axes;
  for (int64_t d = 0; d < t.dim(); d++) {
    if (t.size(d) > 1 && t.stride(d) != 0) axes.push_back({t.size(d), t.stride(d)});
  }
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  std::vector<Axis> merged;
  for (const auto& axis : axes) {
    if (!merged.empty() && merged.back().stride * merged.back().size == axis.stride) {
      merged.back().size *= axis.size;
    } else {
      merged.push_back(axis);
    }
  }
  return merged;
}

void add_ranges(const at::Tensor& t, std::vector<Range>& ranges) {
  if (!t.defined() || !t.numel()) return;
  auto axes = axes_of(t);
  auto item = static_cast<int64_t>(t.element_size());
  int64_t run = 1;
  if (!axes.empty() && axes[0].stride == 1) {
    run = axes[0].size;
    axes.erase(axes.begin());
  }
  auto base = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  std::vector<int64_t> at(axes.size(), 0);
  while (true) {
    int64_t offset = 0;
    for (size_t k = 0; k < axes.size(); k++) offset += at[k] * axes[k].stride;
    ranges.push_back({base + offset * item, base + (offset + run) * item});
    size_t k = 0;
    while (k < axes.size() && ++at[k] == axes[k].size) at[k++] = 0;
    if (k == axes.size()) return;
  }
}

}  // namespace

uint64_t bytes_of(const std::vector<at::Tensor>& views) {
  std::vector<Range> ranges;
  for (const auto& view : views) add_ranges(view, ranges);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.low < b.low; });
  uint64_t total = 0;
  uintptr_t end = 0;
  for (const auto& range : ranges) {
    if (range.high <= end) continue;
    total += range.high - std::max(range.low, end);
    end = range.high;
  }
  return total;
}

}  // namespace sim
