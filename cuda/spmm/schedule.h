// The schedule of spmm: the order in which the kernels that stage x in shared memory walk a pattern. Host-only and
// pure.
//
// The output columns are cut into units of 32, the work of one warp; 16 units are a group, the work of one CTA. A CTA
// walks its group in stages: up to four 64-column tiles of x, and all blocks of the group that read them, up to 40 KB.
// Units are ordered so that those of about equal work share a group, heavy groups first: the warps of a CTA wait for
// the slowest. Tiles of x that no block of a group reads are in none of its stages.
//
// A schedule is one int32 array: a header (seal.h), then sections, each padded to a multiple of 4 words. Its size
// follows from the sizes of the product alone, so that patterns with as many blocks have schedules of one shape (they
// can be stacked):
//   units        [num_units]: the unit at each place of each group, or -1 where there is none
//   stage_begin  [num_groups + 1]: where the stages of each group begin
//   tiles        [max_stages, kTiles]: the tiles of x of each stage, or -1
//   entry_begin  [max_stages + 1]: where the entries of each stage begin
//   places       [max_stages, kUnits, 2]: of the entries of each place in a stage, the first, counted from the stage's
//                own, and their numbers, of the unit's block column c in byte c from the lowest on
//   block_ids    [num_blocks]: which block each entry is: in a stage place after place, column after column, rising
//   offsets      [num_blocks]: where in the stage its x begins, in bytes: (tile's place) * kTileBytes + 2 * column in
//   it
#ifndef BSJAX_CUDA_SPMM_SCHEDULE_H_
#define BSJAX_CUDA_SPMM_SCHEDULE_H_

#include <algorithm>
#include <cstdint>

namespace bsjax {

struct SpmmSchedule {
  static constexpr int kUnitCols = 32;       // output columns of one warp
  static constexpr int kUnits = 16;          // warps of one CTA
  static constexpr int kTileCols = 64;       // columns of x that one copy brings: 128 bytes of 16-bit elements
  static constexpr int kTileBytes = 8192;    // of one tile in shared memory: 64 rows of 128 bytes
  static constexpr int kTiles = 4;           // of one stage
  static constexpr int kBlockBytes = 40960;  // of all blocks of one stage: at density .10 they are 26 KB, spread by 3

  // Offsets of the sections from the end of the header, and what all of them take, in words.
  int64_t num_units, num_groups, max_stages;
  int64_t stage_begin, tiles, entry_begin, places, block_ids, offsets, size;

  // Block sizes that have a schedule.
  static constexpr bool Serves(int64_t block_size) { return block_size == 8 || block_size == 16 || block_size == 32; }

  // The most blocks of one stage.
  static constexpr int MaxBlocks(int64_t block_size) {
    return static_cast<int>(kBlockBytes / (2 * block_size * block_size));
  }

  constexpr SpmmSchedule(int64_t k, int64_t n, int64_t block_size, int64_t num_blocks)
      : num_units(Divide(Divide(n, kUnitCols), kUnits) * kUnits),
        num_groups(num_units / kUnits),
        // A stage ends with its group; or where a fifth tile would begin; or where the next row has too many blocks for
        // it, and then two neighbours have MaxBlocks or more, and the next may begin with a tile that this one had. In
        // all but the first case it has four blocks or more: a row of a group has at most 512 / b.
        max_stages(
            std::min(Divide(num_blocks, kTiles),
                     Divide(num_groups * Divide(k, kTileCols) + Divide(2 * num_blocks, MaxBlocks(block_size)), kTiles) +
                         Divide(2 * num_blocks, MaxBlocks(block_size))) +
            num_groups),
        stage_begin(Pad(num_units)),
        tiles(stage_begin + Pad(num_groups + 1)),
        entry_begin(tiles + max_stages * kTiles),
        places(entry_begin + Pad(max_stages + 1)),
        block_ids(places + max_stages * kUnits * 2),
        offsets(block_ids + Pad(num_blocks)),
        size(offsets + Pad(num_blocks)) {}

 private:
  static constexpr int64_t Divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static constexpr int64_t Pad(int64_t words) { return Divide(words, 4) * 4; }
};

// Writes the schedule of y[m, n] = x[m, k] @ op(w) to `schedule`, SpmmSchedule(...).size words behind the header. The
// lists are those of SpmmArgs; entries that contribute nothing (padding, indices out of range) are left out. False, and
// `schedule` is not to be used, where the lists name a place more often than its form can count.
bool ScheduleSpmm(const int32_t* indptr, const int32_t* indices, const int32_t* block_ids, int64_t k, int64_t n,
                  int64_t block_size, int64_t num_blocks, int32_t* schedule);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SPMM_SCHEDULE_H_
