# Installs kvant from BUILD_DIR, and builds and runs the project beside this file against it.
set(prefix "${BUILD_DIR}/consumer/prefix")
set(build "${BUILD_DIR}/consumer/build")
# A header that is no longer public must not survive from the last run.
file(REMOVE_RECURSE "${prefix}" "${build}")

execute_process(COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET COMMAND
  "${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${prefix}" --config "${CONFIG}")
file(GLOB_RECURSE dnnl_graph "${prefix}/lib*/libkvant_dnnl_graph.so")
if(EXISTS "${BUILD_DIR}/libkvant_dnnl_graph.so" AND NOT dnnl_graph)
  message(FATAL_ERROR "libkvant_dnnl_graph.so is not installed")
endif()
foreach(library IN LISTS dnnl_graph)
  file(READ_ELF "${library}" RUNPATH run_path)
  if(NOT "${run_path}" STREQUAL "$ORIGIN")
    message(FATAL_ERROR "${library} looks for libraries of the build, in ${run_path}")
  endif()
endforeach()
execute_process(COMMAND_ERROR_IS_FATAL ANY COMMAND
  "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${build}" -G "${GENERATOR}"
  "-DCMAKE_PREFIX_PATH=${prefix}" "-DCMAKE_CXX_COMPILER=${COMPILER}"
  "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}" "-DCMAKE_BUILD_TYPE=${CONFIG}"
  "-DEXAMPLES_DIR=${CMAKE_CURRENT_LIST_DIR}/../../examples")
execute_process(COMMAND_ERROR_IS_FATAL ANY COMMAND
  "${CMAKE_COMMAND}" --build "${build}" --config "${CONFIG}")
execute_process(COMMAND_ERROR_IS_FATAL ANY COMMAND "${build}/consumer")
execute_process(COMMAND_ERROR_IS_FATAL ANY COMMAND "${build}/c/consumer_c")
