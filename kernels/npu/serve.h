// Whether an op runs as an aclnn operator, and what runs where it does not.
//
// Each op asks a function of its own for a `Refusal` (such as rms_norm_refusal in norm/norm_npu.cpp), then
// `unverified`: where both give kServed, the aclnn operator serves the call. Otherwise `fall_back` counts the reason
// and returns the op's reference in plain PyTorch, registered from Python under the same name and schema in namespace
// liteboost_reference. `serve` does the same where the operator's first phase refuses a call that was to be served.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <type_traits>

#include "npu/aclnn.h"

namespace liteboost::npu {

// Why an operator does not serve a call; kServed (null) when it does. Always a string literal, or as long-lived.
using Refusal = const char*;
constexpr Refusal kServed = nullptr;

// Why `op` may not run on tensors of this kind; kServed when it was compared with the reference on this device
// (now, if it has not been before). The kind is what may choose another kernel of the vendor's: dtype and
// layout class, such as "bf16 decode". Nothing is compared while a graph is captured.
Refusal unverified(const char* op, const std::string& kind);

// Whether the current stream is being captured as a graph.
bool is_capturing();

// Wait until all that was launched on the current stream is done. torch_npu's header of streams includes every
// operator of torch: only serve.cpp needs it.
void synchronize_current_stream();

// Counts.
void count_served(const char* op);
void count_fallback(const char* op, Refusal reason);

// The reference of `op`, counted.
template <class Signature>
c10::TypedOperatorHandle<Signature> fall_back(const char* op, Refusal reason) {
  count_fallback(op, reason);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("liteboost_reference::") + op).c_str(), "")
      .typed<Signature>();
}

// The reason that a refusal is counted under: the words of the first one of its operator and status.
Refusal reason_of(const OperatorRefusal& refusal);

// What `launch` gives, counted; where an operator refuses in its first phase, which launches nothing, what `reference`
// gives for that reason. `launch` must not write to what the reference reads before it has called an operator.
template <class Launch, class Reference>
auto serve(const char* op, const Launch& launch, const Reference& reference) -> decltype(launch()) {
  try {
    if constexpr (std::is_void_v<decltype(launch())>) {
      launch();
      count_served(op);
      return;
    } else {
      auto result = launch();
      count_served(op);
      return result;
    }
  } catch (const OperatorRefusal& refusal) {
    return reference(reason_of(refusal));
  }
}

// The SoC's family, from its name: 910B, 910C, 310P, 950, or other.
enum class Soc { a910b, a910c, a310p, a950, other };
Soc soc();

const char* dtype_name(at::ScalarType dtype);

}  // namespace liteboost::npu
