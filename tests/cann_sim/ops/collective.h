// Collectives for operators, over the communicators of the simulator's libhccl, found by the group's name.
#pragma once
#include <dlfcn.h>

#include "common.h"

namespace sim {

// libhccl is not linked: a program that never opens a communicator need not load it.
template <class F>
F* hccl_function(const char* name) {
  static void* library = dlopen("libhccl.so", RTLD_NOW | RTLD_NOLOAD);
  auto* f = library ? reinterpret_cast<F*>(dlsym(library, name)) : nullptr;
  TORCH_CHECK(f, name, " is not found: no communicator was opened through the simulator's libhccl.so");
  return f;
}
inline std::pair<uint32_t, uint32_t> rank_and_size(const char* group) {
  uint32_t rank = 0, size = 0;
  auto* find = hccl_function<int(const char*, uint32_t*, uint32_t*)>("simcann_group");
  TORCH_CHECK(find(group, &rank, &size) == 0, "no communicator has the name '", group ? group : "(null)",
              "': pass what HcclGetCommName gives");
  return {rank, size};
}

// Every rank's tensor (equal shapes), in rank order.
inline std::vector<at::Tensor> all_gather(const char* group, const at::Tensor& x) {
  const uint32_t size = rank_and_size(group).second;
  auto mine = x.contiguous();
  auto shape = x.sizes().vec();
  shape.insert(shape.begin(), size);
  auto all = at::empty(shape, x.options());
  auto* gather = hccl_function<int(const char*, const void*, uint64_t, void*)>("simcann_gather");
  const int code = gather(group, mine.const_data_ptr(), mine.nbytes(), all.mutable_data_ptr());
  TORCH_CHECK(code == 0, "the ranks of '", group, "' did not meet (hccl error ", code, ")");
  return all.unbind(0);
}
// Added in rank order and in the tensors' type, as HcclAllReduce does.
inline at::Tensor all_reduce_sum(const char* group, const at::Tensor& x) {
  auto parts = all_gather(group, x);
  auto sum = parts[0].clone();
  for (size_t r = 1; r < parts.size(); r++) sum.add_(parts[r]);
  return sum;
}

}  // namespace sim
