#include "runner/library.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <dlfcn.h>

#include "runner/fault.h"
#include "runner/folder.h"
#include "runner/json.h"

namespace liteboost::runner {
namespace {

constexpr const char* kLibrary = "_C.so";

bool is_loaded() {
  return c10::Dispatcher::singleton().findSchema({"liteboost::_program_load", ""}).has_value();
}

c10::IValue call(const char* name, torch::jit::Stack arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(arguments);
  return arguments.empty() ? c10::IValue() : arguments.front();
}

}  // namespace

void load_kernels(const std::string& path, const std::string& schemas) {
  const std::string file = path.empty() ? beside_this(kLibrary) : path;
  if (!is_loaded()) {
    const void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    const char* words = handle == nullptr ? dlerror() : "";
    require(handle != nullptr, LITEBOOST_BAD_LIBRARY,
            "the kernels cannot be loaded: ", words != nullptr ? words : file,
            "; put _C.so beside libliteboost_run.so, or say where it is");
  }
  require(is_loaded(), LITEBOOST_BAD_LIBRARY, file, " has no kernels; take the _C.so of this version");
  const std::string about = call("liteboost::_build_info", {}).toStringRef();
  const std::string found = Json::parse(about, file)["schemas"].text();
  require(found == schemas, LITEBOOST_BAD_LIBRARY, "the folder was made with kernels whose ops are ", schemas,
          ", and those in ", file, " are ", found, "; export the model again with this version");
}

int64_t load_program(const std::string& text, const std::vector<at::Tensor>& constants) {
  return call("liteboost::_program_load", {text, c10::List<at::Tensor>(constants)}).toInt();
}

std::vector<at::Tensor> run_program(int64_t program, const std::vector<at::Tensor>& inputs,
                                    const std::vector<int64_t>& numbers) {
  return call("liteboost::_program_run",
              {program, c10::List<at::Tensor>(inputs), c10::List<int64_t>(numbers)})
      .toTensorVector();
}

void unload_program(int64_t program) { call("liteboost::_program_unload", {program}); }

}  // namespace liteboost::runner
