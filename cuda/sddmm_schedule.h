// Which CTA of the Hopper sddmm kernel computes which stored blocks: a table made once for each pattern, on the host.
//
// A *bin* is the work of one CTA (or of one cluster, whose CTAs share the rows): up to kMaxTiles tiles of 64 columns of
// x and dy, and stored blocks whose operands lie in those tiles, dealt to the warps (block sizes 8 to 32) or the
// warpgroups (64 and 128) that add them up. Every stored block is in exactly one slot of one bin; blocks outside the
// matrix are in slots that are not computed, whose zeros are stored.
//
// The table is an array int32 [num_bins, SddmmBin(b).Words()]. A record:
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
};

struct SddmmSchedule {
  int64_t num_bins = 0;
  std::vector<int32_t> bins;  // [num_bins, SddmmBin{block_size}.Words()]
};

// The schedule of the pattern whose stored block e is at block row rows[e], block column cols[e]. Any pattern: empty,
// uneven, blocks in any order, more than once, or (padding) outside the k / b by n / b matrix. k and n are multiples of
// block_size, which is 8, 16, 32, 64 or 128. The same arguments give the same schedule.
SddmmSchedule MakeSddmmSchedule(const int32_t* rows, const int32_t* cols, int64_t num_blocks, int block_size, int64_t k,
                                int64_t n);

// Adds bins without work until there are PaddedBins: a length in steps, so that patterns alike have tables alike, which
// can be stacked and need no new compilation.
void PadSddmmSchedule(int block_size, SddmmSchedule* schedule);

// A multiple of 1, 2, 6 or 66, up to 16, 30, 66 or more bins: an H200 has room for 15, 30 and 66 clusters of 8, 4
// and 2.
constexpr int64_t PaddedBins(int64_t num_bins) {
  const int64_t step = num_bins <= 16 ? 1 : num_bins <= 30 ? 2 : num_bins <= 66 ? 6 : 66;
  return num_bins <= 1 ? 1 : (num_bins + step - 1) / step * step;
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_SDDMM_SCHEDULE_H_
