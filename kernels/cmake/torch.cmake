# Finds the torch to build against and defines the imported target `liteboost_torch`.
#
# Sought in this order: -DTorch_DIR (or -DCMAKE_PREFIX_PATH) as every torch project takes it; the
# interpreter's own path; the interpreter isolated from PYTHONPATH (-I), which is what finds the
# user's torch when pip builds in isolation and has hidden it behind PYTHONPATH.
#
# torch is located, never imported: importing takes seconds, and fails outright where torch_npu is
# installed without CANN. TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set all the same, for the case that a
# site hook imports it. Its own TorchConfig.cmake is not used: it searches for CUDA, MKL and protobuf
# wherever torch was built with them, and nothing here needs them.
#
# Sets LB_TORCH_PREFIX, LB_TORCH_VERSION, LB_TORCH_CXX11_ABI.

include("${CMAKE_CURRENT_LIST_DIR}/python.cmake")

function(lb_torch_usable prefix result)
  if(EXISTS "${prefix}/include/ATen/ATen.h" AND EXISTS "${prefix}/lib/libtorch_cpu.so")
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

function(lb_find_torch_prefix result)
  set(tried "")
  set(candidates "")
  if(Torch_DIR)
    get_filename_component(prefix "${Torch_DIR}/../../.." ABSOLUTE)
    list(APPEND candidates "${prefix}")
  endif()
  list(APPEND candidates ${CMAKE_PREFIX_PATH})
  foreach(prefix IN LISTS candidates)
    lb_torch_usable("${prefix}" usable)
    if(usable)
      set(${result} "${prefix}" PARENT_SCOPE)
      return()
    endif()
    string(APPEND tried "\n    ${prefix}: no include/ATen and lib/libtorch_cpu.so there")
  endforeach()

  set(locate "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s and s.origin else '')")
  foreach(isolated "" "-I")
    set(prefix "")
    if(LB_PYTHON)
      execute_process(
        COMMAND "${CMAKE_COMMAND}" -E env TORCH_DEVICE_BACKEND_AUTOLOAD=0 "${LB_PYTHON}" ${isolated} -c "${locate}"
        OUTPUT_VARIABLE prefix ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    endif()
    lb_torch_usable("${prefix}" usable)
    if(usable)
      set(${result} "${prefix}" PARENT_SCOPE)
      return()
    endif()
    string(APPEND tried "\n    ${LB_PYTHON} ${isolated}: '${prefix}'")
  endforeach()
  message(FATAL_ERROR
    "liteboost: an installed torch is needed to build the native kernels, and none was found. Tried:${tried}\n"
    "Install torch first, then `pip install --no-build-isolation .`; or name one with -DTorch_DIR=<torch>/share/cmake/Torch.")
endfunction()

lb_find_torch_prefix(LB_TORCH_PREFIX)

set(LB_TORCH_VERSION "unknown")
foreach(file version.py build-version)
  if(LB_TORCH_VERSION STREQUAL "unknown" AND EXISTS "${LB_TORCH_PREFIX}/${file}")
    file(STRINGS "${LB_TORCH_PREFIX}/${file}" line REGEX "[0-9]+\\.[0-9]+\\.[0-9]+" LIMIT_COUNT 1)
    string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+[^'\" ]*" LB_TORCH_VERSION "${line}")
  endif()
endforeach()

# A wheel of either string ABI states it in its CMake flags; a torch without them is a recent one.
set(LB_TORCH_CXX11_ABI 1)
set(config "${LB_TORCH_PREFIX}/share/cmake/Torch/TorchConfig.cmake")
if(EXISTS "${config}")
  file(STRINGS "${config}" line REGEX "_GLIBCXX_USE_CXX11_ABI=0" LIMIT_COUNT 1)
  if(line)
    set(LB_TORCH_CXX11_ABI 0)
  endif()
endif()

message(STATUS "liteboost: torch ${LB_TORCH_VERSION} in ${LB_TORCH_PREFIX} (C++11 ABI ${LB_TORCH_CXX11_ABI})")

add_library(liteboost_torch INTERFACE)
target_include_directories(liteboost_torch SYSTEM INTERFACE
  "${LB_TORCH_PREFIX}/include" "${LB_TORCH_PREFIX}/include/torch/csrc/api/include")
target_compile_definitions(liteboost_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${LB_TORCH_CXX11_ABI})
target_link_libraries(liteboost_torch INTERFACE
  "${LB_TORCH_PREFIX}/lib/libtorch_cpu.so" "${LB_TORCH_PREFIX}/lib/libc10.so")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT APPLE)
  # Named, so that nothing is taken from libstdc++.a, where LDFLAGS asks for that or there is no libstdc++.so to link with:
  # a library with a runtime of its own beside that of torch prints no numbers, and dies by it.
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libstdc++.so.6
    OUTPUT_VARIABLE runtime OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(IS_ABSOLUTE "${runtime}")
    get_filename_component(runtime "${runtime}" REALPATH)
  else()
    set(runtime stdc++)
  endif()
  target_link_libraries(liteboost_torch INTERFACE "${runtime}")
endif()
