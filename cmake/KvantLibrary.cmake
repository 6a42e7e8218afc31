# The library: every layer below tools in one target. Which layer may include which is checked by
# tests/layering_test.py, not by the linker.
file(GLOB_RECURSE kvant_sources CONFIGURE_DEPENDS
     "${PROJECT_SOURCE_DIR}/graph/*.cc"
     "${PROJECT_SOURCE_DIR}/patterns/*.cc"
     "${PROJECT_SOURCE_DIR}/kernels/cpu/*.cc"
     "${PROJECT_SOURCE_DIR}/kernels/device/*.cc"
     "${PROJECT_SOURCE_DIR}/backends/*.cc"
     "${PROJECT_SOURCE_DIR}/cache/*.cc")
if(NOT KVANT_WITH_ONEDNN)
  list(FILTER kvant_sources EXCLUDE REGEX "/backends/reference/")
endif()

# The device headers as text: NVRTC compiles kernels from them at run time. The SIMT executor's
# half of the vocabulary is not for NVRTC.
file(GLOB kvant_device_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}"
     "${PROJECT_SOURCE_DIR}/kernels/cuda/*.h"
     "${PROJECT_SOURCE_DIR}/kernels/cuda/*.inc"
     "${PROJECT_SOURCE_DIR}/graph/score_steps.inc"
     "${PROJECT_SOURCE_DIR}/kernels/device/device.h"
     "${PROJECT_SOURCE_DIR}/kernels/device/fragment.h"
     "${PROJECT_SOURCE_DIR}/kernels/device/ptx.h")
list(JOIN kvant_device_headers "," kvant_device_header_names)
set(kvant_embedded_sources "${PROJECT_BINARY_DIR}/embedded_sources.cc")
add_custom_command(OUTPUT "${kvant_embedded_sources}"
  COMMAND ${CMAKE_COMMAND} "-DOUTPUT=${kvant_embedded_sources}"
          "-DSOURCE_DIR=${PROJECT_SOURCE_DIR}" "-DFILES=${kvant_device_header_names}"
          -P "${PROJECT_SOURCE_DIR}/cmake/EmbedSources.cmake"
  DEPENDS ${kvant_device_headers} "${PROJECT_SOURCE_DIR}/cmake/EmbedSources.cmake"
  WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
  COMMENT "Embedding device headers" VERBATIM)
list(APPEND kvant_sources "${kvant_embedded_sources}")

# A development checkout may have an NVRTC of its own (scripts/setup): the last place to look.
if(EXISTS "${PROJECT_SOURCE_DIR}/.deps/cuda/lib")
  set_property(SOURCE "${PROJECT_SOURCE_DIR}/backends/cuda/runtime/nvrtc.cc" APPEND PROPERTY
    COMPILE_DEFINITIONS KVANT_NVRTC_DIR="${PROJECT_SOURCE_DIR}/.deps/cuda/lib")
endif()

# Kernels are the hot loops: optimised fully, free to drop errno from the math functions, and to
# evaluate both sides of a choice, which may raise flags that nobody reads.
set(kvant_kernel_sources ${kvant_sources})
list(FILTER kvant_kernel_sources INCLUDE REGEX "/kernels/cpu/")
set(kvant_kernel_options -fno-math-errno -fno-trapping-math)
if(NOT KVANT_SANITIZE)
  list(APPEND kvant_kernel_options $<$<NOT:$<CONFIG:Debug>>:-O3>)
endif()
set_source_files_properties(${kvant_kernel_sources} PROPERTIES
  COMPILE_OPTIONS "${kvant_kernel_options}")

# One unit per instruction set, isa/<name>.cc, compiled for that set alone. What is contracted to
# FMA there is written so.
set(kvant_isa_avx2 -mavx2 -mfma -mf16c)
set(kvant_isa_avx512 ${kvant_isa_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
    -mavx512vbmi)
set(kvant_isa_avx512_bf16 ${kvant_isa_avx512} -mavx512bf16)
foreach(isa avx2 avx512 avx512_bf16)
  if(KVANT_ISA_KERNELS AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set_property(SOURCE "${PROJECT_SOURCE_DIR}/kernels/cpu/isa/${isa}.cc"
                 APPEND PROPERTY COMPILE_OPTIONS ${kvant_isa_${isa}} -ffp-contract=off)
    # Addresses are checked by calls: in line, GCC takes minutes over the branches. And at -O1 it
    # leaves out vzeroupper without the second option, which slows all SSE code that runs after.
    if(KVANT_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      set_property(SOURCE "${PROJECT_SOURCE_DIR}/kernels/cpu/isa/${isa}.cc" APPEND PROPERTY
                   COMPILE_OPTIONS --param=asan-instrumentation-with-call-threshold=0
                   -fexpensive-optimizations)
    endif()
  else()
    list(FILTER kvant_sources EXCLUDE REGEX "/kernels/cpu/isa/${isa}\\.cc$")
  endif()
endforeach()
if(NOT KVANT_ISA_KERNELS)
  set_property(SOURCE "${PROJECT_SOURCE_DIR}/kernels/cpu/kernels.cc" APPEND PROPERTY
    COMPILE_DEFINITIONS KVANT_PORTABLE_ONLY)
endif()

# The executor of CUDA kernels is slow when sanitized. What counts and multiplies in arrays of its
# own is left out; kernels and their accesses to memory are not.
if(KVANT_SANITIZE)
  foreach(unit counters matrix shared traffic)
    set_source_files_properties("${PROJECT_SOURCE_DIR}/kernels/device/simt_${unit}.cc" PROPERTIES
      COMPILE_OPTIONS "-fno-sanitize=all;$<$<NOT:$<CONFIG:Debug>>:-O3>" SKIP_PRECOMPILE_HEADERS ON)
  endforeach()
endif()

if(KVANT_SANITIZE MATCHES "thread")
  set_source_files_properties("${PROJECT_SOURCE_DIR}/backends/tbb_executor.cc" PROPERTIES
    COMPILE_OPTIONS -fno-sanitize=thread COMPILE_DEFINITIONS KVANT_ANNOTATE_THREADS
    SKIP_PRECOMPILE_HEADERS ON)
endif()

# CUDA kernels for the executor: g++ makes one of functions that are alike but for the size of an
# array, and then warns of what lies beyond the smaller one.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set_source_files_properties("${PROJECT_SOURCE_DIR}/backends/cuda/attention/attention_kernel.cc" PROPERTIES
    COMPILE_OPTIONS -fno-ipa-icf)
endif()

# What the fuzzers learn from: where JSON becomes graphs, partitions and what the oracle computes.
# Comparisons are traced where input is read; in the oracle's loops that would only be slow.
if(KVANT_BUILD_FUZZERS)
  foreach(folder graph patterns backends/oracle)
    file(GLOB kvant_fuzzed_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${folder}/*.cc")
    set(coverage inline-8bit-counters,pc-table)
    if(NOT folder STREQUAL "backends/oracle")
      string(APPEND coverage ",indirect-calls,trace-cmp")
    endif()
    set_property(SOURCE ${kvant_fuzzed_sources} APPEND PROPERTY COMPILE_OPTIONS
      -fsanitize-coverage=${coverage})
  endforeach()
endif()

add_library(kvant ${kvant_sources})
add_library(kvant::kvant ALIAS kvant)
set_target_properties(kvant PROPERTIES LINKER_LANGUAGE CXX
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_compile_features(kvant PUBLIC cxx_std_20)
target_compile_options(kvant PRIVATE ${kvant_warnings})
target_link_libraries(kvant
  PUBLIC
    absl::any_invocable absl::cleanup absl::cord absl::flat_hash_map absl::flat_hash_set
    absl::function_ref absl::inlined_vector absl::span absl::status absl::statusor absl::str_format
    absl::strings
  PRIVATE
    Threads::Threads TBB::tbb ${CMAKE_DL_LIBS}
    # Header-only and used in .cc files alone, so an installed kvant does not ask for it.
    $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
kvant_sanitize(kvant)
kvant_precompile(kvant ${kvant_std_headers} ${kvant_absl_headers})
# The first have other options or definitions than the headers. The oneDNN backend is not in the
# fuzzers' build, so it has to show here that no source lacks an include.
file(GLOB kvant_reference_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/backends/reference/*.cc")
set_property(SOURCE ${kvant_kernel_sources} "${PROJECT_SOURCE_DIR}/backends/cuda/runtime/nvrtc.cc"
  "${PROJECT_SOURCE_DIR}/backends/cuda/attention/attention_kernel.cc" "${kvant_embedded_sources}"
  ${kvant_reference_sources} PROPERTY SKIP_PRECOMPILE_HEADERS ON)
if(KVANT_WITH_ONEDNN)
  target_compile_definitions(kvant PRIVATE KVANT_WITH_ONEDNN)
  target_link_libraries(kvant PRIVATE DNNL::dnnl)
endif()

# Public headers: what kvant.h and users include. Kernels and the backends' insides stay private.
file(GLOB kvant_public_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}"
     "${PROJECT_SOURCE_DIR}/kvant.h"
     "${PROJECT_SOURCE_DIR}/graph/*.h" "${PROJECT_SOURCE_DIR}/graph/*.inc"
     "${PROJECT_SOURCE_DIR}/patterns/*.h" "${PROJECT_SOURCE_DIR}/patterns/*.inc"
     "${PROJECT_SOURCE_DIR}/backends/*.h"
     "${PROJECT_SOURCE_DIR}/cache/*.h" "${PROJECT_SOURCE_DIR}/cache/*.inc")
# The insides of JSON, the op rules, the matcher and the backends.
list(FILTER kvant_public_headers EXCLUDE REGEX "/(json_document|json_names|op_shapes|op_types|match|matcher|resolver|op_groups|views|index_checks)\\.h$")
list(TRANSFORM kvant_public_headers PREPEND "${kvant_include_dir}/kvant/")
target_sources(kvant PUBLIC FILE_SET HEADERS
  BASE_DIRS "${kvant_include_dir}" FILES ${kvant_public_headers})
