#include "kvant/cache/kv_attention.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <shared_mutex>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

// What may be an input of the graph, and its name; a part of K or V follows as K0, K1, ...
enum Source : uint8_t { kQ, kLogits, kRangesOfK, kRangesOfV, kK, kV = kK + kKvParts };
constexpr int kSources = kV + kKvParts;
constexpr std::string_view kSourceNames[] = {"q", "sinks", "K ranges", "V ranges"};

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

// K or V of the graph: the segments of a cache.
class Operand {
 public:
  Operand(GraphBuilder& g, const KvTensor& tensor) : g_(g), tensor_(tensor) {}

  absl::InlinedVector<Value, 3> Segments() {
    absl::InlinedVector<Value, 3> segments;
    if (tensor_.has(KvPart::kSinks)) segments.push_back(Plain(KvPart::kSinks));
    segments.push_back(tensor_.has(KvPart::kScales) ? Quantized() : Plain(KvPart::kCodes));
    if (tensor_.has(KvPart::kWindow)) segments.push_back(Plain(KvPart::kWindow));
    return segments;
  }

 private:
  Value Input(KvPart part) {
    const LogicalTensor& desc = tensor_.part(part);
    return g_.Input(PartName(tensor_, part), desc.type, *desc.dims);
  }

  // In f32: what the graph declares between ops is not rounded to.
  Value Plain(KvPart part) {
    const Value value = Input(part);
    return tensor_.part(part).type == kF32 ? value : g_.TypeCast(value, kF32);
  }

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
};

size_t MemoryOf(const KvTensor& tensor, KvPart part) {
  return static_cast<size_t>(tensor.part(part).memory_bytes());
}

absl::StatusOr<Graph> AttentionGraph(const KvTensor& k, const KvTensor& v,
                                     const KvAttentionOptions& options) {
  const KvShape& shape = k.shape();
  GraphBuilder g;
  Value q = g.Input("q", options.type,
                    {shape.batch, options.query_heads, options.query_tokens, shape.head_size});
  if (options.type != kF32) q = g.TypeCast(q, kF32);
  if (k.rotation() != 0) q = g.Hadamard(q, k.rotation());
  const auto ranges = [&](Source source, int64_t segments) {
    return g.Input(kSourceNames[source], kS32, {shape.batch, segments, 2});
  };
  const auto [keys, lengths] =
      g.LoadRangesWithLengths(Operand(g, k).Segments(), ranges(kRangesOfK, k.segments()));
  const Value values = g.LoadRanges(Operand(g, v).Segments(), ranges(kRangesOfV, v.segments()));
  GraphBuilder::AttentionOptions attention;
  if (options.scale != 0) attention.scale = options.scale;
  if (options.soft_cap != 0) attention.soft_cap = options.soft_cap;
  attention.kv_lengths = lengths;
  // The last query is the last token's, which sees itself.
  attention.bottom_right = true;
  if (options.query_tokens > 1) attention.right_window = 0;
  if (options.window != 0) attention.left_window = options.window - 1;
  if (options.sinks) attention.sinks = g.Input(kSourceNames[kLogits], kF32, {options.query_heads});
  Value out = g.ScaledDotProductAttention(q, keys, values, attention).first;
  if (v.rotation() != 0) out = g.Hadamard(out, v.rotation());
  if (options.type != kF32) out = g.TypeCast(out, options.type);
  g.Output("out", out);
  return std::move(g).Build();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const KvAttention>> KvAttention::Compile(
    const KvCache& cache, const KvAttentionOptions& options) {
  auto attention = std::shared_ptr<KvAttention>(new KvAttention(cache, options));
  for (const KvCache::Group& group : cache.groups_) {
    KVANT_ASSIGN_OR_RETURN(const Graph graph, AttentionGraph(group.k, group.v, options));
    KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
    if (partitions.size() != 1) {
      return absl::InternalError(absl::StrCat("attention over ", group.scheme.ToString(), " is ",
                                              partitions.size(), " partitions"));
    }
    KVANT_ASSIGN_OR_RETURN(CompiledPartition compiled,
                           cache.engine_.Compile(partitions[0], {.require_fused = true}));
    Compiled& made = attention->compiled_.emplace_back(Compiled{std::move(compiled), {}});
    const Partition& partition = made.partition.partition();
    for (size_t i = 0; i < partition.inputs().size(); ++i) {
      made.sources.push_back(SourceOf(partition.input(static_cast<int>(i)).name));
    }
  }
  return attention;
}

absl::StatusOr<CompiledPartition> KvAttention::compiled(int64_t layer) const {
  KVANT_RETURN_IF_ERROR(cache_.CheckLayer(layer));
  return compiled_[cache_.layers_[layer].group].partition;
}

absl::Status KvAttention::Execute(const Stream& stream, int64_t layer, ConstTensor q, Tensor out,
                                  ConstTensor sinks) const {
  KVANT_RETURN_IF_ERROR(cache_.CheckLayer(layer));
  if ((sinks.data != nullptr) != options_.sinks) {
    return MakeError(ErrorKind::kInvalidArguments,
                     options_.sinks ? "attention with sinks is executed without them"
                                    : "attention without sinks is executed with them");
  }
  const std::shared_lock<KvLock> lock(cache_.lock_);
  const KvCache::Layer& at = cache_.layers_[layer];
  const KvCache::Group& group = cache_.groups_[at.group];
  const int64_t batch = group.k.shape().batch;
  std::array<ConstTensor, kSources> sources;
  sources[kQ] = q;
  sources[kLogits] = sinks;
  const int64_t of_k = batch * group.k.segments() * 2, of_v = batch * group.v.segments() * 2;
  sources[kRangesOfK] = {at.k_ranges, of_k * sizeof(int32_t)};
  sources[kRangesOfV] = {at.v_ranges, of_v * sizeof(int32_t)};
  for (int i = 0; i < kKvParts; ++i) {
    const KvPart part = static_cast<KvPart>(i);
    if (group.k.has(part)) sources[kK + i] = {at.k[i], MemoryOf(group.k, part)};
    if (group.v.has(part)) sources[kV + i] = {at.v[i], MemoryOf(group.v, part)};
  }
  const Compiled& compiled = compiled_[at.group];
  absl::InlinedVector<ConstTensor, kSources> inputs;
  for (const uint8_t source : compiled.sources) inputs.push_back(sources[source]);
  KVANT_ASSIGN_OR_RETURN(const KvScratch::Lease scratch,
                         cache_.scratch_.Take(compiled.partition.scratch_bytes()));
  return compiled.partition.Execute(stream, inputs, {&out, 1}, scratch.block());
}

}  // namespace kvant
