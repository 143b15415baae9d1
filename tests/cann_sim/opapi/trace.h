// The trace of launches: one line of JSON each, while a trace is written.
#pragma once
#include "launch.h"

namespace sim {

/// Made before an operator runs, finished after it; writes nothing when it throws.
class LaunchTrace {
 public:
  LaunchTrace(const std::string& name, int stream, const std::vector<Argument>& arguments);
  void finish();

 private:
  const std::string& name_;
  int stream_;
  const std::vector<Argument>& arguments_;
  bool on_;
  uint64_t read_ = 0, written_ = 0, flops_ = 0;
  std::vector<uint64_t> argument_read_, argument_written_;
};

}  // namespace sim
