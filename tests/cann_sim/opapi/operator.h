// OP defines an operator, LIMITS what the hardware rejects of its arguments.
//
//   OP(aclnnFoo, T, x, double, eps, O, out) { put(out, ...); }
//   LIMITS(aclnnFoo, T, x, double, eps, O, out) { require(x->size(-1) % 16 == 0, "last axis a multiple of 16"); }
//
// OP exports both phases, aclnnFooGetWorkspaceSize and aclnnFoo, with the arguments in this order. Bytes, FLOPs, the
// trace, faults and the choice of release and SoC belong to the framework, never to an operator.
#pragma once
#include <sstream>

#include "arguments.h"
#include "registry.h"

namespace sim {

/// What a document says the hardware rejects; becomes error 161002 of phase 1 (ACLNN_ERR_PARAM_INVALID).
struct LimitError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// A required argument that is null; error 161001 (ACLNN_ERR_PARAM_NULLPTR).
struct NullError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Message>
std::string text_of(const Message&... message) {
  std::ostringstream o;
  (o << ... << message);
  return o.str();
}
/// In LIMITS: what must hold, and what the document says when it does not.
template <class... Message>
void require(bool holds, const Message&... message) {
  if (!holds) throw LimitError(text_of(message...));
}
/// In LIMITS: an argument that must be there.
template <class Handle>
void require_given(const Handle& argument, const char* name) {
  if (!argument) throw NullError(std::string(name) + " is null");
}

/// The generation simulated (SIMCANN_SOC): limits and symbols depend on it.
enum class Soc { ascend910b, ascend910c, ascend310p, ascend950 };
Soc soc();
/// Whether the CANN release simulated (SIMCANN_VERSION) is this one or newer, e.g. release_is("8.5.0").
bool release_is(const char* at_least);
/// Throws when the SoC simulated does not run the operator (availability.inc).
void require_soc(const char* name);

/// Copies a result into an output argument; shapes must agree (or the result be one number). Null outputs are skipped.
void put(const at::Tensor& out, const at::Tensor& result);
inline void put(const TensorHandle& out, const at::Tensor& result) {
  if (out) put(*out, result);
}

}  // namespace sim

#include "launch.h"

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))
// The text of arguments, after macros among them are expanded.
#define SIM_TEXT(...) SIM_TEXT_OF(__VA_ARGS__)
#define SIM_TEXT_OF(...) #__VA_ARGS__
#define SIM_PARENS ()
#define SIM_E(...) SIM_E4(SIM_E4(SIM_E4(SIM_E4(__VA_ARGS__))))
#define SIM_E4(...) SIM_E3(SIM_E3(SIM_E3(SIM_E3(__VA_ARGS__))))
#define SIM_E3(...) SIM_E2(SIM_E2(SIM_E2(SIM_E2(__VA_ARGS__))))
#define SIM_E2(...) __VA_ARGS__
#define SIM_DECLARE(...) SIM_E(SIM_D(__VA_ARGS__))
#define SIM_D(t, n, ...) [[maybe_unused]] t n __VA_OPT__(, SIM_DA SIM_PARENS(__VA_ARGS__))
#define SIM_DA() SIM_D
#define SIM_NAMES(...) SIM_E(SIM_N(__VA_ARGS__))
#define SIM_N(t, n, ...) n __VA_OPT__(, SIM_NA SIM_PARENS(__VA_ARGS__))
#define SIM_NA() SIM_N

#define OP(name, ...)                                                                                     \
  static void name##_compute(SIM_DECLARE(__VA_ARGS__));                                                   \
  static const sim::RegisterOperator name##_registered(#name, name##_compute, SIM_TEXT(__VA_ARGS__));     \
  SIM_EXPORT int name##GetWorkspaceSize(SIM_DECLARE(__VA_ARGS__), uint64_t* ws_,                          \
                                        aclOpExecutor** executor_) {                                      \
    return sim::prepare(#name, ws_, executor_, name##_compute, SIM_NAMES(__VA_ARGS__));                   \
  }                                                                                                       \
  SIM_EXPORT int name(void* workspace_, uint64_t bytes_, aclOpExecutor* executor_, aclrtStream stream_) { \
    return sim::run(#name, executor_, workspace_, bytes_, stream_);                                       \
  }                                                                                                       \
  static void name##_compute(SIM_DECLARE(__VA_ARGS__))

#define LIMITS(name, ...)                                                \
  static void name##_limits(SIM_DECLARE(__VA_ARGS__));                   \
  static const sim::RegisterLimits name##_limited(#name, name##_limits); \
  static void name##_limits(SIM_DECLARE(__VA_ARGS__))
