// The objects of the aclnn interface: opaque to the caller, made by aclCreate* and ended by aclDestroy*.
#pragma once
#include <ATen/ATen.h>
#include <acl/acl.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

enum class Kind { tensor, scalar, int_array, float_array, bool_array, tensor_list, scalar_list, executor };
const char* to_string(Kind kind);

struct TensorData {
  at::Tensor t;  // CPU view of the "device" memory
  aclDataType dtype;
  aclFormat format;
  std::vector<int64_t> view;           // shape; an operator whose output shape depends on data changes it
  std::vector<int64_t> storage_shape;  // what the caller says about the storage (private formats)
  const void* device = nullptr;        // address of element 0 of the view, as the caller knows it
};

at::ScalarType scalar_type(aclDataType dtype);
const char* dtype_name(aclDataType dtype);

struct Prepared;  // launch.h

/// Registers a live object, so that a wrong or destroyed one passed as an argument is reported.
void born(const void* object, Kind kind);
/// Forgets it; false (and an error message) when there is no such object.
bool dies(const void* object, Kind kind);
/// Frees an object some time after it died, so that its address does not soon belong to another one, and a caller who
/// still uses it is found.
void retire(std::function<void()> free_it);
/// Throws when `object` (not null) is no live object of `kind`.
void expect(const void* object, Kind kind);

}  // namespace sim

struct aclTensor {
  std::shared_ptr<sim::TensorData> i;
};
struct aclScalar {
  at::Scalar s;
  aclDataType dtype;
};
struct aclIntArray {
  std::vector<int64_t> v;
};
struct aclFloatArray {
  std::vector<float> v;
};
struct aclBoolArray {
  std::vector<uint8_t> v;
};
struct aclTensorList {
  std::vector<aclTensor*> v;
};
struct aclScalarList {
  std::vector<aclScalar*> v;
};
struct aclOpExecutor {
  std::shared_ptr<sim::Prepared> prepared;
  bool repeatable = false;
};
