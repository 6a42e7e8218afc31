#include "kvant/tools/random_data.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "kvant/graph/op_shapes.h"
#include "kvant/graph/status.h"
#include "kvant/tools/backward_stats.h"
#include "kvant/tools/tensor_role.h"
#include "kvant/tools/tensor_walk.h"

namespace kvant {
namespace {

using Kind = TensorRole::Kind;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// splitmix64: a good mix of any counter.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Random numbers as a pure function of tensor and element.
class Random {
 public:
  explicit Random(uint64_t key) : key_(key) {}
  uint64_t Bits(uint64_t index) const { return Mix(key_ + index * 0xD1342543DE82EF95u); }
  // [0, 1)
  double Uniform(uint64_t index) const { return static_cast<double>(Bits(index) >> 11) * 0x1p-53; }
  // A whole number in [low, high].
  double Integer(uint64_t index, int64_t low, int64_t high) const {
    return static_cast<double>(low + static_cast<int64_t>(Bits(index) % (high - low + 1)));
  }
  // Mean 0, variance 1: four 16-bit uniforms summed.
  double Normal(uint64_t index) const {
    const uint64_t bits = Bits(index);
    double sum = 0;
    for (int part = 0; part < 4; ++part) sum += static_cast<double>(bits >> (16 * part) & 0xffff);
    return (sum / 65536.0 - 2.0) * std::sqrt(3.0);
  }

 private:
  uint64_t key_;
};

// What a filler knows of its tensor.
struct Context {
  const Graph& graph;
  const LogicalTensor& tensor;
  TensorRole role;
  DataKind kind;
  Random random;
  // kReal: an offset per coordinate of each axis.
  std::vector<std::vector<float>> means;
  // Rows that are masked whole may exist: SoftMax gives zeros for them.
  bool may_mask_rows = false;

  bool real() const { return kind == DataKind::kReal; }
};

std::vector<std::vector<float>> MeansOf(const LogicalTensor& tensor, uint64_t key) {
  std::vector<std::vector<float>> means;
  for (int axis = 0; axis < tensor.rank(); ++axis) {
    const Random random(Mix(key + 1000 + axis));
    std::vector<float>& table = means.emplace_back((*tensor.dims)[axis]);
    for (size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<float>(random.Uniform(i) - 0.4);
    }
  }
  return means;
}

double RealValue(const Context& c, int64_t index, const Dims& at) {
  double value = 0.7 * c.random.Normal(index);
  for (size_t axis = 0; axis < at.size(); ++axis) value += 0.6 * c.means[axis][at[axis]];
  return value;
}

// Codes around a static zero point, or over the range of the type.
double Code(const Context& c, int64_t index, const Dims& at) {
  const DataType type = c.tensor.type;
  if (IsFloat(type))
    return c.real() ? 16 * RealValue(c, index, at) : c.random.Integer(index, -2, 2);
  int64_t low = LowestOf(type);
  int64_t high = HighestOf(type);
  if (c.role.op != nullptr && c.role.op->kind == OpKind::kDequantize) {
    const auto zps = c.role.op->Get<Attr::kZps>();
    const int64_t center = zps.empty() ? 0 : zps[0];
    const int64_t spread = c.real() ? 30 : 4;
    return c.random.Integer(index, std::clamp(center - spread, low, high),
                            std::clamp(center + spread, low, high));
  }
  if (!c.real()) {
    const int64_t bound = BitsOf(type) <= 4 ? 2 : 4;
    if (low < 0) low = std::max(low, -bound);
    high = std::min(high, low < 0 ? bound : 2 * bound);
  }
  return c.random.Integer(index, low, high);
}

bool Quantizes(const Op& op) { return ClassOf(op.kind) == OpClass::kStore; }

// The data that a scale or zero point belongs to.
const LogicalTensor& QuantizedTensor(const Context& c) {
  const Op& op = *c.role.op;
  if (Quantizes(op)) return c.graph.tensor(op.outputs[0]);
  if (op.kind != OpKind::kScaledDotProductAttention) return c.graph.tensor(op.inputs[0]);
  // Scales of K come before those of V; which one this is hardly matters for sizes.
  const bool is_k =
      op.inputs.size() > 3 &&
      (op.inputs[3] == c.tensor.id ||
       (op.inputs.size() > 4 && op.inputs[4] == c.tensor.id && c.role.kind == Kind::kZeroPoints));
  return c.graph.tensor(op.inputs[is_k ? 1 : 2]);
}

double Scale(const Context& c, int64_t index) {
  if (!c.real()) return std::exp2(-c.random.Integer(index, 0, 2));
  const LogicalTensor& data = QuantizedTensor(c);
  const bool quantizes = Quantizes(*c.role.op);
  double top = 16;
  if (IsInteger(data.type)) {
    top = static_cast<double>(HighestOf(data.type));
    if (LowestOf(data.type) == 0) top = (top + 1) / 2;
  }
  const double scale = (quantizes ? 2.5 : 1.5) / top * (0.5 + c.random.Uniform(index));
  const bool negative = !quantizes && c.random.Bits(index + (uint64_t{1} << 40)) % 8 == 0;
  return negative ? -scale : scale;
}

double ZeroPoint(const Context& c, int64_t index) {
  if (IsFloat(c.tensor.type)) {
    return c.real() ? 0.4 * c.random.Normal(index) : c.random.Integer(index, -2, 2) / 2;
  }
  const LogicalTensor& data = QuantizedTensor(c);
  int64_t low = -1;
  int64_t high = 1;
  if (IsInteger(data.type)) {
    const bool is_signed = LowestOf(data.type) < 0;
    const int64_t range = HighestOf(data.type) - LowestOf(data.type) + 1;
    const int64_t center = is_signed ? 0 : range / 2;
    low = c.real() ? center - range / 4 : (is_signed ? -1 : 0);
    high = c.real() ? center + range / 4 : (is_signed ? 1 : 2);
  }
  return c.random.Integer(index, std::clamp(low, LowestOf(c.tensor.type), HighestOf(c.tensor.type)),
                          std::clamp(high, LowestOf(c.tensor.type), HighestOf(c.tensor.type)));
}

// So that another row is masked in another batch; a mask of rows and columns has none.
int64_t BatchOf(const Dims& at) { return at.size() > 2 ? at[0] : 0; }

// Causal, seen from the last row, with one row masked whole; for a mask that is
// one row, the last quarter of the columns is padding.
double Mask(const Context& c, int64_t index, const Dims& at) {
  const int rank = c.tensor.rank();
  const double bias = c.real() ? 0.5 * RealValue(c, index, at) : 0;
  if (rank < 2) return bias;
  const Dims& dims = *c.tensor.dims;
  const int64_t rows = dims[rank - 2];
  const int64_t cols = dims[rank - 1];
  const int64_t row = at[rank - 2];
  const int64_t col = at[rank - 1];
  if (rows == 1) return cols > 1 && col >= cols - cols / 4 ? -kInfinity : bias;
  const bool whole_row = c.may_mask_rows && row == (rows / 3 + BatchOf(at)) % rows;
  const bool future = col > row + std::max<int64_t>(cols - rows, 0);
  return whole_row || (future && cols > 1) ? -kInfinity : bias;
}

double Condition(const Context& c, int64_t index, const Dims& at) {
  const int rank = c.tensor.rank();
  if (rank >= 2 && c.may_mask_rows) {
    const int64_t rows = (*c.tensor.dims)[rank - 2];
    if (rows > 1 && at[rank - 2] == (rows / 2 + BatchOf(at)) % rows) return 0;
  }
  return c.random.Uniform(index) < 0.7 ? 1 : 0;
}

// Element `index`, below n, of the numbers below n in another order.
int64_t Shuffled(const Context& c, int64_t index, int64_t n) {
  int64_t step = n * 5 / 8 + 1;
  while (std::gcd(step, n) != 1) ++step;
  return (static_cast<int64_t>(c.random.Integer(0, 0, n - 1)) + index * step) % n;
}

// Where all tokens fit; one row in four, but not the first, is left out. No two tokens have the
// same slot.
double AppendPosition(const Context& c, int64_t index) {
  const Op& op = *c.role.op;
  const AppendedTokens to =
      AppendedTokensOf(op, c.graph.tensor(op.inputs[0]), c.graph.tensor(op.outputs[0]));
  if (index > 0 && c.random.Bits(index + (uint64_t{1} << 40)) % 4 == 0) return -1;
  if (op.kind == OpKind::kAppendPages) {
    return index < to.capacity ? static_cast<double>(Shuffled(c, index, to.capacity)) : -1;
  }
  const int64_t most = (to.capacity - to.tokens) / to.group;
  return c.random.Integer(index, 0, most) * static_cast<double>(to.group);
}

// No page twice where there are enough of them, so that all that is read lies in memory once; of
// real data, any page.
double PageOf(const Context& c, int64_t index) {
  const int64_t pages = std::max<int64_t>(c.graph.tensor(c.role.op->inputs[0]).dims->at(0), 1);
  if (c.real()) return c.random.Integer(index, 0, pages - 1);
  return static_cast<double>(Shuffled(c, index % pages, pages));
}

// The shape that a kKvLength or kQueryLength is about: that of the row indices.
double ScoresDim(const Context& c, int from_end) {
  const LogicalTensor& scores = c.graph.tensor(c.role.op->outputs[0]);
  if (scores.rank() < from_end) return 1;
  return static_cast<double>((*scores.dims)[scores.rank() - from_end]);
}

// The op that makes the scores that `op` works on: up through its floating-point
// operands, as masks and indices come in beside them.
const Op* MatMulBefore(const Graph& graph, const Op& op) {
  const Op* at = &op;
  for (int steps = 0; at != nullptr && steps < 16; ++steps) {
    const Op* next = nullptr;
    for (TensorId id : at->inputs) {
      const Graph::Use producer = graph.FindTensor(id)->producer;
      if (producer.op == Graph::kNoOp || !IsFloat(graph.tensor(id).type)) continue;
      next = &graph.ops()[producer.op];
      if (next->kind == OpKind::kMatMul) return next;
    }
    at = next;
  }
  return nullptr;
}

// The length of the sums that made the scores: what their scale goes by.
double HeadSizeOf(const Context& c) {
  const Op* const matmul = MatMulBefore(c.graph, *c.role.op);
  if (matmul == nullptr) return 64;
  const LogicalTensor& a = c.graph.tensor(matmul->inputs[0]);
  if (a.rank() < 2 || !a.has_shape()) return 64;
  const bool transposed = matmul->Get<Attr::kTransposeA>();
  return static_cast<double>((*a.dims)[a.rank() - (transposed ? 2 : 1)]);
}

double General(const Context& c, int64_t index, const Dims& at, int64_t bound) {
  if (c.tensor.type == kBoolean) return c.random.Uniform(index) < 0.5 ? 1 : 0;
  if (IsInteger(c.tensor.type)) {
    return c.random.Integer(index, std::max(-bound, LowestOf(c.tensor.type)),
                            std::min(bound, HighestOf(c.tensor.type)));
  }
  return c.real() ? RealValue(c, index, at) : c.random.Integer(index, -bound, bound);
}

// The tokens or columns of which a kKvLengths or kFirstTokens says which exist.
int64_t ColumnsOf(const Context& c) {
  const Op& op = *c.role.op;
  const bool direct = op.kind == OpKind::kScaledDotProductAttention;
  const LogicalTensor& of = c.graph.tensor(direct ? op.inputs[1] : op.outputs[0]);
  const bool loads = ClassOf(op.kind) == OpClass::kLoad;
  const int64_t axis = loads                         ? op.Get<Attr::kTokenAxis>()
                       : op.kind == OpKind::kSoftMax ? op.Get<Attr::kAxis>()
                                                     : -2;
  const int64_t group = loads ? op.Get<Attr::kTokenGroup>() : 1;
  return of.dims->at(FromFront(axis, of.rank())) * group;
}

// As many tokens of all segments, however these are cut: K and V agree.
double RangeOf(const Context& c, const Dims& at) {
  const Op& op = *c.role.op;
  const auto capacity = [&](int64_t segment) {
    const LogicalTensor& src = c.graph.tensor(op.inputs[segment + 1]);
    const int64_t axis = op.Get<Attr::kTokenAxis>();
    return src.dims->at(FromFront(axis, src.rank()));
  };
  int64_t all = 0;
  for (size_t s = 1; s < op.inputs.size(); ++s) all += capacity(static_cast<int64_t>(s) - 1);
  int64_t left = std::max<int64_t>(0, all - all / 4 - at[0] % 3);
  for (int64_t s = 0; s < at[1]; ++s) left -= std::min(left, capacity(s));
  const int64_t own = capacity(at[1]);
  if (at[2] == 1) return static_cast<double>(std::min(left, own));
  return static_cast<double>(own == 0 ? 0 : (at[0] * 7 + 5) % own);
}

double ValueOf(const Context& c, int64_t index, const Dims& at) {
  const Random& random = c.random;
  switch (c.role.kind) {
    case Kind::kCodes:
      return Code(c, index, at);
    case Kind::kScales:
      return Scale(c, index);
    case Kind::kZeroPoints:
      return ZeroPoint(c, index);
    case Kind::kDivisor:
      if (!c.real()) return std::exp2(random.Integer(index, 1, 3));
      return std::sqrt(HeadSizeOf(c)) * (0.9 + 0.2 * random.Uniform(index));
    case Kind::kMultiplier:
      if (!c.real()) return std::exp2(-random.Integer(index, 1, 3));
      return (0.9 + 0.2 * random.Uniform(index)) / std::sqrt(HeadSizeOf(c));
    case Kind::kCapInverse:
      return c.real() ? 1 / (8 + 2 * random.Uniform(index)) : 0.0625;
    case Kind::kCap:
      return c.real() ? 8 + 2 * random.Uniform(index) : 16;
    case Kind::kMask:
      return Mask(c, index, at);
    case Kind::kFill:
      // Finite in one kind of data: a row masked whole then averages the values.
      return c.real() ? -10000 : -kInfinity;
    case Kind::kCondition:
      return Condition(c, index, at);
    case Kind::kKvLength:
      return ScoresDim(c, 1);
    case Kind::kQueryLength:
      return ScoresDim(c, 2);
    case Kind::kKvLengths: {
      const int64_t capacity = ColumnsOf(c);
      return random.Integer(index, capacity - capacity / 4, capacity);
    }
    case Kind::kFirstTokens:
      return random.Integer(index, 0, ColumnsOf(c) / 4);
    case Kind::kPageTable:
      return PageOf(c, index);
    case Kind::kRanges:
      return RangeOf(c, at);
    case Kind::kQueryOffsets: {
      const int64_t queries = c.graph.tensor(c.role.op->inputs[0]).dims->at(0);
      return static_cast<double>(index * queries / std::max<int64_t>(1, c.tensor.elements() - 1));
    }
    case Kind::kPositions:
      return AppendPosition(c, index);
    case Kind::kSlopes:
      return std::exp2(-1 - static_cast<double>(index % 8));
    case Kind::kPositive:
      return c.real() ? 0.5 + 2 * random.Uniform(index) : std::exp2(random.Integer(index, 0, 2));
    case Kind::kSeed:
      return random.Integer(index, 1, 1 << 20);
    case Kind::kProbability:
      return 0.5;
    case Kind::kKeyValue:
    case Kind::kSinks:
      return General(c, index, at, 2);
    case Kind::kStats:  // filled in afterwards
    case Kind::kQuery:
    case Kind::kGeneral:
      return General(c, index, at, 4);
  }
  return 0;
}

void Fill(const Context& c, std::byte* data, Executor& executor) {
  constexpr int64_t kChunk = 1 << 15;
  const int64_t elements = c.tensor.elements();
  const Dims strides = c.tensor.StridesOrDense();
  const bool shared_bytes =
      BitsOf(c.tensor.type) < 8 || std::find(strides.begin(), strides.end(), 0) != strides.end();
  const auto fill = [&](int64_t first, int64_t last) {
    ForEachElement(c.tensor, first, last, [&](int64_t index, int64_t offset, const Dims& at) {
      StoreElement(c.tensor.type, data, offset, ValueOf(c, index, at));
    });
  };
  if (shared_bytes) return fill(0, elements);
  executor.ParallelFor((elements + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
    fill(chunk * kChunk, std::min(elements, (chunk + 1) * kChunk));
  });
}

bool MayMaskRows(const Graph& graph, TensorId id, const TensorRole& role) {
  if (role.op != nullptr && role.op->kind == OpKind::kScaledDotProductAttention) {
    return role.op->Get<Attr::kMode>() == "inf_as_zero";
  }
  const Op* softmax = nullptr;
  if (!FeedsSoftMax(graph, id, &softmax)) return false;
  return softmax->kind == OpKind::kExp || softmax->Get<Attr::kMode>() == "inf_as_zero";
}

}  // namespace

absl::StatusOr<BufferMap> MakeRandomInputs(const Graph& graph, const RandomDataOptions& options,
                                           Executor& executor) {
  BufferMap buffers;
  std::vector<std::pair<TensorId, const Op*>> stats;
  std::vector<TensorId> by_size = graph.inputs();
  for (const TensorId id : by_size) {
    if (!graph.tensor(id).has_shape()) {
      return MakeError(ErrorKind::kInvalidShape,
                       "graph input " + std::to_string(id) + " has no known shape");
    }
  }
  // The largest first, for which there may be no memory.
  std::sort(by_size.begin(), by_size.end(), [&](TensorId a, TensorId b) {
    return graph.tensor(a).memory_bytes() > graph.tensor(b).memory_bytes();
  });
  for (const TensorId id : by_size) {
    KVANT_ASSIGN_OR_RETURN(Buffer buffer, Buffer::For(graph.tensor(id)));
    buffers.emplace(id, std::move(buffer));
  }
  for (const TensorId id : graph.inputs()) {
    const LogicalTensor& tensor = graph.tensor(id);
    const uint64_t key = Mix(Mix(options.seed) + id);
    Context context{.graph = graph,
                    .tensor = tensor,
                    .role = RoleOf(graph, id),
                    .kind = options.kind,
                    .random = Random(key),
                    .means = {}};
    if (options.kind == DataKind::kReal) context.means = MeansOf(tensor, key);
    context.may_mask_rows = MayMaskRows(graph, id, context.role);
    if (context.role.kind == Kind::kStats) stats.emplace_back(id, context.role.op);
    Fill(context, buffers.at(id).data(), executor);
  }
  for (const auto& [id, subtract] : stats) {
    KVANT_RETURN_IF_ERROR(FillBackwardStats(graph, *subtract, id, buffers));
  }
  return buffers;
}

}  // namespace kvant
