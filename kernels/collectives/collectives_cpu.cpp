#include "collectives/collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "collectives/collectives_checks.h"
#include "collectives/shared_memory.h"

namespace liteboost {

template <typename T>
static void add_ranks_of(const void* const* from, int ranks, int64_t begin, int64_t end, void* out) {
  // Runs over the ranks in turn for a block that stays in the cache.
  constexpr int64_t kBlock = 256;
  float sums[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    const T* start = static_cast<const T*>(from[0]) + first;
    for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<float>(start[i]);
    for (int rank = 1; rank < ranks; ++rank) {
      const T* next = static_cast<const T*>(from[rank]) + first;
      for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<float>(next[i]);
    }
    T* result = static_cast<T*>(out) + first;
    for (int64_t i = 0; i < count; ++i) result[i] = static_cast<T>(sums[i]);
  }
}

void add_ranks(DType dtype, const void* const* from, int ranks, int64_t begin, int64_t end, void* out) {
  switch (dtype) {
    case DType::f32:
      return add_ranks_of<float>(from, ranks, begin, end, out);
    case DType::bf16:
      return add_ranks_of<c10::BFloat16>(from, ranks, begin, end, out);
    case DType::f16:
      return add_ranks_of<c10::Half>(from, ranks, begin, end, out);
  }
}

namespace {

// Of each group that shares memory. Freed when the process ends, which tells the others.
std::mutex segments_lock;
std::map<std::string, std::shared_ptr<SharedMemory>>& segments() {
  static std::map<std::string, std::shared_ptr<SharedMemory>> all;
  return all;
}

std::shared_ptr<SharedMemory> segment(const std::string& group) {
  const std::lock_guard<std::mutex> guard(segments_lock);
  const auto found = segments().find(group);
  return found == segments().end() ? nullptr : found->second;
}

void share_memory(const std::string& group, const std::string& name, int64_t bytes, double timeout) {
  const auto ranks = c10d::resolve_process_group(group);
  auto made = std::make_shared<SharedMemory>(name, bytes, timeout, ranks->getRank(), ranks->getSize());
  const std::lock_guard<std::mutex> guard(segments_lock);
  segments()[group] = std::move(made);
}

void unshare_memory(const std::string& group) {
  const std::lock_guard<std::mutex> guard(segments_lock);
  segments().erase(group);
}

bool shares_memory(const std::string& group) { return segment(group) != nullptr; }

// Why waits of a group are to fail, where it shares no memory.
std::map<std::string, std::string>& interruptions() {
  static std::map<std::string, std::string> all;
  return all;
}

// Since when somebody waits in a group that shares no memory.
std::map<std::string, std::chrono::steady_clock::time_point>& waiting() {
  static std::map<std::string, std::chrono::steady_clock::time_point> all;
  return all;
}

void interrupt(const std::string& group, const std::string& reason) {
  if (const auto shared = segment(group)) shared->interrupt(reason);
  const std::lock_guard<std::mutex> guard(segments_lock);
  interruptions()[group] = reason;
}

int64_t position(const std::string& group) {
  const auto shared = segment(group);
  return shared == nullptr ? -1 : static_cast<int64_t>(shared->position());
}

double waits(const std::string& group) {
  if (const auto shared = segment(group)) return shared->waits();
  const std::lock_guard<std::mutex> guard(segments_lock);
  const auto found = waiting().find(group);
  if (found == waiting().end()) return 0;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - found->second).count();
}

void resume(const std::string& group, int64_t position) {
  if (const auto shared = segment(group)) shared->resume(static_cast<uint64_t>(position));
  const std::lock_guard<std::mutex> guard(segments_lock);
  interruptions().erase(group);
}

// Waits for what a process group does. On a CPU so that `interrupt` ends it; a device goes on by itself.
void finish(const c10::intrusive_ptr<c10d::Work>& work, const at::Tensor& x, const std::string& group) {
  for (int64_t turn = 0; x.is_cpu() && !work->isCompleted(); ++turn) {
    if (turn < 1000) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (turn % 64 != 0) continue;
    const std::lock_guard<std::mutex> guard(segments_lock);
    waiting().try_emplace(group, std::chrono::steady_clock::now());
    const auto found = interruptions().find(group);
    if (found == interruptions().end()) continue;
    waiting().erase(group);
    TORCH_CHECK(false, found->second);
  }
  {
    const std::lock_guard<std::mutex> guard(segments_lock);
    waiting().erase(group);
  }
  work->wait();
}

at::Tensor all_reduce_group(const at::Tensor& x, const std::string& group) {
  check_all_reduce(x);
  std::vector<at::Tensor> result{x.clone(at::MemoryFormat::Contiguous)};
  finish(c10d::resolve_process_group(group)->allreduce(result), x, group);
  return result[0];
}

// A digest of what all ranks must have in common.
uint64_t digest(const at::Tensor& same) {
  const auto contiguous = same.expect_contiguous();
  const auto* bytes = static_cast<const unsigned char*>(contiguous->const_data_ptr());
  const int64_t size = same.numel() * same.element_size();
  uint64_t state = 0x9e3779b97f4a7c15ull ^ static_cast<uint64_t>(size);
  for (int64_t i = 0; i < size; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min<int64_t>(8, size - i));
    state = (state ^ word) * 0xff51afd7ed558ccdull;
    state ^= state >> 32;
  }
  return state;
}

at::Tensor all_reduce_of_group(const at::Tensor& x, const at::Tensor&, const std::string& group) {
  return all_reduce_group(x, group);
}

at::Tensor all_reduce_of_cpu(const at::Tensor& x, const at::Tensor& same, const std::string& group) {
  const auto shared = same.is_cpu() ? segment(group) : nullptr;
  if (shared == nullptr) return all_reduce_group(x, group);
  check_all_reduce(x);
  const auto contiguous = x.expect_contiguous();
  at::Tensor result = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return result;
  shared->all_reduce(dtype_of(x), contiguous->const_data_ptr(), x.numel(), x.element_size(),
                     result.mutable_data_ptr(), digest(same));
  return result;
}

at::Tensor all_reduce_cpu(const at::Tensor& x, const std::string& group) {
  const auto shared = segment(group);
  if (shared == nullptr) return all_reduce_group(x, group);
  check_all_reduce(x);
  const auto contiguous = x.expect_contiguous();
  at::Tensor result = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return result;
  shared->all_reduce(dtype_of(x), contiguous->const_data_ptr(), x.numel(), x.element_size(),
                     result.mutable_data_ptr());
  return result;
}

at::Tensor& all_reduce_in_place(at::Tensor& x, const std::string& group) {
  check_all_reduce(x);
  const auto shared = x.is_cpu() ? segment(group) : nullptr;
  if (x.numel() == 0) return x;
  at::Tensor whole = x.contiguous();
  if (shared != nullptr) {
    shared->all_reduce(dtype_of(x), whole.const_data_ptr(), x.numel(), x.element_size(),
                       whole.mutable_data_ptr());
  } else {
    std::vector<at::Tensor> result{whole};
    finish(c10d::resolve_process_group(group)->allreduce(result), whole, group);
  }
  if (!whole.is_same(x)) x.copy_(whole);
  return x;
}

at::Tensor all_gather_group(const at::Tensor& x, c10::SymIntArrayRef sizes, const std::string& group);

at::Tensor all_gather_cpu(const at::Tensor& x, c10::SymIntArrayRef sizes, const std::string& group) {
  const auto shared = segment(group);
  if (shared == nullptr) return all_gather_group(x, sizes, group);
  check_all_gather(x, sizes, shared->rank(), shared->ranks());
  const auto contiguous = x.expect_contiguous();
  std::vector<int64_t> widths, shape = x.sizes().vec();
  shape.back() = 0;
  for (const int64_t size : C10_AS_INTARRAYREF_SLOW(sizes)) {
    widths.push_back(size * x.element_size());
    shape.back() += size;
  }
  at::Tensor result = at::empty(shape, x.options());
  if (result.numel() == 0) return result;
  shared->all_gather(contiguous->const_data_ptr(), result.numel() / shape.back(), widths,
                     result.mutable_data_ptr());
  return result;
}

at::Tensor all_gather_group(const at::Tensor& x, c10::SymIntArrayRef sizes, const std::string& group) {
  const auto ranks = c10d::resolve_process_group(group);
  check_all_gather(x, sizes, ranks->getRank(), ranks->getSize());
  const auto lengths = C10_AS_INTARRAYREF_SLOW(sizes);
  const int64_t most = *std::max_element(lengths.begin(), lengths.end());
  const at::Tensor whole =
      x.size(-1) == most ? x.contiguous() : at::constant_pad_nd(x, {0, most - x.size(-1)});
  std::vector<at::Tensor> sources{whole};
  std::vector<std::vector<at::Tensor>> gathered(1);
  for (size_t rank = 0; rank < lengths.size(); ++rank) gathered[0].push_back(at::empty_like(whole));
  finish(ranks->allgather(gathered, sources), x, group);
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < lengths.size(); ++rank) {
    parts.push_back(gathered[0][rank].narrow(-1, 0, lengths[rank]));
  }
  return at::cat(parts, -1);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost_parallel, CPU, m) {
  m.impl("all_reduce", &liteboost::all_reduce_cpu);
  m.impl("all_reduce_of", &liteboost::all_reduce_of_cpu);
  m.impl("all_gather", &liteboost::all_gather_cpu);
}

// Whatever the device: its process group does it.
TORCH_LIBRARY_IMPL(liteboost_parallel, CompositeExplicitAutograd, m) {
  m.impl("all_reduce", &liteboost::all_reduce_group);
  m.impl("all_reduce_of", &liteboost::all_reduce_of_group);
  m.impl("all_reduce_", &liteboost::all_reduce_in_place);
  m.impl("all_gather", &liteboost::all_gather_group);
}

TORCH_LIBRARY_FRAGMENT(liteboost_parallel, m) {
  m.def("_share_memory(str group, str name, int bytes, float timeout) -> ()", &liteboost::share_memory);
  m.def("_unshare_memory(str group) -> ()", &liteboost::unshare_memory);
  m.def("_shares_memory(str group) -> bool", &liteboost::shares_memory);
  m.def("_interrupt(str group, str reason) -> ()", &liteboost::interrupt);
  m.def("_waits(str group) -> float", &liteboost::waits);
  m.def("_position(str group) -> int", &liteboost::position);
  m.def("_resume(str group, int position) -> ()", &liteboost::resume);
}
