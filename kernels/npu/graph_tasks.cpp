#include "npu/graph_tasks.h"

#include <ATen/ops/empty.h>
#include <acl/acl.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "npu/aclnn.h"
#include "torch_npu/csrc/core/npu/NPUGraph.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace liteboost::npu {
namespace {

void check(aclError status, const char* what) {
  TORCH_CHECK(status == ACL_SUCCESS, "liteboost: ", what, " of a captured step failed with ", status, ": ",
              aclGetRecentErrMsg() != nullptr ? aclGetRecentErrMsg() : "");
}

struct Task {
  aclrtEvent event = nullptr;
  c10_npu::NPUTaskGroupHandle group{};
  at::Tensor out, lse;

  Task() { check(aclrtCreateEventExWithFlag(&event, ACL_EVENT_EXTERNAL), "making an event"); }
  Task(const Task&) = delete;
  ~Task() { aclrtDestroyEvent(event); }
};

struct Tasks {
  std::vector<std::unique_ptr<Task>> all;
  std::vector<c10::DataPtr> workspaces;             // the last one counts; a replay may still use the others
  uint64_t workspace_size = 0;                      // of that
  std::map<std::vector<int64_t>, at::Tensor> made;  // what the launches of the last renewal read
  std::vector<at::Tensor> filled;                   // in every renewal
  std::map<std::vector<int64_t>, size_t> asked;     // key of the capture -> which of `filled`
  std::vector<size_t> filled_of;                    // which of `filled` each call of the capture was given
  std::vector<bool> is_filled;                      // in this renewal
};

struct Registry {
  std::mutex mutex;
  int64_t next = 0;
  std::map<int64_t, std::shared_ptr<Tasks>> made;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: torch_npu may be gone when a program ends
  return *instance;
}

enum class Mode { none, rehearse, capture, renew };
thread_local Mode mode = Mode::none;
thread_local std::shared_ptr<Tasks> tasks;
thread_local size_t next_task = 0, next_filled = 0;
thread_local bool is_inside = false;

struct Inside {
  Inside() { is_inside = true; }
  Inside(const Inside&) = delete;
  ~Inside() { is_inside = false; }
};

void capture_task(const at::Tensor& out, const at::Tensor& lse,
                  const std::function<void(const at::Tensor&, const at::Tensor&)>& launch) {
  const c10_npu::NPUStream stream = c10_npu::getCurrentNPUStream();
  auto task = std::make_unique<Task>();
  task->out = out;
  task->lse = lse;
  check(aclrtStreamWaitEvent(stream.stream(), task->event), "waiting for an event");
  check(aclrtResetEvent(task->event, stream.stream()), "resetting an event");
  c10_npu::graph_task_group_begin(stream);
  launch(out, lse);
  task->group = c10_npu::graph_task_group_end(stream);
  tasks->all.push_back(std::move(task));
}

void renew_task(const std::function<void(const at::Tensor&, const at::Tensor&)>& launch) {
  TORCH_CHECK(next_task < tasks->all.size(), "liteboost: a captured step has but ", next_task,
              " launches to renew");
  const Task& task = *tasks->all[next_task++];
  const c10_npu::NPUStream stream = c10_npu::getCurrentNPUStream();
  c10_npu::graph_task_update_begin(stream, task.group);
  {
    const Inside inside;
    launch(task.out, task.lse);
  }
  c10_npu::graph_task_update_end(stream);
  check(aclrtRecordEvent(task.event, stream.stream()), "recording an event");
}

int64_t make() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.made[++all.next] = std::make_shared<Tasks>();
  return all.next;
}

void begin(int64_t which, bool renews) {
  TORCH_CHECK(mode == Mode::none, "liteboost: this thread captures or renews a step already");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  tasks = all.made.at(which);
  tasks->made.clear();
  tasks->is_filled.assign(tasks->filled.size(), false);
  mode = renews ? Mode::renew : Mode::capture;
  next_task = next_filled = 0;
}

int64_t end() {
  const bool is_all = mode != Mode::renew || next_task == tasks->all.size();
  const auto count = static_cast<int64_t>(tasks->all.size());
  mode = Mode::none;
  tasks.reset();
  TORCH_CHECK(is_all, "liteboost: a captured step has ", count, " launches to renew; ", next_task, " were");
  return count;
}

void abandon() {
  mode = Mode::none;
  tasks.reset();
}

void rehearse(bool begins) {
  TORCH_CHECK(!is_renewable(), "liteboost: this thread captures or renews a step");
  mode = begins ? Mode::rehearse : Mode::none;
}

void forget(int64_t which) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.made.erase(which);
}

}  // namespace

bool is_renewable() { return mode == Mode::capture || mode == Mode::renew; }

bool tells_lengths() { return mode != Mode::none; }

void launch_renewable(const at::Tensor& out, const at::Tensor& lse,
                      const std::function<void(const at::Tensor&, const at::Tensor&)>& launch) {
  switch (mode) {
    case Mode::none:
    case Mode::rehearse:
      launch(out, lse);
      return;
    case Mode::capture:
      capture_task(out, lse, launch);
      return;
    case Mode::renew:
      renew_task(launch);
  }
}

at::Tensor made_for_renewal(const std::vector<int64_t>& key, const at::IntArrayRef& sizes,
                            const at::TensorOptions& options, const std::function<at::Tensor()>& make) {
  if (!is_renewable()) return make();
  if (mode == Mode::capture) return at::empty(sizes, options);
  const auto found = tasks->made.find(key);
  if (found != tasks->made.end()) return found->second;
  return tasks->made.emplace(key, make()).first->second;
}

at::Tensor filled_in_renewal(const std::vector<int64_t>& key, const at::IntArrayRef& sizes,
                             const at::TensorOptions& options, const std::function<at::Tensor()>& make) {
  if (!is_renewable()) return make();
  if (mode == Mode::capture) {
    const auto [found, is_new] = tasks->asked.try_emplace(key, tasks->filled.size());
    if (is_new) tasks->filled.push_back(at::empty(sizes, options));
    tasks->filled_of.push_back(found->second);
    return tasks->filled[found->second];
  }
  TORCH_CHECK(next_filled < tasks->filled_of.size(), "liteboost: a captured step reads but ", next_filled,
              " tensors that are filled");
  const size_t which = tasks->filled_of[next_filled++];
  if (!tasks->is_filled[which]) tasks->filled[which].copy_(make());
  tasks->is_filled[which] = true;
  return tasks->filled[which];
}

bool is_renewing() { return mode == Mode::renew; }

void check_reads_in_place(bool reads_in_place, const char* what) {
  TORCH_CHECK(!is_renewable() || reads_in_place, "liteboost: ", what, " are copied for each token");
}

void check_reference(const char* op, const char* why) {
  TORCH_CHECK(!is_renewable(), "liteboost: the reference of ", op, " would be called for each token: ", why);
}

void check_launch(const char* name) {
  TORCH_CHECK(mode != Mode::renew || is_inside, "liteboost: ", name,
              " is launched where a captured step is renewed; its arguments change from step to step");
}

void* workspace_of_renewed(uint64_t size) {
  if (mode != Mode::renew || size == 0) return nullptr;
  if (tasks->workspace_size < size) {
    // No tensor: in torch's deterministic mode a new one is filled, by a launch that the task group does not have.
    tasks->workspaces.push_back(c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(2 * size));
    tasks->workspace_size = 2 * size;
  }
  return tasks->workspaces.back().get();
}

namespace {
[[maybe_unused]] const bool are_set = [] {
  launch_hooks = {&check_launch, &is_renewable, &workspace_of_renewed};
  return true;
}();
}  // namespace

}  // namespace liteboost::npu

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_tasks_make() -> int", &liteboost::npu::make);
  m.def("_npu_tasks_begin(int tasks, bool renews) -> ()", &liteboost::npu::begin);
  m.def("_npu_tasks_end() -> int", &liteboost::npu::end);
  m.def("_npu_tasks_abandon() -> ()", &liteboost::npu::abandon);
  m.def("_npu_tasks_rehearse(bool begins) -> ()", &liteboost::npu::rehearse);
  m.def("_npu_tasks_forget(int tasks) -> ()", &liteboost::npu::forget);
}
