// Phases 1 and 2 of every operator, and errors.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "errors.h"
#include "exec_cache.h"
#include "faults.h"
#include "operator.h"
#include "trace.h"

extern "C" {
void simcann_set_error(const char*);
void* simcann_ptr(const void*);
bool simcann_capture(aclrtStream, const char*, std::function<int()>*);
bool simcann_is_device_memory(const void* address, size_t bytes);
int simcann_stream_id(aclrtStream);
void simcann_lose_device(int error, const char* name);
int simcann_lost();
}

namespace sim {
namespace {

constexpr int kNullPointer = 161001, kBadParameter = 161002, kRuntime = 361001, kInner = 561103;

/// Bytes of workspace an operator asks for. Those that need one on hardware do here, so that a caller who gives none,
/// or one that is too small or shared, is found: every launch fills it with 0xA5.
uint64_t workspace_of(const std::string& name) {
  static const char* needing[] = {"Attention", "Matmul", "MatMul", "aclnnMm",    "Addmm",
                                  "Sort",      "Topk",   "Moe",    "AddRmsNorm", "DeltaRule",
                                  "Reduce",    "Index",  "Cumsum", "Softmax",    "RotaryPosition"};
  for (const char* part : needing) {
    if (name.find(part) != std::string::npos) return 4096;
  }
  return 0;
}

/// Every tensor must lie in memory of the device; a host pointer faults on hardware.
void check_addresses(const std::vector<Argument>& arguments) {
  int k = 0;
  for (const auto& argument : arguments) {
    k++;
    for (auto* tensor : argument.tensors) {
      if (!tensor || !tensor->i->device || !tensor->i->t.numel()) continue;
      const auto& t = tensor->i->t;
      size_t extent = 1;
      for (int64_t d = 0; d < t.dim(); d++) extent += (t.size(d) - 1) * t.stride(d);
      TORCH_CHECK(simcann_is_device_memory(tensor->i->device, extent * t.element_size()), "argument ", k,
                  " at ", tensor->i->device, " (", extent * t.element_size(),
                  " bytes) is not memory of the device");
    }
  }
}

struct Launch {
  std::shared_ptr<Prepared> prepared;
  void* workspace;
  int stream;
};

int execute(const Launch& launch) {
  const Prepared& op = *launch.prepared;
  if (const int code = simcann_lost()) return code;
  while (injected_error(op.name, kHangs)) pause();
  if (const int code = injected_error(op.name, kOnDevice)) {  // the launch succeeds, and nothing is written
    simcann_lose_device(code, op.name.c_str());
    return 0;
  }
  try {
    // Plain CPU kernels, below autograd, autocast and torch modes, invisible to profilers.
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet(
        {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
         c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
         c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::AutocastCPU,
         c10::DispatchKey::AutocastPrivateUse1}));
    at::DisableRecordFunctionGuard unrecorded;
    if (op.workspace) {
      TORCH_CHECK(simcann_is_device_memory(launch.workspace, op.workspace), "the workspace at ",
                  launch.workspace, " is not ", op.workspace, " bytes of device memory");
      memset(simcann_ptr(launch.workspace), 0xA5, op.workspace);
    }
    auto arguments = op.arguments();
    check_addresses(arguments);
    LaunchTrace trace(op.name, launch.stream, arguments);
    op.compute();
    if (is_wrong(op.name)) make_wrong(arguments);
    trace.finish();
    return 0;
  } catch (const std::exception& error) {
    int code = fail(op.name.c_str(), error.what(), kRuntime);
    fprintf(stderr, "[simcann] %s: %s\n", op.name.c_str(), error.what());
    return code;
  }
}

}  // namespace

int fail(const char* name, const char* what, int code) {
  std::string message = std::string("simcann ") + name + ": " + what;
  auto at = message.find("\nException raised");
  if (at != std::string::npos) message.resize(at);
  simcann_set_error(message.c_str());
  static const bool verbose = getenv("SIMCANN_VERBOSE") && atoi(getenv("SIMCANN_VERBOSE"));
  if (verbose) fprintf(stderr, "[simcann] %d %s\n", code, message.c_str());
  return code;
}

int guarded(const char* name, const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const NullError& error) {
    return fail(name, error.what(), kNullPointer);
  } catch (const std::logic_error& error) {
    fprintf(stderr, "[simcann] %s: %s\n", name, error.what());
    return fail(name, error.what(), kInner);
  } catch (const std::exception& error) {
    return fail(name, error.what(), kBadParameter);
  }
}

int phase_one(const char* name, uint64_t* workspace_size, aclOpExecutor** executor,
              const std::function<std::shared_ptr<Prepared>()>& make) {
  if (int code = injected_error(name, kPhaseOne)) return fail(name, "injected fault in phase 1", code);
  return guarded(name, [&] {
    require_soc(name);
    auto prepared = make();
    prepared->workspace = workspace_of(name);
    remember_executor(*prepared);
    *workspace_size = prepared->workspace;
    *executor = new aclOpExecutor{prepared};
    born(*executor, Kind::executor);
  });
}

int run(const char* name, aclOpExecutor* executor, void* workspace, uint64_t workspace_size,
        aclrtStream stream) {
  std::shared_ptr<Prepared> prepared;
  try {
    TORCH_CHECK(executor, "the executor is null");
    expect(executor, Kind::executor);
    prepared = executor->prepared;
    TORCH_CHECK(prepared->name == name, "the executor is one of ", prepared->name);
    TORCH_CHECK(workspace_size >= prepared->workspace, "the workspace has ", workspace_size, " bytes, ",
                prepared->workspace, " are needed");
  } catch (const std::exception& error) {
    return fail(name, error.what(), kBadParameter);
  }
  if (!executor->repeatable && dies(executor, Kind::executor)) retire([executor] { delete executor; });
  if (int code = injected_error(name, kPhaseTwo)) return fail(name, "injected fault in phase 2", code);
  Launch launch{prepared, workspace, simcann_stream_id(stream)};
  std::function<int()> task = [launch] { return execute(launch); };
  return simcann_capture(stream, name, &task) ? 0 : task();
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
