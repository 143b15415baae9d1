// A program as a graph of a device: what is the same in every step is captured once and replayed.
//
//   prepare      checks what a run is given, computes what comes before the graph, and copies what the graph reads to
//                the addresses it reads from
//   capture      launches what is captured, while the caller captures
//   renew        launches again what has growing sizes, while the caller redirects that to where it was captured
//   results      copies of what the replay gave, because the next replay overwrites it
//
// The caller begins and ends the capture, replays it and knows the device (liteboost_adaptor/program/graph.py).
#pragma once

#include <memory>
#include <vector>

#include "program/program.h"

namespace liteboost::program {

struct Graph {
  enum class Ready : int64_t { stopped = 0, replay = 1, capture = 2 };

  explicit Graph(std::shared_ptr<const Program> of) : program(std::move(of)) {}

  Ready prepare(const std::vector<at::Tensor>& inputs, const std::vector<int64_t>& numbers);
  void capture();
  void renew();
  std::vector<at::Tensor> results() const;

 private:
  std::shared_ptr<const Program> program;
  Slots slots;                      // of the last run; what was captured stays where it is
  std::vector<at::Tensor> statics;  // of the program's, in this order
  std::vector<const void*> lay;     // where the program's `fixed` lay when it was captured

  std::vector<const void*> addresses() const;
};

}  // namespace liteboost::program
