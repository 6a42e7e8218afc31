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

// The elements of an array over `lines` x `length` positions, read along whichever axis
// is dense: element [l][i] is at values[l * line_stride + i * stride].
struct Grid {
  const float* values = nullptr;
  int64_t line_stride = 0, stride = 0;
};

Grid ReadGrid(const Reader& reader, const Array& array, Position p, int line_axis, int64_t lines,
              int axis, int64_t length, float* out) {
  if (array.strides[line_axis] == 0) lines = 1;
  if (array.strides[axis] == 0) length = 1;
  if (array.strides[line_axis] == 1 && (lines > 1 || array.strides[axis] != 1)) {
    for (int64_t i = 0; i < length; ++i, ++p.at[axis]) {
      reader.Line(array, p, line_axis, lines, out + i * lines);
    }
    return {out, lines > 1 ? 1 : 0, length > 1 ? lines : 0};
  }
  if (array.strides[axis] == 1 && array.strides[line_axis] == length) {
    reader.Line(array, p, axis, lines * length, out);
  } else {
    for (int64_t l = 0; l < lines; ++l, ++p.at[line_axis]) {
      reader.Line(array, p, axis, length, out + l * length);
    }
  }
  return {out, lines > 1 ? length : 0, length > 1 ? 1 : 0};
}

// Consecutive lines of `length` elements of an array under a Dequantization, as values.
class LineReader {
 public:
  LineReader(const Reader& reader, const Array& data, const Dequantization& how, int line_axis,
             int axis, int64_t length)
      : reader_(reader),
        data_(data),
        how_(how),
        line_axis_(line_axis),
        axis_(axis),
        length_(length) {}

  // Lines [0, lines) from `p` on, `stride` floats apart. `scratch`: 2 * lines * length floats.
  void Read(const Position& p, int64_t lines, float* out, int64_t stride, float* scratch) const {
    Position at = p;
    if (!how_.scales.present()) {
      for (int64_t l = 0; l < lines; ++l, ++at.at[line_axis_]) {
        reader_.Line(data_, at, axis_, length_, out + l * stride);
      }
      return;
    }
    const Parameters parameters = ReadParameters(p, lines, scratch);
    const int64_t line_group = how_.group[line_axis_];
    for (int64_t l = 0, g = 0, in = p.at[line_axis_] % line_group; l < lines; ++l) {
      ReadScaled(at, parameters, g, out + l * stride);
      ++at.at[line_axis_];
      if (++in == line_group) {
        in = 0;
        ++g;
      }
    }
  }

 private:
  struct Parameters {
    Grid scales, zero_points;
  };

  Parameters ReadParameters(const Position& p, int64_t lines, float* scratch) const {
    const Position group = GroupOf(how_, p);
    const auto groups = [&](int axis, int64_t n) {
      return (p.at[axis] % how_.group[axis] + n - 1) / how_.group[axis] + 1;
    };
    const int64_t line_groups = groups(line_axis_, lines), in_line = groups(axis_, length_);
    const auto grid = [&](const Array& array, float* to) {
      return ReadGrid(reader_, array, group, line_axis_, line_groups, axis_, in_line, to);
    };
    Parameters parameters;
    parameters.scales = grid(how_.scales, scratch);
    if (how_.zero_points.present()) {
      parameters.zero_points = grid(how_.zero_points, scratch + line_groups * in_line);
    }
    return parameters;
  }

  // The line from `p` on, by the parameters of line group g.
  void ReadScaled(const Position& p, const Parameters& parameters, int64_t g, float* line) const {
    const Grid& scales = parameters.scales;
    const Grid& zero_points = parameters.zero_points;
    Scaling how;
    how.scales = scales.values + g * scales.line_stride;
    if (zero_points.values != nullptr) {
      how.zero_points = zero_points.values + g * zero_points.line_stride;
    }
    how.codebook = data_.codebook;
    how.real = how_.real_zero_points;
    how.stride = scales.stride;
    how.group = how_.group[axis_];
    how.into_group = p.at[axis_] % how.group;
    const bool apart = how.zero_points != nullptr && scales.stride != zero_points.stride;
    if (how.stride == 0 && !apart) {
      how.group = length_;
      how.into_group = 0;
    }
    if (data_.strides[axis_] == 1 && !apart) {
      reader_.kernels->load_scaled(data_.type, reader_.Data(data_), data_.IndexOf(p), length_, how,
                                   line);
      return;
    }
    reader_.Line(data_, p, axis_, length_, line);
    if (apart) return ScaleByRuns(how, zero_points.stride, line);
    reader_.kernels->scale(how, length_, line);
  }

  // Scales and zero points do not change, or lie, alike.
  void ScaleByRuns(Scaling how, int64_t zero_point_stride, float* line) const {
    const int64_t stride = how.stride, group = how.group;
    int64_t run = group - how.into_group;
    how.into_group = 0;
    for (int64_t i = 0; i < length_; i += run, run = group) {
      how.group = run = std::min(run, length_ - i);
      reader_.kernels->scale(how, run, line + i);
      how.scales += stride;
      how.zero_points += zero_point_stride;
    }
  }

  const Reader& reader_;
  const Array& data_;
  const Dequantization& how_;
  const int line_axis_, axis_;
  const int64_t length_;
};

// One segment's part of a tile: its own tokens [token, token + n) to columns or
// rows `at` of `out`.
void DequantizePart(const Reader& reader, const Segment& segment, Position p, int64_t token,
                    int64_t n, int64_t channels, bool by_channel, int64_t at, float* out,
                    float* scratch) {
  // Lines run along the axis that is dense in memory; where that is not the tile's
  // inner axis, a few lines at a time are transposed.
  const bool along_tokens = segment.data.strides[kRow] == 1 && segment.data.strides[kCol] != 1;
  const int line_axis = along_tokens ? kCol : kRow;
  const int64_t lines = along_tokens ? channels : n;
  const int64_t length = along_tokens ? n : channels;
  const int64_t inner_stride = by_channel ? kTokenTile : channels;
  float* first = by_channel ? out + at : out + at * channels;
  float* batch = scratch;
  float* parameters = scratch + kLineBatch * length;
  p.at[kRow] = token;
  p.at[kCol] = 0;
  const LineReader read(reader, segment.data, segment.dequantization, line_axis,
                        along_tokens ? kRow : kCol, length);
  for (int64_t line = 0; line < lines; line += kLineBatch, p.at[line_axis] += kLineBatch) {
    const int64_t some = std::min(kLineBatch, lines - line);
    if (along_tokens == by_channel) {
      read.Read(p, some, first + line * inner_stride, inner_stride, parameters);
    } else {
      read.Read(p, some, batch, length, parameters);
      reader.kernels->transpose(batch, length, some, length, first + line, inner_stride);
    }
  }
}

}  // namespace

void Reader::Line(const Array& array, const Position& p, int axis, int64_t n, float* out) const {
  if (n <= 0) return;
  const void* data = Data(array);
  const int64_t index = array.IndexOf(p);
  const int64_t stride = array.strides[axis];
  const auto load = [&](int64_t from, int64_t count, float* to) {
    if (array.codebook == nullptr) return kernels->load(array.type, data, from, count, to);
    kernels->load_entries(array.codebook, array.type, data, from, count, to);
  };
  if (stride == 1) {
    load(index, n, out);
  } else if (stride == 0) {
    load(index, 1, out);
    std::fill(out + 1, out + n, out[0]);
  } else {
    for (int64_t i = 0; i < n; ++i) load(index + i * stride, 1, out + i);
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
  if (n <= 0) return;
  const int line_axis = axis == kCol ? kRow : kCol;
  LineReader(reader, data, how, line_axis, axis, n).Read(p, 1, out, n, scratch);
}

void DequantizeTile(const Reader& reader, const Pieces& pieces, const Position& p, int64_t column,
                    int64_t n, int64_t channels, bool by_channel, float* out, float* scratch) {
  if (by_channel && n < kTokenTile) {
    for (int64_t c = 0; c < channels; ++c) {
      std::fill(out + c * kTokenTile + n, out + (c + 1) * kTokenTile, 0.f);
    }
  }
  ForParts(
      pieces, column, n, [&](const Segment& segment, int64_t first, int64_t tokens, int64_t at) {
        DequantizePart(reader, segment, p, first, tokens, channels, by_channel, at, out, scratch);
      });
}

}  // namespace kvant::cpu
