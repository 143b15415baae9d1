// Virtual memory management: address ranges reserved, and physical memory mapped into them (expandable segments).
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

#include "state.h"

using namespace sim;

namespace {
struct Physical {
  int fd;
  size_t size;
  int device;
};
std::map<uintptr_t, size_t> reserved, mapped;
}  // namespace

extern "C" {
aclError aclrtReserveMemAddress(void** v, size_t n, size_t, void* hint, uint64_t) {
  std::lock_guard<std::mutex> lock(state().mutex);
  (void)hint;
  void* q = strict() ? take_addresses(n)
                     : mmap(hint, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (!q || q == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  reserved[(uintptr_t)q] = n;
  *v = q;
  return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void* v) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto it = reserved.find((uintptr_t)v);
  if (it == reserved.end()) return ACL_ERROR_INVALID_PARAM;
  if (alias(v) == v) munmap(v, it->second);
  reserved.erase(it);
  return ACL_SUCCESS;
}
aclError aclrtMallocPhysical(aclrtDrvMemHandle* h, size_t n, const aclrtPhysicalMemProp*, uint64_t) {
  int d = current_device();
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (state().used[d] + n > device_memory()) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    state().used[d] += n;
  }
  int fd = memfd_create("simcann", 0);
  if (fd < 0 || ftruncate(fd, n)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  *h = new Physical{fd, n, d};
  return ACL_SUCCESS;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle h) {
  auto* p = (Physical*)h;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().used[p->device] -= p->size;
  }
  close(p->fd);
  delete p;
  return ACL_SUCCESS;
}
aclError aclrtMapMem(void* v, size_t n, size_t off, aclrtDrvMemHandle h, uint64_t) {
  auto* p = (Physical*)h;
  if (mmap(alias(v), n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p->fd, off) == MAP_FAILED)
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::lock_guard<std::mutex> lock(state().mutex);
  mapped[(uintptr_t)v] = n;
  state().allocations[(uintptr_t)v] = {n, p->device, false};
  return ACL_SUCCESS;
}
aclError aclrtUnmapMem(void* v) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto it = mapped.find((uintptr_t)v);
  if (it == mapped.end()) return ACL_ERROR_INVALID_PARAM;
  mmap(alias(v), it->second, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapped.erase(it);
  state().allocations.erase((uintptr_t)v);
  return ACL_SUCCESS;
}
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle h, aclrtMemHandleType, uint64_t, uint64_t* s) {
  *s = ((uint64_t)getpid() << 32) | (uint32_t)((Physical*)h)->fd;
  return ACL_SUCCESS;
}
aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) { return ACL_SUCCESS; }
aclError aclrtMemImportFromShareableHandle(uint64_t s, int32_t dev, aclrtDrvMemHandle* h) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/fd/%u", (unsigned)(s >> 32), (unsigned)s);
  int fd = open(path, O_RDWR);
  struct stat st;
  if (fd < 0 || fstat(fd, &st)) return ACL_ERROR_INVALID_PARAM;
  *h = new Physical{fd, (size_t)st.st_size, dev};
  return ACL_SUCCESS;
}
}
