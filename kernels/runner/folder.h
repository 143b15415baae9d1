// The files of a folder: mapped into memory, and what its SHA256SUMS says they are.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace liteboost::runner {

// A file in memory. Who writes to it changes a page of his own, and no file.
class MappedFile {
 public:
  MappedFile(const std::string& path, const std::string& name);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  std::string_view text() const { return {data_, size_}; }
  // Gives back the memory of what was read; it is read again where it is needed. Not once somebody has written.
  void drop() const;

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

class Folder {
 public:
  // Reads SHA256SUMS.
  explicit Folder(const std::string& path);

  // A file of that name, compared with its checksum if `is_checked`. Faults name it: it is not listed, missing, outside
  // of the folder, or another one than was written.
  std::shared_ptr<const MappedFile> open(const std::string& name, bool is_checked = true) const;
  // Compares all files that are listed but `skipped`.
  void check_all(const std::string& skipped) const;
  const std::string& path() const { return path_; }

 private:
  std::string inside(const std::string& name) const;

  std::string path_;
  std::map<std::string, std::string> sums_;
};

// Where a file of this name lies beside this library.
std::string beside_this(const std::string& name);

}  // namespace liteboost::runner
