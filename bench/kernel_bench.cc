// The inner loops of every kernel set that this CPU has, on a tile that lies in the
// second-level cache: what they would reach if memory were free.
#include <array>
#include <new>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

constexpr int64_t kSize = 128;
constexpr int64_t kElements = kHalfTile * kSize;

// As scratch is, at cache lines: tile registers take three times as long to load from elsewhere.
template <typename T>
struct AtCacheLines {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kAlignment)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kAlignment); }
  bool operator==(const AtCacheLines&) const = default;
};

struct Tile {
  using Floats = std::vector<float, AtCacheLines<float>>;
  using Pairs = std::vector<uint32_t, AtCacheLines<uint32_t>>;

  explicit Tile(int64_t rows)
      : q(rows * kSize, 0.5f), scores(rows * kTokenTile, 0.5f), out(rows * kSize), row(rows, 1.f) {}
  Floats q, scores, out, row;
  Floats kv = Floats(kElements, 0.25f);
  Pairs pairs = Pairs(kElements * 128, 0x3e803e80);
  Floats max = row, sum = row;
};

// Multiplications and additions of one product.
void CountProducts(benchmark::State& state, int64_t rows) {
  state.counters["FLOP/s"] = benchmark::Counter(static_cast<double>(2 * rows * kElements),
                                                benchmark::Counter::kIsIterationInvariantRate);
}

void BM_Qk(benchmark::State& state, const KernelSet* set) {
  Tile tile(state.range(0));
  for (auto _ : state) {
    set->qk(tile.q.data(), state.range(0), kSize, tile.kv.data(), kHalfTile, tile.scores.data());
  }
  CountProducts(state, state.range(0));
}

void BM_Pv(benchmark::State& state, const KernelSet* set) {
  Tile tile(state.range(0));
  for (auto _ : state) {
    set->pv(tile.scores.data(), state.range(0), kHalfTile, tile.kv.data(), kSize, tile.row.data(),
            tile.out.data());
  }
  CountProducts(state, state.range(0));
}

void BM_QkPairs(benchmark::State& state, const KernelSet* set) {
  Tile tile(state.range(0));
  for (auto _ : state) {
    set->pairs->qk(tile.pairs.data(), state.range(0), kSize / 2, tile.pairs.data(),
                   tile.scores.data());
  }
  CountProducts(state, state.range(0));
}

void BM_PvPairs(benchmark::State& state, const KernelSet* set) {
  Tile tile(state.range(0));
  for (auto _ : state) {
    set->pairs->pv(tile.scores.data(), state.range(0), kTokenTile, tile.pairs.data(), kSize,
                   tile.row.data(), tile.out.data());
  }
  CountProducts(state, state.range(0) * kTokenTile / kHalfTile);
}

// The same bytes as elements of another type.
TokenRows RowsOf(const Tile& tile, DataType type) {
  const int64_t bytes = BytesFor(type, kSize);
  return RowsFrom(tile.kv.data(), bytes, bytes, kHalfTile);
}

void BM_QkStored(benchmark::State& state, const KernelSet* set, DataType type) {
  Tile tile(state.range(0));
  const TokenRows rows = RowsOf(tile, type);
  for (auto _ : state) {
    set->qk_stored(type, rows, tile.q.data(), state.range(0), kSize, tile.scores.data());
  }
  state.SetBytesProcessed(state.iterations() * BytesFor(type, kElements));
}

void BM_PvStored(benchmark::State& state, const KernelSet* set, DataType type) {
  Tile tile(state.range(0));
  const TokenRows rows = RowsOf(tile, type);
  for (auto _ : state) {
    set->pv_stored(type, rows, tile.scores.data(), state.range(0), tile.row.data(), kSize,
                   tile.out.data());
  }
  state.SetBytesProcessed(state.iterations() * BytesFor(type, kElements));
}

void BM_Softmax(benchmark::State& state, const KernelSet* set) {
  Tile tile(state.range(0));
  for (auto _ : state) {
    set->softmax(tile.scores.data(), state.range(0), kTokenTile, nullptr, tile.max.data(),
                 tile.sum.data(), tile.row.data());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0) * kTokenTile);
}

void BM_Load(benchmark::State& state, const KernelSet* set, DataType type) {
  Tile tile(1);
  for (auto _ : state) {
    for (int64_t t = 0; t < kHalfTile; ++t) {
      set->load(type, tile.pairs.data(), t * kSize, kSize, tile.kv.data() + t * kSize);
    }
  }
  state.SetItemsProcessed(state.iterations() * kElements);
}

void BM_Expand(benchmark::State& state, const KernelSet* set) {
  Tile tile(1);
  const std::vector<float> parameters(kElements / state.range(0) + 1, 1.f);
  for (auto _ : state) {
    set->expand(parameters.data(), state.range(0), 0, kElements, tile.kv.data());
  }
  state.SetItemsProcessed(state.iterations() * kElements);
}

// Of a row of a tile.
void BM_Philox(benchmark::State& state, const KernelSet* set) {
  std::vector<uint32_t> words(kTokenTile);
  for (auto _ : state) {
    set->philox(1, 2, 3, kTokenTile / 4, words.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kTokenTile);
}

void BM_Scale(benchmark::State& state, const KernelSet* set) {
  Tile tile(1);
  const std::vector<float> parameters(kSize, 1.f);
  const Scaling how{parameters.data(), parameters.data(), state.range(0)};
  for (auto _ : state) {
    for (int64_t t = 0; t < kHalfTile; ++t) set->scale(how, kSize, tile.kv.data() + t * kSize);
  }
  state.SetItemsProcessed(state.iterations() * kElements);
}

void BM_Transpose(benchmark::State& state, const KernelSet* set) {
  Tile tile(kHalfTile);
  for (auto _ : state) {
    set->transpose(tile.kv.data(), kSize, kHalfTile, kSize, tile.q.data(), kHalfTile);
  }
  state.SetItemsProcessed(state.iterations() * kElements);
}

// A row of queries of one head: to be compared with a row's share of Qk and Pv.
void BM_Hadamard(benchmark::State& state, const KernelSet* set) {
  std::vector<float> row(kSize, 0.5f);
  for (auto _ : state) {
    set->hadamard(row.data(), kSize, state.range(0));
    benchmark::ClobberMemory();
  }
}

const bool kRegistered = [] {
  for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
    const auto add = [&](const std::string& name, auto body, auto... arguments) {
      return benchmark::RegisterBenchmark((name + "/" + set->name).c_str(), body, set,
                                          arguments...);
    };
    const auto add_typed = [&](const std::string& name, auto body, DataType type) {
      return add(name + "/" + std::string(DataTypeName(type)), body, type);
    };
    add("Qk", BM_Qk)->Arg(1)->Arg(4)->Arg(64);
    add("Pv", BM_Pv)->Arg(1)->Arg(4)->Arg(64);
    add("Softmax", BM_Softmax)->Arg(64);
    add("Expand", BM_Expand)->Arg(2)->Arg(3)->Arg(8)->Arg(24);
    add("Scale", BM_Scale)->Arg(1)->Arg(16)->Arg(32)->Arg(kSize);
    add("Philox", BM_Philox);
    add("Transpose", BM_Transpose);
    add("Hadamard", BM_Hadamard)->Arg(4)->Arg(32)->Arg(kSize);
    for (DataType type : {kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kS8, kU4, kU2}) {
      add_typed("Load", BM_Load, type);
      if (set->qk_stored == nullptr || !StoredProductsTake(type)) continue;
      add_typed("QkStored", BM_QkStored, type)->Arg(1)->Arg(2)->Arg(4)->Arg(16);
      add_typed("PvStored", BM_PvStored, type)->Arg(1)->Arg(2)->Arg(4)->Arg(16);
    }
    if (set->pairs == nullptr) continue;
    add("QkPairs", BM_QkPairs)->Arg(64)->Arg(256);
    add("PvPairs", BM_PvPairs)->Arg(64)->Arg(256);
  }
  return true;
}();

}  // namespace
}  // namespace kvant::cpu
