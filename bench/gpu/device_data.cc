#include "kvant/bench/gpu/device_data.h"

#include <utility>

#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerMultiprocessor = 4;

constexpr char kText[] = R"(#include "kvant/kernels/device/device.h"

using namespace kvant::device;

struct FillParams {
  u32* to;
  i64 words;
  u32 seed;
  i32 kind;
  float low, high;
};
struct ReadParams {
  const Words4* from;
  u32* sink;
  i64 vectors;
};

__device__ u32 Mix(u32 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

extern "C" __global__ void fill(const __grid_constant__ FillParams p) {
  const i64 step = GridBlocks() * BlockThreads();
  for (i64 i = BlockIndex() * BlockThreads() + ThreadIndex(); i < p.words; i += step) {
    const u32 a = Mix(static_cast<u32>(i) ^ Mix(p.seed + static_cast<u32>(i >> 32)));
    const u32 b = Mix(a + 0x9e3779b9u);
    const float span = p.high - p.low;
    const float x = p.low + span * (static_cast<float>(a >> 8) * 0x1p-24f);
    const float y = p.low + span * (static_cast<float>(b >> 8) * 0x1p-24f);
    u32 word = a;
    if (p.kind == 1) word = AsBits(x);
    if (p.kind == 2) word = PackF16(x, y);
    if (p.kind == 3) word = PackBF16(x, y);
    if (p.kind == 4) {
      word = 0;
      for (i32 k = 0; k < 4; ++k) {
        const float part = static_cast<float>((a >> (8 * k)) & 255u) * (1.0f / 256);
        const i32 byte = static_cast<i32>(p.low) + static_cast<i32>(part * (span + 1));
        word |= (static_cast<u32>(byte) & 255u) << (8 * k);
      }
    }
    Store(p.to + i, word);
  }
}

extern "C" __global__ void __launch_bounds__(512) read(const __grid_constant__ ReadParams p) {
  const i64 step = GridBlocks() * BlockThreads();
  const i64 first = BlockIndex() * BlockThreads() + ThreadIndex();
  u32 sum = 0;
  i64 i = first;
  for (; i + 3 * step < p.vectors; i += 4 * step) {
    Words4 w[4];
    KVANT_UNROLL for (i32 k = 0; k < 4; ++k) w[k] = Load(p.from + i + k * step);
    KVANT_UNROLL for (i32 k = 0; k < 4; ++k) sum ^= w[k].v[0] ^ w[k].v[1] ^ w[k].v[2] ^ w[k].v[3];
  }
  for (; i < p.vectors; i += step) {
    const Words4 w = Load(p.from + i);
    sum ^= w.v[0] ^ w.v[1] ^ w.v[2] ^ w.v[3];
  }
  // Almost never, and nobody knows beforehand.
  if (sum == 0x5bd1e995u) Store(p.sink, sum);
}
)";

struct FillParams {
  void* to;
  int64_t words;
  uint32_t seed;
  int32_t kind;
  float low, high;
};
struct ReadParams {
  const void* from;
  void* sink;
  int64_t vectors;
};

int64_t Blocks(const cuda::Launcher& launcher) {
  return int64_t{kBlocksPerMultiprocessor} * launcher.properties().multiprocessors;
}

cuda::KernelSpec SpecOf(const char* entry) {
  cuda::KernelSpec spec;
  spec.source = {.name = std::string("bench_") + entry, .text = kText, .entry = entry};
  spec.threads = kThreads;
  return spec;
}

}  // namespace

std::string DeviceData::SourceText() { return kText; }

absl::StatusOr<DeviceData> DeviceData::Create(std::shared_ptr<cuda::Launcher> launcher) {
  DeviceData data;
  data.launcher_ = std::move(launcher);
  KVANT_ASSIGN_OR_RETURN(data.fill_, data.launcher_->Load(SpecOf("fill")));
  KVANT_ASSIGN_OR_RETURN(data.read_, data.launcher_->Load(SpecOf("read")));
  KVANT_ASSIGN_OR_RETURN(void* sink, data.launcher_->memory()->Allocate(sizeof(uint32_t)));
  data.sink_ = {sink, [from = data.launcher_->memory()](void* memory) { from->Free(memory); }};
  return data;
}

absl::Status DeviceData::Fill(void* to, size_t bytes, uint32_t seed, const Range& range,
                              void* stream) const {
  const FillParams params{to,        static_cast<int64_t>(bytes / 4),
                          seed,      static_cast<int32_t>(range.kind),
                          range.low, range.high};
  return launcher_->Launch(*fill_, Blocks(*launcher_), &params, sizeof(params), stream);
}

absl::Status DeviceData::Read(const void* from, size_t bytes, void* stream) const {
  const ReadParams params{from, sink_.get(), static_cast<int64_t>(bytes / 16)};
  return launcher_->Launch(*read_, Blocks(*launcher_), &params, sizeof(params), stream);
}

}  // namespace kvant
