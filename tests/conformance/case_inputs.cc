#include "kvant/tests/conformance/case_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/tests/conformance/hostile_inputs.h"

namespace kvant::conformance {
namespace {

using Form = Case::Form;

// Different for every role, so that swapping two tensors is noticed.
uint64_t SeedOf(const std::string& name) {
  uint64_t seed = 1469598103934665603u;
  for (const char letter : name) seed = (seed ^ static_cast<uint8_t>(letter)) * 1099511628211u;
  return seed;
}

struct CodeRange {
  double low = 0, high = 0;
  double middle() const { return (low + high) / 2; }
  double width() const { return high - low; }
};

// Of floating-point codes: about what Signal gives.
CodeRange RangeOf(DataType type) {
  if (IsFloat(type)) return {-1.5, 1.5};
  return {static_cast<double>(LowestOf(type)), static_cast<double>(HighestOf(type))};
}

Fill DataFill(const std::string& name, DataType type, bool quantized) {
  const uint64_t seed = SeedOf(name);
  if (!quantized || IsFloat(type)) return [seed](auto at) { return Signal(seed, at); };
  const CodeRange range = RangeOf(type);
  return [seed, range](absl::Span<const int64_t> at) {
    const double part = std::clamp((Signal(seed, at) + 1.0) / 2.6, 0.0, 1.0);
    return range.low + std::nearbyint(part * range.width());
  };
}

Fill ScaleFill(const std::string& name, DataType code, const std::vector<float>& codebook) {
  double step = 3.0 / RangeOf(code).width();
  if (!codebook.empty()) step = 1.5 / *std::max_element(codebook.begin(), codebook.end());
  return [seed = SeedOf(name), step](auto at) { return step * (1 + 0.5 * Noise(seed, at)); };
}

Fill ZeroPointFill(const std::string& name, DataType code, DataType type) {
  const CodeRange range = RangeOf(code);
  const uint64_t seed = SeedOf(name);
  if (IsFloat(type)) {
    const double middle = range.middle() * 3.0 / range.width();
    return [seed, middle](auto at) { return middle + 0.2 + 0.4 * Noise(seed, at); };
  }
  return [seed, range](auto at) {
    return std::nearbyint(range.middle() + range.width() * (0.05 + 0.2 * Noise(seed, at)));
  };
}

// What would be noticed.
double Junk(DataType type) {
  return IsFloat(type) ? std::nan("") : static_cast<double>(HighestOf(type));
}

// Tokens beyond the real length, and before the first, hold junk.
Fill BeyondLength(const Case& c, const Fill& fill, int64_t first, size_t token_axis,
                  DataType type) {
  const double junk = Junk(type);
  return [=](absl::Span<const int64_t> at) {
    const int64_t token = first + at[token_axis];
    const bool before = c.first_tokens && token < FirstToken(c, at[0]);
    return token < RealLength(c, at[0]) && !before ? fill(at) : junk;
  };
}

// Likewise tokens of pages that are no batch entry's, or beyond its length.
Fill BeyondPages(const Case& c, const Fill& fill, size_t token_axis, DataType type) {
  const double junk = Junk(type);
  std::vector<int64_t> tokens(PoolPages(c), 0);  // that exist
  for (int64_t n = 0; n < c.batch; ++n) {
    for (int64_t i = 0; i < PagesPerEntry(c); ++i) {
      tokens[PageOf(c, n, i)] = RealLength(c, n) - i * c.page_size;
    }
  }
  return [=](absl::Span<const int64_t> at) {
    return at[token_axis] < tokens[at[0]] ? fill(at) : junk;
  };
}

// Likewise tokens outside of a segment's range.
Fill BeyondRange(const Case& c, const Fill& fill, bool keys, int64_t begin, size_t token_axis,
                 DataType type) {
  const double junk = Junk(type);
  std::vector<Segment> at_batch;
  for (int64_t n = 0; n < c.batch; ++n) {
    for (const Segment& one : SegmentsOf(c, keys, n)) {
      if (one.begin == begin) at_batch.push_back(one);
    }
  }
  return [=](absl::Span<const int64_t> at) {
    const Segment& one = at_batch[at[0]];
    const int64_t behind = (at[token_axis] - one.first + one.tokens) % one.tokens;
    return behind < one.real ? fill(at) : junk;
  };
}

int64_t Divisor(int64_t dim, int64_t wanted) { return wanted > 0 ? std::gcd(dim, wanted) : dim; }

// Elements per group of [lead.., tokens, size].
Dims GroupShape(const Storage& storage, const Dims& dims) {
  const size_t rank = dims.size();
  Dims group(rank, 1);
  int64_t &tokens = group[rank - 2], &channels = group[rank - 1];
  switch (storage.groups) {
    case Storage::Groups::kAlongHead:
      channels = Divisor(dims[rank - 1], storage.group_size);
      break;
    case Storage::Groups::kToken:
      channels = dims[rank - 1];
      break;
    case Storage::Groups::kChannel:
      tokens = Divisor(dims[rank - 2], storage.group_size);
      break;
    case Storage::Groups::kHead:
      tokens = dims[rank - 2];
      channels = dims[rank - 1];
      break;
    case Storage::Groups::kTensor:
      break;
  }
  return group;
}

void SwapLastTwo(Dims& dims) { std::swap(dims[dims.size() - 2], dims[dims.size() - 1]); }

Dims Extended(Dims dims, int64_t rows, int64_t columns) {
  dims.push_back(rows);
  dims.push_back(columns);
  return dims;
}

}  // namespace

Dims QueryLead(const Case& c) {
  switch (c.form) {
    case Form::k5D:
      return {c.batch, c.kv_heads, c.ratio};
    case Form::k3D:
      return {c.kv_heads};
    case Form::k2D:
      return {};
    default:
      return {c.batch, c.kv_heads * c.ratio};
  }
}

Dims KvLead(const Case& c) {
  switch (c.form) {
    case Form::k5D:
      return {c.batch, c.kv_heads, 1};
    case Form::k3D:
      return {c.kv_heads};
    case Form::k2D:
      return {};
    default:
      return {c.batch, c.kv_heads};
  }
}

Dims ScoreLead(const Case& c) {
  return c.form == Form::kReshape ? Dims{c.batch, c.kv_heads, c.ratio} : QueryLead(c);
}

std::optional<Dims> BufferStrides(Case::Buffers buffers, const Dims& dims) {
  const int rank = static_cast<int>(dims.size());
  if (buffers == Case::Buffers::kDense || rank < 2) return std::nullopt;
  Dims strides(rank, 1);
  if (buffers == Case::Buffers::kPadded) {
    // Whole bytes for every type.
    int64_t next = (dims[rank - 1] + 3 + 7) / 8 * 8;
    for (int d = rank - 2; d >= 0; --d) {
      strides[d] = next;
      next = next * dims[d] + 8;
    }
    return strides;
  }
  if (rank < 3) return std::nullopt;
  // Rows come right after the batch (rank 3 has none), then heads.
  std::vector<int> order(rank);
  std::iota(order.begin(), order.end(), 0);
  const int place = rank == 3 ? 0 : 1;
  std::rotate(order.begin() + place, order.end() - 2, order.end() - 1);
  int64_t next = 1;
  for (int i = rank - 1; i >= 0; --i) {
    strides[order[i]] = next;
    next *= dims[order[i]];
  }
  return strides;
}

// Of masks there may be several.
std::string CaseInputs::Unique(const std::string& name) const {
  const auto is_taken = [&](const auto& input) { return input.name == name; };
  return std::none_of(inputs_.begin(), inputs_.end(), is_taken) ? name : Unique(name + "_");
}

void CaseInputs::Remember(TensorId id, const std::string& name, Fill fill) {
  inputs_.push_back({id, name, std::move(fill)});
}

Value CaseInputs::Tensor(const std::string& name, DataType type, Dims dims, Fill fill,
                         std::optional<Dims> strides) {
  const Value value = g_.Input(name, type, std::move(dims), std::move(strides));
  Remember(value.id, name, std::move(fill));
  return value;
}

Value CaseInputs::Scalar(const std::string& name, DataType type, double value) {
  if (c_.scalars == Case::Scalars::kConstants) return g_.Scalar(type, value);
  if (c_.scalars == Case::Scalars::kOnHost && type == kF32) return HostScalar(name, type, value);
  return Tensor(Unique(name), type, c_.scalar_of_rank_0 ? Dims{} : Dims{1},
                [value](auto) { return value; });
}

Value CaseInputs::HostScalar(const std::string& name, DataType type, double value) {
  if (c_.scalars == Case::Scalars::kConstants) return g_.Scalar(type, value);
  const std::string own = Unique(name);
  const Value scalar = g_.HostScalar(own, type);
  Remember(scalar.id, own, [value](auto) { return value; });
  return scalar;
}

Value CaseInputs::Query() {
  Dims dims = Extended(QueryLead(c_), c_.q_len, c_.head_size);
  if (c_.ragged) dims = {QueryRoom(c_), c_.kv_heads * c_.ratio, c_.head_size};
  // Scores spread over a few units, whether or not the graph scales them.
  const double unscaled = 1 / std::sqrt(static_cast<double>(c_.head_size));
  const bool scaled = c_.form == Form::kFirstClass || c_.scale != Case::Scale::kNone;
  const double factor = scaled ? 4.0 : 4.0 * unscaled;
  const Fill fill = [factor](auto at) { return factor * Signal(SeedOf("q"), at); };
  return Tensor("q", c_.type, dims, HostileQuery(c_, fill), BufferStrides(c_.buffers, dims));
}

Stored CaseInputs::KvRun(const std::string& name, const Storage& storage, int64_t size,
                         bool transposed, int64_t first, int64_t tokens, bool plain) {
  const bool quantized = storage.quantized() && !plain;
  const DataType type = quantized ? storage.type : c_.type;
  Dims dims = Extended(KvLead(c_), tokens, size);
  if (c_.page_size > 0) {
    dims[0] = PoolPages(c_);
    dims[dims.size() - 2] = c_.page_size;
  }
  std::optional<Dims> strides = BufferStrides(c_.buffers, dims);
  Dims group = GroupShape(storage, dims);
  if (transposed) {
    if (c_.k_layout == Case::KLayout::kTokenMajor) {
      if (!strides) strides = DenseStrides(dims);
      SwapLastTwo(*strides);
      SwapLastTwo(dims);
    } else {
      SwapLastTwo(dims);
      strides = BufferStrides(c_.buffers, dims);
    }
    SwapLastTwo(group);
  }
  const bool hostile = c_.magnitudes != Case::Magnitudes::kOrdinary;
  const KvAxes axes{name[0] == 'k', dims.size() - (transposed ? 1 : 2),
                    dims.size() - (transposed ? 2 : 1)};
  // Zeros are then the same code in every group.
  const double zero =
      hostile && storage.zero_points != kUndef ? std::nearbyint(RangeOf(type).middle()) : 0;
  Fill fill = DataFill(name, type, quantized);
  if (hostile) fill = HostileData(c_, axes, quantized, zero, std::move(fill));
  if (c_.page_size > 0) {
    fill = BeyondPages(c_, fill, dims.size() - (transposed ? 1 : 2), type);
  } else if (c_.real_lengths) {
    fill = BeyondLength(c_, fill, first, dims.size() - (transposed ? 1 : 2), type);
  } else if (c_.real_ranges) {
    fill = BeyondRange(c_, fill, name[0] == 'k', first, dims.size() - (transposed ? 1 : 2), type);
  }
  Stored stored{.data = Tensor(name, type, dims, std::move(fill), strides)};
  if (!quantized) return stored;
  Dims scale_dims{1};
  if (storage.groups != Storage::Groups::kTensor) {
    scale_dims = dims;
    for (size_t d = 0; d < dims.size(); ++d) scale_dims[d] /= group[d];
    stored.group_shape = group;
  }
  const std::optional<Dims> scale_strides =
      c_.buffers == Case::Buffers::kPadded ? BufferStrides(c_.buffers, scale_dims) : std::nullopt;
  Fill scales = ScaleFill(name + "_scales", type, storage.codebook);
  if (hostile) {
    const bool by_token =
        storage.groups == Storage::Groups::kToken || storage.groups == Storage::Groups::kAlongHead;
    scales = HostileScales(c_, axes, by_token, std::move(scales));
  }
  stored.scales =
      Tensor(name + "_scales", storage.scales, scale_dims, std::move(scales), scale_strides);
  stored.codebook = storage.codebook;
  if (storage.zero_points == kUndef) return stored;
  Fill points = ZeroPointFill(name + "_zps", type, storage.zero_points);
  if (hostile) points = [zero](auto) { return zero; };
  stored.zero_points =
      Tensor(name + "_zps", storage.zero_points, scale_dims, std::move(points), scale_strides);
  return stored;
}

Stored CaseInputs::Keys(int64_t first, int64_t tokens, bool plain) {
  const bool transposed = c_.k_layout != Case::KLayout::kTokenRows;
  return KvRun(absl::StrCat("k", first), c_.k, c_.head_size, transposed, first, tokens, plain);
}

Stored CaseInputs::Values(int64_t first, int64_t tokens, bool plain) {
  return KvRun(absl::StrCat("v", first), c_.v, c_.value_size(), false, first, tokens, plain);
}

Value CaseInputs::Codes(const std::string& name, DataType type, const Dims& lead, int64_t rows,
                        int64_t columns) {
  const Dims dims = Extended(lead, rows, columns);
  return Tensor(name, type, dims, DataFill(name, type, true), BufferStrides(c_.buffers, dims));
}

Value CaseInputs::MaskOperand(const Mask& mask) {
  const auto varies = [&](char axis) { return mask.over.find(axis) != std::string::npos; };
  const Dims lead = ScoreLead(c_);
  // Which letters vary along each dim of the scores.
  std::vector<std::string> letters;
  if (lead.size() == 3) letters = {"n", "h", "r"};
  if (lead.size() == 2) letters = {"n", "hr"};
  if (lead.size() == 1) letters = {"h"};
  letters.insert(letters.end(), {"q", "s"});
  Dims full = Extended(lead, c_.ragged ? QueryRoom(c_) : c_.q_len, c_.kv_len);
  if (c_.ragged) full[0] = 1;
  Dims dims;
  for (size_t d = 0; d < full.size(); ++d) {
    const bool present = std::any_of(letters[d].begin(), letters[d].end(), varies);
    if (!present && mask.low_rank && dims.empty()) continue;
    dims.push_back(present ? full[d] : 1);
  }
  const size_t rank = dims.size();
  const int64_t hidden_row = c_.masked_row && varies('q') ? c_.q_len / 2 : -1;
  const bool columns = varies('s');
  const int64_t padding = mask.padding;
  const auto hidden = [=](absl::Span<const int64_t> at) {
    return rank >= 2 && hidden_row >= 0 && at[rank - 2] == hidden_row;
  };
  const std::string name = absl::StrCat("mask", masks_++);
  const uint64_t seed = SeedOf(name);
  const auto visible = [=](absl::Span<const int64_t> at) {
    if (hidden(at) || (columns && at[rank - 1] < padding)) return false;
    // The first column stays, so that other rows are not wholly masked by chance.
    return (columns && at[rank - 1] == 0) || Noise(seed + 1, at) < 0.5;
  };
  if (mask.kind == Mask::Kind::kAdditive) {
    const double fill = mask.FillIn(c_.TypeOfMasks());
    const auto value = [=](absl::Span<const int64_t> at) {
      const bool masked = hidden(at) || (columns && !visible(at));
      return masked ? fill : 2 * Noise(seed, at) - 0.5;
    };
    return Tensor(name, c_.TypeOfMasks(), dims, value, BufferStrides(c_.buffers, dims));
  }
  const bool inverted = mask.kind == Mask::Kind::kSelectInverted;
  return Tensor(
      name, kBoolean, dims, [=](auto at) { return visible(at) != inverted ? 1.0 : 0.0; },
      BufferStrides(c_.buffers, dims));
}

Value CaseInputs::KvLengths() {
  return Tensor("kv_lengths", kS32, {c_.batch}, [c = c_](absl::Span<const int64_t> at) {
    return static_cast<double>(RealLength(c, at[0]));
  });
}

Value CaseInputs::FirstTokens() {
  return Tensor("first", kS32, {c_.batch}, [c = c_](absl::Span<const int64_t> at) {
    return static_cast<double>(FirstToken(c, at[0]));
  });
}

// Beyond the length there is no page, which must not be noticed.
Value CaseInputs::PageTable() {
  return Tensor("pages", kS32, {c_.batch, PagesPerEntry(c_)},
                [c = c_](absl::Span<const int64_t> at) {
                  const bool exists = at[1] * c.page_size < RealLength(c, at[0]);
                  return exists ? static_cast<double>(PageOf(c, at[0], at[1])) : -1e9;
                });
}

Value CaseInputs::QueryOffsets() {
  return Tensor("offsets", kS32, {c_.batch + 1}, [c = c_](absl::Span<const int64_t> at) {
    int64_t offset = 0;
    for (int64_t n = 0; n < at[0]; ++n) offset += QueriesOf(c, n);
    return static_cast<double>(offset);
  });
}

Value CaseInputs::Ranges(bool keys) {
  std::vector<std::vector<Segment>> segments;
  for (int64_t n = 0; n < c_.batch; ++n) segments.push_back(SegmentsOf(c_, keys, n));
  const auto count = static_cast<int64_t>(segments[0].size());
  return Tensor(keys ? "k_ranges" : "v_ranges", kS32, {c_.batch, count, 2},
                [segments](absl::Span<const int64_t> at) {
                  const Segment& one = segments[at[0]][at[1]];
                  return static_cast<double>(at[2] == 0 ? one.first : one.real);
                });
}

}  // namespace kvant::conformance
