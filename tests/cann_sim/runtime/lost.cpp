// A device that this process has lost: an operator ended with an exception, and the runtime has stopped its streams.
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>

#include "state.h"

namespace sim {

namespace {
std::atomic<int> code{0};
std::mutex mutex;
std::string cause;  // the operator
}  // namespace

int lost() {
  const int found = code.load();
  if (found != 0) {
    std::lock_guard<std::mutex> lock(mutex);
    last_error = text("simcann: the device was lost with %d%s%s; its streams are stopped", found,
                      cause.empty() ? "" : " in ", cause.c_str());
  }
  return found;
}

}  // namespace sim

extern "C" {
/// From now on whatever reaches the device fails with `error`; 0: it is there again. `name`: of the operator, if known.
void simcann_lose_device(int error, const char* name) {
  std::lock_guard<std::mutex> lock(sim::mutex);
  if (error == 0 || sim::code == 0) sim::cause = name ? name : "";
  sim::code = error;
}
/// The code that a call which reaches the device returns, or 0.
int simcann_lost() { return sim::lost(); }
}
