// How tokens get into a KvTensor.
#include <algorithm>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "kvant/cache/kv_tensor.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

int64_t BytesOf(const LogicalTensor& desc) { return desc.dims ? desc.memory_bytes() : 0; }

}  // namespace

// One call of Store.
class KvTensor::Writer {
 public:
  Writer(const KvTensor& tensor, const Stream& stream, const Source& src,
         absl::Span<const int64_t> lengths, const KvTaken& taken, const KvPointers& layer,
         std::byte* working)
      : t_(tensor),
        layout_(tensor.layout_),
        stream_(stream),
        src_(src),
        lengths_(lengths),
        counts_(taken.counts),
        starts_(taken.starts),
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
    const int64_t slots = layout_.slots(KvSegmentKind::kMain);
    if (residual == 0) return slots - behind % slots;
    const int64_t window = layout_.slots(KvSegmentKind::kWindow);
    const int64_t ring = window - behind % window;
    // A window's bulk fits the slots that there are a whole number of times.
    if (layout_.bulk()) return std::min(ring, residual - behind % residual);
    if (behind < layout_.window()) return std::min(ring, layout_.window() - behind);
    return std::min(ring, slots - layout_.MainOf(behind) % slots);
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
      const KvSegmentKind rest = residual == 0 ? KvSegmentKind::kMain : KvSegmentKind::kWindow;
      rest_at_[b] = static_cast<int32_t>(behind % layout_.slots(rest));
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

  // arriving_[b, h, t, d] = src[b, h, starts[b] + done + t, d]. Rows that get no token are skipped.
  void Load(int64_t done, int64_t tokens) {
    const Dims strides = src_.desc->StridesOrDense();
    const int64_t channels = t_.shape_.head_size;
    const DataType type = src_.desc->type;
    auto* out = reinterpret_cast<float*>(arriving_);
    for (int64_t b = 0; b < batch(); ++b) {
      for (int64_t h = 0; h < t_.shape_.heads; ++h) {
        for (int64_t i = 0; i < tokens; ++i, out += channels) {
          if (!Active(b, done)) continue;
          const int64_t token = starts_[b] + done + i;
          const int64_t index = b * strides[0] + h * strides[1] + token * strides[2];
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
    const int64_t main = layout_.slots(KvSegmentKind::kMain);
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
      leaving_at_[b] = static_cast<int32_t>(leaving_at_[b] % main);
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
  const absl::Span<const int64_t> lengths_, counts_, starts_;
  const KvPointers& layer_;
  std::byte *arriving_, *leaving_;
  int32_t *sinks_at_, *rest_at_, *leaving_at_;
};

absl::Status KvTensor::Store(const Stream& stream, const Source& src,
                             absl::Span<const int64_t> lengths, const KvTaken& taken,
                             const KvPointers& layer, std::byte* working) const {
  return Writer(*this, stream, src, lengths, taken, layer, working).Run();
}

}  // namespace kvant
