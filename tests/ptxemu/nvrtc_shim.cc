// A libnvrtc that stands before the real one. It compiles for the real architecture, ptxas
// included, and hands out, instead of the cubin, an image that the emulated driver takes:
//
//   "PTXEMU1\n"  <architecture>\n  <bytes of log>\n  <log of NVRTC and ptxas>  <PTX text>\0
//
// Its environment is that of driver.h.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

using Result = int;
using Program = void*;
constexpr Result kSuccess = 0;

void* RealLibrary() {
  static void* const library = [] {
    std::vector<std::string> names = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    if (const char* name = std::getenv("PTXEMU_NVRTC")) names = {name};
    for (const std::string& name : names) {
      if (void* found = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return found;
    }
    std::fprintf(stderr, "ptxemu: no real NVRTC: %s\n", dlerror());
    std::abort();
  }();
  return library;
}

template <class F>
F* RealFunction(F*, const char* name) {
  auto* function = reinterpret_cast<F*>(dlsym(RealLibrary(), name));
  if (function == nullptr) {
    std::fprintf(stderr, "ptxemu: the real NVRTC has no %s\n", name);
    std::abort();
  }
  return function;
}
// The real function behind one of those below.
#define KVANT_REAL(name) RealFunction(&name, #name)

struct Source {
  std::string name, text, arch;
};
struct Sources {
  std::mutex mutex;
  std::map<Program, Source> of;
};
Sources& TheSources() {
  static auto* const sources = new Sources;
  return *sources;
}

Source SourceOf(Program program) {
  const std::lock_guard<std::mutex> lock(TheSources().mutex);
  return TheSources().of[program];
}

}  // namespace

extern "C" {

const char* nvrtcGetErrorString(Result result) { return KVANT_REAL(nvrtcGetErrorString)(result); }
Result nvrtcVersion(int* major, int* minor) { return KVANT_REAL(nvrtcVersion)(major, minor); }
Result nvrtcGetNumSupportedArchs(int* count) {
  return KVANT_REAL(nvrtcGetNumSupportedArchs)(count);
}
Result nvrtcGetSupportedArchs(int* archs) { return KVANT_REAL(nvrtcGetSupportedArchs)(archs); }
Result nvrtcGetPTXSize(Program program, size_t* bytes) {
  return KVANT_REAL(nvrtcGetPTXSize)(program, bytes);
}
Result nvrtcGetPTX(Program program, char* text) { return KVANT_REAL(nvrtcGetPTX)(program, text); }
Result nvrtcGetProgramLogSize(Program program, size_t* bytes) {
  return KVANT_REAL(nvrtcGetProgramLogSize)(program, bytes);
}
Result nvrtcGetProgramLog(Program program, char* text) {
  return KVANT_REAL(nvrtcGetProgramLog)(program, text);
}

Result nvrtcCreateProgram(Program* program, const char* text, const char* name, int headers,
                          const char* const* header_texts, const char* const* header_names) {
  const Result result =
      KVANT_REAL(nvrtcCreateProgram)(program, text, name, headers, header_texts, header_names);
  if (result != kSuccess) return result;
  const std::lock_guard<std::mutex> lock(TheSources().mutex);
  TheSources().of[*program] = {name != nullptr ? name : "kernel.cu", text, ""};
  return kSuccess;
}

Result nvrtcDestroyProgram(Program* program) {
  {
    const std::lock_guard<std::mutex> lock(TheSources().mutex);
    TheSources().of.erase(*program);
  }
  return KVANT_REAL(nvrtcDestroyProgram)(program);
}

Result nvrtcCompileProgram(Program program, int count, const char* const* options) {
  constexpr char kArchOption[] = "--gpu-architecture=";
  const size_t length = std::strlen(kArchOption);
  for (int n = 0; n < count; ++n) {
    if (std::strncmp(options[n], kArchOption, length) != 0) continue;
    const std::lock_guard<std::mutex> lock(TheSources().mutex);
    TheSources().of[program].arch = options[n] + length;
  }
  return KVANT_REAL(nvrtcCompileProgram)(program, count, options);
}

}  // extern "C"

namespace {

struct Compiled {
  std::string log, ptx, image;
};

// One of NVRTC's texts, by the two functions that give its size and itself.
template <class Size, class Get>
std::string TextOf(Program program, Size size, Get get) {
  size_t bytes = 0;
  if (size(program, &bytes) != kSuccess) return "";
  std::string text(bytes, '\0');
  if (bytes == 0 || get(program, text.data()) != kSuccess) return "";
  return text.c_str();
}

Compiled CompiledOf(Program program) {
  Compiled made;
  made.log = TextOf(program, nvrtcGetProgramLogSize, nvrtcGetProgramLog);
  made.ptx = TextOf(program, nvrtcGetPTXSize, nvrtcGetPTX);
  made.image = StrCat("PTXEMU1\n", SourceOf(program).arch, "\n", made.log.size(), "\n", made.log,
                      made.ptx, '\0');
  return made;
}

}  // namespace

extern "C" {

Result nvrtcGetCUBINSize(Program program, size_t* bytes) {
  // A program that does not assemble has none.
  const Result result = KVANT_REAL(nvrtcGetCUBINSize)(program, bytes);
  if (result == kSuccess && *bytes != 0) *bytes = CompiledOf(program).image.size();
  return result;
}

Result nvrtcGetCUBIN(Program program, char* bytes) {
  const Compiled made = CompiledOf(program);
  std::memcpy(bytes, made.image.data(), made.image.size());
  const char* folder = std::getenv("PTXEMU_PTX_DIR");
  if (folder == nullptr) return kSuccess;
  static std::atomic<int> number{0};
  const Source source = SourceOf(program);
  const std::string stem = StrCat(folder, "/", getpid(), "_", number++, "_", source.arch, "_",
                                  source.name.substr(0, source.name.rfind('.')));
  std::ofstream(stem + ".cu") << source.text;
  std::ofstream(stem + ".log") << made.log;
  std::ofstream(stem + ".ptx") << made.ptx;
  size_t cubin_bytes = 0;
  KVANT_REAL(nvrtcGetCUBINSize)(program, &cubin_bytes);
  std::string cubin(cubin_bytes, '\0');
  if (KVANT_REAL(nvrtcGetCUBIN)(program, cubin.data()) == kSuccess) {
    std::ofstream(stem + ".cubin", std::ios::binary) << cubin;
  }
  return kSuccess;
}

}  // extern "C"

}  // namespace kvant::ptxemu
