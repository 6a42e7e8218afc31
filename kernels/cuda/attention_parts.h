// Attention over several segments of K and V, of which the longest are packed codes, in one launch:
// blocks of two kinds, and whoever of a head of K and V comes last joins what they left.
//
//   K    sinks | codes . . . . . . . . . . . . . | window
//   V    sinks   | codes . . . . . . . . . . | window
//                |<--- both have codes ----->|
//   blocks [0, codes_block)   kOthersPart, by tiles: sinks, windows, what only K or only V has as
//                             codes
//   blocks [codes_block, ..)  kCodesPart: packed codes, at the memory's pace
//
// What parts leave of a row is its maximum, its sum and its output, undivided (LeftRows). They are
// joined in an order of their own, so that the result does not depend on who comes last.
#ifndef KVANT_KERNELS_CUDA_ATTENTION_PARTS_H_
#define KVANT_KERNELS_CUDA_ATTENTION_PARTS_H_

#include "kvant/kernels/cuda/attention_codes.h"
#include "kvant/kernels/cuda/attention_tiles.h"

namespace kvant::cuda {

// Of traits of kCodesPart and of kOthersPart, with blocks of as many threads.
template <class Codes, class Others>
struct AttentionParts {
  KVANT_DEVICE static void Run(const AttentionParams& p) {
    BlockRows rows;
    const bool left = BlockIndex() < p.codes_block ? AttentionTiles<Others>::RunPart(p, rows)
                                                   : AttentionCodes<Codes>::RunPart(p, rows);
    if (left) Join(p, rows);
  }

 private:
  using Ending = Finish<Others>;

  // rows: those that the block has left, of all that share K and V.
  KVANT_DEVICE static void Join(const AttentionParams& p, const BlockRows& rows) {
    const i32 b2s = Others::k.kv_varies_over_b2 ? p.batch[2] : 1;
    const i32 group = (rows.b0 * p.batch[1] + rows.b1) * b2s + rows.b2;
    const i32 tiles = RowTiles(Others::k, p.rows);
    const i32 blocks = RowTiles(Codes::k, p.rows) + tiles * ChannelBlocks(Others::k);
    const SharedAddress state = SharedBase();
    const SharedAddress factors =
        state + static_cast<u32>(AttentionShared::Of(Others::k, p.split.splits).factors);
    if (!Ending::IsLast(p.done + group, blocks, factors)) return;
    for (i32 i = 0; i < tiles * ChannelBlocks(Others::k); ++i) {
      BlockRows block = rows;
      block.row = i / ChannelBlocks(Others::k) * Ending::Rows();
      block.rows = MinOf(Ending::Rows(), p.rows - block.row);
      const i32 channel = i % ChannelBlocks(Others::k) * Others::k.v_block;
      Ending::JoinParts(p, block, channel, state, factors);
      Ending::StoreRows(p, block, channel, state, false);
      BlockSync();
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ATTENTION_PARTS_H_
