// Argument handles: what an operator of the simulator sees of each argument of its aclnn function. A handle is one
// pointer wide and trivially copyable, so it is passed exactly as the pointer the caller gives.
#pragma once
#include <optional>
#include <ostream>
#include <tuple>

#include "objects.h"

namespace sim {

struct TensorHandle {
  aclTensor* p = nullptr;
  explicit operator bool() const { return p != nullptr; }
  at::Tensor& operator*() const {
    TORCH_CHECK(p, "null tensor argument");
    return p->i->t;
  }
  at::Tensor* operator->() const { return &**this; }
  std::optional<at::Tensor> opt() const { return p ? std::optional<at::Tensor>(p->i->t) : std::nullopt; }
  at::Tensor orundef() const { return p ? p->i->t : at::Tensor(); }
  aclFormat format() const { return p->i->format; }
  const std::vector<int64_t>& storage_shape() const { return p->i->storage_shape; }
  /// Says that only this much of an output was filled (shapes that depend on data).
  void shrink(at::IntArrayRef shape) const { p->i->view = shape.vec(); }
};
struct T : TensorHandle {};  // read
struct O : TensorHandle {};  // written, never read
struct R : TensorHandle {};  // read and written

struct TensorListHandle {
  aclTensorList* p = nullptr;
  explicit operator bool() const { return p != nullptr; }
  std::vector<at::Tensor> operator*() const {
    std::vector<at::Tensor> all;
    if (p) {
      for (auto* t : p->v) all.push_back(t ? t->i->t : at::Tensor());
    }
    return all;
  }
  size_t size() const { return p ? p->v.size() : 0; }
  at::Tensor& at(size_t k) const { return p->v.at(k)->i->t; }
};
struct TL : TensorListHandle {};
struct OL : TensorListHandle {};
struct RL : TensorListHandle {};

struct S {
  aclScalar* p = nullptr;
  explicit operator bool() const { return p != nullptr; }
  const at::Scalar& operator*() const {
    TORCH_CHECK(p, "null scalar argument");
    return p->s;
  }
  std::optional<at::Scalar> opt() const { return p ? std::optional<at::Scalar>(p->s) : std::nullopt; }
};
struct SL {
  aclScalarList* p = nullptr;
  std::vector<at::Scalar> operator*() const {
    std::vector<at::Scalar> all;
    if (p) {
      for (auto* s : p->v) all.push_back(s->s);
    }
    return all;
  }
};
struct IA {
  aclIntArray* p = nullptr;
  explicit operator bool() const { return p != nullptr; }
  at::IntArrayRef operator*() const { return p ? at::IntArrayRef(p->v) : at::IntArrayRef(); }
};
struct FA {
  aclFloatArray* p = nullptr;
  explicit operator bool() const { return p != nullptr; }
};
struct BA {
  aclBoolArray* p = nullptr;
  explicit operator bool() const { return p != nullptr; }
  bool operator[](size_t i) const { return p->v.at(i) != 0; }
  size_t size() const { return p ? p->v.size() : 0; }
};
using DT = aclDataType;
using CP = const char*;

// ---- the name of a kind of argument, as a signature has it --------------------------------------------------
template <class A>
constexpr const char* kind_name() {
  if constexpr (std::is_base_of_v<TensorHandle, A>) return "tensor";
  if constexpr (std::is_base_of_v<TensorListHandle, A>) return "tensor_list";
  if constexpr (std::is_same_v<A, S>) return "scalar";
  if constexpr (std::is_same_v<A, SL>) return "scalar_list";
  if constexpr (std::is_same_v<A, IA>) return "int_array";
  if constexpr (std::is_same_v<A, FA>) return "float_array";
  if constexpr (std::is_same_v<A, BA>) return "bool_array";
  if constexpr (std::is_same_v<A, DT>) return "dtype";
  if constexpr (std::is_same_v<A, CP>) return "string";
  if constexpr (std::is_same_v<A, double>) return "double";
  if constexpr (std::is_same_v<A, float>) return "float";
  if constexpr (std::is_same_v<A, bool>) return "bool";
  if constexpr (std::is_same_v<A, int8_t>) return "int8";
  if constexpr (std::is_same_v<A, int32_t>) return "int32";
  if constexpr (std::is_same_v<A, int64_t>) return "int64";
  if constexpr (std::is_same_v<A, uint64_t>) return "uint64";
}
template <class A>
constexpr const char* direction_name() {
  if constexpr (std::is_same_v<A, O> || std::is_same_v<A, OL>) return "out";
  if constexpr (std::is_same_v<A, R> || std::is_same_v<A, RL>) return "inout";
  return "in";
}
template <class... A>
std::string signature_of() {
  std::string all;
  ((all += (all.empty() ? "" : ","), all += kind_name<A>()), ...);
  return all;
}
template <class... A>
std::string directions_of() {
  std::string all;
  ((all += (all.empty() ? "" : ","), all += direction_name<A>()), ...);
  return all;
}

// ---- copies kept by the executor until phase 2: the caller may destroy an argument after phase 1 ---------------
/// Whether an object is checked to be alive before it is copied; a copy of ours is not registered as alive.
enum class From { caller, executor };

template <class A>
struct Owned {
  A value;
  Owned(A a, From) : value(a) {}
  A get() { return value; }
};
template <class Handle, class Object, Kind kind>
struct OwnedObject {
  std::unique_ptr<Object> copy;
  OwnedObject(Handle a, From from) {
    if (from == From::caller) expect(a.p, kind);
    if (a.p) copy.reset(new Object(*a.p));
  }
  Handle get() {
    Handle a;
    a.p = copy.get();
    return a;
  }
};
template <class Handle, class List, class Element, Kind kind, Kind element_kind>
struct OwnedList {
  std::vector<std::unique_ptr<Element>> elements;
  std::unique_ptr<List> copy;
  OwnedList(Handle a, From from) {
    if (from == From::caller) expect(a.p, kind);
    if (!a.p) return;
    copy.reset(new List);
    for (auto* e : a.p->v) {
      if (from == From::caller) expect(e, element_kind);
      elements.emplace_back(e ? new Element(*e) : nullptr);
      copy->v.push_back(elements.back().get());
    }
  }
  Handle get() {
    Handle a;
    a.p = copy.get();
    return a;
  }
};
#define SIM_OWNED(Handle, ...)                    \
  template <>                                     \
  struct Owned<Handle> : __VA_ARGS__ {            \
    using Base = __VA_ARGS__;                     \
    Owned(Handle a, From from) : Base(a, from) {} \
  }
SIM_OWNED(T, OwnedObject<T, aclTensor, Kind::tensor>);
SIM_OWNED(O, OwnedObject<O, aclTensor, Kind::tensor>);
SIM_OWNED(R, OwnedObject<R, aclTensor, Kind::tensor>);
SIM_OWNED(S, OwnedObject<S, aclScalar, Kind::scalar>);
SIM_OWNED(IA, OwnedObject<IA, aclIntArray, Kind::int_array>);
SIM_OWNED(FA, OwnedObject<FA, aclFloatArray, Kind::float_array>);
SIM_OWNED(BA, OwnedObject<BA, aclBoolArray, Kind::bool_array>);
SIM_OWNED(TL, OwnedList<TL, aclTensorList, aclTensor, Kind::tensor_list, Kind::tensor>);
SIM_OWNED(OL, OwnedList<OL, aclTensorList, aclTensor, Kind::tensor_list, Kind::tensor>);
SIM_OWNED(RL, OwnedList<RL, aclTensorList, aclTensor, Kind::tensor_list, Kind::tensor>);
SIM_OWNED(SL, OwnedList<SL, aclScalarList, aclScalar, Kind::scalar_list, Kind::scalar>);
#undef SIM_OWNED
template <>
struct Owned<CP> {
  bool given;
  std::string text;
  Owned(CP a, From) : given(a != nullptr), text(a ? a : "") {}
  CP get() { return given ? text.c_str() : nullptr; }
};

}  // namespace sim
