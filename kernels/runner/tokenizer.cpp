#include "runner/tokenizer.h"

#include <dlfcn.h>

#include <cstdint>

#include "runner/fault.h"
#include "runner/folder.h"

namespace liteboost::runner {
namespace {

constexpr const char* kLibrary = "libortextensions.so";

// Objects of the library are pointers; its statuses are ints, 0 for success; its tokens are 32 bits.
using Object = void*;
using Id = uint32_t;

void* loaded(const std::string& library) {
  std::vector<std::string> tried{library};
  if (library.empty()) tried = {beside_this(kLibrary), kLibrary};
  std::string why;
  for (const std::string& path : tried) {
    if (void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL)) return handle;
    const char* words = dlerror();
    why = words != nullptr ? words : path;
  }
  throw Fault(LITEBOOST_BAD_LIBRARY,
              "the tokenizer cannot be loaded: " + why + "; put " + kLibrary +
                  " of onnxruntime-extensions beside libliteboost_run.so, say where it is, or "
                  "give tokens in place of a text");
}

// An object of the library, given back at the end.
class Owned {
 public:
  explicit Owned(int (*dispose)(Object*)) : dispose_(dispose) {}
  ~Owned() {
    if (object_ != nullptr) dispose_(&object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Object* operator&() { return &object_; }
  Object get() const { return object_; }

 private:
  int (*dispose_)(Object*);
  Object object_ = nullptr;
};

}  // namespace

struct Tokenizer::Functions {
  int (*create)(Object* tokenizer, const char* folder);
  int (*set_options)(Object tokenizer, const char* names[], const char* values[], size_t count);
  int (*tokenize)(Object tokenizer, const char* texts[], size_t count, Object* ids);
  int (*ids_at)(Object ids, size_t at, const Id** found, size_t* count);
  int (*detokenize)(Object tokenizer, const Id* ids, size_t count, Object* texts);
  int (*text_at)(Object texts, size_t at, const char** text);
  int (*apply_template)(Object tokenizer, const char* text, const char* messages, const char* tools,
                        Object* result, bool adds_prompt, bool tokenizes);
  int (*result_at)(Object result, size_t at, Object* tensor);
  int (*data_of)(Object tensor, const void** data, const int64_t** sizes, size_t* dims);
  int (*dispose)(Object* object);
  const char* (*message)();

  explicit Functions(void* library) {
    look_up(library, create, "OrtxCreateTokenizer");
    look_up(library, set_options, "OrtxUpdateTokenizerOptions");
    look_up(library, tokenize, "OrtxTokenize");
    look_up(library, ids_at, "OrtxTokenId2DArrayGetItem");
    look_up(library, detokenize, "OrtxDetokenize1D");
    look_up(library, text_at, "OrtxStringArrayGetItem");
    look_up(library, apply_template, "OrtxApplyChatTemplate");
    look_up(library, result_at, "OrtxTensorResultGetAt");
    look_up(library, data_of, "OrtxGetTensorData");
    look_up(library, dispose, "OrtxDispose");
    look_up(library, message, "OrtxGetLastErrorMessage");
  }

 private:
  template <typename Function>
  static void look_up(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    require(function != nullptr, LITEBOOST_BAD_LIBRARY, "the tokenizer's library has no ", name,
            "; take onnxruntime-extensions 0.15 or newer");
  }
};

Tokenizer::Tokenizer(const std::string& folder, const std::string& library)
    : functions_(std::make_unique<Functions>(loaded(library))) {
  check(functions_->create(&tokenizer_, folder.c_str()), "tokenizer.json cannot be read");
}

Tokenizer::~Tokenizer() {
  if (tokenizer_ != nullptr) functions_->dispose(&tokenizer_);
}

void Tokenizer::check(int status, const char* what) const {
  if (status == 0) return;
  const char* words = functions_->message();
  throw Fault(LITEBOOST_BAD_FOLDER,
              std::string(what) + ": " + (words != nullptr ? words : "for no reason given"));
}

std::vector<int64_t> Tokenizer::ids_of(const std::string& text, bool with_special) {
  const char* name = "add_special_tokens";
  const char* value = with_special ? "true" : "false";
  check(functions_->set_options(tokenizer_, &name, &value, 1), "the tokenizer takes no options");
  const char* given = text.c_str();
  Owned made(functions_->dispose);
  check(functions_->tokenize(tokenizer_, &given, 1, &made), "the text cannot be tokenized");
  const Id* ids = nullptr;
  size_t count = 0;
  check(functions_->ids_at(made.get(), 0, &ids, &count), "the text cannot be tokenized");
  return {ids, ids + count};
}

std::string Tokenizer::text_of(const std::vector<int64_t>& ids) {
  const std::vector<Id> given(ids.begin(), ids.end());
  Owned made(functions_->dispose);
  check(functions_->detokenize(tokenizer_, given.data(), given.size(), &made), "the tokens are no text");
  const char* text = nullptr;
  check(functions_->text_at(made.get(), 0, &text), "the tokens are no text");
  return text;
}

std::string Tokenizer::chat(const std::string& messages) {
  Owned made(functions_->dispose);
  const char* what = "the chat template cannot be applied";
  check(functions_->apply_template(tokenizer_, nullptr, messages.c_str(), nullptr, &made, true, false), what);
  Object tensor = nullptr;  // a part of the result
  check(functions_->result_at(made.get(), 0, &tensor), what);
  const void* text = nullptr;
  check(functions_->data_of(tensor, &text, nullptr, nullptr), what);
  return static_cast<const char*>(text);
}

}  // namespace liteboost::runner
