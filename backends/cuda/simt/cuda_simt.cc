#include "kvant/backends/cuda_simt.h"

#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/simt/launcher.h"

namespace kvant {

std::unique_ptr<Backend> MakeCudaSimtBackend() {
  return cuda::MakeBackend("cuda_simt", cuda::MakeSimtLauncher());
}

void EnableCudaSimt() { SetCudaSimtBackend(&MakeCudaSimtBackend); }

}  // namespace kvant
