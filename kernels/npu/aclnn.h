// How an aclnn operator of CANN is found and called.
//
// An operator is a C function whose pointer dlsym gives untyped. Here its exact signature is written once, as
// template arguments, and every argument of a call is converted to it by the compiler:
//
//   const Operator<Tensor, Tensor, double, Tensor, Tensor> kRmsNorm{"aclnnRmsNorm"};
//   if (kRmsNorm.available()) kRmsNorm(x, weight, eps, out, rstd);
//
// Found as torch_npu finds its own: vendors' libraries (ASCEND_CUSTOM_OPP_PATH, ASCEND_OPP_PATH/vendors), CANN's
// libopapi_*.so, libopapi.so. A release of CANN that lacks one has no such symbol; never ask for its version.
//
// A call runs the operator's first phase (arguments, workspace) on the calling thread and puts the second (the
// launch) on torch_npu's queue for the current stream, in order under TASK_QUEUE_ENABLE 0, 1 and 2. So what the
// operator refuses is an exception here and now, `OperatorRefusal`, not an error reported by some later call; then
// nothing has been launched, and `serve` computes the call by its reference. Where CANN has an
// executor cache, a repeated call skips the first phase.
//
// Source: "aclnn API" of CANN's documentation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "npu/torch_npu_api.h"

namespace liteboost {

using OptionalTensor = std::optional<at::Tensor>;

inline bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

}  // namespace liteboost

namespace liteboost::npu {

// The kinds of arguments. An undefined Tensor is a null pointer, which optional arguments may be; so is an
// Integers without value. A Text must outlive the program (the launch happens later): pass literals.
using Tensor = at::Tensor;
using Tensors = at::TensorList;
using Integers = c10::OptionalIntArrayRef;
using Scalar = at::Scalar;
using Text = const char*;

template <class T>
constexpr std::string_view kind_name() {
  if constexpr (std::is_same_v<T, Tensor>) return "tensor";
  if constexpr (std::is_same_v<T, Tensors>) return "tensors";
  if constexpr (std::is_same_v<T, Integers>) return "integers";
  if constexpr (std::is_same_v<T, Scalar>) return "scalar";
  if constexpr (std::is_same_v<T, Text>) return "text";
  if constexpr (std::is_same_v<T, double>) return "double";
  if constexpr (std::is_same_v<T, float>) return "float";
  if constexpr (std::is_same_v<T, int64_t>) return "int64";
  if constexpr (std::is_same_v<T, int32_t>) return "int32";
  if constexpr (std::is_same_v<T, int8_t>) return "int8";
  if constexpr (std::is_same_v<T, bool>) return "bool";
}

// The argument as CANN takes it. Numbers keep their type exactly: the function pointer is made of them.
template <class T>
auto to_acl(const T& argument) {
  if constexpr (std::is_arithmetic_v<T>) {
    return argument;
  } else if constexpr (std::is_same_v<T, Text>) {
    return const_cast<char*>(argument);
  } else {
    return ConvertType(argument);
  }
}

template <class T>
void add_to_key(const T& argument) {
  if constexpr (std::is_arithmetic_v<T>) {
    MemcpyToBufImpl(&argument, sizeof(argument));
  } else if constexpr (std::is_same_v<T, Text>) {
    add_param_to_buf(std::string(argument));
  } else {
    add_param_to_buf(argument);
  }
}

// Gives an object of `to_acl` back.
void release(aclTensor* tensor);
void release(aclIntArray* integers);
void release(aclTensorList* tensors);
void release(aclScalar* scalar);
template <class T>
void release(T) {}

// What the first phase of an operator refused, in CANN's own words.
class OperatorRefusal : public c10::Error {
 public:
  OperatorRefusal(const char* name, int status, const char* words);

  // The operator and the status: refusals that are counted together, for CANN's words may differ in each call.
  const std::string& operator_and_status() const { return operator_and_status_; }

 private:
  std::string operator_and_status_;
};

// What captured decode steps ask of every launch: npu/graph_tasks.cpp puts its functions of these names here. A library
// outside of this package, which is compiled without that file, keeps those that do nothing.
struct LaunchHooks {
  void (*check)(const char* name);  // check_launch
  bool (*is_renewable)();
  void* (*workspace)(uint64_t size);  // workspace_of_renewed
};
extern LaunchHooks launch_hooks;

// Makes CANN as deterministic as torch is asked to be, and gives the level, which is part of a cached executor's key.
uint32_t apply_determinism();

// What is the same for every signature.
class AnyOperator {
 public:
  AnyOperator(const char* name, std::string signature);
  AnyOperator(const AnyOperator&) = delete;

  const char* name() const { return name_; }
  // The kinds of its arguments, in order: "tensor,tensor,double,tensor,tensor".
  const std::string& signature() const { return signature_; }
  // Whether this CANN has both phases of it. Looked up once.
  bool available() const;
  // The file it was found in; empty where it is not available.
  std::string library() const;

  // Every operator of this library, in no particular order.
  static const std::vector<const AnyOperator*>& all();

 protected:
  // Throws OperatorRefusal.
  [[noreturn]] void refuse(int status) const;

  void* launch_ = nullptr;
  void* prepare_ = nullptr;

 private:
  const char* name_;
  std::string signature_;
};

template <class... Kinds>
class Operator : public AnyOperator {
 public:
  explicit Operator(const char* name) : AnyOperator(name, joined()) {}

  void operator()(const Kinds&... arguments) const {
    TORCH_CHECK(available(), "liteboost: this CANN has no ", name(), "; use a release that has it");
    launch_hooks.check(name());
    InitExecCommonCtx();
    const aclrtStream stream = GetAclStream();
    const uint32_t determinism = apply_determinism();
    if (!launch_hooks.is_renewable() && launched_from_cache(stream, determinism, arguments...)) return;

    uint64_t workspace_size = 0;
    aclOpExecutor* executor = nullptr;
    auto converted = std::make_tuple(to_acl(arguments)..., &workspace_size, &executor);
    const int status = std::apply(
        [this](auto... each) { return reinterpret_cast<int (*)(decltype(each)...)>(prepare_)(each...); },
        converted);
    if (status != 0) {
      std::apply([](auto... each) { (release(each), ...); }, converted);
      UnInitExecCommonCtx();
      refuse(status);
    }
    void* workspace = launch_hooks.workspace(workspace_size);
    if (workspace == nullptr) workspace = GetWorkSpaceAddr(workspace_size);
    RunAclCall(name(), [=, launch = launch_]() -> int {
      InitExecSubTheadCtx(stream);
      const int result = ExecuteApiFunc(launch, stream, workspace, workspace_size, executor);
      std::apply([](auto... each) { (release(each), ...); }, converted);
      ReleaseExecCommonCtx();
      return result;
    });
    UnInitExecCommonCtx();
  }

 private:
  static std::string joined() {
    std::string text;
    ((text += text.empty() ? "" : ",", text += kind_name<Kinds>()), ...);
    return text;
  }

  bool launched_from_cache(aclrtStream stream, uint32_t determinism, const Kinds&... arguments) const {
    if (!CheckAndInitFunc(name())) return false;
    MemcpyToBufImpl(&determinism, sizeof(determinism));
    AddCacheConfigParams(stream, GetCacheParams());
    add_param_to_buf(std::string(name()));
    (add_to_key(arguments), ...);
    return ExecuteCachedOp(stream, name(), launch_);
  }
};

}  // namespace liteboost::npu
