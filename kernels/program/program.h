// A recorded sequence of operators, run from C++: what a model's forward does for one more token, without Python.
//
// Slots hold values. First come the constants (parameters and buffers, held for as long as the program is), then the
// tensors and the numbers given to a run, then results. A program is text, one instruction a line:
//
//   op NAME OVERLOAD COUNT (INDEX VALUE)... -> SLOT...   an operator of the dispatcher; arguments left out have their
//                                                        defaults
//   like SLOT DTYPE DEVICE RANK SIZE... STRIDE...        stops the run unless the tensor is such; -1 for any number
//   size SLOT DIM NUMBER                                 stops it unless the size is the number in that slot
//   kv_buffer SLOT MEMORY DIM END COUNT -> START         stops it unless the tensor is a part of MEMORY along DIM, which
//                                                        is written up to END and has room for COUNT more; COUNT is a
//                                                        number or y SLOT
//   expect SLOT 0|1                                      stops it unless the tensor is so
//   alias SLOT OFFSET RANK SIZE... STRIDE... -> SLOT     another view of a contiguous tensor
//   append SLOT START LENGTH NEW DIM -> SLOT             writes NEW into SLOT behind START + LENGTH along DIM, and gives
//                                                        everything from START on
//   places MEMORY START LENGTH MEMORY START LENGTH FORMER -> PLACES
//                                                        where one more token a row goes in both memories, by kv_append;
//                                                        FORMER: what an earlier `places` gave, or -1
//   both MEMORY START LENGTH NEW MEMORY START LENGTH NEW PLACES
//                                                        two appends of one token a row along dimension 2, at PLACES
//   part MEMORY START LENGTH COUNT DIM -> SLOT           what is written of MEMORY: COUNT behind START + LENGTH
//   item SLOT INDEX -> SLOT                              an element of a list
//   add|sub|mul|floordiv|max|min VALUE VALUE -> SLOT     of numbers
//   drop SLOT...                                         lets go of what is not read again
//   return SLOT...
//
// Of a program that can be captured as a graph of a device (graph.h) it also tells
//
//   phases LETTERS                                       one for each instruction: b before every replay, g captured,
//                                                        r captured and renewed for every replay, - neither
//   statics SLOT...                                      what is made before a replay and read in it
//   fixed SLOT...                                        what must lie where it lay when it was captured
//   copied SLOT...                                       results that the next replay writes over
//
// A run that was stopped gives no tensors; nothing was changed but memory behind END.
//
// VALUE is one of: t SLOT (a tensor), y SLOT (a number), i INT, f FLOAT, b 0|1, s LENGTH:TEXT, d DEVICE, n (None),
// [ COUNT VALUE... (a list).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <string>
#include <vector>

namespace liteboost::program {

using Slots = std::vector<c10::IValue>;

struct Instruction {
  // What it has moved, and the largest tensor it has read, if any.
  struct Traffic {
    int64_t bytes = 0;
    at::ScalarType dtype = at::ScalarType::Undefined;
    c10::SmallVector<int64_t, 4> sizes;
  };
  std::string name;  // its word, or the operator's name

  virtual ~Instruction() = default;
  virtual void run(Slots& slots) const = 0;
  // Of what has just run. Nothing where only numbers and views are made.
  virtual Traffic traffic(const Slots&) const { return {}; }
};

// What a constant was when the program was made; somebody may exchange its data.
struct Kind {
  c10::DispatchKeySet keys;
  at::ScalarType dtype;
  c10::Device device;
  std::vector<int64_t> sizes, strides;

  explicit Kind(const at::Tensor& tensor);
  bool is_of(const at::Tensor& tensor) const;
};

struct Program {
  std::vector<at::Tensor> constants;
  std::vector<Kind> kinds;
  int64_t inputs = 0, numbers = 0, slots = 0;
  std::vector<std::unique_ptr<Instruction>> instructions;
  std::vector<int64_t> returned;
  std::string phases;
  std::vector<int64_t> statics, fixed, copied;
};

// Why a run stopped: in the order of STOPS in liteboost_adaptor/program/reasons.py.
enum class Why : int64_t { decision, constant, input, kv_buffer };

// Throws c10::ValueError for text that is no program.
std::shared_ptr<const Program> parse(const std::string& text, std::vector<at::Tensor> constants);

// A loaded one. Throws c10::ValueError where there is none of that number.
std::shared_ptr<const Program> loaded(int64_t which);

// Constants, inputs and numbers in the first slots. False, and nothing done, where a constant is of another kind now.
bool fill(Slots& slots, const Program& program, const std::vector<at::Tensor>& inputs,
          const std::vector<int64_t>& numbers);

std::vector<at::Tensor> run(const Program& program, const std::vector<at::Tensor>& inputs,
                            const std::vector<int64_t>& numbers);

}  // namespace liteboost::program
