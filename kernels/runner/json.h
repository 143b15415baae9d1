// JSON, as manifests and heads of safetensors files have it. Any text may be given: what is no JSON, is nested deeper
// than they are, or is asked for what it is not, is a Fault that names the file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace liteboost::runner {

class Json {
 public:
  enum class Kind { null, boolean, number, text, list, object };

  // `file` is named in faults.
  static Json parse(std::string_view text, const std::string& file);

  Kind kind() const { return kind_; }
  // What is under `key`; a fault where there is none.
  const Json& operator[](const std::string& key) const;
  bool has(const std::string& key) const;
  const std::map<std::string, Json>& items() const;
  const std::vector<Json>& list() const;
  const std::string& text() const;
  bool boolean() const;
  double number() const;
  // A whole number from `least` to `most`.
  int64_t integer(int64_t least, int64_t most) const;
  std::vector<int64_t> integers(int64_t least, int64_t most) const;
  std::vector<std::string> texts() const;

 private:
  friend class JsonReader;
  [[noreturn]] void refuse(const char* wanted) const;

  Kind kind_ = Kind::null;
  bool boolean_ = false;
  std::string text_;  // of a number: as it is written
  std::vector<Json> list_;
  std::map<std::string, Json> items_;
  std::string where_;  // file and keys, for faults
};

}  // namespace liteboost::runner
