#include "program/program.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <map>
#include <mutex>

#include "common/checks.h"
#include "program/instructions.h"
#include "program/profile.h"

namespace liteboost::program {

Kind::Kind(const at::Tensor& tensor)
    : keys(tensor.key_set()),
      dtype(tensor.scalar_type()),
      device(tensor.device()),
      sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()) {}

bool Kind::is_of(const at::Tensor& tensor) const {
  return tensor.key_set() == keys && tensor.scalar_type() == dtype && tensor.device() == device &&
         tensor.sizes() == at::IntArrayRef(sizes) && tensor.strides() == at::IntArrayRef(strides);
}

namespace {
thread_local Why last_stop = Why::decision;
}  // namespace

Stopped::Stopped(Why why) { last_stop = why; }

bool fill(Slots& slots, const Program& program, const std::vector<at::Tensor>& inputs,
          const std::vector<int64_t>& numbers) {
  constexpr const char* op = "program";
  LB_CHECK_VALUE(static_cast<int64_t>(inputs.size()) == program.inputs, op, "takes ", program.inputs,
                 " tensors, got ", inputs.size());
  LB_CHECK_VALUE(static_cast<int64_t>(numbers.size()) == program.numbers, op, "takes ", program.numbers,
                 " numbers, got ", numbers.size());
  for (size_t i = 0; i < program.constants.size(); ++i) {
    if (!program.kinds[i].is_of(program.constants[i])) {
      last_stop = Why::constant;
      return false;
    }
  }
  slots.resize(static_cast<size_t>(program.slots));
  size_t next = 0;
  for (const at::Tensor& constant : program.constants) slots[next++] = constant;
  for (const at::Tensor& input : inputs) slots[next++] = input;
  for (const int64_t number : numbers) slots[next++] = number;
  return true;
}

std::vector<at::Tensor> run(const Program& program, const std::vector<at::Tensor>& inputs,
                            const std::vector<int64_t>& numbers) {
  // No op here has a backward; the caller has seen that none is wanted. What autocast casts was recorded with its casts.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  Slots slots;
  if (!fill(slots, program, inputs, numbers)) return {};
  try {
    if (is_profiled()) {
      run_profiled(program, slots);
    } else {
      for (const auto& instruction : program.instructions) instruction->run(slots);
    }
  } catch (const Stopped&) {
    return {};
  }
  std::vector<at::Tensor> results;
  results.reserve(program.returned.size());
  for (const int64_t slot : program.returned) results.push_back(slots[slot].toTensor());
  return results;
}

namespace {

struct Programs {
  std::mutex mutex;
  int64_t next = 0;
  std::map<int64_t, std::shared_ptr<const Program>> loaded;
};

// Never destroyed: it holds tensors, and torch may be gone before it at the end of the process.
Programs& programs() {
  static Programs* instance = new Programs;
  return *instance;
}

int64_t load(const std::string& text, std::vector<at::Tensor> constants) {
  auto made = parse(text, std::move(constants));
  Programs& all = programs();
  const std::lock_guard lock(all.mutex);
  all.loaded[++all.next] = std::move(made);
  return all.next;
}

std::vector<at::Tensor> run_loaded(int64_t which, std::vector<at::Tensor> inputs,
                                   std::vector<int64_t> numbers) {
  return run(*loaded(which), inputs, numbers);
}

// Of this thread's last run that stopped.
int64_t stopped_by() { return static_cast<int64_t>(last_stop); }

void unload(int64_t which) {
  Programs& all = programs();
  const std::lock_guard lock(all.mutex);
  all.loaded.erase(which);
}

}  // namespace

std::shared_ptr<const Program> loaded(int64_t which) {
  Programs& all = programs();
  const std::lock_guard lock(all.mutex);
  const auto found = all.loaded.find(which);
  LB_CHECK_VALUE(found != all.loaded.end(), "program", "no program ", which, " is loaded");
  return found->second;
}

}  // namespace liteboost::program

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_program_load(str text, Tensor[] constants) -> int", &liteboost::program::load);
  m.def("_program_run(int program, Tensor[] inputs, int[] numbers) -> Tensor[]",
        &liteboost::program::run_loaded);
  m.def("_program_stopped_by() -> int", &liteboost::program::stopped_by);
  m.def("_program_unload(int program) -> ()", &liteboost::program::unload);
}
