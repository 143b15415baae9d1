#include "runner/folder.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "runner/fault.h"
#include "runner/sha256.h"

namespace liteboost::runner {
namespace {

constexpr const char* kSums = "SHA256SUMS";
constexpr size_t kDigits = 64;

std::string real_path(const std::string& path, const std::string& name) {
  char found[PATH_MAX];
  // Called before errno is read: the arguments of a call are evaluated in any order.
  const bool is_there = realpath(path.c_str(), found) != nullptr;
  require(is_there, LITEBOOST_BAD_FOLDER, name, " cannot be opened: ", std::strerror(errno),
          "; name a folder that `liteboost export` has written");
  return found;
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path, const std::string& name) {
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat about{};
  const bool is_known = file.number >= 0 && fstat(file.number, &about) == 0;
  require(is_known, LITEBOOST_BAD_FOLDER, name, " cannot be read: ", std::strerror(errno));
  require(S_ISREG(about.st_mode), LITEBOOST_BAD_FOLDER, name, " is no file");
  size_ = static_cast<size_t>(about.st_size);
  if (size_ == 0) return;
  void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.number, 0);
  require(mapped != MAP_FAILED, LITEBOOST_BAD_FOLDER, name, " cannot be mapped: ", std::strerror(errno));
  data_ = static_cast<char*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

void MappedFile::drop() const {
  if (data_ != nullptr) (void)madvise(data_, size_, MADV_DONTNEED);
}

Folder::Folder(const std::string& path) : path_(real_path(path, path)) {
  const MappedFile file(path_ + "/" + kSums, kSums);
  std::string_view rest = file.text();
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    require(end != std::string_view::npos && end > kDigits + 2, LITEBOOST_BAD_FOLDER, kSums,
            " is cut short or holds a line that is no checksum; copy the folder again");
    sums_.emplace(rest.substr(kDigits + 2, end - kDigits - 2), rest.substr(0, kDigits));
    rest.remove_prefix(end + 1);
  }
}

std::string Folder::inside(const std::string& name) const {
  require(!name.empty() && name[0] != '/' && name.find('\0') == std::string::npos, LITEBOOST_BAD_FOLDER, "'",
          name, "' is no name of a file in the folder");
  const std::string found = real_path(path_ + "/" + name, name);
  require(found.compare(0, path_.size() + 1, path_ + "/") == 0, LITEBOOST_BAD_FOLDER, name,
          " lies outside of the folder; copy the folder with all of its files");
  return found;
}

std::shared_ptr<const MappedFile> Folder::open(const std::string& name, bool is_checked) const {
  const std::string path = inside(name);
  const auto sum = sums_.find(name);
  require(sum != sums_.end(), LITEBOOST_BAD_FOLDER, name, " is not listed in ", kSums,
          "; copy the folder again, or export the model again");
  auto file = std::make_shared<const MappedFile>(path, name);
  require(!is_checked || sha256(file->data(), file->size()) == sum->second, LITEBOOST_BAD_FOLDER, name,
          " is not the file that was written (its checksum is another than in ", kSums, "); copy it again");
  // Of an embedding, a few rows are read.
  if (is_checked) file->drop();
  return file;
}

void Folder::check_all(const std::string& skipped) const {
  for (const auto& [name, sum] : sums_) {
    if (name != skipped) open(name);
  }
}

std::string beside_this(const std::string& name) {
  Dl_info about{};
  dladdr(reinterpret_cast<void*>(&beside_this), &about);
  const std::string path = about.dli_fname != nullptr ? about.dli_fname : "";
  const size_t end = path.rfind('/');
  return end == std::string::npos ? name : path.substr(0, end + 1) + name;
}

}  // namespace liteboost::runner
