// The two phases of an operator: phase 1 checks the arguments and keeps copies of them, phase 2 runs it.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "registry.h"

namespace sim {

/// One argument as the framework sees it, whatever its type: for the trace, bytes and FLOPs, faults, the cache.
struct Argument {
  const char* kind;
  const char* direction;
  std::vector<aclTensor*> tensors;  // one for a tensor (null: not given), those of a list
  std::vector<int64_t> integers;    // an integer, a bool, an aclDataType, or an array of them
  double number = 0;                // a float, a double or an aclScalar
  std::string text;
  bool given = true;  // false: a null pointer
};

/// What phase 1 leaves for phase 2.
struct Prepared {
  std::string name;
  uint64_t workspace = 0;
  std::function<void()> compute;
  std::function<std::vector<Argument>()> arguments;
  std::function<std::shared_ptr<Prepared>()> clone;  // with copies of the arguments
  std::vector<const void*> addresses;                // of the caller's tensors, when the executor was cached
};

/// Records an error (aclGetRecentErrMsg) and returns its code.
int fail(const char* name, const char* what, int code);
/// An operator that does not take FRACTAL_NZ refuses it.
void require_known_formats(const char* op, const std::vector<Argument>& arguments);
/// Phase 1 around `make`: faults, SoC, error codes, the executor cache.
int phase_one(const char* name, uint64_t* workspace_size, aclOpExecutor** executor,
              const std::function<std::shared_ptr<Prepared>()>& make);
/// Phase 2.
int run(const char* name, aclOpExecutor* executor, void* workspace, uint64_t workspace_size,
        aclrtStream stream);

template <class A>
Argument argument_of(const A& a) {
  Argument all{kind_name<A>(), direction_name<A>(), {}, {}, 0, {}, true};
  if constexpr (std::is_arithmetic_v<A> || std::is_same_v<A, DT>) {
    all.integers = {static_cast<int64_t>(a)};
    all.number = static_cast<double>(a);
  } else if constexpr (std::is_same_v<A, CP>) {
    all.given = a != nullptr;
    if (a) all.text = a;
  } else {
    all.given = a.p != nullptr;
    if constexpr (std::is_base_of_v<TensorHandle, A>) {
      all.tensors = {a.p};
    } else if (!a.p) {
      return all;
    } else if constexpr (std::is_base_of_v<TensorListHandle, A>) {
      all.tensors = a.p->v;
    } else if constexpr (std::is_same_v<A, S>) {
      all.number = a.p->s.isComplex() ? 0 : a.p->s.toDouble();
    } else if constexpr (std::is_same_v<A, IA> || std::is_same_v<A, BA>) {
      all.integers.assign(a.p->v.begin(), a.p->v.end());
    }
  }
  return all;
}

template <class... A>
std::shared_ptr<Prepared> prepared_from(const char* name, void (*compute)(A...),
                                        std::shared_ptr<std::tuple<Owned<A>...>> owned) {
  auto made = std::make_shared<Prepared>();
  made->name = name;
  made->compute = [compute, owned] { std::apply([&](auto&... o) { compute(o.get()...); }, *owned); };
  made->arguments = [owned] {
    return std::apply([](auto&... o) { return std::vector<Argument>{argument_of(o.get())...}; }, *owned);
  };
  made->clone = [name, compute, owned] {
    auto copy = std::apply(
        [](auto&... o) {
          return std::make_shared<std::tuple<Owned<A>...>>(Owned<A>(o.get(), From::executor)...);
        },
        *owned);
    return prepared_from<A...>(name, compute, copy);
  };
  return made;
}

template <class... A>
int prepare(const char* name, uint64_t* workspace_size, aclOpExecutor** executor, void (*compute)(A...),
            A... a) {
  return phase_one(name, workspace_size, executor, [&] {
    auto owned = std::make_shared<std::tuple<Owned<A>...>>(Owned<A>(a, From::caller)...);
    std::apply([&](auto&... o) { require_known_formats(name, {argument_of(o.get())...}); }, *owned);
    if (auto* limits = limits_of(name)) {
      auto check = reinterpret_cast<void (*)(A...)>(limits);
      std::apply([&](auto&... o) { check(o.get()...); }, *owned);
    }
    return prepared_from<A...>(name, compute, owned);
  });
}

}  // namespace sim
