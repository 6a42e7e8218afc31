#include "kvant/tools/attention_graph.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using Options = AttentionGraphOptions;

absl::Status Bad(const std::string& why) { return InvalidArguments(why); }

absl::Status CheckOptions(const Options& o) {
  const std::pair<const char*, int64_t> sizes[] = {{"batch", o.batch},
                                                   {"heads", o.heads},
                                                   {"kv-heads", o.kv_heads},
                                                   {"q-len", o.q_len},
                                                   {"kv-len", o.kv_len},
                                                   {"head-size", o.head_size},
                                                   {"v-head-size", o.v_head_size}};
  for (const auto& [name, size] : sizes) {
    if (size < 1) return Bad(absl::StrCat(name, " is ", size, ", and must be at least 1"));
  }
  if (o.heads % o.kv_heads != 0) {
    return Bad(absl::StrCat(o.heads, " heads are no multiple of ", o.kv_heads, " kv-heads"));
  }
  if (!o.single_op && (o.left_window >= 0 || o.ragged || o.sinks || o.alibi)) {
    return Bad("left-window, ragged, sinks and alibi need the single op (--op)");
  }
  const bool segments = o.sink_tokens > 0 || o.window_tokens > 0;
  if ((o.ring || segments) && (o.kv_lengths || o.page_size > 0)) {
    return Bad("ring, sink-tokens and window-tokens do not go with kv-lengths and page-size");
  }
  if (o.sink_tokens < 0 || o.window_tokens < 0) {
    return Bad(absl::StrCat("sink-tokens and window-tokens are ", o.sink_tokens, " and ",
                            o.window_tokens, ", and must be at least 0"));
  }
  if (segments && o.k_layout != Options::KLayout::kTokens) {
    return Bad("sink-tokens and window-tokens do not go with k-layout");
  }
  if (o.page_size < 0 || (o.page_size > 0 && o.kv_len % o.page_size != 0)) {
    return Bad(absl::StrCat("pages of ", o.page_size, " tokens do not divide kv-len, ", o.kv_len));
  }
  if (o.single_op && (o.dropout || o.transpose_output || o.k_layout != Options::KLayout::kTokens)) {
    return Bad("dropout, transpose-output and k-layout do not go with the single op (--op)");
  }
  if (o.latent && o.v_head_size > o.head_size) {
    return Bad(absl::StrCat("latent: V is the first ", o.v_head_size, " of K's ", o.head_size,
                            " channels"));
  }
  if (o.latent && o.k_layout != Options::KLayout::kTokens) {
    return Bad("latent: V is a part of K, and does not go with k-layout");
  }
  if (o.token_major && o.k_layout != Options::KLayout::kTokens) {
    return Bad("token-major does not go with k-layout");
  }
  if (o.static_int8 && o.dtype != kF32) {
    return Bad(
        absl::StrCat("static-int8 takes dtype f32, not ", std::string(DataTypeName(o.dtype))));
  }
  if (o.static_int8 && (o.single_op || o.k || o.v)) {
    return Bad("static-int8 does not go with k, v or the single op (--op)");
  }
  if (o.hadamard != 0 && o.single_op) {
    return Bad("hadamard does not go with the single op (--op)");
  }
  return absl::OkStatus();
}

// Builds one graph; `error_` keeps what the builder cannot know.
class Maker {
 public:
  Maker(const Options& options, GraphOptions graph_options)
      : o_(options),
        g_(std::move(graph_options)),
        five_d_(!options.single_op && options.heads != options.kv_heads) {}

  absl::StatusOr<Graph> Make() && {
    MakeIndices();
    if (o_.single_op) {
      MakeSingleOp();
    } else {
      MakeOps();
    }
    KVANT_RETURN_IF_ERROR(error_);
    return std::move(g_).Build();
  }

 private:
  // A K or V and, where quantized, what dequantizes it.
  struct KvInputs {
    Value data;
    std::optional<Value> scales, zero_points;
    std::vector<int64_t> group_shape;
  };

  Dims Shape(int64_t heads, int64_t rows, int64_t cols) const {
    if (!five_d_) return {o_.batch, heads, rows, cols};
    return {o_.batch, o_.kv_heads, heads / o_.kv_heads, rows, cols};
  }

  void Keep(const absl::Status& status) {
    if (error_.ok()) error_ = status;
  }

  // [.., S, D] as [.., D, S].
  static Dims SwapLast(Dims dims) {
    std::swap(dims[dims.size() - 1], dims[dims.size() - 2]);
    return dims;
  }

  // Where the elements of a K or V, or of its scales, lie.
  std::optional<Dims> StridesOf(const Dims& dims, Options::KLayout layout) const {
    if (layout == Options::KLayout::kTransposed) return SwapLast(DenseStrides(dims));
    if (!o_.token_major) return std::nullopt;
    Dims strides = DenseStrides(dims);
    const size_t token = dims.size() - 2;
    strides[token] = dims[1] * dims.back();
    strides[1] = dims.back();
    return strides;
  }

  KvInputs MakeKv(const std::string& name, const NumberFormat& format, int64_t head_size,
                  Options::KLayout layout) {
    Dims dims = Shape(o_.kv_heads, o_.kv_len, head_size);
    if (o_.page_size > 0) {
      dims[0] *= o_.kv_len / o_.page_size;
      dims[dims.size() - 2] = o_.page_size;
    }
    const bool swapped = layout != Options::KLayout::kTokens;
    KvInputs kv;
    kv.data = g_.Input(name, o_.static_int8 ? kS8 : format.type, swapped ? SwapLast(dims) : dims,
                       StridesOf(dims, layout));
    if (!format.quantized()) return kv;

    const absl::StatusOr<Dims> group = format.GroupShape(dims);
    if (!group.ok()) {
      Keep(Bad(absl::StrCat(name, ": ", std::string(group.status().message()))));
      return kv;
    }
    Dims scale_dims = dims;
    for (size_t i = 0; i < dims.size(); ++i) scale_dims[i] = dims[i] / (*group)[i];
    Dims group_shape = *group;
    if (swapped) {
      scale_dims = SwapLast(scale_dims);
      group_shape = SwapLast(group_shape);
    }
    // DynamicDequantize says "one scale" as per_tensor.
    if (format.groups == NumberFormat::Groups::kTensor) {
      scale_dims = {1};
      group_shape.clear();
    }
    kv.group_shape.assign(group_shape.begin(), group_shape.end());
    const DataType scale_type = format.scale_type == kUndef ? o_.dtype : format.scale_type;
    std::optional<Dims> strides;
    if (o_.token_major && scale_dims.size() > 1) strides = StridesOf(scale_dims, layout);
    kv.scales = g_.Input(name + "_scales", scale_type, scale_dims, strides);
    if (format.zero_points != NumberFormat::ZeroPoints::kNone) {
      kv.zero_points =
          g_.Input(name + "_zps", format.ZeroPointType(scale_type), scale_dims, strides);
    }
    return kv;
  }

  // K or V in the queries' type.
  Value Decompress(const KvInputs& kv, const NumberFormat& format) {
    if (kv.scales) {
      GraphBuilder::DequantizeOptions options;
      options.group_shape.assign(kv.group_shape.begin(), kv.group_shape.end());
      options.type = o_.dtype;
      options.codebook = format.codebook_values();
      if (!kv.zero_points) return g_.DynamicDequantize(kv.data, *kv.scales, options);
      return g_.DynamicDequantize(kv.data, *kv.scales, *kv.zero_points, options);
    }
    if (o_.static_int8) return FromCodes(kv.data, kCodes);
    if (format.type == o_.dtype) return kv.data;
    // TypeCast takes one of the 16-bit types to the other only through f32.
    const bool via_f32 = format.type != kF32 && o_.dtype != kF32;
    return g_.TypeCast(via_f32 ? g_.TypeCast(kv.data, kF32) : kv.data, o_.dtype);
  }

  // Constant parameters of a tensor's codes.
  struct Static {
    float scale;
    int64_t zero_point;
  };
  static constexpr Static kQueryCodes{0.02f, 120}, kCodes{0.01f, 0}, kProbabilities{1.f / 255, 0},
      kOutputCodes{0.01f, 128};
  static Attributes AttributesOf(const Static& of) {
    return {{Attr::kScales, std::vector<float>{of.scale}},
            {Attr::kZps, std::vector<int64_t>{of.zero_point}}};
  }
  Value FromCodes(Value codes, const Static& of) {
    return g_.AddOp(OpKind::kDequantize, "", {codes}, {kF32}, AttributesOf(of))[0];
  }
  Value ToCodes(Value x, const Static& of) {
    return g_.AddOp(OpKind::kQuantize, "", {x}, {kU8}, AttributesOf(of))[0];
  }
  Value Queries() {
    const Dims dims = Shape(o_.heads, o_.q_len, o_.head_size);
    return o_.static_int8 ? FromCodes(g_.Input("q", kU8, dims), kQueryCodes)
                          : g_.Input("q", o_.dtype, dims);
  }

  // The tokens of each sequence, of K if they are the first to be loaded: then lengths are known.
  Value Loaded(Value kv, int64_t head_size, bool swapped) {
    const GraphBuilder::LoadOptions options{.token_axis = swapped ? -1 : -2};
    const std::string name = lengths_ ? "v" : "k";
    std::vector<Value> segments{kv};
    const auto exact = [&](const char* what, int64_t tokens) {
      return g_.Input(absl::StrCat(name, what), o_.dtype, Shape(o_.kv_heads, tokens, head_size));
    };
    if (o_.sink_tokens > 0) segments.insert(segments.begin(), exact("_sinks", o_.sink_tokens));
    if (o_.window_tokens > 0) segments.push_back(exact("_window", o_.window_tokens));
    if (o_.ring || segments.size() > 1) {
      const Value ranges =
          g_.Input(name + "_ranges", kS32, {o_.batch, static_cast<int64_t>(segments.size()), 2});
      if (lengths_) return g_.LoadRanges(segments, ranges, options.token_axis);
      const auto [tokens, lengths] = g_.LoadRangesWithLengths(segments, ranges, options.token_axis);
      lengths_ = lengths;
      return tokens;
    }
    if (o_.page_size > 0) return g_.LoadPages(kv, *page_table_, *lengths_, options);
    return lengths_ ? g_.LoadTokens(kv, *lengths_, std::nullopt, options) : kv;
  }

  void MakeIndices() {
    if (o_.kv_lengths || o_.page_size > 0) lengths_ = g_.Input("kv_lengths", kS32, {o_.batch});
    if (o_.page_size == 0) return;
    page_table_ = g_.Input("page_table", kS32, {o_.batch, o_.kv_len / o_.page_size});
  }

  // "1x1xQxS" over [N, H, Q, S] as the dims of an input.
  Dims MaskShape(const std::string& option, const std::string& text) {
    const std::vector<std::string> parts = absl::StrSplit(text, 'x');
    if (parts.size() != 4) {
      Keep(Bad(
          absl::StrCat("--", option, ": '", text, "' does not have four dims such as 1x1xQxS")));
      return {1};
    }
    const int64_t full[] = {o_.ragged ? 1 : o_.batch, o_.heads,
                            o_.ragged ? o_.batch * o_.q_len : o_.q_len,
                            o_.kv_len + o_.sink_tokens + o_.window_tokens};
    Dims dims;
    for (size_t i = 0; i < parts.size(); ++i) {
      int64_t dim = 0;
      const size_t symbol = parts[i].size() == 1 ? std::string("NHQS").find(parts[i]) : 4;
      if (symbol < 4) {
        dim = full[symbol];
      } else if (!absl::SimpleAtoi(parts[i], &dim)) {
        dim = 0;
      }
      if (dim != 1 && dim != full[i]) {
        const std::string other = full[i] == 1 ? "" : absl::StrCat(" or ", full[i]);
        Keep(Bad(absl::StrCat("--", option, ": '", parts[i], "' is not 1", other, ", dim ", i,
                              " of the scores")));
        return {1};
      }
      dims.push_back(dim);
    }
    if (!five_d_) return dims;
    const bool per_head = dims[1] > 1;
    return {dims[0], per_head ? o_.kv_heads : 1, per_head ? o_.heads / o_.kv_heads : 1, dims[2],
            dims[3]};
  }

  Value Scalar(const std::string& name, DataType type) { return g_.Input(name, type, {1}); }

  Value ApplyMasks(Value scores) {
    const DataType type = g_.Describe(scores).type;
    if (o_.causal == Options::Causal::kTopLeft) {
      scores = g_.CausalMask(scores, Scalar("causal_fill", type));
    } else if (o_.causal == Options::Causal::kBottomRight) {
      const Value fill = Scalar("causal_fill", type);
      const Value kv_len = g_.HostScalar("kv_len", kS32);
      scores = g_.CausalMask(scores, fill, kv_len, g_.HostScalar("q_len", kS32));
    }
    if (!o_.mask.empty()) {
      scores = g_.Add(scores, g_.Input("mask", o_.dtype, MaskShape("mask", o_.mask)));
    }
    if (!o_.select.empty()) {
      const Value keep = g_.Input("select", kBoolean, MaskShape("select", o_.select));
      scores = g_.Select(keep, scores, Scalar("select_fill", type));
    }
    return scores;
  }

  Value ApplyDropout(Value probs) {
    const Value seed = g_.HostScalar("dropout_seed", kS64);
    const Value offset = g_.HostScalar("dropout_offset", kS64);
    const Value probability = g_.HostScalar("dropout_probability", kF32);
    const std::vector<Value> results =
        g_.AddOp(OpKind::kDropout, "dropout", {probs, seed, offset, probability}, {o_.dtype});
    return results.empty() ? probs : results[0];
  }

  Value Rotated(Value x) { return o_.hadamard == 0 ? x : g_.Hadamard(x, o_.hadamard); }

  Value Values(Value keys) {
    if (o_.latent) return g_.Slice(keys, -1, 0, o_.v_head_size);
    const KvInputs v = MakeKv("v", *o_.v, o_.v_head_size, Options::KLayout::kTokens);
    return Loaded(Decompress(v, *o_.v), o_.v_head_size, false);
  }

  void MakeOps() {
    const NumberFormat k_format = *o_.k;
    const Value q = Rotated(Queries());
    const KvInputs k = MakeKv("k", k_format, o_.head_size, o_.k_layout);
    const bool swapped = o_.k_layout != Options::KLayout::kTokens;
    const Value keys = Loaded(Decompress(k, k_format), o_.head_size, swapped);
    // Scores stay in f32, as in oneDNN's newer graphs.
    Value scores = g_.MatMul(q, keys, {.transpose_b = !swapped, .type = kF32});
    if (o_.scale == Options::Scale::kDivide) scores = g_.Divide(scores, Scalar("scale", o_.dtype));
    if (o_.scale == Options::Scale::kMultiply) {
      scores = g_.Multiply(scores, Scalar("scale", o_.dtype));
    }
    if (o_.soft_cap) {
      scores = g_.Tanh(g_.Multiply(scores, Scalar("inverse_cap", kF32)));
      scores = g_.Multiply(scores, Scalar("cap", kF32));
    }
    scores = ApplyMasks(scores);
    const GraphBuilder::SoftMaxOptions softmax{
        .axis = -1, .mode = "inf_as_zero", .type = o_.dtype, .lengths = lengths_};
    Value probs;
    if (o_.stats) {
      const auto [p, stats] = g_.SoftMaxWithStats(scores, softmax);
      probs = p;
      g_.Output("stats", stats);
    } else {
      probs = g_.SoftMax(scores, softmax);
    }
    if (o_.dropout) probs = ApplyDropout(probs);
    if (o_.static_int8) probs = FromCodes(ToCodes(probs, kProbabilities), kProbabilities);
    Value out = Rotated(g_.MatMul(probs, Values(keys), {.type = o_.dtype}));
    if (o_.transpose_output) {
      out = g_.Transpose(
          out, five_d_ ? std::vector<int64_t>{0, 3, 1, 2, 4} : std::vector<int64_t>{0, 2, 1, 3});
      out = g_.Reorder(out);
    }
    g_.Output("o", o_.static_int8 ? ToCodes(out, kOutputCodes) : out);
  }

  void MakeSingleOp() {
    const Dims queries = o_.ragged ? Dims{o_.batch * o_.q_len, o_.heads, o_.head_size}
                                   : Shape(o_.heads, o_.q_len, o_.head_size);
    const Value q = g_.Input("q", o_.dtype, queries);
    const KvInputs k = MakeKv("k", *o_.k, o_.head_size, Options::KLayout::kTokens);
    GraphBuilder::AttentionOptions a;
    if (o_.scale == Options::Scale::kNone) a.scale = 1.f;
    a.soft_cap = o_.soft_cap;
    a.bottom_right = o_.causal == Options::Causal::kBottomRight;
    if (o_.causal != Options::Causal::kNone) a.right_window = 0;
    a.left_window = o_.left_window;
    if (!o_.mask.empty()) a.bias = g_.Input("mask", o_.dtype, MaskShape("mask", o_.mask));
    if (!o_.select.empty()) {
      a.select = g_.Input("select", kBoolean, MaskShape("select", o_.select));
    }
    if (o_.ragged) a.query_offsets = g_.Input("query_offsets", kS32, {o_.batch + 1});
    if (o_.sinks) a.sinks = g_.Input("sinks", kF32, {o_.heads});
    if (o_.alibi) a.alibi_slopes = g_.Input("alibi_slopes", kF32, {o_.heads});
    a.stats = o_.stats;
    const Value keys = Loaded(Decompress(k, *o_.k), o_.head_size, false);
    const Value values = Values(keys);
    a.kv_lengths = lengths_;
    const auto [out, stats] = g_.ScaledDotProductAttention(q, keys, values, a);
    g_.Output("o", out);
    if (stats) g_.Output("stats", *stats);
  }

  const Options& o_;
  GraphBuilder g_;
  const bool five_d_;
  std::optional<Value> lengths_, page_table_;
  absl::Status error_;
};

}  // namespace

absl::StatusOr<Graph> MakeAttentionGraph(const AttentionGraphOptions& options) {
  Options o = options;
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  if (o.v_head_size == 0) o.v_head_size = o.head_size;
  KVANT_RETURN_IF_ERROR(CheckOptions(o));
  if (!o.k) o.k = NumberFormat{.type = o.dtype};
  if (!o.v) o.v = NumberFormat{.type = o.dtype};
  if (!IsComputeFloat(o.dtype)) return Bad("dtype is none of f32, bf16, f16");
  GraphOptions graph_options;
  // oneDNN multiplies codes in floating point only with this permission.
  graph_options.apply_to_int = o.k->quantized() || o.v->quantized();
  if (graph_options.apply_to_int && o.dtype == kF16) graph_options.fpmath = FpMath::kF16;
  if (graph_options.apply_to_int && o.dtype == kBF16) graph_options.fpmath = FpMath::kBF16;
  if (o.fpmath) graph_options.fpmath = *o.fpmath;
  return Maker(o, graph_options).Make();
}

}  // namespace kvant
