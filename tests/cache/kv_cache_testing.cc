#include "kvant/tests/cache/kv_cache_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

#include "kvant/graph/status.h"
#include "kvant/tests/conformance/data.h"

namespace kvant::cache_testing {
namespace {

int Index(KvSegmentKind kind) { return static_cast<int>(kind); }

// Slot of the part, in f64.
class PartReader {
 public:
  PartReader(const KvCache& cache, int64_t layer, bool values, KvPart part)
      : tensor_(**cache.tensor(layer, values)),
        desc_(tensor_.part(part)),
        memory_(cache.part(layer, values, part)) {
    DeviceMemory& memory = cache.engine().memory();
    if (!memory.asynchronous() || memory_.bytes == 0) return;
    copy_.resize(memory_.bytes);
    EXPECT_TRUE(memory.CopyToHost(copy_.data(), memory_.data, copy_.size()).ok());
    memory_.data = copy_.data();
  }

  double At(int64_t b, int64_t h, int64_t slot, int64_t channel) const {
    const Dims& dims = *desc_.dims;
    const int64_t index =
        ((std::min(b, dims[0] - 1) * dims[1] + std::min(h, dims[1] - 1)) * dims[2] + slot) *
            dims[3] +
        channel;
    return LoadElement(desc_.type, memory_.data, index);
  }

 private:
  const KvTensor& tensor_;
  const LogicalTensor& desc_;
  ConstTensor memory_;
  std::vector<std::byte> copy_;
};

}  // namespace

OnEngine::OnEngine(const Engine& engine, absl::Span<const float> numbers)
    : engine_(engine),
      host_(const_cast<float*>(numbers.data())),
      bytes_(numbers.size() * sizeof(float)),
      data_(host_) {
  if (!engine.memory().asynchronous()) return;
  block_ = KvBlock::Allocate(engine.shared_memory(), bytes_).value();
  data_ = reinterpret_cast<float*>(block_.bytes().data());
  EXPECT_TRUE(engine_.memory().CopyFromHost(data_, host_, bytes_).ok());
}

// What was put onto streams may read it.
OnEngine::~OnEngine() { EXPECT_TRUE(engine_.memory().SynchronizeAll().ok()); }

void OnEngine::Fetch() {
  if (data_ == host_) return;
  EXPECT_TRUE(engine_.memory().CopyToHost(host_, data_, bytes_).ok());
}

Tokens::Tokens(uint64_t seed, int64_t batch, int64_t heads, int64_t tokens, int64_t size)
    : Tokens(batch, heads, tokens, size) {
  // Most tests ask for the same, and sines of all numbers would take longer than what they test.
  static auto& made = *new std::map<std::array<int64_t, 5>, std::vector<float>>;
  std::vector<float>& all = made[{static_cast<int64_t>(seed), batch, heads, tokens, size}];
  if (!all.empty()) {
    values_ = all;
    return;
  }
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < size; ++d) {
          const int64_t coordinates[] = {b, h, t, d};
          double value = conformance::Signal(seed, coordinates);
          if (d % 13 == 5 + h % 3) value *= 10;
          if (t == 0) value *= 0.25;
          at(b, h, t)[d] = static_cast<float>(value);
        }
      }
    }
  }
  all = values_;
}

KvInput Tokens::Slice(int64_t from, int64_t count) const {
  KvInput input;
  input.desc.type = kF32;
  input.desc.dims = Dims{batch_, heads_, count, size_};
  input.desc.strides = Dims{heads_ * tokens_ * size_, tokens_ * size_, size_, 1};
  input.data = {at(0, 0, from), static_cast<size_t>(KvInputBytes(input.desc))};
  return input;
}

Tokens Tokens::Row(int64_t row) const {
  Tokens one(1, heads_, tokens_, size_);
  std::copy_n(at(row, 0, 0), one.values_.size(), one.values_.begin());
  return one;
}

absl::Status Bench::Append(int64_t from, int64_t to, int64_t piece) const {
  for (int64_t t = from; t < to; t += piece) {
    const int64_t count = std::min(piece, to - t);
    for (int64_t layer = 0; layer < cache->options().layers; ++layer) {
      KVANT_RETURN_IF_ERROR(cache->Append(layer, k.Slice(t, count), v.Slice(t, count)));
    }
  }
  return absl::OkStatus();
}

KvCacheOptions SmallOptions(const std::string& scheme, int64_t capacity) {
  KvCacheOptions options;
  options.layers = 2;
  options.batch = 2;
  options.heads = 2;
  options.head_size = 64;
  options.capacity = capacity;
  options.schemes = {ParseCacheScheme(scheme).value()};
  const auto scales = [&](const KvStorage& one) {
    std::vector<std::vector<float>> all;
    if (!one.static_scales()) return all;
    const bool by_channel = one.format.groups == NumberFormat::Groups::kChannel;
    const double highest = static_cast<double>(HighestOf(one.format.type));
    for (int64_t layer = 0; layer < options.layers; ++layer) {
      std::vector<float>& of = all.emplace_back(by_channel ? options.heads * options.head_size : 1);
      for (size_t i = 0; i < of.size(); ++i) {
        const bool outlier = i % 64 % 13 == 5 + i / 64 % 3;
        const double largest = by_channel ? (outlier ? 22 : 2.2) + 0.005 * (i % 64) : 22;
        of[i] = static_cast<float>(largest / highest);
      }
    }
    return all;
  };
  options.k_scales = scales(options.schemes[0].k);
  options.v_scales = scales(options.schemes[0].v);
  return options;
}

Bench MakeBench(const KvCacheOptions& options, int64_t tokens, const Engine* engine) {
  const Engine own = Engine::Create({.threads = 2}).value();
  absl::StatusOr<std::unique_ptr<KvCache>> cache =
      KvCache::Create(engine != nullptr ? *engine : own, options);
  EXPECT_TRUE(cache.ok()) << cache.status();
  return {*std::move(cache), Tokens(1, options.batch, options.heads, tokens, options.head_size),
          Tokens(2, options.batch, options.heads, tokens, options.value_size())};
}

std::vector<double> Stored(const KvCache& cache, int64_t layer, bool values, int64_t row,
                           int64_t head) {
  const KvTensor& tensor = **cache.tensor(layer, values);
  const int64_t size = tensor.shape().head_size;
  const auto ranges = cache.Ranges(layer, values, row);
  std::vector<double> out;
  const auto plain = [&](KvPart part, const KvRange& range, int64_t slots) {
    const PartReader reader(cache, layer, values, part);
    for (int64_t i = 0; i < range.tokens; ++i) {
      for (int64_t d = 0; d < size; ++d) {
        out.push_back(reader.At(row, head, (range.first + i) % slots, d));
      }
    }
  };
  const KvRange& main = ranges[Index(KvSegmentKind::kMain)];
  const int64_t main_slots = tensor.layout().slots(KvSegmentKind::kMain);
  if (tensor.has(KvPart::kSinks)) {
    plain(KvPart::kSinks, ranges[Index(KvSegmentKind::kSinks)], tensor.layout().sinks());
  }
  if (!tensor.has(KvPart::kScales)) {
    plain(KvPart::kCodes, main, main_slots);
    return out;
  }
  const PartReader codes(cache, layer, values, KvPart::kCodes);
  const PartReader scales(cache, layer, values, KvPart::kScales);
  const PartReader zero_points(cache, layer, values, KvPart::kZeroPoints);
  const bool has_zero_points = tensor.has(KvPart::kZeroPoints);
  const bool real = has_zero_points && IsFloat(tensor.part(KvPart::kZeroPoints).type);
  const CodebookRow* codebook = tensor.storage().format.codebook;
  const Dims group = tensor.GroupShape();
  for (int64_t i = 0; i < main.tokens; ++i) {
    const int64_t t = (main.first + i) % main_slots;
    for (int64_t d = 0; d < size; ++d) {
      double code = codes.At(row, head, t, d);
      if (codebook != nullptr) code = codebook->values[static_cast<size_t>(code)];
      const double scale = scales.At(row, head / group[1], t / group[2], d / group[3]);
      const double zp =
          has_zero_points ? zero_points.At(row, head / group[1], t / group[2], d / group[3]) : 0;
      out.push_back(real ? code * scale - zp : (code - zp) * scale);
    }
  }
  if (tensor.has(KvPart::kWindow)) {
    plain(KvPart::kWindow, ranges[Index(KvSegmentKind::kWindow)],
          tensor.layout().slots(KvSegmentKind::kWindow));
  }
  return out;
}

double ErrorBound(const KvStorage& storage, double largest) {
  if (!storage.format.quantized()) return BitsOf(storage.format.type) == 32 ? 0 : largest / 128;
  if (IsFloat(storage.format.type)) return largest / 4;
  const double levels = std::pow(2.0, BitsOf(storage.format.type)) - 1;
  return 2 * largest / levels * (storage.format.codebook != nullptr ? 2 : 1) + largest / 500;
}

std::string Contents(const KvCache& cache, int64_t layer, int64_t row) {
  std::string bytes;
  for (const bool values : {false, true}) {
    for (int64_t head = 0; head < cache.options().heads; ++head) {
      const std::vector<double> stored = Stored(cache, layer, values, row, head);
      bytes.append(reinterpret_cast<const char*>(stored.data()), stored.size() * sizeof(double));
    }
  }
  return bytes;
}

std::vector<float> Attend(KvCache& cache, int64_t layer, const std::vector<float>& q,
                          int64_t query_heads) {
  const KvCacheOptions& options = cache.options();
  const auto attention =
      cache.Attention({.query_heads = query_heads, .window = KeepOf(options, layer)});
  EXPECT_TRUE(attention.ok()) << attention.status();
  std::vector<float> out(options.batch * query_heads * options.value_size(), -1.f);
  if (!attention.ok()) return out;
  const Engine engine = cache.engine();
  OnEngine out_there(engine, out);
  const absl::Status status = (*attention)
                                  ->Execute(Stream(engine), layer, OnEngine(engine, q).tensor(),
                                            {out_there.data(), out.size() * sizeof(float)});
  EXPECT_TRUE(status.ok()) << status;
  out_there.Fetch();
  return out;
}

void Rotate(int64_t block, std::vector<double>& x) {
  std::vector<double> matrix(block * block);
  for (int64_t i = 0; i < block; ++i) {
    for (int64_t j = 0; j < block; ++j) {
      const double sign = __builtin_parityll(i & j) != 0 ? -1 : 1;
      matrix[i * block + j] = sign / std::sqrt(static_cast<double>(block));
    }
  }
  const std::vector<double> from = x;
  for (size_t first = 0; first < x.size(); first += block) {
    for (int64_t i = 0; i < block; ++i) {
      const auto row = matrix.begin() + i * block;
      x[first + i] = std::inner_product(row, row + block, from.begin() + first, 0.0);
    }
  }
}

std::vector<double> AttendByDefinition(const KvCache& cache, int64_t layer,
                                       const std::vector<float>& q, int64_t query_heads) {
  const KvCacheOptions& options = cache.options();
  const int64_t size = options.head_size, v_size = options.value_size();
  const int64_t shared = query_heads / options.heads;
  const int64_t k_rotation = cache.tensor(layer, false).value()->rotation();
  const int64_t v_rotation = cache.tensor(layer, true).value()->rotation();
  std::vector<double> all;
  for (int64_t b = 0; b < options.batch; ++b) {
    std::vector<double> k, v;
    for (int64_t head = 0; head < query_heads; ++head) {
      if (head % shared == 0) {
        k = Stored(cache, layer, false, b, head / shared);
        v = Stored(cache, layer, true, b, head / shared);
        if (k_rotation != 0) Rotate(k_rotation, k);
        if (v_rotation != 0) Rotate(v_rotation, v);
      }
      const int64_t tokens = static_cast<int64_t>(k.size()) / size;
      EXPECT_EQ(tokens, static_cast<int64_t>(v.size()) / v_size);
      std::vector<double> scores(tokens);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < size; ++d) {
          scores[t] += k[t * size + d] * q[(b * query_heads + head) * size + d];
        }
        scores[t] /= std::sqrt(static_cast<double>(size));
      }
      const double most = tokens == 0 ? 0 : *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      std::vector<double> out(v_size);
      for (int64_t t = 0; t < tokens; ++t) {
        const double p = std::exp(scores[t] - most);
        sum += p;
        for (int64_t d = 0; d < v_size; ++d) out[d] += p * v[t * v_size + d];
      }
      for (double& x : out) x /= tokens == 0 ? 1 : sum;
      all.insert(all.end(), out.begin(), out.end());
    }
  }
  return all;
}

double Difference(const std::vector<float>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-30));
}

std::vector<float> Queries(uint64_t seed, int64_t count) {
  std::vector<float> q(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at[] = {i};
    q[i] = static_cast<float>(conformance::Noise(seed, at));
  }
  return q;
}

}  // namespace kvant::cache_testing
