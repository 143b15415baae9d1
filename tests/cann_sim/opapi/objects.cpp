// aclCreate* and aclDestroy*.
#include "objects.h"

#include <deque>
#include <mutex>
#include <unordered_map>

#include "operator.h"

extern "C" void* simcann_ptr(const void*);

namespace sim {
namespace {

std::mutex live_mutex;
std::unordered_map<const void*, Kind>& live() {
  static auto* all = new std::unordered_map<const void*, Kind>;
  return *all;
}

}  // namespace

const char* to_string(Kind kind) {
  static const char* names[] = {"tensor",     "scalar",      "int array",   "float array",
                                "bool array", "tensor list", "scalar list", "executor"};
  return names[static_cast<int>(kind)];
}

void born(const void* object, Kind kind) {
  std::lock_guard<std::mutex> lock(live_mutex);
  live()[object] = kind;
}

bool dies(const void* object, Kind kind) {
  if (!object) return true;
  std::lock_guard<std::mutex> lock(live_mutex);
  auto found = live().find(object);
  if (found == live().end() || found->second != kind) {
    fail("aclDestroy", text_of("no live ", to_string(kind), " at ", object, ": destroyed twice?").c_str(),
         161002);
    return false;
  }
  live().erase(found);
  return true;
}

void retire(std::function<void()> free_it) {
  constexpr size_t kKept = 1024;
  std::function<void()> oldest;
  {
    std::lock_guard<std::mutex> lock(live_mutex);
    static auto* retired = new std::deque<std::function<void()>>;
    retired->push_back(std::move(free_it));
    if (retired->size() <= kKept) return;
    oldest = std::move(retired->front());
    retired->pop_front();
  }
  oldest();
}

void expect(const void* object, Kind kind) {
  if (!object) return;
  std::lock_guard<std::mutex> lock(live_mutex);
  auto found = live().find(object);
  TORCH_CHECK(found != live().end(), "argument at ", object, " is no live acl object, a ", to_string(kind),
              " is expected");
  TORCH_CHECK(found->second == kind, "argument is a ", to_string(found->second), ", a ", to_string(kind),
              " is expected");
}

// ACL_FLOAT8_E5M2 and ACL_FLOAT8_E4M3FN, which headers before CANN 9 do not name.
constexpr int kFloat8E5M2 = 35, kFloat8E4M3 = 36;

at::ScalarType scalar_type(aclDataType dtype) {
  switch (static_cast<int>(dtype)) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_UINT8:
      return at::kByte;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT16:
      return at::kUInt16;
    case ACL_UINT32:
      return at::kUInt32;
    case ACL_UINT64:
      return at::kUInt64;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX32:
      return at::kComplexHalf;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    case ACL_COMPLEX128:
      return at::kComplexDouble;
    case kFloat8E5M2:
      return at::kFloat8_e5m2;
    case kFloat8E4M3:
      return at::kFloat8_e4m3fn;
    default:
      TORCH_CHECK(false, "dtype ", static_cast<int>(dtype), " is not simulated");
  }
}

const char* dtype_name(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT:
      return "f32";
    case ACL_FLOAT16:
      return "f16";
    case ACL_BF16:
      return "bf16";
    case ACL_DOUBLE:
      return "f64";
    case ACL_INT8:
      return "i8";
    case ACL_UINT8:
      return "u8";
    case ACL_INT16:
      return "i16";
    case ACL_INT32:
      return "i32";
    case ACL_INT64:
      return "i64";
    case ACL_UINT64:
      return "u64";
    case ACL_BOOL:
      return "b";
    case ACL_INT4:
      return "i4";
    case ACL_COMPLEX64:
      return "c64";
    default:
      return "other";
  }
}

}  // namespace sim

using namespace sim;

namespace {

template <class Object>
Object* made(Object* object, Kind kind) {
  born(object, kind);
  return object;
}
template <class Object>
int destroyed(const Object* object, Kind kind) {
  if (!dies(object, kind)) return 161002;
  retire([object] { delete object; });
  return 0;
}

}  // namespace

SIM_EXPORT aclTensor* aclCreateTensor(const int64_t* shape, uint64_t dims, aclDataType dtype,
                                      const int64_t* strides, int64_t offset, aclFormat format,
                                      const int64_t* storage_shape, uint64_t storage_dims, void* data) {
  try {
    // The view is made under every torch mode that may be active in the caller.
    c10::InferenceMode inference(false);
    c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet(
        {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher}));
    at::AutoDispatchBelowADInplaceOrView below;
    auto tensor = std::make_shared<TensorData>();
    tensor->dtype = dtype;
    tensor->format = format;
    tensor->view.assign(shape, shape + dims);
    if (storage_shape) tensor->storage_shape.assign(storage_shape, storage_shape + storage_dims);
    std::vector<int64_t> steps(dims);
    int64_t elements = 1;
    for (size_t k = dims; k-- > 0;) {
      steps[k] = strides ? strides[k] : elements;
      elements *= shape[k];
    }
    auto type = scalar_type(dtype);
    auto options = at::TensorOptions().dtype(type).device(at::kCPU);
    if (!data || elements == 0) {
      tensor->t = at::empty_strided(tensor->view, steps, options);
    } else {
      tensor->device = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(type));
      tensor->t = at::from_blob(simcann_ptr(tensor->device), tensor->view, steps, options);
    }
    return made(new aclTensor{tensor}, Kind::tensor);
  } catch (const std::exception& error) {
    fail("aclCreateTensor", error.what(), 161002);
    return nullptr;
  }
}
SIM_EXPORT int aclDestroyTensor(const aclTensor* t) { return destroyed(t, Kind::tensor); }

SIM_EXPORT aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  at::Scalar s;
  switch (dtype) {
    case ACL_DOUBLE:
      s = *static_cast<double*>(value);
      break;
    case ACL_FLOAT:
      s = *static_cast<float*>(value);
      break;
    case ACL_FLOAT16:
      s = static_cast<float>(*static_cast<at::Half*>(value));
      break;
    case ACL_BF16:
      s = static_cast<float>(*static_cast<at::BFloat16*>(value));
      break;
    case ACL_INT64:
      s = *static_cast<int64_t*>(value);
      break;
    case ACL_INT32:
      s = *static_cast<int32_t*>(value);
      break;
    case ACL_INT16:
      s = *static_cast<int16_t*>(value);
      break;
    case ACL_INT8:
      s = *static_cast<int8_t*>(value);
      break;
    case ACL_UINT8:
      s = *static_cast<uint8_t*>(value);
      break;
    case ACL_BOOL:
      s = *static_cast<bool*>(value);
      break;
    case ACL_COMPLEX128:
      s = *static_cast<c10::complex<double>*>(value);
      break;
    case ACL_COMPLEX64:
      s = *static_cast<c10::complex<float>*>(value);
      break;
    default:
      return nullptr;
  }
  return made(new aclScalar{s, dtype}, Kind::scalar);
}
SIM_EXPORT int aclDestroyScalar(const aclScalar* s) { return destroyed(s, Kind::scalar); }

SIM_EXPORT aclIntArray* aclCreateIntArray(const int64_t* v, uint64_t n) {
  return made(new aclIntArray{std::vector<int64_t>(v, v + n)}, Kind::int_array);
}
SIM_EXPORT int aclDestroyIntArray(const aclIntArray* a) { return destroyed(a, Kind::int_array); }
SIM_EXPORT aclFloatArray* aclCreateFloatArray(const float* v, uint64_t n) {
  return made(new aclFloatArray{std::vector<float>(v, v + n)}, Kind::float_array);
}
SIM_EXPORT int aclDestroyFloatArray(const aclFloatArray* a) { return destroyed(a, Kind::float_array); }
SIM_EXPORT aclBoolArray* aclCreateBoolArray(const bool* v, uint64_t n) {
  return made(new aclBoolArray{std::vector<uint8_t>(v, v + n)}, Kind::bool_array);
}
SIM_EXPORT int aclDestroyBoolArray(const aclBoolArray* a) { return destroyed(a, Kind::bool_array); }

// A list owns its elements from then on: destroying it destroys them.
SIM_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* v, uint64_t n) {
  auto* list = new aclTensorList;
  for (uint64_t k = 0; k < n; k++) list->v.push_back(const_cast<aclTensor*>(v[k]));
  return made(list, Kind::tensor_list);
}
SIM_EXPORT int aclDestroyTensorList(const aclTensorList* list) {
  if (!dies(list, Kind::tensor_list)) return 161002;
  if (list) {
    for (auto* t : list->v) aclDestroyTensor(t);
  }
  retire([list] { delete list; });
  return 0;
}
SIM_EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* v, uint64_t n) {
  auto* list = new aclScalarList;
  for (uint64_t k = 0; k < n; k++) list->v.push_back(const_cast<aclScalar*>(v[k]));
  return made(list, Kind::scalar_list);
}
SIM_EXPORT int aclDestroyScalarList(const aclScalarList* list) {
  if (!dies(list, Kind::scalar_list)) return 161002;
  if (list) {
    for (auto* s : list->v) aclDestroyScalar(s);
  }
  retire([list] { delete list; });
  return 0;
}

/// The caller does not free `dims`; it is asked for only after operators whose output shape depends on data.
SIM_EXPORT int aclGetViewShape(const aclTensor* t, int64_t** dims, uint64_t* n) {
  *n = t->i->view.size();
  *dims = new int64_t[*n + 1];
  std::copy(t->i->view.begin(), t->i->view.end(), *dims);
  return 0;
}
SIM_EXPORT int aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  executor->repeatable = true;
  return 0;
}
SIM_EXPORT int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  return destroyed(executor, Kind::executor);
}
