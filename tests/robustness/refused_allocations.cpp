// Loaded before the C library (LD_PRELOAD): refuses the n-th of the allocations and thread starts that are made from
// given ranges of addresses while a window is open. For tests/robustness/test_out_of_memory.py.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <new>

#define EXPORTED __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

extern "C" {
// What glibc's own names stand for.
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
}

namespace {

struct Range {
  uintptr_t begin, end;
};
constexpr int kMostRanges = 16;
Range ranges[kMostRanges];
int range_count = 0;
std::atomic<bool> is_open{false};
std::atomic<long> counted{0}, refused{0};

bool is_refused(const void* caller) {
  if (!is_open.load(std::memory_order_acquire)) return false;
  const auto at = reinterpret_cast<uintptr_t>(caller);
  for (int i = 0; i < range_count; ++i) {
    if (at >= ranges[i].begin && at < ranges[i].end) return ++counted == refused.load();
  }
  return false;
}

void* no_memory() {
  errno = ENOMEM;
  return nullptr;
}

void* made(size_t size, size_t alignment, const void* caller) {
  void* const memory = is_refused(caller) ? nullptr : __libc_memalign(alignment, size ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" {

EXPORTED void refuse_from(uintptr_t begin, uintptr_t end) {
  if (range_count < kMostRanges) ranges[range_count++] = {begin, end};
}

// From now on the n-th is refused; 0: all are counted, none is refused.
EXPORTED void refuse_open(long n) {
  counted = 0;
  refused = n;
  is_open.store(true, std::memory_order_release);
}

// How many there were.
EXPORTED long refuse_close() {
  is_open.store(false, std::memory_order_release);
  return counted;
}

EXPORTED void* malloc(size_t size) { return is_refused(CALLER) ? no_memory() : __libc_malloc(size); }
EXPORTED void* calloc(size_t count, size_t size) {
  return is_refused(CALLER) ? no_memory() : __libc_calloc(count, size);
}
EXPORTED void* realloc(void* memory, size_t size) {
  return is_refused(CALLER) ? no_memory() : __libc_realloc(memory, size);
}
EXPORTED void* memalign(size_t alignment, size_t size) {
  return is_refused(CALLER) ? no_memory() : __libc_memalign(alignment, size);
}
EXPORTED void* aligned_alloc(size_t alignment, size_t size) {
  return is_refused(CALLER) ? no_memory() : __libc_memalign(alignment, size);
}
EXPORTED int posix_memalign(void** memory, size_t alignment, size_t size) {
  void* const found = is_refused(CALLER) ? nullptr : __libc_memalign(alignment, size);
  if (found == nullptr) return ENOMEM;
  *memory = found;
  return 0;
}

EXPORTED void* mmap(void* address, size_t size, int protection, int flags, int file, long offset) {
  using Map = void* (*)(void*, size_t, int, int, int, long);
  static const auto real = reinterpret_cast<Map>(dlsym(RTLD_NEXT, "mmap"));
  if (is_refused(CALLER)) {
    errno = ENOMEM;
    return reinterpret_cast<void*>(-1);
  }
  return real(address, size, protection, flags, file, offset);
}

EXPORTED int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                            void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return is_refused(CALLER) ? EAGAIN : real(thread, attributes, run, argument);
}

}  // extern "C"

constexpr size_t kUsual = alignof(max_align_t);

EXPORTED void* operator new(size_t size) { return made(size, kUsual, CALLER); }
EXPORTED void* operator new[](size_t size) { return made(size, kUsual, CALLER); }
EXPORTED void* operator new(size_t size, std::align_val_t alignment) {
  return made(size, static_cast<size_t>(alignment), CALLER);
}
EXPORTED void* operator new[](size_t size, std::align_val_t alignment) {
  return made(size, static_cast<size_t>(alignment), CALLER);
}
EXPORTED void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return is_refused(CALLER) ? nullptr : __libc_malloc(size ? size : 1);
}
EXPORTED void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  return is_refused(CALLER) ? nullptr : __libc_malloc(size ? size : 1);
}
