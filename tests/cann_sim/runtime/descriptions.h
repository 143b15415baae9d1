// Tensors as operators of the graph engine are given them.
#pragma once
#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct aclDataBuffer {
  void* p;
  size_t n;
};
struct aclTensorDesc {
  aclDataType t;
  std::vector<int64_t> d;
  aclFormat f;
  std::string name;
  aclFormat storage_format;  // what aclSetTensorFormat and aclSetTensorShape say lies in memory
  std::vector<int64_t> storage_shape;
};
