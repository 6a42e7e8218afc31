// Stores on the CPU: rotation, quantization and conversion, into a tensor or a part of one.
#include <algorithm>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/cpu/quantize_plan.h"
#include "kvant/backends/loops.h"
#include "kvant/kernels/cpu/rotate.h"

namespace kvant::cpu {
namespace {

// A piece and its result stay in the first-level cache; a unit is worth some microseconds.
constexpr int64_t kPieceElements = 2048;
constexpr int64_t kUnitElements = 32 * 1024;
constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kLineBytes = 64;

// Of the spec's values, to `to`.
RotateProblem DescribeRotation(const StoreSpec& spec, const PortArray& to) {
  RotateProblem p;
  p.src_type = spec.values.type;
  p.dst_type = to.type;
  p.block = spec.hadamard;
  const size_t last = spec.dims.size() - 1;
  p.line = {spec.dims[last], spec.values.strides[last], to.strides[last]};
  for (size_t d = 0; d < last; ++d) {
    const int64_t extent = spec.dims[d];
    p.lines *= extent;
    if (extent != 1) p.outer[p.outer_axes++] = {extent, spec.values.strides[d], to.strides[d]};
  }
  p.lines_of_row = p.lines / std::max<int64_t>(1, spec.dims[0]);
  p.piece = std::clamp(std::max(p.block, kPieceElements), int64_t{1},
                       std::max<int64_t>(1, p.line.extent));
  p.run = std::max<int64_t>(1, kUnitElements / p.piece);
  return p;
}

// A rotation, or a quantization, of values that are rotated into scratch before if they are.
class Store : public Executable {
 public:
  Store(const StoreSpec& spec, const KernelSet& kernels) : spec_(spec), kernels_(kernels) {
    if (!spec.only_rotates()) plan_.emplace(spec);
    if (spec.hadamard == 0) return;
    rotation_ = DescribeRotation(spec, plan_ ? spec.Source() : spec.codes);
    if (!plan_) return;
    rotated_bytes_ = RoundUp(rotation_->lines * rotation_->line.extent * kFloatBytes, kLineBytes);
  }

  std::string WhyUnsupported() const { return plan_ ? plan_->WhyUnsupported() : ""; }

  std::string kernel() const override {
    const std::string rotation =
        rotation_ ? absl::StrCat("Hadamard in blocks of ", rotation_->block) : "";
    return absl::StrCat("cpu/", kernels_.name, " ", plan_ ? plan_->ToString() : "",
                        plan_ && rotation_ ? " after " : "", rotation);
  }

  size_t scratch_bytes(int max_concurrency) const override {
    const int64_t ranges = plan_ ? RangeFloats(plan_->problem()) * kFloatBytes : 0;
    const int64_t pieces =
        rotation_ ? RoundUp(max_concurrency * rotation_->piece * kFloatBytes, kLineBytes) : 0;
    return rotated_bytes_ + std::max(pieces, ranges);
  }

  absl::Status Run(const Execution& run) const override {
    auto* const floats = reinterpret_cast<float*>(run.scratch + rotated_bytes_);
    const auto find = [&](const PortArray& array) -> void* {
      // Given parameters are only read.
      return array.present() ? const_cast<void*>(array.Find(run.inputs, run.outputs)) : nullptr;
    };
    QuantizeCall call;
    call.src = find(spec_.values);
    call.codes = find(spec_.codes);
    if (spec_.appends()) {
      const PortArray& positions = spec_.position.array;
      call.positions = {find(positions), positions.type, positions.strides[0]};
    }
    if (rotation_) {
      void* const rotated = plan_ ? run.scratch : call.codes;
      ForEach(run.executor, RotateUnits(*rotation_), [&](int64_t unit, int slot) {
        RotateUnit(kernels_, *rotation_, call.positions, call.src, rotated, unit,
                   floats + slot * rotation_->piece);
      });
      call.src = rotated;
    }
    if (!plan_) return absl::OkStatus();
    call.problem = &plan_->problem();
    call.kernels = &kernels_;
    call.scales = find(spec_.scales);
    call.zero_points = find(spec_.zero_points);
    call.ranges = floats;
    const int64_t units = QuantizeUnits(plan_->problem());
    const auto for_each = [&](auto body) {
      if (!plan_->serial()) return ForEach(run.executor, units, body);
      for (int64_t unit = 0; unit < units; ++unit) body(unit, 0);
    };
    if (HasRangePass(plan_->problem())) {
      for_each([&call](int64_t unit, int) { FindRanges(call, unit); });
    }
    for_each([&call](int64_t unit, int) { QuantizeUnit(call, unit); });
    return absl::OkStatus();
  }

 private:
  const StoreSpec spec_;
  const KernelSet& kernels_;
  std::optional<QuantizePlan> plan_;  // none: it only rotates
  std::optional<RotateProblem> rotation_;
  int64_t rotated_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Executable>> CompileStore(const StoreSpec& spec,
                                                         const KernelSet& kernels) {
  if (spec.dequantizes) return NotTaken("DynamicDequantize by itself");
  auto store = std::make_unique<Store>(spec, kernels);
  if (const std::string why = store->WhyUnsupported(); !why.empty()) return NotTaken(why);
  return store;
}

}  // namespace kvant::cpu
