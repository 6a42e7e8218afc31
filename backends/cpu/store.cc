// Stores on the CPU: rotation, quantization and conversion, into a tensor or a part of one.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/cpu/quantize_plan.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/rotate.h"

namespace kvant::cpu {
namespace {

// A piece and its result stay in the first-level cache; a unit is worth some microseconds.
constexpr int64_t kPieceElements = 2048;
constexpr int64_t kUnitElements = 32 * 1024;
constexpr int64_t kFloatBytes = sizeof(float);

int64_t RoundToLine(int64_t bytes) { return CeilDiv(bytes, 64) * 64; }

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
  p.piece = std::clamp(std::max(p.block, kPieceElements), int64_t{1},
                       std::max<int64_t>(1, p.line.extent));
  p.run = std::max<int64_t>(1, kUnitElements / p.piece);
  return p;
}

// `buffers`: a piece for each slot.
void Rotate(const KernelSet& kernels, const RotateProblem& problem, Executor& executor,
            const void* src, void* dst, float* buffers) {
  ForEach(executor, RotateUnits(problem), [&](int64_t unit, int slot) {
    RotateUnit(kernels, problem, src, dst, unit, buffers + slot * problem.piece);
  });
}

int64_t RotationBytes(const RotateProblem& problem, int max_concurrency) {
  return RoundToLine(max_concurrency * problem.piece * kFloatBytes);
}

std::string InWords(const RotateProblem& problem) {
  return absl::StrCat("Hadamard in blocks of ", problem.block);
}

class Rotation : public Executable {
 public:
  Rotation(const StoreSpec& spec, const KernelSet& kernels)
      : spec_(spec), problem_(DescribeRotation(spec, spec.codes)), kernels_(kernels) {}

  std::string kernel() const override {
    return absl::StrCat("cpu/", kernels_.name, " ", InWords(problem_));
  }
  size_t scratch_bytes(int max_concurrency) const override {
    return RotationBytes(problem_, max_concurrency);
  }
  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    Rotate(kernels_, problem_, place.executor, spec_.values.Find(inputs, outputs),
           outputs[spec_.codes.port], reinterpret_cast<float*>(scratch));
    return absl::OkStatus();
  }

 private:
  const StoreSpec spec_;
  const RotateProblem problem_;
  const KernelSet& kernels_;
};

// Of values that are rotated into scratch before, if they are.
class Quantization : public Executable {
 public:
  Quantization(const StoreSpec& spec, const KernelSet& kernels)
      : spec_(spec), kernels_(kernels), plan_(spec) {
    if (spec.hadamard == 0) return;
    rotation_ = DescribeRotation(spec, spec.Source());
    rotated_bytes_ = RoundToLine(rotation_->lines * rotation_->line.extent * kFloatBytes);
  }

  std::string WhyUnsupported() const { return plan_.WhyUnsupported(); }

  std::string kernel() const override {
    return absl::StrCat("cpu/", kernels_.name, " ", plan_.ToString(),
                        rotation_ ? absl::StrCat(" after ", InWords(*rotation_)) : "");
  }

  size_t scratch_bytes(int max_concurrency) const override {
    const int64_t ranges = RangeFloats(plan_.problem()) * kFloatBytes;
    if (!rotation_) return ranges;
    return rotated_bytes_ + std::max(RotationBytes(*rotation_, max_concurrency), ranges);
  }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    auto* const floats = reinterpret_cast<float*>(scratch + rotated_bytes_);
    const auto find = [&](const PortArray& array) -> void* {
      // Given parameters are only read.
      return array.present() ? const_cast<void*>(array.Find(inputs, outputs)) : nullptr;
    };
    QuantizeCall call;
    call.problem = &plan_.problem();
    call.kernels = &kernels_;
    call.src = find(spec_.values);
    call.codes = find(spec_.codes);
    call.scales = find(spec_.scales);
    call.zero_points = find(spec_.zero_points);
    call.ranges = floats;
    if (spec_.appends()) {
      call.positions = find(spec_.position.array);
      call.position_type = spec_.position.array.type;
      call.position_step = spec_.position.array.strides[0];
    }
    if (rotation_) {
      Rotate(kernels_, *rotation_, place.executor, call.src, scratch, floats);
      call.src = scratch;
    }
    const int64_t units = QuantizeUnits(plan_.problem());
    const auto for_each = [&](auto body) {
      if (!plan_.serial()) return ForEach(place.executor, units, body);
      for (int64_t unit = 0; unit < units; ++unit) body(unit, 0);
    };
    if (HasRangePass(plan_.problem())) {
      for_each([&call](int64_t unit, int) { FindRanges(call, unit); });
    }
    for_each([&call](int64_t unit, int) { QuantizeUnit(call, unit); });
    return absl::OkStatus();
  }

 private:
  const StoreSpec spec_;
  const KernelSet& kernels_;
  const QuantizePlan plan_;
  std::optional<RotateProblem> rotation_;
  int64_t rotated_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Executable>> CompileStore(const StoreSpec& spec,
                                                         const KernelSet& kernels) {
  if (spec.dequantizes) return NotTaken("DynamicDequantize by itself");
  if (spec.only_rotates()) return std::make_unique<Rotation>(spec, kernels);
  auto quantization = std::make_unique<Quantization>(spec, kernels);
  if (const std::string why = quantization->WhyUnsupported(); !why.empty()) return NotTaken(why);
  return quantization;
}

}  // namespace kvant::cpu
