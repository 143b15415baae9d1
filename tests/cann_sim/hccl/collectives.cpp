// Collectives and messages.
#include <unistd.h>

#include <functional>
#include <vector>

#include "communicator.h"

using namespace sim;

namespace {

HcclResult alltoallv(Communicator* c, const char* s, const uint64_t* sc, const uint64_t* sd, char* r,
                     const uint64_t* rc, const uint64_t* rd, size_t es) {
  for (uint32_t p = 0; p < c->ranks; p++) {
    if (p == c->rank) {
      memmove(readable(r) + rd[p] * es, readable(s) + sd[p] * es, sc[p] * es);
      continue;
    }
    auto e = send_message(c, s + sd[p] * es, sc[p] * es, p);
    if (e) return e;
  }
  for (uint32_t p = 0; p < c->ranks; p++)
    if (p != c->rank) {
      auto e = receive_message(c, r + rd[p] * es, rc[p] * es, p);
      if (e) return e;
    }
  return HCCL_SUCCESS;
}

}  // namespace

extern "C" {
HcclResult HcclAllReduce(void* s, void* r, uint64_t n, HcclDataType t, HcclReduceOp op, HcclComm c_,
                         aclrtStream stream) {
  auto* c = (Communicator*)c_;
  return on_stream("HcclAllReduce", stream, [=] {
    trace("HcclAllReduce", c, n, t);
    auto es = element_size(t);
    bool ok = true;
    std::vector<char> acc(kSlot);
    auto e = exchange(c, s, n * es, es, [&](uint32_t k, size_t off, char* p, size_t len) {
      if (k == 0)
        memcpy(acc.data(), p, len);
      else
        ok &= reduce(acc.data(), p, len / es, t, op);
      if (k + 1 == c->ranks) memcpy(readable((char*)r) + off, acc.data(), len);
    });
    return e ? e : ok ? HCCL_SUCCESS : HCCL_E_PARA;
  });
}
HcclResult HcclReduce(void* s, void* r, uint64_t n, HcclDataType t, HcclReduceOp op, uint32_t root,
                      HcclComm c_, aclrtStream stream) {
  auto* c = (Communicator*)c_;
  return on_stream("HcclReduce", stream, [=] {
    trace("HcclReduce", c, n, t);
    auto es = element_size(t);
    bool ok = true;
    std::vector<char> acc(kSlot);
    auto e = exchange(c, s, n * es, es, [&](uint32_t k, size_t off, char* p, size_t len) {
      if (c->rank != root) return;
      if (k == 0)
        memcpy(acc.data(), p, len);
      else
        ok &= reduce(acc.data(), p, len / es, t, op);
      if (k + 1 == c->ranks) memcpy(readable((char*)r) + off, acc.data(), len);
    });
    return e ? e : ok ? HCCL_SUCCESS : HCCL_E_PARA;
  });
}
HcclResult HcclBroadcast(void* b, uint64_t n, HcclDataType t, uint32_t root, HcclComm c_,
                         aclrtStream stream) {
  auto* c = (Communicator*)c_;
  return on_stream("HcclBroadcast", stream, [=] {
    trace("HcclBroadcast", c, n, t);
    auto es = element_size(t);
    return exchange(c, c->rank == root ? b : nullptr, n * es, es,
                    [&](uint32_t k, size_t off, char* p, size_t len) {
                      if (k == root && c->rank != root) memcpy(readable((char*)b) + off, p, len);
                    });
  });
}
HcclResult HcclAllGather(void* s, void* r, uint64_t n, HcclDataType t, HcclComm c_, aclrtStream stream) {
  auto* c = (Communicator*)c_;
  return on_stream("HcclAllGather", stream, [=] {
    trace("HcclAllGather", c, n, t);
    auto es = element_size(t);
    return exchange(c, s, n * es, es, [&](uint32_t k, size_t off, char* p, size_t len) {
      memcpy(readable((char*)r) + k * n * es + off, p, len);
    });
  });
}
HcclResult HcclReduceScatter(void* s, void* r, uint64_t n, HcclDataType t, HcclReduceOp op, HcclComm c_,
                             aclrtStream stream) {
  auto* c = (Communicator*)c_;
  return on_stream("HcclReduceScatter", stream, [=] {
    trace("HcclReduceScatter", c, n, t);
    auto es = element_size(t);
    bool ok = true;
    std::vector<char> full((size_t)n * es * c->ranks), acc(kSlot);
    auto e = exchange(c, s, n * es * c->ranks, es, [&](uint32_t k, size_t off, char* p, size_t len) {
      if (k == 0)
        memcpy(acc.data(), p, len);
      else
        ok &= reduce(acc.data(), p, len / es, t, op);
      if (k + 1 == c->ranks) memcpy(full.data() + off, acc.data(), len);
    });
    if (!e) memcpy(readable(r), full.data() + (size_t)c->rank * n * es, n * es);
    return e ? e : ok ? HCCL_SUCCESS : HCCL_E_PARA;
  });
}
HcclResult HcclScatter(void* s, void* r, uint64_t n, HcclDataType t, uint32_t root, HcclComm c_,
                       aclrtStream stream) {
  if (!may_run("HcclScatter", stream)) return HCCL_E_NOT_SUPPORT;
  auto* c = (Communicator*)c_;
  trace("HcclScatter", c, n, t);
  auto b = n * element_size(t);
  if (c->rank != root) return receive_message(c, r, b, root);
  for (uint32_t p = 0; p < c->ranks; p++) {
    if (p == root)
      memmove(readable(r), readable((char*)s) + p * b, b);
    else if (auto e = send_message(c, (char*)s + p * b, b, p))
      return e;
  }
  return HCCL_SUCCESS;
}
HcclResult HcclAllGatherV(void* s, uint64_t n, void* r, const void* rc, const void* rd, HcclDataType t,
                          HcclComm c_, aclrtStream stream) {
  if (!may_run("HcclAllGatherV", stream)) return HCCL_E_NOT_SUPPORT;
  auto* c = (Communicator*)c_;
  trace("HcclAllGatherV", c, n, t);
  std::vector<uint64_t> sc(c->ranks, n), sd(c->ranks, 0);
  return alltoallv(c, (char*)s, sc.data(), sd.data(), (char*)r, (const uint64_t*)rc, (const uint64_t*)rd,
                   element_size(t));
}
HcclResult HcclReduceScatterV(void* s, const void* sc, const void* sd, void* r, uint64_t n, HcclDataType t,
                              HcclReduceOp op, HcclComm c_, aclrtStream stream) {
  if (!may_run("HcclReduceScatterV", stream)) return HCCL_E_NOT_SUPPORT;
  auto* c = (Communicator*)c_;
  trace("HcclReduceScatterV", c, n, t);
  auto es = element_size(t);
  std::vector<char> tmp((size_t)n * es * c->ranks);
  std::vector<uint64_t> rc(c->ranks, n), rd(c->ranks);
  for (uint32_t k = 0; k < c->ranks; k++) rd[k] = k * n;
  if (auto e = alltoallv(c, (char*)s, (const uint64_t*)sc, (const uint64_t*)sd, tmp.data(), rc.data(),
                         rd.data(), es))
    return e;
  r = readable(r);
  memcpy(r, tmp.data(), n * es);
  for (uint32_t k = 1; k < c->ranks; k++)
    if (!reduce(r, tmp.data() + (size_t)k * n * es, n, t, op)) return HCCL_E_PARA;
  return HCCL_SUCCESS;
}
HcclResult HcclAlltoAll(const void* s, uint64_t n, HcclDataType t, const void* r, uint64_t rn, HcclDataType,
                        HcclComm c_, aclrtStream stream) {
  if (!may_run("HcclAlltoAll", stream)) return HCCL_E_NOT_SUPPORT;
  auto* c = (Communicator*)c_;
  trace("HcclAlltoAll", c, n, t);
  std::vector<uint64_t> k(c->ranks, n), d(c->ranks);
  for (uint32_t i = 0; i < c->ranks; i++) d[i] = i * n;
  (void)rn;
  return alltoallv(c, (const char*)s, k.data(), d.data(), (char*)r, k.data(), d.data(), element_size(t));
}
HcclResult HcclAlltoAllV(const void* s, const void* sc, const void* sd, HcclDataType t, const void* r,
                         const void* rc, const void* rd, HcclDataType, HcclComm c_, aclrtStream stream) {
  if (!may_run("HcclAlltoAllV", stream)) return HCCL_E_NOT_SUPPORT;
  auto* c = (Communicator*)c_;
  trace("HcclAlltoAllV", c, 0, t);
  return alltoallv(c, (const char*)s, (const uint64_t*)sc, (const uint64_t*)sd, (char*)r, (const uint64_t*)rc,
                   (const uint64_t*)rd, element_size(t));
}
HcclResult HcclSend(void* b, uint64_t n, HcclDataType t, uint32_t dst, HcclComm c, aclrtStream stream) {
  if (!may_run("HcclSend", stream)) return HCCL_E_NOT_SUPPORT;
  trace("HcclSend", (Communicator*)c, n, t);
  return send_message((Communicator*)c, b, n * element_size(t), dst);
}
HcclResult HcclRecv(void* b, uint64_t n, HcclDataType t, uint32_t src, HcclComm c, aclrtStream stream) {
  if (!may_run("HcclRecv", stream)) return HCCL_E_NOT_SUPPORT;
  trace("HcclRecv", (Communicator*)c, n, t);
  return receive_in_group((Communicator*)c, b, n * element_size(t), src);
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* v, uint32_t n, HcclComm c, aclrtStream st) {
  if (!may_run("HcclBatchSendRecv", st)) return HCCL_E_NOT_SUPPORT;
  for (uint32_t i = 0; i < n; i++)
    if (v[i].sendRecvType == HCCL_SEND)
      if (auto e = HcclSend(v[i].buf, v[i].count, v[i].dataType, v[i].remoteRank, c, st)) return e;
  for (uint32_t i = 0; i < n; i++)
    if (v[i].sendRecvType == HCCL_RECV)
      if (auto e = HcclRecv(v[i].buf, v[i].count, v[i].dataType, v[i].remoteRank, c, st)) return e;
  return HCCL_SUCCESS;
}
HcclResult HcclBarrier(HcclComm c_, aclrtStream) {
  auto* c = (Communicator*)c_;
  std::lock_guard<std::mutex> lock(c->mutex);
  return barrier(c) ? HCCL_SUCCESS : HCCL_E_TIMEOUT;
}
}
