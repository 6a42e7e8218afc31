// The vocabulary that CUDA kernels are written in. Two targets implement it under the same names:
// PTX for a GPU (NVRTC or nvcc), and the SIMT executor for g++ (simt.h), where every thread of a
// block is a fiber. A kernel includes this header only, and has no #ifdef of its own.
#ifndef KVANT_KERNELS_DEVICE_DEVICE_H_
#define KVANT_KERNELS_DEVICE_DEVICE_H_

#ifdef __CUDACC__
#include "kvant/kernels/device/ptx.h"
#else
#include "kvant/kernels/device/simt_ops.h"
#endif

#endif  // KVANT_KERNELS_DEVICE_DEVICE_H_
