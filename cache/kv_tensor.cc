#include "kvant/cache/kv_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

// How many tokens are stored at once, where there are as many.
constexpr int64_t kManyTokens = 64;

// The one partition of a graph, fused.
absl::StatusOr<CompiledPartition> CompileOnly(const Engine& engine, GraphBuilder&& builder) {
  KVANT_ASSIGN_OR_RETURN(const Graph graph, std::move(builder).Build());
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
  if (partitions.size() != 1) {
    return absl::InternalError(absl::StrCat(partitions.size(), " partitions to store tokens"));
  }
  return engine.Compile(partitions[0]);
}

int64_t BytesOf(const LogicalTensor& desc) { return desc.dims ? desc.memory_bytes() : 0; }

}  // namespace

int64_t KvTensor::rotation() const {
  return storage_.rotation == KvStorage::kWholeHead ? shape_.head_size : storage_.rotation;
}

double KvTensor::largest() const {
  double most = std::numeric_limits<float>::max();
  for (const LogicalTensor& part : parts_) {
    if (part.dims && part.type == kF16) most = 65504;
  }
  // A rotated channel is a sum over its block / sqrt(block).
  return rotation() == 0 ? most : most / std::sqrt(static_cast<double>(rotation()));
}

const LogicalTensor& KvTensor::part(KvPart part) const {
  static const LogicalTensor kNone;
  const auto index = static_cast<size_t>(part);
  return index < parts_.size() ? parts_[index] : kNone;
}

Dims KvTensor::GroupShape() const {
  // KvStorage::Check has found that groups divide these.
  const int64_t slots = layout_.slots(KvSegmentKind::kMain);
  Dims group =
      storage_.format.GroupShape({shape_.batch, shape_.heads, slots, shape_.head_size}).value();
  if (storage_.static_scales()) group[0] = shape_.batch;
  return group;
}

KvTensor::KvTensor(std::string name, const KvStorage& storage, const KvShape& shape,
                   const KvLayout& layout)
    : name_(std::move(name)), storage_(storage), shape_(shape), layout_(layout) {
  const auto describe = [this](KvPart part, DataType type, Dims dims) {
    LogicalTensor& desc = parts_[static_cast<int>(part)];
    desc.type = type;
    desc.strides = DenseStrides(dims);
    desc.dims = std::move(dims);
  };
  const auto tokens = [this](int64_t slots) {
    return Dims{shape_.batch, shape_.heads, slots, shape_.head_size};
  };
  const int64_t main = layout_.slots(KvSegmentKind::kMain);
  describe(KvPart::kCodes, storage_.format.type, tokens(main));
  if (!storage_.format.quantized()) return;
  Dims groups = tokens(main);
  const Dims group = GroupShape();
  for (size_t d = 0; d < groups.size(); ++d) groups[d] /= group[d];
  describe(KvPart::kScales, storage_.scale_type(), groups);
  if (const DataType type = storage_.format.ZeroPointType(storage_.scale_type()); type != kUndef) {
    describe(KvPart::kZeroPoints, type, groups);
  }
  if (layout_.sinks() > 0) describe(KvPart::kSinks, storage_.window_type, tokens(layout_.sinks()));
  if (layout_.residual() > 0) {
    describe(KvPart::kWindow, storage_.window_type, tokens(layout_.slots(KvSegmentKind::kWindow)));
  }
}

int64_t KvTensor::Pieces() const {
  int64_t most = std::min(kManyTokens, layout_.total_slots());
  if (layout_.residual() > 0) most = std::min(most, layout_.residual());
  return std::max<int64_t>(1, most);
}

absl::StatusOr<KvTensor::Op> KvTensor::CompileAppend(const Engine& engine, KvPart to, DataType src,
                                                     int64_t tokens) const {
  GraphBuilder g;
  Value x = g.Input("x", src, {shape_.batch, shape_.heads, tokens, shape_.head_size});
  // What is in the window has been rotated.
  const bool rotates = rotation() != 0 && !(to == KvPart::kCodes && has(KvPart::kWindow));
  if (rotates) x = g.Hadamard(x, rotation());
  const Value positions = g.Input("positions", kS32, {shape_.batch});
  const LogicalTensor& dst = part(to);
  const int64_t capacity = (*dst.dims)[2];
  if (to != KvPart::kCodes || !storage_.format.quantized()) {
    g.Output("dst", g.Append(x, positions, capacity, {.type = dst.type}).codes);
  } else if (storage_.static_scales()) {
    const Value scales = g.Input("scales", part(KvPart::kScales).type, *part(KvPart::kScales).dims);
    g.Output("dst", g.Append(x, positions, capacity, scales, std::nullopt,
                             {.group_shape = GroupShape(), .type = dst.type}));
  } else {
    const GraphBuilder::QuantizeOptions options{.group_shape = GroupShape(),
                                                .type = dst.type,
                                                .scale_type = part(KvPart::kScales).type,
                                                .zero_point_type = part(KvPart::kZeroPoints).type,
                                                .codebook = storage_.format.codebook_values(),
                                                .ggml_formula = storage_.format.ggml_formula};
    const GraphBuilder::Quantized stored = g.Append(x, positions, capacity, options);
    g.Output("dst", stored.codes);
    g.Output("scales", stored.scales);
    if (stored.zero_points) g.Output("zero_points", *stored.zero_points);
  }
  KVANT_ASSIGN_OR_RETURN(CompiledPartition compiled, CompileOnly(engine, std::move(g)));
  return Op{tokens, std::move(compiled)};
}

absl::Status KvTensor::Compile(const Engine& engine) {
  const DataType main_source = layout_.residual() > 0 ? storage_.window_type : kF32;
  const auto append = [&](KvPart part, DataType src, Ops* ops) {
    KVANT_ASSIGN_OR_RETURN(ops->one, CompileAppend(engine, part, src, 1));
    ops->many = ops->one;
    if ((*this->part(part).dims)[2] < Pieces()) return absl::OkStatus();
    KVANT_ASSIGN_OR_RETURN(ops->many, CompileAppend(engine, part, src, Pieces()));
    return absl::OkStatus();
  };
  if (has(KvPart::kSinks)) KVANT_RETURN_IF_ERROR(append(KvPart::kSinks, kF32, &sinks_));
  if (has(KvPart::kWindow)) KVANT_RETURN_IF_ERROR(append(KvPart::kWindow, kF32, &window_));
  if (!layout_.bulk()) return append(KvPart::kCodes, main_source, &main_);
  if (MostLeaving() == 0) return absl::OkStatus();
  KVANT_ASSIGN_OR_RETURN(bulk_,
                         CompileAppend(engine, KvPart::kCodes, main_source, layout_.residual()));
  return absl::OkStatus();
}

int64_t KvTensor::MostLeaving() const {
  if (!layout_.bulk()) return Pieces();
  // Short sequences never fill the window.
  const int64_t most = layout_.residual();
  return layout_.slots(KvSegmentKind::kMain) < most ? 0 : most;
}

size_t KvTensor::working_bytes() const {
  const int64_t row = shape_.batch * shape_.heads * shape_.head_size;
  return KvAligned(BytesFor(kF32, row * Pieces())) +
         KvAligned(BytesFor(storage_.window_type, row * MostLeaving())) +
         KvAligned(BytesFor(kS32, 3 * shape_.batch));
}

// One call of Store.
class KvTensor::Writer {
 public:
  Writer(const KvTensor& tensor, const Stream& stream, const Source& src,
         absl::Span<const int64_t> lengths, absl::Span<const int64_t> counts,
         const KvPointers& layer, std::byte* working)
      : t_(tensor),
        layout_(tensor.layout_),
        stream_(stream),
        src_(src),
        lengths_(lengths),
        counts_(counts),
        layer_(layer) {
    const int64_t row = t_.shape_.batch * t_.shape_.heads * t_.shape_.head_size;
    const size_t piece = KvAligned(BytesFor(kF32, row * t_.Pieces()));
    arriving_ = working;
    leaving_ = working + piece;
    auto* positions = reinterpret_cast<int32_t*>(
        leaving_ + KvAligned(BytesFor(t_.storage_.window_type, row * t_.MostLeaving())));
    sinks_at_ = positions;
    rest_at_ = positions + t_.shape_.batch;
    leaving_at_ = positions + 2 * t_.shape_.batch;
  }

  absl::Status Run() {
    int64_t done = 0;
    const int64_t most = *std::max_element(counts_.begin(), counts_.end());
    while (done < most) {
      const int64_t tokens = NextTokens(done);
      KVANT_RETURN_IF_ERROR(StorePiece(done, tokens));
      done += tokens;
    }
    return absl::OkStatus();
  }

 private:
  int64_t batch() const { return t_.shape_.batch; }
  bool Active(int64_t row, int64_t done) const { return done < counts_[row]; }

  // How many tokens are stored next: many if every row that gets any stores them alike, else one.
  int64_t NextTokens(int64_t done) const {
    const int64_t many = t_.Pieces();
    for (int64_t b = 0; b < batch(); ++b) {
      if (Active(b, done) && std::min(counts_[b] - done, Room(lengths_[b] + done)) < many) return 1;
    }
    return many;
  }

  // How many tokens behind `length` are stored like the next one.
  int64_t Room(int64_t length) const {
    if (length < layout_.sinks()) return layout_.sinks() - length;
    const int64_t behind = layout_.Behind(length), residual = layout_.residual();
    if (residual == 0) return layout_.total_slots();
    const int64_t window = layout_.slots(KvSegmentKind::kWindow);
    const int64_t ring = window - behind % window;
    if (layout_.bulk()) return std::min(ring, residual - behind % residual);
    return behind < layout_.window() ? std::min(ring, layout_.window() - behind) : ring;
  }

  absl::Status StorePiece(int64_t done, int64_t tokens) {
    bool any_sinks = false, any_rest = false, any_leaving = false;
    for (int64_t b = 0; b < batch(); ++b) {
      sinks_at_[b] = rest_at_[b] = leaving_at_[b] = -1;
      if (!Active(b, done)) continue;
      const int64_t length = lengths_[b] + done, behind = layout_.Behind(length);
      if (length < layout_.sinks()) {
        sinks_at_[b] = static_cast<int32_t>(length);
        any_sinks = true;
        continue;
      }
      any_rest = true;
      const int64_t residual = layout_.residual();
      rest_at_[b] = static_cast<int32_t>(
          residual == 0 ? behind : behind % layout_.slots(KvSegmentKind::kWindow));
      const int64_t main = layout_.MainOf(behind);
      if (residual == 0 || layout_.MainOf(behind + tokens) == main) continue;
      leaving_at_[b] = static_cast<int32_t>(main);
      any_leaving = true;
    }
    Load(done, tokens);
    // They leave first, as new tokens take their slots.
    if (any_leaving) {
      KVANT_RETURN_IF_ERROR(Leave(layout_.bulk() ? t_.bulk_ : t_.main_.Of(tokens)));
    }
    if (any_sinks) {
      KVANT_RETURN_IF_ERROR(
          Execute(t_.sinks_.Of(tokens), KvPart::kSinks, kF32, arriving_, sinks_at_));
    }
    if (any_rest && layout_.residual() > 0) {
      KVANT_RETURN_IF_ERROR(
          Execute(t_.window_.Of(tokens), KvPart::kWindow, kF32, arriving_, rest_at_));
    } else if (any_rest) {
      KVANT_RETURN_IF_ERROR(
          Execute(t_.main_.Of(tokens), KvPart::kCodes, kF32, arriving_, rest_at_));
    }
    return absl::OkStatus();
  }

  // arriving_[b, h, t, d] = src[b, h, done + t, d]. Rows that get no token are skipped.
  void Load(int64_t done, int64_t tokens) {
    const Dims strides = src_.desc->StridesOrDense();
    const int64_t channels = t_.shape_.head_size;
    const DataType type = src_.desc->type;
    auto* out = reinterpret_cast<float*>(arriving_);
    for (int64_t b = 0; b < batch(); ++b) {
      for (int64_t h = 0; h < t_.shape_.heads; ++h) {
        for (int64_t i = 0; i < tokens; ++i, out += channels) {
          if (!Active(b, done)) continue;
          const int64_t index = b * strides[0] + h * strides[1] + (done + i) * strides[2];
          LoadChannels(type, index, strides[3], out);
        }
      }
    }
  }

  void LoadChannels(DataType type, int64_t index, int64_t stride, float* out) const {
    const int64_t channels = t_.shape_.head_size;
    if (type == kF32 && stride == 1) {
      std::memcpy(out, static_cast<const float*>(src_.data) + index, channels * sizeof(float));
    } else if (type == kF32) {
      const float* in = static_cast<const float*>(src_.data) + index;
      for (int64_t d = 0; d < channels; ++d) out[d] = in[d * stride];
    } else {
      const uint16_t* in = static_cast<const uint16_t*>(src_.data) + index;
      const auto convert = type == kF16 ? F16ToF32 : BF16ToF32;
      for (int64_t d = 0; d < channels; ++d) out[d] = convert(in[d * stride]);
    }
  }

  // Moves op.tokens tokens, from leaving_at_ on, from the window to the main segment.
  absl::Status Leave(const Op& op) {
    const int64_t window = layout_.slots(KvSegmentKind::kWindow);
    const int64_t token_bytes = BytesFor(t_.storage_.window_type, t_.shape_.head_size);
    const int64_t heads = t_.shape_.heads;
    const std::byte* ring = layer_[static_cast<int>(KvPart::kWindow)];
    for (int64_t b = 0; b < batch(); ++b) {
      if (leaving_at_[b] < 0) continue;
      const int64_t first = leaving_at_[b] % window;
      const int64_t head = std::min(op.tokens, window - first);
      for (int64_t h = 0; h < heads; ++h) {
        const std::byte* from = ring + (b * heads + h) * window * token_bytes;
        std::byte* to = leaving_ + (b * heads + h) * op.tokens * token_bytes;
        std::memcpy(to, from + first * token_bytes, head * token_bytes);
        std::memcpy(to + head * token_bytes, from, (op.tokens - head) * token_bytes);
      }
    }
    return Execute(op, KvPart::kCodes, t_.storage_.window_type, leaving_, leaving_at_);
  }

  absl::Status Execute(const Op& op, KvPart to, DataType type, const std::byte* values,
                       const int32_t* positions) {
    const int64_t elements = batch() * t_.shape_.heads * op.tokens * t_.shape_.head_size;
    const auto memory = [this](KvPart part) {
      return Tensor{layer_[static_cast<int>(part)], static_cast<size_t>(BytesOf(t_.part(part)))};
    };
    absl::InlinedVector<ConstTensor, 3> inputs{
        {values, static_cast<size_t>(BytesFor(type, elements))},
        {positions, batch() * sizeof(int32_t)}};
    absl::InlinedVector<Tensor, 3> outputs{memory(to)};
    if (to == KvPart::kCodes && t_.has(KvPart::kScales)) {
      if (t_.storage_.static_scales()) {
        inputs.push_back(memory(KvPart::kScales));
      } else {
        outputs.push_back(memory(KvPart::kScales));
        if (t_.has(KvPart::kZeroPoints)) outputs.push_back(memory(KvPart::kZeroPoints));
      }
    }
    return op.compiled.Execute(stream_, inputs, outputs);
  }

  const KvTensor& t_;
  const KvLayout& layout_;
  const Stream& stream_;
  const Source& src_;
  const absl::Span<const int64_t> lengths_, counts_;
  const KvPointers& layer_;
  std::byte *arriving_, *leaving_;
  int32_t *sinks_at_, *rest_at_, *leaving_at_;
};

absl::Status KvTensor::Store(const Stream& stream, const Source& src,
                             absl::Span<const int64_t> lengths, absl::Span<const int64_t> counts,
                             const KvPointers& layer, std::byte* working) const {
  return Writer(*this, stream, src, lengths, counts, layer, working).Run();
}

bool KvTensor::EndsAtByte(const Extent& extent) {
  return extent.stride * BitsOf(extent.type) % 8 == 0;
}

KvTensor::Extent KvTensor::ExtentOf(KvPart part, int64_t tokens) const {
  const LogicalTensor& desc = this->part(part);
  if (!desc.dims || (part == KvPart::kScales && storage_.static_scales())) return {};
  const Dims& dims = *desc.dims;
  const auto ranges = layout_.Ranges(tokens);
  int64_t slots = dims[2];  // of the ring, any may be in use
  if (part == KvPart::kSinks) slots = ranges[static_cast<int>(KvSegmentKind::kSinks)].tokens;
  if (part == KvPart::kCodes) slots = ranges[static_cast<int>(KvSegmentKind::kMain)].tokens;
  if (part == KvPart::kScales || part == KvPart::kZeroPoints) {
    slots = ranges[static_cast<int>(KvSegmentKind::kMain)].tokens / *storage_.format.group_tokens();
  }
  return {desc.type, slots * dims[3], dims[2] * dims[3], dims[1]};
}

int64_t KvTensor::UsedBytes(absl::Span<const int64_t> lengths) const {
  int64_t bytes = 0;
  for (int i = 0; i < kKvParts; ++i) {
    const KvPart part = static_cast<KvPart>(i);
    if (!has(part)) continue;
    // Rows may share a byte, so only their sum is rounded up to whole bytes.
    int64_t elements = 0;
    for (const int64_t tokens : lengths) {
      const Extent extent = ExtentOf(part, tokens);
      const int64_t in_window =
          layout_.Ranges(tokens)[static_cast<int>(KvSegmentKind::kWindow)].tokens;
      elements +=
          extent.heads * (part == KvPart::kWindow ? in_window * shape_.head_size : extent.used);
    }
    bytes += BytesFor(this->part(part).type, elements);
  }
  return bytes;
}

void KvTensor::CopyRow(const KvPointers& layer, int64_t from, int64_t to, int64_t tokens) const {
  for (int i = 0; i < kKvParts; ++i) {
    const Extent extent = ExtentOf(static_cast<KvPart>(i), tokens);
    for (int64_t h = 0; h < extent.heads; ++h) {
      const int64_t source = (from * extent.heads + h) * extent.stride;
      const int64_t target = (to * extent.heads + h) * extent.stride;
      if (EndsAtByte(extent)) {
        std::memcpy(layer[i] + BytesFor(extent.type, target),
                    layer[i] + BytesFor(extent.type, source), BytesFor(extent.type, extent.used));
        continue;
      }
      for (int64_t e = 0; e < extent.used; ++e) {
        StoreElement(extent.type, layer[i], target + e,
                     LoadElement(extent.type, layer[i], source + e));
      }
    }
  }
}

void KvTensor::SwapRows(const KvPointers& layer, int64_t a, int64_t b, int64_t tokens) const {
  for (int i = 0; i < kKvParts; ++i) {
    const Extent extent = ExtentOf(static_cast<KvPart>(i), tokens);
    for (int64_t h = 0; h < extent.heads; ++h) {
      const int64_t first = (a * extent.heads + h) * extent.stride;
      const int64_t second = (b * extent.heads + h) * extent.stride;
      if (EndsAtByte(extent)) {
        std::byte* const begin = layer[i] + BytesFor(extent.type, first);
        std::swap_ranges(begin, begin + BytesFor(extent.type, extent.used),
                         layer[i] + BytesFor(extent.type, second));
        continue;
      }
      for (int64_t e = 0; e < extent.used; ++e) {
        const double kept = LoadElement(extent.type, layer[i], first + e);
        StoreElement(extent.type, layer[i], first + e,
                     LoadElement(extent.type, layer[i], second + e));
        StoreElement(extent.type, layer[i], second + e, kept);
      }
    }
  }
}

}  // namespace kvant
