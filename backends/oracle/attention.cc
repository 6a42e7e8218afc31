// ScaledDotProductAttention and MergeAttention, straight from their definitions in ops.inc; they
// share nothing with the ops that they stand for.
#include <cmath>
#include <limits>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Attention {
  const Array *q, *k, *v;
  const Array *sinks, *slopes, *lengths, *first, *offsets;
  // Expanded to [N, Hq, Sq, S], or [1, Hq, T, S] where queries are ragged; or null.
  std::optional<Array> bias, select;
  int64_t batch, q_heads, kv_heads, q_len, kv_len, head_size, v_head_size;
  double scale, soft_cap;  // soft_cap 0: none
  double select_fill;
  int64_t left, right;  // -1: unbounded
  bool bottom_right, inf_as_zero;
};

// Rows of q, the output and masks that are queries of sequence n.
struct Queries {
  int64_t first = 0, count = 0;
};

Queries QueriesOf(const Attention& at, int64_t n) {
  if (at.offsets == nullptr) return {0, at.q_len};
  const auto begin = static_cast<int64_t>(at.offsets->values[n]);
  return {begin, static_cast<int64_t>(at.offsets->values[n + 1]) - begin};
}

// Where row `row` of a head is in q [N,Hq,Sq,D], or [T,Hq,D], and ...
int64_t PackedRow(const Attention& at, int64_t n, int64_t h, int64_t row) {
  return at.offsets == nullptr ? (n * at.q_heads + h) * at.q_len + row : row * at.q_heads + h;
}
// ... in masks.
int64_t MaskRow(const Attention& at, int64_t n, int64_t h, int64_t row) {
  return ((at.offsets == nullptr ? n : 0) * at.q_heads + h) * at.q_len + row;
}

// The score of query (n, h, i) with column j, -inf outside of the windows.
double Score(const Attention& at, int64_t n, int64_t h, int64_t i, int64_t j) {
  const Queries queries = QueriesOf(at, n);
  const int64_t row = queries.first + i, mask_row = MaskRow(at, n, h, row);
  const int64_t kv_head = n * at.kv_heads + h / (at.q_heads / at.kv_heads);
  const double* q = at.q->data() + PackedRow(at, n, h, row) * at.head_size;
  const double* k = at.k->data() + (kv_head * at.kv_len + j) * at.head_size;
  double score = 0;
  for (int64_t d = 0; d < at.head_size; ++d) score += q[d] * k[d];
  score *= at.scale;
  if (at.soft_cap != 0) score = at.soft_cap * std::tanh(score / at.soft_cap);
  const int64_t length = ExistingOf(at.lengths, at.first, at.kv_len, n).end;
  const int64_t shift = at.bottom_right ? length - queries.count : 0;
  const int64_t ahead = j - (i + shift);
  if (at.slopes) score += at.slopes->values[h] * static_cast<double>(ahead);
  if (at.bias) score += at.bias->values[mask_row * at.kv_len + j];
  if (at.select && at.select->values[mask_row * at.kv_len + j] == 0) score = at.select_fill;
  if (at.left >= 0 && ahead < -at.left) return -kInf;
  if (at.right >= 0 && ahead > at.right) return -kInf;
  return score;
}

// One query. `scores` has room for kv_len. Returns its statistics.
double AttendRow(const Attention& at, int64_t n, int64_t h, int64_t i, double* scores,
                 double* output) {
  const Existing columns = ExistingOf(at.lengths, at.first, at.kv_len, n);
  double max = at.sinks ? at.sinks->values[h] : -kInf;
  bool masked = !at.sinks || max == -kInf;
  for (int64_t j = columns.first; j < columns.end; ++j) {
    scores[j] = Score(at, n, h, i, j);
    if (scores[j] > max) max = scores[j];
    if (scores[j] != -kInf) masked = false;
  }
  std::fill(output, output + at.v_head_size, 0.0);
  if (masked && at.inf_as_zero) return -kInf;
  double sum = at.sinks ? std::exp(at.sinks->values[h] - max) : 0.0;
  for (int64_t j = columns.first; j < columns.end; ++j) {
    scores[j] = std::exp(scores[j] - max);
    sum += scores[j];
  }
  const int64_t kv_head = n * at.kv_heads + h / (at.q_heads / at.kv_heads);
  for (int64_t j = columns.first; j < columns.end; ++j) {
    const double* v = at.v->data() + (kv_head * at.kv_len + j) * at.v_head_size;
    const double p = scores[j] / sum;
    for (int64_t d = 0; d < at.v_head_size; ++d) output[d] += p * v[d];
  }
  // A softmax over nothing is 0 / 0, and beside a sink of infinity NaN too.
  if (columns.first >= columns.end && !(sum > 0)) {
    std::fill(output, output + at.v_head_size, std::nan(""));
    return std::nan("");
  }
  return max + std::log(sum);
}

Attention Read(OpContext& context) {
  const Op& op = context.op;
  Attention at;
  at.q = &context.in(0), at.k = &context.in(1), at.v = &context.in(2);
  at.offsets = context.Find("query_offsets");
  const bool ragged = at.offsets != nullptr;
  at.batch = at.k->dims[0], at.kv_heads = at.k->dims[1], at.kv_len = at.k->dims[2];
  at.q_heads = at.q->dims[1], at.q_len = at.q->dims[ragged ? 0 : 2];
  at.head_size = at.k->dims[3], at.v_head_size = at.v->dims[3];
  const Dims scores_dims = {ragged ? 1 : at.batch, at.q_heads, at.q_len, at.kv_len};
  if (const Array* bias = context.Find("bias")) {
    at.bias = Gather(context.executor, *bias, scores_dims, GroupMap(bias->dims, scores_dims));
  }
  if (const Array* select = context.Find("select")) {
    at.select = Gather(context.executor, *select, scores_dims, GroupMap(select->dims, scores_dims));
  }
  at.sinks = context.Find("sinks");
  at.slopes = context.Find("alibi_slopes");
  at.lengths = context.Find("kv_lengths");
  at.first = context.Find("kv_first");
  const float* scale = op.Find<Attr::kScale>();
  at.scale = scale ? *scale : 1 / std::sqrt(static_cast<double>(at.head_size));
  at.soft_cap = op.Get<Attr::kSoftCap>();
  const float* fill = op.Find<Attr::kSelectFill>();
  at.select_fill = fill ? *fill : -kInf;
  at.left = op.Get<Attr::kLeftWindow>();
  at.right = op.Get<Attr::kRightWindow>();
  at.bottom_right = op.Get<Attr::kMaskAlignment>() == "bottom_right";
  at.inf_as_zero = op.Get<Attr::kMode>() == "inf_as_zero";
  return at;
}

}  // namespace

absl::StatusOr<Array> EvalScaledDotProductAttention(OpContext& context) {
  const Attention at = Read(context);
  Array output(context.out_dims(0));
  Array* const stats = context.Output(1);
  Array scores({context.executor.max_concurrency(), at.kv_len});
  if (at.offsets != nullptr) {
    output.stored.assign(output.size(), false);
    if (stats) stats->stored.assign(stats->size(), false);
  }
  for (int64_t n = 0; n < at.batch; ++n) {
    const Queries queries = QueriesOf(at, n);
    context.executor.ParallelFor(at.q_heads * queries.count, [&](int64_t index, int slot) {
      const int64_t h = index / queries.count, i = index % queries.count;
      const int64_t row = PackedRow(at, n, h, queries.first + i);
      const double stat = AttendRow(at, n, h, i, scores.data() + slot * at.kv_len,
                                    output.data() + row * at.v_head_size);
      if (stats) stats->values[row] = stat;
    });
    // One after another: the bits of a vector share words.
    for (int64_t i = 0; at.offsets != nullptr && i < at.q_heads * queries.count; ++i) {
      const int64_t row = queries.first * at.q_heads + i;
      std::fill_n(output.stored.begin() + row * at.v_head_size, at.v_head_size, true);
      if (stats) stats->stored[row] = true;
    }
  }
  return output;
}

absl::StatusOr<Array> EvalMergeAttention(OpContext& context) {
  const auto parts = static_cast<int>(context.inputs.size() / 2);
  const Dims& dims = context.out_dims(0);
  const int64_t channels = dims.back(),
                rows = ElementsOf(absl::MakeSpan(dims).first(dims.size() - 1));
  Array output(dims);
  Array* const stats = context.Output(1);
  context.executor.ParallelFor(rows, [&](int64_t row, int) {
    double max = -kInf;
    for (int i = 0; i < parts; ++i) max = std::fmax(max, context.in(2 * i + 1).values[row]);
    double sum = 0;
    double* const to = output.data() + row * channels;
    for (int i = 0; i < parts; ++i) {
      const double stat = context.in(2 * i + 1).values[row];
      if (stat == -kInf) continue;
      const double weight = std::exp(stat - max);
      const double* const from = context.in(2 * i).data() + row * channels;
      for (int64_t c = 0; c < channels; ++c) to[c] += weight * from[c];
      sum += weight;
    }
    if (sum != 0) {
      for (int64_t c = 0; c < channels; ++c) to[c] /= sum;
    }
    if (stats) stats->values[row] = sum == 0 ? -kInf : max + std::log(sum);
  });
  return output;
}

}  // namespace kvant::oracle
