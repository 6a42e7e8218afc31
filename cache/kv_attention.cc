#include "kvant/cache/kv_attention.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <shared_mutex>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kvant/cache/compile_one.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// What may be an input of the graph, and its name; a part of K or V follows as K0, K1, ...
enum Source : uint8_t {
  kQ,
  kLogits,
  kBias,
  kNewK,
  kNewV,
  kRangesOfK,
  kRangesOfV,
  kK,
  kV = kK + kKvParts
};
constexpr int kSources = kV + kKvParts;
constexpr std::string_view kSourceNames[] = {"q",     "sinks",    "bias",    "new K",
                                             "new V", "K ranges", "V ranges"};

std::string PartName(const KvTensor& tensor, KvPart part) {
  return absl::StrCat(tensor.name(), static_cast<int>(part));
}

uint8_t SourceOf(std::string_view name) {
  const auto found = std::find(std::begin(kSourceNames), std::end(kSourceNames), name);
  if (found != std::end(kSourceNames)) {
    return static_cast<uint8_t>(found - std::begin(kSourceNames));
  }
  return static_cast<uint8_t>((name[0] == 'K' ? kK : kV) + (name[1] - '0'));
}

// K or V of the query tokens. Where the cache's are rotated they come rotated, in f32.
LogicalTensor NewTokens(const KvTensor& tensor, const KvAttentionOptions& options) {
  const KvShape& shape = tensor.shape();
  LogicalTensor desc;
  desc.type = tensor.rotation() != 0 ? kF32 : options.type;
  desc.dims = Dims{shape.batch, shape.heads, options.query_tokens, shape.head_size};
  return desc;
}

// K or V of the graph: the segments of a cache, and the new tokens.
class Operand {
 public:
  Operand(GraphBuilder& g, const KvTensor& tensor, const KvAttentionOptions& options)
      : g_(g), tensor_(tensor), options_(options) {}

  absl::InlinedVector<Value, 4> Segments(Source new_tokens) {
    absl::InlinedVector<Value, 4> segments;
    if (tensor_.has(KvPart::kSinks)) segments.push_back(Plain(KvPart::kSinks));
    segments.push_back(tensor_.has(KvPart::kScales) ? Quantized() : Plain(KvPart::kCodes));
    if (tensor_.has(KvPart::kWindow)) segments.push_back(Plain(KvPart::kWindow));
    if (options_.new_tokens) {
      const LogicalTensor desc = NewTokens(tensor_, options_);
      segments.push_back(InF32(g_.Input(kSourceNames[new_tokens], desc.type, *desc.dims)));
    }
    return segments;
  }

 private:
  Value Input(KvPart part) {
    const LogicalTensor& desc = tensor_.part(part);
    return g_.Input(PartName(tensor_, part), desc.type, *desc.dims);
  }

  // What the graph declares between ops is not rounded to.
  Value InF32(Value value) {
    return g_.Describe(value).type == kF32 ? value : g_.TypeCast(value, kF32);
  }

  Value Plain(KvPart part) { return InF32(Input(part)); }

  Value Quantized() {
    const Value codes = Input(KvPart::kCodes);
    const Value scales = Input(KvPart::kScales);
    const GraphBuilder::DequantizeOptions options{
        .group_shape = tensor_.GroupShape(),
        .type = kF32,
        .codebook = tensor_.storage().format.codebook_values()};
    if (!tensor_.has(KvPart::kZeroPoints)) return g_.DynamicDequantize(codes, scales, options);
    return g_.DynamicDequantize(codes, scales, Input(KvPart::kZeroPoints), options);
  }

  GraphBuilder& g_;
  const KvTensor& tensor_;
  const KvAttentionOptions& options_;
};

GraphBuilder AttentionGraph(const KvTensor& k, const KvTensor& v, FpMath fpmath,
                            const KvAttentionOptions& options) {
  const KvShape& shape = k.shape();
  GraphBuilder g({.fpmath = fpmath, .apply_to_int = true});
  Value q = g.Input("q", options.type,
                    {shape.batch, options.query_heads, options.query_tokens, shape.head_size});
  if (options.type != kF32) q = g.TypeCast(q, kF32);
  if (k.rotation() != 0) q = g.Hadamard(q, k.rotation());
  const auto ranges = [&](Source source, int64_t segments) {
    return g.Input(kSourceNames[source], kS32,
                   {shape.batch, segments + (options.new_tokens ? 1 : 0), 2});
  };
  const auto [keys, lengths] = g.LoadRangesWithLengths(Operand(g, k, options).Segments(kNewK),
                                                       ranges(kRangesOfK, k.segments()));
  const Value values =
      g.LoadRanges(Operand(g, v, options).Segments(kNewV), ranges(kRangesOfV, v.segments()));
  GraphBuilder::AttentionOptions attention;
  if (options.scale != 0) attention.scale = options.scale;
  if (options.soft_cap != 0) attention.soft_cap = options.soft_cap;
  attention.kv_lengths = lengths;
  // The last query is the last token's, which sees itself.
  attention.bottom_right = true;
  if (options.query_tokens > 1 && !options.sees_all) attention.right_window = 0;
  attention.stats = options.stats;
  if (options.window != 0) attention.left_window = options.window - 1;
  if (!options.bias.empty()) {
    // More columns than this layer has are left out.
    Dims dims = options.bias;
    dims[3] = k.layout().total_slots() + (options.new_tokens ? options.query_tokens : 0);
    attention.bias = g.Input(kSourceNames[kBias], kF32, dims, DenseStrides(options.bias));
  }
  if (options.sinks) attention.sinks = g.Input(kSourceNames[kLogits], kF32, {options.query_heads});
  auto [out, stats] = g.ScaledDotProductAttention(q, keys, values, attention);
  if (v.rotation() != 0) out = g.Hadamard(out, v.rotation());
  if (options.type != kF32) out = g.TypeCast(out, options.type);
  g.Output("out", out);
  if (stats) g.Output("stats", *stats);
  return g;
}

// What rotates new tokens: a store of all of them, from position 0 on.
absl::StatusOr<std::optional<CompiledPartition>> CompileRotation(
    const Engine& engine, const KvTensor& tensor, const KvAttentionOptions& options) {
  if (!options.new_tokens || tensor.rotation() == 0) return std::nullopt;
  const LogicalTensor desc = NewTokens(tensor, options);
  GraphBuilder g;
  const Value x = g.Input("x", options.type, *desc.dims);
  const Value positions = g.Input("positions", kS32, {tensor.shape().batch});
  g.Output("rotated", g.Append(g.Hadamard(x, tensor.rotation()), positions, options.query_tokens,
                               {.type = kF32})
                          .codes);
  return CompileOne(engine, std::move(g), absl::StrCat("rotating ", tensor.name()));
}

// The memory that an execution takes: for the kernels, and behind it arrays for new tokens.
class Room {
 public:
  // rotations: of new tokens of K and V, null where there is none.
  Room(const KvTensor& k, const KvTensor& v, const KvAttentionOptions& options,
       const CompiledPartition& partition, const std::array<const CompiledPartition*, 2>& rotations)
      : kernels_(KvAligned(static_cast<int64_t>(partition.scratch_bytes()))),
        bytes_(static_cast<int64_t>(partition.scratch_bytes())) {
    if (!options.new_tokens) return;
    bytes_ = kernels_ + OfRows(k);
    for (const KvTensor* tensor : {&k, &v}) {
      bytes_ += OfRanges(*tensor);
      const CompiledPartition* const rotation = rotations[tensor == &k ? 0 : 1];
      if (rotation != nullptr) bytes_ += OfTokens(*tensor, options) + OfRotation(*rotation);
    }
  }
  size_t bytes() const { return static_cast<size_t>(bytes_); }
  int64_t kernels() const { return kernels_; }

  static int64_t OfRows(const KvTensor& tensor) {
    return KvAligned(BytesFor(kS32, tensor.shape().batch));
  }
  static int64_t OfRanges(const KvTensor& tensor) {
    return KvAligned(BytesFor(kS32, tensor.shape().batch * (tensor.segments() + 1) * 2));
  }
  static int64_t OfRotation(const CompiledPartition& rotation) {
    return KvAligned(static_cast<int64_t>(rotation.scratch_bytes()));
  }
  static int64_t OfTokens(const KvTensor& tensor, const KvAttentionOptions& options) {
    return KvAligned(NewTokens(tensor, options).memory_bytes());
  }

 private:
  const int64_t kernels_;
  int64_t bytes_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const KvAttention>> KvAttention::Compile(
    const KvCache& cache, const KvAttentionOptions& options) {
  auto attention = std::shared_ptr<KvAttention>(new KvAttention(cache, options));
  for (const KvCache::Group& group : cache.groups_) {
    KVANT_ASSIGN_OR_RETURN(
        CompiledPartition compiled,
        CompileOne(cache.engine_, AttentionGraph(group.k, group.v, cache.options_.fpmath, options),
                   absl::StrCat("attention over ", group.scheme.ToString()),
                   {.require_fused = true}));
    Compiled& made =
        attention->compiled_.emplace_back(Compiled{std::move(compiled), {}, {}, {}, {}});
    KVANT_ASSIGN_OR_RETURN(made.rotate_k, CompileRotation(cache.engine_, group.k, options));
    KVANT_ASSIGN_OR_RETURN(made.rotate_v, CompileRotation(cache.engine_, group.v, options));
    const Partition& partition = made.partition.partition();
    for (size_t i = 0; i < partition.inputs().size(); ++i) {
      made.sources.push_back(SourceOf(partition.input(static_cast<int>(i)).name));
    }
    made.stats_first = options.stats && partition.output(0).name == "stats";
    if (cache.on_host()) continue;
    const Room room(group.k, group.v, options, made.partition, made.rotations());
    KVANT_ASSIGN_OR_RETURN(made.block,
                           KvBlock::Allocate(cache.engine_.shared_memory(), room.bytes()));
  }
  return attention;
}

int64_t KvAttention::scratch_bytes() const {
  int64_t bytes = 0;
  for (const Compiled& compiled : compiled_) {
    bytes += static_cast<int64_t>(compiled.block.bytes().size());
  }
  return bytes;
}

absl::StatusOr<CompiledPartition> KvAttention::compiled(int64_t layer) const {
  KVANT_RETURN_IF_ERROR(cache_.CheckLayer(layer));
  return compiled_[cache_.layers_[layer].group].partition;
}

absl::Status KvAttention::CheckInputs(const KvAttentionInputs& inputs, const Tensor& stats) const {
  const auto check = [](const char* name, ConstTensor given, bool wanted) {
    if ((given.data != nullptr) == wanted) return absl::OkStatus();
    return InvalidArguments(
        wanted ? absl::StrCat("attention with ", name, " is executed without them")
               : absl::StrCat("attention without ", name, " is executed with them"));
  };
  KVANT_RETURN_IF_ERROR(check("sinks", inputs.sinks, options_.sinks));
  KVANT_RETURN_IF_ERROR(check("biases", inputs.bias, !options_.bias.empty()));
  KVANT_RETURN_IF_ERROR(check("keys of new tokens", inputs.k, options_.new_tokens));
  KVANT_RETURN_IF_ERROR(check("values of new tokens", inputs.v, options_.new_tokens));
  KVANT_RETURN_IF_ERROR(check("statistics", stats, options_.stats));
  if (inputs.starts.empty()) return absl::OkStatus();
  if (!options_.new_tokens) {
    return InvalidArguments("attention without new tokens is executed with starts of them");
  }
  const int64_t batch = cache_.options_.batch;
  if (static_cast<int64_t>(inputs.starts.size()) != batch) {
    return InvalidArguments(inputs.starts.size(), " starts of tokens for a batch of ", batch);
  }
  for (int64_t b = 0; b < batch; ++b) {
    if (inputs.starts[b] >= 0 && inputs.starts[b] <= options_.query_tokens) continue;
    return InvalidArguments("batch row ", b, " begins at token ", inputs.starts[b], " of ",
                            options_.query_tokens);
  }
  return absl::OkStatus();
}

bool KvAttention::MayLack(int64_t layer) const {
  const int64_t keep = cache_.groups_[cache_.layers_[layer].group].k.layout().keep();
  return keep > 0 && (options_.window == 0 || Seen() > keep);
}

absl::Status KvAttention::CheckKept(int64_t layer) const {
  if (!MayLack(layer)) return absl::OkStatus();
  const KvCache::Layer& at = cache_.layers_[layer];
  const int64_t keep = cache_.groups_[at.group].k.layout().keep();
  for (int64_t b = 0; b < cache_.options_.batch; ++b) {
    if (at.lengths[b] <= keep) continue;
    return InvalidArguments(
        "layer ", layer, ": of the ", at.lengths[b], " tokens of batch row ", b, " the last ", keep,
        " are kept, and attention of ", options_.query_tokens, " query tokens sees ",
        options_.window == 0 || Seen() > at.lengths[b] ? std::string("all") : absl::StrCat(Seen()));
  }
  return absl::OkStatus();
}

class KvAttention::Arguments {
 public:
  Arguments(const KvAttention& attention, int64_t layer, ConstTensor q,
            const KvAttentionInputs& inputs)
      : cache_(attention.cache_),
        options_(attention.options_),
        at_(cache_.layers_[layer]),
        group_(cache_.groups_[at_.group]),
        compiled_(attention.compiled_[at_.group]),
        inputs_(inputs),
        room_(group_.k, group_.v, options_, compiled_.partition, compiled_.rotations()) {
    sources_[kQ] = q;
    sources_[kLogits] = inputs.sinks;
    sources_[kBias] = inputs.bias;
    for (int i = 0; i < kKvParts; ++i) {
      sources_[kK + i] = PartOf(group_.k, at_.k, i);
      sources_[kV + i] = PartOf(group_.v, at_.v, i);
    }
  }

  size_t scratch_bytes() const { return room_.bytes(); }
  absl::Span<std::byte> own_block() const { return compiled_.block.bytes(); }

  absl::Status Execute(const Stream& stream, absl::Span<const Tensor> outputs,
                       absl::Span<std::byte> block) {
    free_ = block.data() + room_.kernels();
    if (options_.new_tokens) {
      KVANT_RETURN_IF_ERROR(TakeStarts());
      KVANT_ASSIGN_OR_RETURN(sources_[kNewK], New(stream, group_.k, inputs_.k, compiled_.rotate_k));
      KVANT_ASSIGN_OR_RETURN(sources_[kNewV], New(stream, group_.v, inputs_.v, compiled_.rotate_v));
      block = block.first(static_cast<size_t>(room_.kernels()));
    }
    KVANT_ASSIGN_OR_RETURN(sources_[kRangesOfK], Ranges(stream, group_.k, at_.k_ranges));
    KVANT_ASSIGN_OR_RETURN(sources_[kRangesOfV], Ranges(stream, group_.v, at_.v_ranges));
    absl::InlinedVector<ConstTensor, kSources> given;
    for (const uint8_t source : compiled_.sources) given.push_back(sources_[source]);
    const Tensor other_way[] = {outputs.back(), outputs.front()};
    return compiled_.partition.Execute(
        stream, given, compiled_.stats_first ? absl::MakeConstSpan(other_way) : outputs, block);
  }

 private:
  static ConstTensor PartOf(const KvTensor& tensor, const KvPointers& pointers, int i) {
    const auto part = static_cast<KvPart>(i);
    if (!tensor.has(part)) return {};
    return {pointers[i], static_cast<size_t>(tensor.part(part).memory_bytes())};
  }
  int64_t batch() const { return group_.k.shape().batch; }
  std::byte* Take(int64_t bytes) { return std::exchange(free_, free_ + bytes); }

  absl::Status TakeStarts() {
    auto* const starts = reinterpret_cast<int32_t*>(Take(Room::OfRows(group_.k)));
    if (inputs_.starts.empty()) return absl::OkStatus();
    starts_ = starts;
    if (cache_.on_host()) {
      std::copy(inputs_.starts.begin(), inputs_.starts.end(), starts);
      return absl::OkStatus();
    }
    const std::vector<int32_t> given(inputs_.starts.begin(), inputs_.starts.end());
    return cache_.memory().CopyFromHost(starts, given.data(), BytesFor(kS32, batch()));
  }

  // Those of the cache, and behind those of each row that of its new tokens.
  absl::StatusOr<ConstTensor> Ranges(const Stream& stream, const KvTensor& tensor,
                                     const int32_t* kept) {
    const int64_t each = tensor.segments() * 2;
    if (!options_.new_tokens) {
      return ConstTensor{cache_.InEngine(kept),
                         static_cast<size_t>(BytesFor(kS32, batch() * each))};
    }
    CacheRanges ranges;
    ranges.kept = cache_.InEngine(kept);
    ranges.starts = starts_;
    ranges.batch = static_cast<int>(batch());
    ranges.segments = tensor.segments();
    ranges.new_tokens = static_cast<int>(options_.query_tokens);
    ranges.to = reinterpret_cast<int32_t*>(Take(Room::OfRanges(tensor)));
    KVANT_RETURN_IF_ERROR(cache_.kernels_->Run(ranges, stream.native()));
    return ConstTensor{ranges.to, static_cast<size_t>(BytesFor(kS32, batch() * (each + 2)))};
  }

  // Keys or values of new tokens, rotated where the cache's are.
  absl::StatusOr<ConstTensor> New(const Stream& stream, const KvTensor& tensor, ConstTensor given,
                                  const std::optional<CompiledPartition>& rotate) {
    if (!rotate) return given;
    const int64_t bytes = NewTokens(tensor, options_).memory_bytes();
    const Tensor rotated{Take(KvAligned(bytes)), static_cast<size_t>(bytes)};
    const ConstTensor inputs[] = {given,
                                  {cache_.zeros_, static_cast<size_t>(BytesFor(kS32, batch()))}};
    const size_t scratch = rotate->scratch_bytes();
    KVANT_RETURN_IF_ERROR(
        rotate->Execute(stream, inputs, {&rotated, 1}, {Take(Room::OfRotation(*rotate)), scratch}));
    return rotated;
  }

  const KvCache& cache_;
  const KvAttentionOptions& options_;
  const KvCache::Layer& at_;
  const KvCache::Group& group_;
  const Compiled& compiled_;
  const KvAttentionInputs& inputs_;
  const Room room_;
  std::array<ConstTensor, kSources> sources_;
  std::byte* free_ = nullptr;
  const int32_t* starts_ = nullptr;
};

absl::Status KvAttention::Execute(const Stream& stream, int64_t layer, ConstTensor q, Tensor out,
                                  const KvAttentionInputs& inputs, Tensor stats) const {
  KVANT_RETURN_IF_ERROR(cache_.CheckLayer(layer));
  KVANT_RETURN_IF_ERROR(CheckInputs(inputs, stats));
  const Tensor both[] = {out, stats};
  const auto outputs = absl::MakeConstSpan(both).first(options_.stats ? 2 : 1);
  if (!cache_.on_host()) return ExecuteLater(stream, layer, q, outputs, inputs);
  const std::shared_lock<KvLock> lock(cache_.lock_);
  KVANT_RETURN_IF_ERROR(CheckKept(layer));
  Arguments arguments(*this, layer, q, inputs);
  KVANT_ASSIGN_OR_RETURN(const KvScratch::Lease scratch,
                         cache_.scratch_.Take(arguments.scratch_bytes()));
  return arguments.Execute(stream, outputs, scratch.block());
}

absl::Status KvAttention::ExecuteLater(const Stream& stream, int64_t layer, ConstTensor q,
                                       absl::Span<const Tensor> outputs,
                                       const KvAttentionInputs& inputs) const {
  // Executions share a block, and are put onto streams in one order.
  const std::unique_lock<KvLock> lock(cache_.lock_);
  KVANT_ASSIGN_OR_RETURN(const bool captured, cache_.memory().IsCaptured(stream.native()));
  KVANT_RETURN_IF_ERROR(cache_.TakeNews(captured));
  if (MayLack(layer) || !inputs.starts.empty()) {
    if (captured) {
      return InvalidArguments("layer ", layer, ": attention ",
                              inputs.starts.empty() ? "that sees more than the layer keeps"
                                                    : "with starts of new tokens",
                              " on a stream that is captured");
    }
    KVANT_RETURN_IF_ERROR(cache_.Settle());
  }
  KVANT_RETURN_IF_ERROR(CheckKept(layer));
  Arguments arguments(*this, layer, q, inputs);
  return arguments.Execute(stream, outputs, arguments.own_block());
}

}  // namespace kvant
