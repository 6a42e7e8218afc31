// MergeAttention on the CPU.
#include "kvant/kernels/cpu/merge.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/cpu_backend.h"

namespace kvant::cpu {
namespace {

// A unit is worth some microseconds.
constexpr int64_t kUnitElements = 32 * 1024;

class Merge : public Executable {
 public:
  Merge(const MergeSpec& spec, const KernelSet& kernels)
      : spec_(spec), kernels_(kernels), parts_(spec.parts.size()) {
    std::vector<size_t> axes;
    for (size_t d = 0; d + 1 < spec.dims.size(); ++d) {
      if (spec.dims[d] == 1) continue;
      problem_.extents[problem_.axes++] = spec.dims[d];
      axes.push_back(d);
    }
    const auto place = [&axes](const PortArray& from, MergeArray& to) {
      to.buffer = from.port;
      if (from.constant) to.buffer = -1, to.data = from.constant->data();
      to.type = from.type;
      for (size_t a = 0; a < axes.size(); ++a) to.strides[a] = from.strides[axes[a]];
      to.channel = from.strides.back();
    };
    for (size_t i = 0; i < parts_.size(); ++i) {
      place(spec_.parts[i].output, parts_[i].output);
      place(spec_.parts[i].stats, parts_[i].stats);
    }
    place(spec_.output, problem_.output);
    if (spec_.stats.present()) place(spec_.stats, problem_.stats);
    problem_.rows = spec.rows();
    problem_.channels = spec.dims.back();
    problem_.parts = parts_.data();
    problem_.part_count = static_cast<int64_t>(parts_.size());
    const int64_t row = std::max<int64_t>(1, problem_.channels * problem_.part_count);
    problem_.run = std::max<int64_t>(1, kUnitElements / row);
  }

  std::string kernel() const override {
    return absl::StrCat("cpu/", kernels_.name, " merge of ", parts_.size(), " parts");
  }
  size_t scratch_bytes(int max_concurrency) const override {
    return static_cast<size_t>(max_concurrency * MergeFloats(problem_)) * sizeof(float);
  }

  absl::Status Run(const Execution& run) const override {
    const MergeCall call{&problem_, &kernels_, run.inputs.data(), run.outputs.data()};
    auto* const floats = reinterpret_cast<float*>(run.scratch);
    ForEach(run.executor, MergeUnits(problem_), [&](int64_t unit, int slot) {
      MergeUnit(call, unit, floats + slot * MergeFloats(problem_));
    });
    return absl::OkStatus();
  }

 private:
  const MergeSpec spec_;
  const KernelSet& kernels_;
  std::vector<MergePart> parts_;
  MergeProblem problem_;
};

}  // namespace

std::unique_ptr<Executable> CompileMerge(const MergeSpec& spec, const KernelSet& kernels) {
  return std::make_unique<Merge>(spec, kernels);
}

}  // namespace kvant::cpu
