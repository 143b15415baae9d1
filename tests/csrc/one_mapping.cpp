// For `make tsan`: threads that are ranks of one process map a segment of shared memory at one address, by which the
// sanitizer knows it. The calls of our library come here (-Wl,--wrap).
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>
#include <utility>

extern "C" {
void* __real_mmap(void* address, size_t size, int protection, int flags, int file, off_t offset);
int __real_munmap(void* address, size_t size);
}

namespace {

struct Mapping {
  void* memory;
  int users;
};

std::mutex mutex;
// By device and inode. A segment whose name is gone keeps its inode while it is mapped.
std::map<std::pair<dev_t, ino_t>, Mapping> mappings;

}  // namespace

extern "C" void* __wrap_mmap(void* address, size_t size, int protection, int flags, int file, off_t offset) {
  struct stat found{};
  if (!(flags & MAP_SHARED) || fstat(file, &found) != 0)
    return __real_mmap(address, size, protection, flags, file, offset);
  const std::lock_guard<std::mutex> guard(mutex);
  Mapping& mapping = mappings[{found.st_dev, found.st_ino}];
  if (mapping.users++ == 0) mapping.memory = __real_mmap(address, size, protection, flags, file, offset);
  return mapping.memory;
}

extern "C" int __wrap_munmap(void* address, size_t size) {
  const std::lock_guard<std::mutex> guard(mutex);
  for (auto mapping = mappings.begin(); mapping != mappings.end(); ++mapping) {
    if (mapping->second.memory != address) continue;
    if (--mapping->second.users > 0) return 0;
    mappings.erase(mapping);
    break;
  }
  return __real_munmap(address, size);
}
