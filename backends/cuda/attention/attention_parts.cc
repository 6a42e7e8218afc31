#include "kvant/backends/cuda/attention/attention_parts.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/attention/attention_kernel.h"
#include "kvant/backends/cuda/attention/describe_attention.h"
#include "kvant/backends/cuda/constants.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cuda/attention_ranges.h"

namespace kvant::cuda {
namespace {

// Below it, tiles of all tokens take less than the launches that parts add.
constexpr int64_t kFewestTokens = 512;
// Tokens that tiles have, for which their splits are planned, or more where there is room for more.
constexpr int64_t kOtherTokens = 256;
// What the kernel of ranges counts in 32 bits, and the threads of its blocks.
constexpr int64_t kMostEntries = int64_t{1} << 20;
constexpr int kThreads = 128;

using Segments = absl::InlinedVector<KvSegment, 1>;

int LongestOf(const Segments& segments) {
  const auto longest = std::max_element(
      segments.begin(), segments.end(),
      [](const KvSegment& a, const KvSegment& b) { return a.tokens() < b.tokens(); });
  return static_cast<int>(longest - segments.begin());
}

// Whether it is the same for every column: parts count them from 0 each.
bool IgnoresColumns(const ScoreStep& step) {
  using Kind = ScoreStep::Kind;
  if (step.kind == Kind::kSelect || step.kind == Kind::kBand || step.kind == Kind::kAlibi) {
    return false;
  }
  const View& view = step.operand.view;
  return !view.present() || view.on_host || view.dims[kCol] == 1;
}

// Of a spec of several segments: why it does not go in parts, or empty.
std::string WhyNotParts(const AttentionSpec& spec) {
  for (const Segments* side : {&spec.k, &spec.v}) {
    if (side->size() >= kMaxSegments) return absl::StrCat("there are ", side->size(), " segments");
    const bool has_ranges = std::all_of(side->begin(), side->end(), [](const KvSegment& segment) {
      return segment.range.present();
    });
    if (!has_ranges) return "segments have no ranges";
  }
  if (spec.kv_lengths.present() || spec.kv_first.present()) return "there are lengths";
  if (spec.query_offsets.present()) return "queries are ragged";
  if (spec.dropout) return "there is dropout";
  if (spec.probs_quantization) return "probabilities are rounded";
  if (!std::all_of(spec.steps.begin(), spec.steps.end(), IgnoresColumns)) {
    return "scores depend on their columns";
  }
  if (spec.batch[0] > kMostEntries) return absl::StrCat("there are ", spec.batch[0], " sequences");
  const int64_t tokens =
      std::min(spec.k[LongestOf(spec.k)].tokens(), spec.v[LongestOf(spec.v)].tokens());
  if (tokens >= kFewestTokens) return "";
  return absl::StrCat("the longest segments have ", tokens, " tokens, less than ", kFewestTokens);
}

// Dense [b0, b1, b2, rows, columns] of f32 at an output port of codes.
View LeftView(const AttentionSpec& spec, int port, int64_t columns) {
  View view;
  view.port = port;
  view.type = kvant::kF32;
  view.dims = {spec.batch[0], spec.batch[1], spec.batch[2], spec.q_len, columns};
  int64_t stride = 1;
  for (int axis = kCol; axis >= 0; --axis) {
    view.strides[axis] = stride;
    stride *= view.dims[axis];
  }
  return view;
}

// {first, tokens} of segment `index` of `count`, by batch entry.
View RangeView(const AttentionSpec& spec, int port, int64_t index, int64_t count) {
  View view;
  view.port = port;
  view.type = kvant::kS32;
  view.dims = {spec.batch[0], 1, 1, 1, 2};
  view.strides = {count * 2, 0, 0, 0, 1};
  view.offset = index * 2;
  return view;
}

// What ends a row is left to the others.
AttentionSpec CodesOf(const AttentionSpec& spec, int inputs) {
  AttentionSpec part = spec;
  part.softmax_mode = SoftmaxMode::kInfAsZero;
  part.sinks = {};
  part.output_hadamard = 0;
  part.output_quantization.reset();
  part.output = LeftView(spec, 0, spec.v_head_size);
  // Of each row two numbers; a view is of the first.
  part.stats = LeftView(spec, 1, 2);
  part.stats.dims[kCol] = 1;
  const auto only = [&](const Segments& segments, int port) {
    KvSegment codes = segments[LongestOf(segments)];
    codes.range = RangeView(spec, port, 0, 1);
    return Segments{codes};
  };
  part.k = only(spec.k, inputs);
  part.v = only(spec.v, inputs + 1);
  part.kv_len = part.k[0].tokens();
  return part;
}

AttentionSpec OthersOf(const AttentionSpec& spec, int inputs) {
  AttentionSpec part = spec;
  const auto twice = [&](const Segments& segments, int port) {
    Segments all = segments;
    const int codes = LongestOf(segments);
    all.insert(all.begin() + codes, segments[codes]);
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].range =
          RangeView(spec, port, static_cast<int64_t>(i), static_cast<int64_t>(all.size()));
    }
    return all;
  };
  part.k = twice(spec.k, inputs);
  part.v = twice(spec.v, inputs + 1);
  const auto others = [](const Segments& segments) {
    int64_t tokens = 0;
    for (const KvSegment& segment : segments) tokens += segment.tokens();
    return tokens - segments[LongestOf(segments)].tokens();
  };
  // Of the codes' segment there are few, as ranges will say.
  part.kv_len = std::max(kOtherTokens, std::min(others(spec.k), others(spec.v)));
  return part;
}

AttentionPlan PlanRanges(const AttentionSpec& spec) {
  AttentionPlan plan;
  DescribeAttention(spec, plan);
  plan.traits.kernel = kRangesKernel;
  plan.traits.k_codes = LongestOf(spec.k);
  plan.traits.v_codes = LongestOf(spec.v);
  plan.threads = kThreads;
  plan.blocks = (spec.batch[0] + kThreads - 1) / kThreads;
  return plan;
}

// As many as it reads, or more.
int InputsOf(const KernelBinding& binding) {
  int inputs = 0;
  for (const PortPointer& pointer : binding.ports) {
    if (!pointer.output) inputs = std::max(inputs, pointer.port + 1);
  }
  for (const HostValue& value : binding.values) inputs = std::max(inputs, value.port + 1);
  return inputs;
}

size_t Aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

class FusedParts : public Executable {
 public:
  struct Part {
    std::shared_ptr<const LoadedKernel> kernel;
    std::shared_ptr<const Constants> constants;
  };
  // parts: in the order of the plan's.
  FusedParts(std::string device, PartsPlan plan, std::array<Part, 3> parts,
             std::shared_ptr<const Launcher> launcher)
      : device_(std::move(device)),
        plan_(std::move(plan)),
        parts_(std::move(parts)),
        launcher_(std::move(launcher)) {}

  std::string kernel() const override {
    return absl::StrCat(device_, " online softmax, ", plan_.ToString(), ", ",
                        parts_[1].kernel->description());
  }
  double rounding() const override { return plan_.rounding(); }
  size_t scratch_bytes(int) const override { return plan_.scratch_bytes; }
  size_t alignment() const override { return kPointerAlignment; }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    const AttentionParams& whole = plan_.ranges.params;
    const int64_t rows = int64_t{whole.batch[0]} * whole.batch[1] * whole.batch[2] * whole.q_len;
    const PartRanges at = PartRanges::Of(whole.batch[0], plan_.ranges.traits.k_segments,
                                         plan_.ranges.traits.v_segments);
    auto* const ranges = reinterpret_cast<i32*>(scratch + plan_.ranges_at);
    auto* const left = reinterpret_cast<float*>(scratch + plan_.left_at);
    void* const of_codes[] = {left, left + rows * plan_.codes.traits.v_head_size};
    KVANT_RETURN_IF_ERROR(
        Launch(place, 0, plan_.ranges, inputs, outputs, of_codes, nullptr, ranges));
    absl::InlinedVector<const void*, 32> part_inputs(inputs.begin(), inputs.begin() + plan_.inputs);
    part_inputs.resize(part_inputs.size() + 2);
    const auto part = [&](size_t index, const AttentionPlan& plan, i32* of_k, i32* of_v,
                          absl::Span<void* const> part_outputs, std::byte* own) {
      part_inputs[part_inputs.size() - 2] = of_k;
      part_inputs.back() = of_v;
      return Launch(place, index, plan, part_inputs, part_outputs, of_codes, own,
                    own + plan.partial_bytes);
    };
    KVANT_RETURN_IF_ERROR(part(1, plan_.codes, ranges + at.codes_k, ranges + at.codes_v, of_codes,
                               scratch + plan_.codes_at));
    return part(2, plan_.others, ranges + at.others_k, ranges + at.others_v, outputs,
                scratch + plan_.others_at);
  }

 private:
  absl::Status Launch(const ExecutionPlace& place, size_t index, const AttentionPlan& plan,
                      absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                      void* const (&of_codes)[2], void* partials, void* done) const {
    if (plan.blocks == 0) return absl::OkStatus();
    AttentionParams params = plan.params;
    FillParams(plan.binding, inputs, outputs, parts_[index].constants->data(), &params);
    params.partials = static_cast<float*>(partials);
    params.done = static_cast<u32*>(done);
    params.codes_outputs = static_cast<const float*>(of_codes[0]);
    params.codes_states = static_cast<const float*>(of_codes[1]);
    return launcher_->Launch(*parts_[index].kernel, plan.blocks, &params, sizeof(params),
                             place.stream);
  }

  const std::string device_;
  const PartsPlan plan_;
  const std::array<Part, 3> parts_;
  const std::shared_ptr<const Launcher> launcher_;
};

}  // namespace

double PartsPlan::rounding() const {
  const i32 output = others.traits.output.type;
  return std::max(codes.rounding(output), others.rounding(output));
}

std::string PartsPlan::ToString() const {
  return absl::StrCat(codes.ToString(), ", joined with those of other segments by ",
                      others.ToString());
}

std::optional<PartsPlan> PlanParts(const AttentionSpec& spec, const DeviceProperties& device,
                                   std::string& why_not) {
  if (!WhyUnsupported(spec).empty() || (spec.k.size() <= 1 && spec.v.size() <= 1)) {
    return std::nullopt;
  }
  why_not = WhyNotParts(spec);
  if (!why_not.empty()) return std::nullopt;
  PartsPlan plan;
  const int64_t rows = spec.batch[0] * spec.batch[1] * spec.batch[2] * spec.q_len;
  plan.ranges = PlanRanges(spec);
  const int inputs = plan.inputs = InputsOf(plan.ranges.binding);
  absl::StatusOr<AttentionPlan> codes = PlanPart(CodesOf(spec, inputs), kCodesPart, device);
  if (!codes.ok() || codes->traits.kernel != kCodesKernel) {
    why_not = codes.ok() ? codes->why_not_codes : std::string(codes.status().message());
    return std::nullopt;
  }
  absl::StatusOr<AttentionPlan> others = PlanTiles(OthersOf(spec, inputs), kOthersPart, device);
  if (!others.ok()) {
    why_not = std::string(others.status().message());
    return std::nullopt;
  }
  plan.codes = *std::move(codes);
  plan.others = *std::move(others);
  const AttentionTraits& whole = plan.ranges.traits;
  const auto take = [&plan](size_t bytes) {
    return std::exchange(plan.scratch_bytes, plan.scratch_bytes + Aligned(bytes));
  };
  plan.codes_at = take(plan.codes.scratch_bytes);
  plan.others_at = take(plan.others.scratch_bytes);
  plan.ranges_at = take(
      sizeof(i32) *
      PartRanges::Of(static_cast<i32>(spec.batch[0]), whole.k_segments, whole.v_segments).size);
  plan.left_at = take(sizeof(float) * rows * (spec.v_head_size + 2));
  return plan;
}

absl::StatusOr<std::unique_ptr<Executable>> CompileParts(
    PartsPlan plan, std::shared_ptr<Launcher> launcher, const std::shared_ptr<DeviceMemory>& memory,
    std::string device) {
  std::array<FusedParts::Part, 3> parts;
  const AttentionPlan* const plans[] = {&plan.ranges, &plan.codes, &plan.others};
  for (size_t i = 0; i < parts.size(); ++i) {
    KVANT_ASSIGN_OR_RETURN(parts[i].kernel, launcher->Load(MakeAttentionKernel(*plans[i])));
    KVANT_ASSIGN_OR_RETURN(parts[i].constants,
                           Constants::Copy(memory, plans[i]->binding.constant_bytes));
  }
  return std::make_unique<FusedParts>(std::move(device), std::move(plan), std::move(parts),
                                      std::move(launcher));
}

}  // namespace kvant::cuda
