// An NVRTC that compiles nothing: its "cubin" is the program's text behind an ELF mark. For what a
// real one cannot show: several versions, and one that is slow. Its version is the environment's
// KVANT_FAKE_NVRTC, "13.5"; a text with "#error" fails with a log.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

struct Program {
  std::string text, name, log, cubin;
};

std::mutex mutex;
int running = 0, most_at_once = 0;

Program* Of(void* program) { return static_cast<Program*>(program); }

}  // namespace

extern "C" {

// How many compilations have run side by side at most.
int KvantFakeMostAtOnce() {
  const std::lock_guard<std::mutex> lock(mutex);
  return most_at_once;
}

const char* nvrtcGetErrorString(int result) {
  return result == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}
int nvrtcVersion(int* major, int* minor) {
  const char* version = std::getenv("KVANT_FAKE_NVRTC");
  return std::sscanf(version ? version : "13.0", "%d.%d", major, minor) == 2 ? 0 : 3;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return 0;
}
int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80, archs[1] = 90, archs[2] = 100;
  return 0;
}
int nvrtcCreateProgram(void** program, const char* text, const char* name, int, const char* const*,
                       const char* const*) {
  *program = new Program{text, name, "", ""};
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  delete Of(*program);
  return 0;
}
int nvrtcCompileProgram(void* program, int, const char* const*) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    most_at_once = std::max(most_at_once, ++running);
  }
  usleep(20000);  // long enough for others to ask meanwhile
  {
    const std::lock_guard<std::mutex> lock(mutex);
    --running;
  }
  if (Of(program)->text.find("#error") != std::string::npos) {
    Of(program)->log = Of(program)->name + "(1): error: as asked for";
    return 6;
  }
  Of(program)->cubin = "\177ELF" + Of(program)->text;
  return 0;
}
int nvrtcGetCUBINSize(void* program, size_t* bytes) {
  *bytes = Of(program)->cubin.size();
  return 0;
}
int nvrtcGetCUBIN(void* program, char* bytes) {
  std::copy(Of(program)->cubin.begin(), Of(program)->cubin.end(), bytes);
  return 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* bytes) {
  *bytes = Of(program)->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(void* program, char* text) {
  std::strcpy(text, Of(program)->log.c_str());
  return 0;
}

}  // extern "C"
