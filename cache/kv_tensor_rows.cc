// Whole sequences: copied, exchanged, counted.
#include <algorithm>

#include "kvant/cache/kv_tensor.h"
#include "kvant/graph/status.h"

namespace kvant {
KvTensor::Run KvTensor::RunOf(KvPart part, int64_t tokens, const KvKept& kept) const {
  const LogicalTensor& desc = this->part(part);
  if (!desc.dims || (part == KvPart::kScales && storage_.static_scales())) return {};
  const int64_t slots = (*desc.dims)[2], behind = layout_.Behind(tokens);
  const int64_t main = layout_.MainOf(behind);
  switch (part) {
    case KvPart::kSinks:
      return {slots, 0, tokens - behind};
    case KvPart::kWindow:
      return {slots, kept.window, behind};
    case KvPart::kCodes:
      return {slots, kept.main, main};
    case KvPart::kScales:
    case KvPart::kZeroPoints: {
      const int64_t group = *storage_.format.group_tokens();
      return {slots, kept.main / group, main / group};
    }
  }
  return {};
}

int64_t KvTensor::UsedBytes(absl::Span<const int32_t> lengths) const {
  int64_t bytes = 0;
  for (int i = 0; i < kKvParts; ++i) {
    const KvPart part = static_cast<KvPart>(i);
    if (!has(part)) continue;
    const Dims& dims = *this->part(part).dims;
    // Rows may share a byte, so only their sum is rounded up to whole bytes.
    int64_t elements = 0;
    for (const int32_t tokens : lengths) {
      KvKept kept;
      layout_.Lose(tokens, kept);
      const Run run = RunOf(part, tokens, kept);
      const int64_t in_window =
          layout_.Ranges(tokens)[static_cast<int>(KvSegmentKind::kWindow)].tokens;
      elements += dims[1] * dims[3] * (part == KvPart::kWindow ? in_window : run.to - run.from);
    }
    bytes += BytesFor(this->part(part).type, elements);
  }
  return bytes;
}

absl::Status KvTensor::CopyRow(const KvMover& mover, const KvPointers& from, int64_t from_row,
                               const KvTensor& target, const KvPointers& to, int64_t to_row,
                               int64_t tokens, KvKept& kept) const {
  target.layout_.Lose(tokens, kept);
  for (int i = 0; i < kKvParts; ++i) {
    const auto part = static_cast<KvPart>(i);
    const Run have = RunOf(part, tokens, kept), want = target.RunOf(part, tokens, kept);
    if (have.slots == 0) continue;
    const LogicalTensor& desc = parts_[i];
    const int64_t heads = (*desc.dims)[1], each = (*desc.dims)[3];
    const int64_t from_pitch = have.slots * each, to_pitch = want.slots * each;
    for (int64_t u = have.from; u < have.to;) {
      // Until one of the rings ends.
      const int64_t source = u % have.slots, place = u % want.slots;
      const int64_t run = std::min({have.to - u, have.slots - source, want.slots - place});
      KVANT_RETURN_IF_ERROR(mover.Copy(
          {desc.type, from[i], from_row * heads * from_pitch + source * each, from_pitch},
          {desc.type, to[i], to_row * heads * to_pitch + place * each, to_pitch}, heads,
          run * each));
      u += run;
    }
  }
  return absl::OkStatus();
}

absl::Status KvTensor::SwapRows(const KvMover& mover, const KvPointers& layer, int64_t a, int64_t b,
                                int64_t tokens) const {
  for (int i = 0; i < kKvParts; ++i) {
    const Run run = RunOf(static_cast<KvPart>(i), tokens, {});
    if (run.slots == 0) continue;
    const LogicalTensor& desc = parts_[i];
    const int64_t heads = (*desc.dims)[1], each = (*desc.dims)[3], pitch = run.slots * each;
    KVANT_RETURN_IF_ERROR(mover.Exchange({desc.type, layer[i], a * heads * pitch, pitch},
                                         {desc.type, layer[i], b * heads * pitch, pitch}, heads,
                                         std::min(run.to, run.slots) * each));
  }
  return absl::OkStatus();
}

}  // namespace kvant
