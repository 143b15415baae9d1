// A device that this process has lost: an operator ended with an exception, and the runtime has stopped its streams.
#include <unistd.h>

#include <atomic>

#include "state.h"

namespace sim {

namespace {
std::atomic<int> code{0};
}

int lost() {
  const int found = code.load();
  if (found != 0) last_error = text("simcann: the device was lost with %d; its streams are stopped", found);
  return found;
}

}  // namespace sim

extern "C" {
/// From now on whatever reaches the device fails with `error`; 0: it is there again.
void simcann_lose_device(int error) { sim::code = error; }
/// The code that a call which reaches the device returns, or 0.
int simcann_lost() { return sim::lost(); }
}
