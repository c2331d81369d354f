// Which CTA of the Hopper sddmm kernel computes which stored blocks: a table made once for each pattern, here, or by
// bsjax/_schedule.py where the pattern is traced.
//
// A *bin* is the work of one CTA (or of one cluster, whose CTAs share the rows): up to kMaxTiles tiles of 64 columns of
// x and dy, and stored blocks whose operands lie in those tiles, dealt to the warps (block sizes 8 to 32) or the
// warpgroups (64 and 128) that add them up. Every stored block is in exactly one slot of one bin; blocks outside the
// matrix are in slots that are not computed, whose zeros are stored.
//
// The table is an array int32 [SddmmMaxBins(...), SddmmBin(b).Words()] behind a header (seal.h) that says how many bins
// are in use; the rest have no tiles and no ids. So its size follows from the sizes of the product alone. A record:
//   [0]              num_tiles, 0 to MaxTiles()
//   [1]              b >= 64: byte w has, of warpgroup w, 16 * the number of pairs + the number of singles, or 0x40
//   [2], [3]         0
//   [4 ..]           kMaxTiles tiles: index of 64 columns of x; of dy with kDyTile added; unused ones 0
//   then             workers * slots descriptors, worker by worker (a worker is a warp or a warpgroup)
//   then             workers * slots * (b == 8 ? 2 : 1) ids of stored blocks in dblocks, -1 where there is none
// A descriptor, b <= 32: a position p is 8 * (place in the list of tiles) + (16-byte piece of the 128-byte row).
//   bits 0-7         position of the block's columns of x; b = 8: of the first of two blocks'
//   bits 8-15        b = 8: of the second block's, whose columns of dy are the same
//   bits 16-23       position of the block's columns of dy
//   bits 24, 25      set where x, dy is not what the slot before it (of this worker) has in registers
//   bit 26           set where there is something to compute; a worker's computed slots come first
//   bit 27           b = 8: two blocks of one block row; in all of the above x and dy have changed places
// A descriptor, b >= 64: the product of one tile of x and one tile of dy.
//   bits 0-7         place of x's tile in the list
//   bits 8-15        b = 128: which quarter of the block: 2 * (lower half of its rows) + (right half of its columns)
//   bits 16-23       place of dy's tile
// The first 2 * pairs slots are pairs of one tile of x with two of dy, the second at the same or a later place than the
// first; then the singles; then slots that are not computed. 0x40: all four are one tile of x with four of dy, each at
// the place after the one before.
#ifndef BSJAX_CUDA_SDDMM_SCHEDULE_H_
#define BSJAX_CUDA_SDDMM_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace bsjax {

struct SddmmBin {
  static constexpr int kTileCols = 64;
  static constexpr int kMaxTiles = 16;  // that a record has room for
  static constexpr int kHeaderWords = 4;
  static constexpr int32_t kDyTile = 1 << 30;
  static constexpr uint32_t kLoadX = 1u << 24, kLoadDy = 1u << 25, kCompute = 1u << 26, kTransposed = 1u << 27;

  int block_size;

  // A worker's sums take 64 registers a thread where 16 warps share them, 128 where 8 do: 128 KB of sums a CTA.
  constexpr int Workers() const { return block_size >= 64 ? 2 : block_size == 32 ? 8 : 16; }
  constexpr int Slots() const { return block_size >= 32 ? 4 : block_size == 16 ? 8 : 16; }
  constexpr int SlotBlocks() const { return block_size == 8 ? 2 : 1; }

  // Tiles that a bin has at most: fewer where a stage has 64 rows of each.
  constexpr int MaxTiles() const { return block_size >= 64 ? 12 : kMaxTiles; }
  constexpr int DescriptorsAt() const { return kHeaderWords + kMaxTiles; }
  constexpr int IdsAt() const { return DescriptorsAt() + Workers() * Slots(); }
  constexpr int Words() const { return IdsAt() + Workers() * Slots() * SlotBlocks(); }

  // Tiles of a block's side.
  constexpr int UnitTiles() const { return block_size == 128 ? 2 : 1; }
  // Blocks that surely fit where their tiles do. b = 8: two a slot, but each of the 64 block columns of 8 tiles may
  // leave an odd one, alone in a slot. b = 128: four quarters each.
  constexpr int MaxBlocks() const {
    return block_size == 128 ? 2 : Workers() * Slots() * SlotBlocks() - (block_size == 8 ? 64 : 0);
  }
  // Blocks that a bin should have at most, so that uneven bins still fit.
  constexpr int TargetBlocks() const {
    return block_size >= 64 ? MaxBlocks() : block_size == 8 ? 432 : MaxBlocks() * 7 / 8;
  }
};

// As many bins as SMs or pairs of SMs take in whole turns.
constexpr int64_t RoundSddmmBins(int64_t num_bins) { return num_bins <= 66 ? 66 : (num_bins + 131) / 132 * 132; }

// The most bins that clustering aims at, for blocks alone: none is without one.
constexpr int64_t SddmmTargetBins(int block_size, int64_t num_blocks) {
  const int64_t target = SddmmBin{block_size}.TargetBlocks();
  return std::min(RoundSddmmBins((num_blocks + target - 1) / target), num_blocks);
}

// About as many bins as clustering makes of blocks spread evenly. What must not depend on the pattern goes by it.
int64_t EstimateSddmmBins(int64_t k, int64_t n, int block_size, int64_t num_blocks);

// A way to cut blocks into bins that suits every pattern: the matrix is cut into segments, and the blocks of each, by
// column of dy's tiles, then by x's, into bins of so many. Padding, outside the matrix, is one more segment.
struct SddmmCut {
  int64_t x_tiles, y_tiles;  // of a segment
  int bin_blocks;

  constexpr int64_t Segments(int64_t k, int64_t n) const {
    const int64_t x_cols = x_tiles * SddmmBin::kTileCols, y_cols = y_tiles * SddmmBin::kTileCols;
    return (k + x_cols - 1) / x_cols * ((n + y_cols - 1) / y_cols);
  }

  // Each segment with blocks has a bin for its first, and one for every further bin_blocks.
  constexpr int64_t MaxBins(int64_t k, int64_t n, int64_t num_blocks) const {
    const int64_t firsts = std::min(num_blocks, Segments(k, n) + 1);
    return firsts + (num_blocks - firsts) / bin_blocks;
  }
};

// The cut with fewer bins at worst. Either square patches, half of a bin's tiles of x and half of dy; or, where blocks
// are few, strips of x's tiles, where each block may bring a tile of dy of its own.
constexpr SddmmCut ChooseSddmmCut(int64_t k, int64_t n, int block_size, int64_t num_blocks) {
  constexpr int64_t kAll = INT32_MAX, kStripTiles = 4;  // b = 64: leaves as many tiles as a bin has blocks
  const SddmmBin bin{block_size};
  const int64_t side = bin.MaxTiles() / 2;
  const SddmmCut patches{side, side, bin.MaxBlocks()};
  const SddmmCut strips = block_size == 128 ? SddmmCut{kAll, kAll, bin.MaxBlocks()}  // any two fit
                                            : SddmmCut{kStripTiles, kAll, bin.MaxTiles() - int{kStripTiles}};
  return patches.MaxBins(k, n, num_blocks) < strips.MaxBins(k, n, num_blocks) ? patches : strips;
}

// Bins that a table has room for: for that cut of any pattern, and for what clustering aims at.
constexpr int64_t SddmmMaxBins(int64_t k, int64_t n, int block_size, int64_t num_blocks) {
  return std::max(ChooseSddmmCut(k, n, block_size, num_blocks).MaxBins(k, n, num_blocks),
                  SddmmTargetBins(block_size, num_blocks));
}

// That cut with fewer blocks a bin where segments are few, so that about as many bins are made as are estimated, if the
// table has room: what is made of a traced pattern.
SddmmCut SpreadSddmmCut(int64_t k, int64_t n, int block_size, int64_t num_blocks);

struct SddmmSchedule {
  int64_t num_bins = 0;       // in use
  std::vector<int32_t> bins;  // [SddmmMaxBins(...), SddmmBin{block_size}.Words()]
};

// The schedule of the pattern whose stored block e is at block row rows[e], block column cols[e]. Any pattern: empty,
// uneven, blocks in any order, more than once, or (padding) outside the k / b by n / b matrix. k and n are multiples of
// block_size, which is 8, 16, 32, 64 or 128. The same arguments give the same schedule.
SddmmSchedule MakeSddmmSchedule(const int32_t* rows, const int32_t* cols, int64_t num_blocks, int block_size, int64_t k,
                                int64_t n);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SDDMM_SCHEDULE_H_
