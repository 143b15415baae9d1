// What operators that communicate (ops/collective.h) ask of libhccl: groups by name, untraced.
#include "communicator.h"

using namespace sim;

/// Rank and size of the group; HCCL_E_NOT_FOUND when no communicator has that name.
extern "C" int simcann_group(const char* name, uint32_t* rank, uint32_t* size) {
  auto* c = find_communicator(name ? name : "");
  if (!c) return HCCL_E_NOT_FOUND;
  *rank = c->rank;
  *size = c->ranks;
  return HCCL_SUCCESS;
}
/// Every rank's `bytes` of `from`, one after the other in `to`.
extern "C" int simcann_gather(const char* name, const void* from, uint64_t bytes, void* to) {
  auto* c = find_communicator(name ? name : "");
  if (!c) return HCCL_E_NOT_FOUND;
  return exchange(c, from, bytes, 1, [&](uint32_t rank, size_t offset, const char* piece, size_t size) {
    memcpy(static_cast<char*>(to) + rank * bytes + offset, piece, size);
  });
}
