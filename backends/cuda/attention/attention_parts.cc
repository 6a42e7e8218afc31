#include "kvant/backends/cuda/attention/attention_parts.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/attention/attention_kernel.h"
#include "kvant/backends/cuda/attention/describe_attention.h"
#include "kvant/backends/cuda/constants.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

// Below it, tiles of all tokens take less than the launches that parts add.
constexpr int64_t kFewestTokens = 512;
// Tokens that tiles have, for which their splits are planned, or more where there is room for more.
constexpr int64_t kOtherTokens = 256;

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

// What ends a row is left to the others.
AttentionSpec CodesOf(const AttentionSpec& spec) {
  AttentionSpec part = spec;
  part.softmax_mode = SoftmaxMode::kInfAsZero;
  part.sinks = {};
  part.output_hadamard = 0;
  part.output_quantization.reset();
  part.output = LeftView(spec, 0, spec.v_head_size);
  // Of each row two numbers; a view is of the first.
  part.stats = LeftView(spec, 1, 2);
  part.stats.dims[kCol] = 1;
  part.k = {spec.k[LongestOf(spec.k)]};
  part.v = {spec.v[LongestOf(spec.v)]};
  part.kv_len = part.k[0].tokens();
  return part;
}

AttentionSpec OthersOf(const AttentionSpec& spec) {
  AttentionSpec part = spec;
  const auto twice = [](const Segments& segments) {
    Segments all = segments;
    const int codes = LongestOf(segments);
    all.insert(all.begin() + codes, segments[codes]);
    return all;
  };
  part.k = twice(spec.k);
  part.v = twice(spec.v);
  const auto others = [](const Segments& segments) {
    int64_t tokens = 0;
    for (const KvSegment& segment : segments) tokens += segment.tokens();
    return tokens - segments[LongestOf(segments)].tokens();
  };
  // Of the codes' segment there are few.
  part.kv_len = std::max(kOtherTokens, std::min(others(spec.k), others(spec.v)));
  return part;
}

size_t Aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

class FusedParts : public Executable {
 public:
  struct Part {
    std::shared_ptr<const LoadedKernel> kernel;
    std::shared_ptr<const Constants> constants;
  };
  FusedParts(std::string device, PartsPlan plan, Part codes, Part others,
             std::shared_ptr<const Launcher> launcher)
      : device_(std::move(device)),
        plan_(std::move(plan)),
        codes_(std::move(codes)),
        others_(std::move(others)),
        launcher_(std::move(launcher)) {}

  std::string kernel() const override {
    return absl::StrCat(device_, " online softmax, ", plan_.ToString(), ", ",
                        codes_.kernel->description());
  }
  double rounding() const override { return plan_.rounding(); }
  size_t scratch_bytes(int) const override { return plan_.scratch_bytes; }
  size_t alignment() const override { return kPointerAlignment; }

  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    auto* const left = reinterpret_cast<float*>(scratch + plan_.left_at);
    void* const left_by_codes[] = {left, left + plan_.rows * plan_.codes.traits.v_head_size};
    AttentionParams codes = plan_.codes.params;
    KVANT_RETURN_IF_ERROR(
        Launch(place, codes_, plan_.codes, inputs, left_by_codes, scratch + plan_.codes_at, codes));
    AttentionParams others = plan_.others.params;
    others.codes_outputs = left;
    others.codes_states = static_cast<const float*>(left_by_codes[1]);
    return Launch(place, others_, plan_.others, inputs, outputs, scratch + plan_.others_at, others);
  }

 private:
  // params: the plan's, which are filled in.
  absl::Status Launch(const ExecutionPlace& place, const Part& part, const AttentionPlan& plan,
                      absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                      std::byte* scratch, AttentionParams& params) const {
    if (plan.blocks == 0) return absl::OkStatus();
    FillParams(plan.binding, inputs, outputs, part.constants->data(), &params);
    params.partials = reinterpret_cast<float*>(scratch);
    params.done = reinterpret_cast<u32*>(scratch + plan.partial_bytes);
    return launcher_->Launch(*part.kernel, plan.blocks, &params, sizeof(params), place.stream);
  }

  const std::string device_;
  const PartsPlan plan_;
  const Part codes_, others_;
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
  absl::StatusOr<AttentionPlan> codes = PlanPart(CodesOf(spec), kCodesPart, device);
  if (!codes.ok() || codes->traits.kernel != kCodesKernel) {
    why_not = codes.ok() ? codes->why_not_codes : std::string(codes.status().message());
    return std::nullopt;
  }
  absl::StatusOr<AttentionPlan> others = PlanTiles(OthersOf(spec), kOthersPart, device);
  if (!others.ok()) {
    why_not = std::string(others.status().message());
    return std::nullopt;
  }
  plan.codes = *std::move(codes);
  plan.others = *std::move(others);
  for (AttentionTraits* part : {&plan.codes.traits, &plan.others.traits}) {
    part->k_codes = LongestOf(spec.k);
    part->v_codes = LongestOf(spec.v);
  }
  DescribeRangesBefore(spec, plan.codes);
  plan.rows = spec.batch[0] * spec.batch[1] * spec.batch[2] * spec.q_len;
  const auto take = [&plan](size_t bytes) {
    return std::exchange(plan.scratch_bytes, plan.scratch_bytes + Aligned(bytes));
  };
  plan.codes_at = take(plan.codes.scratch_bytes);
  plan.others_at = take(plan.others.scratch_bytes);
  plan.left_at = take(sizeof(float) * plan.rows * (spec.v_head_size + 2));
  return plan;
}

absl::StatusOr<std::unique_ptr<Executable>> CompileParts(
    PartsPlan plan, std::shared_ptr<Launcher> launcher, const std::shared_ptr<DeviceMemory>& memory,
    std::string device) {
  const auto load = [&](const AttentionPlan& of) -> absl::StatusOr<FusedParts::Part> {
    FusedParts::Part part;
    KVANT_ASSIGN_OR_RETURN(part.kernel, launcher->Load(MakeAttentionKernel(of)));
    KVANT_ASSIGN_OR_RETURN(part.constants, Constants::Copy(memory, of.binding.constant_bytes));
    return part;
  };
  KVANT_ASSIGN_OR_RETURN(FusedParts::Part codes, load(plan.codes));
  KVANT_ASSIGN_OR_RETURN(FusedParts::Part others, load(plan.others));
  return std::make_unique<FusedParts>(std::move(device), std::move(plan), std::move(codes),
                                      std::move(others), std::move(launcher));
}

}  // namespace kvant::cuda
