#include "common/caching_allocator.h"

#include "common/checks.h"
#include "common/resources.h"

#ifdef __linux__
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <new>
#include <unordered_map>

namespace liteboost {
namespace {

// Below this, what the C library keeps by itself is as good, and there are more tensors than pages.
constexpr size_t kLeast = size_t{256} << 10;
constexpr size_t kHugePage = size_t{2} << 20;
// Of a tensor's size: so much larger memory for it may be.
constexpr size_t kSlack = 8;
// Memory that was free while so many times as much was taken as may be kept is given back: who serves requests of all
// lengths has needed memory of all sizes sooner or later.
constexpr size_t kKeptFor = 8;

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// 4 KiB, or on some aarch64 systems 64.
size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

struct Block {
  char* address;
  size_t bytes;
  size_t freed = 0;  // how many bytes had been taken then
};
// Whoever frees memory must not need some: a block goes from one list to another with its node.
using Blocks = std::list<Block>;

// Memory of the system's, on huge pages where it has some; null where there is none.
char* map_memory(size_t bytes) {
  const size_t ahead = bytes >= kHugePage ? kHugePage : 0;
  void* const mapped =
      mmap(nullptr, bytes + ahead, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const first = static_cast<char*>(mapped);
  if (ahead == 0) return first;
  char* const begin = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(first), kHugePage));
  if (begin > first) munmap(first, static_cast<size_t>(begin - first));
  if (char* const end = begin + bytes; end < first + bytes + ahead)
    munmap(end, static_cast<size_t>(first + bytes + ahead - end));
  // Whole pages only: the rest of the last one would be memory that nobody needs.
  madvise(begin, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return begin;
}

void give_back(void* memory);

class CachingAllocator final : public c10::Allocator {
 public:
  // Never destroyed: tensors are freed to the very end of the process.
  static CachingAllocator& instance() {
    static auto* const made = new CachingAllocator();
    return *made;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const Taken taken = bytes >= kLeast ? take(round_up(bytes, page_size())) : Taken{};
    return taken.memory != nullptr ? reported(taken.memory, bytes) : before_->allocate(bytes);
  }

  // The same, where it is from here: else null.
  c10::DataPtr zeros(size_t bytes) {
    const Taken taken = take(round_up(bytes, page_size()));
    if (taken.memory == nullptr) return {};
    c10::DataPtr made = reported(taken.memory, bytes);
    if (!taken.is_new) clear(static_cast<char*>(taken.memory), round_up(bytes, page_size()));
    return made;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool set_limit(size_t bytes) {
    const std::lock_guard<std::mutex> one_at_a_time(setting_);
    c10::Allocator* const current = c10::GetCPUAllocator();
    if (bytes != 0 && current != this) {
      if (before_ != nullptr && current != before_) return false;
      before_ = current;
    }
    keep_at_most(bytes);
    if (bytes != 0) c10::SetCPUAllocator(this, kPriority);
    if (bytes == 0 && current == this) c10::SetCPUAllocator(before_, kPriority);
    return c10::GetCPUAllocator() == (bytes != 0 ? this : before_) || before_ == nullptr;
  }

  // Whether `memory` was from here.
  bool put(void* memory) {
    Blocks freed, dropped;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      const auto found = places_.find(memory);
      if (found == places_.end()) return false;
      used_bytes_ -= found->second->bytes;
      freed.splice(freed.end(), used_, found->second);
      places_.erase(found);
    }
    c10::profiledCPUMemoryReporter().Delete(memory);  // before another thread is given it
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      freed.front().freed = taken_bytes_;
      free_bytes_ += freed.front().bytes;
      free_.splice(free_.end(), freed);
      while (free_bytes_ > limit_) drop_oldest(dropped);
    }
    unmap(dropped);
    return true;
  }

  void free_elsewhere(void* memory) const { before_->raw_deallocate(memory); }

  std::vector<int64_t> counts() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return {static_cast<int64_t>(free_bytes_), static_cast<int64_t>(used_bytes_), mapped_, reused_};
  }

 private:
  // Above that of torch's own, which others may have set again.
  static constexpr uint8_t kPriority = 1;

  CachingAllocator() {
    // A child has the memory, and must not inherit the lock of a thread that it does not have.
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
  }

  struct Taken {
    void* memory = nullptr;
    bool is_new = false;  // the system has cleared it
  };

  static c10::DataPtr reported(void* memory, size_t bytes) {
    c10::profiledCPUMemoryReporter().New(memory, bytes);
    return {memory, memory, &give_back, c10::Device(c10::kCPU)};
  }

  static bool is_zero(const char* memory, size_t bytes) {
    return memory[0] == 0 && memcmp(memory, memory + 1, bytes - 1) == 0;
  }

  // What was used of it; the rest takes no memory until it is. `bytes` are whole pages.
  static void clear(char* memory, size_t bytes) {
    constexpr size_t kPages = 64;
    const size_t page = page_size(), part = kPages * page;
    parallel_for(0, static_cast<int64_t>((bytes + part - 1) / part), 1, [&](int64_t begin, int64_t end) {
      for (size_t at = static_cast<size_t>(begin) * part; at < static_cast<size_t>(end) * part && at < bytes;
           at += part) {
        const size_t count = std::min(part, bytes - at);
        unsigned char is_resident[kPages];
        const bool is_known = mincore(memory + at, count, is_resident) == 0;
        const auto is_used = [&](size_t i) { return !is_known || (is_resident[i] & 1) != 0; };
        for (size_t i = 0, alike; i * page < count; i += alike) {
          for (alike = 1; (i + alike) * page < count && is_used(i + alike) == is_used(i);) ++alike;
          char* const first = memory + at + i * page;
          // What is not there may have been written to disk, which the system forgets.
          if (!is_used(i) && madvise(first, alike * page, MADV_DONTNEED) == 0) continue;
          for (size_t j = 0; j < alike; ++j) {
            // Pages that were only read are all one, until they are written to.
            if (!is_zero(first + j * page, page)) memset(first + j * page, 0, page);
          }
        }
      }
    });
  }

  Taken take(size_t bytes) {
    Blocks unused;
    char* kept = nullptr;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (bytes > limit_) return {};
      kept = take_free(bytes);
      taken_bytes_ += bytes;
      while (!free_.empty() && (taken_bytes_ - free_.front().freed) / kKeptFor > limit_) drop_oldest(unused);
    }
    unmap(unused);
    return kept != nullptr ? Taken{kept, false} : Taken{take_new(bytes), true};
  }

  char* take_free(size_t bytes) {
    // What was freed last is the likeliest to be in a cache of the processor.
    for (auto block = free_.end(); block != free_.begin();) {
      --block;
      if (block->bytes < bytes || block->bytes - bytes > bytes / kSlack) continue;
      use(free_, block);
      free_bytes_ -= block->bytes;
      ++reused_;
      return block->address;
    }
    return nullptr;
  }

  char* take_new(size_t bytes) {
    Blocks made(1);
    Block& block = made.front() = {map_memory(bytes), bytes};
    if (block.address == nullptr) {  // as long as something is free, memory is not short
      Blocks dropped;
      {
        const std::lock_guard<std::mutex> guard(mutex_);
        dropped.swap(free_);
        free_bytes_ = 0;
      }
      unmap(dropped);
      block.address = map_memory(bytes);
    }
    if (block.address == nullptr) return nullptr;
    try {
      const std::lock_guard<std::mutex> guard(mutex_);
      use(made, made.begin());
      ++mapped_;
    } catch (const std::bad_alloc&) {
      unmap(made);
      throw;
    }
    return block.address;
  }

  // A block of `from` is used from now on. Throws std::bad_alloc, and changes nothing.
  void use(Blocks& from, Blocks::iterator block) {
    places_.emplace(block->address, block);
    used_.splice(used_.end(), from, block);
    used_bytes_ += block->bytes;
  }

  void keep_at_most(size_t bytes) {
    Blocks dropped;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      limit_ = bytes;
      while (free_bytes_ > limit_) drop_oldest(dropped);
    }
    unmap(dropped);
  }

  // The one that is free for longest.
  void drop_oldest(Blocks& dropped) {
    free_bytes_ -= free_.front().bytes;
    dropped.splice(dropped.end(), free_, free_.begin());
  }

  static void unmap(const Blocks& blocks) {
    for (const Block& block : blocks) munmap(block.address, block.bytes);
  }

  std::mutex setting_;
  std::mutex mutex_;  // of what stands below
  c10::Allocator* before_ = nullptr;
  size_t limit_ = 0, free_bytes_ = 0, used_bytes_ = 0;
  size_t taken_bytes_ = 0;  // ever
  Blocks free_;             // in the order in which they were freed
  Blocks used_;
  std::unordered_map<void*, Blocks::iterator> places_;  // of the used ones
  int64_t mapped_ = 0, reused_ = 0;
};

void give_back(void* memory) {
  if (memory == nullptr) return;
  CachingAllocator& allocator = CachingAllocator::instance();
  if (!allocator.put(memory)) allocator.free_elsewhere(memory);
}

}  // namespace

bool set_caching_allocator(int64_t bytes) {
  LB_CHECK_VALUE(bytes >= 0, "_set_caching_allocator", "bytes must be 0 or more, got ", bytes);
  return CachingAllocator::instance().set_limit(static_cast<size_t>(bytes));
}

std::vector<int64_t> caching_allocator_counts() { return CachingAllocator::instance().counts(); }

int64_t caching_allocator_deleter() { return reinterpret_cast<int64_t>(&give_back); }

std::vector<at::Tensor> kept_zeros(int64_t bytes) {
  LB_CHECK_VALUE(bytes > 0, "_kept_zeros", "bytes must be more than 0, got ", bytes);
  CachingAllocator& allocator = CachingAllocator::instance();
  c10::DataPtr memory = allocator.zeros(static_cast<size_t>(bytes));
  if (!memory) return {};
  const c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), std::move(memory),
                             &allocator, /*resizable=*/false);
  return {at::empty({0}, at::kByte).set_(storage, 0, {bytes}, {1})};
}

}  // namespace liteboost
#else
namespace liteboost {

bool set_caching_allocator(int64_t bytes) {
  LB_CHECK_VALUE(bytes >= 0, "_set_caching_allocator", "bytes must be 0 or more, got ", bytes);
  return bytes == 0;
}

std::vector<int64_t> caching_allocator_counts() { return {0, 0, 0, 0}; }

int64_t caching_allocator_deleter() { return 0; }

std::vector<at::Tensor> kept_zeros(int64_t bytes) {
  LB_CHECK_VALUE(bytes > 0, "_kept_zeros", "bytes must be more than 0, got ", bytes);
  return {};
}

}  // namespace liteboost
#endif
