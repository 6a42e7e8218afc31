// Products on stored codes, parameters and rounding included, on tiles that lie in the
// second-level cache: what a unit would reach if memory were free.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kvant/kernels/cpu/code_layout.h"
#include "kvant/kernels/cpu/code_scores.h"
#include "kvant/kernels/cpu/code_values.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

constexpr int64_t kSize = 128, kGroup = 32, kTokens = 16 * kTokenTile;

// K or V of one head in groups of 32 along it, f16 scales and u8 zero points.
struct Codes {
  Codes(DataType type, int64_t rows)
      : q(rows * kSize, 0.05f),
        tile(rows * kTokenTile, 0.5f),
        out(rows * kSize),
        shrink(rows, 1.f) {
    segment.data = {.buffer = 0, .type = type, .strides = {0, 0, 0, kSize, 1}};
    const int64_t groups = kSize / kGroup;
    segment.dequantization.group[kCol] = kGroup;
    segment.dequantization.scales = {.buffer = 1, .type = kF16, .strides = {0, 0, 0, groups, 1}};
    segment.dequantization.zero_points = {
        .buffer = 2, .type = kU8, .strides = {0, 0, 0, groups, 1}};
    segment.tokens = kTokens;
    DescribeCodes(kSize, /*keys=*/true, segment);
    problem.head_size = problem.v_head_size = kSize;
    problem.k = problem.v = &segment;
    problem.k_segments = problem.v_segments = 1;
    problem.row_tile = rows;
    Arena size(nullptr);
    CodeScores{problem, size, size};
    CodeValues{problem, size, size};
    scratch.resize(size.used());
  }

  Part Tile(int64_t token) const {
    Position first, next;
    first.at[kRow] = token;
    next.at[kRow] = token + kTokenTile;
    return {segment, first, kTokenTile, 0, next};
  }

  std::vector<float> q, tile, out, shrink, scratch;
  std::vector<uint8_t> data = std::vector<uint8_t>(kTokens * kSize, 0x35);
  std::vector<uint16_t> scales = std::vector<uint16_t>(kTokens * kSize / kGroup, 0x2c00);
  std::vector<uint8_t> zero_points = std::vector<uint8_t>(kTokens * kSize / kGroup, 7);
  Segment segment;
  AttentionProblem problem;
};

// `multiply` is called for one tile of tokens after another.
template <typename Multiply>
void RunTiles(benchmark::State& state, const KernelSet& set, Codes& codes, Multiply multiply) {
  const void* inputs[] = {codes.data.data(), codes.scales.data(), codes.zero_points.data()};
  const Reader reader{&set, inputs};
  int64_t token = 0;
  for (auto _ : state) {
    if (!multiply(reader, token)) state.SkipWithError("not multiplied as codes");
    token = (token + kTokenTile) % kTokens;
  }
  state.counters["values/s"] = benchmark::Counter(static_cast<double>(kTokenTile * kSize),
                                                  benchmark::Counter::kIsIterationInvariantRate);
}

void BM_CodeScores(benchmark::State& state, const KernelSet* set, DataType type) {
  const int64_t rows = state.range(0);
  Codes codes(type, rows);
  Arena arena(codes.scratch.data());
  CodeScores product(codes.problem, arena, arena);
  RunTiles(state, *set, codes, [&](const Reader& reader, int64_t token) {
    return product.Multiply(reader, codes.Tile(token), codes.q.data(), rows, codes.tile.data());
  });
}

void BM_CodeValues(benchmark::State& state, const KernelSet* set, DataType type) {
  const int64_t rows = state.range(0);
  Codes codes(type, rows);
  Arena arena(codes.scratch.data());
  CodeValues product(codes.problem, arena, arena);
  RunTiles(state, *set, codes, [&](const Reader& reader, int64_t token) {
    return product.Multiply(reader, codes.Tile(token), codes.tile.data(), rows, codes.shrink.data(),
                            codes.out.data());
  });
}

// For every set of the kernels' table that this CPU has.
const bool kRegistered = [] {
  for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
    if (set->codes == nullptr) continue;
    for (const DataType type : {kU8, kU4, kU2}) {
      const std::string suffix =
          std::string("/") + set->name + "/" + std::string(DataTypeName(type));
      benchmark::RegisterBenchmark(("CodeScores" + suffix).c_str(), BM_CodeScores, set, type)
          ->RangeMultiplier(2)
          ->Range(1, 8);
      benchmark::RegisterBenchmark(("CodeValues" + suffix).c_str(), BM_CodeValues, set, type)
          ->RangeMultiplier(2)
          ->Range(1, 8);
    }
  }
  return true;
}();

}  // namespace
}  // namespace kvant::cpu
