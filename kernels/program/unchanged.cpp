// Whether Python's dicts and lists still hold the objects they held, several thousand of them between two tokens.
//
// Called through ctypes with the interpreter's lock held. The few functions of Python's stable ABI it needs are looked
// up in the process, so that this library needs no Python to be linked or loaded.
//
// Between two tokens all weights pass through the caches, so nothing of it is in one: what comes next is fetched while
// one dict is compared, and memory is not waited for once an object.
#include <dlfcn.h>

#include <cstddef>
#include <new>
#include <vector>

namespace {

using Object = void;

struct Python {
  int (*dict_next)(Object*, std::ptrdiff_t*, Object**, Object**);
  std::ptrdiff_t (*dict_size)(Object*);
  std::ptrdiff_t (*list_size)(Object*);
  Object* (*list_item)(Object*, std::ptrdiff_t);
  Object* (*dict_item)(Object*, Object*);
  Object* (*type_of)(Object*);
  void (*let_go)(Object*);
  Object* (*cell_get)(Object*);
  Object* (*code_of)(Object*);
  Object* (*defaults_of)(Object*);
  Object* (*keyword_defaults_of)(Object*);
  Object* none;
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
    look_up(p.dict_item, "PyDict_GetItem");
    look_up(p.type_of, "PyObject_Type");
    look_up(p.let_go, "Py_DecRef");
    look_up(p.cell_get, "PyCell_Get");
    look_up(p.code_of, "PyFunction_GetCode");
    look_up(p.defaults_of, "PyFunction_GetDefaults");
    look_up(p.keyword_defaults_of, "PyFunction_GetKwDefaults");
    look_up(p.none, "_Py_NoneStruct");
    return p;
  }();
  const bool is_whole = found.dict_next && found.dict_size && found.list_size && found.list_item &&
                        found.dict_item && found.type_of && found.let_go && found.cell_get && found.code_of &&
                        found.defaults_of && found.keyword_defaults_of && found.none;
  return is_whole ? &found : nullptr;
}

// How many objects ahead their first bytes are fetched, and what these point at.
constexpr std::ptrdiff_t kAhead = 24, kPointedAhead = 10;

// The tables of a dict: CPython 3.11 to 3.14 have their addresses in its fifth and sixth word. Wherever they are, an
// address that is none only fetches in vain.
void fetch_tables(const Object* dict) {
  constexpr std::ptrdiff_t kLine = 64, kLines = 7;
  const char* const* words = static_cast<const char* const*>(dict);
  for (const char* table : {words[4], words[5]}) {
    for (std::ptrdiff_t line = 0; line < kLines; ++line) __builtin_prefetch(table + line * kLine);
  }
}

// What dicts held, one behind the other. Whoever made it keeps the objects alive.
class Remembered {
 public:
  Remembered(const Python& p, Object* dicts, Object* saved, Object* cells, Object* contents,
             Object* functions, Object* insides)
      : cells_(pairs(p, cells, contents)), functions_(items(p, functions)), insides_(items(p, insides)) {
    for (std::ptrdiff_t i = 0, size = p.list_size(dicts); i < size; ++i) {
      dicts_.push_back(p.list_item(dicts, i));
      std::ptrdiff_t at = 0;
      Object *key = nullptr, *value = nullptr;
      const size_t before = items_.size();
      while (p.dict_next(p.list_item(saved, i), &at, &key, &value)) items_.push_back({key, value});
      sizes_.push_back(static_cast<std::ptrdiff_t>(items_.size() - before));
    }
  }

  // The same keys with the same values, in the same order.
  bool is_still_so(const Python& p) const {
    const Item* item = items_.data();
    const auto count = static_cast<std::ptrdiff_t>(dicts_.size());
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      if (i + kAhead < count) __builtin_prefetch(dicts_[i + kAhead]);
      if (i + kPointedAhead < count) fetch_tables(dicts_[i + kPointedAhead]);
      if (p.dict_size(dicts_[i]) != sizes_[i]) return false;
      std::ptrdiff_t at = 0;
      Object *key = nullptr, *value = nullptr;
      for (std::ptrdiff_t j = 0; j < sizes_[i]; ++j, ++item) {
        if (!p.dict_next(dicts_[i], &at, &key, &value) || key != item->key || value != item->value)
          return false;
      }
    }
    return cells_hold_the_same(p) && functions_are_the_same(p);
  }

 private:
  struct Item {
    Object *key, *value;
  };

  static std::vector<Object*> items(const Python& p, Object* list) {
    std::vector<Object*> found;
    for (std::ptrdiff_t i = 0, size = p.list_size(list); i < size; ++i) found.push_back(p.list_item(list, i));
    return found;
  }

  static std::vector<Item> pairs(const Python& p, Object* keys, Object* values) {
    std::vector<Item> found;
    for (std::ptrdiff_t i = 0, size = p.list_size(keys); i < size; ++i)
      found.push_back({p.list_item(keys, i), p.list_item(values, i)});
    return found;
  }

  // An empty one is remembered with itself as what it holds.
  bool cells_hold_the_same(const Python& p) const {
    for (const Item& cell : cells_) {
      Object* content = p.cell_get(cell.key);
      if (content != nullptr) p.let_go(content);
      if ((content == nullptr ? cell.key : content) != cell.value) return false;
    }
    return true;
  }

  // Code, defaults and keyword defaults of each function, in this order.
  bool functions_are_the_same(const Python& p) const {
    const Object* const* inside = insides_.data();
    for (Object* function : functions_) {
      for (Object* (*part)(Object*) : {p.code_of, p.defaults_of, p.keyword_defaults_of}) {
        Object* const now = part(function);
        if ((now == nullptr ? p.none : now) != *inside++) return false;
      }
    }
    return true;
  }

  std::vector<Item> cells_;
  std::vector<Object*> functions_, insides_;
  std::vector<Object*> dicts_;
  std::vector<std::ptrdiff_t> sizes_;
  std::vector<Item> items_;
};

void fetch(const Python& p, Object* list, std::ptrdiff_t size, std::ptrdiff_t at) {
  if (at < size) __builtin_prefetch(p.list_item(list, at));
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

#define LB_CALLED_BY_PYTHON extern "C" __attribute__((visibility("default")))

// What `saved`, copies of `dicts`, hold, that `cells` hold `contents` (an empty cell itself), and that `functions` have
// `insides`, code, defaults and keyword defaults of one behind those of the other; to be let go of by
// liteboost_forget; null where this is not to be had. All are lists.
LB_CALLED_BY_PYTHON void* liteboost_remember(Object* dicts, Object* saved, Object* cells, Object* contents,
                                             Object* functions, Object* insides) {
  const Python* p = python();
  try {
    return p == nullptr ? nullptr : new Remembered(*p, dicts, saved, cells, contents, functions, insides);
  } catch (const std::bad_alloc&) {  // no exception may leave through ctypes
    return nullptr;
  }
}
LB_CALLED_BY_PYTHON void liteboost_forget(void* remembered) { delete static_cast<Remembered*>(remembered); }

// 1 where each dict that is remembered, and each list of `lists`, holds what it did (for lists: what the one at the same
// place of `saved_lists` does), each dict of `empty` nothing, each of `objects` is of the type in `types`, and each name of
// `names` is, in the dict at its place in `spaces`, the object in `values`, or not there where that is `missing`; else 0.
// All but `remembered` and `missing` are lists.
LB_CALLED_BY_PYTHON int liteboost_unchanged(const void* remembered, Object* lists, Object* saved_lists,
                                            Object* empty, Object* objects, Object* types, Object* spaces,
                                            Object* names, Object* values, Object* missing) {
  const Python* p = python();
  if (p == nullptr || remembered == nullptr) return 0;
  for (std::ptrdiff_t i = 0, size = p->list_size(empty); i < size; ++i) {
    fetch(*p, empty, size, i + kAhead);
    if (p->dict_size(p->list_item(empty, i)) != 0) return 0;
  }
  if (!static_cast<const Remembered*>(remembered)->is_still_so(*p)) return 0;
  for (std::ptrdiff_t i = 0, size = p->list_size(lists); i < size; ++i) {
    if (!is_same_list(*p, p->list_item(lists, i), p->list_item(saved_lists, i))) return 0;
  }
  for (std::ptrdiff_t i = 0, size = p->list_size(objects); i < size; ++i) {
    fetch(*p, objects, size, i + kAhead);
    Object* type = p->type_of(p->list_item(objects, i));
    p->let_go(type);
    if (type != p->list_item(types, i)) return 0;
  }
  for (std::ptrdiff_t i = 0, size = p->list_size(names); i < size; ++i) {
    Object* value = p->dict_item(p->list_item(spaces, i), p->list_item(names, i));
    if ((value == nullptr ? missing : value) != p->list_item(values, i)) return 0;
  }
  return 1;
}
