// Whether functions are still where they were found, and nobody intercepts what is called: asked several hundred times
// a forward (liteboost_adaptor/watch.py), so it is one builtin function of Python with what it compares in C++.
//
// As in unchanged.cpp, the functions of Python it needs are looked up in the process.
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <dlfcn.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace {

using Object = void;
using Function = Object* (*)(Object*, Object*);

// PyMethodDef of Python's stable ABI.
struct Method {
  const char* name;
  Function function;
  int flags;
  const char* doc;
};
constexpr int kNoArguments = 0x0004;  // METH_NOARGS
constexpr const char* kCapsule = "liteboost_adaptor.watch";

struct Python {
  Object* (*dict_item)(Object*, Object*);
  std::ptrdiff_t (*set_size)(Object*);
  std::ptrdiff_t (*list_size)(Object*);
  Object* (*list_item)(Object*, std::ptrdiff_t);
  std::ptrdiff_t (*text_length)(Object*);
  Object* (*code_of)(Object*);
  Object* (*call)(Object*, Object*);
  Object* (*new_capsule)(void*, const char*, void (*)(Object*));
  void* (*in_capsule)(Object*, const char*);
  Object* (*new_function)(Method*, Object*, Object*);
  void (*hold)(Object*);
  void (*let_go)(Object*);
};

template <typename Pointer>
bool look_up(Pointer& function, const char* name) {
  function = reinterpret_cast<Pointer>(dlsym(RTLD_DEFAULT, name));
  return function != nullptr;
}

const Python* python() {
  static Python p{};
  static const bool is_whole =
      look_up(p.dict_item, "PyDict_GetItemWithError") && look_up(p.set_size, "PySet_Size") &&
      look_up(p.list_size, "PyList_Size") && look_up(p.list_item, "PyList_GetItem") &&
      look_up(p.text_length, "PyUnicode_GetLength") && look_up(p.code_of, "PyFunction_GetCode") &&
      look_up(p.call, "PyObject_CallObject") && look_up(p.new_capsule, "PyCapsule_New") &&
      look_up(p.in_capsule, "PyCapsule_GetPointer") && look_up(p.new_function, "PyCFunction_NewEx") &&
      look_up(p.hold, "Py_IncRef") && look_up(p.let_go, "Py_DecRef");
  return is_whole ? &p : nullptr;
}

// What is compared, and what is asked where it differs. Whoever asks keeps all these objects alive.
//
// `spaces` and `names` say where objects are looked up (dicts), `held` what is expected there; `functions` are those whose
// code is expected to be in `codes`; of `kernels`, a set, and `registered`, a list, the size is compared; `said` is a
// list of the last answer alone.
struct Watch {
  Object *spaces, *names, *held, *functions, *codes, *kernels, *registered, *said, *missing, *look_again,
      *mode;
  std::vector<Object*> looked_up;  // of `spaces` and `names`, in turn
  std::ptrdiff_t count, code_count, kernel_count, registered_count;

  void note_counts(const Python& p) {
    kernel_count = p.set_size(kernels);
    registered_count = p.list_size(registered);
  }

  bool is_as_it_was(const Python& p) const {
    if (p.set_size(kernels) != kernel_count || p.list_size(registered) != registered_count) return false;
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      Object* value = p.dict_item(looked_up[2 * i], looked_up[2 * i + 1]);
      if ((value == nullptr ? missing : value) != p.list_item(held, i)) return false;
    }
    for (std::ptrdiff_t i = 0; i < code_count; ++i) {
      Object* function = p.list_item(functions, i);
      if (p.code_of(function) != p.list_item(codes, i)) return false;
    }
    return true;
  }
};

Object* ask(Object* capsule, Object*) {
  const Python& p = *python();
  auto* watch = static_cast<Watch*>(p.in_capsule(capsule, kCapsule));
  if (watch == nullptr) return nullptr;
  if (at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
      c10::impl::TorchDispatchModeTLS::stack_len() != 0) {
    Object* reason = p.call(watch->mode, nullptr);
    if (reason == nullptr || p.text_length(reason) != 0) return reason;
    p.let_go(reason);
  }
  if (!watch->is_as_it_was(p)) {
    Object* reason = p.call(watch->look_again, nullptr);
    watch->note_counts(p);
    return reason;
  }
  Object* said = p.list_item(watch->said, 0);
  p.hold(said);
  return said;
}

void destroy(Object* capsule) { delete static_cast<Watch*>(python()->in_capsule(capsule, kCapsule)); }

Method method{"ask", ask, kNoArguments,
              "The reason why the original has to run (see liteboost_adaptor.watch.Watch)."};

}  // namespace

// A builtin function without arguments, or null where there can be none. `objects` is a list of the members of Watch in
// their order; whoever asks keeps it alive for as long as the function.
extern "C" __attribute__((visibility("default"))) void* liteboost_watch(Object* objects) {
  const Python* p = python();
  constexpr std::ptrdiff_t kMembers = 11;
  if (p == nullptr || p->list_size(objects) != kMembers) return nullptr;
  auto watch = std::make_unique<Watch>();
  Object** members[kMembers] = {&watch->spaces,  &watch->names,      &watch->held,       &watch->functions,
                                &watch->codes,   &watch->kernels,    &watch->registered, &watch->said,
                                &watch->missing, &watch->look_again, &watch->mode};
  for (std::ptrdiff_t i = 0; i < kMembers; ++i) *members[i] = p->list_item(objects, i);
  watch->count = p->list_size(watch->names);
  for (std::ptrdiff_t i = 0; i < watch->count; ++i) {
    watch->looked_up.push_back(p->list_item(watch->spaces, i));
    watch->looked_up.push_back(p->list_item(watch->names, i));
  }
  watch->code_count = p->list_size(watch->functions);
  watch->note_counts(*p);
  Object* capsule = p->new_capsule(watch.get(), kCapsule, destroy);
  if (capsule == nullptr) return nullptr;
  watch.release();
  Object* function = p->new_function(&method, capsule, nullptr);
  p->let_go(capsule);
  return function;
}
