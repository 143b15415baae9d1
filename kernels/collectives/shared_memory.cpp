#include "collectives/shared_memory.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>

#include "collectives/collectives.h"
#include "common/checks.h"

namespace liteboost {
namespace {

using Clock = std::chrono::steady_clock;

// Up to here every rank adds the whole; above, each adds its share and all copy the result.
constexpr int64_t kShort = 64 * 1024;
constexpr int64_t kLine = 64;  // of a cache: counters of two ranks never lie in one
constexpr int kSpins = 2000;   // some 20 us; then the core is given to others
constexpr int kYields = 200;
constexpr double kMapping = 20;  // seconds within which all ranks have the segment
constexpr double kMoment = 1;    // seconds: a longer pause of this process is no waiting

int64_t rounded(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// Says for how long it lives that somebody waits.
class Waiting {
 public:
  explicit Waiting(std::atomic<int64_t>& since) : since_(since) { since_.store(now_ns()); }
  ~Waiting() { since_.store(0); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  std::atomic<int64_t>& since_;
};

// Waits a little, the longer the more often it was called for one wait.
void rest(int64_t turn) {
  if (turn < kSpins) {
    pause_core();
  } else if (turn < kSpins + kYields) {
    sched_yield();
  } else {
    const timespec moment{0, 50 * 1000};
    nanosleep(&moment, nullptr);
  }
}

// Also one whose parent has not yet asked how it ended: it is still listed.
bool has_ended(int64_t process) {
  if (kill(static_cast<pid_t>(process), 0) != 0) return errno == ESRCH;
  std::FILE* file = std::fopen(("/proc/" + std::to_string(process) + "/stat").c_str(), "r");
  if (file == nullptr) return false;
  char text[512] = {};
  const size_t count = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[count] = 0;
  const char* state = std::strrchr(text, ')');  // the name before it may hold anything
  return state != nullptr && std::strlen(state) > 2 && (state[2] == 'Z' || state[2] == 'X');
}

// What is left of a time limit, for one wait. Between two questions no more than a moment is counted: a process that
// was stopped, or had no core, says nothing of those that it waits for, which may have been stopped with it.
class Patience {
 public:
  explicit Patience(double seconds) : left_(seconds), last_(Clock::now()) {}

  bool is_spent() {
    const auto now = Clock::now();
    left_ -= std::min(std::chrono::duration<double>(now - last_).count(), kMoment);
    last_ = now;
    return left_ <= 0;
  }

 private:
  double left_;
  Clock::time_point last_;
};

}  // namespace

// Of a rank. Written by it alone.
struct alignas(kLine) SharedMemory::Place {
  std::atomic<int64_t> brought[2];  // bytes in each slot, negative for 16-bit elements
  std::atomic<uint64_t> note[2];    // what all ranks must have in common
  std::atomic<uint64_t> announced;  // calls whose slot is written
  std::atomic<uint64_t> added;      // calls whose share of the result is written
  std::atomic<uint64_t> mapped;     // 1: it has the segment
  std::atomic<uint64_t> left;       // 1: it has let go of it
  std::atomic<int64_t> process;
};

SharedMemory::Place& SharedMemory::place(int rank) const { return reinterpret_cast<Place*>(memory_)[rank]; }

char* SharedMemory::slot(int rank, uint64_t call) const {
  return memory_ + static_cast<int64_t>(sizeof(Place)) * ranks_ +
         (2 * rank + static_cast<int64_t>(call % 2)) * bytes_;
}

char* SharedMemory::result(uint64_t call) const { return slot(ranks_, call); }

SharedMemory::SharedMemory(const std::string& name, int64_t bytes, double timeout, int rank, int ranks)
    : bytes_(rounded(bytes)), timeout_(std::min(timeout, kMapping)), rank_(rank), ranks_(ranks) {
  TORCH_CHECK(ranks_ <= kMostRanks, "at most ", kMostRanks, " ranks share memory, got ", ranks_);
  size_ = static_cast<int64_t>(sizeof(Place)) * ranks_ + 2 * (ranks_ + 1) * bytes_;
  int file = -1;
  if (rank_ == 0) {
    file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    TORCH_CHECK(file >= 0, "cannot make the shared memory ", name, ": ", std::strerror(errno));
    // posix_fallocate, so that a full /dev/shm is an error here and no signal at the first write.
    const int error = posix_fallocate(file, 0, size_);
    if (error != 0) {
      close(file);
      shm_unlink(name.c_str());
      TORCH_CHECK(false, "cannot have ", size_, " bytes of shared memory: ", std::strerror(error));
    }
  } else {
    struct stat found{};
    Patience patience(timeout_);
    for (int64_t turn = kSpins;; ++turn) {
      if (file < 0) file = shm_open(name.c_str(), O_RDWR, 0600);
      if (file >= 0 && fstat(file, &found) == 0 && found.st_size == size_) break;
      if (patience.is_spent()) {
        if (file >= 0) close(file);
        TORCH_CHECK(false, "rank 0 has made no shared memory within ", timeout_, " s");
      }
      rest(turn);
    }
  }
  void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);
  if (memory == MAP_FAILED && rank_ == 0) shm_unlink(name.c_str());
  TORCH_CHECK(memory != MAP_FAILED, "cannot map the shared memory: ", std::strerror(error));
  memory_ = static_cast<char*>(memory);
  // The memory is zero, which is where all counters begin.
  place(rank_).process.store(getpid());
  place(rank_).mapped.store(1, std::memory_order_release);
  try {
    wait(&Place::mapped, 1);
  } catch (...) {
    if (rank_ == 0) shm_unlink(name.c_str());
    munmap(memory_, size_);
    throw;
  }
  timeout_ = timeout;
  if (rank_ == 0) shm_unlink(name.c_str());  // all have it; nothing is left behind, however they end
}

SharedMemory::~SharedMemory() {
  place(rank_).left.store(1, std::memory_order_release);
  munmap(memory_, size_);
}

void SharedMemory::check_alive(int rank, std::atomic<uint64_t> Place::* counter, uint64_t value,
                               bool is_late) const {
  const Place& other = place(rank);
  const int64_t process = other.process.load();
  const bool ended = other.left.load() || (process && has_ended(process));
  // Read again: it may have come and ended since.
  if ((other.*counter).load(std::memory_order_acquire) >= value) return;
  TORCH_CHECK(!ended, "rank ", rank, " (process ", process, ") has ended; rank ", rank_,
              " waited for it in collective ", value, ". Its own output says why");
  TORCH_CHECK(!is_late, "rank ", rank, " (process ", process, ") has not come to collective ", value,
              " within ", timeout_, " s; every rank must run the same model on the same inputs");
}

void SharedMemory::wait(std::atomic<uint64_t> Place::* counter, uint64_t value) const {
  std::optional<Patience> patience;
  std::optional<Waiting> waiting;
  for (int rank = 0; rank < ranks_; ++rank) {
    for (int64_t turn = 0; (place(rank).*counter).load(std::memory_order_acquire) < value; ++turn) {
      rest(turn);
      if (turn < kSpins + kYields || turn % 64 != 0) continue;
      if (is_interrupted_.load(std::memory_order_acquire)) {
        const std::lock_guard<std::mutex> guard(reason_lock_);
        TORCH_CHECK(false, reason_);
      }
      if (!patience) {
        patience.emplace(timeout_);
        waiting.emplace(waits_since_);
      }
      check_alive(rank, counter, value, patience->is_spent());
    }
  }
}

void SharedMemory::resume(uint64_t position) {
  TORCH_CHECK(position >= call_, "cannot go on behind collective ", position, ": this rank has come to ",
              call_);
  call_ = position;
  // Nobody waits for the calls that are left out, and nobody else's counters are read before the next one.
  place(rank_).announced.store(position, std::memory_order_release);
  place(rank_).added.store(position, std::memory_order_release);
  const std::lock_guard<std::mutex> guard(reason_lock_);
  is_interrupted_.store(false, std::memory_order_release);
}

double SharedMemory::waits() const {
  const int64_t since = waits_since_.load();
  return since == 0 ? 0 : std::max<double>(1, now_ns() - since) / 1e9;
}

void SharedMemory::interrupt(const std::string& reason) {
  const std::lock_guard<std::mutex> guard(reason_lock_);
  reason_ = reason;
  is_interrupted_.store(true, std::memory_order_release);
}

void SharedMemory::all_reduce(DType dtype, const void* x, int64_t count, int64_t element_size, void* out,
                              uint64_t note) {
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(out);
  if (count * element_size <= std::min(kShort, bytes_)) {
    short_reduce(dtype, from, count, element_size, to, note);
    return;
  }
  const int64_t piece = bytes_ / element_size;
  for (int64_t begin = 0; begin < count; begin += piece) {
    long_reduce(dtype, from + begin * element_size, std::min(piece, count - begin), element_size,
                to + begin * element_size, note);
  }
}

namespace {

// What ranks say of an all-reduce: as many bytes each, negative for 16 bits.
struct Brought {
  int64_t each[kMostRanks];
  Brought(int ranks, int64_t count, int64_t element_size) {
    std::fill_n(each, ranks, element_size == 2 ? -2 * count : count * element_size);
  }
};

// Added to the bytes of a gather, which are told from those of an all-reduce by it.
constexpr int64_t kGather = int64_t{1} << 40;

// Copies bytes [begin, end) of rows that are `width` long to where they lie in rows that are `stride` long.
void copy_rows(const char* from, int64_t begin, int64_t end, int64_t width, char* to, int64_t stride) {
  while (begin < end) {
    const int64_t row = begin / width, column = begin % width;
    const int64_t count = std::min(width - column, end - begin);
    std::memcpy(to + row * stride + column, from, count);
    from += count;
    begin += count;
  }
}

}  // namespace

// Writes this rank's tensor, waits for the others', and says where they are.
void SharedMemory::exchange(const char* x, int64_t bytes, const int64_t* brought, uint64_t note,
                            uint64_t call, const void** from) {
  std::memcpy(slot(rank_, call), x, bytes);
  place(rank_).brought[call % 2].store(brought[rank_], std::memory_order_relaxed);
  place(rank_).note[call % 2].store(note, std::memory_order_relaxed);
  place(rank_).announced.store(call, std::memory_order_release);
  wait(&Place::announced, call);
  for (int rank = 0; rank < ranks_; ++rank) {
    // Who is in step is at most one call ahead: it waits there for this rank.
    TORCH_CHECK(place(rank).announced.load(std::memory_order_relaxed) <= call + 1, "rank ", rank,
                " has made other collectives than rank ", rank_, ", which is at ", call,
                "; every rank must run the same model on the same inputs");
    const int64_t theirs = place(rank).brought[call % 2].load(std::memory_order_relaxed);
    TORCH_CHECK(theirs == brought[rank], "rank ", rank, " brought ", std::abs(theirs) % kGather,
                " bytes to collective ", call, ", rank ", rank_, " ", bytes,
                "; every rank must run the same model on the same inputs");
    TORCH_CHECK(place(rank).note[call % 2].load(std::memory_order_relaxed) == note, "rank ", rank,
                " works on other tokens than rank ", rank_, " (collective ", call,
                "): something on one of them has chosen, or passed, others (a logits processor, a stopping "
                "criterion, a random number that is not torch's). Every rank must do the same");
    from[rank] = slot(rank, call);
  }
}

void SharedMemory::short_reduce(DType dtype, const char* x, int64_t count, int64_t element_size, char* out,
                                uint64_t note) {
  const uint64_t call = ++call_;
  const void* from[kMostRanks];
  exchange(x, count * element_size, Brought(ranks_, count, element_size).each, note, call, from);
  add_ranks(dtype, from, ranks_, 0, count, out);
}

void SharedMemory::long_reduce(DType dtype, const char* x, int64_t count, int64_t element_size, char* out,
                               uint64_t note) {
  const uint64_t call = ++call_;
  const void* from[kMostRanks];
  exchange(x, count * element_size, Brought(ranks_, count, element_size).each, note, call, from);
  add_ranks(dtype, from, ranks_, count * rank_ / ranks_, count * (rank_ + 1) / ranks_, result(call));
  place(rank_).added.store(call, std::memory_order_release);
  wait(&Place::added, call);
  std::memcpy(out, result(call), count * element_size);
}

void SharedMemory::all_gather(const void* x, int64_t rows, const std::vector<int64_t>& widths, void* out) {
  const int64_t most = rows * *std::max_element(widths.begin(), widths.end());
  const int64_t stride = std::accumulate(widths.begin(), widths.end(), int64_t{0});
  for (int64_t begin = 0; begin < most; begin += bytes_) {
    const uint64_t call = ++call_;
    int64_t ends[kMostRanks], brought[kMostRanks];
    const void* from[kMostRanks];
    for (int rank = 0; rank < ranks_; ++rank) {
      ends[rank] = std::clamp(rows * widths[rank], begin, begin + bytes_);
      brought[rank] = kGather + ends[rank] - begin;
    }
    exchange(static_cast<const char*>(x) + begin, ends[rank_] - begin, brought, 0, call, from);
    char* to = static_cast<char*>(out);
    for (int rank = 0; rank < ranks_; to += widths[rank++]) {
      copy_rows(static_cast<const char*>(from[rank]), begin, ends[rank], widths[rank], to, stride);
    }
  }
}

}  // namespace liteboost
