#include "npu/aclnn.h"

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
