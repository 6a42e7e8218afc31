// The kernels of op_kernels.inc, as source for a GPU and as functions for the executor.
#ifndef KVANT_TESTS_GPU_OP_KERNELS_H_
#define KVANT_TESTS_GPU_OP_KERNELS_H_

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/cuda/runtime/launcher.h"
#include "kvant/kernels/device/simt.h"

namespace kvant::cuda {

enum class OpInputs {
  kBits,          // any words
  kFloats,        // f32 of all magnitudes, special values among them
  kModestFloats,  // f32 within +-30
  kSmallF16,      // pairs of whole numbers within +-8
  kSmallBF16,
  kModestF16,  // pairs within +-2
};

enum class OpComparison {
  kWords,      // equal
  kF32,        // equal, or both NaN
  kF32OrZero,  // and +0 is -0: IEEE 754 leaves to a maximum which of them it gives
  kF32To4Ulp,  // at most four units in the last place apart: 2 of each side
  kF16,        // pairs, equal or both NaN
  kBF16,
  kSums,  // f32 sums of up to 17 terms of up to 4, by any rule of rounding known of tensor cores
};

// Of every thread's `in` words at its own place, and likewise out.
struct OpParams {
  const uint32_t* in;
  uint32_t* out;
};

struct OpKernel {
  std::string name;
  int in_words, out_words;
  OpInputs inputs;
  OpComparison comparison;
  std::string code;  // CUDA C++ of one thread
  std::function<void(const OpParams&)> body;
};
inline std::ostream& operator<<(std::ostream& out, const OpKernel& op) { return out << op.name; }

// What outputs hold before: an operation that leaves them alone is found out.
inline constexpr uint32_t kUnwritten = 0x5a5a5a5a;
inline constexpr int kOpThreads = 64;
inline constexpr int kOpBlocks = 8;
inline constexpr size_t kOpSharedBytes = 32 << 10;

const std::vector<OpKernel>& OpKernels();

// A unit of CUDA C++ with these kernels, each under its name.
std::string OpSource(absl::Span<const OpKernel> ops);
KernelSpec SpecOf(const OpKernel& op);

std::vector<uint32_t> InputsOf(const OpKernel& op);
// Why `got` is not `expected`, with the first word that is not; empty if it is.
std::string Compare(const OpKernel& op, absl::Span<const uint32_t> expected,
                    absl::Span<const uint32_t> got);

// All outputs of one launch. By the executor: an error names what it reports.
absl::StatusOr<std::vector<uint32_t>> RunOnExecutor(const OpKernel& op, simt::MmaModel model = {});
absl::StatusOr<std::vector<uint32_t>> RunOn(Launcher& launcher, const OpKernel& op);

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_GPU_OP_KERNELS_H_
