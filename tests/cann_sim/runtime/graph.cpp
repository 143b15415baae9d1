// Graph capture: work issued on a capturing stream is recorded, and run again by every replay.
#include <atomic>
#include <cstdio>

#include "state.h"

using namespace sim;

static thread_local int replayed = 0;

extern "C" {
/// The graph whose replay runs on this thread, or 0.
int simcann_replayed_graph() { return replayed; }
/// Records `task` when `stream` is capturing; false when it is not and the caller must run it.
bool simcann_capture(aclrtStream stream, std::function<void()>* task) {
  auto* s = static_cast<Stream*>(stream);
  if (!s || !s->capturing) return false;
  s->capturing->tasks.push_back(std::move(*task));
  return true;
}
aclError aclmdlRICaptureBegin(aclrtStream s, aclmdlRICaptureMode) {
  static std::atomic<uint32_t> n{1};
  if (!s || ((Stream*)s)->capturing) return ACL_ERROR_INVALID_PARAM;
  ((Stream*)s)->capturing = new Graph{n++, {}};
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream s, aclmdlRICaptureStatus* st, aclmdlRI* m) {
  auto* g = s ? ((Stream*)s)->capturing : nullptr;
  *st = (aclmdlRICaptureStatus)(g ? 1 : 0);
  if (m) *m = g;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream s, aclmdlRI* m) {
  auto* g = s ? ((Stream*)s)->capturing : nullptr;
  if (!g) return ACL_ERROR_INVALID_PARAM;
  std::lock_guard<std::mutex> lock(state().mutex);
  for (auto* x : state().streams)
    if (x->capturing == g) x->capturing = nullptr;
  *m = g;
  return ACL_SUCCESS;
}
aclError aclmdlRIGetId(aclmdlRI m, uint32_t* id) {
  *id = ((Graph*)m)->id;
  return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(aclmdlRI m, aclrtStream) {
  if (const int code = lost()) return code;
  auto* graph = static_cast<Graph*>(m);
  trace_event("replay", text("\"graph\":%u,\"tasks\":%zu", graph->id, graph->tasks.size()));
  replayed = static_cast<int>(graph->id);
  for (auto& task : graph->tasks) task();
  replayed = 0;
  return ACL_SUCCESS;
}
aclError aclmdlRIDestroy(aclmdlRI m) {
  delete (Graph*)m;
  return ACL_SUCCESS;
}
aclError aclmdlRIDebugPrint(aclmdlRI m) {
  fprintf(stderr, "[simcann] graph %u: %zu tasks\n", ((Graph*)m)->id, ((Graph*)m)->tasks.size());
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return ACL_SUCCESS; }
}
