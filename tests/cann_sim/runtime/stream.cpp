// Streams and events. Everything is synchronous: work runs when it is issued.
#include <unistd.h>

#include <atomic>

#include "state.h"

using namespace sim;

namespace {
std::atomic<int> next_stream{1};
}

extern "C" {
bool simcann_capture(aclrtStream, const char*, std::function<int()>*);
aclError aclrtCreateStream(aclrtStream* s) {
  if (const int code = lost()) return code;
  auto* x = new Stream{next_stream++, current_device()};
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().streams.insert(x);
  }
  *s = x;
  return ACL_SUCCESS;
}
aclError aclrtCreateStreamWithConfig(aclrtStream* s, uint32_t, uint32_t) { return aclrtCreateStream(s); }
aclError aclrtDestroyStream(aclrtStream s) {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().streams.erase((Stream*)s);
  }
  delete (Stream*)s;
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream s) { return aclrtDestroyStream(s); }
int simcann_stream_id(aclrtStream s) { return s ? static_cast<Stream*>(s)->id : 0; }
aclError aclrtSynchronizeStream(aclrtStream s) {
  if (const int code = lost()) return code;
  if (auto error = forbidden_in_capture("a wait for a stream", (Stream*)s)) return error;
  trace_event("synchronize", text("\"what\":\"stream\",\"stream\":%d", simcann_stream_id(s)));
  return error_of_wait((Stream*)s);
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream s, int32_t) { return aclrtSynchronizeStream(s); }
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* st) {
  if (const int code = lost()) return code;
  *st = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream s, int32_t* id) {
  *id = s ? ((Stream*)s)->id : 0;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream s, uint64_t m) {
  if (s) ((Stream*)s)->failure_mode = m;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream s, uint32_t f) {
  if (s) ((Stream*)s)->overflow = f;
  return ACL_SUCCESS;
}
aclError aclrtGetStreamOverflowSwitch(aclrtStream s, uint32_t* f) {
  *f = s ? ((Stream*)s)->overflow : 0;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
aclError aclrtCreateEvent(aclrtEvent* e) {
  *e = new Event;
  return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* e, uint32_t f) {
  auto* x = new Event;
  x->flag = f;
  *e = x;
  return ACL_SUCCESS;
}
aclError aclrtCreateEventExWithFlag(aclrtEvent* e, uint32_t f) { return aclrtCreateEventWithFlag(e, f); }
aclError aclrtDestroyEvent(aclrtEvent e) {
  delete (Event*)e;
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent e, aclrtStream s) {
  auto* event = (Event*)e;
  if (event->external()) {
    event->ns = now_ns();
    if (note_event((Stream*)s, Task::Kind::record, event)) return ACL_SUCCESS;
    event->recorded = true;
    resume();
    return ACL_SUCCESS;
  }
  event->from = (Stream*)s;
  event->capturing = s ? event->from->capturing : nullptr;
  event->position = s ? event->from->captured : 0;
  event->ns = now_ns();
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent e, aclrtStream s) {
  auto* event = (Event*)e;
  if (event->external() && !note_event((Stream*)s, Task::Kind::reset, event)) event->recorded = false;
  return ACL_SUCCESS;
}
aclError aclrtStreamWaitEvent(aclrtStream s, aclrtEvent e) {
  auto* event = (Event*)e;
  if (event->external()) {
    if (note_event((Stream*)s, Task::Kind::wait, event) || event->recorded) return ACL_SUCCESS;
    last_error = "simcann: a stream waits for an external event that nobody has recorded";
    return ACL_ERROR_INVALID_PARAM;
  }
  if (s && event->capturing) join_capture((Stream*)s, event);
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeEvent(aclrtEvent) {
  if (const int code = lost()) return code;
  if (auto error = forbidden_in_capture("a wait for an event")) return error;
  trace_event("synchronize", "\"what\":\"event\"");
  return error_of_wait(nullptr);
}
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* s) {
  *s = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* s) {
  *s = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* ms, aclrtEvent a, aclrtEvent b) {
  *ms = (float)((double)(((Event*)b)->ns - ((Event*)a)->ns) / 1e6);
  return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent e, uint64_t* t) {
  *t = ((Event*)e)->ns / 1000;
  return ACL_SUCCESS;
}
aclError aclrtProcessReport(int32_t) {
  usleep(1000);
  return ACL_SUCCESS;
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtLaunchCallback(aclrtCallback fn, void* u, aclrtCallbackBlockType, aclrtStream s) {
  if (s && ((Stream*)s)->capturing) return forbidden_in_capture("a callback", (Stream*)s);
  fn(u);
  return ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream s, void (*fn)(void*), void* a) {
  std::function<int()> task = [=] {
    fn(a);
    return 0;
  };
  if (!simcann_capture(s, "host function", &task)) task();
  return ACL_SUCCESS;
}
aclError aclrtValueWrite(void* p, uint64_t v, uint32_t, aclrtStream) {
  __atomic_store_n((uint64_t*)alias(p), v, __ATOMIC_SEQ_CST);
  return ACL_SUCCESS;
}
aclError aclrtValueWait(void* p, uint64_t v, uint32_t, aclrtStream) {
  while (__atomic_load_n((uint64_t*)alias(p), __ATOMIC_SEQ_CST) < v) usleep(50);
  return ACL_SUCCESS;
}
}
