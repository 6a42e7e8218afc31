#include "kvant/kernels/cpu/dequantize.h"

#include <algorithm>
#include <cstring>

namespace kvant::cpu {
namespace {

// The element of a parameter array that governs position `p`.
Position GroupOf(const Dequantization& how, const Position& p) {
  Position group;
  for (int axis = 0; axis < kAxes; ++axis) group.at[axis] = p.at[axis] / how.group[axis];
  return group;
}

// out[i] becomes its value, for parameters that change with every element ...
void ApplyEach(bool real, const float* scale, const float* zero_point, int64_t n, float* out) {
  if (zero_point == nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] * scale[i];
  } else if (real) {
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] * scale[i] - zero_point[i];
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = (out[i] - zero_point[i]) * scale[i];
  }
}

// ... or are the same for all n.
void ApplyRun(bool real, float scale, const float* zero_point, int64_t n, float* out) {
  const float zp = zero_point == nullptr ? 0.f : *zero_point;
  if (real) {
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] * scale - zp;
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = (out[i] - zp) * scale;
  }
}

// One segment's part of a tile: its own tokens [token, token + n) to columns or
// rows `at` of `out`.
void DequantizePart(const Reader& reader, const Segment& segment, Position p, int64_t token,
                    int64_t n, int64_t channels, bool by_channel, int64_t at, float* out,
                    float* scratch) {
  // Lines run along the axis that is dense in memory; where that is not the tile's
  // inner axis, a few lines at a time are transposed.
  const bool along_tokens = segment.data.strides[kRow] == 1 && segment.data.strides[kCol] != 1;
  const int64_t lines = along_tokens ? channels : n;
  const int64_t length = along_tokens ? n : channels;
  const int64_t inner_stride = by_channel ? kTokenTile : channels;
  float* batch = scratch;
  float* parameters = scratch + kLineBatch * length;
  const auto line_to = [&](int64_t line, float* to) {
    p.at[kRow] = along_tokens ? token : token + line;
    p.at[kCol] = along_tokens ? line : 0;
    DequantizeLine(reader, segment.data, segment.dequantization, p, along_tokens ? kRow : kCol,
                   length, to, parameters);
  };
  if (along_tokens == by_channel) {
    float* first = by_channel ? out + at : out + at * channels;
    for (int64_t line = 0; line < lines; ++line) line_to(line, first + line * inner_stride);
    return;
  }
  float* first = by_channel ? out + at : out + at * channels;
  for (int64_t line = 0; line < lines; line += kLineBatch) {
    const int64_t some = std::min(kLineBatch, lines - line);
    for (int64_t j = 0; j < some; ++j) line_to(line + j, batch + j * length);
    for (int64_t i = 0; i < length; ++i) {
      float* to = first + i * inner_stride + line;
      for (int64_t j = 0; j < some; ++j) to[j] = batch[j * length + i];
    }
  }
}

}  // namespace

void Reader::Line(const Array& array, const Position& p, int axis, int64_t n, float* out) const {
  if (n <= 0) return;
  const void* data = Data(array);
  const int64_t index = array.IndexOf(p);
  const int64_t stride = array.strides[axis];
  if (stride == 1) {
    kernels->load(array.type, data, index, n, out);
  } else if (stride == 0) {
    kernels->load(array.type, data, index, 1, out);
    std::fill(out + 1, out + n, out[0]);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      kernels->load(array.type, data, index + i * stride, 1, out + i);
    }
  }
}

float Reader::Scalar(const Array& array, const Position& p) const {
  float value = 0.f;
  if (array.present()) kernels->load(array.type, Data(array), array.IndexOf(p), 1, &value);
  return value;
}

int64_t Reader::Integer(const Array& array, const Position& p) const {
  if (!array.present()) return 0;
  if (array.type == kS64) {
    int64_t value;
    std::memcpy(&value, static_cast<const char*>(Data(array)) + array.IndexOf(p) * sizeof(value),
                sizeof(value));
    return value;
  }
  return static_cast<int64_t>(LoadElement(array.type, Data(array), array.IndexOf(p)));
}

void DequantizeLine(const Reader& reader, const Array& data, const Dequantization& how,
                    const Position& p, int axis, int64_t n, float* out, float* scratch) {
  reader.Line(data, p, axis, n, out);
  if (n <= 0 || !how.scales.present()) return;
  const Position group = GroupOf(how, p);
  const int64_t length = how.group[axis];
  const int64_t into_group = p.at[axis] % length;
  const bool varies = how.scales.strides[axis] != 0 ||
                      (how.zero_points.present() && how.zero_points.strides[axis] != 0);
  const int64_t groups = varies ? (into_group + n - 1) / length + 1 : 1;
  float* scales = scratch;
  float* zero_points = nullptr;
  reader.Line(how.scales, group, axis, groups, scales);
  if (how.zero_points.present()) {
    zero_points = scratch + groups;
    reader.Line(how.zero_points, group, axis, groups, zero_points);
  }
  const bool real = how.real_zero_points;
  if (varies && length == 1) return ApplyEach(real, scales, zero_points, n, out);
  for (int64_t g = 0, i = 0; i < n; ++g) {
    const int64_t run = varies ? std::min(n - i, length - (g == 0 ? into_group : 0)) : n;
    ApplyRun(real, scales[g], zero_points == nullptr ? nullptr : zero_points + g, run, out + i);
    i += run;
  }
}

void DequantizeTile(const Reader& reader, const Segment* segments, int count, const Position& p,
                    int64_t token, int64_t n, int64_t channels, bool by_channel, float* out,
                    float* scratch) {
  if (by_channel && n < kTokenTile) {
    for (int64_t c = 0; c < channels; ++c) {
      std::fill(out + c * kTokenTile + n, out + (c + 1) * kTokenTile, 0.f);
    }
  }
  for (int s = 0; s < count; ++s) {
    const Segment& segment = segments[s];
    const int64_t begin = std::max(token, segment.begin);
    const int64_t end = std::min(token + n, segment.begin + segment.tokens);
    if (begin >= end) continue;
    DequantizePart(reader, segment, p, begin - segment.begin, end - begin, channels, by_channel,
                   begin - token, out, scratch);
  }
}

}  // namespace kvant::cpu
