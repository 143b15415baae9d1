#include "common/resources.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <vector>

namespace liteboost {
namespace {

void* wait_for(void* gate) {
  const std::lock_guard<std::mutex> passed(*static_cast<std::mutex*>(gate));
  return nullptr;
}

// Starts `count` threads that live at the same time, and ends them. 0, or why one did not start.
int try_threads(int count) {
  std::mutex gate;
  std::vector<pthread_t> threads;
  threads.reserve(static_cast<size_t>(count));
  int error = 0;
  {
    const std::lock_guard<std::mutex> closed(gate);
    while (error == 0 && static_cast<int>(threads.size()) < count) {
      pthread_t thread;
      error = pthread_create(&thread, nullptr, wait_for, &gate);
      if (error == 0) threads.push_back(thread);
    }
  }
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  return error;
}

}  // namespace

bool is_memory_unlimited() {
  static const bool overcommits = [] {
    std::ifstream setting("/proc/sys/vm/overcommit_memory");
    int mode = 2;  // 2: no more than there is
    return setting >> mode && mode != 2;
  }();
  const auto is_unlimited = [](auto resource) {
    rlimit limit;
    return getrlimit(resource, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY;
  };
  return overcommits && is_unlimited(RLIMIT_AS) && is_unlimited(RLIMIT_DATA);
}

void require_memory(const char* op, int64_t bytes) {
  void* const memory =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "liteboost::", op,
              ": DefaultCPUAllocator: can't allocate memory: torch's ", "product may take up to ", bytes,
              " bytes beside its tensors (", std::strerror(errno),
              "); free memory, or raise the limit of this process");
  munmap(memory, static_cast<size_t>(bytes));
}

void require_threads() {
  // The threads of a region are kept for the next one of the same thread. What a smaller region let go of is started
  // anew for a larger one.
  thread_local int started = 1;
  const int wanted = at::get_num_threads();
  if (wanted == started || at::in_parallel_region()) return;
  if (wanted > started) {
    const int error = try_threads(wanted - 1);
    TORCH_CHECK(
        error == 0, "liteboost: cannot start ", wanted, " threads: ", std::strerror(error),
        "; free memory, raise the limit of this process, or lower OMP_NUM_THREADS or torch.set_num_threads");
  }
  started = wanted;
}

bool threads_sleep() {
  // OpenMP's runtime reads it once, too.
  static const bool sleep = [] {
    const char* const policy = std::getenv("OMP_WAIT_POLICY");
    return policy != nullptr && strcasecmp(policy, "passive") == 0;
  }();
  return sleep;
}

}  // namespace liteboost
