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
