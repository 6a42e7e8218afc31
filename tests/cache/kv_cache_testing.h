// Keys and values for tests of KvCache, and what a cache holds as plain numbers.
#ifndef KVANT_TESTS_CACHE_KV_CACHE_TESTING_H_
#define KVANT_TESTS_CACHE_KV_CACHE_TESTING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_block.h"
#include "kvant/cache/kv_cache.h"

namespace kvant::cache_testing {

// Numbers in an engine's memory: a copy, or themselves where that is the host's.
class OnEngine {
 public:
  OnEngine(const Engine& engine, absl::Span<const float> numbers);
  ~OnEngine();
  const float* data() const { return data_; }
  float* data() { return data_; }
  ConstTensor tensor() const { return {data_, bytes_}; }
  // Into those that it was made of.
  void Fetch();

 private:
  const Engine engine_;
  float* const host_;
  const size_t bytes_;
  KvBlock block_;
  float* data_;
};

// [batch][heads][tokens][size], each number by all of its coordinates; some channels of some heads
// are ten times as large, and token 0 is unlike others.
class Tokens {
 public:
  Tokens(uint64_t seed, int64_t batch, int64_t heads, int64_t tokens, int64_t size);

  int64_t count() const { return tokens_; }
  const float* at(int64_t b, int64_t h, int64_t t) const {
    return values_.data() + ((b * heads_ + h) * tokens_ + t) * size_;
  }
  float* at(int64_t b, int64_t h, int64_t t) {
    return values_.data() + ((b * heads_ + h) * tokens_ + t) * size_;
  }
  // Tokens [from, from + count), as a view.
  KvInput Slice(int64_t from, int64_t count) const;
  // Row `row` alone, as a batch of one.
  Tokens Row(int64_t row) const;

 private:
  Tokens(int64_t batch, int64_t heads, int64_t tokens, int64_t size)
      : batch_(batch),
        heads_(heads),
        tokens_(tokens),
        size_(size),
        values_(batch * heads * tokens * size) {}
  int64_t batch_, heads_, tokens_, size_;
  std::vector<float> values_;
};

// A cache with K and V of `tokens` tokens, not yet appended.
struct Bench {
  std::unique_ptr<KvCache> cache;
  Tokens k, v;

  // Appends tokens [from, to) to every layer, in pieces of `piece`.
  absl::Status Append(int64_t from, int64_t to, int64_t piece = 1 << 20) const;
};

// Options for tests: 2 layers, batch 2, 2 heads of 64.
KvCacheOptions SmallOptions(const std::string& scheme, int64_t capacity);
Bench MakeBench(const KvCacheOptions& options, int64_t tokens, const Engine* engine = nullptr);

// Of one batch row and head: [tokens][size] in the order of the sequence, in f64, as the definition
// of the scheme has it from what is stored. Rotated tokens stay rotated.
std::vector<double> Stored(const KvCache& cache, int64_t layer, bool values, int64_t row,
                           int64_t head);

// The largest error that a number of a token may have, of up to `largest`: a step of its code in
// the worst group.
double ErrorBound(const KvStorage& storage, double largest);

// Everything that a row holds, as bytes: for comparing caches.
std::string Contents(const KvCache& cache, int64_t layer, int64_t row);

// Attention of one query per sequence: [batch][query_heads][v size].
std::vector<float> Attend(KvCache& cache, int64_t layer, const std::vector<float>& q,
                          int64_t query_heads);
// By definition, from Stored().
std::vector<double> AttendByDefinition(const KvCache& cache, int64_t layer,
                                       const std::vector<float>& q, int64_t query_heads);
// Relative L2.
double Difference(const std::vector<float>& got, const std::vector<double>& want);

// x times a Hadamard matrix / sqrt(block), in blocks.
void Rotate(int64_t block, std::vector<double>& x);

std::vector<float> Queries(uint64_t seed, int64_t count);

}  // namespace kvant::cache_testing

#endif  // KVANT_TESTS_CACHE_KV_CACHE_TESTING_H_
