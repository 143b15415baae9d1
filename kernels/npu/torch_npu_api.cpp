// The functions of torch_npu_api.h, for a torch_npu that lacks one of them (2.9.0, 2.9.0.post2, 2.10.0): the same calls of
// CANN in the same order, as its own operators make them (EXEC_NPU_CMD of op-plugin, which is compiled into it). Not
// compiled for other releases.
//
// One thing is left out: how many cores a stream may use (torch.npu.set_stream_limit), which those releases do not
// export. Operators of ours use as many as there are.
#include "npu/torch_npu_api.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "torch_npu/csrc/core/npu/NPUFormat.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace at_npu::native {
// Of OpCommand.h and NPUWorkspaceAllocator.h, which include Python's headers.
class OpCommand {
 public:
  static void RunOpApiV2(const std::string& name, const std::function<int()>& call, bool is_synchronous);
};
at::Tensor allocate_workspace(uint64_t size, aclrtStream stream);
}  // namespace at_npu::native

namespace {

namespace fs = std::filesystem;

// The directories behind `variable`, a list with colons.
std::vector<fs::path> paths_of(const char* variable, char separator = ':') {
  std::vector<fs::path> paths;
  const char* value = std::getenv(variable);
  std::stringstream text(value != nullptr ? value : "");
  for (std::string each; std::getline(text, each, separator);) paths.emplace_back(each);
  return paths;
}

// Libraries of vendors, those of ASCEND_CUSTOM_OPP_PATH first, then those that vendors/config.ini names.
std::vector<fs::path> vendor_libraries() {
  const fs::path inside = fs::path("op_api") / "lib" / "libcust_opapi.so";
  std::vector<fs::path> libraries;
  for (const fs::path& each : paths_of("ASCEND_CUSTOM_OPP_PATH")) libraries.push_back(each / inside);
  for (const fs::path& each : paths_of("ASCEND_OPP_PATH")) {
    const std::string head = "load_priority=";
    std::ifstream config(each / "vendors" / "config.ini");
    for (std::string line; std::getline(config, line);) {
      if (line.rfind(head, 0) != 0) continue;
      std::stringstream names(line.substr(head.size()));
      for (std::string name; std::getline(names, name, ',');) {
        libraries.push_back(each / "vendors" / name / inside);
      }
      break;
    }
  }
  return libraries;
}

// Whether code of this file may run here: it is root's, or of the user who runs this.
bool is_ours(const fs::path& library) {
  struct stat file{};
  return stat(library.c_str(), &file) == 0 && (file.st_uid == 0 || file.st_uid == getuid());
}

// Where operators are looked up, in this order.
std::vector<void*> open_libraries() {
  std::vector<void*> opened;
  const auto open = [&opened](const std::string& name) {
    if (void* handle = dlopen(name.c_str(), RTLD_LAZY)) opened.push_back(handle);
  };
  for (const fs::path& library : vendor_libraries()) {
    if (is_ours(library)) open(library.string());
  }
  for (const fs::path& home : paths_of("ASCEND_HOME_PATH")) {
    std::error_code failed;
    for (const auto& entry : fs::directory_iterator(home / "lib64", failed)) {
      const std::string name = entry.path().filename().string();
      if (name.rfind("libopapi_", 0) == 0 && entry.path().extension() == ".so") open(name);
    }
  }
  open("libopapi.so");
  return opened;
}

// The name of a function, as an argument of a template.
template <size_t length>
struct Name {
  constexpr Name(const char (&text)[length]) { std::copy_n(text, length, value); }
  char value[length];
};

// Calls a function of CANN, looked up once; one that it lacks is left out, and gives a null.
template <Name name, class Result, class... Arguments>
Result call(Arguments... arguments) {
  static void* const found = GetOpApiFuncAddr(name.value);
  if (found == nullptr) return Result();
  return reinterpret_cast<Result (*)(Arguments...)>(found)(arguments...);
}

aclDataType acl_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return ACL_FLOAT;
    case at::kHalf:
      return ACL_FLOAT16;
    case at::kBFloat16:
      return ACL_BF16;
    case at::kDouble:
      return ACL_DOUBLE;
    case at::kBool:
      return ACL_BOOL;
    case at::kByte:
      return ACL_UINT8;
    case at::kChar:
      return ACL_INT8;
    case at::kShort:
      return ACL_INT16;
    case at::kInt:
      return ACL_INT32;
    case at::kLong:
      return ACL_INT64;
    case at::kComplexFloat:
      return ACL_COMPLEX64;
    default:
      TORCH_CHECK(false, "liteboost: no operator of CANN is called with ", type);
  }
}

// The format of a tensor that is stored as it is indexed goes by its number of axes alone.
aclFormat plain_format(int64_t axes) {
  return axes == 3   ? ACL_FORMAT_NCL
         : axes == 4 ? ACL_FORMAT_NCHW
         : axes == 5 ? ACL_FORMAT_NCDHW
                     : ACL_FORMAT_ND;
}

bool is_plain(int64_t format) {
  for (const aclFormat each : {ACL_FORMAT_ND, ACL_FORMAT_NCHW, ACL_FORMAT_NHWC, ACL_FORMAT_NCDHW,
                               ACL_FORMAT_NDHWC, ACL_FORMAT_NCL}) {
    if (format == each) return true;
  }
  return false;
}

// What CANN keeps an executor under; it is read until the next call of this thread.
thread_local std::string cache_key;
// CANN's limit. What is longer has no key.
constexpr size_t kLongestKey = 8192;

void add_to_cache_key(const at::Tensor& tensor) {
  for (const at::IntArrayRef& numbers : {tensor.sizes(), tensor.strides()}) {
    MemcpyToBufImpl(numbers.data(), numbers.size() * sizeof(int64_t));
    cache_key += ',';
  }
  const std::array<int64_t, 3> rest{tensor.storage_offset(), static_cast<int64_t>(tensor.storage().nbytes()),
                                    at_npu::native::get_npu_format(tensor)};
  const at::ScalarType type = tensor.scalar_type();
  MemcpyToBufImpl(rest.data(), sizeof(rest));
  MemcpyToBufImpl(&type, sizeof(type));
  call<"AddTensorAddrToCachedList", void>(const_cast<void*>(tensor.storage().data()));
}

}  // namespace

void* GetOpApiFuncAddr(const char* name) {
  static const std::vector<void*> libraries = open_libraries();
  for (void* library : libraries) {
    if (void* found = dlsym(library, name)) return found;
  }
  return nullptr;
}

aclTensor* ConvertType(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  TORCH_CHECK(tensor.is_privateuseone(), "liteboost: an operator of CANN is given a tensor on ",
              tensor.device());
  const int64_t stored = at_npu::native::get_npu_format(tensor);
  const aclFormat format = is_plain(stored) ? plain_format(tensor.dim()) : static_cast<aclFormat>(stored);
  const std::vector<int64_t> sizes =
      is_plain(stored)
          ? std::vector<int64_t>{static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize())}
          : at_npu::native::get_npu_storage_sizes(tensor);
  return call<"aclCreateTensor", aclTensor*, const int64_t*, uint64_t, aclDataType, const int64_t*, int64_t,
              aclFormat, const int64_t*, uint64_t, void*>(
      tensor.sizes().data(), tensor.dim(), acl_type(tensor.scalar_type()), tensor.strides().data(),
      tensor.storage_offset(), format, sizes.data(), sizes.size(),
      const_cast<void*>(tensor.storage().data()));
}

aclIntArray* ConvertType(const c10::OptionalIntArrayRef& integers) {
  if (!integers.has_value()) return nullptr;
  return call<"aclCreateIntArray", aclIntArray*, const int64_t*, uint64_t>(integers->data(),
                                                                           integers->size());
}

aclTensorList* ConvertType(const at::TensorList& tensors) {
  std::vector<const aclTensor*> converted;
  for (const at::Tensor& tensor : tensors) converted.push_back(ConvertType(tensor));
  return call<"aclCreateTensorList", aclTensorList*, const aclTensor* const*, uint64_t>(converted.data(),
                                                                                        converted.size());
}

aclScalar* ConvertType(const at::Scalar& scalar) {
  const auto made = [](auto value, aclDataType type) {
    return call<"aclCreateScalar", aclScalar*, void*, aclDataType>(&value, type);
  };
  if (scalar.isBoolean()) return made(scalar.toBool(), ACL_BOOL);
  if (scalar.isIntegral(false)) return made(scalar.toLong(), ACL_INT64);
  return made(scalar.toDouble(), ACL_DOUBLE);
}

// The executor cache. Its parameters are those of torch_npu's releases; here they are added where they are asked for.
CacheParams GetCacheParams() { return {}; }

bool CheckAndInitFunc(const char* name) {
  static const bool has_all = [] {
    for (const char* needed : {"InitPTACacheThreadLocal", "SetPTACacheHashKey", "PTAFindExecCache",
                               "AddTensorAddrToCachedList", "CanUsePTACache"}) {
      if (GetOpApiFuncAddr(needed) == nullptr) return false;
    }
    return true;
  }();
  if (!has_all) return false;
  call<"InitPTACacheThreadLocal", void>();
  call<"SetPTACacheHashKey", void, uint8_t*, size_t>(nullptr, 0);
  cache_key.clear();
  return call<"CanUsePTACache", bool>(name);
}

void AddCacheConfigParams(aclrtStream stream, const CacheParams&) {
  const auto device = c10_npu::getCurrentNPUStream().device_index();
  MemcpyToBufImpl(&device, sizeof(device));
  MemcpyToBufImpl(&stream, sizeof(stream));
}

void MemcpyToBufImpl(const void* data, size_t size) {
  cache_key.append(static_cast<const char*>(data), size);
}

void add_param_to_buf(const std::string& text) { cache_key += text + ','; }

void add_param_to_buf(const at::Tensor& tensor) {
  if (tensor.defined()) add_to_cache_key(tensor);
  cache_key += ',';
}

void add_param_to_buf(const c10::OptionalIntArrayRef& integers) {
  if (integers.has_value()) {
    const size_t count = integers->size();
    MemcpyToBufImpl(&count, sizeof(count));
    MemcpyToBufImpl(integers->data(), count * sizeof(int64_t));
  }
  cache_key += ',';
}

void add_param_to_buf(const at::TensorList& tensors) {
  const size_t count = tensors.size();
  MemcpyToBufImpl(&count, sizeof(count));
  for (const at::Tensor& tensor : tensors) add_param_to_buf(tensor);
}

void add_param_to_buf(const at::Scalar& scalar) {
  const at::ScalarType type = scalar.type();
  const double value = scalar.toDouble();
  const int64_t whole = scalar.isFloatingPoint() ? 0 : scalar.toLong();
  MemcpyToBufImpl(&type, sizeof(type));
  MemcpyToBufImpl(&value, sizeof(value));
  MemcpyToBufImpl(&whole, sizeof(whole));
}

bool ExecuteCachedOp(aclrtStream stream, const char* name, void* launch) {
  if (cache_key.size() > kLongestKey) return false;
  auto* key = reinterpret_cast<uint8_t*>(cache_key.data());
  call<"SetPTACacheHashKey", void>(key, cache_key.size());
  uint64_t size = 0;
  auto* executor = call<"PTAFindExecCache", aclOpExecutor*>(key, cache_key.size(), &size);
  if (executor == nullptr) return false;
  void* workspace = GetWorkSpaceAddr(size);
  RunAclCall(name, [=] { return ExecuteApiFunc(launch, stream, workspace, size, executor); });
  UnInitExecCommonCtx();
  return true;
}

void InitExecCommonCtx() { call<"InitHugeMemThreadLocal", int, void*, bool>(nullptr, false); }

void UnInitExecCommonCtx() {
  call<"UnInitHugeMemThreadLocal", void, void*, bool>(nullptr, false);
  call<"UnInitPTACacheThreadLocal", void>();
}

void ReleaseExecCommonCtx() { call<"ReleaseHugeMem", void, void*, bool>(nullptr, false); }

aclrtStream GetAclStream() { return c10_npu::getCurrentNPUStream().stream(false); }

// Given back at once: what else gets that memory runs behind the launch, on the same stream.
void* GetWorkSpaceAddr(uint64_t size) {
  if (size == 0) return nullptr;
  return const_cast<void*>(at_npu::native::allocate_workspace(size, GetAclStream()).storage().data());
}

void InitExecSubTheadCtx(aclrtStream) {}

int ExecuteApiFunc(const void* launch, aclrtStream stream, void* workspace, uint64_t workspace_size,
                   aclOpExecutor* executor) {
  using Launch = int (*)(void*, uint64_t, aclOpExecutor*, aclrtStream);
  return reinterpret_cast<Launch>(const_cast<void*>(launch))(workspace, workspace_size, executor, stream);
}

void RunAclCall(const std::string& name, const std::function<int()>& call) {
  at_npu::native::OpCommand::RunOpApiV2(name, call, false);
}

void SetExecConfig() {
  aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, at::globalContext().deterministicAlgorithms() ? 1 : 0);
}
