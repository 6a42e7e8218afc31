// Formula ggml of DynamicQuantize: quantize_row_{q8_0,q4_0,q4_1,iq4_nl}_ref of ggml
// (ggml/src/ggml-quants.c), which compute in f32. Here each of their operations is done in f64 and
// rounded to f32, which gives the same number.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

double F32(double x) { return static_cast<float>(x); }

// x, or the largest number with its sign where the type would make it infinite.
double Within(double x, DataType type) {
  return std::isinf(RoundTo(type, x)) ? std::copysign(LargestOf(type), x) : x;
}

// What a block becomes; scale and zero point are not rounded to their types.
struct Block {
  double scale = 0, zero_point = 0;
  std::vector<double> codes;
};

double Inverse(double d) {
  const double inverse = d == 0 ? 0 : F32(1 / d);
  return std::isfinite(inverse) ? inverse : 0;
}

// The first element of the largest magnitude, with its sign.
double Extreme(const std::vector<double>& x) {
  double extreme = 0;
  for (const double value : x) {
    if (std::abs(value) > std::abs(extreme)) extreme = value;
  }
  return extreme;
}

// Truncated and at most 15; 0 for what is not a number, of a range beyond f32's.
double Nibble(double x) { return std::isnan(x) ? 0 : std::min(15.0, std::trunc(x)); }

Block Q8(const std::vector<double>& x, DataType scale_type) {
  Block block{.scale = Within(F32(std::abs(Extreme(x)) / 127), scale_type), .codes = {}};
  const double inverse = Inverse(block.scale);
  for (const double value : x) block.codes.push_back(std::round(F32(value * inverse)));
  return block;
}

Block Q4(const std::vector<double>& x, DataType scale_type) {
  Block block{.scale = Within(F32(Extreme(x) / -8), scale_type), .codes = {}};
  const double inverse = Inverse(block.scale);
  for (const double value : x) block.codes.push_back(Nibble(F32(F32(value * inverse) + 8.5)) - 8);
  return block;
}

Block Q4WithMinimum(const std::vector<double>& x, DataType scale_type, DataType minimum_type) {
  const double min = x.empty() ? 0 : Within(std::ranges::min(x), minimum_type);
  const double max = x.empty() ? 0 : std::max(min, std::ranges::max(x));
  Block block{
      .scale = Within(F32(F32(max - min) / 15), scale_type), .zero_point = -min, .codes = {}};
  const double inverse = Inverse(block.scale);
  for (const double value : x) {
    block.codes.push_back(Nibble(F32(F32(F32(value - min) * inverse) + 0.5)));
  }
  return block;
}

// The entry nearest to x of an ascending table, the upper one where two are as near.
size_t BestIndex(const std::vector<float>& table, double x) {
  size_t best = 0;
  for (size_t i = 1; i < table.size(); ++i) {
    if (x - table[i - 1] >= table[i] - x) best = i;
  }
  return best;
}

Block Iq4(const std::vector<double>& x, const std::vector<float>& table, DataType scale_type) {
  const double extreme = Extreme(x), first = F32(extreme / table[0]);
  const double inverse = Inverse(first);
  Block block{.codes = std::vector<double>(x.size(), 0)};
  if (F32(std::abs(extreme)) < 1e-15f || inverse == 0) return block;
  double sum_qx = 0, sum_qq = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t code = BestIndex(table, F32(inverse * x[i]));
    const double q = table[code], weighted = F32(F32(x[i] * x[i]) * q);
    block.codes[i] = static_cast<double>(code);
    sum_qx = F32(sum_qx + F32(weighted * x[i]));
    sum_qq = F32(sum_qq + F32(weighted * q));
  }
  const double best = sum_qq > 0 ? F32(sum_qx / sum_qq) : 0;
  block.scale = Within(std::isfinite(sum_qx) ? best : first, scale_type);
  return block;
}

Block Quantize(const OpContext& context, const std::vector<double>& x) {
  if (!std::ranges::all_of(x, [](double value) { return std::isfinite(value); })) {
    return {std::numeric_limits<double>::quiet_NaN(), 0, std::vector<double>(x.size(), 0)};
  }
  const DataType scale_type = context.out_desc(1).type;
  if (const auto* table = context.op.Find<Attr::kCodebook>()) {
    return Iq4(x, *table, scale_type);
  }
  if (context.outputs.size() > 2) return Q4WithMinimum(x, scale_type, context.out_desc(2).type);
  return context.out_desc(0).type == kS8 ? Q8(x, scale_type) : Q4(x, scale_type);
}

}  // namespace

Array QuantizeByGgml(OpContext& context, const Dims& dims, const IndexMap& groups) {
  for (size_t i = 1; i < context.outputs.size(); ++i) context.outputs[i] = Array(dims);
  Array x = context.Take(0);
  std::vector<std::vector<int64_t>> members(context.outputs[1].values.size());
  ForEach<1>(*MakeSerialExecutor(), x.dims, {&groups},
             [&](int64_t i, const auto& at) { members[at[0]].push_back(i); });
  for (size_t group = 0; group < members.size(); ++group) {
    std::vector<double> values;
    for (const int64_t i : members[group]) values.push_back(x.values[i]);
    const Block block = Quantize(context, values);
    context.outputs[1].values[group] = RoundTo(context.out_desc(1).type, block.scale);
    if (context.outputs.size() > 2) {
      context.outputs[2].values[group] = RoundTo(context.out_desc(2).type, block.zero_point);
    }
    for (size_t i = 0; i < values.size(); ++i) x.values[members[group][i]] = block.codes[i];
  }
  return x;
}

}  // namespace kvant::oracle
