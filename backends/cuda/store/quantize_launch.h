// What planners of QuantizeLaunches share: operands, and axes as kernels are told them.
#ifndef KVANT_BACKENDS_CUDA_STORE_QUANTIZE_LAUNCH_H_
#define KVANT_BACKENDS_CUDA_STORE_QUANTIZE_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "absl/status/status.h"
#include "kvant/backends/cuda/store/quantize_plan.h"
#include "kvant/patterns/store_spec.h"

namespace kvant::cuda {

// Elements of a tensor, at most.
inline constexpr int64_t kMostElements = std::numeric_limits<int32_t>::max();
inline constexpr int64_t kWarp = 32;
inline constexpr int64_t kMostThreads = 256;

inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t PowerOfTwoFrom(int64_t x);

int64_t ElementsOf(const StoreAxes& axes);
// That kernels can count elements and axes.
absl::Status CheckSize(const StoreAxes& axes);
// Whether a run of 8 elements is aligned to its size wherever one begins, if positions move it by
// multiples of `unit`.
bool HasVectors(const StoreAxes& axes, int64_t StoreAxis::*stride, int64_t unit);
// Whether elements of less than a byte that share one are neighbours in the order of the axes:
// rows, which positions move apart, must come first then, and have a byte or more.
bool SharesBytesInOrder(const StoreAxes& axes, int64_t StoreAxis::*stride, int per_byte);

QuantizeAxis DeviceAxis(const StoreAxis& axis);
// How many there are.
i32 SetAxes(const StoreAxes& from, QuantizeAxis* axes);
// Those of an Append are three or more, whatever has one batch, token or head, so that one kernel
// appends a token and a prompt.
void SetOuterAxes(StoreAxes axes, QuantizeLaunch& launch);
inline StoreAxis OneElement() { return {.values = 1, .codes = 1, .in_group = true}; }
// Takes the last; where there is none, there is one element.
StoreAxis TakeRun(StoreAxes& axes);
void SetRun(const StoreAxis& run, QuantizeLaunch& launch);
// Blocks for so many threads, or more.
void SetThreads(int64_t wanted, QuantizeLaunch& launch);

// Adds the launch of the spec's rotation, from its values to `to`, which has a port or lies `place`
// bytes into the scratch. kUnimplemented, with a sentence: too large, blocks of more than 32768
// elements or of more than the device's shared memory holds.
absl::Status AddRotation(const StoreSpec& spec, const PortArray& to, std::optional<size_t> place,
                         const DeviceProperties& device, QuantizePlan& plan);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_STORE_QUANTIZE_LAUNCH_H_
