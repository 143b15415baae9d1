// Memory that the ranks of one host share, and the all-reduce through it.
//
// Each rank has two slots and counts its calls. In call n a rank writes to slot n % 2, announces n, waits until all
// ranks have announced n, and reads. Two slots are enough: who announces n + 1 has read all of n, so nobody writes
// to a slot that somebody still reads. Long tensors take two rounds a piece: each rank adds its share of the
// piece into the common result, announces that, and copies the whole. A gather takes one round a piece.
//
// Waits are bounded: a rank that has ended is noticed at once, one that does not come after the time limit. Who knows
// better that another rank will not come (it has left the call by an exception, say) interrupts them with the reason.
// Ranks that have left a call at different places go on from the same number: `resume`.
#pragma once

#include <stdint.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "common/dtype.h"

namespace liteboost {

class SharedMemory {
 public:
  // Maps the segment `name`, which one rank makes and the others wait for, and removes its name once all have it.
  // Raises where that cannot be done within the time limit; `bytes` is the size of a slot.
  SharedMemory(const std::string& name, int64_t bytes, double timeout, int rank, int ranks);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // `note`: what all ranks must have in common beside the size, for instance a digest of the tokens they work on.
  void all_reduce(DType dtype, const void* x, int64_t count, int64_t element_size, void* out,
                  uint64_t note = 0);

  // out[row] = the rows of all ranks one behind the other; widths: bytes of a row on each rank.
  void all_gather(const void* x, int64_t rows, const std::vector<int64_t>& widths, void* out);

  // How many calls there have been. Ranks that have made the same ones say the same.
  uint64_t position() const { return call_; }

  // Goes on behind call `position`, which no rank is ahead of. No rank may be in a call.
  void resume(uint64_t position);

  // For how many seconds this rank has waited for others by now; 0 where it does not. From any thread.
  double waits() const;

  // Lets this rank's waits fail with `reason`, from any thread, until `resume`.
  void interrupt(const std::string& reason);

 private:
  struct Header;
  struct Place;
  Place& place(int rank) const;
  char* slot(int rank, uint64_t call) const;
  char* result(uint64_t call) const;
  // `brought`: what each rank must say that it has brought, by its number.
  void exchange(const char* x, int64_t bytes, const int64_t* brought, uint64_t note, uint64_t call,
                const void** from);
  void short_reduce(DType dtype, const char* x, int64_t count, int64_t element_size, char* out,
                    uint64_t note);
  void long_reduce(DType dtype, const char* x, int64_t count, int64_t element_size, char* out, uint64_t note);
  void wait(std::atomic<uint64_t> Place::* counter, uint64_t value) const;
  void check_alive(int rank, std::atomic<uint64_t> Place::* counter, uint64_t value, bool is_late) const;

  char* memory_ = nullptr;
  int64_t size_ = 0, bytes_ = 0;
  double timeout_ = 0;
  int rank_ = 0, ranks_ = 0;
  uint64_t call_ = 0;
  mutable std::atomic<int64_t> waits_since_{0};  // nanoseconds of the clock; 0: it does not wait
  std::atomic<bool> is_interrupted_{false};
  mutable std::mutex reason_lock_;
  std::string reason_;
};

}  // namespace liteboost
