#include "program/profile.h"

#include <ATen/core/List.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <tuple>

#include "common/checks.h"

namespace liteboost::program {
namespace {

// As many as a run of a large model has, a thousand times over.
constexpr size_t kMostEvents = size_t{1} << 22;

struct Event {
  std::string name;
  Instruction::Traffic traffic;
  int64_t run = 0, begin = 0, end = 0;
};

std::atomic<bool> profiled{false};
std::mutex mutex;
std::vector<Event> events;
int64_t runs = 0;

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void begin_profile() {
  const std::lock_guard lock(mutex);
  events.clear();
  runs = 0;
  profiled.store(true, std::memory_order_relaxed);
}

// Names and largest operands of the instructions since begin_profile(), in their order within a run, and for each the
// run's number, below zero where the run stopped or raised, the nanoseconds of the steady clock at its begin and its end,
// and bytes.
std::tuple<c10::List<std::string>, c10::List<std::string>, c10::List<int64_t>> end_profile() {
  const std::lock_guard lock(mutex);
  LB_CHECK_VALUE(profiled.load(std::memory_order_relaxed), "program", "no profile was begun");
  profiled.store(false, std::memory_order_relaxed);
  c10::List<std::string> names, operands;
  c10::List<int64_t> numbers;
  for (Event& event : events) {
    names.push_back(std::move(event.name));
    const Instruction::Traffic& moved = event.traffic;
    const bool is_read = moved.dtype != at::ScalarType::Undefined;
    operands.push_back(is_read ? c10::str(moved.dtype, " ", at::IntArrayRef(moved.sizes)) : std::string());
    for (const int64_t number : {event.run, event.begin, event.end, moved.bytes}) numbers.push_back(number);
  }
  events = {};
  return {std::move(names), std::move(operands), std::move(numbers)};
}

// What a run has done, unless the profile has ended meanwhile.
void note(std::vector<Event>& taken, bool is_whole) {
  const std::lock_guard lock(mutex);
  if (!profiled.load(std::memory_order_relaxed)) return;
  ++runs;
  for (Event& event : taken) {
    if (events.size() == kMostEvents) return;
    event.run = is_whole ? runs : -runs;
    events.push_back(std::move(event));
  }
}

void run_noted(const Program& program, Slots& slots, std::vector<Event>& taken) {
  for (const auto& instruction : program.instructions) {
    Event event;
    event.name = instruction->name;
    event.begin = nanoseconds();
    instruction->run(slots);
    event.end = nanoseconds();
    event.traffic = instruction->traffic(slots);
    taken.push_back(std::move(event));
  }
}

}  // namespace

bool is_profiled() { return profiled.load(std::memory_order_relaxed); }

void run_profiled(const Program& program, Slots& slots) {
  std::vector<Event> taken;
  taken.reserve(program.instructions.size());
  try {
    run_noted(program, slots, taken);
  } catch (...) {
    note(taken, false);
    throw;
  }
  note(taken, true);
}

}  // namespace liteboost::program

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_program_begin_profile() -> ()", &liteboost::program::begin_profile);
  m.def("_program_end_profile() -> (str[] names, str[] operands, int[] numbers)",
        &liteboost::program::end_profile);
}
