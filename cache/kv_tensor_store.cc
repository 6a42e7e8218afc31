// How tokens get into a KvTensor.
#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "kvant/cache/kv_tensor.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

int64_t BytesOf(const LogicalTensor& desc) { return desc.dims ? desc.memory_bytes() : 0; }

const int* At(const KvArrival& arrival, const int* places, CachePlace place) {
  return places + static_cast<int64_t>(place) * arrival.step.stride;
}

}  // namespace

absl::Status KvTensor::Store(const KvArrival& arrival, const CacheSource& source,
                             const KvPointers& layer, int* places) const {
  const auto counts = arrival.taken.counts;
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  for (int64_t done = 0; done < most;) {
    const int64_t tokens = NextTokens(arrival, done);
    CacheStep step = arrival.step;
    step.done = static_cast<int>(done);
    step.tokens = static_cast<int>(tokens);
    step.sides = 1;
    step.side[0] = {layout_.plain(), places, nullptr};
    KVANT_RETURN_IF_ERROR(arrival.kernels.Run(step, arrival.stream.native()));
    KVANT_RETURN_IF_ERROR(
        StorePiece(arrival, source, layer, places, done, tokens, NeedsOf(arrival, done, tokens)));
    done += tokens;
  }
  return absl::OkStatus();
}

int64_t KvTensor::NextTokens(const KvArrival& arrival, int64_t done) const {
  const int64_t many = Pieces();
  for (int64_t b = 0; b < shape_.batch; ++b) {
    const int64_t left = arrival.taken.counts[b] - done;
    if (left > 0 && std::min(left, Room(arrival.lengths[b] + done)) < many) return 1;
  }
  return many;
}

int64_t KvTensor::Room(int64_t length) const {
  if (length < layout_.sinks()) return layout_.sinks() - length;
  const int64_t behind = layout_.Behind(length), residual = layout_.residual();
  const int64_t slots = layout_.slots(KvSegmentKind::kMain);
  if (residual == 0) return slots - behind % slots;
  const int64_t window = layout_.slots(KvSegmentKind::kWindow);
  const int64_t ring = window - behind % window;
  // A window's bulk fits the slots that there are a whole number of times.
  if (layout_.bulk()) return std::min(ring, residual - behind % residual);
  if (behind < layout_.window()) return std::min(ring, layout_.window() - behind);
  return std::min(ring, slots - layout_.MainOf(behind) % slots);
}

KvNeeds KvTensor::NeedsOf(const KvArrival& arrival, int64_t done, int64_t tokens) const {
  if (arrival.lengths.empty()) {
    const bool leaves = layout_.residual() > 0 && MostLeaving() > 0;
    return {.sinks = has(KvPart::kSinks), .rest = true, .leaving = leaves};
  }
  KvNeeds needs;
  for (int64_t b = 0; b < shape_.batch; ++b) {
    if (done >= arrival.taken.counts[b]) continue;
    const auto places = layout_.plain().PlacesOf(arrival.lengths[b] + done, tokens);
    needs.sinks |= places.sinks >= 0;
    needs.rest |= places.rest >= 0;
    needs.leaving |= places.leaving >= 0;
  }
  return needs;
}

absl::Status KvTensor::StorePiece(const KvArrival& arrival, const CacheSource& source,
                                  const KvPointers& layer, const int* places, int64_t done,
                                  int64_t tokens, KvNeeds needs) const {
  CacheLoad load;
  load.source = source;
  load.starts = arrival.step.taken.starts;
  load.places = places;
  load.batch = static_cast<int>(shape_.batch);
  load.stride = arrival.step.stride;
  load.heads = static_cast<int>(shape_.heads);
  load.done = static_cast<int>(done);
  load.tokens = static_cast<int>(tokens);
  load.to = reinterpret_cast<float*>(arrival.working);
  KVANT_RETURN_IF_ERROR(arrival.kernels.Run(load, arrival.stream.native()));
  // They leave first, as new tokens take their slots.
  if (needs.leaving) {
    KVANT_RETURN_IF_ERROR(Leave(arrival, layout_.bulk() ? bulk_ : main_.Of(tokens), layer, places));
  }
  const auto store = [&](const Ops& ops, KvPart part, CachePlace place) {
    return Execute(arrival, ops.Of(tokens), part, kF32, load.to, At(arrival, places, place), layer);
  };
  if (needs.sinks) KVANT_RETURN_IF_ERROR(store(sinks_, KvPart::kSinks, kSinksAt));
  if (!needs.rest) return absl::OkStatus();
  if (layout_.residual() > 0) return store(window_, KvPart::kWindow, kRestAt);
  return store(main_, KvPart::kCodes, kRestAt);
}

absl::Status KvTensor::Leave(const KvArrival& arrival, const Op& op, const KvPointers& layer,
                             const int* places) const {
  const int64_t row = shape_.batch * shape_.heads * shape_.head_size;
  CacheLeave leave;
  leave.ring = layer[static_cast<int>(KvPart::kWindow)];
  leave.places = places;
  leave.batch = static_cast<int>(shape_.batch);
  leave.stride = arrival.step.stride;
  leave.heads = static_cast<int>(shape_.heads);
  leave.slots = static_cast<int>(layout_.slots(KvSegmentKind::kWindow));
  leave.tokens = static_cast<int>(op.tokens);
  leave.token_bytes = static_cast<int>(BytesFor(storage_.window_type, shape_.head_size));
  leave.to = arrival.working + KvAligned(BytesFor(kF32, row * Pieces()));
  KVANT_RETURN_IF_ERROR(arrival.kernels.Run(leave, arrival.stream.native()));
  return Execute(arrival, op, KvPart::kCodes, storage_.window_type, leave.to,
                 At(arrival, places, kLeavingAt), layer);
}

absl::Status KvTensor::Execute(const KvArrival& arrival, const Op& op, KvPart to, DataType type,
                               const void* values, const int* positions,
                               const KvPointers& layer) const {
  const int64_t elements = shape_.batch * shape_.heads * op.tokens * shape_.head_size;
  const auto memory = [&](KvPart part) {
    return Tensor{layer[static_cast<int>(part)], static_cast<size_t>(BytesOf(this->part(part)))};
  };
  absl::InlinedVector<ConstTensor, 3> inputs{
      {values, static_cast<size_t>(BytesFor(type, elements))},
      {positions, shape_.batch * sizeof(int32_t)}};
  absl::InlinedVector<Tensor, 3> outputs{memory(to)};
  if (to == KvPart::kCodes && has(KvPart::kScales)) {
    if (storage_.static_scales()) {
      inputs.push_back(memory(KvPart::kScales));
    } else {
      outputs.push_back(memory(KvPart::kScales));
      if (has(KvPart::kZeroPoints)) outputs.push_back(memory(KvPart::kZeroPoints));
    }
  }
  const auto scratch = op.scratch == nullptr ? absl::Span<std::byte>() : op.scratch->bytes();
  return op.compiled.Execute(arrival.stream, inputs, outputs, scratch);
}

}  // namespace kvant
