# The library, and beside it the one for tests.

# The device headers as text: NVRTC compiles kernels from them at run time. The SIMT executor's
# half of the vocabulary is not for NVRTC.
file(GLOB kvant_device_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}"
     "${PROJECT_SOURCE_DIR}/kernels/cuda/*.h"
     "${PROJECT_SOURCE_DIR}/kernels/cuda/*.inc"
     "${PROJECT_SOURCE_DIR}/graph/cache_layout.h"
     "${PROJECT_SOURCE_DIR}/graph/cache_tasks.h"
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

# A development checkout may have an NVRTC of its own (scripts/setup): the last place to look.
if(EXISTS "${PROJECT_SOURCE_DIR}/.deps/cuda/lib")
  set_property(SOURCE "${PROJECT_SOURCE_DIR}/backends/cuda/runtime/nvrtc.cc" APPEND PROPERTY
    COMPILE_DEFINITIONS KVANT_NVRTC_DIR="${PROJECT_SOURCE_DIR}/.deps/cuda/lib")
endif()

# With precompiled headers, GCC warns of what it inlines into these.
set_property(SOURCE "${PROJECT_SOURCE_DIR}/backends/cuda/runtime/nvrtc.cc"
  "${kvant_embedded_sources}" PROPERTY SKIP_PRECOMPILE_HEADERS ON)

# Kernels are the hot loops: optimised fully, free to drop errno from the math functions, and to
# evaluate both sides of a choice, which may raise flags that nobody reads.
file(GLOB_RECURSE kvant_kernel_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/kernels/cpu/*.cc")
set(kvant_kernel_options -fno-math-errno -fno-trapping-math)
if(NOT KVANT_SANITIZE)
  list(APPEND kvant_kernel_options $<$<NOT:$<CONFIG:Debug>>:-O3>)
endif()
set_source_files_properties(${kvant_kernel_sources} PROPERTIES
  COMPILE_OPTIONS "${kvant_kernel_options}")

# One unit per instruction set, isa/<name>.cc, compiled for that set alone. (Highway also asks for the
# flags of what such a CPU has anyway.)
set(kvant_isa_avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul)
set(kvant_isa_avx512 ${kvant_isa_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
    -mavx512vbmi)
set(kvant_isa_avx512_bf16 ${kvant_isa_avx512} -mavx512bf16)
set(kvant_isa_avx512_amx ${kvant_isa_avx512_bf16} -mamx-tile -mamx-bf16)
set(kvant_isa_neon -march=armv8-a+crypto)
set(kvant_isa_neon_dotprod -march=armv8.2-a+dotprod+crypto)
set(kvant_isa_neon_i8mm -march=armv8.2-a+dotprod+i8mm+crypto)
set(kvant_isa_neon_bf16 -march=armv8.2-a+dotprod+i8mm+bf16+crypto)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Loads that GCC moves up, before it gives out registers, push sums of products out of these.
  foreach(isa neon_dotprod neon_i8mm neon_bf16)
    list(APPEND kvant_isa_${isa} -fno-schedule-insns)
  endforeach()
endif()
if(NOT KVANT_ISA_KERNELS)
  set(kvant_isas)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(kvant_isas avx2 avx512 avx512_bf16 avx512_amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(kvant_isas neon neon_dotprod neon_i8mm neon_bf16)
endif()
foreach(isa avx2 avx512 avx512_bf16 avx512_amx neon neon_dotprod neon_i8mm neon_bf16)
  set(unit "${PROJECT_SOURCE_DIR}/kernels/cpu/isa/${isa}.cc")
  if(isa IN_LIST kvant_isas)
    set_property(SOURCE "${unit}" APPEND PROPERTY COMPILE_OPTIONS ${kvant_isa_${isa}})
    # Addresses are checked by calls: in line, GCC takes minutes over the branches. And at -O1 it
    # leaves out vzeroupper without the second option, which slows all SSE code that runs after.
    # The checks that are left out take half the time to compile; the portable kernels have them.
    if(KVANT_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      set_property(SOURCE "${unit}" APPEND PROPERTY
                   COMPILE_OPTIONS --param=asan-instrumentation-with-call-threshold=0
                   -fexpensive-optimizations
                   -fno-sanitize=null,alignment,object-size,pointer-overflow)
    endif()
  else()
    list(REMOVE_ITEM kvant_kernel_sources "${unit}")
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
  set_source_files_properties("${PROJECT_SOURCE_DIR}/backends/cuda/simt/attention_body.cc" PROPERTIES
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

# Each layer is a target, and kvant is all of them in one library. A layer's include folder holds
# links to its own files: an include of a layer that is not linked finds no file. What may include
# what within a layer is checked by tests/layering_test.py.
add_library(kvant)
add_library(kvant::kvant ALIAS kvant)
if(BUILD_SHARED_LIBS)  # libkvant.so is the C ABI
  set_target_properties(kvant PROPERTIES OUTPUT_NAME kvant_cpp)
endif()

#   kvant_layer(NAME HEADERS path.. [SOURCES file..] [LINKS layer..] [USES layer..] [PRECOMPILE])
#
# HEADERS: files and folders. Who links this layer sees those of LINKS too, and not those of USES.
# PRECOMPILE: other projects' headers are, once for the layer.
function(kvant_layer name)
  cmake_parse_arguments(layer "PRECOMPILE" "" "HEADERS;SOURCES;LINKS;USES" ${ARGN})
  set(include_dir "${PROJECT_BINARY_DIR}/layers/${name}")
  file(REMOVE_RECURSE "${include_dir}")
  foreach(path IN LISTS layer_HEADERS)
    cmake_path(GET path PARENT_PATH folder)
    file(MAKE_DIRECTORY "${include_dir}/kvant/${folder}")
    file(CREATE_LINK "${PROJECT_SOURCE_DIR}/${path}" "${include_dir}/kvant/${path}" SYMBOLIC)
  endforeach()
  list(TRANSFORM layer_LINKS PREPEND kvant_headers_)
  list(TRANSFORM layer_USES PREPEND kvant_headers_)
  add_library(kvant_headers_${name} INTERFACE)
  target_include_directories(kvant_headers_${name} INTERFACE "${include_dir}")
  target_link_libraries(kvant_headers_${name} INTERFACE ${layer_LINKS})
  if(NOT layer_SOURCES)
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY kvant_layers ${name})
  add_library(kvant_${name} OBJECT ${layer_SOURCES})
  target_link_libraries(kvant_${name} PRIVATE kvant_headers_${name} ${layer_USES} absl::span)
  target_compile_options(kvant_${name} PRIVATE ${kvant_warnings})
  kvant_sanitize(kvant_${name})
  if(layer_PRECOMPILE)
    kvant_precompile(kvant_${name} ${kvant_std_headers} ${kvant_absl_headers})
  endif()
  target_sources(kvant PRIVATE $<TARGET_OBJECTS:kvant_${name}>)
endfunction()

# Paths below the source tree that match.
function(kvant_glob result)
  list(TRANSFORM ARGN PREPEND "${PROJECT_SOURCE_DIR}/" OUTPUT_VARIABLE patterns)
  file(GLOB found CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}" ${patterns})
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# A layer of one folder and its .cc.
function(kvant_folder name folder)
  kvant_glob(sources "${folder}/*.cc" "${folder}/*/*.cc")
  list(FILTER sources EXCLUDE REGEX "/simt/")
  kvant_layer(${name} HEADERS "${folder}" SOURCES ${sources} ${ARGN})
endfunction()

kvant_layer(values HEADERS graph/cache_layout.h graph/cache_tasks.h graph/data_type.h
            graph/data_type.inc graph/score_steps.inc)
kvant_folder(graph graph PRECOMPILE)
kvant_folder(patterns patterns LINKS graph PRECOMPILE)
list(TRANSFORM kvant_kernel_sources REPLACE "^${PROJECT_SOURCE_DIR}/" "")
kvant_layer(kernels HEADERS kernels SOURCES ${kvant_kernel_sources} LINKS values)
if(KVANT_ISA_KERNELS)
  target_include_directories(kvant_kernels SYSTEM PRIVATE "${KVANT_HIGHWAY_DIR}")
endif()
kvant_glob(backends "backends/*.h")
kvant_glob(backend_sources "backends/*.cc")
list(REMOVE_ITEM backend_sources backends/no_reference.cc)
kvant_layer(backends HEADERS ${backends} SOURCES ${backend_sources} LINKS patterns graph PRECOMPILE)
kvant_folder(oracle backends/oracle LINKS backends USES kernels PRECOMPILE)
kvant_folder(cpu backends/cpu LINKS backends USES kernels PRECOMPILE)
kvant_folder(cuda backends/cuda LINKS backends USES kernels PRECOMPILE)
target_sources(kvant_cuda PRIVATE "${kvant_embedded_sources}")
if(KVANT_WITH_ONEDNN)
  # Not precompiled: it is not in the fuzzers' build, so it has to show here that no source lacks an
  # include.
  kvant_folder(reference backends/reference LINKS backends USES kernels)
  target_link_libraries(kvant_reference PRIVATE DNNL::dnnl)
  target_link_libraries(kvant PRIVATE DNNL::dnnl)
endif()
# What stands for it where it is not.
add_library(kvant_no_reference OBJECT backends/no_reference.cc)
target_link_libraries(kvant_no_reference PRIVATE kvant_headers_backends absl::span)
target_compile_options(kvant_no_reference PRIVATE ${kvant_warnings})
kvant_sanitize(kvant_no_reference)
if(NOT KVANT_WITH_ONEDNN)
  target_sources(kvant PRIVATE $<TARGET_OBJECTS:kvant_no_reference>)
endif()
kvant_folder(cache cache LINKS backends PRECOMPILE)

set_target_properties(kvant PROPERTIES LINKER_LANGUAGE CXX
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_compile_features(kvant PUBLIC cxx_std_20)
set(kvant_absl absl::any_invocable absl::btree absl::cleanup absl::cord absl::flat_hash_map
    absl::flat_hash_set absl::function_ref absl::inlined_vector absl::span absl::status
    absl::statusor absl::str_format absl::strings)
target_link_libraries(kvant
  PUBLIC ${kvant_absl}
  PRIVATE Threads::Threads TBB::tbb ${CMAKE_DL_LIBS})
# Header-only and used in .cc files alone, so an installed kvant does not ask for it.
target_link_libraries(kvant_graph PRIVATE nlohmann_json::nlohmann_json)
target_link_libraries(kvant_backends PRIVATE TBB::tbb)
target_include_directories(kvant_cuda SYSTEM PRIVATE "${KVANT_XXHASH_DIR}")

# The SIMT executor, with the CUDA kernels as host functions: for tests.
file(GLOB kvant_simt_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/kernels/device/*.cc"
     "${PROJECT_SOURCE_DIR}/backends/cuda/simt/*.cc")
add_library(kvant_simt ${kvant_simt_sources})
add_library(kvant::simt ALIAS kvant_simt)
set_target_properties(kvant_simt PROPERTIES EXPORT_NAME simt
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_link_libraries(kvant_simt PUBLIC kvant)
target_compile_options(kvant_simt PRIVATE ${kvant_warnings})
kvant_sanitize(kvant_simt)

# Public headers: what kvant.h and users include. Kernels and the backends' insides stay private.
file(GLOB kvant_public_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}"
     "${PROJECT_SOURCE_DIR}/kvant.h"
     "${PROJECT_SOURCE_DIR}/graph/*.h" "${PROJECT_SOURCE_DIR}/graph/*.inc"
     "${PROJECT_SOURCE_DIR}/patterns/*.h" "${PROJECT_SOURCE_DIR}/patterns/*.inc"
     "${PROJECT_SOURCE_DIR}/backends/*.h"
     "${PROJECT_SOURCE_DIR}/cache/*.h" "${PROJECT_SOURCE_DIR}/cache/*.inc")
# The insides of JSON, the op rules, the matcher and the backends.
list(FILTER kvant_public_headers EXCLUDE REGEX "/(json_document|op_shapes|match|matcher|resolver|op_groups|views|index_checks|loops)\\.h$")
list(TRANSFORM kvant_public_headers PREPEND "${kvant_include_dir}/kvant/")
target_sources(kvant PUBLIC FILE_SET HEADERS
  BASE_DIRS "${kvant_include_dir}" FILES ${kvant_public_headers})
