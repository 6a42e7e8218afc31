// Hadamard on CUDA devices.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/element_type.h"
#include "kvant/backends/cuda/store/quantize_launch.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cuda/hadamard.h"

namespace kvant::cuda {
namespace {

// A block of threads holds one.
constexpr int64_t kMostRotated = int64_t{kMaxWarpBlock} * kMaxJoinedWarps;

}  // namespace

absl::Status AddRotation(const StoreSpec& spec, const PortArray& to, std::optional<size_t> place,
                         const DeviceProperties& device, QuantizePlan& plan) {
  const int64_t block = spec.hadamard;
  StoreAxes axes;
  for (size_t d = 0; d < spec.dims.size(); ++d) {
    if (const int64_t extent = spec.dims[d]; extent != 1) {
      axes.push_back({.extent = extent, .values = spec.values.strides[d], .codes = to.strides[d]});
    }
  }
  // A last dimension of one element has blocks of one, which may lie along any.
  MergeAxes(axes);
  if (ElementsOf(axes) == 0) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(CheckSize(axes));
  if (block > kMostRotated) {
    return NotTaken(
        absl::StrCat("Hadamard blocks of ", block, " elements, more than ", kMostRotated));
  }
  QuantizeLaunch launch;
  QuantizeTraits& k = launch.traits;
  k.values = ElementTypeOf(spec.values.type);
  k.codes = ElementTypeOf(to.type);
  k.block = static_cast<i32>(block);
  const int64_t warp_block = std::min<int64_t>(block, kMaxWarpBlock);
  k.lanes = static_cast<i32>(std::clamp<int64_t>(warp_block / kRun, 1, kWarp));
  k.lane_runs = static_cast<i32>(std::max<int64_t>(1, warp_block / (kRun * kWarp)));
  k.value_vectors = HasVectors(axes, &StoreAxis::values, 0);
  k.code_vectors = HasVectors(axes, &StoreAxis::codes, 0);
  launch.binding.Add(offsetof(QuantizeParams, values), spec.values);
  if (place) {
    launch.binding.scratch.push_back({offsetof(QuantizeParams, codes), *place});
  } else {
    launch.binding.Add(offsetof(QuantizeParams, codes), to);
  }
  launch.params.norm = 1.f / std::sqrt(static_cast<float>(block));
  const StoreAxis run = TakeRun(axes);
  SetOuterAxes(axes, launch);
  SetRun(run, launch);
  const int64_t part = std::max<int64_t>(block, kRun), parts = DivideUp(run.extent, part);
  launch.params.line_runs = static_cast<u32>(parts);
  launch.params.count = static_cast<u32>(ElementsOf(axes) * parts);
  if (block > kMaxWarpBlock) {
    launch.kernel = QuantizeKernel::kRotateBlocks;
    launch.threads = static_cast<int>(block / kMaxWarpBlock * kWarp);
    launch.shared_bytes = static_cast<size_t>(block) * sizeof(float);
    if (launch.shared_bytes > device.shared_bytes_per_block) {
      return NotTaken(absl::StrCat("Hadamard blocks of ", block, " elements, which take ",
                                   launch.shared_bytes, " bytes of shared memory; the device has ",
                                   device.shared_bytes_per_block));
    }
    launch.blocks = launch.params.count;
  } else {
    launch.kernel = QuantizeKernel::kRotateRuns;
    SetThreads(int64_t{launch.params.count} * k.lanes, launch);
  }
  plan.launches.push_back(std::move(launch));
  return absl::OkStatus();
}

}  // namespace kvant::cuda
