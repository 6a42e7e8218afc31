// What a KvCache keeps of sequences as bytes, for another cache.
#include <algorithm>
#include <mutex>
#include <tuple>
#include <vector>

#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// A sequence, with room for its tokens and no others: the parts of K, then those of V.
struct SavedRow {
  KvTensor k, v;
  KvPointers k_at{}, v_at{};
  int64_t end = 0;
};

// In `memory`, from `at` on; null: it is only counted.
SavedRow SavedRowOf(const CacheScheme& scheme, KvCacheOptions options, int64_t keep, int64_t tokens,
                    std::byte* memory, int64_t at) {
  options.capacity = std::max<int64_t>(tokens, 1);
  options.rollback = 0;
  const auto [k, v] = KvLayoutsOf(scheme, options, keep);
  SavedRow row{KvTensor("K", scheme.k, {1, options.heads, options.head_size}, k),
               KvTensor("V", scheme.v, {1, options.heads, options.value_size()}, v)};
  row.end = at;
  const auto place = [&](const KvTensor& tensor, KvPointers& pointers) {
    for (int i = 0; i < kKvParts; ++i) {
      const auto part = static_cast<KvPart>(i);
      if (!tensor.has(part)) continue;
      // Static ones are of all sequences, and every cache has its own.
      if (part == KvPart::kScales && tensor.storage().static_scales()) continue;
      if (memory != nullptr) pointers[i] = memory + row.end;
      row.end += KvAligned(tensor.part(part).memory_bytes());
    }
  };
  if (tokens == 0) return row;
  place(row.k, row.k_at);
  place(row.v, row.v_at);
  return row;
}

}  // namespace

absl::StatusOr<int64_t> KvCache::SavedBytes(int64_t index,
                                            absl::Span<const int64_t> lengths) const {
  KVANT_RETURN_IF_ERROR(CheckLayer(index));
  if (static_cast<int64_t>(lengths.size()) != options_.batch) {
    return InvalidArguments(lengths.size(), " lengths for a batch of ", options_.batch);
  }
  const Group& group = groups_[layers_[index].group];
  int64_t bytes = 0;
  for (size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] < 0 || lengths[b] > options_.capacity) {
      return InvalidArguments("layer ", index, ": batch row ", b, " of ", lengths[b],
                              " tokens, where the capacity is ", options_.capacity);
    }
    bytes = SavedRowOf(group.scheme, options_, group.keep, lengths[b], nullptr, bytes).end;
  }
  return bytes;
}

absl::Status KvCache::CheckSaved(const Stream& stream, int64_t index,
                                 absl::Span<const int64_t> lengths, ConstTensor bytes) const {
  if (stream.engine() != engine_.identity()) return InvalidArguments("a stream of another engine");
  KVANT_ASSIGN_OR_RETURN(const bool captured, memory().IsCaptured(stream.native()));
  if (captured) {
    return InvalidArguments("layer ", index, " saved or loaded on a stream that is captured");
  }
  KVANT_ASSIGN_OR_RETURN(const int64_t wanted, SavedBytes(index, lengths));
  if (static_cast<int64_t>(bytes.bytes) != wanted || (bytes.data == nullptr && wanted > 0)) {
    return InvalidArguments("layer ", index, ": its sequences take ", wanted, " bytes, but ",
                            bytes.data == nullptr ? 0 : bytes.bytes, " are given");
  }
  const void* const data[] = {bytes.data};
  const auto found = memory().FindUnreachable(data);
  if (!found) return absl::OkStatus();
  return InvalidArguments("layer ", index, ": what it is saved as ", found->why);
}

absl::Status KvCache::Save(const Stream& stream, int64_t index, Tensor to) const {
  KVANT_RETURN_IF_ERROR(CheckLayer(index));
  const KvReadLock lock(lock_, /*with_readers=*/on_host());
  KVANT_RETURN_IF_ERROR(Settle());
  const Layer& layer = layers_[index];
  const Group& group = groups_[layer.group];
  const std::vector<int64_t> lengths(layer.lengths, layer.lengths + options_.batch);
  KVANT_RETURN_IF_ERROR(CheckSaved(stream, index, lengths, to));
  const KvMover mover(*kernels_, memory(), stream);
  int64_t at = 0;
  for (int64_t b = 0; b < options_.batch; ++b) {
    const SavedRow row = SavedRowOf(group.scheme, options_, group.keep, lengths[b],
                                    static_cast<std::byte*>(to.data), at);
    at = row.end;
    if (lengths[b] == 0) continue;
    for (const auto& [from, from_at, saved, saved_at] :
         {std::tuple(&group.k, &layer.k, &row.k, &row.k_at),
          std::tuple(&group.v, &layer.v, &row.v, &row.v_at)}) {
      KvKept kept = from->layout().Needed(lengths[b]);
      KVANT_RETURN_IF_ERROR(
          from->CopyRow(mover, *from_at, b, *saved, *saved_at, 0, lengths[b], kept));
    }
  }
  return absl::OkStatus();
}

absl::Status KvCache::Load(const Stream& stream, int64_t index, absl::Span<const int64_t> lengths,
                           ConstTensor from) {
  KVANT_RETURN_IF_ERROR(CheckLayer(index));
  const std::unique_lock<KvLock> lock(lock_);
  KVANT_RETURN_IF_ERROR(Settle());
  KVANT_RETURN_IF_ERROR(CheckSaved(stream, index, lengths, from));
  absl::Status done = LoadRows(stream, index, lengths, from);
  // What comes next may be on another stream.
  if (done.ok()) done = memory().Synchronize(stream.native());
  if (done.ok()) {
    Publish(index);
    return Push(index, index + 1);
  }
  ClearAfterFailure(index, index + 1);
  return done;
}

absl::Status KvCache::LoadRows(const Stream& stream, int64_t index,
                               absl::Span<const int64_t> lengths, ConstTensor from) {
  Layer& layer = layers_[index];
  const Group& group = groups_[layer.group];
  const KvMover mover(*kernels_, memory(), stream);
  // It is only read.
  auto* const memory = static_cast<std::byte*>(const_cast<void*>(from.data));
  int64_t at = 0;
  for (int64_t b = 0; b < options_.batch; ++b) {
    const int64_t tokens = lengths[b];
    const SavedRow row = SavedRowOf(group.scheme, options_, group.keep, tokens, memory, at);
    at = row.end;
    layer.lengths[b] = static_cast<int32_t>(tokens);
    layer.k_kept[b] = layer.v_kept[b] = {};
    if (tokens == 0) continue;
    layer.k_kept[b] = group.k.layout().Needed(tokens);
    layer.v_kept[b] = group.v.layout().Needed(tokens);
    KVANT_RETURN_IF_ERROR(
        row.k.CopyRow(mover, row.k_at, 0, group.k, layer.k, b, tokens, layer.k_kept[b]));
    KVANT_RETURN_IF_ERROR(
        row.v.CopyRow(mover, row.v_at, 0, group.v, layer.v, b, tokens, layer.v_kept[b]));
  }
  return absl::OkStatus();
}

}  // namespace kvant
