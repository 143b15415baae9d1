// The two phases of an operator, errors, and the trace of launches.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "operator.h"

extern "C" void simcann_set_error(const char*);
extern "C" bool simcann_capture(aclrtStream, std::function<void()>*);

namespace sim {

std::string describe(const aclTensor* t) {
  if (!t) return "-";
  std::string s = dtype_name(t->i->dtype);
  s += "[";
  for (size_t k = 0; k < t->i->view.size(); k++) s += (k ? "," : "") + std::to_string(t->i->view[k]);
  s += "]";
  if (t->i->t.defined() && !t->i->t.is_contiguous()) s += "~";
  return s;
}

static FILE* trace_file() {
  static FILE* file = [] {
    const char* path = getenv("SIMCANN_TRACE");
    if (!path || !*path) return static_cast<FILE*>(nullptr);
    if (!strcmp(path, "stderr") || !strcmp(path, "-")) return stderr;
    std::string name = path;
    auto at = name.find("%p");
    if (at != std::string::npos) name.replace(at, 2, std::to_string(getpid()));
    FILE* opened = fopen(name.c_str(), "a");
    if (opened) setvbuf(opened, nullptr, _IOLBF, 0);
    return opened;
  }();
  return file;
}
bool tracing() { return trace_file() != nullptr; }

int fail(const char* name, const char* what, int code) {
  std::string message = std::string("simcann ") + name + ": " + what;
  auto at = message.find("\nException raised");
  if (at != std::string::npos) message.resize(at);
  simcann_set_error(message.c_str());
  fprintf(stderr, "[simcann] %s\n", message.c_str());
  return code;
}

int guarded(const char* name, const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const NullError& error) {
    return fail(name, error.what(), 161001);
  } catch (const std::exception& error) {
    return fail(name, error.what(), 161002);
  }
}

static int execute(const std::string& name, const std::string& arguments,
                   const std::function<void()>& compute) {
  if (FILE* file = trace_file()) fprintf(file, "%s\t%s\n", name.c_str(), arguments.c_str());
  try {
    // Plain CPU kernels, below autograd, autocast and torch modes, invisible to profilers.
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet(
        {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
         c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
         c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::AutocastCPU,
         c10::DispatchKey::AutocastPrivateUse1}));
    at::DisableRecordFunctionGuard unrecorded;
    compute();
    return 0;
  } catch (const std::exception& error) {
    return fail(name.c_str(), error.what(), 561103);
  }
}

int run(aclOpExecutor* executor, aclrtStream stream) {
  try {
    TORCH_CHECK(executor, "the executor is null");
    expect(executor, Kind::executor);
  } catch (const std::exception& error) {
    return fail("phase 2", error.what(), 561001);
  }
  int code = 0;
  std::function<void()> launch = [name = executor->name, arguments = executor->arguments,
                                  compute = executor->compute] { execute(name, arguments, compute); };
  if (!simcann_capture(stream, &launch))
    code = execute(executor->name, executor->arguments, executor->compute);
  if (!executor->repeatable && dies(executor, Kind::executor)) delete executor;
  return code;
}

void put(const at::Tensor& out, const at::Tensor& result) {
  if (out.sizes() == result.sizes()) {
    if (out.numel()) out.copy_(result);
    return;
  }
  TORCH_CHECK(out.numel() == result.numel() || result.numel() == 1, "result of shape ", result.sizes(),
              " does not fit the output of shape ", out.sizes());
  if (!out.numel()) return;
  if (out.numel() == result.numel()) {
    out.copy_(result.reshape(out.sizes()));
  } else {
    out.copy_(result.reshape({}).expand(out.sizes()));
  }
}

}  // namespace sim

SIM_EXPORT int aclnnInit(const char*) { return 0; }
SIM_EXPORT int aclnnFinalize() { return 0; }
