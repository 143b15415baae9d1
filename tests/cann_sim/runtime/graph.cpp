// Graph capture: work issued on a capturing stream is recorded, and run again by every replay. A replay stops at a wait
// for an event that nobody has recorded, and what is issued behind it on its stream waits, too.
#include <algorithm>
#include <atomic>
#include <cstdio>

#include "state.h"

extern "C" void simcann_lose_device(int, const char*);

using namespace sim;

namespace {

thread_local int replayed = 0;
thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
std::set<TaskGroup*> groups;  // alive; guarded by the state's mutex

aclError failed(aclError code, const std::string& what) {
  last_error = "simcann: " + what;
  return code;
}

void note(Stream* s, Task task) {
  s->capturing->tasks.push_back(std::move(task));
  s->captured++;
}

bool is_behind_replay(const Stream* s) { return s->replaying || !s->waiting.empty(); }

/// A fault on the device: the rest is not run, and whoever waits is told.
void note_fault(int code) {
  if (code) simcann_lose_device(ACL_ERROR_RT_AICORE_EXCEPTION, nullptr);
}

/// Runs the tasks of the replay on `s` up to an event that is missing, or to the end.
void go_on(Stream* s) {
  Graph* graph = s->replaying;
  for (; s->next < graph->tasks.size() && !lost(); s->next++) {
    Task& task = graph->tasks[s->next];
    switch (task.kind) {
      case Task::Kind::wait:
        if (!task.event->recorded) return;
        break;
      case Task::Kind::reset:
        task.event->recorded = false;
        break;
      case Task::Kind::record:
        task.event->recorded = true;
        break;
      case Task::Kind::work:
        replayed = static_cast<int>(graph->id);
        note_fault(task.run());
        replayed = 0;
    }
  }
  s->replaying = nullptr;
  graph->running = false;
}

void go_on_with_all_of(Stream* s) {
  while (true) {
    if (s->replaying) go_on(s);
    if (s->replaying || s->waiting.empty()) return;
    auto next = std::move(s->waiting.front());
    s->waiting.pop_front();
    if (!lost()) note_fault(next());
  }
}

int begin_replay(Graph* graph, Stream* s) {
  s->replaying = graph;
  s->next = 0;
  go_on(s);
  return 0;
}

}  // namespace

namespace sim {

aclError forbidden_in_capture(const char* what, Stream* stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  for (auto* each : state().streams) {
    Graph* graph = each->capturing;
    if (!graph) continue;
    bool is_here = graph->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL ||
                   (graph->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL &&
                    graph->thread == std::this_thread::get_id());
    if (each != stream && (!is_here || thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED)) continue;
    graph->broken = what;
    return failed(each == stream ? ACL_ERROR_RT_STREAM_CAPTURED : ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                  text("%s while stream %d is captured", what, each->id));
  }
  return ACL_SUCCESS;
}

aclError error_of_wait(Stream* stream) {
  if (const int code = lost()) return code;
  std::lock_guard<std::mutex> lock(state().mutex);
  for (auto* each : state().streams)
    if ((!stream || each == stream) && each->replaying)
      return failed(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                    text("stream %d waits in graph %u for an event that nobody has recorded", each->id,
                         each->replaying->id));
  return ACL_SUCCESS;
}

void join_capture(Stream* stream, const Event* event) {
  if (!stream->capturing) stream->captured = stream->joined = 0;
  stream->capturing = event->capturing;
  if (event->from != stream) event->from->joined = std::max(event->from->joined, event->position);
}

bool note_event(Stream* s, Task::Kind kind, Event* event) {
  if (s && s->capturing) {
    note(s, {kind, "event", {}, event, s->capturing->open_group});
    return true;
  }
  if (!s || !is_behind_replay(s)) return false;
  s->waiting.push_back([=] {
    event->recorded = kind == Task::Kind::record || (kind == Task::Kind::wait && event->recorded);
    return 0;
  });
  return true;
}

void resume() {
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    streams.assign(state().streams.begin(), state().streams.end());
  }
  for (auto* each : streams) go_on_with_all_of(each);
}

}  // namespace sim

extern "C" {
/// The graph whose replay runs on this thread, or 0.
int simcann_replayed_graph() { return replayed; }
/// Whether `stream` is captured, and whether a task group is open in that capture or updated on it.
bool simcann_is_capturing(aclrtStream stream) { return stream && static_cast<Stream*>(stream)->capturing; }
bool simcann_is_in_task_group(aclrtStream stream) {
  auto* s = static_cast<Stream*>(stream);
  return s && (s->updating || (s->capturing && s->capturing->open_group >= 0));
}
/// Keeps `run` where `stream` is capturing, updates a task group or waits; false when the caller must run it now.
bool simcann_capture(aclrtStream stream, const char* what, std::function<int()>* run) {
  auto* s = static_cast<Stream*>(stream);
  if (!s) return false;
  if (s->updating) {
    s->update.push_back({Task::Kind::work, what, std::move(*run)});
    return true;
  }
  if (s->capturing) {
    note(s, {Task::Kind::work, what, std::move(*run), nullptr, s->capturing->open_group});
    return true;
  }
  if (!is_behind_replay(s)) return false;
  s->waiting.push_back(std::move(*run));
  return true;
}
aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
  static std::atomic<uint32_t> n{1};
  auto* s = static_cast<Stream*>(stream);
  if (!s || s->updating) return ACL_ERROR_INVALID_PARAM;
  if (s->capturing) return ACL_ERROR_RT_STREAM_CAPTURED;
  if (is_behind_replay(s)) return failed(ACL_ERROR_INVALID_PARAM, "capture behind a replay that waits");
  s->captured = s->joined = 0;
  s->capturing = new Graph{n++, mode, std::this_thread::get_id(), s};
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream s, aclmdlRICaptureStatus* st, aclmdlRI* m) {
  auto* g = s ? ((Stream*)s)->capturing : nullptr;
  *st = !g                  ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
        : g->broken.empty() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE
                            : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  if (m) *m = g;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream s, aclmdlRI* m) {
  auto* g = s ? ((Stream*)s)->capturing : nullptr;
  if (!g) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
  if (g->origin != s) return ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED;
  if (g->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && g->thread != std::this_thread::get_id())
    return ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD;
  std::lock_guard<std::mutex> lock(state().mutex);
  bool is_joined = true;
  for (auto* x : state().streams) {
    if (x->capturing != g) continue;
    is_joined &= x == g->origin || x->joined == x->captured;
    x->capturing = nullptr;
  }
  if (!is_joined) {
    delete g;
    *m = nullptr;
    return failed(ACL_ERROR_RT_STREAM_UNJOINED,
                  "a captured stream has work that its origin does not wait for");
  }
  if (g->open_group >= 0) g->broken = "a task group was left open";
  if (!g->broken.empty()) {
    failed(0, "the capture has failed: " + g->broken);
    delete g;
    *m = nullptr;
    return ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED;
  }
  *m = g;
  return ACL_SUCCESS;
}
aclError aclmdlRIGetId(aclmdlRI m, uint32_t* id) {
  *id = ((Graph*)m)->id;
  return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(aclmdlRI m, aclrtStream stream) {
  if (const int code = lost()) return code;
  auto* graph = static_cast<Graph*>(m);
  auto* s = static_cast<Stream*>(stream);
  if (!s) return ACL_ERROR_INVALID_PARAM;
  if (s->capturing) return failed(ACL_ERROR_RT_STREAM_CAPTURED, "a replay inside a capture");
  if (graph->running) return failed(ACL_ERROR_INVALID_PARAM, "a graph is replayed before it has ended");
  trace_event("replay", text("\"graph\":%u,\"tasks\":%zu", graph->id, graph->tasks.size()));
  graph->running = true;
  if (is_behind_replay(s)) {
    s->waiting.push_back([=] { return begin_replay(graph, s); });
  } else {
    begin_replay(graph, s);
  }
  return ACL_SUCCESS;
}
aclError aclmdlRIDestroy(aclmdlRI m) {
  auto* graph = static_cast<Graph*>(m);
  if (graph->running && !lost())
    return failed(ACL_ERROR_INVALID_PARAM, "a graph is destroyed before its replay has ended");
  std::lock_guard<std::mutex> lock(state().mutex);
  for (auto at = groups.begin(); at != groups.end();) at = (*at)->graph == graph ? groups.erase(at) : ++at;
  delete graph;
  return ACL_SUCCESS;
}
aclError aclmdlRIDebugPrint(aclmdlRI m) {
  fprintf(stderr, "[simcann] graph %u: %zu tasks\n", ((Graph*)m)->id, ((Graph*)m)->tasks.size());
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  auto* g = stream ? ((Stream*)stream)->capturing : nullptr;
  if (!g) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
  if (g->open_group >= 0) return failed(ACL_ERROR_INVALID_PARAM, "a task group in a task group");
  g->open_group = g->groups++;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp* handle) {
  auto* g = stream ? ((Stream*)stream)->capturing : nullptr;
  if (!g) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
  if (g->open_group < 0) return failed(ACL_ERROR_INVALID_PARAM, "no task group was begun");
  auto* group = new TaskGroup{g, g->open_group};
  g->open_group = -1;
  std::lock_guard<std::mutex> lock(state().mutex);
  groups.insert(group);
  *handle = (aclrtTaskGrp)group;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
  auto* s = static_cast<Stream*>(stream);
  auto* group = (TaskGroup*)handle;
  if (!s || s->capturing || s->updating || is_behind_replay(s))
    return failed(ACL_ERROR_INVALID_PARAM, "an update needs a stream of its own");
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!groups.count(group)) return failed(ACL_ERROR_INVALID_PARAM, "no such task group; is its graph gone?");
  s->updating = group;
  return ACL_SUCCESS;
}
/// The new tasks take the place of the old ones: as many, of the same operators, in the same order.
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  auto* s = static_cast<Stream*>(stream);
  if (!s || !s->updating) return failed(ACL_ERROR_INVALID_PARAM, "no update was begun");
  auto* group = s->updating;
  auto made = std::move(s->update);
  s->updating = nullptr;
  s->update.clear();
  std::vector<Task*> old;
  for (auto& task : group->graph->tasks)
    if (task.group == group->number) old.push_back(&task);
  bool fits = old.size() == made.size();
  for (size_t i = 0; fits && i < old.size(); i++) fits = old[i]->what == made[i].what;
  if (!fits) return failed(ACL_ERROR_INVALID_PARAM, "other tasks than the task group has");
  for (size_t i = 0; i < old.size(); i++) old[i]->run = std::move(made[i].run);
  trace_event("update", text("\"graph\":%u,\"tasks\":%zu", group->graph->id, old.size()));
  return ACL_SUCCESS;
}
}
