// State of the simulated runtime shared by its files: devices, memory and streams.
#pragma once
#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

// The headers that torch_npu 2.9 brings are older than this error and aclrtErrorInfo.
#ifdef ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD
#define SIM_HAS_ERROR_INFO 1
#else
#define ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD 107038
#endif

namespace sim {

inline int env_int(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}
inline const char* env_text(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

struct Event;
/// What a stream was given to do. Waits, resets and records are of events that were made with ACL_EVENT_EXTERNAL.
struct Task {
  enum class Kind { work, wait, reset, record } kind = Kind::work;
  std::string what;
  std::function<int()> run;
  Event* event = nullptr;
  int group = -1;  // the task group it belongs to, or -1
};
struct Stream;
struct Graph {
  uint32_t id;
  aclmdlRICaptureMode mode;
  std::thread::id thread;  // that began the capture
  Stream* origin;          // on which it was begun
  std::vector<Task> tasks;
  int groups = 0;
  int open_group = -1;
  std::string broken;    // what was done during the capture that it forbids
  bool running = false;  // a replay has begun and has not come to its end
};
/// Tasks of a graph that are exchanged together.
struct TaskGroup {
  Graph* graph;
  int number;
};
struct Stream {
  int id;
  int device;
  uint32_t overflow = 0;
  uint64_t failure_mode = 0;
  Graph* capturing = nullptr;  // work issued while set is recorded in the graph, not run
  size_t captured = 0,
         joined = 0;  // tasks of it that were recorded, and after how many another stream waits for it
  TaskGroup* updating = nullptr;  // work issued while set takes the place of that of the group
  std::vector<Task> update;
  Graph* replaying = nullptr;  // waits for an event at `next`
  size_t next = 0;
  std::deque<std::function<int()>> waiting;  // behind that replay
};
struct Event {
  uint64_t ns = 0;
  uint32_t flag = 0;
  bool recorded = false;
  Graph* capturing =
      nullptr;             // a capturing stream that records an event draws in the stream that waits for it
  Stream* from = nullptr;  // that stream
  size_t position = 0;     // tasks that it had recorded by then
  bool external() const { return flag & ACL_EVENT_EXTERNAL; }
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

/// 0, or the error of a call that must not be made while a stream is captured, which ends that capture.
/// `stream`: one that the call waits for.
aclError forbidden_in_capture(const char* what, Stream* stream = nullptr);
/// 0, or the error of waiting for `stream`, or for all where it is null: of a device, or because it would never end.
aclError error_of_wait(Stream* stream);
/// Notes a task of an external event for `stream`; false when the caller must do it at once.
bool note_event(Stream* stream, Task::Kind kind, Event* event);
/// Draws `stream` into the capture of the stream that recorded `event`, which it waits for from here on.
void join_capture(Stream* stream, const Event* event);
/// Goes on with the replays that waited for an event.
void resume();

/// Formats as printf does.
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
/// Writes a line {"event": name, fields...} while a trace is written.
void trace_event(const char* name, const std::string& fields);

}  // namespace sim

extern "C" {
bool simcann_tracing();
int simcann_stream_id(aclrtStream stream);
}
