#include "kvant/tests/conformance/case_graph.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/tests/conformance/case_inputs.h"

namespace kvant::conformance {
namespace {

using Form = Case::Form;

// Spells a case out in small ops.
class CaseBuilder {
 public:
  explicit CaseBuilder(const Case& c) : c_(c), g_({.apply_to_int = true}), inputs_(c, g_) {}

  absl::StatusOr<CaseGraph> Build();

 private:
  Value Dequantized(const Stored& stored);
  Value Rotated(Value x, int64_t block) { return block == 0 ? x : g_.Hadamard(x, block); }
  // K or V, concatenated from its segments.
  Value Assembled(bool keys);
  Value ValuesBeside(Value keys) {
    return c_.latent ? g_.Slice(keys, -1, 0, c_.value_size()) : Assembled(false);
  }
  // Codes through a Dequantize, with a scale per channel or one.
  Value FromCodes(Value codes, bool per_channel);
  // Through a Quantize of one scale.
  Value ToCodes(Value x, DataType type, float scale, int64_t zero_point);
  Value ProbabilitiesThroughCodes(Value probs);
  void StaticAttention();
  Value Reshaped(Value x, const Dims& lead);
  Value Scores(Value q, Value k);
  // The result has the type of the scores.
  Value OnScores(OpKind kind, Value scores, Value operand) {
    return g_.AddOp(kind, "", {scores, operand}, {g_.Describe(scores).type})[0];
  }
  Value Scaled(Value scores);
  Value Capped(Value scores);
  Value Masked(Value scores, const Mask& mask);
  Value Probabilities(Value scores);
  Value Arranged(Value o);
  void FirstClass();
  // The input that `make` adds, the first time.
  Value Once(std::optional<Value>& value, Value (CaseInputs::*make)()) {
    if (!value) value = (inputs_.*make)();
    return *value;
  }
  Value Lengths() { return Once(lengths_, &CaseInputs::KvLengths); }
  std::optional<Value> First() {
    if (!c_.first_tokens) return std::nullopt;
    return Once(first_, &CaseInputs::FirstTokens);
  }
  void MarkOutput(const std::string& name, Value value);
  bool keys_transposed() const { return c_.k_layout != Case::KLayout::kTokenRows; }

  const Case& c_;
  GraphBuilder g_;
  CaseInputs inputs_;
  std::optional<Value> lengths_, first_, page_table_;
};

Value CaseBuilder::Dequantized(const Stored& stored) {
  if (!stored.scales) return stored.data;
  const GraphBuilder::DequantizeOptions options{
      .group_shape = stored.group_shape, .type = c_.type, .codebook = stored.codebook};
  if (!stored.zero_points) return g_.DynamicDequantize(stored.data, *stored.scales, options);
  return g_.DynamicDequantize(stored.data, *stored.scales, *stored.zero_points, options);
}

Value CaseBuilder::Assembled(bool keys) {
  const int64_t axis = keys && keys_transposed() ? -1 : -2;
  std::vector<Value> parts;
  for (const Segment& one : SegmentsOf(c_, keys, 0)) {
    parts.push_back(Dequantized(keys ? inputs_.Keys(one.begin, one.tokens, one.plain)
                                     : inputs_.Values(one.begin, one.tokens, one.plain)));
  }
  if (c_.real_ranges) {
    const Value ranges = inputs_.Ranges(keys);
    if (!keys) return g_.LoadRanges(parts, ranges, axis);
    const auto [tokens, lengths] = g_.LoadRangesWithLengths(parts, ranges, axis);
    lengths_ = lengths;
    return tokens;
  }
  const Value all = parts.size() == 1 ? parts[0] : g_.Concat(parts, axis);
  if (c_.page_size > 0) {
    return g_.LoadPages(all, Once(page_table_, &CaseInputs::PageTable), Lengths(),
                        {.token_axis = axis});
  }
  // A matrix has no axis of batch entries.
  if (!c_.real_lengths || g_.Describe(all).rank() < 3) return all;
  return g_.LoadTokens(all, Lengths(), First(), {.token_axis = axis});
}

Value CaseBuilder::FromCodes(Value codes, bool per_channel) {
  const LogicalTensor& tensor = g_.Describe(codes);
  const int64_t axis = tensor.rank() - 1;
  const int64_t count = per_channel ? tensor.dims->back() : 1;
  std::vector<float> scales;
  std::vector<int64_t> zps;
  for (int64_t i = 0; i < count; ++i) {
    scales.push_back(0.01f + 0.002f * static_cast<float>(i % 5));
    zps.push_back((tensor.type == kU8 ? 120 : 5) + i % 3);
  }
  const Value x = g_.AddOp(OpKind::kDequantize, "", {codes}, {kF32},
                           {{Attr::kQType, std::string(per_channel ? "per_channel" : "per_tensor")},
                            {Attr::kAxis, axis},
                            {Attr::kScales, scales},
                            {Attr::kZps, zps}})[0];
  return c_.type == kF32 ? x : g_.TypeCast(x, c_.type);
}

Value CaseBuilder::ToCodes(Value x, DataType type, float scale, int64_t zero_point) {
  if (g_.Describe(x).type != kF32) x = g_.TypeCast(x, kF32);
  return g_.AddOp(OpKind::kQuantize, "", {x}, {type},
                  {{Attr::kScales, std::vector<float>{scale}},
                   {Attr::kZps, std::vector<int64_t>{zero_point}}})[0];
}

Value CaseBuilder::ProbabilitiesThroughCodes(Value probs) {
  const Value codes = ToCodes(probs, kU8, 1.f / 255, 0);
  const Value x = g_.AddOp(
      OpKind::kDequantize, "", {codes}, {kF32},
      {{Attr::kScales, std::vector<float>{1.f / 255}}, {Attr::kZps, std::vector<int64_t>{0}}})[0];
  return c_.type == kF32 ? x : g_.TypeCast(x, c_.type);
}

void CaseBuilder::StaticAttention() {
  const Value q = FromCodes(inputs_.Codes("q", kU8, QueryLead(c_), c_.q_len, c_.head_size), false);
  const Value k =
      FromCodes(inputs_.Codes("k", kS8, KvLead(c_), c_.kv_len, c_.head_size), c_.ratio > 1);
  const Value v =
      FromCodes(inputs_.Codes("v", kU8, KvLead(c_), c_.kv_len, c_.value_size()), c_.ratio > 2);
  const Value probs = ProbabilitiesThroughCodes(Probabilities(Scores(q, k)));
  MarkOutput("o", ToCodes(Arranged(g_.MatMul(probs, v)), kS8, 0.03f, 3));
}

Value CaseBuilder::Reshaped(Value x, const Dims& lead) {
  const Dims& from = *g_.Describe(x).dims;
  std::vector<int64_t> shape(lead.begin(), lead.end());
  shape.insert(shape.end(), from.end() - 2, from.end());
  return g_.Reshape(x, std::move(shape));
}

Value CaseBuilder::Scaled(Value scores) {
  const double root = std::sqrt(static_cast<double>(c_.head_size));
  switch (c_.scale) {
    case Case::Scale::kNone:
      return scores;
    case Case::Scale::kMultiply:
      return OnScores(OpKind::kMultiply, scores,
                      inputs_.Scalar("scale", c_.TypeOfScale(), 1 / root));
    case Case::Scale::kDivide:
      return OnScores(OpKind::kDivide, scores, inputs_.Scalar("scale", c_.TypeOfScale(), root));
  }
  return scores;
}

Value CaseBuilder::Capped(Value scores) {
  if (!c_.soft_cap) return scores;
  const Value cap = inputs_.Scalar("cap", g_.Describe(scores).type, 2.5);
  return g_.Multiply(g_.Tanh(g_.Divide(scores, cap)), cap);
}

Value CaseBuilder::Masked(Value scores, const Mask& mask) {
  if (mask.kind == Mask::Kind::kAdditive) {
    return OnScores(OpKind::kAdd, scores, inputs_.MaskOperand(mask));
  }
  const DataType type = g_.Describe(scores).type;
  const Value other = inputs_.Scalar("fill", type, mask.FillIn(type));
  if (mask.kind == Mask::Kind::kCausal) return g_.CausalMask(scores, other);
  if (mask.kind == Mask::Kind::kBottomRight) {
    return g_.CausalMask(scores, other,
                         inputs_.HostScalar("s", kS32, static_cast<double>(c_.kv_len)),
                         inputs_.HostScalar("t", kS32, static_cast<double>(c_.q_len)));
  }
  const Value condition = inputs_.MaskOperand(mask);
  if (mask.kind == Mask::Kind::kSelect) return g_.Select(condition, scores, other);
  return g_.Select(condition, other, scores);
}

Value CaseBuilder::Scores(Value q, Value k) {
  Value scores = g_.MatMul(q, k, {.transpose_b = !keys_transposed(), .type = c_.scores});
  if (!c_.scale_after_masks) scores = Scaled(scores);
  scores = Capped(scores);
  for (const Mask& mask : c_.masks) scores = Masked(scores, mask);
  return c_.scale_after_masks ? Scaled(scores) : scores;
}

Value CaseBuilder::Probabilities(Value scores) {
  const DataType wide = g_.Describe(scores).type;
  GraphBuilder::SoftMaxOptions options{.axis = -1,
                                       .mode = c_.inf_as_zero ? "inf_as_zero" : "none",
                                       .type = c_.cast_probs ? wide : c_.type};
  if (c_.real_lengths || c_.real_ranges) {
    options.lengths = Lengths();
    options.first = First();
  }
  Value probs;
  if (c_.stats) {
    const auto [result, stats] = g_.SoftMaxWithStats(scores, options);
    MarkOutput("stats", stats);
    probs = result;
  } else {
    probs = g_.SoftMax(scores, options);
  }
  if (c_.dropout) {
    const std::vector<Value> results =
        g_.AddOp(OpKind::kDropout, "dropout",
                 {probs, inputs_.HostScalar("seed", kS64, 12345),
                  inputs_.HostScalar("offset", kS64, 7), inputs_.HostScalar("p", kF32, 0.25)},
                 {g_.Describe(probs).type, kU8});
    MarkOutput("kept", results[1]);
    probs = results[0];
  }
  return g_.Describe(probs).type == c_.type ? probs : g_.TypeCast(probs, c_.type);
}

Value CaseBuilder::Arranged(Value o) {
  if (c_.form == Form::kReshape) o = Reshaped(o, QueryLead(c_));
  if (!c_.token_major_output && !c_.transpose_reorder) return o;
  const int64_t rank = g_.Describe(o).rank();
  std::vector<int64_t> order{0, rank - 2};  // batch, then rows, then heads
  for (int64_t d = 1; d < rank; ++d) {
    if (d != rank - 2) order.push_back(d);
  }
  o = g_.Transpose(o, order);
  if (c_.transpose_reorder) return g_.Reorder(o);
  return g_.Reshape(o, {c_.batch, c_.q_len, c_.kv_heads * c_.ratio * c_.value_size()});
}

void CaseBuilder::MarkOutput(const std::string& name, Value value) {
  const LogicalTensor& tensor = g_.Describe(value);
  g_.Output(name, value, tensor.dims ? BufferStrides(c_.buffers, *tensor.dims) : std::nullopt);
}

void CaseBuilder::FirstClass() {
  const Value q = inputs_.Query();
  const Value k = Assembled(true), v = ValuesBeside(k);
  const int64_t heads = c_.kv_heads * c_.ratio;
  GraphBuilder::AttentionOptions options{.bottom_right = c_.bottom_right,
                                         .left_window = c_.left_window,
                                         .right_window = c_.right_window,
                                         .stats = c_.stats};
  if (c_.scale == Case::Scale::kMultiply) options.scale = 0.8f / static_cast<float>(c_.head_size);
  if (c_.soft_cap) options.soft_cap = 2.5f;
  for (const Mask& mask : c_.masks) {
    const bool additive = mask.kind == Mask::Kind::kAdditive;
    (additive ? options.bias : options.select) = inputs_.MaskOperand(mask);
    if (!additive && std::isfinite(mask.fill)) options.select_fill = mask.fill;
  }
  if (c_.real_lengths || c_.real_ranges) {
    options.kv_lengths = Lengths();
    options.kv_first = First();
  }
  if (c_.ragged) options.query_offsets = inputs_.QueryOffsets();
  const auto per_head = [](double base) {
    return [base](absl::Span<const int64_t> at) { return base / static_cast<double>(1 + at[0]); };
  };
  if (c_.sinks) options.sinks = inputs_.Tensor("sinks", kF32, {heads}, per_head(1.5));
  if (c_.alibi) options.alibi_slopes = inputs_.Tensor("slopes", kF32, {heads}, per_head(0.5));
  const auto [o, stats] = g_.ScaledDotProductAttention(q, k, v, std::move(options));
  if (stats) MarkOutput("stats", *stats);
  MarkOutput("o", o);
}

absl::StatusOr<CaseGraph> CaseBuilder::Build() {
  CaseGraph result;
  if (c_.form == Form::kFirstClass) {
    FirstClass();
  } else if (c_.static_codes) {
    StaticAttention();
  } else {
    Value q = Rotated(inputs_.Query(), c_.q_hadamard);
    Value k = Rotated(Assembled(true), c_.k_hadamard);
    Value v = Rotated(ValuesBeside(k), c_.v_hadamard);
    if (c_.form == Form::kReshape) {
      q = Reshaped(q, {c_.batch, c_.kv_heads, c_.ratio});
      k = Reshaped(k, {c_.batch, c_.kv_heads, 1});
      v = Reshaped(v, {c_.batch, c_.kv_heads, 1});
    }
    const Value probs = Probabilities(Scores(q, k));
    const Value o = c_.probs_second
                        ? g_.MatMul(v, probs, {.transpose_a = true, .transpose_b = true})
                        : g_.MatMul(probs, v);
    MarkOutput("o", Arranged(Rotated(o, c_.output_hadamard)));
  }
  result.inputs = inputs_.Take();
  KVANT_ASSIGN_OR_RETURN(result.graph, std::move(g_).Build());
  return result;
}

}  // namespace

absl::StatusOr<CaseGraph> BuildCase(const Case& c) { return CaseBuilder(c).Build(); }

int64_t RealLength(const Case& c, int64_t n) {
  const int64_t lengths[] = {c.kv_len - 1, c.kv_len / 3, 0, c.kv_len};
  return std::max<int64_t>(lengths[n % 4], 0);
}

int64_t FirstToken(const Case& c, int64_t n) { return RealLength(c, n) * (n % 3) / 4; }

int64_t PagesPerEntry(const Case& c) { return c.kv_len / c.page_size; }

int64_t PoolPages(const Case& c) {
  const int64_t pages = c.batch * PagesPerEntry(c) + 3;
  return pages % 7 == 0 ? pages + 1 : pages;
}

int64_t PageOf(const Case& c, int64_t n, int64_t i) {
  return ((n * PagesPerEntry(c) + i) * 7 + 3) % PoolPages(c);
}

int64_t QueriesOf(const Case& c, int64_t n) {
  const int64_t queries[] = {c.q_len, 1, 0, c.q_len + 2};
  return queries[n % 4];
}

int64_t QueryRoom(const Case& c) {
  int64_t room = 2;
  for (int64_t n = 0; n < c.batch; ++n) room += QueriesOf(c, n);
  return room;
}

std::vector<Segment> SegmentsOf(const Case& c, bool keys, int64_t n) {
  std::vector<Segment> segments;
  int64_t begin = 0;
  const auto add = [&](int64_t tokens, bool plain) {
    segments.push_back({begin, tokens, plain, 0, tokens});
    begin += tokens;
  };
  if (c.plain_head > 0) add(c.plain_head, true);
  for (int i = 0; i < c.segments; ++i) {
    const bool last = i + 1 == c.segments;
    const int64_t left = c.kv_len - begin;
    // Uneven, so that a tile never ends with a segment.
    int64_t tokens = last ? left : left * 2 / 3;
    if (c.real_ranges && !last) {
      if (!keys) tokens = left / 2;
      if (tokens > 32) tokens -= tokens % 32;
    }
    add(tokens, last && c.plain_tail);
  }
  if (!c.real_ranges) return segments;
  // Odd batches fill the last segments first.
  int64_t missing = RealLength(c, n);
  for (size_t i = 0; i < segments.size(); ++i) {
    Segment& one = segments[n % 2 == 0 ? i : segments.size() - 1 - i];
    one.real = std::min(missing, one.tokens);
    missing -= one.real;
    if (one.tokens > c.plain_head)
      one.first = (one.tokens * 3 / 4 + n + (keys ? 0 : 5)) % one.tokens;
  }
  return segments;
}

}  // namespace kvant::conformance
