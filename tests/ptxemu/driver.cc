#include "kvant/tests/ptxemu/driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace kvant::ptxemu {
namespace {

constexpr Arch kArchs[] = {
    {"sm_80", 8, 0, 108, 163, 164, 64, 40},     {"sm_86", 8, 6, 84, 99, 100, 48, 6},
    {"sm_89", 8, 9, 142, 99, 100, 48, 72},      {"sm_90a", 9, 0, 132, 227, 228, 64, 50},
    {"sm_100a", 10, 0, 148, 227, 228, 64, 126}, {"sm_120", 12, 0, 188, 99, 100, 48, 128},
};

// The default stream waits for all that block with it, and they for it.
bool Follows(const Work& later, const Work& earlier) {
  if (later.stream == earlier.stream) return true;
  const Stream* const zero = &TheState().default_stream;
  return (later.stream == zero && earlier.stream->blocking) ||
         (earlier.stream == zero && later.stream->blocking);
}

// Takes out of what is pending what RunPending runs.
std::vector<Work> TakePending(const Stream* stream, uint64_t order) {
  std::vector<Work>& pending = TheState().pending;
  std::vector<bool> wanted(pending.size());
  for (size_t n = pending.size(); n-- > 0;) {
    const Work& w = pending[n];
    wanted[n] = w.order <= order && (stream == nullptr || w.stream == stream);
    for (size_t later = n + 1; later < pending.size() && !wanted[n]; ++later) {
      wanted[n] = wanted[later] && Follows(pending[later], w);
    }
  }
  std::vector<Work> taken, rest;
  for (size_t n = 0; n < pending.size(); ++n) {
    (wanted[n] ? taken : rest).push_back(std::move(pending[n]));
  }
  pending = std::move(rest);
  return taken;
}

}  // namespace

const Arch& Device() {
  static const Arch* const device = [] {
    const char* name = std::getenv("PTXEMU_ARCH");
    for (const Arch& arch : kArchs) {
      if (std::strcmp(arch.name, name != nullptr ? name : "sm_90a") == 0) return &arch;
    }
    std::fprintf(stderr, "ptxemu: PTXEMU_ARCH=%s is not known\n", name);
    std::abort();
  }();
  return *device;
}

State& TheState() {
  static auto* const state = new State;
  return *state;
}

std::vector<void*>& ContextStack() {
  static thread_local std::vector<void*> stack;
  return stack;
}

CUresult Misuse(CUresult result, const std::string& what) {
  std::fprintf(stderr, "ptxemu: %s (CUresult %d)\n", what.c_str(), result);
  TheState().faults.push_back(what);
  return result;
}

void Note(const std::string& what) { ++TheState().notes[what]; }

// ---- Order of work

Stream* CapturingBesideDefault() {
  for (const auto& [handle, one] : TheState().streams) {
    if (one->capturing && one->blocking) return handle;
  }
  return nullptr;
}

CUresult CheckDefaultStream(const Stream& stream, const std::string& what) {
  if (&stream != &TheState().default_stream) return kSuccess;
  Stream* const captured = CapturingBesideDefault();
  if (captured == nullptr) return kSuccess;
  captured->invalidated = true;
  return Misuse(kCaptureImplicit,
                what + " on the default stream while one that blocks with it is captured");
}

CUresult Enqueue(Stream& stream, Work work) {
  State& s = TheState();
  work.stream = &stream;
  if (stream.capturing) {
    stream.captured.push_back(std::move(work));
    return kSuccess;
  }
  if (const CUresult result = CheckDefaultStream(stream, work.what); result != kSuccess) {
    return result;
  }
  work.order = ++s.order;
  s.pending.push_back(std::move(work));
  return kSuccess;
}

CUresult RunPending(const Stream* stream, uint64_t order) {
  State& s = TheState();
  for (const Work& work : TakePending(stream, order)) {
    if (s.sticky != kSuccess) break;
    try {
      work.run();
    } catch (const Fault& fault) {
      s.sticky = Misuse(fault.code, fault.what());
    }
  }
  return s.sticky;
}

// ---- Calls

Call::Call(const char* name, bool needs_context) : lock_(TheState().mutex) {
  State& s = TheState();
  ++s.calls[name];
  if (!s.initialized) {
    result = Misuse(kNotInitialized, std::string(name) + " before cuInit");
  } else if (needs_context && ContextStack().empty()) {
    result = Misuse(kInvalidContext, std::string(name) + " without a current context");
  } else if (needs_context && s.retained <= 0) {
    result = Misuse(kInvalidContext, std::string(name) + " after the primary context was released");
  } else if (needs_context) {
    result = s.sticky;
  }
}

Stream* MakeStream(bool blocking) {
  State& s = TheState();
  auto stream = std::make_unique<Stream>();
  stream->id = ++s.last_stream_id;
  stream->blocking = blocking;
  Stream* const handle = stream.get();
  s.streams[handle] = std::move(stream);
  return handle;
}

Stream* StreamOf(void* handle) {
  State& s = TheState();
  void* const kLegacy = reinterpret_cast<void*>(1);
  void* const kPerThread = reinterpret_cast<void*>(2);
  if (handle == nullptr || handle == kLegacy) return &s.default_stream;
  if (handle == kPerThread) {
    static thread_local Stream* own = nullptr;
    if (own == nullptr) own = MakeStream(true);
    return own;
  }
  const auto found = s.streams.find(static_cast<Stream*>(handle));
  return found == s.streams.end() ? nullptr : found->first;
}

CUresult CheckNoCapture(const char* name) {
  for (const auto& [handle, one] : TheState().streams) {
    if (!one->capturing) continue;
    one->invalidated = true;
    return Misuse(kCaptureUnsupported, std::string(name) + " while a stream is captured");
  }
  return kSuccess;
}

}  // namespace kvant::ptxemu
