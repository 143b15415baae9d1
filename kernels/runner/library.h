// The kernels, `_C.so`, and what of them a runner calls: programs.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace liteboost::runner {

// Loads the library unless the process has it. `path`: of it; empty: beside this one. A fault where it is not there, or
// its ops are others than those of a folder with `schemas`.
void load_kernels(const std::string& path, const std::string& schemas);

// See kernels/program/program.h. A run that was stopped gives no tensors.
int64_t load_program(const std::string& text, const std::vector<at::Tensor>& constants);
std::vector<at::Tensor> run_program(int64_t program, const std::vector<at::Tensor>& inputs,
                                    const std::vector<int64_t>& numbers);
void unload_program(int64_t program);

}  // namespace liteboost::runner
