// A kernel that uses every function of the device vocabulary once, for compilers.
#ifndef KVANT_TESTS_BACKENDS_CUDA_RUNTIME_VOCABULARY_KERNEL_H_
#define KVANT_TESTS_BACKENDS_CUDA_RUNTIME_VOCABULARY_KERNEL_H_

namespace kvant::cuda {

inline constexpr char kVocabularyKernel[] = R"(
#include "kvant/kernels/device/device.h"

using namespace kvant::device;

struct Params {
  const u8* bytes;
  const u16* halves;
  const u32* words;
  const i32* ints;
  const i64* longs;
  const float* floats;
  const Words2* pairs;
  const Words4* quads;
  float* out;
  u32* counter;
};

KVANT_DEVICE float Memory(const Params& p, i64 i) {
  float sum = Load(p.bytes + i) + Load(p.halves + i) + Load(p.words + i) + Load(p.ints + i) +
              Load(p.longs + i) + Load(p.floats + i);
  sum += Load(p.pairs + i).v[1] + Load(p.quads + i).v[3];
  sum += LoadCoherent(p.floats + i) + LoadCoherent(p.quads + i).v[2];
  return sum;
}

KVANT_DEVICE float Numbers(float x, u32 w, i32 lane) {
  w = AndXor(w, 0xf0f0u, 0x88u) + AndOr(w, 0x0f0fu, 0x6400u) + Permute(w, 3u, 0x5140u);
  w = Opaque(w) + MultiplyHigh(w, 0x9e3779b9u);
  w += PackF16(x, 2.0f) + PackBF16(x, 3.0f) + MultiplyF16x2(w, w) + AddF16x2(w, 5u);
  w += FmaF16x2(w, w, 7u) + MultiplyByLowF16(w, 9u) + MultiplyByHighF16(w, 11u);
  w += FmsF16x2(w, w, 15u);
  w += FmaBF16x2(w, w, 17u) + MaxAbsF16x2(w, 13u) + F16x2OfE4M3(w);
  float y = F16Low(w) + F16High(w) + BF16Low(w) + BF16High(w) + AsFloat(w);
  y = Fma(y, x, 1.0f) + Max(y, x) + Min(y, 2.0f) + Abs(x) + Divide(x, y) + Exp2(x) + Log(y);
  y += Tanh(x) + RoundEven(y) + static_cast<float>(Fma(static_cast<double>(x), 2.0, 3.0));
  y += static_cast<float>(AsDouble(AsBits(static_cast<double>(x))));
  y += ShuffleXor(y, 1) + ShuffleXor(AsBits(y), 2) + Shuffle(y, lane) + Shuffle(w, 4);
  return Any(y > 0.0f) ? y : x;
}

KVANT_DEVICE float Shared(const Params& p) {
  const i32 lane = LaneIndex(), warp = WarpIndex();
  const SharedAddress at = SharedBase() + 512 * warp + 16 * lane;
  StoreShared8(at, 1);
  StoreShared16(at + 2, 2);
  StoreShared32(at + 4, 3);
  StoreShared64(at + 8, {{4, 5}});
  WarpSync();
  float sum = LoadShared8(at) + LoadShared16(at + 2) + LoadShared32(at + 4);
  sum += LoadShared64(at + 8).v[0] + LoadShared128(at).v[3];
  StoreShared128(at, {{6, 7, 8, 9}});
  CopyAsync(4, at, p.words + lane);
  CopyAsync(8, at, p.pairs + lane);
  CopyAsync(16, at, p.quads + lane);
  CopyAsync(4, at, p.words + lane, 2);
  CopyAsync(8, at, p.pairs + lane, 0);
  CopyAsync(16, at, p.quads + lane, lane);
  CopyAsyncCommit();
  CopyAsyncWait<1>();
  CopyAsyncWait<0>();
  BlockSync();
  const Words4 a = LoadMatrix4(at), b = LoadMatrix4Transposed(at);
  float d[4] = {sum, 0.0f, 0.0f, 0.0f};
  MmaF16K16(d, a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], TransposeMatrix(b.v[1]));
  MmaF16K8(d, a.v[0], a.v[1], b.v[0]);
  MmaBF16K16(d, a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], b.v[1]);
  MmaTF32K8(d, a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], b.v[1]);
  return d[0] + d[1] + d[2] + d[3];
}

extern "C" __global__ void vocabulary(const Params p) {
  const i64 i = BlockIndex() * BlockThreads() + ThreadIndex();
  float sum = Memory(p, i) + Numbers(Load(p.floats + i), Load(p.words + i), LaneIndex());
  sum += Shared(p);
  Store(p.out + i, sum);
  Fence();
  if (AtomicIncrement(p.counter, static_cast<u32>(GridBlocks())) == 0) {
    KVANT_UNROLL
    for (i32 k = 0; k < 4; ++k) sum += p.out[k];
    KVANT_NO_UNROLL
    for (i32 k = 0; k < 8; ++k) sum *= p.out[k];
    Store(p.out, sum);
  }
}
)";

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_BACKENDS_CUDA_RUNTIME_VOCABULARY_KERNEL_H_
