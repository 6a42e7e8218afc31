// Compiled kernels as plain cubins, for disassemblers and other tools, beside what a plan says.
#ifndef KVANT_TOOLS_CUBIN_FOLDER_H_
#define KVANT_TOOLS_CUBIN_FOLDER_H_

#include <string>

#include "absl/status/status.h"
#include "kvant/backends/cuda/runtime/device_properties.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant {

// Writes `folder`/`name`.cubin, and `name`.json:
//   kernel, entry, arch, nvrtc      "attention_tiles_d128", "attention_tiles", "sm_90a", "13.0"
//   threads, shared_bytes           of a block; the bytes are the dynamic ones
//   blocks_per_multiprocessor       what is planned, and register_limit, what that leaves a thread
//   blocks_that_fit                 by registers, shared memory and threads as they came out
//   registers, spill_store_bytes, spill_load_bytes, stack_bytes     as ptxas says
//   round                           KernelRound: {elements, loops}; absent where there is none
// The folder is made. kInternal where ptxas' log was not understood.
absl::Status WriteCubin(const std::string& folder, const std::string& name,
                        const cuda::KernelSpec& spec, const cuda::Cubin& cubin,
                        const cuda::DeviceProperties& device);

}  // namespace kvant

#endif  // KVANT_TOOLS_CUBIN_FOLDER_H_
