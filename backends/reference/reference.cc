// The reference backend: any partition, op by op, on oneDNN.
//
// oneDNN runs its primitives on the threads it was built for (OpenMP in the packages that
// scripts/setup installs), not on the executor; kvant's own loops run on the executor. Results
// do not depend on the executor's threads, and on oneDNN's only where its matrix product splits
// the inner dimension over threads.
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dnnl.hpp"
#include "kvant/backends/backend.h"
#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/plan.h"

namespace kvant {
namespace reference {
namespace {

std::string KernelText(const Graph& graph) {
  const dnnl_version_t& version = *dnnl_version();
  return absl::StrCat("op by op through oneDNN ", version.major, ".", version.minor, ".",
                      version.patch, ": ",
                      absl::StrJoin(graph.ops(), ", ", [](std::string* text, const Op& op) {
                        absl::StrAppend(text, std::string(OpKindName(op.kind)));
                      }));
}

class ReferenceExecutable : public Executable {
 public:
  ReferenceExecutable(std::string kernel, Plan plan)
      : kernel_(std::move(kernel)), plan_(std::move(plan)) {}

  std::string kernel() const override { return kernel_; }
  size_t scratch_bytes(int) const override { return plan_.scratch_bytes(); }

  absl::Status Run(const Execution& run) const override {
    try {
      return plan_.Run(run);
    } catch (const dnnl::error& error) {
      return absl::InternalError(absl::StrCat("oneDNN: ", error.what()));
    }
  }

 private:
  const std::string kernel_;
  const Plan plan_;
};

class ReferenceBackend : public Backend {
 public:
  std::string_view name() const override { return "reference"; }
  bool fused() const override { return false; }

  absl::StatusOr<std::unique_ptr<Executable>> Compile(const Partition& partition) const override {
    Plan plan;
    Lowering lowering(partition, plan);
    try {
      KVANT_RETURN_IF_ERROR(lowering.LowerPartition());
      plan.Finish();
    } catch (const dnnl::error& error) {
      return MakeError(ErrorKind::kUnimplemented, "oneDNN: ", error.what());
    }
    return std::make_unique<ReferenceExecutable>(KernelText(partition.ops()), std::move(plan));
  }
};

}  // namespace
}  // namespace reference

std::unique_ptr<Backend> MakeReferenceBackend() {
  return std::make_unique<reference::ReferenceBackend>();
}

}  // namespace kvant
