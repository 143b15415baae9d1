// The functions of libtorch_npu.so that aclnn.h is made of.
//
// They are what its own macro EXEC_NPU_CMD_EXT, for libraries like this one, calls (op_api_common_base.h of
// torch_npu 2.9.0.post4 to 2.14). Declared here because that header includes Python's, which are often not installed, and
// because its macro does not look at what the first phase answers. For a torch_npu without one of them they are
// defined in torch_npu_api.cpp. What else only some of these releases have is weak: null where it lacks.
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl.h>
#include <c10/util/OptionalArrayRef.h>

#include <functional>
#include <string>

struct aclOpExecutor;
struct aclTensor;
struct aclIntArray;
struct aclTensorList;
struct aclScalar;

// A symbol of CANN's operator libraries, or null.
void* GetOpApiFuncAddr(const char* name);

// Objects of CANN for arguments; null for what is undefined or has no value.
aclTensor* ConvertType(const at::Tensor& tensor);
aclIntArray* ConvertType(const c10::OptionalIntArrayRef& integers);
aclTensorList* ConvertType(const at::TensorList& tensors);
aclScalar* ConvertType(const at::Scalar& scalar);

// The executor cache: the key of a call is put together in a buffer of the thread.
// CacheParams is three fields in 12 bytes where c10_npu::GetDeterministicLevel is lacking, else two in 8. Either is
// returned in the two registers that this is, and AddCacheConfigParams reads no more of it than its own has.
struct CacheParams {
  uint64_t opaque[2];
};
CacheParams GetCacheParams();
bool CheckAndInitFunc(const char* name);
void AddCacheConfigParams(aclrtStream stream, const CacheParams& parameters);
void MemcpyToBufImpl(const void* data, size_t size);
void add_param_to_buf(const std::string& text);
void add_param_to_buf(const at::Tensor& tensor);
void add_param_to_buf(const c10::OptionalIntArrayRef& integers);
void add_param_to_buf(const at::TensorList& tensors);
void add_param_to_buf(const at::Scalar& scalar);
// Whether the call was found, and has been put on the queue.
bool ExecuteCachedOp(aclrtStream stream, const char* name, void* launch);

// The two phases.
void InitExecCommonCtx();
void UnInitExecCommonCtx();
void ReleaseExecCommonCtx();
aclrtStream GetAclStream();
void* GetWorkSpaceAddr(uint64_t size);
void InitExecSubTheadCtx(aclrtStream stream);
int ExecuteApiFunc(const void* launch, aclrtStream stream, void* workspace, uint64_t workspace_size,
                   aclOpExecutor* executor);
void RunAclCall(const std::string& name, const std::function<int()>& call);

// How deterministic CANN is to be. 2.13, 2.14 and newer post releases of 2.9.0 to 2.12.0:
namespace c10_npu {
[[gnu::weak]] uint32_t GetDeterministicLevel();
}
namespace at_npu::native {
[[gnu::weak]] void ApplyDeterministicLevel(int64_t level, bool deterministic, bool is_operator);
}
// Others:
[[gnu::weak]] void SetExecConfig();
