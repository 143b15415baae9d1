// What an op needs beside tensors, asked for while a lack of it is still an error: the libraries below end the process.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#ifdef LB_STD_THREADS
#include <thread>
#include <vector>
#endif

namespace liteboost {

// Raises RuntimeError unless `bytes` of memory can be mapped; none stay mapped.
void require_memory(const char* op, int64_t bytes);

// Whether the kernel maps whatever is asked for: no limit is set to the address space or the data of this process.
bool is_memory_unlimited();

// Raises RuntimeError unless the threads of a parallel region can be started from the calling thread. OpenMP's runtime
// starts them at the first region of each thread, and exits where one does not start.
void require_threads();

// Whether threads are known to sleep while they wait for a parallel region, as OMP_WAIT_POLICY=passive has them: one then
// takes 20 to 40 us to wake.
bool threads_sleep();

// at::parallel_for, whose threads are known to start.
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
#ifdef LB_STD_THREADS
  // For the thread sanitizer (`make tsan`), which knows the start and the end of these threads, and not OpenMP's.
  const int64_t count = std::max<int64_t>(
      1, std::min<int64_t>(at::get_num_threads(), (end - begin) / std::max<int64_t>(1, grain)));
  const int64_t part = (end - begin + count - 1) / count;
  std::vector<std::thread> threads;
  for (int64_t at = begin + part; at < end; at += part)
    threads.emplace_back([&f, at, part, end] { f(at, std::min(at + part, end)); });
  if (begin < end) f(begin, std::min(begin + part, end));
  for (std::thread& thread : threads) thread.join();
#else
  if (end - begin > grain && end - begin > 1) require_threads();
  at::parallel_for(begin, end, grain, f);
#endif
}

// parallel_for over the blocks of several parts as if they were of one, so that threads wait for each other once: `count(part)`
// blocks, of which f(part, begin, end) does some.
template <typename Parts, typename Count, typename F>
void parallel_for_parts(const Parts& parts, int64_t grain, const Count& count, const F& f) {
  int64_t blocks = 0;
  for (const auto& part : parts) blocks += count(part);
  parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (const auto& part : parts) {
      const int64_t own = count(part), from = std::max<int64_t>(begin, 0), to = std::min(end, own);
      if (from < to) f(part, from, to);
      begin -= own;
      end -= own;
    }
  });
}

}  // namespace liteboost
