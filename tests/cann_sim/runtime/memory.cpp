// Device and pinned host memory, and copies.
#include <sys/mman.h>

#include <cstring>

#include "state.h"

using namespace sim;

template <class First, class... Others>
First first_argument(aclError (*)(First, Others...));
using DeviceId = decltype(first_argument(&aclrtGetMemUsageInfo));  // unsigned in headers before CANN 9

/// The allocation that holds an address, or null. The caller holds the lock.
static const Allocation* allocation_of(const void* p) {
  auto& all = state().allocations;
  auto at = all.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (at == all.begin()) return nullptr;
  --at;
  return reinterpret_cast<uintptr_t>(p) < at->first + at->second.size ? &at->second : nullptr;
}

static bool on_device(const void* p) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto* found = allocation_of(p);
  return found && !found->host;
}

static const char* direction(const void* to, const void* from) {
  bool to_device = on_device(to), from_device = on_device(from);
  return from_device ? (to_device ? "d2d" : "d2h") : (to_device ? "h2d" : "h2h");
}

static void trace_copy(const void* to, const void* from, size_t bytes, bool asynchronous, int stream) {
  if (!simcann_tracing()) return;
  trace_event("copy", text("\"direction\":\"%s\",\"bytes\":%zu,\"asynchronous\":%s,\"stream\":%d",
                           direction(to, from), bytes, asynchronous ? "true" : "false", stream));
}

/// Whether the bytes lie in memory of a device. Maps that continue each other count as one.
extern "C" bool simcann_is_device_memory(const void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto low = reinterpret_cast<uintptr_t>(address);
  auto& all = state().allocations;
  for (auto high = low + bytes; low < high;) {
    auto at = all.upper_bound(low);
    if (at == all.begin()) return false;
    --at;
    if (at->second.host || low >= at->first + at->second.size) return false;
    low = at->first + at->second.size;
  }
  return true;
}

extern "C" {
bool simcann_capture(aclrtStream, const char*, std::function<int()>*);

static aclError dev_malloc(void** p, size_t n, bool host) {
  int d = current_device();
  if (!host) {
    if (const int code = lost()) return code;
    std::lock_guard<std::mutex> lock(state().mutex);
    if (state().used[d] + n > device_memory()) {
      last_error = "simcann: out of device memory";
      return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
  }
  size_t sz = (n + 4095) & ~(size_t)4095;
  if (!sz) sz = 4096;
  std::unique_lock<std::mutex> lock(state().mutex);
  void* q = host || !strict() ? nullptr : take_addresses(sz);
  if (!host && strict() && !q) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  void* m = mmap(q ? alias(q) : nullptr, sz, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (q ? MAP_FIXED : 0), -1, 0);
  if (m == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  // What was never written reads as NaN, or -1. Larger blocks stay zeros, to take no memory before they are used.
  constexpr size_t kFilled = static_cast<size_t>(64) << 20;
  if (!host && sz <= kFilled) memset(m, 0xFF, sz);
  if (!q) q = m;
  state().allocations[(uintptr_t)q] = {sz, d, host};
  if (!host) state().used[d] += sz;
  *p = q;
  trace_event("allocate", text("\"bytes\":%zu,\"host\":%s", n, host ? "true" : "false"));
  return ACL_SUCCESS;
}
static aclError dev_free(void* p) {
  if (!p) return ACL_SUCCESS;
  std::lock_guard<std::mutex> lock(state().mutex);
  auto it = state().allocations.find((uintptr_t)p);
  if (it == state().allocations.end()) return ACL_ERROR_INVALID_PARAM;
  if (alias(p) != p)
    mmap(alias(p), it->second.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
  else
    munmap(p, it->second.size);
  if (!it->second.host) state().used[it->second.device] -= it->second.size;
  state().allocations.erase(it);
  return ACL_SUCCESS;
}
aclError aclrtMalloc(void** p, size_t n, aclrtMemMallocPolicy) { return dev_malloc(p, n, false); }
aclError aclrtMallocAlign32(void** p, size_t n, aclrtMemMallocPolicy) { return dev_malloc(p, n, false); }
aclError aclrtMallocCached(void** p, size_t n, aclrtMemMallocPolicy) { return dev_malloc(p, n, false); }
aclError aclrtMallocWithCfg(void** p, size_t n, aclrtMemMallocPolicy, aclrtMallocConfig*) {
  return dev_malloc(p, n, false);
}
aclError aclrtFree(void* p) { return dev_free(p); }
aclError aclrtMallocHost(void** p, size_t n) { return dev_malloc(p, n, true); }
aclError aclrtMallocHostWithCfg(void** p, uint64_t n, aclrtMallocConfig*) { return dev_malloc(p, n, true); }
aclError aclrtFreeHost(void* p) { return dev_free(p); }
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* f, size_t* t) {
  std::lock_guard<std::mutex> lock(state().mutex);
  *t = device_memory();
  *f = device_memory() - state().used[current_device()];
  return ACL_SUCCESS;
}
aclError aclrtGetMemUsageInfo(DeviceId, aclrtMemUsageInfo*, size_t, size_t* n) {
  *n = 0;
  return ACL_SUCCESS;
}
/// A pointer that is not what the kind says faults on hardware, or copies something else.
static bool kind_fits(const void* to, const void* from, aclrtMemcpyKind kind) {
  bool to_device = on_device(to), from_device = on_device(from);
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
      return !to_device && !from_device;
    case ACL_MEMCPY_HOST_TO_DEVICE:
      return to_device && !from_device;
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return !to_device && from_device;
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
      return to_device && from_device;
    default:
      return true;
  }
}
static aclError copy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (const int code = lost()) return code;
  if (bytes > room || (bytes && strict() && !kind_fits(to, from, kind))) {
    last_error = bytes > room ? "simcann: copy of more bytes than there is room for"
                              : "simcann: a pointer of the copy is not where its kind says";
    return ACL_ERROR_INVALID_PARAM;
  }
  memmove(alias(to), alias(from), bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemcpy(void* d, size_t dm, const void* s, size_t n, aclrtMemcpyKind k) {
  if (auto error = forbidden_in_capture("a copy that the host waits for")) return error;
  trace_copy(d, s, n, false, 0);
  return copy(d, dm, s, n, k);
}
aclError aclrtMemcpyAsync(void* d, size_t dm, const void* s, size_t n, aclrtMemcpyKind k, aclrtStream st) {
  std::function<int()> f = [=] {
    trace_copy(d, s, n, true, simcann_stream_id(st));
    return copy(d, dm, s, n, k);
  };
  if (simcann_capture(st, "copy", &f)) return ACL_SUCCESS;
  trace_copy(d, s, n, true, simcann_stream_id(st));
  return copy(d, dm, s, n, k);
}
aclError aclrtMemcpyAsyncWithCondition(void* d, size_t dm, const void* s, size_t n, aclrtMemcpyKind k,
                                       aclrtStream stream) {
  return aclrtMemcpyAsync(d, dm, s, n, k, stream);
}
aclError aclrtMemcpy2d(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, aclrtMemcpyKind) {
  for (size_t i = 0; i < h; i++) memmove((char*)alias(d) + i * dp, (const char*)alias(s) + i * sp, w);
  return ACL_SUCCESS;
}
aclError aclrtMemcpy2dAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h,
                            aclrtMemcpyKind k, aclrtStream stream) {
  std::function<int()> task = [=] { return aclrtMemcpy2d(d, dp, s, sp, w, h, k); };
  return simcann_capture(stream, "copy", &task) ? ACL_SUCCESS : task();
}
aclError aclrtMemcpyBatch(void** d, size_t* dm, void** s, size_t* n, size_t b, aclrtMemcpyBatchAttr*, size_t*,
                          size_t, size_t* fail) {
  for (size_t i = 0; i < b; i++)
    if (aclrtMemcpy(d[i], dm[i], s[i], n[i], ACL_MEMCPY_DEFAULT)) {
      if (fail) *fail = i;
      return ACL_ERROR_INVALID_PARAM;
    }
  return ACL_SUCCESS;
}
aclError aclrtMemcpyBatchAsync(void** d, size_t* dm, void** s, size_t* n, size_t b, aclrtMemcpyBatchAttr* a,
                               size_t* ai, size_t na, size_t* fail, aclrtStream) {
  return aclrtMemcpyBatch(d, dm, s, n, b, a, ai, na, fail);
}
aclError aclrtMemset(void* p, size_t mx, int32_t v, size_t n) {
  if (const int code = lost()) return code;
  if (n > mx) return ACL_ERROR_INVALID_PARAM;
  memset(alias(p), v, n);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* p, size_t mx, int32_t v, size_t n, aclrtStream st) {
  std::function<int()> f = [=] {
    memset(alias(p), v, n);
    return 0;
  };
  if (n > mx) return ACL_ERROR_INVALID_PARAM;
  if (!simcann_capture(st, "fill", &f)) f();
  return ACL_SUCCESS;
}
aclError aclrtCmoAsync(void*, size_t, aclrtCmoType, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtPointerGetAttributes(const void* p, aclrtPtrAttributes* a) {
  memset(a, 0, sizeof *a);
  a->pageSize = 4096;
  a->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  std::lock_guard<std::mutex> lock(state().mutex);
  if (auto* found = allocation_of(p)) {
    a->location.id = found->device;
    a->location.type = found->host ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_DEVICE;
  }
  return ACL_SUCCESS;
}
aclError aclrtHostRegister(void* p, uint64_t n, aclrtHostRegisterType, void** d) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().allocations[(uintptr_t)p] = {n, current_device(), true};
  if (d) *d = p;
  return ACL_SUCCESS;
}
aclError aclrtHostRegisterV2(void* p, uint64_t n, uint32_t) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().allocations[(uintptr_t)p] = {n, current_device(), true};
  return ACL_SUCCESS;
}
aclError aclrtHostUnregister(void* p) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().allocations.erase((uintptr_t)p);
  return ACL_SUCCESS;
}
}
