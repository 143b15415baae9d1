// What went wrong, and of which kind: what liteboost_error() says, and what a function gives.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "runner/liteboost_run.h"

namespace liteboost::runner {

struct Fault : std::runtime_error {
  liteboost_status kind;
  Fault(liteboost_status of, const std::string& words) : std::runtime_error(words), kind(of) {}
};

// Throws a Fault unless `condition`; the words are put together only then.
template <typename... Words>
void require(bool condition, liteboost_status kind, const Words&... words) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << words);
  throw Fault(kind, text.str());
}

}  // namespace liteboost::runner
