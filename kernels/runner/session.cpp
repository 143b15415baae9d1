#include "runner/session.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runner/fault.h"
#include "runner/folder.h"
#include "runner/library.h"
#include "runner/weights.h"

namespace liteboost::runner {
namespace {

constexpr const char* kManifest = "manifest.json";
constexpr const char* kWeights = "weights.safetensors";
// OpenMP's runtime keeps a few words a thread on the stack, and dies where they are too many.
constexpr int kMostThreads = 4096;

// Memory of zeros, of which only what is written takes room.
at::Tensor memory_for(const Entry& entry) {
  const std::string where = "manifest.json: cache: " + entry.name;
  const at::ScalarType dtype = dtype_named(entry.dtype, where);
  const size_t bytes = bytes_of(entry.sizes, dtype, where);
  void* made =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(made != MAP_FAILED, LITEBOOST_BAD_FOLDER, where, " takes ", bytes, " bytes: ", std::strerror(errno),
          "; export the model with fewer --max-tokens");
  return at::from_blob(made, entry.sizes, [bytes](void* memory) { munmap(memory, bytes); }, dtype);
}

// Only what computes: an operator may as well open files.
void check_operators(const std::string& text, const std::string& file,
                     const std::vector<std::string>& allowed) {
  std::istringstream lines(text);
  std::string line, word, name, overload;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    if (!(words >> word >> name >> overload) || word != "op") continue;
    const bool is_ours = name.rfind("liteboost::", 0) == 0 && name.rfind("liteboost::_program", 0) != 0;
    const bool is_torchs = name.rfind("aten::", 0) == 0 && name.find("file") == std::string::npos;
    require((is_ours || is_torchs) &&
                std::find(allowed.begin(), allowed.end(), name + "." + overload) != allowed.end(),
            LITEBOOST_BAD_FOLDER, file, " calls ", name, ".", overload, ", which ", kManifest,
            " does not list among operators that compute; export the model again");
  }
}

bool contains(const std::vector<int64_t>& entries, int64_t entry) {
  return std::find(entries.begin(), entries.end(), entry) != entries.end();
}

int64_t program_for(const std::vector<Range>& ranges, int64_t length) {
  for (const Range& each : ranges) {
    if (length <= each.last) return each.program;
  }
  return -1;
}

}  // namespace

Session::Session(const std::string& path, const liteboost_options& options) {
  require(options.threads >= 0 && options.threads <= kMostThreads, LITEBOOST_BAD_ARGUMENT,
          "threads must be from 0, for as many as there are cores, to ", kMostThreads, ", got ",
          options.threads);
  const Folder folder(path);
  const auto file = folder.open(kManifest);
  manifest_ = Manifest::parse(Json::parse(file->text(), kManifest));
  load_kernels(options.kernels != nullptr ? options.kernels : "", manifest_.schemas);
  // Where first calls of MKL's functions meet in several threads, one of them may get values that are off by 1.5e-4.
  at::exp(at::zeros({16}));
  if (options.threads > 0) at::set_num_threads(options.threads);
  folder.check_all(kWeights);
  load(folder, options.without_checksums == 0);
  for (const Entry& entry : manifest_.cache) {
    State made;
    if (entry.dim >= 0) made.memory = memory_for(entry);
    cache_.push_back(std::move(made));
  }
}

void Session::load(const Folder& folder, bool is_checked) {
  auto tensors = tensors_in(folder.open(kWeights, is_checked), kWeights);
  for (const auto& [name, dims] : manifest_.transposed) {
    const auto found = tensors.find(name);
    require(found != tensors.end() && found->second.dim() == static_cast<int64_t>(dims.size()),
            LITEBOOST_BAD_FOLDER, kManifest, " tells of ", name, ", which ", kWeights,
            " does not hold so; export the model again");
    found->second = found->second.permute(dims);
  }
  for (const ProgramFile& program : manifest_.programs) {
    std::vector<at::Tensor> constants;
    for (const std::string& name : program.constants) {
      const auto found = tensors.find(name);
      require(found != tensors.end(), LITEBOOST_BAD_FOLDER, kWeights, " has no ", name, ", which ",
              program.file, " needs; export the model again");
      constants.push_back(found->second);
    }
    const std::string text(folder.open(program.file)->text());
    check_operators(text, program.file, manifest_.operators);
    try {
      programs_.push_back(load_program(text, constants));
    } catch (const c10::Error& fault) {
      throw Fault(LITEBOOST_BAD_FOLDER, program.file + " is no program of this version: " +
                                            fault.what_without_backtrace() + "; export the model again");
    }
  }
}

Session::~Session() {
  for (const int64_t program : programs_) unload_program(program);
}

void Session::reset() {
  for (State& state : cache_) {
    state.held = at::Tensor();
    state.end = 0;
  }
  logits_.clear();
  seen_ = 0;
  is_whole_ = true;
}

void Session::read(const int64_t* ids, size_t count) {
  require(is_whole_, LITEBOOST_FAILED, "the last run has failed; reset the sequence first");
  const auto more = static_cast<int64_t>(std::min<size_t>(count, size_t{1} << 40));
  require(seen_ + more <= manifest_.longest, LITEBOOST_FULL, more, " tokens behind ", seen_,
          " are more than the ", manifest_.longest,
          " of this folder; reset the sequence, or export the model with more --max-tokens");
  for (int64_t at = 0; at < more; ++at) {
    require(ids[at] >= 0 && ids[at] < manifest_.vocabulary, LITEBOOST_BAD_ARGUMENT, "token ", ids[at],
            " is none of the ", manifest_.vocabulary, " of the model");
  }
  if (seen_ == 0 && more > 0) {
    run(program_for(manifest_.prompts, more), ids, more);
    return;
  }
  for (int64_t at = 0; at < more; ++at) run(program_for(manifest_.steps, seen_), ids + at, 1);
}

void Session::run(int64_t which, const int64_t* ids, int64_t count) {
  const c10::NoGradGuard no_gradients;
  const ProgramFile& program = manifest_.programs.at(static_cast<size_t>(which));
  is_whole_ = false;
  std::vector<at::Tensor> inputs;
  for (const std::string& name : program.arguments) inputs.push_back(argument(name, ids, count));
  std::vector<int64_t> numbers;
  for (const Number& each : program.numbers) numbers.push_back(number(each, program.arguments, inputs));
  for (const int64_t entry : program.kept) {
    const at::Tensor& held = cache_[static_cast<size_t>(entry)].held;
    // What a program does not append to it was recorded with as a tensor by itself.
    inputs.push_back(held.defined() && !contains(program.appended, entry) ? held.contiguous() : held);
    require(inputs.back().defined(), LITEBOOST_BAD_FOLDER, program.file,
            " reads what no run before has kept; export the model again");
  }
  for (const int64_t entry : program.appended) {
    inputs.push_back(cache_[static_cast<size_t>(entry)].memory);
    numbers.push_back(cache_[static_cast<size_t>(entry)].end);
  }
  const std::vector<at::Tensor> results = run_program(programs_[static_cast<size_t>(which)], inputs, numbers);
  const size_t kept = program.returned.size(), made = static_cast<size_t>(program.results);
  require(results.size() == made + kept, LITEBOOST_BAD_FOLDER, program.file, " stopped for ", count,
          " tokens behind ", seen_, ": it was recorded for others; export the model again");
  const at::Tensor logits = results[static_cast<size_t>(program.logits)].to(at::kFloat).contiguous();
  require(logits.numel() >= manifest_.vocabulary && logits.numel() % manifest_.vocabulary == 0,
          LITEBOOST_BAD_FOLDER, program.file, " gives ", logits.numel(), " logits for a vocabulary of ",
          manifest_.vocabulary);
  const float* end = logits.const_data_ptr<float>() + logits.numel();
  logits_.assign(end - manifest_.vocabulary, end);
  for (size_t at = 0; at < kept; ++at) {
    const int64_t entry = program.returned[at];
    keep(static_cast<size_t>(entry), results[made + at], contains(program.appended, entry), count);
  }
  seen_ += count;
  is_whole_ = true;
}

at::Tensor Session::argument(const std::string& name, const int64_t* ids, int64_t count) const {
  if (name == "input_ids") return at::from_blob(const_cast<int64_t*>(ids), {1, count}, at::kLong).clone();
  if (name == "attention_mask") return at::ones({1, seen_ + count}, at::kLong);
  const at::Tensor places = at::arange(seen_, seen_ + count, at::kLong);
  return name == "position_ids" ? places.unsqueeze(0) : places;
}

int64_t Session::number(const Number& what, const std::vector<std::string>& names,
                        const std::vector<at::Tensor>& arguments) const {
  switch (what.kind) {
    case Number::Kind::length: {
      const at::Tensor& held = cache_[static_cast<size_t>(what.entry)].held;
      require(held.defined() && what.dim < held.dim(), LITEBOOST_BAD_FOLDER,
              "manifest.json counts what no run before has kept; export the model again");
      return held.size(what.dim);
    }
    case Number::Kind::argument: {
      const auto found = std::find(names.begin(), names.end(), what.argument);
      require(found != names.end(), LITEBOOST_BAD_FOLDER, "manifest.json counts ", what.argument,
              ", which the program does not take; export the model again");
      return arguments[static_cast<size_t>(found - names.begin())].size(what.dim);
    }
    case Number::Kind::capacity:
      return manifest_.longest;
    case Number::Kind::seen:
      return seen_ + what.value;
    case Number::Kind::constant:
      break;
  }
  return what.value;
}

void Session::keep(size_t entry, const at::Tensor& value, bool is_appended, int64_t count) {
  State& state = cache_[entry];
  const int64_t dim = manifest_.cache[entry].dim;
  if (is_appended) {  // it lies in the memory already
    state.held = value;
    state.end += count;
  } else if (dim < 0) {
    state.held = value.contiguous();
  } else {
    require(value.dim() > dim && value.size(dim) <= manifest_.longest, LITEBOOST_BAD_FOLDER,
            "manifest.json: ", manifest_.cache[entry].name,
            " is not so large as a run has made it; export the model again");
    state.held = state.memory.narrow(dim, 0, value.size(dim));
    state.held.copy_(value);
    state.end = value.size(dim);
  }
}

}  // namespace liteboost::runner
