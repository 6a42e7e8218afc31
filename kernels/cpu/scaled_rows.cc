#include "kvant/kernels/cpu/scaled_rows.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "kvant/kernels/cpu/code_layout.h"

namespace kvant::cpu {
namespace {

// The largest magnitude; not finite if any is not.
float Largest(const float* x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    most = std::max(most, std::bit_cast<int32_t>(x[i]) & std::numeric_limits<int32_t>::max());
  }
  return std::bit_cast<float>(most);
}

}  // namespace

bool TakesScaledRows(const Segment& segment) {
  return segment.codes.by_channel && !segment.codes.usable &&
         std::min(segment.codes.run, segment.tokens) >= kMinRun &&
         !segment.dequantization.zero_points.present() && StoredProductsTake(segment.data.type) &&
         segment.data.strides[kCol] == 1;
}

ScaledRows::ScaledRows(bool wanted, int64_t channels, int64_t rows, Arena& own, Arena& shared)
    : channels_(channels), parameters_(wanted, channels, own) {
  const int64_t most = wanted ? std::min(rows, kMostScaledRows) : 0;
  scales_ = shared.Take(wanted ? kMostRuns * channels : 0);
  scaled_ = shared.Take(most * channels);
  zeros_ = shared.Take(most);
}

float ScaledRows::ReadScales(const Reader& reader, const Part& part) {
  float* scales = scales_;
  ForRuns(part, [&](const Part& run) {
    parameters_.Read(reader, run.segment, run.first, scales, /*points=*/nullptr);
    scales += channels_;
    return true;
  });
  return Largest(scales_, scales - scales_);
}

bool ScaledRows::MultiplyByKeys(const Reader& reader, const Part& part, const float* q,
                                int64_t rows, float* scores) {
  if (rows > kMostScaledRows) return false;
  if (largest_ < 0.f) largest_ = Largest(q, rows * channels_);
  const float most = ReadScales(reader, part) * largest_;
  if (!(most <= std::numeric_limits<float>::max())) return false;
  const float* scales = scales_;
  return ForRuns(part, [&](const Part& run) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < channels_; ++d) {
        scaled_[r * channels_ + d] = q[r * channels_ + d] * scales[d];
      }
    }
    scales += channels_;
    const TokenRows tokens = RowsAt(heads_.At(reader, run), run, channels_);
    reader.kernels->qk_stored(run.segment.data.type, tokens, scaled_, rows, channels_,
                              scores + run.column);
    return true;
  });
}

bool ScaledRows::MultiplyByValues(const Reader& reader, const Part& part, const float* probs,
                                  int64_t rows, const float* shrink, float* out) {
  if (rows > kMostScaledRows) return false;
  const float most = ReadScales(reader, part);
  if (!(most <= std::numeric_limits<float>::max())) return false;
  // The smallest numbers of both f8.
  const float least = part.segment.data.type == kF8E4M3 ? 0x1p-9f : 0x1p-16f;
  for (int64_t r = 0; r < rows; ++r) {
    if (least < LeastFactor(probs + r * kTokenTile + part.column, part.tokens, most,
                            out + r * channels_, channels_, shrink[r])) {
      return false;
    }
  }
  std::fill_n(zeros_, rows, 0.f);
  const float* scales = scales_;
  return ForRuns(part, [&](const Part& run) {
    std::fill_n(scaled_, rows * channels_, 0.f);
    const TokenRows tokens = RowsAt(heads_.At(reader, run), run, channels_);
    reader.kernels->pv_stored(run.segment.data.type, tokens, probs + run.column, rows, zeros_,
                              channels_, scaled_);
    // What was there shrinks once.
    const bool first = run.column == part.column;
    for (int64_t r = 0; r < rows; ++r) {
      const float was = first ? shrink[r] : 1.f;
      float* const to = out + r * channels_;
      for (int64_t d = 0; d < channels_; ++d) {
        to[d] = to[d] * was + scaled_[r * channels_ + d] * scales[d];
      }
    }
    scales += channels_;
    return true;
  });
}

}  // namespace kvant::cpu
