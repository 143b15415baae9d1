# For wheels that serve several torches (-DLITEBOOST_WHEEL=ON, build_support/wheels.py; decision 61). The loops, which
# know no torch, are one shared library; `_C.so` is compiled once for each minor version of torch, in a folder of its
# own beside it:
#
#   liteboost_adaptor/_prebuilt/libliteboost_loops.so
#   liteboost_adaptor/_prebuilt/torch-2.13/_C.so, _build_info.json
#
# Sets LB_WHEEL_INFO, what the build info says more.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" LB_TORCH_MINOR "${LB_TORCH_VERSION}")
set(LB_WHEEL_INFO ", \"torch_minor\": \"${LB_TORCH_MINOR}\", \"loops\": \"libliteboost_loops.so\"")

if(LITEBOOST_LOOPS)
  add_library(liteboost_loops SHARED IMPORTED)
  set_target_properties(liteboost_loops PROPERTIES IMPORTED_LOCATION "${LITEBOOST_LOOPS}")
  foreach(isa IN LISTS LB_ISAS)
    set_target_properties(lb_isa_${isa} PROPERTIES EXCLUDE_FROM_ALL TRUE)
  endforeach()
else()
  set(objects "")
  foreach(isa IN LISTS LB_ISAS)
    # The tables of loops are all that these objects have that is not in an unnamed namespace.
    set_target_properties(lb_isa_${isa} PROPERTIES CXX_VISIBILITY_PRESET default)
    list(APPEND objects $<TARGET_OBJECTS:lb_isa_${isa}>)
  endforeach()
  add_library(liteboost_loops SHARED ${objects})
  target_link_options(liteboost_loops PRIVATE -Wl,--as-needed)
  set_target_properties(liteboost_loops PROPERTIES LINKER_LANGUAGE CXX)
  install(TARGETS liteboost_loops LIBRARY DESTINATION "${LITEBOOST_INSTALL_DIR}" COMPONENT loops)
endif()

# Links a library of ops for a wheel: with the loops, and for an old C library, whose functions of today's libc are in
# libraries of their own.
function(lb_link_for_wheel target)
  target_sources(${target} PRIVATE common/manylinux_2_28.cpp)
  target_compile_options(${target} PRIVATE ${LB_COMMON_FLAGS})
  target_link_libraries(${target} PRIVATE liteboost_loops)
  # The libraries of torch that it is linked with may be empty but for their names.
  target_link_options(${target} PRIVATE -Wl,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2 -l:librt.so.1)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/..;$ORIGIN/../../../torch/lib")
endfunction()
