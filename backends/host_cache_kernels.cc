#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kvant/backends/cache_kernels.h"
#include "kvant/graph/data_type.h"

namespace kvant {
namespace {

int CountOf(const CacheTaken& taken, int row) {
  return taken.counts == nullptr ? taken.count : taken.counts[row];
}
int StartOf(const int* starts, int row) { return starts == nullptr ? 0 : starts[row]; }

void StoreRange(const CacheRange& range, int* to) {
  to[0] = static_cast<int>(range.first);
  to[1] = static_cast<int>(range.tokens);
}

void LoadChannels(const CacheSource& source, int64_t index, float* to) {
  const auto load = [&](const auto* from, auto convert) {
    for (int d = 0; d < source.channels; ++d) to[d] = convert(from[index + d * source.strides[3]]);
  };
  if (source.type == kCacheF32) {
    return load(static_cast<const float*>(source.data), [](float value) { return value; });
  }
  load(static_cast<const uint16_t*>(source.data), source.type == kCacheF16 ? F16ToF32 : BF16ToF32);
}

class HostCacheKernels : public CacheKernels {
 public:
  // The host has compared lengths and capacity.
  absl::Status Run(const CacheStep& p, void*) const override {
    for (int row = 0; row < p.batch; ++row) {
      const int count = CountOf(p.taken, row), length = p.lengths[row];
      for (int i = 0; i < p.sides; ++i) {
        const CacheSide& side = p.side[i];
        if (side.places != nullptr) {
          CacheLayout::Places places;
          if (p.done < count) places = side.layout.PlacesOf(length + p.done, p.tokens);
          side.places[kSinksAt * p.stride + row] = places.sinks;
          side.places[kRestAt * p.stride + row] = places.rest;
          side.places[kLeavingAt * p.stride + row] = places.leaving;
          side.places[kLeavingFrom * p.stride + row] = places.leaving_from;
        }
        if (p.advance != 0 && side.ranges != nullptr) {
          StoreRangesOfRow(side.layout, length + count,
                           side.ranges + int64_t{row} * side.layout.segments() * 2);
        }
      }
      if (p.advance != 0) p.lengths[row] += count;
    }
    return absl::OkStatus();
  }

  absl::Status Run(const CacheCheck&, void*) const override { return absl::OkStatus(); }

  absl::Status Run(const CacheLoad& p, void*) const override {
    const CacheSource& source = p.source;
    float* to = p.to;
    for (int row = 0; row < p.batch; ++row) {
      const bool any =
          p.places[kSinksAt * p.stride + row] >= 0 || p.places[kRestAt * p.stride + row] >= 0;
      const int64_t first = StartOf(p.starts, row) + p.done;
      for (int head = 0; head < p.heads; ++head) {
        for (int token = 0; token < p.tokens; ++token, to += source.channels) {
          if (!any) continue;
          LoadChannels(source,
                       row * source.strides[0] + head * source.strides[1] +
                           (first + token) * source.strides[2],
                       to);
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status Run(const CacheLeave& p, void*) const override {
    const int64_t bytes = p.token_bytes;
    for (int row = 0; row < p.batch; ++row) {
      const int64_t first = p.places[kLeavingFrom * p.stride + row];
      if (first < 0) continue;
      const int64_t head = std::min<int64_t>(p.tokens, p.slots - first);
      for (int64_t line = int64_t{row} * p.heads; line < (int64_t{row} + 1) * p.heads; ++line) {
        const auto* from = static_cast<const std::byte*>(p.ring) + line * p.slots * bytes;
        auto* to = static_cast<std::byte*>(p.to) + line * p.tokens * bytes;
        std::memcpy(to, from + first * bytes, head * bytes);
        std::memcpy(to + head * bytes, from, (p.tokens - head) * bytes);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Run(const CacheCopy& p, void*) const override {
    for (int64_t row = 0; row < p.rows; ++row) {
      unsigned char* const from = p.from + row * p.from_pitch;
      unsigned char* const to = p.to + row * p.to_pitch;
      if (p.exchange != 0) {
        std::swap_ranges(from, from + p.bytes, to);
      } else {
        std::memcpy(to, from, p.bytes);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Run(const CacheRanges& p, void*) const override {
    const int64_t each = int64_t{p.segments} * 2;
    for (int row = 0; row < p.batch; ++row) {
      int* const to = std::copy_n(p.kept + row * each, each, p.to + row * (each + 2));
      const int start = StartOf(p.starts, row);
      StoreRange({start == p.new_tokens ? 0 : start, p.new_tokens - start}, to);
    }
    return absl::OkStatus();
  }
};

}  // namespace

void StoreRangesOfRow(const CacheLayout& layout, int length, int* to) {
  layout.EachRange(length, [to](int i, const CacheRange& range) { StoreRange(range, to + i * 2); });
}

std::unique_ptr<CacheKernels> MakeHostCacheKernels() {
  return std::make_unique<HostCacheKernels>();
}

}  // namespace kvant
