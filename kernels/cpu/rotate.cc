#include "kvant/kernels/cpu/rotate.h"

#include <algorithm>

#include "kvant/kernels/cpu/lines.h"

namespace kvant::cpu {
namespace {

int64_t PiecesOfLine(const RotateProblem& problem) {
  return CeilDiv(problem.line.extent, problem.piece);
}

void RotatePiece(const KernelSet& kernels, const RotateProblem& p, const void* src,
                 int64_t src_index, void* dst, int64_t dst_index, int64_t n, float* buffer) {
  const bool in_place = p.dst_type == kF32 && p.line.dst == 1;
  float* const values = in_place ? static_cast<float*>(dst) + dst_index : buffer;
  LoadLine(kernels, p.src_type, src, src_index, p.line.src, n, values);
  if (p.block > 1) kernels.hadamard(values, n, p.block);
  if (!in_place) StoreLine(kernels, p.dst_type, dst, dst_index, p.line.dst, n, values);
}

}  // namespace

int64_t RotateUnits(const RotateProblem& problem) {
  return CeilDiv(problem.lines * PiecesOfLine(problem), problem.run);
}

void RotateUnit(const KernelSet& kernels, const RotateProblem& p, const RowPositions& positions,
                const void* src, void* dst, int64_t unit, float* buffer) {
  const int64_t pieces = PiecesOfLine(p);
  const int64_t end = std::min((unit + 1) * p.run, p.lines * pieces);
  for (int64_t at = unit * p.run; at < end; ++at) {
    const int64_t first = at % pieces * p.piece;
    int64_t src_index = first * p.line.src, dst_index = first * p.line.dst;
    int64_t line = at / pieces;
    if (positions.data != nullptr && positions.Of(line / p.lines_of_row) < 0) continue;
    for (int a = p.outer_axes - 1; a >= 0; --a) {
      src_index += line % p.outer[a].extent * p.outer[a].src;
      dst_index += line % p.outer[a].extent * p.outer[a].dst;
      line /= p.outer[a].extent;
    }
    RotatePiece(kernels, p, src, src_index, dst, dst_index,
                std::min(p.piece, p.line.extent - first), buffer);
  }
}

}  // namespace kvant::cpu
