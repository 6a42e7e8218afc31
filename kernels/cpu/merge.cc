// To merge is to attend to the parts: their statistics are the scores, their outputs the values.
// So the kernels of attention do it, a tile of parts at a time.
#include "kvant/kernels/cpu/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kvant/kernels/cpu/lines.h"

namespace kvant::cpu {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
// Channels of a tile of parts that lie in the first-level cache together.
constexpr int64_t kPieceChannels = 256;

int64_t TileParts(const MergeProblem& p) { return std::min(p.part_count, kHalfTile); }
int64_t PieceChannels(const MergeProblem& p) { return std::min(p.channels, kPieceChannels); }

class RowMerger {
 public:
  RowMerger(const MergeCall& call, float* buffer)
      : call_(call),
        p_(*call.problem),
        kernels_(*call.kernels),
        scores_(buffer),
        out_(buffer + kHalfTile),
        values_(out_ + p_.channels) {}

  void Merge(int64_t row) {
    Locate(row);
    float max = kNegInf, sum = 0.f;
    std::fill_n(out_, p_.channels, 0.f);
    for (int64_t first = 0; first < p_.part_count; first += kHalfTile) {
      AddTile(first, std::min(kHalfTile, p_.part_count - first), max, sum);
    }
    const bool empty = max == kNegInf && sum == 0.f;
    if (!empty) {
      for (int64_t c = 0; c < p_.channels; ++c) out_[c] /= sum;
    }
    StoreLine(kernels_, p_.output.type, call_.outputs[p_.output.buffer], IndexOf(p_.output),
              p_.output.channel, p_.channels, out_);
    if (p_.stats.type == kUndef) return;
    const float stats = empty ? kNegInf : max + std::log(sum);
    StoreLine(kernels_, p_.stats.type, call_.outputs[p_.stats.buffer], IndexOf(p_.stats), 1, 1,
              &stats);
  }

 private:
  void Locate(int64_t row) {
    for (int a = p_.axes - 1; a >= 0; --a) {
      at_[a] = row % p_.extents[a];
      row /= p_.extents[a];
    }
  }
  int64_t IndexOf(const MergeArray& array) const {
    int64_t index = 0;
    for (int a = 0; a < p_.axes; ++a) index += at_[a] * array.strides[a];
    return index;
  }
  const void* DataOf(const MergeArray& array) const {
    return array.buffer < 0 ? array.data : call_.inputs[array.buffer];
  }

  void AddTile(int64_t first, int64_t count, float& max, float& sum) {
    const MergePart* const parts = p_.parts + first;
    std::fill(scores_ + count, scores_ + kHalfTile, kNegInf);
    bool counts[kHalfTile];
    for (int64_t i = 0; i < count; ++i) {
      const MergeArray& stats = parts[i].stats;
      kernels_.load(stats.type, DataOf(stats), IndexOf(stats), 1, scores_ + i);
      counts[i] = scores_[i] != kNegInf;
    }
    float shrink;
    kernels_.softmax(scores_, 1, kHalfTile, nullptr, &max, &sum, &shrink);
    const int64_t piece = PieceChannels(p_);
    for (int64_t c = 0; c < p_.channels; c += piece) {
      const int64_t n = std::min(piece, p_.channels - c);
      for (int64_t i = 0; i < count; ++i) {
        const MergeArray& output = parts[i].output;
        float* const values = values_ + i * n;
        if (counts[i]) {
          LoadLine(kernels_, output.type, DataOf(output), IndexOf(output) + c * output.channel,
                   output.channel, n, values);
        } else {
          // Whatever it holds would be multiplied by 0.
          std::fill_n(values, n, 0.f);
        }
      }
      kernels_.pv(scores_, 1, count, values_, n, &shrink, out_ + c);
    }
  }

  const MergeCall& call_;
  const MergeProblem& p_;
  const KernelSet& kernels_;
  float* const scores_;
  float* const out_;
  float* const values_;
  int64_t at_[kMaxMergeAxes] = {};
};

}  // namespace

int64_t MergeUnits(const MergeProblem& problem) { return CeilDiv(problem.rows, problem.run); }

int64_t MergeFloats(const MergeProblem& problem) {
  return kHalfTile + problem.channels + TileParts(problem) * PieceChannels(problem);
}

void MergeUnit(const MergeCall& call, int64_t unit, float* buffer) {
  const MergeProblem& p = *call.problem;
  RowMerger merger(call, buffer);
  const int64_t end = std::min((unit + 1) * p.run, p.rows);
  for (int64_t row = unit * p.run; row < end; ++row) merger.Merge(row);
}

}  // namespace kvant::cpu
