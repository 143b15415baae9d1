// liteboost-run: text from a folder, by the C functions of liteboost_run.h and nothing else.
#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "runner/command_line.h"
#include "runner/liteboost_run.h"

namespace {

using liteboost::runner::Arguments;
using liteboost::runner::Wrong;

constexpr const char* kUsage = R"(usage: liteboost-run FOLDER (--prompt TEXT | --ids FILE | --chat) [options]

Continues a text by the model in FOLDER, which `python -m liteboost_adaptor export` has written, and prints what is
new. --ids: tokens, numbers with spaces between them (FILE - for standard input), are continued by tokens. --chat:
each line of standard input is a message, answered by the model.

  --max-new N              at most so many new tokens (default: as many as FOLDER has room for)
  --stream                 print what is there at once
  --ignore-stop            go on behind tokens that end a text
  --threads N              of the processor (default: as many as there are cores; at most 4096)
  --greedy | --sample      the most likely token always, or draw one (default: as FOLDER says)
  --temperature X  --top-k N  --top-p X  --repetition-penalty X  --seed N
  --kernels FILE           _C.so, if it does not lie beside libliteboost_run.so
  --tokenizer FILE         libortextensions.so of onnxruntime-extensions, likewise
  --no-checksums           do not read all weights first to see that they are what was written
)";

struct Failed {};

void check(int status) {
  if (status != LITEBOOST_OK) throw Failed{};
}

std::vector<int64_t> ids_in(const std::string& name) {
  std::ifstream file;
  if (name != "-") {
    file.open(name);
    if (!file) throw Wrong{"--ids " + name + " cannot be read: " + std::strerror(errno)};
  }
  std::istream& from = name == "-" ? std::cin : file;
  std::vector<int64_t> ids;
  int64_t id = 0;
  while (from >> id) ids.push_back(id);
  if (!from.eof()) throw Wrong{"--ids " + name + " must hold whole numbers with spaces between them"};
  return ids;
}

void set_sampling(liteboost_model* model, const Arguments& given) {
  liteboost_sampling how{};
  check(liteboost_sampling_of(model, &how));
  if (given.has("--greedy")) how.sample = 0;
  if (given.has("--sample")) how.sample = 1;
  how.temperature = given.real("--temperature", how.temperature);
  how.top_k = given.whole("--top-k", how.top_k);
  how.top_p = given.real("--top-p", how.top_p);
  how.repetition_penalty = given.real("--repetition-penalty", how.repetition_penalty);
  how.seed = static_cast<uint64_t>(given.whole("--seed", 0));
  check(liteboost_sample(model, &how));
}

// Prints tokens, or their text: of that what can no more change by the tokens that follow.
class Printer {
 public:
  Printer(liteboost_model* model, bool prints_text, bool streams)
      : model_(model), prints_text_(prints_text), streams_(streams) {}

  void add(int64_t id) {
    ids_.push_back(id);
    if (!prints_text_) {
      std::printf(ids_.size() == 1 ? "%lld" : " %lld", static_cast<long long>(id));
    } else if (streams_) {
      print(false);
    }
    if (streams_) std::fflush(stdout);
  }
  std::string end() {
    if (prints_text_) print(true);
    std::printf("\n");
    std::fflush(stdout);
    return printed_;
  }

 private:
  void print(bool is_all) {
    const char* text = nullptr;
    check(liteboost_text(model_, ids_.data(), ids_.size(), &text));
    const std::string all = text;
    constexpr const char* kHalf = "\xEF\xBF\xBD";  // stands for a part of a character
    const bool ends_within = all.size() >= 3 && all.compare(all.size() - 3, 3, kHalf) == 0;
    if (!is_all && (ends_within || all.size() < printed_.size())) return;
    std::fputs(all.c_str() + std::min(printed_.size(), all.size()), stdout);
    printed_ = all;
  }

  liteboost_model* model_;
  bool prints_text_, streams_;
  std::vector<int64_t> ids_;
  std::string printed_;
};

std::string generate(liteboost_model* model, const Arguments& given, bool prints_text) {
  size_t length = 0, longest = 0;
  check(liteboost_length(model, &length, &longest));
  // The last one need not be read, so that there is room for one more.
  const int64_t most = given.whole("--max-new", static_cast<int64_t>(longest - length) + 1);
  Printer printer(model, prints_text, given.has("--stream") || given.has("--chat"));
  for (int64_t made = 0; made < most; ++made) {
    int64_t id = 0;
    int stops = 0;
    check(liteboost_next(model, &id, &stops));
    printer.add(id);
    if (stops != 0 && !given.has("--ignore-stop")) break;
  }
  return printer.end();
}

std::string as_json(const std::string& text) {
  std::string made = "\"";
  for (const char each : text) {
    char code[8];
    if (each == '"' || each == '\\') {
      made += '\\';
      made += each;
    } else if (static_cast<unsigned char>(each) < 0x20) {
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(each));
      made += code;
    } else {
      made += each;
    }
  }
  return made + '"';
}

void chat(liteboost_model* model, const Arguments& given) {
  std::string messages, line;
  std::vector<int64_t> read;
  while (std::getline(std::cin, line)) {
    messages += (messages.empty() ? "" : ", ") + std::string("{\"role\": \"user\", \"content\": ") +
                as_json(line) + "}";
    const int64_t* ids = nullptr;
    size_t count = 0;
    check(liteboost_chat(model, ("[" + messages + "]").c_str(), &ids, &count));
    // The whole conversation is read anew: a template may write what was said before in another way.
    check(liteboost_reset(model));
    check(liteboost_prefill(model, ids, count));
    messages += ", {\"role\": \"assistant\", \"content\": " + as_json(generate(model, given, true)) + "}";
  }
}

void answer(liteboost_model* model, const Arguments& given) {
  if (given.has("--chat")) {
    chat(model, given);
  } else if (given.has("--ids")) {
    const std::vector<int64_t> prompt = ids_in(given.text("--ids"));
    check(liteboost_prefill(model, prompt.data(), prompt.size()));
    generate(model, given, false);
  } else {
    const int64_t* ids = nullptr;
    size_t count = 0;
    check(liteboost_tokenize(model, given.text("--prompt"), &ids, &count));
    check(liteboost_prefill(model, ids, count));
    generate(model, given, true);
  }
}

int run(const Arguments& given) {
  liteboost_options how{};
  how.threads = static_cast<int>(std::min<int64_t>(given.whole("--threads", 0), INT_MAX));
  how.without_checksums = given.has("--no-checksums") ? 1 : 0;
  how.kernels = given.text("--kernels");
  how.tokenizer = given.text("--tokenizer");
  liteboost_model* model = nullptr;
  int status = 0;
  try {
    check(liteboost_open(given.folder.c_str(), &how, &model));
    set_sampling(model, given);
    answer(model, given);
  } catch (const Failed&) {
    std::fflush(stdout);
    std::fprintf(stderr, "error: %s\n", liteboost_error());
    status = 1;
  }
  liteboost_close(model);
  return status;
}

}  // namespace

int main(int count, char** words) {
  if (count == 2 && (std::strcmp(words[1], "--help") == 0 || std::strcmp(words[1], "-h") == 0)) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  try {
    return run(Arguments::parse(count, words));
  } catch (const Wrong& wrong) {
    std::fprintf(stderr, "error: %s\n\n%s", wrong.words.c_str(), kUsage);
    return 2;
  }
}
