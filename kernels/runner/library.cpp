#include "runner/library.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

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

bool rewrites_its_code(const dl_phdr_info& about) {
  for (int i = 0; i < about.dlpi_phnum; ++i) {
    if (about.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(about.dlpi_addr + about.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      if (entry->d_tag == DT_TEXTREL || (entry->d_tag == DT_FLAGS && (entry->d_un.d_val & DF_TEXTREL) != 0)) {
        return true;
      }
    }
  }
  return false;
}

int drop_code(dl_phdr_info* about, size_t, void* torch) {
  Dl_info found{};
  const auto start = static_cast<uintptr_t>(about->dlpi_addr);
  if (dladdr(torch, &found) == 0 || reinterpret_cast<uintptr_t>(found.dli_fbase) != start) return 0;
  if (rewrites_its_code(*about)) return 1;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (int i = 0; i < about->dlpi_phnum; ++i) {
    const ElfW(Phdr) & part = about->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_W) != 0) continue;
    const uintptr_t begin = (start + part.p_vaddr) & ~(page - 1);
    // Advice only: without it the code stays where it is.
    (void)madvise(reinterpret_cast<void*>(begin), start + part.p_vaddr + part.p_memsz - begin, MADV_DONTNEED);
  }
  return 1;
}

// libtorch registers its operators while it is loaded: some 60 MB of code that is not run again. What is needed of it
// is read again from the file, which the system keeps in memory as long as there is room.
void drop_code_of_torch() {
  dl_iterate_phdr(drop_code, reinterpret_cast<void*>(&c10::Dispatcher::realSingleton));
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
    drop_code_of_torch();
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
