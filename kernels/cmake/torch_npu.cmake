# Finds the torch_npu that lies beside the torch found by torch.cmake. Where there is one, defines the imported
# target `liteboost_torch_npu` and LB_TORCH_NPU_VERSION. Neither it nor CANN is ever loaded here.
set(LB_TORCH_NPU "${LB_TORCH_PREFIX}/../torch_npu")
if(NOT EXISTS "${LB_TORCH_NPU}/lib/libtorch_npu.so")
  return()
endif()

set(LB_TORCH_NPU_VERSION "unknown")
if(EXISTS "${LB_TORCH_NPU}/version.py")
  file(STRINGS "${LB_TORCH_NPU}/version.py" line REGEX "[0-9]+\\.[0-9]+\\.[0-9]+" LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+[^'\" ]*" LB_TORCH_NPU_VERSION "${line}")
endif()
message(STATUS "liteboost: torch_npu ${LB_TORCH_NPU_VERSION} in ${LB_TORCH_NPU}")

add_library(liteboost_torch_npu INTERFACE)
set(include "${LB_TORCH_NPU}/include")
target_include_directories(liteboost_torch_npu SYSTEM INTERFACE
  "${include}" "${include}/third_party/acl/inc" "${include}/third_party/hccl/inc")
target_link_libraries(liteboost_torch_npu INTERFACE liteboost_torch "${LB_TORCH_NPU}/lib/libtorch_npu.so")
# What libtorch_npu.so itself needs from CANN is found at run time.
target_link_options(liteboost_torch_npu INTERFACE -Wl,--allow-shlib-undefined)

# What every library that calls operators is made of. The function that came last of those it calls tells whether this
# torch_npu has them (npu/torch_npu_api.h); LITEBOOST_OWN_TORCH_NPU_API takes ours all the same, for tests.
get_filename_component(npu "${CMAKE_CURRENT_LIST_DIR}/../npu" ABSOLUTE)
set(LB_NPU_CALLERS "${npu}/aclnn.cpp")
execute_process(COMMAND "${CMAKE_NM}" --dynamic --defined-only "${LB_TORCH_NPU}/lib/libtorch_npu.so"
  OUTPUT_VARIABLE defined COMMAND_ERROR_IS_FATAL ANY)
string(FIND "${defined}" "_Z14ExecuteApiFuncPKvPvS1_mP13aclOpExecutor" at)
if(at EQUAL -1 OR LITEBOOST_OWN_TORCH_NPU_API)
  list(APPEND LB_NPU_CALLERS "${npu}/torch_npu_api.cpp")
endif()
