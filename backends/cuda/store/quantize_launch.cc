#include "kvant/backends/cuda/store/quantize_launch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/cuda/kernel_traits.h"

namespace kvant::cuda {
namespace {

constexpr int64_t kAppendThreads = 128;

constexpr KernelRow kKernels[] = {
#define KVANT_STORE_KERNEL(kind, entry, Class, header) \
  {#entry, #header, #Class, "QuantizeTraits", "QuantizeParams"},
#include "kvant/backends/cuda/kernels.inc"
};

// Whether each index of an outer axis begins behind all that inner ones reach.
bool IsNested(const StoreAxes& axes, int64_t StoreAxis::*stride) {
  int64_t reach = 0;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if ((*axis).*stride <= reach) return false;
    reach += (axis->extent - 1) * (*axis).*stride;
  }
  return true;
}

}  // namespace

int64_t PowerOfTwoFrom(int64_t x) {
  int64_t power = 1;
  while (power < x) power *= 2;
  return power;
}

int64_t ElementsOf(const StoreAxes& axes) {
  int64_t elements = 1;
  for (const StoreAxis& axis : axes) elements *= axis.extent;
  return elements;
}

absl::Status CheckSize(const StoreAxes& axes) {
  if (ElementsOf(axes) > kMostElements) {
    return NotTaken(
        absl::StrCat("tensors of ", ElementsOf(axes), " elements, more than ", kMostElements));
  }
  if (axes.size() > kMaxQuantizeAxes) {
    return NotTaken(absl::StrCat("tensors of ", axes.size(), " axes, more than ", kMaxQuantizeAxes,
                                 ", with neighbours merged"));
  }
  return absl::OkStatus();
}

bool HasVectors(const StoreAxes& axes, int64_t StoreAxis::*stride, int64_t unit) {
  if (axes.empty() || axes.back().*stride != 1 || unit % kRun != 0) return false;
  return std::all_of(axes.begin(), axes.end() - 1,
                     [stride](const StoreAxis& axis) { return axis.*stride % kRun == 0; });
}

bool SharesBytesInOrder(const StoreAxes& axes, int64_t StoreAxis::*stride, int per_byte) {
  const auto is_row = [](const StoreAxis& axis) { return axis.positions != 0; };
  const auto rows_end = std::find_if_not(axes.begin(), axes.end(), is_row);
  if (std::any_of(rows_end, axes.end(), is_row)) return false;
  if (rows_end != axes.begin() && (*(rows_end - 1)).*stride < per_byte) return false;
  return IsNested(axes, stride);
}

QuantizeAxis DeviceAxis(const StoreAxis& axis) {
  const auto extent = static_cast<i32>(axis.extent);
  return {axis.values, axis.codes, axis.scales, axis.zero_points, axis.positions, extent, 0};
}

i32 SetAxes(const StoreAxes& from, QuantizeAxis* axes) {
  for (size_t i = 0; i < from.size(); ++i) axes[i] = DeviceAxis(from[i]);
  return static_cast<i32>(from.size());
}

void SetOuterAxes(StoreAxes axes, QuantizeLaunch& launch) {
  constexpr size_t kFewestOfAppend = 3;
  while (launch.traits.positions != kNone && axes.size() < kFewestOfAppend)
    axes.insert(axes.begin(), StoreAxis{});
  launch.traits.outer_axes = SetAxes(axes, launch.params.outer);
}

StoreAxis TakeRun(StoreAxes& axes) {
  if (axes.empty()) return OneElement();
  const StoreAxis run = axes.back();
  axes.pop_back();
  return run;
}

void SetRun(const StoreAxis& run, QuantizeLaunch& launch) {
  launch.params.run = DeviceAxis(run);
  launch.params.line_runs = static_cast<u32>(DivideUp(run.extent, kRun));
  launch.traits.whole_runs = run.extent % kRun == 0;
}

KernelSpec MakeQuantizeKernel(const QuantizeLaunch& launch) {
  KernelSpec spec = MakeKernel(kKernels[static_cast<int>(launch.kernel)],
                               {{"Traits", WordsOf(launch.traits)}}, launch.threads);
  spec.shared_bytes = launch.shared_bytes;
  return spec;
}

void SetThreads(int64_t wanted, QuantizeLaunch& launch) {
  // One kernel appends a token and a prompt.
  const bool appends = launch.traits.positions != kNone;
  const int64_t fewest = appends ? kAppendThreads : kWarp;
  const int64_t most = appends ? kAppendThreads : kMostThreads;
  launch.threads = static_cast<int>(std::clamp(PowerOfTwoFrom(wanted), fewest, most));
  launch.blocks = DivideUp(wanted, launch.threads);
}

}  // namespace kvant::cuda
