#include "kvant/cache/kv_tensor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/cache/compile_one.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// How many tokens are stored at once, where there are as many.
constexpr int64_t kManyTokens = 64;

}  // namespace

int64_t KvTensor::rotation() const {
  return storage_.rotation == KvStorage::kWholeHead ? shape_.head_size : storage_.rotation;
}

double KvTensor::largest() const {
  double most = std::numeric_limits<float>::max();
  // A code times its scale is up to the span of a group, before its zero point is subtracted.
  if (storage_.format.zero_points == NumberFormat::ZeroPoints::kReal) most /= 2;
  for (const LogicalTensor& part : parts_) {
    if (!part.dims) continue;
    if (part.type == kF16) most = std::min(most, 65504.0);
    if (part.type == kBF16) most = std::min(most, 0x1.fep127);
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
                             {.group_shape = GroupShape(),
                              .type = dst.type,
                              .codebook = storage_.format.codebook_values()}));
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
  Op op;
  op.tokens = tokens;
  KVANT_ASSIGN_OR_RETURN(
      op.compiled, CompileOne(engine, std::move(g), absl::StrCat("storing tokens of ", name_)));
  if (engine.memory().asynchronous() && op.compiled.scratch_bytes() > 0) {
    KVANT_ASSIGN_OR_RETURN(KvBlock block,
                           KvBlock::Allocate(engine.shared_memory(), op.compiled.scratch_bytes()));
    op.scratch = std::make_shared<const KvBlock>(std::move(block));
  }
  return op;
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

int64_t KvTensor::scratch_bytes() const {
  const auto of = [](const Op& op) {
    return op.scratch == nullptr ? 0 : static_cast<int64_t>(op.scratch->bytes().size());
  };
  int64_t bytes = of(bulk_);
  for (const Ops* ops : {&sinks_, &main_, &window_}) {
    bytes += of(ops->one) + (ops->many.scratch == ops->one.scratch ? 0 : of(ops->many));
  }
  return bytes;
}

size_t KvTensor::working_bytes() const {
  const int64_t row = shape_.batch * shape_.heads * shape_.head_size;
  return KvAligned(BytesFor(kF32, row * Pieces())) +
         KvAligned(BytesFor(storage_.window_type, row * MostLeaving()));
}

}  // namespace kvant
