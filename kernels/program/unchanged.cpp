// Whether Python's dicts and lists still hold the objects they held, several thousand of them between two tokens.
//
// Called through ctypes with the interpreter's lock held. The few functions of Python's stable ABI it needs are looked
// up in the process, so that this library needs no Python to be linked or loaded.
//
// Between two tokens all weights pass through the caches, so nothing of it is in one. So of a dict whose version is what
// it was (CPython 3.11 and 3.12) only the first bytes are read, and those of the next are fetched meanwhile.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
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
  Object** (*attributes_of)(Object*);
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
    look_up(p.attributes_of, "_PyObject_GetDictPtr");
    look_up(p.none, "_Py_NoneStruct");
    return p;
  }();
  const bool is_whole = found.dict_next && found.dict_size && found.list_size && found.list_item &&
                        found.dict_item && found.type_of && found.let_go && found.cell_get && found.code_of &&
                        found.defaults_of && found.keyword_defaults_of && found.attributes_of && found.none;
  return is_whole ? &found : nullptr;
}

// How many objects ahead their first bytes are fetched.
constexpr std::ptrdiff_t kAhead = 24;

// How a dict begins. CPython 3.11 and 3.12 give it another version at every change (PEP 509), and no two the same.
struct DictHeader {
  std::ptrdiff_t references;
  Object* type;
  std::ptrdiff_t size;
  uint64_t version;
};

bool has_versions() {
  static const bool found = [] {
    const unsigned long* version = nullptr;
    look_up(version, "Py_Version");
    const unsigned long minor = version == nullptr ? 0 : *version >> 16;
    return minor == 0x030b || minor == 0x030c;
  }();
  return found;
}

// A version that no dict has.
constexpr uint64_t kNone = ~uint64_t{0};

uint64_t version_of(const Object* dict) {
  return has_versions() ? static_cast<const DictHeader*>(dict)->version : kNone;
}

// What dicts held, one behind the other, and what names were in others. Whoever made it keeps the objects alive.
class Remembered {
 public:
  Remembered(const Python& p, Object* dicts, Object* saved, Object* cells, Object* contents,
             Object* functions, Object* insides, Object* spaces, Object* names, Object* values,
             Object* missing, Object* objects, Object* types)
      : cells_(pairs(p, cells, contents)),
        functions_(items(p, functions)),
        insides_(items(p, insides)),
        missing_(missing) {
    for (std::ptrdiff_t i = 0, size = p.list_size(dicts); i < size; ++i) {
      std::ptrdiff_t at = 0;
      Object *key = nullptr, *value = nullptr;
      dicts_.push_back({p.list_item(dicts, i), kNone, items_.size()});
      while (p.dict_next(p.list_item(saved, i), &at, &key, &value)) items_.push_back({key, value});
    }
    dicts_.push_back({nullptr, kNone, items_.size()});
    // Those of one space follow each other.
    for (std::ptrdiff_t i = 0, size = p.list_size(spaces); i < size; ++i) {
      Object* space = p.list_item(spaces, i);
      if (spaces_.empty() || spaces_.back().dict != space) spaces_.push_back({space, kNone, named_.size()});
      named_.push_back({p.list_item(names, i), p.list_item(values, i)});
    }
    spaces_.push_back({nullptr, kNone, named_.size()});
    for (std::ptrdiff_t i = 0, size = p.list_size(objects); i < size; ++i) {
      Object* object = p.list_item(objects, i);
      objects_.push_back({object, p.list_item(types, i), attributes_of(p, object)});
    }
  }

  // The same keys with the same values, in the same order.
  bool is_still_so(const Python& p) {
    return are_still_so(dicts_, [&](const Dict& one, const Dict& next) { return holds(p, one, next); }) &&
           are_still_so(spaces_, [&](const Dict& one, const Dict& next) { return names(p, one, next); }) &&
           cells_hold_the_same(p) && functions_are_the_same(p) && objects_are_the_same(p);
  }

 private:
  struct Item {
    Object *key, *value;
  };
  // An object, its class, and the dict that its attributes are in, if it has one.
  struct Thing {
    Object *object, *type, *attributes;
  };
  // A dict, its version when it was last compared, and where what it held begins.
  struct Dict {
    Object* dict;
    uint64_t version;
    size_t first;
  };

  template <typename Compare>
  static bool are_still_so(std::vector<Dict>& all, const Compare& is_same) {
    const size_t count = all.size() - 1;
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) __builtin_prefetch(all[i + kAhead].dict);
      const uint64_t version = version_of(all[i].dict);
      if (version != kNone && version == all[i].version) continue;
      if (!is_same(all[i], all[i + 1])) return false;
      all[i].version = version;
    }
    return true;
  }

  bool holds(const Python& p, const Dict& one, const Dict& next) const {
    if (p.dict_size(one.dict) != static_cast<std::ptrdiff_t>(next.first - one.first)) return false;
    std::ptrdiff_t at = 0;
    Object *key = nullptr, *value = nullptr;
    for (size_t i = one.first; i < next.first; ++i) {
      if (!p.dict_next(one.dict, &at, &key, &value) || key != items_[i].key || value != items_[i].value)
        return false;
    }
    return true;
  }

  bool names(const Python& p, const Dict& one, const Dict& next) const {
    for (size_t i = one.first; i < next.first; ++i) {
      Object* value = p.dict_item(one.dict, named_[i].key);
      if ((value == nullptr ? missing_ : value) != named_[i].value) return false;
    }
    return true;
  }

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
    for (size_t i = 0; i < functions_.size(); ++i) {
      if (i + kAhead < functions_.size()) __builtin_prefetch(functions_[i + kAhead]);
      Object* const function = functions_[i];
      for (Object* (*part)(Object*) : {p.code_of, p.defaults_of, p.keyword_defaults_of}) {
        Object* const now = part(function);
        if ((now == nullptr ? p.none : now) != *inside++) return false;
      }
    }
    return true;
  }

  // The same class, and its attributes in the same dict: another one may be put in its place.
  bool objects_are_the_same(const Python& p) const {
    for (size_t i = 0; i < objects_.size(); ++i) {
      if (i + kAhead < objects_.size()) __builtin_prefetch(objects_[i + kAhead].object);
      const Thing& thing = objects_[i];
      Object* type = p.type_of(thing.object);
      p.let_go(type);
      if (type != thing.type || attributes_of(p, thing.object) != thing.attributes) return false;
    }
    return true;
  }

  static Object* attributes_of(const Python& p, Object* object) {
    Object* const* const place = p.attributes_of(object);
    return place == nullptr ? nullptr : *place;
  }

  std::vector<Item> cells_;
  std::vector<Thing> objects_;
  std::vector<Object*> functions_, insides_;
  std::vector<Dict> dicts_, spaces_;
  std::vector<Item> items_, named_;
  Object* missing_;
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

// What `saved`, copies of `dicts`, hold, that `cells` hold `contents` (an empty cell itself), that `functions` have
// `insides`, code, defaults and keyword defaults of one behind those of the other, that `names` are, in the dicts at
// their places in `spaces`, the objects in `values`, or not there where that is `missing`, and that `objects` are of
// `types`, with the attributes' dicts they have now; to be let go of by liteboost_forget; null where this is not to be
// had. All but `missing` are lists.
LB_CALLED_BY_PYTHON void* liteboost_note(Object* dicts, Object* saved, Object* cells, Object* contents,
                                         Object* functions, Object* insides, Object* spaces, Object* names,
                                         Object* values, Object* missing, Object* objects, Object* types) {
  const Python* p = python();
  try {
    return p == nullptr ? nullptr
                        : new Remembered(*p, dicts, saved, cells, contents, functions, insides, spaces, names,
                                         values, missing, objects, types);
  } catch (const std::bad_alloc&) {  // no exception may leave through ctypes
    return nullptr;
  }
}
LB_CALLED_BY_PYTHON void liteboost_forget(void* remembered) { delete static_cast<Remembered*>(remembered); }

// 1 where all that is remembered is still so, each list of `lists` holds what the one at the same place of
// `saved_lists` does, and each dict of `empty` nothing; else 0. All but `remembered` are lists. Called with the
// interpreter's lock, like all here: it notes versions.
LB_CALLED_BY_PYTHON int liteboost_is_as_noted(void* remembered, Object* lists, Object* saved_lists,
                                              Object* empty) {
  const Python* p = python();
  if (p == nullptr || remembered == nullptr) return 0;
  for (std::ptrdiff_t i = 0, size = p->list_size(empty); i < size; ++i) {
    fetch(*p, empty, size, i + kAhead);
    if (p->dict_size(p->list_item(empty, i)) != 0) return 0;
  }
  if (!static_cast<Remembered*>(remembered)->is_still_so(*p)) return 0;
  for (std::ptrdiff_t i = 0, size = p->list_size(lists); i < size; ++i) {
    if (!is_same_list(*p, p->list_item(lists, i), p->list_item(saved_lists, i))) return 0;
  }
  return 1;
}
