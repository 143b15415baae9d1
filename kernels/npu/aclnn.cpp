#include "npu/aclnn.h"

#include <ATen/Context.h>
#include <acl/acl.h>
#include <dlfcn.h>

namespace liteboost::npu {
namespace {

std::vector<const AnyOperator*>& registered() {
  static std::vector<const AnyOperator*> operators;
  return operators;
}

// Calls CANN's function that gives an object back; null needs none.
template <class T>
void destroy(const char* function, T* object) {
  if (object == nullptr) return;
  if (void* found = GetOpApiFuncAddr(function)) reinterpret_cast<int (*)(const T*)>(found)(object);
}

}  // namespace

void release(aclTensor* tensor) { destroy("aclDestroyTensor", tensor); }
void release(aclIntArray* integers) { destroy("aclDestroyIntArray", integers); }
void release(aclTensorList* tensors) { destroy("aclDestroyTensorList", tensors); }
void release(aclScalar* scalar) { destroy("aclDestroyScalar", scalar); }

constinit LaunchHooks launch_hooks{[](const char*) {}, [] { return false; },
                                   [](uint64_t) -> void* { return nullptr; }};

uint32_t apply_determinism() {
  const bool is_asked = at::globalContext().deterministicAlgorithms();
  if (c10_npu::GetDeterministicLevel != nullptr && at_npu::native::ApplyDeterministicLevel != nullptr) {
    const uint32_t level = c10_npu::GetDeterministicLevel();
    at_npu::native::ApplyDeterministicLevel(static_cast<int64_t>(level), is_asked, true);
    return level;
  }
  TORCH_CHECK(SetExecConfig != nullptr,
              "liteboost: this torch_npu has neither c10_npu::GetDeterministicLevel nor ",
              "SetExecConfig, by which operators are told to be deterministic; use one of 2.9.0 to 2.14");
  SetExecConfig();
  return is_asked ? 1 : 0;
}

AnyOperator::AnyOperator(const char* name, std::string signature)
    : name_(name), signature_(std::move(signature)) {
  launch_ = GetOpApiFuncAddr(name);
  prepare_ = GetOpApiFuncAddr((std::string(name) + "GetWorkspaceSize").c_str());
  registered().push_back(this);
}

bool AnyOperator::available() const { return launch_ != nullptr && prepare_ != nullptr; }

std::string AnyOperator::library() const {
  Dl_info found;
  return launch_ != nullptr && dladdr(launch_, &found) != 0 && found.dli_fname ? found.dli_fname : "";
}

const std::vector<const AnyOperator*>& AnyOperator::all() { return registered(); }

void AnyOperator::refuse(int status) const {
  const char* words = aclGetRecentErrMsg();
  throw OperatorRefusal(name_, status, words != nullptr && *words != '\0' ? words : "CANN gives no message");
}

OperatorRefusal::OperatorRefusal(const char* name, int status, const char* words)
    : c10::Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                 c10::str("liteboost: ", name, " refuses its arguments with status ", status, ": ", words)),
      operator_and_status_(c10::str(name, " ", status)) {}

}  // namespace liteboost::npu
