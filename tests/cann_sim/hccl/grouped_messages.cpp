// HcclGroupStart and HcclGroupEnd of libhcomm.so, by which torch_npu sends and receives together from CANN 9.1 on.
#include <vector>

#include "communicator.h"

using namespace sim;

namespace {

struct Receive {
  Communicator* from;
  void* to;
  size_t bytes;
  uint32_t rank;
};
thread_local int depth = 0;
thread_local std::vector<Receive> waiting;

}  // namespace

HcclResult sim::receive_in_group(Communicator* c, void* to, size_t bytes, uint32_t from_rank) {
  if (depth == 0) return receive_message(c, to, bytes, from_rank);
  waiting.push_back({c, to, bytes, from_rank});
  return HCCL_SUCCESS;
}

extern "C" {
HcclResult HcclGroupStart() {
  ++depth;
  return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() {
  if (depth == 0) return HCCL_E_PARA;
  if (--depth > 0) return HCCL_SUCCESS;
  HcclResult result = HCCL_SUCCESS;
  for (auto& one : waiting) {
    if (!result) result = receive_message(one.from, one.to, one.bytes, one.rank);
  }
  waiting.clear();
  return result;
}
}
