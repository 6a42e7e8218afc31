// The inner loops one by one, and the plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/philox.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

TEST(CpuKernels, LoadReadsEveryTypeAtEveryOffset) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (DataType type : {kF16, kBF16, kF32, kS32, kS8, kU8, kBoolean, kF8E5M2, kF8E4M3, kS4, kU4,
                          kS64, kS2, kU2}) {
      const GuardedBuffer buffer(BytesFor(type, 4096));
      for (size_t b = 0; b < buffer.bytes(); ++b) {
        static_cast<uint8_t*>(buffer.data())[b] = static_cast<uint8_t>(b * 167 + (b >> 8) * 31);
      }
      for (int64_t n : {0, 1, 2, 3, 4, 5, 7, 15, 16, 31, 33, 64}) {
        for (int64_t index = 4096 - 80; index + n <= 4096; ++index) {
          std::vector<float> out(n + 1, 42.f);
          kernels->load(type, buffer.data(), index, n, out.data());
          for (int64_t e = 0; e < n; ++e) {
            const float want = static_cast<float>(LoadElement(type, buffer.data(), index + e));
            ASSERT_TRUE(out[e] == want || (std::isnan(out[e]) && std::isnan(want)))
                << kernels->name << " " << DataTypeName(type) << " element " << index + e;
          }
          ASSERT_EQ(out[n], 42.f);
        }
      }
    }
  }
}

TEST(CpuKernels, F16IsReadExactly) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (int bits = 0; bits < 65536; ++bits) {
      const uint16_t half = static_cast<uint16_t>(bits);
      float got;
      kernels->load(kF16, &half, 0, 1, &got);
      const float want = F16ToF32(half);
      ASSERT_TRUE((std::isnan(got) && std::isnan(want)) ||
                  std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(want))
          << bits;
    }
  }
}

// Neighbours in a tile of parameters differ, and blocks end where memory does.
TEST(CpuKernels, TransposingPutsEveryParameterInItsPlace) {
  struct Elements {
    Elements(DataType type, int64_t groups, int seed) {
      stored.type = type;
      const int64_t bytes = BytesFor(type, kPageUnit * groups);
      for (int64_t b = 0; b < kTileBlocks; ++b) {
        void* const data = blocks.emplace_back(bytes).data();
        for (int64_t i = 0; i < kPageUnit * groups; ++i) {
          const int64_t at = (b * kPageUnit * groups + i) * 37 % 211 + seed;
          const double whole =
              static_cast<double>(LowestOf(type) + at % (int64_t{1} << BitsOf(type)));
          StoreElement(type, data, i, IsFloat(type) ? 0.25 + static_cast<double>(at) : whole);
        }
        stored.blocks[b] = static_cast<const uint8_t*>(data);
      }
    }
    double At(int64_t token, int64_t group, int64_t groups) const {
      const int64_t at = token % kPageUnit * groups + group;
      return LoadElement(stored.type, stored.blocks[token / kPageUnit], at);
    }
    std::deque<GuardedBuffer> blocks;
    StoredParameters stored;
  };
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    if (kernels->codes == nullptr) continue;
    for (int64_t groups = 1; TransposesGroups(groups); ++groups) {
      for (const DataType type : {kF32, kF16, kBF16}) {
        for (const DataType point_type : {kUndef, kF32, kF16, kBF16, kS8, kU8, kS4, kU4}) {
          const Elements scales(type, groups, 1);
          const bool has_points = point_type != kUndef;
          const Elements points(has_points ? point_type : kU8, groups, 5);
          // Values' biases are in codes, scores' times the scales.
          for (const bool in_codes : {false, true}) {
            const CodeBiases how{has_points && IsFloat(point_type), in_codes, 8.f};
            std::vector<float> out(groups * kTokenTile), biases(groups * kTokenTile);
            const int64_t columns = groups % 2 == 0 ? kHalfTile : kTokenTile;
            const CodeLimits limits = kernels->codes->transpose_parameters(
                scales.stored, has_points ? points.stored : StoredParameters(), how, columns,
                groups, out.data(), biases.data());
            ASSERT_TRUE(limits.finite);
            double most = 0, low = has_points || in_codes ? 1e9 : 0,
                   high = has_points || in_codes ? -1e9 : 0;
            for (int64_t t = 0; t < columns; ++t) {
              for (int64_t g = 0; g < groups; ++g) {
                const double scale = scales.At(t, g, groups);
                const double point = has_points ? points.At(t, g, groups) : 0;
                const double unit = in_codes ? 1 : scale;
                const double shift = !how.real ? point * unit : in_codes ? point / scale : point;
                const double bias = shift + 8 * unit;
                ASSERT_EQ(out[g * kTokenTile + t], scale)
                    << kernels->name << " token " << t << " group " << g << " of " << groups;
                ASSERT_NEAR(biases[g * kTokenTile + t], bias,
                            1e-6 * (std::abs(shift) + 8 * std::abs(unit)))
                    << kernels->name << " token " << t << " group " << g << " of " << groups << ", "
                    << DataTypeName(point_type);
                most = std::max(most, std::abs(scale));
                const float limit =
                    in_codes ? biases[g * kTokenTile + t] : static_cast<float>(point);
                low = has_points || in_codes ? std::min<double>(low, limit) : 0;
                high = has_points || in_codes ? std::max<double>(high, limit) : 0;
              }
            }
            if (columns < kTokenTile) {
              EXPECT_EQ(out[columns], 0.f) << "beyond " << columns;
            }
            EXPECT_EQ(limits.scale, most);
            EXPECT_EQ(limits.low, low);
            EXPECT_EQ(limits.high, high);
          }
        }
      }
    }
  }
}

// Wherever it is in the tile; and where scale and zero point are numbers, but their product is not.
TEST(CpuKernels, TransposingSeesAParameterThatIsNotFinite) {
  constexpr int64_t kGroups = 4, kAll = kTokenTile * kGroups;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<uint8_t> points(kAll, 200);
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    if (kernels->codes == nullptr) continue;
    const auto is_finite = [&](int64_t at, float scale, bool has_points) {
      std::vector<float> scales(kAll, -0.5f), out(kAll), biases(kAll);
      scales[at] = scale;
      StoredParameters stored_scales{kF32}, stored_points{has_points ? kU8 : kUndef};
      for (int64_t b = 0; b < kTileBlocks; ++b) {
        const int64_t first = b * kPageUnit * kGroups;
        stored_scales.blocks[b] = reinterpret_cast<const uint8_t*>(scales.data() + first);
        stored_points.blocks[b] = points.data() + first;
      }
      const CodeBiases how{.offset = 8.f};
      return kernels->codes
          ->transpose_parameters(stored_scales, stored_points, how, kTokenTile, kGroups, out.data(),
                                 biases.data())
          .finite;
    };
    for (int64_t at = 0; at < kAll; ++at) {
      for (const bool has_points : {false, true}) {
        for (const float scale : {kInf, -kInf, std::nanf(""), -std::nanf("")}) {
          ASSERT_FALSE(is_finite(at, scale, has_points)) << kernels->name << ", element " << at;
        }
      }
      ASSERT_FALSE(is_finite(at, -3e38f, true)) << kernels->name << ", element " << at;
      ASSERT_TRUE(is_finite(at, 1e30f, true)) << kernels->name << ", element " << at;
    }
  }
}

// A tile's last tokens may not exist: their scales and zero points are 0.
TEST(CpuKernels, ParametersOfZerosAreFinite) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    if (kernels->codes == nullptr) continue;
    for (const bool real : {false, true}) {
      for (const bool in_codes : {false, true}) {
        std::vector<float> scales(kTokenTile), points(kTokenTile), out(kTokenTile),
            biases(kTokenTile);
        for (int64_t t = 0; t < 37; ++t) {
          scales[t] = 0.5f;
          points[t] = 3.f;
        }
        const CodeBiases how{real, in_codes, 8.f};
        EXPECT_TRUE(
            kernels->codes->biases(scales.data(), points.data(), how, kTokenTile, biases.data())
                .finite);
        EXPECT_TRUE(std::isfinite(biases[37]));
        StoredParameters stored_scales{kF32}, stored_points{kF32};
        for (int64_t b = 0; b < kTileBlocks; ++b) {
          stored_scales.blocks[b] = reinterpret_cast<const uint8_t*>(&scales[b * kPageUnit]);
          stored_points.blocks[b] = reinterpret_cast<const uint8_t*>(&points[b * kPageUnit]);
        }
        EXPECT_TRUE(kernels->codes
                        ->transpose_parameters(stored_scales, stored_points, how, kTokenTile, 1,
                                               out.data(), biases.data())
                        .finite);
        for (const float nan : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
          points[40] = nan;
          EXPECT_FALSE(
              kernels->codes->biases(scales.data(), points.data(), how, kTokenTile, biases.data())
                  .finite);
        }
      }
    }
  }
}

// Whatever the sizes of scores and factor, the largest is exp(0).
TEST(CpuKernels, TheLargestOfScaledScoresIsTheBase) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (float size = 1; size < 1e30f; size *= 7) {
      for (const float factor : {0.0884f, 0.3f, 1.7f}) {
        float row[kTokenTile], max = kNegInf, sum = 0, shrink = 0;
        for (int t = 0; t < kTokenTile; ++t) row[t] = size * static_cast<float>(t % 5 == 0);
        kernels->softmax(row, 1, kTokenTile, &factor, &max, &sum, &shrink);
        EXPECT_EQ(max, size * factor);
        for (int t = 0; t < kTokenTile; t += 5) ASSERT_EQ(row[t], 1.f) << kernels->name << size;
      }
    }
  }
}

TEST(CpuKernels, ExpAndTanhAreAccurate) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (double x = -87.2; x <= 0; x += 0.0137 * kTokenTile) {
      float row[kTokenTile], in[kTokenTile];
      for (int t = 0; t < kTokenTile; ++t) {
        row[t] = in[t] = static_cast<float>(std::min(0.0, x + t * 0.0137));
      }
      kernels->exp_row(row, kTokenTile, 0.f);
      for (int t = 0; t < kTokenTile; ++t) {
        ASSERT_LT(std::abs(row[t] / std::exp(double{in[t]}) - 1), 3e-7)
            << kernels->name << " " << in[t];
      }
      for (int t = 0; t < kTokenTile; ++t) row[t] = in[t] = (in[t] + 43.f) / 4.f;
      kernels->tanh(row, kTokenTile);
      for (int t = 0; t < kTokenTile; ++t) {
        if (in[t] == 0) continue;
        ASSERT_LT(std::abs(row[t] / std::tanh(double{in[t]}) - 1), 5e-7)
            << kernels->name << " " << in[t];
      }
    }
    // What large soft caps make of scores.
    for (double x = 2e-38; x < 1; x *= 10) {
      float row[kTokenTile];
      std::fill_n(row, kTokenTile, static_cast<float>(x));
      kernels->tanh(row, kTokenTile);
      EXPECT_LT(std::abs(row[0] / std::tanh(x) - 1), 5e-7) << kernels->name << " " << x;
    }
    float edge[kTokenTile] = {kNegInf, -88.f, -1e30f, 0.f, std::nanf("")};
    kernels->exp_row(edge, kTokenTile, 0.f);
    EXPECT_EQ(edge[0], 0.f);
    EXPECT_EQ(edge[1], 0.f);
    EXPECT_EQ(edge[2], 0.f);
    EXPECT_EQ(edge[3], 1.f);
    EXPECT_TRUE(std::isnan(edge[4]));
  }
}

// The definition, in f64.
std::vector<double> Rotated(const std::vector<float>& x, int64_t block) {
  std::vector<double> y(x.size());
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()); ++i) {
    const int64_t first = i / block * block;
    for (int64_t j = 0; j < block; ++j) {
      const int ones = std::popcount(static_cast<uint64_t>((i - first) & j));
      y[i] += (ones % 2 == 0 ? 1.0 : -1.0) * x[first + j];
    }
    y[i] /= std::sqrt(static_cast<double>(block));
  }
  return y;
}

TEST(CpuKernels, HadamardIsTheDefinitionInEveryBlock) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (int64_t block = 1; block <= 512; block *= 2) {
      for (int64_t n : {block, 3 * block, 5 * block, 8 * block}) {
        const GuardedBuffer buffer(n * sizeof(float));
        float* x = static_cast<float*>(buffer.data());
        std::vector<float> in(n);
        for (int64_t e = 0; e < n; ++e) {
          in[e] = x[e] = static_cast<float>((e * 7919 + 13) % 1009) / 100.f - 4.f;
        }
        kernels->hadamard(x, n, block);
        const std::vector<double> want = Rotated(in, block);
        // log2(block) sums of rounded numbers, each within what the whole can be.
        const double bound = 6.1 * std::sqrt(static_cast<double>(block)) * 10 * 0x1p-24;
        for (int64_t e = 0; e < n; ++e) {
          ASSERT_NEAR(x[e], want[e], bound) << kernels->name << " " << block << " of " << n;
        }
      }
    }
  }
}

TEST(CpuKernels, HadamardGivesTheSameBitsOnEverySet) {
  for (int64_t block : {2, 4, 8, 16, 32, 128, 512}) {
    std::vector<float> in(5 * block), first;
    for (size_t e = 0; e < in.size(); ++e) in[e] = std::sin(static_cast<float>(3 * e + 1));
    for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
      std::vector<float> x = in;
      kernels->hadamard(x.data(), static_cast<int64_t>(x.size()), block);
      if (i == 0) first = x;
      ASSERT_EQ(std::memcmp(x.data(), first.data(), x.size() * sizeof(float)), 0)
          << kernels->name << " " << block;
    }
  }
}

TEST(CpuKernels, HadamardKeepsNanAndInfinityInTheirBlock) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (int64_t block : {2, 4, 8, 16, 64}) {
      std::vector<float> in(7 * block, 1.f);
      in[block + 1] = std::nanf("");
      in[3 * block + block / 2] = kInf;
      in[5 * block] = kInf;
      in[6 * block - 1] = kInf;
      // The sum of these is beyond f32, what is left of it after division is not.
      for (int64_t e = 0; e < block; ++e) in[6 * block + e] = 2e38f / static_cast<float>(block / 2);
      std::vector<float> x = in;
      kernels->hadamard(x.data(), static_cast<int64_t>(x.size()), block);
      const std::vector<double> want = Rotated(in, block);
      for (size_t e = 0; e < x.size(); ++e) {
        if (std::isfinite(want[e])) {
          ASSERT_NEAR(x[e], want[e], 1e-5 * (1 + std::abs(want[e]))) << kernels->name << " " << e;
        } else {
          ASSERT_TRUE(std::isnan(want[e]) ? std::isnan(x[e]) : x[e] == want[e])
              << kernels->name << " block " << block << " element " << e;
        }
      }
    }
  }
}

// The known answers of Random123's Philox4x32-10: {counter, key, words}.
TEST(CpuKernels, PhiloxIsThePublishedOne) {
  struct Answer {
    uint64_t offset, block, seed;
    uint32_t words[4];
  };
  const Answer answers[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x0370734413198a2e,
       0x85a308d3243f6a88,
       0x299f31d0a4093822,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    for (const Answer& answer : answers) {
      uint32_t words[4];
      kernels->philox(answer.seed, answer.offset, answer.block, 1, words);
      EXPECT_TRUE(std::equal(words, words + 4, answer.words)) << kernels->name;
    }
  }
}

TEST(CpuKernels, PhiloxGivesTheSameWordsOnEverySet) {
  constexpr uint64_t kSeed = 0x0123456789abcdef, kOffset = 0xfedcba9876543210;
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    // Also where a block's number passes 32 and 64 bits.
    for (uint64_t block : {uint64_t{0}, uint64_t{5}, uint64_t{0xfffffffe}, ~uint64_t{0} - 3}) {
      for (int64_t blocks = 0; blocks <= 40; ++blocks) {
        const GuardedBuffer buffer(blocks * kPhiloxBlock * sizeof(uint32_t));
        auto* const words = static_cast<uint32_t*>(buffer.data());
        kernels->philox(kSeed, kOffset, block, blocks, words);
        for (int64_t b = 0; b < blocks; ++b) {
          uint32_t want[kPhiloxBlock];
          PhiloxWords(kSeed, kOffset, block + static_cast<uint64_t>(b), want);
          ASSERT_TRUE(std::equal(want, want + kPhiloxBlock, words + b * kPhiloxBlock))
              << kernels->name << " block " << b << " of " << blocks << " from " << block;
        }
      }
    }
  }
}

TEST(CpuKernels, DropoutKeepsWordsFromItsThresholdOn) {
  constexpr uint64_t kAll = uint64_t{1} << 32;
  EXPECT_EQ(DropoutThreshold(0), 0u);
  EXPECT_EQ(DropoutThreshold(-1), 0u);
  EXPECT_EQ(DropoutThreshold(0.5), kAll / 2);
  EXPECT_EQ(DropoutThreshold(0x1p-33), 1u);
  EXPECT_EQ(DropoutThreshold(1 - 0x1p-33), kAll);
  EXPECT_EQ(DropoutThreshold(1), kAll);
  EXPECT_EQ(DropoutThreshold(2), kAll);
  EXPECT_EQ(DropoutThreshold(std::nan("")), kAll);
}

TEST(CpuKernels, NamesAreThoseOfTheTable) {
  EXPECT_EQ(KernelNames().substr(0, 8), "portable");
  ASSERT_NE(KernelsAt(0), nullptr);
  EXPECT_STREQ(KernelsAt(0)->name, "portable");
}

TEST(CpuPlan, ScratchIsBoundedAtAnyLength) {
  for (int64_t q : {1, 512, 1 << 20}) {
    for (int64_t s : {1, 4096, 1 << 24}) {
      for (int64_t heads : {1, 8, 64}) {
        AttentionSpec spec;
        spec.batch = {1, heads, 4};
        spec.q_len = q;
        spec.kv_len = s;
        spec.head_size = spec.v_head_size = 128;
        const Plan plan(spec, *KernelsAt(0));
        EXPECT_LE(plan.scratch(2) * 4, 16 << 20) << q << " " << s;
      }
    }
  }
}

TEST(CpuPlan, SaysWhatItDoes) {
  Case c = Plain({.b0 = 1, .b1 = 8, .ratio = 4, .q_len = 1, .kv_len = 2048, .d = 128, .dv = 128});
  auto executable = CompileAttention(c.spec, *KernelsAt(0));
  ASSERT_TRUE(executable.ok());
  const std::string text = (*executable)->kernel();
  EXPECT_NE(
      text.find(
          "cpu/portable online softmax, f32 products of tiles, 4-row x 128-token tiles, 8 splits"),
      std::string::npos)
      << text;
}

TEST(CpuPlan, SaysWhatItDoesNotTake) {
  Case c = Plain({});
  const auto expect = [&](std::string_view part) {
    const auto executable = CompileAttention(c.spec, *KernelsAt(0));
    ASSERT_FALSE(executable.ok());
    EXPECT_EQ(ErrorKindOf(executable.status()), ErrorKind::kUnimplemented);
    EXPECT_NE(std::string(executable.status().message()).find(part), std::string::npos)
        << executable.status();
  };
  c.spec.output.type = kU4;
  expect("output of type u4");
  c.spec.output.type = kF32;
  c.spec.k[0].data.type = kS32;
  expect("keys of type s32");
  c.spec.k[0].data.type = kF32;
  c.spec.head_size = 1 << 20;
  expect("head sizes of 1048576");
  c.spec.head_size = 40;
  c.spec.probs_quantization = FakeQuantize{kU8, 1.f, 300};
  expect("zero point of 300");
  c.spec.probs_quantization.reset();
  c.spec.q_hadamard = 16;
  expect("a head of 40 channels rotated in blocks of 16");
  c.spec.q_hadamard = 6;
  expect("a head of 40 channels rotated in blocks of 6");
  c.spec.q_hadamard = 8;
  c.spec.output_hadamard = -8;
  expect("a head of 40 channels rotated in blocks of -8");
}

}  // namespace
}  // namespace kvant::cpu
