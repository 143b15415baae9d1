// Tensors of a safetensors file, where they lie in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>

#include "runner/folder.h"

namespace liteboost::runner {

// The dtype that safetensors calls so; a fault that names `where` for any other.
at::ScalarType dtype_named(const std::string& name, const std::string& where);

// Bytes of a tensor; a fault where there are more than a number can count.
size_t bytes_of(const std::vector<int64_t>& sizes, at::ScalarType dtype, const std::string& where);

// All tensors of a file. They hold its memory, and its pages are read when they are used.
std::map<std::string, at::Tensor> tensors_in(const std::shared_ptr<const MappedFile>& file,
                                             const std::string& name);

}  // namespace liteboost::runner
