#include "program/graph.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <unordered_set>

#include "common/checks.h"
#include "program/instructions.h"

namespace liteboost::program {

namespace {

at::Tensor tensor_of(const c10::IValue& value) {
  return value.isTuple() ? value.toTupleRef().elements()[0].toTensor() : value.toTensor();
}

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

}  // namespace

std::vector<const void*> Graph::addresses() const {
  std::vector<const void*> found;
  found.reserve(program->fixed.size());
  for (const int64_t slot : program->fixed) found.push_back(tensor_of(slots[slot]).const_data_ptr());
  return found;
}

Graph::Ready Graph::prepare(const std::vector<at::Tensor>& inputs, const std::vector<int64_t>& numbers) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!fill(slots, *program, inputs, numbers)) return Ready::stopped;
  try {
    for (size_t i = 0; i < program->instructions.size(); ++i) {
      if (program->phases[i] == 'b') program->instructions[i]->run(slots);
    }
  } catch (const Stopped&) {
    return Ready::stopped;
  }
  bool is_new = lay.empty();
  for (const int64_t slot : program->fixed) {
    LB_CHECK_VALUE(!slots[slot].isNone(), "graph", "keys and values are not appended alike");
  }
  statics.resize(program->statics.size());
  for (size_t i = 0; i < statics.size(); ++i) {
    const at::Tensor given = slots[program->statics[i]].toTensor();
    if (!is_like(statics[i], given)) {
      const c10::InferenceMode outside(false);  // for whichever run writes it again
      statics[i] = at::empty_strided(given.sizes(), given.strides(), given.options());
      is_new = true;
    }
    statics[i].copy_(given);
    slots[program->statics[i]] = statics[i];
  }
  return is_new || addresses() != lay ? Ready::capture : Ready::replay;
}

void Graph::capture() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  lay.clear();
  for (size_t i = 0; i < program->instructions.size(); ++i) {
    const char phase = program->phases[i];
    if (phase == 'g' || phase == 'r') program->instructions[i]->run(slots);
  }
  lay = addresses();
}

void Graph::renew() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = 0; i < program->instructions.size(); ++i) {
    if (program->phases[i] != 'r') continue;
    const auto* again = dynamic_cast<const Operator*>(program->instructions[i].get());
    LB_CHECK_VALUE(again != nullptr, "graph", "only operators can be renewed");
    // What it gives was captured, and stays where it is.
    std::vector<c10::IValue> captured;
    for (const int64_t slot : again->results) captured.push_back(slot < 0 ? c10::IValue() : slots[slot]);
    again->run(slots);
    for (size_t k = 0; k < captured.size(); ++k) {
      if (again->results[k] >= 0) slots[again->results[k]] = std::move(captured[k]);
    }
  }
}

std::vector<at::Tensor> Graph::results() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unordered_set<int64_t> shared(program->copied.begin(), program->copied.end());
  std::vector<at::Tensor> given;
  given.reserve(program->returned.size());
  for (const int64_t slot : program->returned) {
    const at::Tensor result = slots[slot].toTensor();
    given.push_back(shared.count(slot) != 0 ? result.clone() : result);
  }
  return given;
}

namespace {

struct Graphs {
  std::mutex mutex;
  int64_t next = 0;
  std::map<int64_t, std::shared_ptr<Graph>> made;
};

// Never destroyed: it holds tensors, and torch may be gone before it at the end of the process.
Graphs& graphs() {
  static Graphs* instance = new Graphs;
  return *instance;
}

std::shared_ptr<Graph> graph(int64_t which) {
  Graphs& all = graphs();
  const std::lock_guard lock(all.mutex);
  const auto found = all.made.find(which);
  LB_CHECK_VALUE(found != all.made.end(), "graph", "there is no graph ", which);
  return found->second;
}

int64_t make(int64_t of_program) {
  auto made = std::make_shared<Graph>(loaded(of_program));
  Graphs& all = graphs();
  const std::lock_guard lock(all.mutex);
  all.made[++all.next] = std::move(made);
  return all.next;
}

int64_t prepare(int64_t which, std::vector<at::Tensor> inputs, std::vector<int64_t> numbers) {
  return static_cast<int64_t>(graph(which)->prepare(inputs, numbers));
}

void capture(int64_t which) { graph(which)->capture(); }
void renew(int64_t which) { graph(which)->renew(); }
std::vector<at::Tensor> results(int64_t which) { return graph(which)->results(); }

void forget(int64_t which) {
  Graphs& all = graphs();
  const std::lock_guard lock(all.mutex);
  all.made.erase(which);
}

}  // namespace
}  // namespace liteboost::program

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_graph_make(int program) -> int", &liteboost::program::make);
  m.def("_graph_prepare(int graph, Tensor[] inputs, int[] numbers) -> int", &liteboost::program::prepare);
  m.def("_graph_capture(int graph) -> ()", &liteboost::program::capture);
  m.def("_graph_renew(int graph) -> ()", &liteboost::program::renew);
  m.def("_graph_results(int graph) -> Tensor[]", &liteboost::program::results);
  m.def("_graph_forget(int graph) -> ()", &liteboost::program::forget);
}
