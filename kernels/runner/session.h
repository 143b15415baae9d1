// A model that is open: its programs, and one sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "runner/liteboost_run.h"
#include "runner/manifest.h"

namespace liteboost::runner {

class Session {
 public:
  Session(const std::string& folder, const liteboost_options& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Manifest& manifest() const { return manifest_; }
  int64_t seen() const { return seen_; }
  // Of the last token that was read; empty where none was.
  const std::vector<float>& logits() const { return logits_; }
  void reset();
  // Reads tokens behind those that were read.
  void read(const int64_t* ids, size_t count);

 private:
  struct State {
    at::Tensor memory, held;  // `held` is a part of `memory`, where there is some
    int64_t end = 0;          // how far the memory is written
  };

  void load(const class Folder& folder, bool is_checked);
  void run(int64_t which, const int64_t* ids, int64_t count);
  at::Tensor argument(const std::string& name, const int64_t* ids, int64_t count) const;
  int64_t number(const Number& what, const std::vector<std::string>& names,
                 const std::vector<at::Tensor>& arguments) const;
  void keep(size_t entry, const at::Tensor& value, bool is_appended, int64_t count);

  Manifest manifest_;
  std::vector<int64_t> programs_;  // as the library numbers them
  std::vector<State> cache_;
  std::vector<float> logits_;
  int64_t seen_ = 0;
  bool is_whole_ = true;  // false behind a run that has failed: what is kept may be half of it
};

}  // namespace liteboost::runner
