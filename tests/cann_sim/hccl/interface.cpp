// Communicators as the caller sees them: creation, names, configuration.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>

#include "communicator.h"

using namespace sim;

extern "C" {
HcclResult HcclGetRootInfo(HcclRootInfo* i) {
  static std::atomic<int> k{0};
  memset(i, 0, sizeof *i);
  snprintf(i->internal, 128, "simhccl_%d_%lx_%d", (int)getpid(),
           (long)std::chrono::system_clock::now().time_since_epoch().count() & 0xffffffffL, k++);
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t n, const HcclRootInfo* i, uint32_t rank, HcclComm* c) {
  return open_communicator(i->internal, n, rank, nullptr, c);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t n, const HcclRootInfo* i, uint32_t rank,
                                      const HcclCommConfig* cfg, HcclComm* c) {
  return open_communicator(i->internal, n, rank, cfg ? cfg->hcclCommName : nullptr, c);
}
HcclResult HcclCreateSubCommConfig(HcclComm* parent, uint32_t n, uint32_t* ranks, uint64_t id, uint32_t rank,
                                   HcclCommConfig* cfg, HcclComm* sub) {
  auto* p = (Communicator*)*parent;
  uint64_t h = id;
  for (uint32_t k = 0; k < n; k++) h = h * 1000003u + ranks[k];
  char b[256];
  snprintf(b, sizeof b, "%s_s%lx", p->id.c_str(), (unsigned long)h);
  return open_communicator(b, n, rank, cfg ? cfg->hcclCommName : nullptr, sub);
}
HcclResult HcclCommInitClusterInfo(const char*, uint32_t, HcclComm*) { return HCCL_E_NOT_SUPPORT; }
HcclResult HcclCommInitClusterInfoConfig(const char*, uint32_t, HcclCommConfig*, HcclComm*) {
  return HCCL_E_NOT_SUPPORT;
}
HcclResult HcclCommInitAll(uint32_t n, int32_t*, HcclComm* c) {
  if (n != 1) return HCCL_E_NOT_SUPPORT;
  HcclRootInfo i;
  HcclGetRootInfo(&i);
  return HcclCommInitRootInfo(1, &i, 0, c);
}
HcclResult HcclCommDestroy(HcclComm c_) {
  auto* c = (Communicator*)c_;
  if (!c) return HCCL_E_PTR;
  forget_communicator(c);
  munmap(c->head, c->bytes);
  delete c;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm c, uint32_t* n) {
  *n = ((Communicator*)c)->ranks;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm c, uint32_t* r) {
  *r = ((Communicator*)c)->rank;
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm c, char* n) {
  snprintf(n, COMM_NAME_MAX_LENGTH, "%s", ((Communicator*)c)->name.c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* e) {
  *e = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
const char* HcclGetErrorString(HcclResult) { return "simcann hccl error"; }
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_WORLD_RANKID; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGetConfig(HcclConfig, HcclConfigValue* v) {
  v->value = 0;
  return HCCL_SUCCESS;
}
HcclResult HcclCommSuspend(HcclComm) { return HCCL_SUCCESS; }
HcclResult HcclCommResume(HcclComm) { return HCCL_SUCCESS; }
HcclResult HcclCommWorkingDevNicSet(HcclComm, uint32_t*, bool*, uint32_t) { return HCCL_SUCCESS; }
}
