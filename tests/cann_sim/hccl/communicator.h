// Collectives between the processes of one machine over POSIX shared memory.
#pragma once
#include <hccl/hccl.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>

extern "C" {
void simcann_set_error(const char*);
void* simcann_ptr(const void*);
bool simcann_tracing();
void simcann_trace_line(const char* json);
bool simcann_capture(aclrtStream stream, const char* what, std::function<int()>* run);
bool simcann_is_capturing(aclrtStream stream);
bool simcann_is_in_task_group(aclrtStream stream);
int simcann_replayed_graph();
}

namespace sim {

constexpr size_t kSlot = 1 << 20;  // bytes exchanged by a rank in a round

struct Head {
  std::atomic<uint32_t> joined, arrived, generation;
};
struct Communicator {
  std::string id, name;
  uint32_t ranks, rank;
  Head* head = nullptr;  // in shared memory, followed by one slot a rank
  char* data = nullptr;
  size_t bytes = 0;
  std::mutex mutex;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> sequence;  // messages so far, by (sender, receiver)
  char* slot(uint32_t r) { return data + r * kSlot; }
};

/// The readable address of device memory.
template <class P>
P* readable(P* p) {
  return static_cast<P*>(simcann_ptr(p));
}

size_t element_size(HcclDataType type);
/// to[k] = op(to[k], from[k]); false for a type that cannot be reduced.
bool reduce(void* to, const void* from, size_t n, HcclDataType type, HcclReduceOp op);

HcclResult open_communicator(const std::string& id, uint32_t ranks, uint32_t rank, const char* name,
                             HcclComm* out);
/// The communicator of that name (HcclGetCommName), or null.
Communicator* find_communicator(const std::string& name);
void forget_communicator(Communicator* c);
/// Waits until every rank came here; false when peers do not come (SIMCANN_HCCL_TIMEOUT seconds).
bool barrier(Communicator* c);
bool wait_until(const std::function<bool()>& done);
/// A message is a file: sending returns at once, receiving waits for it.
HcclResult send_message(Communicator* c, const void* from, size_t bytes, uint32_t to_rank);
HcclResult receive_message(Communicator* c, void* to, size_t bytes, uint32_t from_rank);
/// The same; between HcclGroupStart and HcclGroupEnd when the group ends, so that no rank waits for one that waits for it.
HcclResult receive_in_group(Communicator* c, void* to, size_t bytes, uint32_t from_rank);
void trace(const char* op, Communicator* c, uint64_t count, HcclDataType type);
/// Runs `body` now, or in every replay where `stream` is captured. No task group may have a collective in it: on hardware
/// what communicates by vector cores is refused there (vllm-ascend issue 13688).
HcclResult on_stream(const char* op, aclrtStream stream, const std::function<HcclResult()>& body);
/// Whether `op`, which is not simulated in a capture, may run.
bool may_run(const char* op, aclrtStream stream);

/// Every rank gives `bytes` of `from` (null: nothing), in rounds of at most a slot; `see(rank, offset, bytes, size)` is
/// called for the piece of every rank.
template <class F>
HcclResult exchange(Communicator* c, const void* from, size_t bytes, size_t unit, F see) {
  std::lock_guard<std::mutex> lock(c->mutex);
  size_t step = kSlot / unit * unit;
  for (size_t offset = 0; offset < bytes; offset += step) {
    size_t size = bytes - offset < step ? bytes - offset : step;
    if (from) memcpy(c->slot(c->rank), readable(static_cast<const char*>(from)) + offset, size);
    if (!barrier(c)) return HCCL_E_TIMEOUT;
    for (uint32_t r = 0; r < c->ranks; r++) see(r, offset, c->slot(r), size);
    if (!barrier(c)) return HCCL_E_TIMEOUT;
  }
  return HCCL_SUCCESS;
}

}  // namespace sim
