// ScaledDotProductAttention, decomposed into the pieces that graphs of small ops use.
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/pieces.h"

namespace kvant::reference {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// [N, Hq, Sq, S], and the lengths that the shift of the diagonal depends on.
struct Scores {
  int64_t batch, heads, rows, columns;
  bool bottom_right = false;
  std::optional<Array> lengths;
};

class Attention {
 public:
  Attention(const Op& op, Lowering& lowering)
      : op_(op), lowering_(lowering), plan_(lowering.plan), q_(lowering.Input(op, 0)) {}

  absl::Status Lower();

 private:
  // Input number of an optional input, or nothing.
  std::optional<int> Find(std::string_view name) const;
  std::optional<Array> Optional(std::string_view name);
  // K or V as values, with an axis for the query heads that share it: [N, Hkv, 1, S, D].
  Array Values(int input, std::string_view prefix);
  Array ScaledScores();
  Array MaskedScores(Array scores);
  // scores changed by fn(score, head, columns ahead of the diagonal).
  template <typename Fn>
  Array ByPosition(const Array& scores, std::optional<Array> per_head, Fn fn);
  SoftMaxResult Probabilities(const Array& scores);
  Array GroupedByKvHead(const Array& x) const;

  const Op& op_;
  Lowering& lowering_;
  Plan& plan_;
  Array q_;
  int64_t kv_heads_ = 0;
  Scores shape_{};
};

std::optional<int> Attention::Find(std::string_view name) const {
  const std::string names = op_.attrs.GetOr<std::string>(Attr::kOptionalInputs, "");
  std::string_view rest = names;
  for (int input = 3; lowering_.HasInput(op_, input); ++input) {
    const size_t comma = rest.find(',');
    if (rest.substr(0, comma) == name) return input;
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return std::nullopt;
}

std::optional<Array> Attention::Optional(std::string_view name) {
  const std::optional<int> input = Find(name);
  if (!input) return std::nullopt;
  return lowering_.Input(op_, *input);
}

Array Attention::Values(int input, std::string_view prefix) {
  Array values = lowering_.Input(op_, input);
  if (const auto scales = Optional(std::string(prefix) + "_scales")) {
    const auto of_rank = [](const Array& array) {
      return array.elements() == 1 ? Reshaped(array, Dims(4, 1)) : array;
    };
    QuantizationArrays quantization{of_rank(*scales), std::nullopt, false};
    if (const auto zps = Find(std::string(prefix) + "_zps")) {
      quantization.zero_points = of_rank(lowering_.Input(op_, *zps));
      quantization.real_units = IsFloat(lowering_.InputTensor(op_, *zps).type);
    }
    values = Dequantize(plan_, values, quantization);
  }
  if (input == 2 && shape_.lengths) {
    CutOptions cut;
    cut.axis = 2;
    values = CutToLengths(plan_, values, *shape_.lengths, cut);
  }
  return Reshaped(values, {values.dims[0], values.dims[1], 1, values.dims[2], values.dims[3]});
}

Array Attention::GroupedByKvHead(const Array& x) const {
  return Reshaped(x, {x.dims[0], kv_heads_, x.dims[1] / kv_heads_, x.dims[2], x.dims[3]});
}

Array Attention::ScaledScores() {
  Array scores = MatMul(plan_, GroupedByKvHead(q_), Values(1, "k"), false, true);
  scores = Reshaped(scores, {shape_.batch, shape_.heads, shape_.rows, shape_.columns});
  const float* given = op_.attrs.Get<float>(Attr::kScale);
  const double scale = given ? *given : 1 / std::sqrt(static_cast<double>(q_.dims[3]));
  scores = Eltwise(plan_, dnnl::algorithm::eltwise_linear, scores, static_cast<float>(scale));
  const float cap = op_.attrs.GetOr<float>(Attr::kSoftCap, 0.f);
  if (cap == 0) return scores;
  scores = Eltwise(plan_, dnnl::algorithm::eltwise_linear, scores, 1 / cap);
  scores = Eltwise(plan_, dnnl::algorithm::eltwise_tanh, scores);
  return Eltwise(plan_, dnnl::algorithm::eltwise_linear, scores, cap);
}

template <typename Fn>
Array Attention::ByPosition(const Array& scores, std::optional<Array> per_head, Fn fn) {
  Array result = plan_.NewArray(scores.dims);
  std::vector<Array> reads{scores};
  if (per_head) reads.push_back(*per_head);
  if (shape_.lengths) reads.push_back(*shape_.lengths);
  Plan::StepOptions options;
  options.overwrites = 0;
  plan_.AddStep(
      reads, {result},
      [=, s = shape_](const RunContext& context) {
        context.executor.ParallelFor(s.batch * s.heads * s.rows, [&](int64_t row, int) {
          const int64_t head = row / s.rows % s.heads, n = row / s.rows / s.heads;
          int64_t length = s.columns;
          if (s.lengths) {
            length = context.data<int32_t>(*s.lengths)[s.lengths->elements() == 1 ? 0 : n];
          }
          const int64_t diagonal = row % s.rows + (s.bottom_right ? length - s.rows : 0);
          const float slope = per_head ? context.data(*per_head)[head] : 0.f;
          const float* from = context.data(scores) + row * s.columns;
          float* to = context.data(result) + row * s.columns;
          for (int64_t j = 0; j < s.columns; ++j) to[j] = fn(from[j], slope, j - diagonal);
        });
      },
      options);
  return result;
}

// ALiBi, bias, select, band, lengths, in this order.
Array Attention::MaskedScores(Array scores) {
  if (const auto slopes = Optional("alibi_slopes")) {
    scores = ByPosition(scores, slopes, [](float score, float slope, int64_t ahead) {
      return score + slope * static_cast<float>(ahead);
    });
  }
  if (const auto bias = Optional("bias")) {
    scores = Binary(plan_, dnnl::algorithm::binary_add, scores, *bias);
  }
  if (const auto select = Optional("select")) {
    scores = Select(plan_, *select, scores, ConstantArray(plan_, {-kInf}, {1}), scores.dims);
  }
  const int64_t left = op_.attrs.GetOr<int64_t>(Attr::kLeftWindow, -1);
  const int64_t right = op_.attrs.GetOr<int64_t>(Attr::kRightWindow, -1);
  if (left >= 0 || right >= 0) {
    scores = ByPosition(scores, std::nullopt, [=](float score, float, int64_t ahead) {
      const bool hidden = (left >= 0 && ahead < -left) || (right >= 0 && ahead > right);
      return hidden ? -kInf : score;
    });
  }
  if (!shape_.lengths) return scores;
  CutOptions cut;
  cut.axis = 3;
  cut.value = -kInf;
  return CutToLengths(plan_, scores, *shape_.lengths, cut);
}

// A sink is one more column, whose probability nobody reads.
SoftMaxResult Attention::Probabilities(const Array& scores) {
  SoftMaxOptions options;
  options.inf_as_zero = op_.attrs.GetOr<std::string>(Attr::kMode, "inf_as_zero") == "inf_as_zero";
  options.with_stats = lowering_.HasOutput(op_, 1);
  const std::optional<Array> sinks = Optional("sinks");
  if (!sinks) return SoftMax(plan_, scores, options);
  const Dims column{shape_.batch, shape_.heads, shape_.rows, 1};
  const Array sink = Expanded(plan_, Reshaped(*sinks, {1, shape_.heads, 1, 1}), column);
  SoftMaxResult result = SoftMax(plan_, Concat(plan_, {scores, sink}, 3), options);
  result.probs = Gather(plan_, result.probs, scores.dims, DenseStrides(result.probs.dims));
  return result;
}

absl::Status Attention::Lower() {
  kv_heads_ = lowering_.InputTensor(op_, 1).dims->at(1);
  shape_ = {q_.dims[0], q_.dims[1],  q_.dims[2], lowering_.InputTensor(op_, 1).dims->at(2),
            false,      std::nullopt};
  shape_.bottom_right =
      op_.attrs.GetOr<std::string>(Attr::kMaskAlignment, "top_left") == "bottom_right";
  if (const auto lengths = Find("kv_lengths")) {
    shape_.lengths = lowering_.Input(op_, *lengths);
    KVANT_RETURN_IF_ERROR(lowering_.CheckValues(op_, op_.inputs[*lengths], "KV length", 0,
                                                static_cast<double>(shape_.columns)));
  } else {
    shape_.lengths = lowering_.KvLengthsFor(op_, shape_.columns);
  }
  const SoftMaxResult probs = Probabilities(MaskedScores(ScaledScores()));
  if (probs.stats) lowering_.SetOutput(op_, 1, *probs.stats);
  lowering_.SetOutput(op_, 0,
                      MatMul(plan_, GroupedByKvHead(probs.probs), Values(2, "v"), false, false));
  return absl::OkStatus();
}

}  // namespace

absl::Status LowerScaledDotProductAttention(const Op& op, Lowering& lowering) {
  return Attention(op, lowering).Lower();
}

}  // namespace kvant::reference
