// Attention whose softmax is over the queries: two runs of the kernel, and no matrix of scores.
//
//   L[c]    = max and ln sum exp over r of s[r, c]      the transposed problem: keys ask queries
//   O[r, d] = sum_c exp(s[r, c] - L[c]) * V[c, d]
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/backends/loops.h"
#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {
namespace {

View Transposed(View view) {
  std::swap(view.dims[kRow], view.dims[kCol]);
  std::swap(view.strides[kRow], view.strides[kCol]);
  return view;
}

// The problem whose rows are the keys and whose columns are the queries, without values. Its
// scores are multiplied like those of `output`, so that both are the same.
AttentionSpec Transposed(const AttentionSpec& spec, const AttentionProblem& output) {
  AttentionSpec transposed;
  transposed.batch = spec.batch;
  transposed.q_len = spec.kv_len;
  transposed.kv_len = spec.q_len;
  transposed.head_size = spec.head_size;
  transposed.q = spec.k[0].data;
  transposed.q_quantization = spec.k[0].quantization;
  transposed.k.push_back({spec.q, spec.q_quantization});
  for (ScoreStep step : spec.steps) {
    step.operand.view = Transposed(step.operand.view);
    step.condition = Transposed(step.condition);
    transposed.steps.push_back(step);
  }
  transposed.softmax_mode = spec.softmax_mode;
  transposed.fpmath = output.products == Products::kPairs ? FpMath::kBF16 : FpMath::kStrict;
  transposed.apply_to_int = true;
  return transposed;
}

int64_t StatisticsFloats(const AttentionSpec& spec) {
  const int64_t columns = spec.batch[0] * spec.batch[1] * spec.batch[2] * spec.kv_len;
  return RoundUp<int64_t>(2 * columns, 16);  // what follows begins at a cache line
}

class QuerySoftmax : public Executable {
 public:
  QuerySoftmax(const AttentionSpec& spec, const KernelSet& kernels)
      : name_(kernels.name),
        output_(spec, kernels, SoftmaxPass::kProbabilities),
        statistics_(Transposed(spec, output_.problem()), kernels, SoftmaxPass::kStatistics),
        statistics_floats_(StatisticsFloats(spec)) {}

  std::string kernel() const override {
    const int64_t bytes = statistics_floats_ * static_cast<int64_t>(sizeof(float));
    return absl::StrCat("cpu/", name_,
                        " softmax over queries in two passes: statistics of columns, ",
                        CeilDiv(bytes, 1024), " KiB, by ", statistics_.ToString(), "; output by ",
                        output_.ToString());
  }
  double rounding() const override { return output_.rounding(); }
  size_t scratch_bytes(int max_concurrency) const override {
    const int64_t pass =
        std::max(statistics_.scratch(max_concurrency), output_.scratch(max_concurrency));
    return (statistics_floats_ + pass) * sizeof(float);
  }

  absl::Status Run(const Execution& run) const override {
    const AttentionSpec& spec = output_.spec();
    if (spec.q_len == 0 || spec.v_head_size == 0) return absl::OkStatus();
    float* const statistics = reinterpret_cast<float*>(run.scratch);
    statistics_.Run(run, statistics, statistics + statistics_floats_);
    output_.Run(run, statistics, statistics + statistics_floats_);
    return absl::OkStatus();
  }

 private:
  const char* const name_;
  const Plan output_;      // the second pass, whose products the first takes too
  const Plan statistics_;  // the first
  const int64_t statistics_floats_;
};

}  // namespace

std::string WhyNotTwoPasses(const AttentionSpec& spec) {
  constexpr FeatureSet kTransposed = {
      Feature::kQuantizedK,  Feature::kQuantizedV,   Feature::kStaticQuantization,
      Feature::kSegments,    Feature::kOverQueries,  Feature::kHadamard,
      Feature::kCodebook,    Feature::kMultiplyStep, Feature::kDivideStep,
      Feature::kAddStep,     Feature::kSubtractStep, Feature::kMaximumStep,
      Feature::kMinimumStep, Feature::kTanhStep,     Feature::kSelectStep,
  };
  if (const std::string why = WhyNotTaken(spec, kTransposed); !why.empty()) {
    return why + " with a softmax over queries";
  }
  // Rotated keys would not have the very scores that rotated queries have.
  if (spec.q_hadamard != 0) return "rotated queries or keys with a softmax over queries";
  // They would be rows of the transposed problem, which has no segments of those.
  if (spec.k.size() != 1) return "segments of keys with a softmax over queries";
  return "";
}

std::unique_ptr<Executable> MakeTwoPasses(const AttentionSpec& spec, const KernelSet& kernels) {
  return std::make_unique<QuerySoftmax>(spec, kernels);
}

}  // namespace kvant::cpu
