# Everything comes from the system, or (oneDNN) from the folder that scripts/setup fills. Nothing
# is fetched while configuring.
find_package(Threads REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
# Debian's xxHash has no CMake package. Its header alone is used, so an installed kvant does not ask
# for it.
find_path(KVANT_XXHASH_DIR xxhash.h REQUIRED)
mark_as_advanced(KVANT_XXHASH_DIR)
if(KVANT_ISA_KERNELS)
  find_path(KVANT_HIGHWAY_DIR hwy/highway.h REQUIRED)  # and its headers alone
  mark_as_advanced(KVANT_HIGHWAY_DIR)
endif()
find_package(TBB CONFIG REQUIRED COMPONENTS tbb)

# Installed binaries look beside themselves first, then where oneDNN was at build time.
set(CMAKE_INSTALL_RPATH "$ORIGIN" "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")

if(KVANT_WITH_ONEDNN)
  # dnnl_DIR, CMAKE_PREFIX_PATH or the system first: any newer oneDNN is better than ours.
  find_package(dnnl 3.2 CONFIG QUIET)
  if(NOT dnnl_FOUND)
    find_package(dnnl 3.2 CONFIG QUIET NO_DEFAULT_PATH
                 PATHS "${PROJECT_SOURCE_DIR}/.deps/onednn")
  endif()
  if(NOT dnnl_FOUND)
    message(FATAL_ERROR "No oneDNN >= 3.2 found. Run scripts/setup, set dnnl_DIR, or configure "
                        "with -DKVANT_WITH_ONEDNN=OFF.")
  endif()
  list(APPEND CMAKE_INSTALL_RPATH "$<TARGET_FILE_DIR:DNNL::dnnl>")
  message(STATUS "oneDNN ${dnnl_VERSION}: ${dnnl_DIR}")
endif()

if(KVANT_BUILD_TOOLS)
  find_package(CLI11 CONFIG REQUIRED)
endif()
if(KVANT_BUILD_TESTS)
  find_package(GTest CONFIG REQUIRED)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
endif()
if(KVANT_BUILD_BENCH)
  find_package(benchmark CONFIG REQUIRED)
endif()
