// Races for `make tsan` to find, called through ctypes: a job that does not see these would not see ours.
#include <atomic>

#include "common/resources.h"

#define LB_PLANT extern "C" __attribute__((visibility("default"), noinline))

// Adds 1 so many times to what two threads add to, both at once: as an atomic, or with the lock of nobody.
LB_PLANT void planted_count(long* to, std::atomic<long>* arrived, long times, bool is_atomic) {
  arrived->fetch_add(1, std::memory_order_relaxed);
  while (arrived->load(std::memory_order_relaxed) < 2) {
  }
  for (long i = 0; i < times; ++i) {
    if (is_atomic) {
      std::atomic_ref<long>(*to).fetch_add(1, std::memory_order_relaxed);
    } else {
      *to += 1;
    }
    asm volatile("" : : : "memory");  // one addition each
  }
}

// Every part of a parallel region writes to an element of its own, or to one.
LB_PLANT void planted_region(float* to, long count, bool is_own) {
  liteboost::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[is_own ? i : 0] = static_cast<float>(i);
  });
}

// As ranks exchange memory: one writes and says so, the other waits for it. Without order, what was written need not
// be there. The writer waits until the reader is in its call, so that the calls themselves have no order.
LB_PLANT void planted_write(float* to, const std::atomic<long>* arrived, std::atomic<long>* said,
                            bool is_ordered) {
  while (arrived->load(std::memory_order_relaxed) == 0) {
  }
  to[0] = 1.0f;
  said->store(1, is_ordered ? std::memory_order_release : std::memory_order_relaxed);
}
LB_PLANT float planted_read(const float* from, std::atomic<long>* arrived, const std::atomic<long>* said,
                            bool is_ordered) {
  arrived->store(1, std::memory_order_relaxed);
  while (said->load(is_ordered ? std::memory_order_acquire : std::memory_order_relaxed) == 0) {
  }
  return from[0];
}
