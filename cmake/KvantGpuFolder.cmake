# gpu/ in the build folder: programs and scripts for a machine with a GPU that has none of what
# kvant is built with (scripts/gpu). The programs are the objects of this very build, linked again:
# only the C library is shared, and oneTBB and oneDNN are replaced by bench/gpu/standalone.cc.
find_library(kvant_static_absl NAMES libabsl_strings.a)
mark_as_advanced(kvant_static_absl)
if(NOT kvant_static_absl)
  message(STATUS "No folder for GPU machines: Abseil is not installed as static libraries")
  return()
endif()
cmake_path(GET kvant_static_absl PARENT_PATH kvant_absl_dir)
file(GLOB kvant_absl_archives "${kvant_absl_dir}/libabsl_*.a")

set(kvant_gpu_folder "${PROJECT_BINARY_DIR}/gpu")

add_library(kvant_standalone OBJECT "${PROJECT_SOURCE_DIR}/bench/gpu/standalone.cc")
target_link_libraries(kvant_standalone PRIVATE kvant::kvant)
target_compile_options(kvant_standalone PRIVATE ${kvant_warnings})

# A program of the objects of `objects`, and of archives that it takes whatever else it needs from.
function(add_gpu_program name output objects)
  add_executable(${name} $<TARGET_OBJECTS:${objects}> $<TARGET_OBJECTS:kvant_standalone>)
  add_dependencies(${name} kvant kvant_simt kvant_tools)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME ${output}
    RUNTIME_OUTPUT_DIRECTORY "${kvant_gpu_folder}")
  target_link_options(${name} PRIVATE -static-libgcc -static-libstdc++ -s)
  target_link_libraries(${name} PRIVATE ${ARGN} $<TARGET_FILE:kvant_tools> $<TARGET_FILE:kvant_simt>
    $<TARGET_FILE:kvant>
    -Wl,--start-group ${kvant_absl_archives} -Wl,--end-group Threads::Threads ${CMAKE_DL_LIBS})
  set_property(TARGET ${name} PROPERTY LINK_DEPENDS
    "$<TARGET_FILE:kvant>" "$<TARGET_FILE:kvant_simt>" "$<TARGET_FILE:kvant_tools>")
endfunction()

find_library(kvant_static_gtest NAMES libgtest.a)
mark_as_advanced(kvant_static_gtest)
add_gpu_program(kvant_gpu_cli kvant kvant_cli)
add_gpu_program(kvant_gpu_worker kvant_gpu_worker kvant_gpu_worker_objects)
set(kvant_gpu_programs kvant_gpu_cli kvant_gpu_worker)
if(kvant_static_gtest)
  add_gpu_program(kvant_gpu_tests kvant_gpu_tests kvant_gpu_test_objects
    $<TARGET_OBJECTS:kvant_gpu_tests_main> "${kvant_static_gtest}")
  list(APPEND kvant_gpu_programs kvant_gpu_tests)
endif()

file(GLOB kvant_gpu_scripts CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/gpu/*.py"
     "${PROJECT_SOURCE_DIR}/bench/gpu/run.sh")
add_custom_target(gpu_folder ALL
  COMMAND ${CMAKE_COMMAND} -E copy_if_different ${kvant_gpu_scripts} "${kvant_gpu_folder}"
  DEPENDS ${kvant_gpu_scripts})
add_dependencies(gpu_folder ${kvant_gpu_programs})
