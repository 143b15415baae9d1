// The instructions of a program (see program.h).
#pragma once

#include "program/program.h"

namespace liteboost::program {

// An argument: a constant, a slot, or a list of those.
struct Value {
  enum class Kind { constant, slot, wrapped, tensors, optional_tensors, numbers } kind = Kind::constant;
  c10::IValue constant;
  int64_t slot = 0;
  std::vector<Value> items;

  c10::IValue read(const Slots& slots) const;
};

// A number where a tensor is asked for, as Python hands one over: it has no say in the result's dtype.
at::Tensor wrapped(const c10::Scalar& number);

struct Operator final : Instruction {
  c10::OperatorHandle handle;
  std::vector<Value> arguments;
  std::vector<int64_t> results;
  explicit Operator(c10::OperatorHandle which) : handle(std::move(which)) {}
  void run(Slots& slots) const override;
  Traffic traffic(const Slots& slots) const override;

 private:
  bool gave_views(const Slots& slots) const;
};

struct Alias final : Instruction {
  int64_t source = 0, offset = 0, result = 0;
  int64_t extent = 0;  // elements that the source must have
  std::vector<int64_t> sizes, strides;
  void run(Slots& slots) const override;
};

// The run is not what was recorded: it stops, and gives nothing. `why` is noted for stopped_by().
struct Stopped {
  explicit Stopped(Why why);
};

// A tensor given to a run is of the kind it was; -1 for sizes and strides that may be any.
struct Like final : Instruction {
  int64_t slot = 0;
  at::ScalarType dtype = at::kFloat;
  c10::Device device = at::kCPU;
  std::vector<int64_t> sizes, strides;
  void run(Slots& slots) const override;
};

struct Size final : Instruction {
  int64_t slot = 0, dim = 0, number = 0;
  void run(Slots& slots) const override;
};

struct KVBuffer final : Instruction {
  int64_t held = 0, memory = 0, dim = 0, end = 0, result = 0;
  Value count;
  void run(Slots& slots) const override;
};

struct Expect final : Instruction {
  int64_t slot = 0;
  bool value = false;
  void run(Slots& slots) const override;
};

struct Append final : Instruction {
  int64_t memory = 0, added = 0, dim = 0, result = 0;
  Value start, length;
  void run(Slots& slots) const override;
  Traffic traffic(const Slots& slots) const override;
};

// Where a token goes in two memories that are written alike, as a tensor: one for all that are written so in a run.
// Nothing where the two differ. In slots that are kept for the next run it is written again where it lies.
struct Places final : Instruction {
  struct Of {
    int64_t memory = 0;
    Value start, length;
  };
  Of keys, values;
  int64_t former = -1, result = 0;
  void run(Slots& slots) const override;
};

// Two appends in one operator, or one by one where there are no places.
struct Both final : Instruction {
  Append keys, values;
  int64_t places = 0;
  c10::TypedOperatorHandle<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&)>
      append;
  explicit Both(decltype(append) with) : append(with) {}
  void run(Slots& slots) const override;
  Traffic traffic(const Slots& slots) const override;
};

// What of a memory is written.
struct Part final : Instruction {
  int64_t memory = 0, count = 0, dim = 0, result = 0;
  Value start, length;
  void run(Slots& slots) const override;
};

struct Item final : Instruction {
  int64_t list = 0, index = 0, result = 0;
  void run(Slots& slots) const override;
};

struct Arithmetic final : Instruction {
  enum class Kind { add, sub, mul, floordiv, max, min } kind = Kind::add;
  Value left, right;
  int64_t result = 0;
  void run(Slots& slots) const override;
};

struct Drop final : Instruction {
  std::vector<int64_t> which;
  void run(Slots& slots) const override;
};

}  // namespace liteboost::program
