// oneDNN's own functions: those of the library that comes after this one in link order, or if there
// is none, of libdnnl.so.3, which is opened then.
#ifndef KVANT_INTEGRATIONS_ONEDNN_NEXT_H_
#define KVANT_INTEGRATIONS_ONEDNN_NEXT_H_

#include <atomic>

#include "kvant/integrations/onednn/abi.h"

namespace kvant::dnnl_abi {

// Null if oneDNN has no such function, or is not there.
void* FindNext(const char* symbol);
// Whether there is a oneDNN at all.
bool HasNext();
// dlopen's handle of the library in which it is; null if that is not known.
void* NextLibrary();
// What it was built with, zeroes if it is not there.
Version NextVersion();

namespace next {

// It is looked for when it is first called: what exports it may be loaded after this library is. An
// older oneDNN has not all of them.
template <typename Function, typename... Arguments>
Status Call(std::atomic<void*>& found, const char* symbol, Arguments... arguments) {
  void* function = found.load(std::memory_order_acquire);
  if (function == nullptr) {
    function = FindNext(symbol);
    if (function == nullptr) return HasNext() ? kUnimplemented : kRuntimeError;
    found.store(function, std::memory_order_release);
  }
  return reinterpret_cast<Function>(function)(arguments...);
}

#define KVANT_DNNL_NEXT(symbol, name, parameters, arguments)      \
  inline Status name parameters {                                 \
    static std::atomic<void*> found = nullptr;                    \
    const auto call = [](auto... given) {                         \
      return Call<Status(*) parameters>(found, symbol, given...); \
    };                                                            \
    return call arguments;                                        \
  }
#define KVANT_DNNL_FORWARD(name, parameters, arguments) \
  KVANT_DNNL_NEXT("dnnl_graph_" #name, name, parameters, arguments)
#define KVANT_DNNL_OWN KVANT_DNNL_FORWARD
#define KVANT_DNNL_COMMON(name, parameters, arguments) \
  KVANT_DNNL_NEXT("dnnl_" #name, name, parameters, arguments)
#include "kvant/integrations/onednn/functions.inc"
#undef KVANT_DNNL_NEXT

}  // namespace next
}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_NEXT_H_
