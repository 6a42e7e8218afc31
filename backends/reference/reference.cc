// The reference backend: any partition, op by op, on oneDNN.
//
// oneDNN runs its primitives on the threads it was built for (OpenMP in the packages that
// scripts/setup installs), not on the executor; kvant's own loops run on the executor. Results
// do not depend on the executor's threads, and on oneDNN's only where its matrix product splits
// the inner dimension over threads.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dnnl.hpp"
#include "kvant/backends/backend.h"
#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/plan.h"

namespace kvant {
namespace reference {
namespace {

std::string KernelText(const Graph& graph) {
  const dnnl_version_t& version = *dnnl_version();
  std::string text = absl::StrCat("op by op through oneDNN ", version.major, ".", version.minor,
                                  ".", version.patch, ":");
  const char* separator = " ";
  for (const Op& op : graph.ops()) {
    absl::StrAppend(&text, separator, std::string(OpKindName(op.kind)));
    separator = ", ";
  }
  return text;
}

absl::Status Check(const PortCheck& check, const void* data) {
  absl::Status status;
  const Dims strides = check.tensor.StridesOrDense();
  const int64_t stride = strides.empty() ? 1 : strides.back();  // of a vector or a scalar
  for (int64_t i = 0; i < check.tensor.elements() && status.ok(); ++i) {
    const double value = LoadElement(check.tensor.type, data, i * stride);
    if (value >= check.low && value <= check.high) continue;
    status = MakeError(ErrorKind::kInvalidArguments,
                       absl::StrCat(check.what, " ", value, " (element ", i, ") is not in [",
                                    check.low, ", ", check.high, "]"));
  }
  return status;
}

class ReferenceExecutable : public Executable {
 public:
  ReferenceExecutable(std::string kernel, Plan plan, std::vector<PortCheck> checks, bool empty)
      : kernel_(std::move(kernel)),
        plan_(std::move(plan)),
        port_checks_(std::move(checks)),
        empty_(empty) {}

  std::string kernel() const override { return kernel_; }
  size_t scratch_bytes(int) const override { return plan_.scratch_bytes(); }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    for (const PortCheck& check : port_checks_) {
      KVANT_RETURN_IF_ERROR(Check(check, inputs[check.port]));
    }
    if (empty_) return absl::OkStatus();
    try {
      plan_.Run(place.executor, inputs, outputs, scratch);
    } catch (const dnnl::error& error) {
      return absl::InternalError(absl::StrCat("oneDNN: ", error.what()));
    }
    return absl::OkStatus();
  }

 private:
  const std::string kernel_;
  const Plan plan_;
  const std::vector<PortCheck> port_checks_;
  const bool empty_;  // an output has no elements: nothing is to be done
};

class ReferenceBackend : public Backend {
 public:
  std::string_view name() const override { return "reference"; }
  bool fused() const override { return false; }

  absl::StatusOr<std::unique_ptr<Executable>> Compile(const Partition& partition) const override {
    bool empty = false;
    for (size_t port = 0; port < partition.outputs().size(); ++port) {
      empty = empty || partition.output(static_cast<int>(port)).elements() == 0;
    }
    Plan plan;
    Lowering lowering(partition, plan);
    try {
      KVANT_RETURN_IF_ERROR(lowering.LowerPartition());
      plan.Finish();
    } catch (const dnnl::error& error) {
      return MakeError(ErrorKind::kUnimplemented, absl::StrCat("oneDNN: ", error.what()));
    }
    return std::make_unique<ReferenceExecutable>(KernelText(partition.ops()), std::move(plan),
                                                 lowering.port_checks(), empty);
  }
};

}  // namespace
}  // namespace reference

std::unique_ptr<Backend> MakeReferenceBackend() {
  return std::make_unique<reference::ReferenceBackend>();
}

}  // namespace kvant
