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

// The elements of a parameter array over `lines` x `length` positions: element [l][i] is at
// values[l * length + i]. Either count is 1 where the elements do not vary.
struct Grid {
  const float* values = nullptr;
  int64_t lines = 1, length = 1;
};

// `spare`: as much as `out`.
Grid ReadGrid(const Reader& reader, const Array& array, Position p, int line_axis, int64_t lines,
              int axis, int64_t length, float* out, float* spare) {
  const int64_t line_stride = array.strides[line_axis], stride = array.strides[axis];
  if (line_stride == 0) lines = 1;
  if (stride == 0) length = 1;
  if (length == 1) {
    reader.Line(array, p, line_axis, lines, out);
  } else if (stride == 1 && line_stride == length) {
    reader.Line(array, p, axis, lines * length, out);
  } else if (line_stride == 1 && stride != 1 && lines > 1) {
    for (int64_t i = 0; i < length; ++i, ++p.at[axis]) {
      reader.Line(array, p, line_axis, lines, spare + i * lines);
    }
    reader.kernels->transpose(spare, lines, length, lines, out, length);
  } else {
    for (int64_t l = 0; l < lines; ++l, ++p.at[line_axis]) {
      reader.Line(array, p, axis, length, out + l * length);
    }
  }
  return {out, lines, length};
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

  // Lines [0, lines) from `p` on, `stride` numbers apart, as floats or bf16. `scratch`: 3 * lines *
  // length floats. `spare`: length floats, for bf16 only, of a set with PairKernels.
  template <typename Out>
  void Read(const Position& p, int64_t lines, Out* out, int64_t stride, float* scratch,
            float* spare) const {
    Position at = p;
    if (!how_.scales.present()) {
      const Scaling none{.codebook = data_.codebook};
      for (int64_t l = 0; l < lines; ++l, ++at.at[line_axis_]) {
        ReadLine(at, none, out + l * stride, spare);
      }
      return;
    }
    const Parameters parameters = ReadParameters(p, lines, scratch);
    const int64_t line_group = how_.group[line_axis_];
    for (int64_t l = 0, g = 0, in = p.at[line_axis_] % line_group; l < lines; ++l) {
      ReadLine(at, ScalingOf(parameters, g), out + l * stride, spare);
      ++at.at[line_axis_];
      if (++in == line_group) {
        in = 0;
        ++g;
      }
    }
  }

 private:
  // Lines are those of groups.
  struct Parameters {
    Grid scales, zero_points;
    int64_t group = 1;  // of Scaling
  };

  Parameters ReadParameters(const Position& p, int64_t lines, float* scratch) const {
    const int64_t line_groups = GroupsOf(p, line_axis_, lines);
    const int64_t groups = GroupsOf(p, axis_, length_);
    const auto count = [&](const Array& array) {
      return array.present() && array.strides[axis_] != 0 ? groups : 1;
    };
    const int64_t most = std::max(count(how_.scales), count(how_.zero_points));
    const bool whole = how_.group[axis_] % kGroupUnit == 0 && p.at[axis_] % how_.group[axis_] == 0;
    const int64_t wanted = most == 1 || whole ? most : length_;
    float* const spare = scratch + 2 * line_groups * length_;
    const auto read = [&](const Array& array, float* to) {
      const bool expanded = count(array) != wanted;
      const Grid grid = ReadGrid(reader_, array, GroupOf(how_, p), line_axis_, line_groups, axis_,
                                 groups, expanded ? spare : to, expanded ? to : spare);
      return expanded ? Expanded(grid, p.at[axis_], wanted, to) : grid;
    };
    Parameters parameters;
    parameters.group = most == 1 ? length_ : whole ? how_.group[axis_] : 1;
    parameters.scales = read(how_.scales, scratch);
    if (how_.zero_points.present()) {
      parameters.zero_points = read(how_.zero_points, scratch + line_groups * length_);
    }
    return parameters;
  }

  // Those that n positions from `p` on lie in.
  int64_t GroupsOf(const Position& p, int axis, int64_t n) const {
    return (p.at[axis] % how_.group[axis] + n - 1) / how_.group[axis] + 1;
  }

  // In lines of `wanted`: one parameter for all of them, or those of groups, the first of which
  // position `first` is in.
  Grid Expanded(const Grid& grid, int64_t first, int64_t wanted, float* to) const {
    const int64_t group = grid.length == 1 ? wanted : how_.group[axis_];
    const int64_t into_group = grid.length == 1 ? 0 : first % group;
    if (into_group == 0 && grid.length * group == wanted) {
      reader_.kernels->expand(grid.values, group, 0, grid.lines * wanted, to);
    } else {
      for (int64_t l = 0; l < grid.lines; ++l) {
        reader_.kernels->expand(grid.values + l * grid.length, group, into_group, wanted,
                                to + l * wanted);
      }
    }
    return {to, grid.lines, wanted};
  }

  // By the parameters of line group g.
  Scaling ScalingOf(const Parameters& parameters, int64_t g) const {
    const auto at = [g](const Grid& grid) {
      return grid.values + (grid.lines == 1 ? 0 : g * grid.length);
    };
    Scaling how;
    how.scales = at(parameters.scales);
    if (how_.zero_points.present()) how.zero_points = at(parameters.zero_points);
    how.codebook = data_.codebook;
    how.real = how_.real_zero_points;
    how.group = parameters.group;
    return how;
  }

  // The line from `p` on. Without scales, values are what is stored.
  void ReadLine(const Position& p, const Scaling& how, float* line, float*) const {
    if (how.scales == nullptr) {
      reader_.Line(data_, p, axis_, length_, line);
    } else if (data_.strides[axis_] == 1) {
      reader_.kernels->load_scaled(data_.type, reader_.Data(data_), data_.IndexOf(p), length_, how,
                                   line);
    } else {
      reader_.Line(data_, p, axis_, length_, line);
      reader_.kernels->scale(how, length_, line);
    }
  }
  void ReadLine(const Position& p, const Scaling& how, uint16_t* line, float* spare) const {
    const auto load = reader_.kernels->pairs->load;
    const int64_t index = data_.IndexOf(p);
    if (data_.strides[axis_] == 1 && data_.type != kS64 && index * BitsOf(data_.type) % 8 == 0) {
      return load(data_.type, reader_.Data(data_), index, length_, how, line);
    }
    ReadLine(p, how, spare, nullptr);
    load(kF32, spare, 0, length_, {}, line);
  }

  const Reader& reader_;
  const Array& data_;
  const Dequantization& how_;
  const int line_axis_, axis_;
  const int64_t length_;
};

// out[c][r] = in[r][c] of floats, as they are or rounded. `spare`: 16 * cols floats, for bf16.
void TransposeLines(const KernelSet& kernels, const float* in, int64_t rows, int64_t cols,
                    float* out, int64_t out_stride, float*) {
  kernels.transpose(in, cols, rows, cols, out, out_stride);
}
void TransposeLines(const KernelSet& kernels, const float* in, int64_t rows, int64_t cols,
                    uint16_t* out, int64_t out_stride, float* spare) {
  kernels.transpose(in, cols, rows, cols, spare, kLineBatch);
  for (int64_t c = 0; c < cols; ++c) {
    kernels.pairs->load(kF32, spare + c * kLineBatch, 0, rows, {}, out + c * out_stride);
  }
}

// A part of a tile, to columns or rows `part.column` of `out`, `stride` numbers apart.
template <typename Out>
void DequantizePart(const Reader& reader, const Part& part, int64_t channels, bool by_channel,
                    Out* out, int64_t stride, float* scratch) {
  const Segment& segment = part.segment;
  // Lines run along the axis that is dense in memory; where that is not the tile's
  // inner axis, a few lines at a time are transposed.
  const bool along_tokens = LiesAlongTokens(segment.data);
  const int line_axis = along_tokens ? kCol : kRow;
  const int64_t lines = along_tokens ? channels : part.tokens;
  const int64_t length = along_tokens ? part.tokens : channels;
  Out* const first = out + part.column * (by_channel ? 1 : stride);
  float* batch = scratch;
  float* parameters = scratch + kLineBatch * length;
  Position p = part.first;
  const LineReader read(reader, segment.data, segment.dequantization, line_axis,
                        along_tokens ? kRow : kCol, length);
  for (int64_t line = 0; line < lines; line += kLineBatch, p.at[line_axis] += kLineBatch) {
    const int64_t some = std::min(kLineBatch, lines - line);
    if (along_tokens == by_channel) {
      read.Read(p, some, first + line * stride, stride, parameters, batch);
    } else {
      read.Read(p, some, batch, length, parameters, nullptr);
      TransposeLines(*reader.kernels, batch, some, length, first + line, stride, parameters);
    }
  }
}

// Elements `stride` apart, side by side as they are stored.
template <typename T>
void Gather(const void* data, int64_t index, int64_t stride, int64_t n, void* out) {
  const char* from = static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T));
  char* to = static_cast<char*>(out);
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(to + i * sizeof(T), from + i * stride * static_cast<int64_t>(sizeof(T)), sizeof(T));
  }
}

// The same of elements of kBits < 8.
template <int kBits>
void GatherBits(const void* data, int64_t index, int64_t stride, int64_t n, void* out) {
  constexpr uint64_t kPerByte = 8 / kBits;
  const auto* from = static_cast<const uint8_t*>(data);
  auto* to = static_cast<uint8_t*>(out);
  uint64_t at = static_cast<uint64_t>(index);  // unsigned: divided by a shift
  for (int64_t i = 0; i < n;) {
    unsigned byte = 0;
    for (unsigned shift = 0; shift < 8 && i < n; shift += kBits, ++i) {
      const unsigned code = from[at / kPerByte] >> (at % kPerByte * kBits) & ((1u << kBits) - 1);
      byte |= code << shift;
      at += static_cast<uint64_t>(stride);
    }
    *to++ = static_cast<uint8_t>(byte);
  }
}

void GatherElements(DataType type, const void* data, int64_t index, int64_t stride, int64_t n,
                    void* out) {
  switch (BitsOf(type)) {
    case 64:
      return Gather<uint64_t>(data, index, stride, n, out);
    case 32:
      return Gather<uint32_t>(data, index, stride, n, out);
    case 16:
      return Gather<uint16_t>(data, index, stride, n, out);
    case 8:
      return Gather<uint8_t>(data, index, stride, n, out);
    case 4:
      return GatherBits<4>(data, index, stride, n, out);
    default:
      return GatherBits<2>(data, index, stride, n, out);
  }
}

}  // namespace

void Reader::Line(const Array& array, const Position& p, int axis, int64_t n, float* out) const {
  if (n <= 0) return;
  const void* data = Data(array);
  const int64_t index = array.IndexOf(p);
  const int64_t stride = array.strides[axis];
  const auto load = [&](const void* from, int64_t first, int64_t count, float* to) {
    if (array.codebook == nullptr) return kernels->load(array.type, from, first, count, to);
    kernels->load_entries(array.codebook, array.type, from, first, count, to);
  };
  if (stride == 1 || n == 1) {
    load(data, index, n, out);
  } else if (stride == 0) {
    load(data, index, 1, out);
    std::fill(out + 1, out + n, out[0]);
  } else {
    constexpr int64_t kAtOnce = 64;
    uint64_t side_by_side[kAtOnce];
    for (int64_t i = 0; i < n; i += kAtOnce) {
      const int64_t some = std::min(kAtOnce, n - i);
      GatherElements(array.type, data, index + i * stride, stride, some, side_by_side);
      load(side_by_side, 0, some, out + i);
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
  if (n <= 0) return;
  const int line_axis = axis == kCol ? kRow : kCol;
  LineReader(reader, data, how, line_axis, axis, n).Read(p, 1, out, n, scratch, nullptr);
}

void DequantizeTile(const Reader& reader, const Pieces& pieces, const Position& p, int64_t column,
                    int64_t n, int64_t channels, bool by_channel, float* out, float* scratch) {
  ForParts(pieces, p, column, n, /*join=*/false, [&](const Part& part) {
    DequantizePart(reader, part, channels, by_channel, out, by_channel ? kHalfTile : channels,
                   scratch);
  });
}

// Lines along the axis that is summed over hold pairs, and are transposed. Of others, two at a time
// are zipped.
void PairTile(const Reader& reader, const Pieces& pieces, const Position& p, int64_t column,
              int64_t n, int64_t channels, PairsOf of, uint32_t* out, uint16_t* lines,
              float* scratch) {
  const KernelSet& kernels = *reader.kernels;
  const bool along_tokens = LiesAlongTokens(pieces.at->segment->data);
  const int64_t count = along_tokens ? channels : n, length = along_tokens ? n : channels;
  const int64_t stride = along_tokens ? kHalfTile : 2 * Pairs(channels);
  ForParts(pieces, p, column, n, /*join=*/false, [&](const Part& part) {
    DequantizePart(reader, part, channels, along_tokens, lines, stride, scratch);
  });
  const int64_t out_stride = of == PairsOf::kChannels ? kHalfTile : channels;
  if (along_tokens == (of == PairsOf::kChannels)) {
    for (int64_t i = 0; i < count; i += 2) {
      const uint16_t* const line = lines + i * stride;
      kernels.pairs->zip(line, i + 1 < count ? line + stride : nullptr, length,
                         out + i / 2 * out_stride);
    }
    return;
  }
  if (length % 2 != 0) {
    for (int64_t i = 0; i < count; ++i) lines[i * stride + length] = 0;
  }
  kernels.transpose(reinterpret_cast<const float*>(lines), stride / 2, count, Pairs(length),
                    reinterpret_cast<float*>(out), out_stride);
}

}  // namespace kvant::cpu
