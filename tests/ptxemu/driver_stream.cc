// Calls on streams, captures, graphs and events.
#include <utility>

#include "kvant/tests/ptxemu/driver.h"

namespace kvant::ptxemu {
namespace {

// Handles are addresses of what is in a map.
template <class T>
T* AddTo(std::map<T*, std::unique_ptr<T>>& map, std::unique_ptr<T> made) {
  T* const handle = made.get();
  map[handle] = std::move(made);
  return handle;
}

template <class T>
T* FindIn(const std::map<T*, std::unique_ptr<T>>& map, void* handle) {
  const auto found = map.find(static_cast<T*>(handle));
  return found == map.end() ? nullptr : found->second.get();
}

template <class T>
CUresult EraseFrom(std::map<T*, std::unique_ptr<T>>& map, void* handle, const char* name) {
  return InContext(name, [&] {
    return map.erase(static_cast<T*>(handle)) != 0 ? kSuccess : Misuse(kInvalidHandle, name);
  });
}

}  // namespace

extern "C" {

// ---- Streams

CUresult cuStreamCreate(void** handle, unsigned flags) {
  return InContext("cuStreamCreate", [&] {
    if (flags > 1) return Misuse(kInvalidValue, "cuStreamCreate flags");
    *handle = MakeStream(flags == 0);
    return kSuccess;
  });
}

CUresult cuStreamDestroy_v2(void* handle) {
  return OnStream("cuStreamDestroy_v2", handle, [&](Stream& stream) {
    if (&stream != handle) return Misuse(kInvalidHandle, "cuStreamDestroy of the driver's stream");
    RunPending(&stream);
    TheState().streams.erase(&stream);
    return kSuccess;
  });
}

CUresult cuStreamSynchronize(void* handle) {
  return OnStream("cuStreamSynchronize", handle, [&](Stream& stream) {
    if (stream.capturing) {
      stream.invalidated = true;
      return Misuse(kCaptureUnsupported, "cuStreamSynchronize of a stream under capture");
    }
    const CUresult result = CheckDefaultStream(stream, "cuStreamSynchronize");
    return result != kSuccess ? result : RunPending(&stream);
  });
}

// Drivers may refuse this of a stream under capture, and so does this one.
CUresult cuStreamGetId(void* handle, unsigned long long* id) {
  return OnStream("cuStreamGetId", handle, [&](Stream& stream) {
    if (stream.capturing) {
      stream.invalidated = true;
      return Misuse(kCaptureUnsupported, "cuStreamGetId of a stream under capture");
    }
    *id = stream.id;
    return kSuccess;
  });
}

// ---- Captures

// Does not invalidate a capture, whatever it finds.
CUresult cuStreamIsCapturing(void* handle, int* status) {
  return OnStream("cuStreamIsCapturing", handle, [&](Stream& stream) {
    constexpr int kNone = 0, kActive = 1, kInvalidated = 2;
    if (&stream == &TheState().default_stream && CapturingBesideDefault() != nullptr) {
      return Misuse(kCaptureImplicit, "cuStreamIsCapturing of the default stream during a capture");
    }
    *status = !stream.capturing ? kNone : stream.invalidated ? kInvalidated : kActive;
    return kSuccess;
  });
}

CUresult cuStreamBeginCapture_v2(void* handle, int mode) {
  return OnStream("cuStreamBeginCapture_v2", handle, [&](Stream& stream) {
    if (&stream == &TheState().default_stream) {
      return Misuse(kCaptureUnsupported, "capture of the default stream");
    }
    if (stream.capturing || mode < 0 || mode > 2) {
      return Misuse(kInvalidValue, "cuStreamBeginCapture");
    }
    stream.capturing = true;
    stream.invalidated = false;
    stream.captured.clear();
    return kSuccess;
  });
}

CUresult cuStreamEndCapture(void* handle, void** graph) {
  return OnStream("cuStreamEndCapture", handle, [&](Stream& stream) {
    if (!stream.capturing) return Misuse(kInvalidValue, "cuStreamEndCapture without a capture");
    stream.capturing = false;
    *graph = nullptr;
    if (stream.invalidated) return Misuse(kCaptureInvalidated, "the capture was invalidated");
    auto made = std::make_unique<Graph>();
    made->work = std::move(stream.captured);
    *graph = AddTo(TheState().graphs, std::move(made));
    return kSuccess;
  });
}

// ---- Graphs

CUresult cuGraphInstantiateWithFlags(void** executable, void* handle, unsigned long long) {
  return InContext("cuGraphInstantiateWithFlags", [&] {
    State& s = TheState();
    const Graph* graph = FindIn(s.graphs, handle);
    if (graph == nullptr) return Misuse(kInvalidHandle, "cuGraphInstantiate of no graph");
    *executable = AddTo(s.executables, std::make_unique<Graph>(*graph));
    return kSuccess;
  });
}

CUresult cuGraphDestroy(void* handle) {
  return EraseFrom(TheState().graphs, handle, "cuGraphDestroy");
}

CUresult cuGraphExecDestroy(void* handle) {
  return EraseFrom(TheState().executables, handle, "cuGraphExecDestroy");
}

CUresult cuGraphLaunch(void* executable, void* handle) {
  return OnStream("cuGraphLaunch", handle, [&](Stream& stream) {
    State& s = TheState();
    const Graph* graph = FindIn(s.executables, executable);
    if (graph == nullptr) return Misuse(kInvalidHandle, "cuGraphLaunch of no graph");
    for (const Work& work : graph->work) {
      if (work.function != nullptr &&
          s.functions.count(const_cast<Function*>(work.function)) == 0) {
        return Misuse(kInvalidHandle, "cuGraphLaunch with a kernel of a module that is gone");
      }
      if (const CUresult result = Enqueue(stream, work); result != kSuccess) return result;
    }
    return kSuccess;
  });
}

// ---- Events

CUresult cuEventCreate(void** event, unsigned) {
  return InContext("cuEventCreate", [&] {
    *event = AddTo(TheState().events, std::make_unique<Event>());
    return kSuccess;
  });
}

CUresult cuEventDestroy_v2(void* event) {
  return EraseFrom(TheState().events, event, "cuEventDestroy_v2");
}

CUresult cuEventRecord(void* handle, void* stream_handle) {
  return OnStream("cuEventRecord", stream_handle, [&](Stream& stream) {
    State& s = TheState();
    Event* const event = FindIn(s.events, handle);
    if (event == nullptr) return Misuse(kInvalidHandle, "cuEventRecord of no event");
    event->recorded = s.order;
    event->stream = &stream;
    return kSuccess;
  });
}

CUresult cuEventSynchronize(void* handle) {
  return InContext("cuEventSynchronize", [&] {
    const Event* event = FindIn(TheState().events, handle);
    if (event == nullptr) return Misuse(kInvalidHandle, "cuEventSynchronize of no event");
    return event->stream == nullptr ? kSuccess : RunPending(event->stream, event->recorded);
  });
}

// There is no time on an emulated device.
CUresult cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  return InContext("cuEventElapsedTime", [&] {
    for (void* handle : {start, end}) {
      const Event* event = FindIn(TheState().events, handle);
      if (event == nullptr || event->stream == nullptr) {
        return Misuse(kInvalidHandle, "cuEventElapsedTime of an event that was not recorded");
      }
    }
    *milliseconds = 1;
    return kSuccess;
  });
}

}  // extern "C"

}  // namespace kvant::ptxemu
