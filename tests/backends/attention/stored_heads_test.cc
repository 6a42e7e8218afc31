// Where the tokens of a head lie, and what heads in turn ask for: all rows of their next tile, each
// once.
#include "kvant/kernels/cpu/stored_heads.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <vector>

#include "kvant/kernels/cpu/code_parameters.h"

namespace kvant::cpu {
namespace {

constexpr int64_t kChannels = 48, kTokens = 5 * kTokenTile;

// A segment of f16, in pages in no order or in one piece, with an address that nothing is read
// from.
struct Pool {
  Pool(int64_t heads, int64_t page_tokens, bool by_tokens) : tokens(page_tokens) {
    segment.data.data = this;
    segment.data.type = kF16;
    segment.data.strides[0] = heads * page_tokens * kChannels;
    segment.data.strides[1] = by_tokens ? kChannels : page_tokens * kChannels;
    segment.data.strides[kRow] = by_tokens ? heads * kChannels : kChannels;
    segment.data.strides[kCol] = 1;
    segment.tokens = page_tokens;
    segment.joins_pages = page_tokens % kPageUnit == 0;
    const int64_t pages = CeilDiv(kTokens, page_tokens);
    for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>((i * 7 + 3) % pages));
  }
  Piece PieceInTurn(const InTurn& in_turn) const {
    Piece piece{&segment, 0, kTokens, 0};
    if (tokens < kTokens) {
      piece.pages = table.data();
      piece.page_stride = 1;
    }
    piece.prefetch_end = kTokens;
    piece.in_turn = in_turn;
    return piece;
  }
  const uint8_t* RowAt(int64_t head, int64_t token) const {
    Position p;
    p.at[1] = head;
    p.at[0] = tokens < kTokens ? table[static_cast<size_t>(token / tokens)] : 0;
    p.at[kRow] = token % tokens;
    return static_cast<const uint8_t*>(segment.data.data) + 2 * segment.data.IndexOf(p);
  }

  int64_t tokens;
  Segment segment;
  std::vector<int32_t> table;
};

// Heads [first, first + count) in turn, over all tiles.
void CheckTurn(const Pool& pool, int64_t first, int64_t count) {
  const Reader reader;
  std::vector<StoredHeads> heads(static_cast<size_t>(count));
  for (int64_t column = 0; column < kTokens; column += kTokenTile) {
    std::map<const uint8_t*, int> asked, wanted;
    for (int64_t i = 0; i < count; ++i) {
      const Piece piece = pool.PieceInTurn({i, count});
      Position p;
      p.at[1] = first + i;
      int64_t tokens = 0;
      ForParts({&piece, 1}, p, column, kTokenTile, /*join=*/true, [&](const Part& part) {
        ForRuns(part, [&](const Part& run) {
          const TokenRows rows =
              RowsAt(heads[static_cast<size_t>(i)].At(reader, run), run, kChannels);
          EXPECT_EQ(rows.row_bytes, 2 * kChannels);
          for (int64_t t = 0; t < run.tokens; ++t) {
            EXPECT_EQ(rows.At(t), pool.RowAt(first + i, column + run.column + t));
            ++asked[rows.Next(t)];
          }
          tokens += run.tokens;
          return true;
        });
      });
      ASSERT_EQ(tokens, kTokenTile);
      for (int64_t t = column + kTokenTile; t < column + 2 * kTokenTile; ++t) {
        if (t < kTokens) ++wanted[pool.RowAt(first + i, t)];
      }
    }
    // There may be no token after the last.
    if (column + kTokenTile == kTokens) break;
    ASSERT_EQ(asked, wanted) << "from column " << column;
  }
}

TEST(CpuStoredHeads, HeadsInTurnAskForTheirNextTile) {
  for (bool by_tokens : {false, true}) {
    for (int64_t page_tokens : {int64_t{16}, int64_t{32}, int64_t{64}, int64_t{128}, kTokens}) {
      for (int64_t heads : {1, 2, 3, 8, 11, 16, 20, 32}) {
        const Pool pool(heads, page_tokens, by_tokens);
        for (int64_t in_turn : {int64_t{1}, int64_t{4}, heads, int64_t{16}}) {
          for (int64_t first = 0; first + in_turn <= heads && in_turn <= 16; first += in_turn) {
            SCOPED_TRACE(testing::Message()
                         << (by_tokens ? "by tokens, " : "") << "pages of " << page_tokens << ", "
                         << heads << " heads, " << in_turn << " in turn from " << first);
            CheckTurn(pool, first, in_turn);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Runs of tokens that have parameters of their own, as well.
TEST(CpuStoredHeads, RunsAskForThoseOfTheirNextTile) {
  for (bool by_tokens : {false, true}) {
    for (int64_t page_tokens : {int64_t{64}, int64_t{128}, kTokens}) {
      for (int64_t run : {16, 32, 64}) {
        for (int64_t heads : {1, 3, 8, 16}) {
          Pool pool(heads, page_tokens, by_tokens);
          pool.segment.codes.by_channel = true;
          pool.segment.codes.run = run;
          pool.segment.joins_pages = false;
          SCOPED_TRACE(testing::Message() << (by_tokens ? "by tokens, " : "") << "pages of "
                                          << page_tokens << ", runs of " << run << ", " << heads);
          CheckTurn(pool, 0, heads);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Where a token's heads all take turns, or 16 of them, each asks for rows that lie side by side.
TEST(CpuStoredHeads, SharesAreDense) {
  const auto is_dense = [](int64_t heads, int64_t in_turn) {
    const Pool pool(heads, 64, /*by_tokens=*/true);
    const Piece piece = pool.PieceInTurn({1, in_turn});
    Position p;
    p.at[1] = 1;
    int64_t stride = 0;
    ForParts({&piece, 1}, p, 0, kTokenTile, /*join=*/true, [&](const Part& part) {
      StoredHeads of;
      stride = RowsAt(of.At(Reader(), part), part, kChannels).next_stride;
    });
    return stride == 2 * kChannels;
  };
  EXPECT_TRUE(is_dense(8, 8));
  EXPECT_TRUE(is_dense(12, 12));
  EXPECT_TRUE(is_dense(32, 16));
  EXPECT_TRUE(is_dense(20, 16));
  EXPECT_FALSE(is_dense(20, 10));
  EXPECT_FALSE(is_dense(8, 4));
}

}  // namespace
}  // namespace kvant::cpu
