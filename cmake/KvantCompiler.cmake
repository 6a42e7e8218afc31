# Language level, warnings, sanitizers and ccache, for every target of this project.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# A static kvant must still be linkable into a shared library (the C ABI, the Python module).
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# A product is rounded before something is added to it unless the code says Fma: what quantizes, and
# the oracle, follow formulas to the last bit on every processor.
add_compile_options(-ffp-contract=off)

# ccache takes paths below the source tree as relative, so build folders share what they compile
# alike: the tests of a sanitized build are those of the release build. Its manual asks for the
# sloppiness where headers are precompiled.
find_program(KVANT_CCACHE ccache)
if(KVANT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
    "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}"
    CCACHE_SLOPPINESS=pch_defines,time_macros "${KVANT_CCACHE}")
endif()

# Designated initializers that leave the rest at its default are how options are passed here.
set(kvant_warnings -Wall -Wextra -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 and 13 report std::string's own operator+ (GCC bug 105651).
  list(APPEND kvant_warnings -Wno-restrict)
  # GCC 12 takes an empty absl::InlinedVector, in an optional say, for read before it is written.
  list(APPEND kvant_warnings -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
if(KVANT_WERROR)
  list(APPEND kvant_warnings -Werror)
endif()

# The library, the tools and the command are sanitized. Tests are not: they call what is.
if(KVANT_SANITIZE)
  set(kvant_sanitizer_options $<$<NOT:$<CONFIG:Debug>>:-O1> -fsanitize=${KVANT_SANITIZE}
      -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Instrumented code hides values' origins from GCC, which then warns of what cannot be.
    list(APPEND kvant_sanitizer_options -Wno-array-bounds -Wno-stringop-overflow)
  endif()
  add_link_options(-fsanitize=${KVANT_SANITIZE})
endif()
function(kvant_sanitize target)
  target_compile_options(${target} PRIVATE ${kvant_sanitizer_options})
endfunction()

if(KVANT_BUILD_FUZZERS AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "KVANT_BUILD_FUZZERS needs clang; use the preset 'fuzz'")
endif()

# Headers of other projects, parsed once for all sources of a target. Not for the fuzzers: their
# build is the one that shows an include that a source lacks.
function(kvant_precompile target)
  if(KVANT_BUILD_FUZZERS)
    return()
  endif()
  target_precompile_headers(${target} PRIVATE ${ARGN})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
  else()
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()
set(kvant_std_headers <algorithm> <array> <cmath> <cstdint> <cstring> <functional> <limits> <memory>
    <optional> <string> <string_view> <utility> <vector>)
set(kvant_absl_headers <absl/container/flat_hash_map.h> <absl/container/inlined_vector.h>
    <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/strings/str_join.h>
    <absl/types/span.h>)
