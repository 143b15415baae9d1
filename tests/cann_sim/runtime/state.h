// State of the simulated runtime shared by its files: devices, memory and streams.
#pragma once
#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

inline int env_int(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}
inline const char* env_text(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

struct Graph {
  uint32_t id;
  std::vector<std::function<void()>> tasks;
};
struct Stream {
  int id;
  int device;
  uint32_t overflow = 0;
  uint64_t failure_mode = 0;
  Graph* capturing = nullptr;  // work issued while set is recorded in the graph, not run
};
struct Event {
  uint64_t ns = 0;
  uint32_t flag = 0;
  Graph* capturing =
      nullptr;  // a capturing stream that records an event draws in the stream that waits for it
};
struct Context {
  int device;
};
struct Allocation {
  size_t size;
  int device;
  bool host;
};

struct State {
  std::mutex mutex;
  std::map<int, Context*> contexts;
  std::set<Stream*> streams;
  std::map<uintptr_t, Allocation> allocations;  // device and pinned host memory, by address
  std::map<int, size_t> used;                   // bytes of device memory, by device
};
State& state();

extern thread_local int current_device_or_none;  // -1 before the thread set one
extern thread_local Context* current_context;
extern thread_local std::string last_error;

inline int current_device() { return current_device_or_none >= 0 ? current_device_or_none : 0; }
inline int device_count() { return env_int("SIMCANN_DEVICES", 2); }
inline size_t device_memory() { return static_cast<size_t>(env_int("SIMCANN_MEM_MB", 8192)) << 20; }
uint64_t now_ns();
/// What a call that reaches the device returns once the device is lost, else 0 (SIMCANN_FAIL=aclnnX@device).
int lost();

/// Strict memory: a device address lies in a window that no access is allowed to, so that host code that dereferences
/// it faults as on a real machine. The simulated device reaches the bytes through an alias at a fixed distance.
/// `alias` turns a device address into the readable one; other addresses are returned as they are.
void* alias(const void* device_address);
/// A range of the window, never used again after it is freed; null when the window is exhausted or not used.
void* take_addresses(size_t bytes);
/// Whether device addresses are in the window (SIMCANN_STRICT, 1 by default).
bool strict();

/// Formats as printf does.
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
/// Writes a line {"event": name, fields...} while a trace is written.
void trace_event(const char* name, const std::string& fields);

}  // namespace sim

extern "C" {
bool simcann_tracing();
int simcann_stream_id(aclrtStream stream);
}
