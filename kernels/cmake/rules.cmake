# The rule files as JSON beside the library, which Python reads in a twentieth of the time it takes for TOML. Left out
# where the files are not there, or the Python that builds is too old to read them.
file(GLOB rule_files CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/../patches/*.toml")
set(decodes 1)
if(LB_PYTHON)
  execute_process(COMMAND "${LB_PYTHON}" -c "import tomllib" RESULT_VARIABLE decodes OUTPUT_QUIET ERROR_QUIET)
endif()
if(rule_files AND decodes EQUAL 0)
  set(decoded "${CMAKE_CURRENT_BINARY_DIR}/_rules.json")
  set(decoder "${CMAKE_CURRENT_SOURCE_DIR}/cmake/rules.py")
  add_custom_command(OUTPUT "${decoded}" DEPENDS "${decoder}" ${rule_files} VERBATIM
    COMMAND "${LB_PYTHON}" "${decoder}" "${decoded}" ${rule_files})
  add_custom_target(lb_rules ALL DEPENDS "${decoded}")
  install(FILES "${decoded}" DESTINATION "${LITEBOOST_INSTALL_DIR}")
endif()
