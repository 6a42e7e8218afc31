// ScaledDotProductAttention and MergeAttention, decomposed into the pieces that graphs of small ops
// use.
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/pieces.h"

namespace kvant::reference {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// [N, Hq, Sq, S], and what the shift of the diagonal depends on. Ragged queries are padded to Sq
// rows.
struct Scores {
  int64_t batch, heads, rows, columns;
  bool bottom_right = false;
  Array lengths, offsets;
};

class Attention {
 public:
  explicit Attention(Lowering& lowering) : lowering_(lowering), plan_(lowering.plan) {}

  Array Lower() {
    const Dims &q = *lowering_.InputTensor(0).dims, &k = *lowering_.InputTensor(1).dims;
    kv_heads_ = k[1];
    shape_.offsets = Optional("query_offsets");
    shape_.batch = k[0], shape_.heads = q[1], shape_.columns = k[2];
    shape_.rows = shape_.offsets ? q[0] : q[2];
    shape_.bottom_right = lowering_.op().Get<Attr::kMaskAlignment>() == "bottom_right";
    shape_.lengths = Optional("kv_lengths");
    q_ = Queries();
    const SoftMaxResult probs = Probabilities(MaskedScores(ScaledScores()));
    if (probs.stats) lowering_.SetOutput(1, PackedRows(1, probs.stats));
    Array v = lowering_.Input(2);
    // A probability of 0 must meet no NaN in memory that holds no data.
    if (shape_.lengths) v = KeepExisting(plan_, v, {shape_.lengths, Optional("kv_first")}, 2, 0);
    Array o = MatMul(plan_, GroupedByKvHead(probs.probs), Shared(v), false, false);
    // Of no tokens the product is 0, but the softmax of nothing is NaN.
    if (shape_.columns == 0 && lowering_.op().Get<Attr::kMode>() == "none" && !Optional("sinks")) {
      o = Eltwise(plan_, dnnl::algorithm::eltwise_linear, o,
                  std::numeric_limits<float>::quiet_NaN());
    }
    return PackedRows(0, o);
  }

 private:
  Array Optional(std::string_view name) { return lowering_.FindInput(name); }

  // A mask [.., Sq or 1, ..] over packed rows, over those of each sequence.
  Array OverRows(const Array& mask) {
    const size_t rank = mask.dims.size();
    if (!shape_.offsets || rank < 2 || mask.dims[rank - 2] == 1) return mask;
    Dims dims(4 - rank, 1);
    dims.insert(dims.end(), mask.dims.begin(), mask.dims.end());
    return Unpack(plan_, Reshaped(mask, dims), shape_.offsets);
  }

  // Queries, [T, Hq, D] to [1, Hq, T, D] and then to sequences where they are ragged.
  Array Queries() {
    const Array q = lowering_.Input(0);
    if (!shape_.offsets) return q;
    const int64_t tokens = q.dims[0], heads = q.dims[1], size = q.dims[2];
    return Unpack(plan_, Gather(plan_, q, {1, heads, tokens, size}, {0, size, heads * size, 1}),
                  shape_.offsets);
  }

  // And back: what is output `index`.
  Array PackedRows(int index, const Array& rows) {
    if (!shape_.offsets) return rows;
    const int64_t heads = shape_.heads, tokens = shape_.rows;
    const int64_t size = lowering_.OutputDims(index)[2];
    const Array packed =
        Pack(plan_, Reshaped(rows, {shape_.batch, heads, tokens, size}), shape_.offsets);
    lowering_.WriteRowsOf(index, shape_.offsets);
    return Gather(plan_, packed, {tokens, heads, size}, {size, tokens * size, 1});
  }

  // K or V with an axis for the query heads that share it: [N, Hkv, 1, S, D].
  Array Shared(const Array& values) {
    return Reshaped(values, {values.dims[0], values.dims[1], 1, values.dims[2], values.dims[3]});
  }

  Array GroupedByKvHead(const Array& x) const {
    return Reshaped(x, {x.dims[0], kv_heads_, x.dims[1] / kv_heads_, x.dims[2], x.dims[3]});
  }

  Array ScaledScores() {
    Array scores = MatMul(plan_, GroupedByKvHead(q_), Shared(lowering_.Input(1)), false, true);
    scores = Reshaped(scores, {shape_.batch, shape_.heads, shape_.rows, shape_.columns});
    const float* given = lowering_.op().Find<Attr::kScale>();
    const double scale = given ? *given : 1 / std::sqrt(static_cast<double>(q_.dims[3]));
    scores = Eltwise(plan_, dnnl::algorithm::eltwise_linear, scores, static_cast<float>(scale));
    const float cap = lowering_.op().Get<Attr::kSoftCap>();
    if (cap == 0) return scores;
    scores = Eltwise(plan_, dnnl::algorithm::eltwise_linear, scores, 1 / cap);
    scores = Eltwise(plan_, dnnl::algorithm::eltwise_tanh, scores);
    return Eltwise(plan_, dnnl::algorithm::eltwise_linear, scores, cap);
  }

  // scores changed by fn(score, head, columns ahead of the diagonal).
  template <typename Fn>
  Array ByPosition(const Array& scores, const Array& per_head, Fn fn) {
    Array result = plan_.NewArray(scores.dims);
    plan_.AddStep(
        {scores, per_head, shape_.lengths, shape_.offsets}, {result},
        [=, s = shape_](const RunContext& context) {
          context.executor.ParallelFor(s.batch * s.heads * s.rows, [&](int64_t row, int) {
            const int64_t head = row / s.rows % s.heads, n = row / s.rows / s.heads;
            const int64_t length = s.lengths ? context.of_row(s.lengths, n) : s.columns;
            int64_t queries = s.rows;
            if (s.offsets) {
              const int32_t* offset = context.data<int32_t>(s.offsets) + n;
              queries = offset[1] - offset[0];
            }
            const int64_t diagonal = row % s.rows + (s.bottom_right ? length - queries : 0);
            const float slope = per_head ? context.data(per_head)[head] : 0.f;
            const float* from = context.data(scores) + row * s.columns;
            float* to = context.data(result) + row * s.columns;
            for (int64_t j = 0; j < s.columns; ++j) to[j] = fn(from[j], slope, j - diagonal);
          });
        },
        /*overwrites=*/0);
    return result;
  }

  // ALiBi, bias, select, band, lengths, in this order.
  Array MaskedScores(Array scores) {
    if (const auto slopes = Optional("alibi_slopes")) {
      scores = ByPosition(scores, slopes, [](float score, float slope, int64_t ahead) {
        return score + slope * static_cast<float>(ahead);
      });
    }
    if (const auto bias = Optional("bias")) {
      scores = Binary(plan_, dnnl::algorithm::binary_add, scores, OverRows(bias));
    }
    if (const auto select = Optional("select")) {
      const float* given = lowering_.op().Find<Attr::kSelectFill>();
      const Array fill = ConstantArray(plan_, {given ? *given : -kInf}, {1});
      scores = Select(plan_, OverRows(select), scores, fill, scores.dims);
    }
    const int64_t left = lowering_.op().Get<Attr::kLeftWindow>();
    const int64_t right = lowering_.op().Get<Attr::kRightWindow>();
    if (left >= 0 || right >= 0) {
      scores = ByPosition(scores, Array(), [=](float score, float, int64_t ahead) {
        const bool hidden = (left >= 0 && ahead < -left) || (right >= 0 && ahead > right);
        return hidden ? -kInf : score;
      });
    }
    if (!shape_.lengths) return scores;
    return KeepExisting(plan_, scores, {shape_.lengths, Optional("kv_first")}, 3, -kInf);
  }

  // A sink is one more column, whose probability nobody reads.
  SoftMaxResult Probabilities(const Array& scores) {
    const SoftMaxOptions options{.inf_as_zero = lowering_.op().Get<Attr::kMode>() == "inf_as_zero",
                                 .with_stats = lowering_.HasOutput(1),
                                 .stats_of_empty = -kInf};
    const Array sinks = Optional("sinks");
    if (!sinks) return SoftMax(plan_, scores, options);
    const Dims column{shape_.batch, shape_.heads, shape_.rows, 1};
    const Array sink = Expanded(plan_, Reshaped(sinks, {1, shape_.heads, 1, 1}), column);
    SoftMaxResult result = SoftMax(plan_, Concat(plan_, {scores, sink}, 3), options);
    result.probs = Gather(plan_, result.probs, scores.dims, DenseStrides(result.probs.dims));
    return result;
  }

  Lowering& lowering_;
  Plan& plan_;
  Array q_;
  int64_t kv_heads_ = 0;
  Scores shape_{};
};

}  // namespace

absl::StatusOr<Array> LowerScaledDotProductAttention(Lowering& lowering) {
  return Attention(lowering).Lower();
}

// To merge is to attend to the parts, whose statistics are the scores and whose outputs are the
// values.
absl::StatusOr<Array> LowerMergeAttention(Lowering& lowering) {
  Plan& plan = lowering.plan;
  const Dims dims = lowering.OutputDims(0);
  const int64_t channels = dims.back();
  const int64_t rows = ElementsOf(absl::MakeSpan(dims).first(dims.size() - 1));
  std::vector<Array> scores, values;
  for (int i = 0; lowering.HasInput(i); i += 2) {
    const Array score = Reshaped(lowering.Input(i + 1), {rows, 1});
    const Array value = Reshaped(lowering.Input(i), {rows, channels});
    // A weight of 0 must meet no NaN in what does not count.
    const Array counts = Binary(plan, dnnl::algorithm::binary_ge, score,
                                ConstantArray(plan, {std::numeric_limits<float>::lowest()}, {}));
    const Array counted = Select(plan, counts, value, ConstantArray(plan, {0}, {}), value.dims);
    scores.push_back(score);
    values.push_back(Reshaped(counted, {rows, 1, channels}));
  }
  const SoftMaxResult weights =
      SoftMax(plan, Concat(plan, scores, 1),
              {.inf_as_zero = true, .with_stats = lowering.HasOutput(1), .stats_of_empty = -kInf});
  const auto parts = static_cast<int64_t>(scores.size());
  const Array merged = MatMul(plan, Reshaped(weights.probs, {rows, 1, parts}),
                              Concat(plan, values, 1), false, false);
  if (weights.stats) lowering.SetOutput(1, weights.stats);
  return Reshaped(merged, dims);
}

}  // namespace kvant::reference
