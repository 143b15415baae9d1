// What liteboost-run is called with.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace liteboost::runner {

// Of a command line that cannot be read.
struct Wrong {
  std::string words;
};

class Arguments {
 public:
  static Arguments parse(int count, char** words);

  std::string folder;
  bool has(const std::string& name) const { return values_.count(name) != 0; }
  // NULL where it is not given.
  const char* text(const std::string& name) const;
  int64_t whole(const std::string& name, int64_t otherwise) const;
  double real(const std::string& name, double otherwise) const;

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace liteboost::runner
