# For libraries of ops outside this package. In a CMakeLists.txt of your own (see examples/custom_op):
#
#   execute_process(COMMAND ${Python_EXECUTABLE} -m liteboost_adaptor cmake-dir
#     OUTPUT_VARIABLE dir OUTPUT_STRIP_TRAILING_WHITESPACE)
#   include(${dir}/liteboost_op.cmake)
#   liteboost_add_op(my_op SOURCES my_op.cpp NPU_SOURCES my_op_npu.cpp)
#
# makes my_op.so, compiled against the torch of that Python, and, where torch_npu lies beside it, my_op_npu.so, in
# which `#include "npu/aclnn.h"` calls aclnn operators by typed signatures. CANN is not needed to compile it.
# Load them with torch.ops.load_library, the second once torch_npu is imported.
include("${CMAKE_CURRENT_LIST_DIR}/torch.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/torch_npu.cmake")
get_filename_component(LB_KERNELS "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

function(lb_op_library name torch)
  add_library(${name} MODULE ${ARGN})
  target_link_libraries(${name} PRIVATE ${torch})
  target_compile_features(${name} PRIVATE cxx_std_20)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # A unique symbol would bind this library and ours to one copy of it.
    target_compile_options(${name} PRIVATE -fno-gnu-unique)
  endif()
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".so" CXX_VISIBILITY_PRESET hidden)
  install(TARGETS ${name} LIBRARY DESTINATION .)
endfunction()

# liteboost_add_op(NAME SOURCES FILE... [NPU_SOURCES FILE...])
function(liteboost_add_op name)
  cmake_parse_arguments(op "" "" "SOURCES;NPU_SOURCES" ${ARGN})
  lb_op_library(${name} liteboost_torch ${op_SOURCES})
  if(op_NPU_SOURCES AND TARGET liteboost_torch_npu)
    lb_op_library(${name}_npu liteboost_torch_npu ${op_NPU_SOURCES} ${LB_NPU_CALLERS})
    target_include_directories(${name}_npu PRIVATE "${LB_KERNELS}")
  endif()
endfunction()
