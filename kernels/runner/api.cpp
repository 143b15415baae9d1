// The C functions of liteboost_run.h.
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <memory>

#include "runner/fault.h"
#include "runner/sampling.h"
#include "runner/session.h"
#include "runner/tokenizer.h"

using liteboost::runner::Fault;
using liteboost::runner::require;
using liteboost::runner::Sampler;
using liteboost::runner::Sampling;
using liteboost::runner::Session;
using liteboost::runner::Tokenizer;

struct liteboost_model {
  liteboost_model(const char* path, const liteboost_options& options)
      : session(path, options),
        folder(path),
        tokenizer_library(options.tokenizer != nullptr ? options.tokenizer : "") {}

  Session session;
  Sampling how;
  uint64_t seed = 0;
  Sampler sampler;
  std::vector<int64_t> ids;  // all of the sequence
  size_t read = 0;           // how many of them the session has read
  std::string folder, tokenizer_library;
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<int64_t> tokenized;
  std::string text;
};

namespace {

thread_local std::string last_error;

// How many bytes of a character begin at `at`; 0 where they are no UTF-8.
size_t length_of_character(const std::string& text, size_t at) {
  const auto byte = [&](size_t where) {
    return where < text.size() ? static_cast<unsigned char>(text[where]) : 0u;
  };
  const unsigned first = byte(at);
  const size_t length = first < 0x80 ? 1 : first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (length > 1 && (first < 0xC2 || first > 0xF4)) return 0;
  for (size_t more = 1; more < length; ++more) {
    if ((byte(at + more) & 0xC0) != 0x80) return 0;
  }
  return length;
}

// Words may quote a file, which holds anything.
int failed(liteboost_status kind, const std::string& words) {
  last_error.clear();
  for (size_t at = 0; at < words.size();) {
    const size_t length = length_of_character(words, at);
    last_error += length == 0 ? "?" : words.substr(at, length);
    at += std::max<size_t>(length, 1);
  }
  return kind;
}

template <typename Function>
int guarded(const Function& function) {
  try {
    function();
    return LITEBOOST_OK;
  } catch (const Fault& fault) {
    return failed(fault.kind, fault.what());
  } catch (const c10::Error& fault) {
    return failed(LITEBOOST_FAILED, fault.what_without_backtrace());
  } catch (const std::exception& fault) {
    return failed(LITEBOOST_FAILED, fault.what());
  }
}

void check_given(const void* what, const char* name) {
  require(what != nullptr, LITEBOOST_BAD_ARGUMENT, name, " must not be NULL");
}

// What was generated is read when more is asked for.
void catch_up(liteboost_model& model) {
  if (model.read == model.ids.size()) return;
  model.session.read(model.ids.data() + model.read, model.ids.size() - model.read);
  model.read = model.ids.size();
}

Tokenizer& tokenizer_of(liteboost_model& model) {
  if (!model.tokenizer) model.tokenizer = std::make_unique<Tokenizer>(model.folder, model.tokenizer_library);
  return *model.tokenizer;
}

}  // namespace

int liteboost_open(const char* folder, const liteboost_options* options, liteboost_model** model) {
  return guarded([&] {
    check_given(folder, "folder");
    check_given(model, "model");
    *model = nullptr;
    const liteboost_options given = options != nullptr ? *options : liteboost_options{};
    auto made = std::make_unique<liteboost_model>(folder, given);
    made->how = made->session.manifest().sampling;
    made->sampler.seed(made->seed);
    *model = made.release();
  });
}

void liteboost_close(liteboost_model* model) { delete model; }

int liteboost_reset(liteboost_model* model) {
  return guarded([&] {
    check_given(model, "model");
    model->session.reset();
    model->sampler.seed(model->seed);
    model->ids.clear();
    model->read = 0;
  });
}

int liteboost_prefill(liteboost_model* model, const int64_t* ids, size_t count) {
  return guarded([&] {
    check_given(model, "model");
    require(count > 0, LITEBOOST_BAD_ARGUMENT, "a prompt must have a token at least, got none");
    check_given(ids, "ids");
    catch_up(*model);
    model->session.read(ids, count);
    model->ids.insert(model->ids.end(), ids, ids + count);
    model->read = model->ids.size();
  });
}

int liteboost_next(liteboost_model* model, int64_t* id, int* stops) {
  return guarded([&] {
    check_given(model, "model");
    check_given(id, "id");
    require(!model->ids.empty(), LITEBOOST_BAD_ARGUMENT,
            "nothing was read yet; give a prompt by liteboost_prefill");
    catch_up(*model);
    *id = model->sampler.choose(model->session.logits(), model->ids, model->how);
    model->ids.push_back(*id);
    const std::vector<int64_t>& known = model->session.manifest().stops;
    if (stops != nullptr) *stops = std::find(known.begin(), known.end(), *id) != known.end();
  });
}

int liteboost_sample(liteboost_model* model, const liteboost_sampling* settings) {
  return guarded([&] {
    check_given(model, "model");
    check_given(settings, "settings");
    const Sampling asked{settings->sample != 0, settings->temperature, settings->top_k, settings->top_p,
                         settings->repetition_penalty};
    const std::string fault = asked.fault();
    require(fault.empty(), LITEBOOST_BAD_ARGUMENT, fault);
    model->how = asked;
    model->seed = settings->seed;
    model->sampler.seed(model->seed);
  });
}

int liteboost_sampling_of(const liteboost_model* model, liteboost_sampling* settings) {
  return guarded([&] {
    check_given(model, "model");
    check_given(settings, "settings");
    const Sampling& how = model->how;
    *settings = {how.sample ? 1 : 0, how.temperature,        how.top_k,
                 how.top_p,          how.repetition_penalty, model->seed};
  });
}

int liteboost_logits(liteboost_model* model, const float** logits, size_t* vocabulary) {
  return guarded([&] {
    check_given(model, "model");
    check_given(logits, "logits");
    require(!model->ids.empty(), LITEBOOST_BAD_ARGUMENT,
            "nothing was read yet; give a prompt by liteboost_prefill");
    catch_up(*model);
    *logits = model->session.logits().data();
    if (vocabulary != nullptr) *vocabulary = model->session.logits().size();
  });
}

int liteboost_length(const liteboost_model* model, size_t* length, size_t* longest) {
  return guarded([&] {
    check_given(model, "model");
    if (length != nullptr) *length = model->ids.size();
    if (longest != nullptr) *longest = static_cast<size_t>(model->session.manifest().longest);
  });
}

int liteboost_tokenize(liteboost_model* model, const char* text, const int64_t** ids, size_t* count) {
  return guarded([&] {
    check_given(model, "model");
    check_given(text, "text");
    check_given(ids, "ids");
    check_given(count, "count");
    model->tokenized = tokenizer_of(*model).ids_of(text, true);
    *ids = model->tokenized.data();
    *count = model->tokenized.size();
  });
}

int liteboost_chat(liteboost_model* model, const char* messages, const int64_t** ids, size_t* count) {
  return guarded([&] {
    check_given(model, "model");
    check_given(messages, "messages");
    check_given(ids, "ids");
    check_given(count, "count");
    Tokenizer& tokenizer = tokenizer_of(*model);
    model->tokenized = tokenizer.ids_of(tokenizer.chat(messages), false);
    *ids = model->tokenized.data();
    *count = model->tokenized.size();
  });
}

int liteboost_text(liteboost_model* model, const int64_t* ids, size_t count, const char** text) {
  return guarded([&] {
    check_given(model, "model");
    check_given(ids, "ids");
    check_given(text, "text");
    model->text = tokenizer_of(*model).text_of({ids, ids + count});
    *text = model->text.c_str();
  });
}

const char* liteboost_error(void) { return last_error.c_str(); }
