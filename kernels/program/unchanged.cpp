// Whether Python's dicts and lists still hold the objects they held, several thousand of them between two tokens.
//
// Called through ctypes with the interpreter's lock held. The few functions of Python's stable ABI it needs are looked
// up in the process, so that this library needs no Python to be linked or loaded.
#include <dlfcn.h>

#include <cstddef>

namespace {

using Object = void;

struct Python {
  int (*dict_next)(Object*, std::ptrdiff_t*, Object**, Object**);
  std::ptrdiff_t (*dict_size)(Object*);
  std::ptrdiff_t (*list_size)(Object*);
  Object* (*list_item)(Object*, std::ptrdiff_t);
};

template <typename Function>
void look_up(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

const Python* python() {
  static const Python found = [] {
    Python p{};
    look_up(p.dict_next, "PyDict_Next");
    look_up(p.dict_size, "PyDict_Size");
    look_up(p.list_size, "PyList_Size");
    look_up(p.list_item, "PyList_GetItem");
    return p;
  }();
  const bool is_whole = found.dict_next && found.dict_size && found.list_size && found.list_item;
  return is_whole ? &found : nullptr;
}

// The same keys with the same values, in the same order.
bool is_same_dict(const Python& p, Object* live, Object* saved) {
  if (p.dict_size(live) != p.dict_size(saved)) return false;
  std::ptrdiff_t at_live = 0, at_saved = 0;
  Object *key = nullptr, *value = nullptr, *saved_key = nullptr, *saved_value = nullptr;
  while (p.dict_next(saved, &at_saved, &saved_key, &saved_value)) {
    if (!p.dict_next(live, &at_live, &key, &value) || key != saved_key || value != saved_value) return false;
  }
  return true;
}

bool is_same_list(const Python& p, Object* live, Object* saved) {
  const std::ptrdiff_t size = p.list_size(saved);
  if (p.list_size(live) != size) return false;
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    if (p.list_item(live, i) != p.list_item(saved, i)) return false;
  }
  return true;
}

}  // namespace

// 1 where each dict of `dicts`, and each list of `lists`, holds what the one at the same place of the saved ones does,
// and each dict of `empty` nothing; 0 where not, or where this is not to be had. All arguments are lists.
extern "C" __attribute__((visibility("default"))) int liteboost_unchanged(Object* dicts, Object* saved_dicts,
                                                                          Object* lists, Object* saved_lists,
                                                                          Object* empty) {
  const Python* p = python();
  if (p == nullptr) return 0;
  for (std::ptrdiff_t i = 0, size = p->list_size(empty); i < size; ++i) {
    if (p->dict_size(p->list_item(empty, i)) != 0) return 0;
  }
  for (std::ptrdiff_t i = 0, size = p->list_size(dicts); i < size; ++i) {
    if (!is_same_dict(*p, p->list_item(dicts, i), p->list_item(saved_dicts, i))) return 0;
  }
  for (std::ptrdiff_t i = 0, size = p->list_size(lists); i < size; ++i) {
    if (!is_same_list(*p, p->list_item(lists, i), p->list_item(saved_lists, i))) return 0;
  }
  return 1;
}
