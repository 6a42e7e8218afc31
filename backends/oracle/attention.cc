// ScaledDotProductAttention, straight from its definition in ops.inc; shares nothing with the
// ops that it stands for but the meaning of codes.
#include <cmath>
#include <limits>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// The optional inputs by name; null where absent.
struct Optional {
  const Array* array = nullptr;
  DataType type = kUndef;
};

Optional Find(const OpContext& context, std::string_view name) {
  const std::string names = context.op.attrs.GetOr<std::string>(Attr::kOptionalInputs, "");
  std::string_view rest = names;
  for (int port = 3; context.has_input(port); ++port) {
    const size_t comma = rest.find(',');
    if (rest.substr(0, comma) == name) return {&context.in(port), context.in_desc(port).type};
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return {};
}

absl::StatusOr<IndexMap> ParameterMap(const OpContext& context, const Dims& dims,
                                      const Array& parameters, Attr group_attr) {
  if (parameters.size() == 1) return ConstantMap(dims);
  const auto* group = context.op.attrs.Get<std::vector<int64_t>>(group_attr);
  bool fits =
      group != nullptr && group->size() == dims.size() && parameters.dims.size() == dims.size();
  for (size_t d = 0; fits && d < dims.size(); ++d) {
    fits = (*group)[d] > 0 && parameters.dims[d] * (*group)[d] == dims[d];
  }
  if (fits) return GroupMap(dims, *group, parameters.dims);
  return context.Error(ErrorKind::kInvalidArguments,
                       absl::StrCat("attribute ", std::string(AttrName(group_attr)),
                                    " does not fit the scales or zero points"));
}

// K or V as values.
absl::StatusOr<Array> Values(OpContext& context, int port, std::string_view prefix,
                             Attr group_attr) {
  const Optional scales = Find(context, std::string(prefix) + "_scales");
  const Optional zero_points = Find(context, std::string(prefix) + "_zps");
  if (scales.array == nullptr) return context.Take(port);
  const Dims& dims = context.in(port).dims;
  QuantizationMaps maps{{}, ConstantMap(dims)};
  KVANT_ASSIGN_OR_RETURN(maps.scales, ParameterMap(context, dims, *scales.array, group_attr));
  if (zero_points.array != nullptr) {
    KVANT_ASSIGN_OR_RETURN(maps.zero_points,
                           ParameterMap(context, dims, *zero_points.array, group_attr));
  }
  Array values = context.Take(port);
  DequantizeInPlace(context.executor, values, *scales.array, zero_points.array,
                    IsFloat(zero_points.type), maps);
  return values;
}

struct Attention {
  Array k, v;
  const Array* q = nullptr;
  const Array* sinks = nullptr;
  const Array* slopes = nullptr;
  const Array* lengths = nullptr;
  // Expanded to [N, Hq, Sq, S], or null.
  std::optional<Array> bias, select;
  int64_t batch, q_heads, kv_heads, q_len, kv_len, head_size, v_head_size;
  double scale, soft_cap;  // soft_cap 0: none
  int64_t left, right;     // -1: unbounded
  bool bottom_right, inf_as_zero;
};

int64_t LengthOf(const Attention& at, int64_t n) {
  if (at.lengths == nullptr) return at.kv_len;
  return static_cast<int64_t>(at.lengths->values[at.lengths->size() == 1 ? 0 : n]);
}

// The score of query (n, h, i) with column j, masked columns at -inf.
double Score(const Attention& at, int64_t n, int64_t h, int64_t i, int64_t j) {
  const int64_t row = (n * at.q_heads + h) * at.q_len + i;
  const int64_t kv_head = n * at.kv_heads + h / (at.q_heads / at.kv_heads);
  const double* q = at.q->data() + row * at.head_size;
  const double* k = at.k.data() + (kv_head * at.kv_len + j) * at.head_size;
  double score = 0;
  for (int64_t d = 0; d < at.head_size; ++d) score += q[d] * k[d];
  score *= at.scale;
  if (at.soft_cap != 0) score = at.soft_cap * std::tanh(score / at.soft_cap);
  const int64_t shift = at.bottom_right ? LengthOf(at, n) - at.q_len : 0;
  const int64_t ahead = j - (i + shift);
  if (at.slopes) score += at.slopes->values[h] * static_cast<double>(ahead);
  if (at.bias) score += at.bias->values[row * at.kv_len + j];
  if (at.select && at.select->values[row * at.kv_len + j] == 0) return -kInf;
  if (at.left >= 0 && ahead < -at.left) return -kInf;
  if (at.right >= 0 && ahead > at.right) return -kInf;
  return score;
}

// One query. `scores` has room for kv_len. Returns its statistics.
double AttendRow(const Attention& at, int64_t n, int64_t h, int64_t i, double* scores,
                 double* output) {
  const int64_t length = LengthOf(at, n);
  double max = at.sinks ? at.sinks->values[h] : -kInf;
  bool masked = !at.sinks || max == -kInf;
  for (int64_t j = 0; j < length; ++j) {
    scores[j] = Score(at, n, h, i, j);
    if (scores[j] > max) max = scores[j];
    if (scores[j] != -kInf) masked = false;
  }
  std::fill(output, output + at.v_head_size, 0.0);
  if (masked && at.inf_as_zero) return 0;
  double sum = at.sinks ? std::exp(at.sinks->values[h] - max) : 0.0;
  for (int64_t j = 0; j < length; ++j) {
    scores[j] = std::exp(scores[j] - max);
    sum += scores[j];
  }
  const int64_t kv_head = n * at.kv_heads + h / (at.q_heads / at.kv_heads);
  for (int64_t j = 0; j < length; ++j) {
    const double* v = at.v.data() + (kv_head * at.kv_len + j) * at.v_head_size;
    const double p = scores[j] / sum;
    for (int64_t d = 0; d < at.v_head_size; ++d) output[d] += p * v[d];
  }
  // A softmax over nothing is 0 / 0.
  if (masked && length == 0) std::fill(output, output + at.v_head_size, std::nan(""));
  return max + std::log(sum);
}

absl::Status CheckLengths(const OpContext& context, const Attention& at) {
  if (at.lengths == nullptr) return absl::OkStatus();
  if (at.lengths->size() != 1 && at.lengths->size() != at.batch) {
    return context.Error(
        ErrorKind::kInvalidArguments,
        absl::StrCat(at.lengths->size(), " KV lengths do not go with a batch of ", at.batch));
  }
  for (int64_t n = 0; n < at.lengths->size(); ++n) {
    const double length = at.lengths->values[n];
    if (length < 0 || length > static_cast<double>(at.kv_len)) {
      return context.Error(ErrorKind::kInvalidArguments,
                           absl::StrCat("KV length ", static_cast<int64_t>(length), " of batch ", n,
                                        " is not in [0, ", at.kv_len, "]"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckShapes(const OpContext& context) {
  const Dims &q = context.in(0).dims, &k = context.in(1).dims, &v = context.in(2).dims;
  const bool fits = q.size() == 4 && k.size() == 4 && v.size() == 4 && k[1] > 0 &&
                    q[1] % k[1] == 0 && q[0] == k[0] && q[3] == k[3] && v[0] == k[0] &&
                    v[1] == k[1] && v[2] == k[2];
  if (!fits) {
    return context.Error(ErrorKind::kInvalidShape,
                         "q, k and v are not [N, Hq, Sq, D], [N, Hkv, S, D] and [N, Hkv, S, Dv]");
  }
  for (std::string_view name : {"sinks", "alibi_slopes"}) {
    const Array* per_head = Find(context, name).array;
    if (per_head == nullptr || per_head->size() == q[1]) continue;
    return context.Error(ErrorKind::kInvalidShape,
                         absl::StrCat(std::string(name), " has ", per_head->size(),
                                      " elements for ", q[1], " heads"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Attention> Read(OpContext& context) {
  const Attributes& attrs = context.op.attrs;
  KVANT_RETURN_IF_ERROR(CheckShapes(context));
  Attention at;
  at.q = &context.in(0);
  const Dims q_dims = at.q->dims, k_dims = context.in(1).dims, v_dims = context.in(2).dims;
  at.batch = q_dims[0], at.q_heads = q_dims[1], at.q_len = q_dims[2], at.head_size = q_dims[3];
  at.kv_heads = k_dims[1], at.kv_len = k_dims[2], at.v_head_size = v_dims[3];
  KVANT_ASSIGN_OR_RETURN(at.k, Values(context, 1, "k", Attr::kKGroupShape));
  KVANT_ASSIGN_OR_RETURN(at.v, Values(context, 2, "v", Attr::kVGroupShape));
  if (context.ranges != nullptr) {
    at.k = context.ranges->Order(context.executor, true, at.k, at.k.dims.size(), 2);
    at.v = context.ranges->Order(context.executor, false, at.v, at.v.dims.size(), 2);
  }
  const Dims scores_dims = {at.batch, at.q_heads, at.q_len, at.kv_len};
  if (const Optional bias = Find(context, "bias"); bias.array) {
    at.bias = Expand(context.executor, *bias.array, scores_dims);
  }
  if (const Optional select = Find(context, "select"); select.array) {
    at.select = Expand(context.executor, *select.array, scores_dims);
  }
  at.sinks = Find(context, "sinks").array;
  at.slopes = Find(context, "alibi_slopes").array;
  at.lengths = Find(context, "kv_lengths").array;
  if (at.lengths == nullptr) at.lengths = context.kv_lengths;
  const float* scale = attrs.Get<float>(Attr::kScale);
  at.scale = scale ? *scale : 1 / std::sqrt(static_cast<double>(at.head_size));
  at.soft_cap = attrs.GetOr<float>(Attr::kSoftCap, 0.f);
  at.left = attrs.GetOr<int64_t>(Attr::kLeftWindow, -1);
  at.right = attrs.GetOr<int64_t>(Attr::kRightWindow, -1);
  at.bottom_right = attrs.GetOr<std::string>(Attr::kMaskAlignment, "top_left") == "bottom_right";
  at.inf_as_zero = attrs.GetOr<std::string>(Attr::kMode, "inf_as_zero") == "inf_as_zero";
  KVANT_RETURN_IF_ERROR(CheckLengths(context, at));
  return at;
}

}  // namespace

absl::Status EvalScaledDotProductAttention(OpContext& context) {
  KVANT_ASSIGN_OR_RETURN(const Attention at, Read(context));
  Array output(context.out_dims(0));
  Array stats(context.outputs.size() > 1 ? context.out_dims(1) : Dims{0});
  Array scores({context.executor.max_concurrency(), at.kv_len});
  context.executor.ParallelFor(at.batch * at.q_heads * at.q_len, [&](int64_t row, int slot) {
    const int64_t head = row / at.q_len;
    const double stat =
        AttendRow(at, head / at.q_heads, head % at.q_heads, row % at.q_len,
                  scores.data() + slot * at.kv_len, output.data() + row * at.v_head_size);
    if (stats.size() > 0) stats.values[row] = stat;
  });
  context.outputs[0] = std::move(output);
  if (context.outputs.size() > 1) context.outputs[1] = std::move(stats);
  return absl::OkStatus();
}

}  // namespace kvant::oracle
