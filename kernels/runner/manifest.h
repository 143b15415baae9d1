// What a folder says of itself, checked: every index is within what it points to, and every length has a program.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runner/json.h"
#include "runner/sampling.h"

namespace liteboost::runner {

// A tensor that is kept from one run to the next. Where `dim` is one of its dimensions it grows along that, in memory
// of `sizes`.
struct Entry {
  std::string name, dtype;
  int64_t dim = -1;
  std::vector<int64_t> sizes;
};

// What a number given to a run is: a size of what is kept or of an argument, how long memory is, how many tokens were
// seen and `value` more, or always `value`.
struct Number {
  enum class Kind { length, argument, capacity, seen, constant } kind = Kind::constant;
  int64_t entry = 0, dim = 0, value = 0;
  std::string argument;
};

struct ProgramFile {
  std::string file;
  std::vector<std::string> constants, arguments;
  std::vector<int64_t> kept, appended, returned;
  std::vector<Number> numbers;
  int64_t results = 0, logits = 0;
};

// For lengths from `first` to `last`.
struct Range {
  int64_t first = 0, last = 0, program = 0;
};

struct Manifest {
  std::string torch, schemas, model;
  int64_t longest = 0, vocabulary = 0;
  std::vector<Entry> cache;
  std::vector<ProgramFile> programs;
  std::vector<Range> prompts, steps;
  std::vector<std::string> operators;
  std::vector<int64_t> stops;
  Sampling sampling;
  // Of tensors that lie in the file with other dimensions first: which one each of theirs is there.
  std::map<std::string, std::vector<int64_t>> transposed;

  static Manifest parse(const Json& text);
};

}  // namespace liteboost::runner
