// A libcuda whose device is the emulator: the state behind its calls. It is stricter than the real
// one. What that leaves undefined, or what works there by luck, is an error here, and a sentence on
// standard error. A fault of a kernel is sticky, as on a GPU.
//
// Work is put off as long as it may be: until somebody waits for its stream, and then only that
// work and what it must follow runs. So what is read back, or freed, too early is found.
//
// Environment, beside that of machine.h:
//   PTXEMU_ARCH      sm_80, sm_86, sm_89, sm_90a (default), sm_100a or sm_120
//   PTXEMU_SMS       multiprocessors, instead of the architecture's: fewer splits, faster emulation
//   PTXEMU_L2_MIB    size of the second-level cache, by which benchmarks size their buffers
//   PTXEMU_EDIT      "old=>new": a bug to plant in the PTX of every module, wherever it holds
//   `old`.
//                    With "N:" before it, only at the Nth place, counted from 0
//   PTXEMU_LOG       a file that gets one line of JSON when the process ends
//   PTXEMU_COVERAGE  a folder that gets, for each kernel's PTX, which instructions were executed by
//                    any process
// and, of the NVRTC that makes what this driver loads (nvrtc_shim.cc):
//   PTXEMU_NVRTC     the real NVRTC, instead of libnvrtc.so.13, then .12, then libnvrtc.so
//   PTXEMU_PTX_DIR   a folder that gets the source, PTX, log and cubin of each kernel compiled
#ifndef KVANT_TESTS_PTXEMU_DRIVER_H_
#define KVANT_TESTS_PTXEMU_DRIVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "kvant/tests/ptxemu/device_memory.h"
#include "kvant/tests/ptxemu/kernel.h"
#include "kvant/tests/ptxemu/machine.h"
#include "kvant/tests/ptxemu/ptx_text.h"

namespace kvant::ptxemu {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
inline constexpr CUresult kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3,
                          kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201,
                          kNoBinaryForGpu = 209, kInvalidHandle = 400, kNotFound = 500,
                          kOutOfResources = 701, kCaptureUnsupported = 900,
                          kCaptureInvalidated = 901, kCaptureImplicit = 906;

struct Arch {
  const char* name;
  int major, minor, multiprocessors, shared_kib_per_block, shared_kib_per_multiprocessor, warps;
  int l2_mib;
};
const Arch& Device();

struct Module;

struct Function {
  Module* module = nullptr;
  std::unique_ptr<Kernel> kernel;
  size_t dynamic_limit = 48 << 10;
};

struct Module {
  ModuleText text;
  std::string log;  // of NVRTC and ptxas
  std::map<std::string, uint64_t> globals;
  std::map<std::string, std::unique_ptr<Function>> functions;
  bool unloaded = false;
};

struct Stream;

// Something on a stream.
struct Work {
  const char* what = "";
  std::function<void()> run;
  const Function* function = nullptr;  // of a launch
  Stream* stream = nullptr;
  uint64_t order = 0;
};

struct Stream {
  uint64_t id = 1;       // unlike that of any other stream, destroyed ones too
  bool blocking = true;  // with the default stream
  bool capturing = false, invalidated = false;
  std::vector<Work> captured;
};

struct Event {
  uint64_t recorded = 0;  // the order of what it follows
  Stream* stream = nullptr;
};

struct Graph {
  std::vector<Work> work;
};

struct State {
  std::recursive_mutex mutex;
  bool initialized = false;
  int retained = 0;  // the primary context
  const Options options = Options::FromEnvironment();
  DeviceMemory memory;
  std::vector<std::unique_ptr<Module>> modules;  // those that are unloaded too
  std::set<Function*> functions;
  Stream default_stream;
  uint64_t last_stream_id = 1;  // the default stream's
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::map<Event*, std::unique_ptr<Event>> events;
  std::map<Graph*, std::unique_ptr<Graph>> graphs, executables;
  std::vector<Work> pending;
  uint64_t order = 0;
  uint32_t launches = 0;
  CUresult sticky = kSuccess;
  // What was found.
  std::vector<std::string> faults;
  std::map<std::string, uint64_t> calls, notes;
  std::map<std::string, std::string> occupancy;
};
State& TheState();
// Of this thread.
std::vector<void*>& ContextStack();

// Says what a caller may not do. Returns what the driver returns.
CUresult Misuse(CUresult result, const std::string& what);
// Counts what is permitted, but worth to know of.
void Note(const std::string& what);
// Makes the log and the coverage at the end of the process.
void WriteLogAtExit();

// ---- Order of work

// Puts work onto a stream, or into what it captures.
CUresult Enqueue(Stream& stream, Work work);
// Runs what is pending up to `order` of a stream, and what that must follow. Null: of all streams.
CUresult RunPending(const Stream* stream, uint64_t order = ~uint64_t{0});
// A stream under capture that blocks with the default stream, which nobody may use then, or null.
Stream* CapturingBesideDefault();
// Invalidates such a capture for who uses `stream`, if that is the default stream.
CUresult CheckDefaultStream(const Stream& stream, const std::string& what);

// ---- Calls

// Counts a call, and holds the state for it. result: why it may not be made.
class Call {
 public:
  Call(const char* name, bool needs_context);
  CUresult result = kSuccess;

 private:
  const std::lock_guard<std::recursive_mutex> lock_;
};

// Of a call that needs no context.
template <class F>
CUresult Anywhere(const char* name, F body) {
  const Call call(name, false);
  return call.result != kSuccess ? call.result : body();
}
template <class F>
CUresult InContext(const char* name, F body) {
  const Call call(name, true);
  return call.result != kSuccess ? call.result : body();
}

Stream* MakeStream(bool blocking);
// Also of CU_STREAM_LEGACY and CU_STREAM_PER_THREAD. Null for a handle of no stream.
Stream* StreamOf(void* handle);
// Of a call on a stream: body(Stream&).
template <class F>
CUresult OnStream(const char* name, void* handle, F body) {
  return InContext(name, [&]() -> CUresult {
    Stream* stream = StreamOf(handle);
    if (stream == nullptr) return Misuse(kInvalidHandle, "a stream that is none");
    return body(*stream);
  });
}

// Invalidates what is captured, and says so, where there is such.
CUresult CheckNoCapture(const char* name);
// Of a call that a stream under capture (in mode thread local) does not permit.
template <class F>
CUresult OutsideCapture(const char* name, F body) {
  return InContext(name, [&]() -> CUresult {
    const CUresult result = CheckNoCapture(name);
    return result != kSuccess ? result : body();
  });
}

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_DRIVER_H_
