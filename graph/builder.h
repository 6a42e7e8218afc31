// GraphBuilder: a graph in a few lines, without hand-written ids.
//
//   kvant::GraphBuilder g;
//   auto q = g.Input("q", kvant::kF32, {1, 8, 1, 128});
//   ...
//   g.Output("o", g.MatMul(probs, v));
//   absl::StatusOr<kvant::Graph> graph = std::move(g).Build();
//
// Errors are kept until Build, which returns the first. Ops get the name of
// the result's tensor; ids count up from 0 in order of creation. Each op is
// checked and its shapes inferred as it is added, so that Describe knows them.
#ifndef KVANT_GRAPH_BUILDER_H_
#define KVANT_GRAPH_BUILDER_H_

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/graph/graph.h"

namespace kvant {

// A tensor of the graph that a builder constructs. Only the builder that made it takes it, or what
// was copied or moved from that builder since. One that was made by default is of no builder.
struct Value {
  TensorId id = 0;
  uint64_t builder = 0;
};

class GraphBuilder {
 public:
  // A value, and a second one where an option asks for it.
  using OneOrTwo = std::pair<Value, std::optional<Value>>;

  explicit GraphBuilder(GraphOptions options = {});

  // A graph input, dense row-major unless strides (in elements) are given. No two inputs have
  // the same name, and no two outputs; several may have none.
  Value Input(std::string_view name, DataType type, Dims dims,
              std::optional<Dims> strides = std::nullopt, Property property = Property::kVariable);
  // A scalar whose value is read on the host at every execution, on any engine: s32, s64 or f32.
  Value HostScalar(std::string_view name, DataType type);
  // A constant of the graph. With a type, the value is rounded to it; a number beyond the type is
  // refused. Without, it is f32, s32, s64 or boolean by the argument's type; double becomes f32.
  Value Scalar(DataType type, double value);
  template <typename T>
  Value Scalar(T value) {
    static_assert(std::is_same_v<T, bool> || std::is_floating_point_v<T> ||
                  (std::is_integral_v<T> && std::is_signed_v<T>));
    using Integer = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
    using Number = std::conditional_t<std::is_floating_point_v<T>, float, Integer>;
    using Stored = std::conditional_t<std::is_same_v<T, bool>, bool, Number>;
    if constexpr (std::is_same_v<Stored, float>) return Scalar(kF32, value);
    return AddConstant(Constant(static_cast<Stored>(value)));
  }

  struct MatMulOptions {
    bool transpose_a = false, transpose_b = false;
    DataType type = kUndef;
  };
  // AddOp has oneDNN's defaults instead: axis 1, mode "none".
  struct SoftMaxOptions {
    int64_t axis = -1;
    std::string_view mode = "inf_as_zero";
    DataType type = kUndef;
    // s32 [N] or [1]: elements [first, lengths) along the axis exist. No first without lengths.
    std::optional<Value> lengths = std::nullopt, first = std::nullopt;
  };
  struct DequantizeOptions {
    Dims group_shape = {};                       // given: per_group
    std::optional<int64_t> axis = std::nullopt;  // given: per_channel; neither: per_tensor
    DataType type = kUndef;                      // of the result; undef: the scales' type
    std::vector<float> codebook = {};            // what codes stand for, times the scale
  };

  struct QuantizeOptions {
    Dims group_shape = {};                       // as in DequantizeOptions
    std::optional<int64_t> axis = std::nullopt;  // likewise
    DataType type = kUndef;                      // of the codes
    DataType scale_type = kF32;
    DataType zero_point_type = kUndef;  // undef: none
    bool power_of_two_scales = false;
    float scale_floor = 0;
    std::vector<float> codebook = {};
    bool ggml_formula = false;  // see attribute formula
  };
  struct Quantized {
    Value codes;
    Value scales;  // of no builder where Append only converts
    std::optional<Value> zero_points;
  };

  // Where `type` is kUndef the result has the first input's type. Arithmetic on two types gives
  // f32; with AddOp it gives any type that the table allows.
  Value MatMul(Value a, Value b, MatMulOptions options);
  Value MatMul(Value a, Value b) { return MatMul(a, b, MatMulOptions()); }
  Value SoftMax(Value x, SoftMaxOptions options) {
    return EmitSoftMax(x, options, /*stats=*/false).first;
  }
  Value SoftMax(Value x) { return SoftMax(x, SoftMaxOptions()); }
  // Result and log-sum-exp statistics.
  std::pair<Value, Value> SoftMaxWithStats(Value x, SoftMaxOptions options) {
    const auto [result, stats] = EmitSoftMax(x, options, /*stats=*/true);
    return {result, *stats};
  }
  Value DynamicDequantize(Value codes, Value scales, std::optional<Value> zero_points,
                          const DequantizeOptions& options);
  Value DynamicDequantize(Value codes, Value scales, const DequantizeOptions& options) {
    return DynamicDequantize(codes, scales, std::nullopt, options);
  }
  // options.type is that of the codes.
  Value DynamicQuantize(Value x, Value scales, std::optional<Value> zero_points,
                        const DequantizeOptions& options);
  // Computes scales and zero points as well.
  Quantized DynamicQuantize(Value x, const QuantizeOptions& options);
  // DynamicQuantize into tensors that hold `capacity` tokens along `token_axis`, from positions
  // (s32 [N] or [1]) on; or a conversion, if options.type is a floating-point type that takes no
  // scales.
  Quantized Append(Value x, Value positions, int64_t capacity, const QuantizeOptions& options,
                   int64_t token_axis = -2) {
    return EmitAppend({OpKind::kAppend, capacity, token_axis}, x, positions, options);
  }
  // Append with scales, and zero points, that exist already.
  Value Append(Value x, Value positions, int64_t capacity, Value scales,
               std::optional<Value> zero_points, const DequantizeOptions& options,
               int64_t token_axis = -2) {
    return EmitAppend({OpKind::kAppend, capacity, token_axis}, x, positions, scales, zero_points,
                      options);
  }
  // Append of packed tokens into slots (s32 or s64 [tokens]) of a pool. `token_axis` is the pool's
  // axis of the tokens of a page. Groups are the pool's.
  struct PagedPool {
    int64_t pages = 0, page_size = 0;  // tokens of a page
  };
  Quantized AppendPages(Value x, Value slots, PagedPool pool, const QuantizeOptions& options,
                        int64_t token_axis = -2) {
    return EmitAppend({OpKind::kAppendPages, pool.page_size, token_axis, pool.pages}, x, slots,
                      options);
  }
  Value AppendPages(Value x, Value slots, PagedPool pool, Value scales,
                    std::optional<Value> zero_points, const DequantizeOptions& options,
                    int64_t token_axis = -2) {
    return EmitAppend({OpKind::kAppendPages, pool.page_size, token_axis, pool.pages}, x, slots,
                      scales, zero_points, options);
  }
  // What attention reads of a cache (LoadTokens, LoadPages and LoadRanges of ops.inc); the SoftMax
  // then takes the same lengths.
  struct LoadOptions {
    int64_t token_axis = -2;
    // Tokens that a row of x stands for, where x is scales or zero points.
    int64_t token_group = 1;
  };
  Value LoadTokens(Value x, Value lengths, std::optional<Value> first, LoadOptions options);
  Value LoadTokens(Value x, Value lengths) { return LoadTokens(x, lengths, {}, LoadOptions()); }
  Value LoadPages(Value pool, Value page_table, Value lengths, LoadOptions options);
  Value LoadPages(Value pool, Value page_table, Value lengths) {
    return LoadPages(pool, page_table, lengths, LoadOptions());
  }
  Value LoadRanges(absl::Span<const Value> segments, Value ranges, int64_t token_axis = -2) {
    return EmitLoadRanges(segments, ranges, token_axis, /*lengths=*/false).first;
  }
  // The tokens, and how many there are of each row.
  std::pair<Value, Value> LoadRangesWithLengths(absl::Span<const Value> segments, Value ranges,
                                                int64_t token_axis = -2) {
    const auto [tokens, lengths] = EmitLoadRanges(segments, ranges, token_axis, /*lengths=*/true);
    return {tokens, *lengths};
  }
  Value Hadamard(Value x, int64_t block) {
    return Unary(OpKind::kHadamard, x, {{Attr::kBlock, block}});
  }
  Value Add(Value a, Value b) { return Arithmetic(OpKind::kAdd, a, b); }
  Value Subtract(Value a, Value b) { return Arithmetic(OpKind::kSubtract, a, b); }
  Value Multiply(Value a, Value b) { return Arithmetic(OpKind::kMultiply, a, b); }
  Value Divide(Value a, Value b) { return Arithmetic(OpKind::kDivide, a, b); }
  Value Select(Value condition, Value x, Value y) {
    return Emit(OpKind::kSelect, {condition, x, y}, {Describe(x).type});
  }
  Value Tanh(Value x) { return Unary(OpKind::kTanh, x); }
  Value GenIndex(Value x, int64_t axis) {
    return Emit(OpKind::kGenIndex, {x}, {kS32}, {{Attr::kAxis, axis}});
  }
  Value GreaterEqual(Value a, Value b) { return Emit(OpKind::kGreaterEqual, {a, b}, {kBoolean}); }
  Value TypeCast(Value x, DataType type) { return Emit(OpKind::kTypeCast, {x}, {type}); }
  Value Reshape(Value x, std::vector<int64_t> shape, bool special_zero = false) {
    return Unary(OpKind::kStaticReshape, x,
                 {{Attr::kShape, std::move(shape)}, {Attr::kSpecialZero, special_zero}});
  }
  Value Transpose(Value x, std::vector<int64_t> order) {
    return Unary(OpKind::kStaticTranspose, x, {{Attr::kOrder, std::move(order)}});
  }
  // Elements [begin, begin + size) along an axis.
  Value Slice(Value x, int64_t axis, int64_t begin, int64_t size) {
    return Unary(OpKind::kSlice, x,
                 {{Attr::kAxis, axis}, {Attr::kBegin, begin}, {Attr::kSize, size}});
  }
  // As x with these strides (dense if none).
  Value Reorder(Value x, std::optional<Dims> strides = std::nullopt);
  Value Concat(absl::Span<const Value> values, int64_t axis);

  // scores where column <= row, `fill` elsewhere; GenIndex, GreaterEqual, Select.
  // With kv_len and q_len (s32 scalars) the row is shifted by kv_len - q_len:
  // bottom-right.
  Value CausalMask(Value scores, Value fill, std::optional<Value> kv_len = std::nullopt,
                   std::optional<Value> q_len = std::nullopt);

  // Attention stated directly (see ScaledDotProductAttention in ops.inc).
  struct AttentionOptions {
    std::optional<float> scale = std::nullopt, soft_cap = std::nullopt, select_fill = std::nullopt;
    bool bottom_right = false;
    int64_t left_window = -1, right_window = -1;
    std::optional<Value> bias = std::nullopt, select = std::nullopt, kv_lengths = std::nullopt,
                         kv_first = std::nullopt, query_offsets = std::nullopt,
                         sinks = std::nullopt, alibi_slopes = std::nullopt;
    bool stats = false;  // then the second value is present
  };
  OneOrTwo ScaledDotProductAttention(Value q, Value k, Value v, AttentionOptions options);

  // Attention over all tokens from that over parts of them (MergeAttention in ops.inc).
  struct AttentionPart {
    Value output, stats;
  };
  struct MergeOptions {
    DataType type = kUndef;
    bool stats = false;  // then the second value is present
  };
  OneOrTwo MergeAttention(absl::Span<const AttentionPart> parts, MergeOptions options);

  // A result of an op of AddOp. Dims are needed only where the op leaves them open (the capacity of
  // Append). Elsewhere they say what is to be inferred.
  struct Result {
    Result(DataType type, std::optional<Dims> dims = std::nullopt)  // NOLINT
        : type(type), dims(std::move(dims)) {}
    DataType type;
    std::optional<Dims> dims;
  };
  // Any op of the table.
  std::vector<Value> AddOp(OpKind kind, std::string_view name, const std::vector<Value>& inputs,
                           const std::vector<Result>& results, Attributes attrs = {});

  // Names a result of an op and marks it as an output of the graph. Its type and dims are as
  // inferred, its strides dense unless given. Results that nothing consumes are outputs too, named
  // or not.
  void Output(std::string_view name, Value value, std::optional<Dims> strides = std::nullopt);

  // Type and, where known by inference, shape of a value; undef of unknown rank for
  // a value that is not this builder's. Valid until the next call.
  const LogicalTensor& Describe(Value value) const;

  // The first error so far, which Build gives.
  const absl::Status& status() const { return status_; }
  // Finalized, shapes inferred. kInvalidArguments the second time.
  absl::StatusOr<Graph> Build() &&;

 private:
  absl::StatusOr<Graph> Finish();
  void Fail(absl::Status status);
  // Marks the values that a builder makes. A copy has a mark of its own, and so has from then on
  // what was moved from.
  struct Stamp {
    Stamp();
    Stamp(const Stamp&) : Stamp() {}
    Stamp(Stamp&& other) noexcept : Stamp() { std::swap(value, other.value); }
    Stamp& operator=(Stamp other) noexcept {
      std::swap(value, other.value);
      return *this;
    }
    uint64_t value;
  };
  Value ValueOf(TensorId id) const { return {id, stamp_.value}; }
  bool Has(Value value) const {
    return value.id < tensors_.size() && value.builder == stamps_[value.id];
  }
  // Remembers the name of an input or output; false, and an error, if it is another's.
  bool Claim(bool output, std::string_view name);
  LogicalTensor& AddTensor(std::string_view name, DataType type);
  Value AddConstant(const Constant& value);
  // Adds an op and its results, which have consecutive ids; the first.
  Value Emit(OpKind kind, absl::Span<const Value> inputs, absl::Span<const Result> results,
             Attributes attrs = {}, std::string_view name = "");
  // With a result of x's type.
  Value Unary(OpKind kind, Value x, Attributes attrs = {}) {
    return Emit(kind, {x}, {Describe(x).type}, std::move(attrs));
  }
  Value Arithmetic(OpKind kind, Value a, Value b);
  // The same of an op with a second result, if that is not undef.
  OneOrTwo EmitTwo(OpKind kind, absl::Span<const Value> inputs, DataType first, DataType second,
                   Attributes attrs);
  OneOrTwo EmitLoadRanges(absl::Span<const Value> segments, Value ranges, int64_t token_axis,
                          bool lengths);
  OneOrTwo EmitSoftMax(Value x, const SoftMaxOptions& options, bool stats);
  Quantized EmitQuantize(OpKind kind, absl::Span<const Value> inputs,
                         const QuantizeOptions& options, Attributes attrs);
  // What Append, or AppendPages, writes to.
  struct Capacity {
    OpKind kind;
    int64_t tokens, token_axis;
    int64_t pages = 0;
  };
  Quantized EmitAppend(const Capacity& to, Value x, Value places, const QuantizeOptions& options);
  Value EmitAppend(const Capacity& to, Value x, Value places, Value scales,
                   std::optional<Value> zero_points, const DequantizeOptions& options);
  // `group`: tokens for each of the output's elements along the axis.
  void SetCapacity(Value output, const Capacity& to, int64_t group);
  // Checks the op, which has its inputs already, and infers its outputs' dims.
  absl::Status Check(Op& op);

  GraphOptions options_;
  Stamp stamp_;
  std::vector<LogicalTensor> tensors_;  // by id
  std::vector<uint64_t> stamps_;        // by id: of the builder that made the tensor
  // Not of absl's: its tables poison memory where the address sanitizer is on, which a program and
  // this library may disagree about.
  std::unordered_set<std::string> input_names_, output_names_;
  std::vector<Op> ops_;
  std::vector<bool> produced_;  // by tensor id: by an op
  std::vector<bool> consumed_;
  std::vector<bool> is_output_;
  absl::Status status_;
};

}  // namespace kvant

#endif  // KVANT_GRAPH_BUILDER_H_
