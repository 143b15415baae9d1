#include "runner/manifest.h"

#include "runner/fault.h"

namespace liteboost::runner {
namespace {

constexpr int64_t kFormat = 1;
constexpr int64_t kMost = int64_t{1} << 40;  // of any size: products of them are checked where they are made
constexpr int64_t kMostDims = 16;
constexpr const char* kArguments[] = {"input_ids", "position_ids", "cache_position", "attention_mask"};

void check(bool condition, const std::string& words) {
  require(condition, LITEBOOST_BAD_FOLDER, "manifest.json: ", words, "; export the model again");
}

int64_t index_below(const Json& value, size_t count) {
  return value.integer(0, static_cast<int64_t>(count) - 1);
}

std::vector<int64_t> indices_below(const Json& values, size_t count) {
  return values.integers(0, static_cast<int64_t>(count) - 1);
}

std::string argument_of(const Json& value) {
  for (const char* known : kArguments) {
    if (value.text() == known) return known;
  }
  check(false, "a program takes '" + value.text() + "', which this version does not make");
  return {};
}

Entry entry_of(const Json& from) {
  Entry made;
  made.name = from["name"].text();
  made.dtype = from["dtype"].text();
  made.sizes = from["sizes"].integers(1, kMost);
  const auto dims = static_cast<int64_t>(made.sizes.size());
  check(dims <= kMostDims, made.name + " has too many dimensions");
  made.dim = from["dim"].integer(-1, dims - 1);
  return made;
}

Number number_of(const Json& from, const std::vector<Entry>& cache) {
  Number made;
  const std::string& kind = from["kind"].text();
  if (kind == "length") {
    made.kind = Number::Kind::length;
    made.entry = index_below(from["entry"], cache.size());
    made.dim = index_below(from["dim"], cache[static_cast<size_t>(made.entry)].sizes.size());
  } else if (kind == "argument") {
    made.kind = Number::Kind::argument;
    made.argument = argument_of(from["argument"]);
    made.dim = from["dim"].integer(0, 1);
  } else if (kind == "seen") {
    made.kind = Number::Kind::seen;
    made.value = from["add"].integer(-kMost, kMost);
  } else if (kind == "constant") {
    made.kind = Number::Kind::constant;
    made.value = from["value"].integer(-kMost, kMost);
  } else {
    check(kind == "capacity", "'" + kind + "' is no kind of number");
    made.kind = Number::Kind::capacity;
  }
  return made;
}

ProgramFile program_of(const Json& from, const std::vector<Entry>& cache) {
  ProgramFile made;
  made.file = from["file"].text();
  made.constants = from["constants"].texts();
  for (const Json& each : from["arguments"].list()) made.arguments.push_back(argument_of(each));
  made.kept = indices_below(from["kept"], cache.size());
  made.appended = indices_below(from["appended"], cache.size());
  made.returned = indices_below(from["returned"], cache.size());
  for (const int64_t each : made.appended) {
    check(cache[static_cast<size_t>(each)].dim >= 0, made.file + " appends to what does not grow");
  }
  for (const Json& each : from["numbers"].list()) made.numbers.push_back(number_of(each, cache));
  made.results = from["results"].integer(1, 1000);
  made.logits = from["logits"].integer(0, made.results - 1);
  return made;
}

// One behind the other, from 1 to `last`.
std::vector<Range> ranges_of(const Json& from, int64_t last, size_t programs) {
  std::vector<Range> made;
  int64_t next = 1;
  for (const Json& each : from.list()) {
    const std::vector<int64_t> three = each.integers(0, kMost);
    check(three.size() == 3 && three[0] == next && three[1] >= next && three[1] <= last &&
              three[2] < static_cast<int64_t>(programs),
          "the lengths that programs are for are not one behind the other");
    made.push_back({three[0], three[1], three[2]});
    next = three[1] + 1;
  }
  check(next == last + 1, "there is no program for some lengths");
  return made;
}

Sampling sampling_of(const Json& from) {
  Sampling made;
  made.sample = from["sample"].boolean();
  made.temperature = from["temperature"].number();
  made.top_k = from["top_k"].integer(0, kMost);
  made.top_p = from["top_p"].number();
  made.repetition_penalty = from["repetition_penalty"].number();
  const std::string fault = made.fault();
  check(fault.empty(), fault);
  return made;
}

}  // namespace

Manifest Manifest::parse(const Json& from) {
  const int64_t format = from["format"].integer(0, kMost);
  require(format == kFormat, LITEBOOST_BAD_FOLDER, "manifest.json has format ", format,
          ", and this runner reads ", kFormat,
          "; export the model again, or take the runner of the version that wrote it");
  Manifest made;
  made.torch = from["torch"].text();
  made.schemas = from["schemas"].text();
  made.model = from["model"].text();
  made.longest = from["longest"].integer(2, int64_t{1} << 31);
  made.vocabulary = from["vocabulary"].integer(1, int64_t{1} << 31);
  made.operators = from["operators"].texts();
  for (const Json& each : from["cache"].list()) made.cache.push_back(entry_of(each));
  check(!made.cache.empty(), "nothing is kept between runs");
  for (const Json& each : from["programs"].list()) made.programs.push_back(program_of(each, made.cache));
  made.prompts = ranges_of(from["prompts"], made.longest, made.programs.size());
  made.steps = ranges_of(from["steps"], made.longest - 1, made.programs.size());
  made.stops = from["generation"]["stop"].integers(0, made.vocabulary - 1);
  made.sampling = sampling_of(from["generation"]);
  for (const auto& [name, dims] : from["transposed"].items()) {
    made.transposed[name] = dims.integers(0, kMostDims);
  }
  return made;
}

}  // namespace liteboost::runner
