#include "npu/serve.h"

#include <acl/acl.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <unordered_map>

#include "build_info.h"
#include "npu/aclnn.h"
#include "torch_npu/csrc/core/npu/NPUGraphsUtils.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace liteboost::npu {
namespace {

thread_local int verifying = 0;
// Why the last call on this thread was not served, of those made while verifying.
thread_local std::string last_reason;

// The answers of this process, by op and a blank and kind. The text is kept for ever: a Refusal points to it.
struct Verdicts {
  std::shared_mutex mutex;
  std::unordered_map<std::string, std::string> by_kind;
};

Verdicts& verdicts() {
  static Verdicts instance;
  return instance;
}

Refusal verdict_of(const std::string& key, bool& known) {
  Verdicts& all = verdicts();
  const std::shared_lock lock(all.mutex);
  const auto found = all.by_kind.find(key);
  known = found != all.by_kind.end();
  return known && !found->second.empty() ? found->second.c_str() : kServed;
}

// Compares in Python, which keeps the answer for later processes too.
std::string compare(const char* op, const std::string& kind) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("liteboost_reference::_verify", "")
      .typed<std::string(c10::string_view, c10::string_view)>()
      .call(op, kind);
}

struct Counts {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, int64_t> by_reason;  // (op, reason or "")
};

Counts& counts() {
  static Counts instance;
  return instance;
}

void count(const std::string& op, const std::string& reason) {
  if (verifying > 0) {
    last_reason = reason;
    return;
  }
  Counts& all = counts();
  const std::lock_guard lock(all.mutex);
  ++all.by_reason[{op, reason}];
}

std::string soc_name() {
  const char* text = aclrtGetSocName();
  return text != nullptr ? text : "unknown";
}

}  // namespace

bool is_capturing() {
  return c10_npu::currentStreamCaptureStatusMayInitCtx() != c10_npu::CaptureStatus::None;
}

void synchronize_current_stream() { c10_npu::getCurrentNPUStream().synchronize(); }

Refusal unverified(const char* op, const std::string& kind) {
  if (verifying > 0) return kServed;
  const std::string key = std::string(op) + " " + kind;
  bool known = false;
  const Refusal answer = verdict_of(key, known);
  if (known) return answer;
  // Nor where a captured step is renewed, which waits for that meanwhile.
  if (is_capturing() || launch_hooks.is_renewable()) {
    return "not compared with its reference before a graph was captured: run the step once before";
  }
  std::string words = compare(op, kind);
  Verdicts& all = verdicts();
  {
    const std::unique_lock lock(all.mutex);
    all.by_kind.emplace(key, std::move(words));
  }
  return verdict_of(key, known);
}

Refusal reason_of(const OperatorRefusal& refusal) {
  static std::mutex mutex;
  static auto* kept = new std::unordered_map<std::string, std::string>;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = kept->try_emplace(refusal.operator_and_status());
  if (is_new) place->second = refusal.what_without_backtrace();
  return place->second.c_str();
}

void count_served(const char* op) { count(op, ""); }
void count_fallback(const char* op, Refusal reason) { count(op, reason); }

Soc soc() {
  static const Soc found = [] {
    const std::string name = soc_name();
    if (name.rfind("Ascend910B", 0) == 0) return Soc::a910b;
    if (name.rfind("Ascend910_93", 0) == 0) return Soc::a910c;
    if (name.rfind("Ascend310P", 0) == 0) return Soc::a310p;
    if (name.rfind("Ascend950", 0) == 0) return Soc::a950;
    return Soc::other;
  }();
  return found;
}

const char* dtype_name(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return "bf16";
  if (dtype == at::kHalf) return "fp16";
  return dtype == at::kFloat ? "fp32" : "other";
}

namespace {

// Read from the file, too. Through a pointer that the compiler does not see through: known, the text is cut into
// the moves that copy it.
const char* volatile build_info_text = LB_BUILD_INFO;

std::string build_info() { return build_info_text; }

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return out;
}

// JSON: {"aclnnX": {"signature": "...", "available": true, "library": "..."}, ...}
std::string operators() {
  std::ostringstream out;
  const char* separator = "{";
  for (const AnyOperator* each : AnyOperator::all()) {
    out << separator << '"' << each->name() << "\": {\"signature\": \"" << each->signature()
        << "\", \"available\": " << (each->available() ? "true" : "false") << ", \"library\": \""
        << escaped(each->library()) << "\"}";
    separator = ", ";
  }
  out << '}';
  return out.str();
}

// JSON: [["op", "reason, or empty for served", calls], ...]
std::string counts_as_json() {
  Counts& all = counts();
  const std::lock_guard lock(all.mutex);
  std::ostringstream out;
  const char* separator = "[";
  for (const auto& [key, calls] : all.by_reason) {
    out << separator << "[\"" << escaped(key.first) << "\", \"" << escaped(key.second) << "\", " << calls
        << ']';
    separator = ", ";
  }
  out << (all.by_reason.empty() ? "[]" : "]");
  return out.str();
}

// JSON: [["op", "kind", "reason, or empty for verified"], ...]
std::string verdicts_as_json() {
  Verdicts& all = verdicts();
  const std::shared_lock lock(all.mutex);
  std::ostringstream out;
  const char* separator = "[";
  for (const auto& [key, reason] : std::map(all.by_kind.begin(), all.by_kind.end())) {
    const size_t blank = key.find(' ');
    out << separator << "[\"" << key.substr(0, blank) << "\", \"" << escaped(key.substr(blank + 1))
        << "\", \"" << escaped(reason) << "\"]";
    separator = ", ";
  }
  out << (all.by_kind.empty() ? "[]" : "]");
  return out.str();
}

void forget_counts() {
  Counts& all = counts();
  const std::lock_guard lock(all.mutex);
  all.by_reason.clear();
}

void forget_verdicts() {
  const std::unique_lock lock(verdicts().mutex);
  verdicts().by_kind.clear();
}

void count_fallback_of(c10::string_view op, c10::string_view reason) {
  count(std::string(op), std::string(reason));
}

void set_verifying(bool on) { verifying += on ? 1 : -1; }
std::string reason_while_verifying() { return last_reason; }

}  // namespace
}  // namespace liteboost::npu

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_build_info() -> str", &liteboost::npu::build_info);
  m.def("_npu_soc() -> str", &liteboost::npu::soc_name);
  m.def("_npu_operators() -> str", &liteboost::npu::operators);
  m.def("_npu_verdicts() -> str", &liteboost::npu::verdicts_as_json);
  m.def("_npu_counts() -> str", &liteboost::npu::counts_as_json);
  m.def("_npu_count_fallback(str op, str reason) -> ()", &liteboost::npu::count_fallback_of);
  m.def("_npu_forget_counts() -> ()", &liteboost::npu::forget_counts);
  m.def("_npu_forget_verdicts() -> ()", &liteboost::npu::forget_verdicts);
  m.def("_npu_set_verifying(bool on) -> ()", &liteboost::npu::set_verifying);
  m.def("_npu_reason_while_verifying() -> str", &liteboost::npu::reason_while_verifying);
}
