#include "runner/command_line.h"

#include <cerrno>
#include <cstdlib>

namespace liteboost::runner {
namespace {

const std::map<std::string, bool>& options() {
  static const std::map<std::string, bool> takes_value{{"--ids", true},
                                                       {"--prompt", true},
                                                       {"--chat", false},
                                                       {"--max-new", true},
                                                       {"--stream", false},
                                                       {"--ignore-stop", false},
                                                       {"--threads", true},
                                                       {"--greedy", false},
                                                       {"--sample", false},
                                                       {"--temperature", true},
                                                       {"--top-k", true},
                                                       {"--top-p", true},
                                                       {"--seed", true},
                                                       {"--kernels", true},
                                                       {"--tokenizer", true},
                                                       {"--no-checksums", false},
                                                       {"--repetition-penalty", true}};
  return takes_value;
}

}  // namespace

Arguments Arguments::parse(int count, char** words) {
  Arguments made;
  for (int at = 1; at < count; ++at) {
    const std::string word = words[at];
    const auto option = options().find(word);
    if (option == options().end()) {
      if (word.rfind("--", 0) == 0) throw Wrong{"there is no option " + word};
      if (!made.folder.empty()) throw Wrong{"one FOLDER is wanted, got " + made.folder + " and " + word};
      made.folder = word;
    } else if (!option->second) {
      made.values_[word] = "";
    } else {
      if (at + 1 == count) throw Wrong{word + " needs a value"};
      made.values_[word] = words[++at];
    }
  }
  if (made.folder.empty()) throw Wrong{"FOLDER is missing"};
  if (made.has("--ids") + made.has("--prompt") + made.has("--chat") != 1) {
    throw Wrong{"give one of --prompt TEXT, --ids FILE and --chat"};
  }
  if (made.has("--greedy") && made.has("--sample")) throw Wrong{"give either --greedy or --sample"};
  return made;
}

const char* Arguments::text(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : found->second.c_str();
}

int64_t Arguments::whole(const std::string& name, int64_t otherwise) const {
  const char* given = text(name);
  if (given == nullptr) return otherwise;
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(given, &end, 10);
  if (*given == '\0' || *end != '\0' || errno != 0 || value < 0) {
    throw Wrong{name + " must be a whole number, got '" + given + "'"};
  }
  return value;
}

double Arguments::real(const std::string& name, double otherwise) const {
  const char* given = text(name);
  if (given == nullptr) return otherwise;
  char* end = nullptr;
  const double value = std::strtod(given, &end);
  if (*given == '\0' || *end != '\0') throw Wrong{name + " must be a number, got '" + given + "'"};
  return value;
}

}  // namespace liteboost::runner
