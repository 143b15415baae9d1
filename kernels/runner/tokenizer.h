// Text to tokens and back, by the tokenizers of onnxruntime-extensions: their C functions (`Ortx...`), which read
// tokenizer.json and chat templates as Hugging Face writes them. The library is loaded when a text is first given.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace liteboost::runner {

class Tokenizer {
 public:
  // Of `folder`. `library`: path of the library; empty: libortextensions.so, beside this one or wherever the system
  // looks. A Fault where it cannot be loaded, or cannot read the folder.
  Tokenizer(const std::string& folder, const std::string& library);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // `with_special`: with the tokens that begin or end every text.
  std::vector<int64_t> ids_of(const std::string& text, bool with_special);
  // Without tokens that stand for no text.
  std::string text_of(const std::vector<int64_t>& ids);
  // What the chat template makes of messages, which are JSON: [{"role": "user", "content": "..."}, ...].
  std::string chat(const std::string& messages);

 private:
  struct Functions;
  void check(int status, const char* what) const;

  std::unique_ptr<Functions> functions_;
  void* tokenizer_ = nullptr;
};

}  // namespace liteboost::runner
