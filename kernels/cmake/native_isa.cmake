# With LITEBOOST_ISAS=native: leaves in LB_ISAS the best instruction set that is there for the CPU that compiles, as
# common/cpu_features.cpp finds it.
if(NOT LITEBOOST_ISAS STREQUAL "native")
  message(FATAL_ERROR "LITEBOOST_ISAS must be all or native, got ${LITEBOOST_ISAS}")
endif()
if(CMAKE_CROSSCOMPILING)
  message(FATAL_ERROR "LITEBOOST_ISAS=native asks for the CPU that compiles, and this build is for another")
endif()
set(probe "${CMAKE_CURRENT_BINARY_DIR}/native_isa")
file(WRITE "${probe}/isas.h" "")
file(WRITE "${probe}/probe.cpp" "#include \"common/cpu_features.cpp\"
  #include <cstdio>
  int main() { std::printf(\"%d\", static_cast<int>(liteboost::detect_isa())); }")
get_directory_property(definitions COMPILE_DEFINITIONS)
list(TRANSFORM definitions PREPEND -D)
try_run(status compiles "${probe}/build" "${probe}/probe.cpp"
  CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_SOURCE_DIR};${probe}"
  COMPILE_DEFINITIONS ${definitions}
  COMPILE_OUTPUT_VARIABLE words
  RUN_OUTPUT_VARIABLE best)
if(NOT compiles OR NOT status EQUAL 0)
  message(FATAL_ERROR "The program that finds this CPU's instruction set failed:\n${words}")
endif()
list(LENGTH LB_ISAS count)
math(EXPR last "${count} - 1")
if(best LESS last)
  set(last ${best})
endif()
list(GET LB_ISAS ${last} LB_ISAS)
message(STATUS "liteboost: instruction set for this CPU: ${LB_ISAS}")
