// No exception of ours crosses the ABI. One that a client's allocator throws passes through us as
// it passes through oneDNN: what may call it is called outside of Guard.
#ifndef KVANT_INTEGRATIONS_ONEDNN_GUARD_H_
#define KVANT_INTEGRATIONS_ONEDNN_GUARD_H_

#include <new>

#include "kvant/integrations/onednn/abi.h"

#define KVANT_DNNL_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvant::dnnl_abi {

template <typename F>
Status Guard(const F& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  } catch (...) {
    return kRuntimeError;
  }
}

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_GUARD_H_
