// The cpu backend: attention as one fused kernel, quantization and what appends to a cache,
// rotation, attention over parts made into one.
#include "kvant/backends/cpu/cpu_backend.h"

#include <string>
#include <string_view>

#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace cpu {
namespace {

class CpuBackend : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  bool fused() const override { return true; }

  absl::StatusOr<std::unique_ptr<Executable>> Compile(const Partition& partition) const override {
    const KernelSet* kernels = ChosenKernels();
    if (kernels == nullptr) {
      return MakeError(ErrorKind::kUnimplemented,
                       "KVANT_CPU_ISA names none of what this CPU has of: ", KernelNames());
    }
    if (partition.store() != nullptr) return CompileStore(*partition.store(), *kernels);
    if (partition.merge() != nullptr) return CompileMerge(*partition.merge(), *kernels);
    KVANT_RETURN_IF_ERROR(CheckAttention(partition));
    return CompileAttention(*partition.attention(), *kernels);
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<Executable>> CompileAttention(const AttentionSpec& spec,
                                                             const KernelSet& kernels) {
  if (const std::string why = WhyUnsupported(spec); !why.empty()) {
    return NotTaken(why);
  }
  if (spec.over_queries) return MakeTwoPasses(spec, kernels);
  return std::make_unique<Plan>(spec, kernels);
}

}  // namespace cpu

std::unique_ptr<Backend> MakeCpuBackend() { return std::make_unique<cpu::CpuBackend>(); }

}  // namespace kvant
