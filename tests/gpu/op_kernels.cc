#include "kvant/tests/gpu/op_kernels.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/substitute.h"
#include "kvant/graph/data_type.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/device/device.h"

namespace kvant::cuda {
namespace {

constexpr char kBegin[] = R"(  const i64 thread = BlockIndex() * BlockThreads() + ThreadIndex();
  const u32* const x = p.in + thread * $0;
  u32* const y = p.out + thread * $1;
  const SharedAddress s = SharedBase();
)";

float Modest(std::mt19937& random, float most) {
  return std::uniform_real_distribution<float>(-most, most)(random);
}

uint32_t AnyFloat(std::mt19937& random) {
  static constexpr float kSpecial[] = {
      0.f,      -0.f,      1.f,      -1.f,         0.5f,         1.5f,        2.5f,
      65504.f,  65520.f,   0x1p-24f, 0x1p-25f,     0x1p-126f,    0x1p-149f,   3e38f,
      INFINITY, -INFINITY, NAN,      1 + 0x1p-11f, 1 + 0x3p-11f, 1 + 0x1p-8f, 1 + 0x3p-8f};
  const uint32_t choice = random() % 4;
  if (choice == 0) return std::bit_cast<uint32_t>(kSpecial[random() % std::size(kSpecial)]);
  if (choice == 1) return static_cast<uint32_t>(random());
  return std::bit_cast<uint32_t>(Modest(random, choice == 2 ? 4.f : 200.f));
}

uint32_t Pair(std::mt19937& random, uint16_t (*convert)(float), bool whole, float most) {
  uint32_t word = 0;
  for (int half = 0; half < 2; ++half) {
    const float value = Modest(random, most);
    word |= uint32_t{convert(whole ? std::round(value) : value)} << (16 * half);
  }
  return word;
}

uint32_t Draw(OpInputs inputs, std::mt19937& random) {
  switch (inputs) {
    case OpInputs::kBits:
      return static_cast<uint32_t>(random());
    case OpInputs::kFloats:
      return AnyFloat(random);
    case OpInputs::kModestFloats:
      return std::bit_cast<uint32_t>(Modest(random, 30));
    case OpInputs::kSmallF16:
      return Pair(random, F32ToF16, true, 8);
    case OpInputs::kSmallBF16:
      return Pair(random, F32ToBF16, true, 8);
    case OpInputs::kModestF16:
      return Pair(random, F32ToF16, false, 2);
  }
  return 0;
}

float AsF32(uint32_t word) { return std::bit_cast<float>(word); }

// Floats in order as whole numbers in order: neighbours differ by one, and +0 is -0.
int64_t Rank(uint32_t word) {
  const int64_t magnitude = word & 0x7fffffffu;
  return word >> 31 ? -magnitude : magnitude;
}

bool SameF32(uint32_t a, uint32_t b) {
  return a == b || (std::isnan(AsF32(a)) && std::isnan(AsF32(b)));
}

bool SameHalves(uint32_t a, uint32_t b, float (*convert)(uint16_t)) {
  for (int half = 0; half < 2; ++half) {
    const auto one = static_cast<uint16_t>(a >> (16 * half));
    const auto other = static_cast<uint16_t>(b >> (16 * half));
    if (one != other && !(std::isnan(convert(one)) && std::isnan(convert(other)))) return false;
  }
  return true;
}

bool Same(OpComparison comparison, uint32_t a, uint32_t b) {
  switch (comparison) {
    case OpComparison::kWords:
      return a == b;
    case OpComparison::kF32:
      return SameF32(a, b);
    case OpComparison::kF32OrZero:
      return SameF32(a, b) || Rank(a) == Rank(b);
    case OpComparison::kF32To4Ulp: {
      if (SameF32(a, b)) return true;
      const bool finite = std::isfinite(AsF32(a)) && std::isfinite(AsF32(b));
      return finite && std::llabs(Rank(a) - Rank(b)) <= 4;
    }
    case OpComparison::kF16:
      return SameHalves(a, b, F16ToF32);
    case OpComparison::kBF16:
      return SameHalves(a, b, [](uint16_t bits) { return AsF32(uint32_t{bits} << 16); });
    case OpComparison::kSums:
      // Terms are cut off at 2^-23 of the largest, which is at most 64 with the sums before it.
      return std::abs(AsF32(a) - AsF32(b)) <= 17 * 64 * 0x1p-23f;
  }
  return false;
}

absl::Status ErrorOf(const simt::Report& report) {
  if (report.errors.empty()) return absl::OkStatus();
  return absl::InternalError(absl::StrJoin(
      report.errors, " ",
      [](std::string* out, const simt::Error& error) { out->append(error.message); }));
}

size_t OutputWords(const OpKernel& op) {
  return static_cast<size_t>(kOpBlocks) * kOpThreads * static_cast<size_t>(op.out_words);
}

// Memory of a launcher, with a copy of `words`.
class Words {
 public:
  static absl::StatusOr<Words> Copy(Launcher& launcher, absl::Span<const uint32_t> words) {
    KVANT_ASSIGN_OR_RETURN(void* data,
                           launcher.memory()->Allocate(words.size() * sizeof(uint32_t)));
    Words copy(launcher, data);
    KVANT_RETURN_IF_ERROR(
        launcher.memory()->CopyFromHost(data, words.data(), words.size() * sizeof(uint32_t)));
    return copy;
  }
  Words(Words&& other) noexcept : launcher_(other.launcher_), data_(other.data_) {
    other.data_ = nullptr;
  }
  Words& operator=(Words&&) = delete;
  ~Words() { launcher_.memory()->Free(data_); }
  uint32_t* data() const { return static_cast<uint32_t*>(data_); }

 private:
  Words(Launcher& launcher, void* data) : launcher_(launcher), data_(data) {}
  Launcher& launcher_;
  void* data_;
};

}  // namespace

const std::vector<OpKernel>& OpKernels() {
  // Arrays and initializers put commas into the code, hence the dots.
#define KVANT_OP_KERNEL(name, in_words, out_words, inputs, comparison, ...) \
  {#name,                                                                   \
   in_words,                                                                \
   out_words,                                                               \
   OpInputs::inputs,                                                        \
   OpComparison::comparison,                                                \
   #__VA_ARGS__,                                                            \
   [](const OpParams& p) {                                                  \
     using namespace device; /* NOLINT: as in the source of a GPU */        \
     const i64 thread = BlockIndex() * BlockThreads() + ThreadIndex();      \
     [[maybe_unused]] const u32* const x = p.in + thread * (in_words);      \
     [[maybe_unused]] u32* const y = p.out + thread * (out_words);          \
     [[maybe_unused]] const SharedAddress s = SharedBase();                 \
     __VA_ARGS__                                                            \
   }},
  static const auto* const kOps = new std::vector<OpKernel>{
#include "kvant/tests/gpu/op_kernels.inc"
  };
  return *kOps;
}

std::string OpSource(absl::Span<const OpKernel> ops) {
  std::string text =
      "#include \"kvant/kernels/device/device.h\"\n"
      "using namespace kvant::device;\n"
      "struct OpParams {\n  const u32* in;\n  u32* out;\n};\n";
  for (const OpKernel& op : ops) {
    absl::StrAppend(&text, "extern \"C\" __global__ void Test", op.name,
                    "(const __grid_constant__ OpParams p) {\n",
                    absl::Substitute(kBegin, op.in_words, op.out_words), op.code, "\n}\n");
  }
  return text;
}

KernelSpec SpecOf(const OpKernel& op) {
  KernelSpec spec;
  spec.source = {.name = "op_" + op.name, .text = OpSource({&op, 1}), .entry = "Test" + op.name};
  spec.threads = kOpThreads;
  spec.shared_bytes = kOpSharedBytes;
  return spec;
}

std::vector<uint32_t> InputsOf(const OpKernel& op) {
  std::mt19937 random(20240917);
  std::vector<uint32_t> words(static_cast<size_t>(kOpBlocks * kOpThreads * op.in_words));
  for (uint32_t& word : words) word = Draw(op.inputs, random);
  return words;
}

std::string Compare(const OpKernel& op, absl::Span<const uint32_t> expected,
                    absl::Span<const uint32_t> got) {
  if (got.size() != expected.size()) return "different numbers of words";
  size_t different = 0, first = 0;
  for (size_t i = got.size(); i-- > 0;) {
    if (Same(op.comparison, expected[i], got[i])) continue;
    ++different;
    first = i;
  }
  if (different == 0) return "";
  const auto words = static_cast<size_t>(op.out_words);
  return absl::StrFormat("%d of %d words differ, first word %d of thread %d: %08x, not %08x",
                         different, got.size(), first % words, first / words, got[first],
                         expected[first]);
}

absl::StatusOr<std::vector<uint32_t>> RunOnExecutor(const OpKernel& op, simt::MmaModel model) {
  const std::vector<uint32_t> in = InputsOf(op);
  std::vector<uint32_t> out(OutputWords(op), kUnwritten);
  const OpParams params{in.data(), out.data()};
  simt::Options options;
  options.accumulate = model;
  const simt::Report report =
      simt::Launch({kOpBlocks, kOpThreads, kOpSharedBytes}, options, [&] { op.body(params); });
  KVANT_RETURN_IF_ERROR(ErrorOf(report));
  return out;
}

absl::StatusOr<std::vector<uint32_t>> RunOn(Launcher& launcher, const OpKernel& op) {
  KVANT_ASSIGN_OR_RETURN(const std::shared_ptr<const LoadedKernel> kernel,
                         launcher.Load(SpecOf(op)));
  std::vector<uint32_t> result(OutputWords(op), kUnwritten);
  KVANT_ASSIGN_OR_RETURN(const Words in, Words::Copy(launcher, InputsOf(op)));
  KVANT_ASSIGN_OR_RETURN(const Words out, Words::Copy(launcher, result));
  const OpParams params{in.data(), out.data()};
  KVANT_RETURN_IF_ERROR(launcher.Launch(*kernel, kOpBlocks, &params, sizeof(params), nullptr));
  KVANT_RETURN_IF_ERROR(
      launcher.memory()->CopyToHost(result.data(), out.data(), result.size() * sizeof(uint32_t)));
  return result;
}

}  // namespace kvant::cuda
