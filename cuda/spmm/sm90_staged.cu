// A CTA computes 64 rows of 512 columns of y: 16 warps, each 64 x 32, its unit. It walks its stages, as a schedule says
// (spmm/schedule.h): up to four 64-column tiles of x, which the copy engine (TMA) brings once for all warps, and all
// blocks that read them, which three producer warps bring by cp.async; a fourth starts the copy engine and brings the
// lists that say where each begins in x. All of it arrives under one barrier, so a warp that multiplies only counts
// through its blocks: mma.sync, both operands by ldmatrix.
// A stored block is row-major: x @ w reads it by ldmatrix.trans, x @ w.T by ldmatrix; nothing is copied or transposed.
// CTAs are persistent: while a tile's sums are rounded and stored, the stages of the next are on their way. Where there
// are fewer tiles than SMs, a cluster of kSplit CTAs shares a tile: each takes some of its stages, and the partial sums
// are added in the order of ranks through distributed shared memory.
// Shared memory: three stages of 32 KB of x, 40 KB of blocks and 1 to 2 KB of lists. Limits: each block reads 64 x b of
// x from shared memory, 128 bytes a clock and SM, which bounds b = 8 and 16; mma.sync, two thirds of the tensor cores'
// peak, bounds b = 32.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/device/cluster.cuh"
#include "cuda/device/cp_async.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/ldmatrix.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/registers.cuh"
#include "cuda/device/seal.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/spmm/config.h"
#include "cuda/spmm/schedule.h"
#include "cuda/spmm/sm90_staged.h"

namespace bsjax {
namespace {

template <typename T_, int kB_, bool kTranspose_, int kSplit_>
struct Tile {
  using T = T_;
  using S = SpmmSchedule;
  static constexpr Math kMath = std::is_same_v<T, __half> ? Math::kF16 : Math::kBF16;
  static constexpr int kB = kB_;
  static constexpr bool kTranspose = kTranspose_;
  static constexpr int kSplit = kSplit_;
  static constexpr int kTileM = 64;
  static constexpr int kWarps = S::kUnits;
  static constexpr int kCopiers = 3;      // warps that bring blocks; a fourth brings the rest
  static constexpr int kProducers = 128;  // threads: registers move between groups of four warps
  static constexpr int kThreads = 32 * kWarps + kProducers;
  static constexpr int kUnitCols = S::kUnitCols / kB;  // block columns of a unit
  static constexpr int kBlockBytes = kB * kB * 2;
  static constexpr int kBlockPieces = kBlockBytes / 16;
  static constexpr int kRowPieces = kB / 8;  // of a block's row
  // Of one stage in shared memory: x, blocks, where each begins in x, which are whose.
  static constexpr int kXBytes = S::kTiles * S::kTileBytes;
  static constexpr int kOffsets = kXBytes + S::kBlockBytes;
  static constexpr int kMaxBlocks = S::MaxBlocks(kB);
  static constexpr int kPlaces = kOffsets + kMaxBlocks * 4;
  static constexpr int kStageBytes = (kPlaces + kWarps * 8 + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
  static constexpr int kStages = 3;  // what fits; stages of half the size, twice as many, were slower
  static constexpr int kSharedBytes = kStages * (kStageBytes + 2 * sizeof(uint64_t));

  static_assert(S::kTiles == 4, "The tiles of a stage are loaded as one int4.");
  static_assert(kTileM * kBoxRowBytes == S::kTileBytes && kBoxCols == S::kTileCols, "A tile is one box.");
  static_assert(kStages * kStageBytes >= kWarps * 8 * 32 * 4 * 8, "Partial sums are passed where the stages were.");
  static_assert(kSharedBytes <= 227 * 1024, "A CTA has at most 227 KB.");
};

struct Params {
  CUtensorMap x;  // [groups or 1, m, k]
  const char* blocks;
  char* y;
  const int32_t* seal;
  const int32_t *units, *stage_begin, *tiles, *entry_begin, *places, *block_ids, *offsets;  // of the schedule
  int64_t blocks_group_bytes;  // 0 where all groups share one
  int64_t y_bytes;
  int64_t m, n;
  int32_t num_blocks, num_row_tiles, num_col_groups, num_tiles;
  int32_t x_groups;  // 1 where each group has its own, 0 where all share one
};

// The order of tiles: CTAs that run together take all columns of a few row tiles, so x comes from memory once. The
// columns of each row tile begin one further, or a CTA that walks by a multiple of their number would meet the same
// ones again and again, and columns differ in work.
struct Place {
  int group, row_tile, col_group;
};

__device__ Place PlaceOf(const Params& params, int tile) {
  const int line = tile / params.num_col_groups;
  const int col = tile - line * params.num_col_groups + line % params.num_col_groups;
  return {line / params.num_row_tiles, line % params.num_row_tiles,
          col < params.num_col_groups ? col : col - params.num_col_groups};
}

// The stages of a column group that this CTA takes: first and one past the last.
template <typename Tile>
__device__ int2 StagesOf(const Params& params, int col_group) {
  const int begin = __ldg(params.stage_begin + col_group), end = __ldg(params.stage_begin + col_group + 1);
  if constexpr (Tile::kSplit == 1) return {begin, end};
  const int rank = static_cast<int>(ClusterRank()), count = end - begin;
  return {begin + count * rank / Tile::kSplit, begin + count * (rank + 1) / Tile::kSplit};
}

template <typename Tile>
struct Shared {
  char* stages;     // kStages x kStageBytes
  uint64_t* full;   // kStages: the stage has arrived
  uint64_t* empty;  // kStages: all warps are done with it

  __device__ explicit Shared(char* base)
      : stages(base),
        full(reinterpret_cast<uint64_t*>(base + Tile::kStages * Tile::kStageBytes)),
        empty(full + Tile::kStages) {}
};

// A stage on the walk of a CTA: tile after tile, stage after stage.
template <typename Tile>
struct Walk {
  int tile, stage, end;  // end: of the tile's stages
  Place place;

  __device__ explicit Walk(const Params& params) : tile(blockIdx.x / Tile::kSplit) { Enter(params); }

  __device__ bool Done(const Params& params) const { return tile >= params.num_tiles; }

  __device__ void Next(const Params& params) {
    if (++stage < end) return;
    tile += gridDim.x / Tile::kSplit;
    Enter(params);
  }

 private:
  __device__ void Enter(const Params& params) {  // the first tile from this one on that has a stage
    for (; tile < params.num_tiles; tile += gridDim.x / Tile::kSplit) {
      place = PlaceOf(params, tile);
      const int2 stages = StagesOf<Tile>(params, place.col_group);
      stage = stages.x;
      end = stages.y;
      if (stage < end) return;
    }
  }
};

// A stage of the walk, and which entries are in it. Entries are loaded ahead of their use: nothing may be computed from
// them before, which would wait for them.
template <typename Tile>
struct Stage {
  Walk<Tile> walk;
  int first, last;

  __device__ explicit Stage(const Params& params) : walk(params) { Load(params); }

  __device__ void Next(const Params& params) {
    if (walk.Done(params)) return;
    walk.Next(params);
    Load(params);
  }
  __device__ int Count() const { return min(last - first, Tile::kMaxBlocks); }

 private:
  __device__ void Load(const Params& params) {
    if (walk.Done(params)) return;
    first = __ldg(params.entry_begin + walk.stage);
    last = __ldg(params.entry_begin + walk.stage + 1);
  }
};

// The producer warp that starts the copy engine and brings the lists of a stage.
template <typename Tile>
__device__ void ProduceTiles(const Params& params, const Shared<Tile>& shared) {
  RingPosition<Tile::kStages> ring;
  const int lane = threadIdx.x % 32;
  Stage<Tile> stage(params);
  while (!stage.walk.Done(params)) {
    Stage<Tile> next = stage;
    next.Next(params);
    const int4 tiles = __ldg(reinterpret_cast<const int4*>(params.tiles) + stage.walk.stage);
    MbarrierWait(shared.empty + ring.slot, ring.parity ^ 1);
    uint64_t* full = shared.full + ring.slot;
    char* target = shared.stages + ring.slot * Tile::kStageBytes;
    if (lane == 0) {
      const int columns[] = {tiles.x, tiles.y, tiles.z, tiles.w};
      int num_tiles = 0;
#pragma unroll
      for (int i = 0; i < Tile::S::kTiles; ++i) num_tiles += columns[i] >= 0;
      MbarrierArriveExpect(full, num_tiles * Tile::S::kTileBytes);
#pragma unroll
      for (int i = 0; i < Tile::S::kTiles; ++i) {
        if (columns[i] < 0) continue;  // what lies there is of another stage, and no entry names it
        TmaLoad(target + i * Tile::S::kTileBytes, params.x, full, columns[i] * kBoxCols,
                stage.walk.place.row_tile * Tile::kTileM, stage.walk.place.group * params.x_groups);
      }
    }
    __syncwarp();
    const uint32_t lists = SharedAddress(target) + Tile::kOffsets;
    for (int i = lane; i < stage.Count(); i += 32) CopyAsync4(lists + i * 4, params.offsets + stage.first + i);
    CopyAsync4(lists + Tile::kMaxBlocks * 4 + lane * 4, params.places + stage.walk.stage * Tile::kWarps * 2 + lane);
    MbarrierArriveCopies(full);
    ring.Advance();
    stage = next;
  }
}

// One of the kCopiers producer warps that bring the blocks, 512 bytes or one block at a time: the others' are between.
template <typename Tile>
__device__ void ProduceBlocks(const Params& params, const Shared<Tile>& shared) {
  constexpr int kSub = Tile::kBlockBytes < 512 ? 512 / Tile::kBlockBytes : 1;  // blocks of one copy
  constexpr int kCopies = 32 / kSub;                                           // of which a register names the blocks
  constexpr int kStep = Tile::kCopiers * kSub;                                 // blocks from one copy to the next
  constexpr int kWords = (Tile::kMaxBlocks / kStep + kCopies) / kCopies;
  constexpr int kPieces = Tile::kBlockPieces < 32 ? Tile::kBlockPieces : 32;
  constexpr int kUnroll = Tile::kB == 32 ? 2 : 4;  // copies under way together: one alone is mostly latency
  const int lane = threadIdx.x % 32, first_block = (threadIdx.x / 32 - Tile::kWarps) * kSub;
  const int piece = lane % kPieces, sub = lane / kPieces;
  const uint32_t piece_offset =
      PieceOffset<Swizzle::kRows, Tile::kRowPieces>(piece / Tile::kRowPieces, piece % Tile::kRowPieces);
  // Lane l of word r: number l % kSub of the blocks of this warp's copy r * kCopies + l / kSub.
  const int own_block = first_block + lane / kSub * kStep + lane % kSub;
  const auto load_ids = [&](const Stage<Tile>& stage, uint32_t (&ids)[kWords]) {
    if (stage.walk.Done(params)) return;
    const int count = stage.Count();
    const int32_t* source = params.block_ids + stage.first + own_block;
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      if (own_block + r * kCopies * kStep < count) ids[r] = static_cast<uint32_t>(__ldg(source + r * kCopies * kStep));
    }
  };

  RingPosition<Tile::kStages> ring;
  Stage<Tile> stage(params), next = stage;  // entries are loaded two stages ahead, block ids one
  next.Next(params);
  uint32_t ids[kWords] = {}, next_ids[kWords] = {};
  load_ids(stage, ids);
  const uint32_t max_id = static_cast<uint32_t>(params.num_blocks - 1);
  while (!stage.walk.Done(params)) {
    Stage<Tile> later = next;
    later.Next(params);
    load_ids(next, next_ids);
    const char* source = params.blocks + stage.walk.place.group * params.blocks_group_bytes + piece * 16;
    const int count = stage.Count() - first_block - sub;  // of blocks from this lane's first on
    MbarrierWait(shared.empty + ring.slot, ring.parity ^ 1);
    uint32_t target = SharedAddress(shared.stages) + ring.slot * Tile::kStageBytes + Tile::kXBytes +
                      (first_block + sub) * Tile::kBlockBytes + piece_offset;
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      const uint32_t clamped = min(ids[r], max_id);  // whatever the schedule says, reads stay inside
#pragma unroll
      for (int copy = 0; copy < kCopies; copy += kUnroll) {
        if ((r * kCopies + copy) * kStep >= count + sub) break;  // the same for all lanes
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const uint32_t id = __shfl_sync(0xffffffff, clamped, (copy + u) * kSub + sub);
          const int block = (r * kCopies + copy + u) * kStep;
          if (block < count) {
            const char* own = source + uint64_t{id} * Tile::kBlockBytes;
#pragma unroll
            for (int i = 0; i < Tile::kBlockBytes; i += kPieces * 16) {
              CopyAsync16(target + block * Tile::kBlockBytes + i, own + i, true);
            }
          }
        }
      }
    }
    MbarrierArriveCopies(shared.full + ring.slot);
    ring.Advance();
    stage = next;
    next = later;
#pragma unroll
    for (int r = 0; r < kWords; ++r) ids[r] = next_ids[r];
  }
}

// acc += the rows of x in the stage at `x`, columns from `offset` on, @ the block at `block`.
template <typename Tile>
__device__ __forceinline__ void MultiplyBlock(float (&acc)[4][Tile::kB / 8][4], uint32_t x, uint32_t offset,
                                              uint32_t block) {
  const unsigned lane = threadIdx.x % 32;
  constexpr int kColumns = Tile::kB / 8;
  if constexpr (Tile::kB == 8) {
    uint32_t b;
    LoadMatrix1<!Tile::kTranspose>(b, block + lane % 8 * 16);
    const uint32_t source = x + lane * kBoxRowBytes + (offset ^ lane % 8 * 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t a[4];
      LoadMatrix4<false>(a, source + i * 32 * kBoxRowBytes);
      MmaHalfK<Tile::kMath>(acc[2 * i][0], a[0], a[1], b);
      MmaHalfK<Tile::kMath>(acc[2 * i + 1][0], a[2], a[3], b);
    }
  } else {
    const uint32_t source = x + lane % 16 * kBoxRowBytes + ((offset + lane / 16 * 16) ^ lane % 8 * 16);
    // One load takes four 8 x 8 tiles of the block: both halves of a slab's k, of columns j and j + 1. Further rows and
    // pieces of a row are a sum and an XOR away: the swizzle's period divides 8 rows, and blocks are aligned.
    const unsigned k_half = lane / 8 % 2, n_half = lane / 16;
    const uint32_t w =
        block + PieceOffset<Swizzle::kRows, Tile::kRowPieces>((Tile::kTranspose ? n_half : k_half) * 8 + lane % 8,
                                                              Tile::kTranspose ? k_half : n_half);
#pragma unroll
    for (int slab = 0; slab < Tile::kB / 16; ++slab) {
      uint32_t b[kColumns][2];
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        uint32_t r[4];
        LoadMatrix4<!Tile::kTranspose>(
            r, Tile::kTranspose ? (w ^ slab * 32) + j * 8 * Tile::kB * 2 : (w ^ j * 16) + slab * 16 * Tile::kB * 2);
        b[j][0] = r[0], b[j][1] = r[1], b[j + 1][0] = r[2], b[j + 1][1] = r[3];
      }
      uint32_t a[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) LoadMatrix4<false>(a[i], (source ^ slab * 32) + i * 16 * kBoxRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) Mma<Tile::kMath>(acc[i][j], a[i], b[j]);
      }
    }
  }
}

// The same for two blocks of 8 x 8 that follow each other, side by side as the k of one product: `offset` is that of
// the first in lanes 0 to 15, of the second in the others.
template <typename Tile>
__device__ __forceinline__ void MultiplyPair(float (&acc)[4][1][4], uint32_t x, uint32_t offset, uint32_t blocks) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t b[2];
  LoadMatrix2<!Tile::kTranspose>(b, blocks + lane % 16 * 16);
  const uint32_t source = x + lane % 16 * kBoxRowBytes + (offset ^ lane % 8 * 16);
  uint32_t a[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) LoadMatrix4<false>(a[i], source + i * 16 * kBoxRowBytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) Mma<Tile::kMath>(acc[i][0], a[i], b);
}

template <typename Tile>
using Sums = float[Tile::kUnitCols][4][Tile::kB / 8][4];

// Sum `octet` (8 rows) of columns 8 j .. 8 j + 7 of the unit: this lane's two elements.
template <typename Tile>
__device__ __forceinline__ float2 Part(const Sums<Tile>& acc, int octet, int j) {
  constexpr int kColumns = Tile::kB / 8;
  const float (&part)[4] = acc[j / kColumns][octet / 2][j % kColumns];
  return make_float2(part[octet % 2 * 2], part[octet % 2 * 2 + 1]);
}

// Rounds and stores 8 rows of the unit, 16 bytes a lane.
template <typename Tile>
__device__ __forceinline__ void StoreOctet(const Params& params, const float2 (&tiles)[4], const Place& place, int unit,
                                           int octet) {
  using Rows = TileRows<typename Tile::T>;
  const unsigned lane = threadIdx.x % 32;
  const uint4 piece = Rows::Gather(tiles, lane);
  const int64_t row = static_cast<int64_t>(place.row_tile) * Tile::kTileM + octet * 8 + lane / 4;
  const int64_t column = static_cast<int64_t>(unit) * Tile::S::kUnitCols + lane % 4 * 8;
  if (row < params.m && column < params.n) {
    StoreGlobal16(params.y + ((place.group * params.m + row) * params.n + column) * 2, piece);
  }
}

// The sums of all CTAs of the cluster, each adding and storing its share of the rows.
template <typename Tile>
__device__ void StoreShared(const Params& params, const Sums<Tile>& acc, const Shared<Tile>& shared, const Place& place,
                            int unit, int warp) {
  const unsigned lane = threadIdx.x % 32;
  float2* partial = reinterpret_cast<float2*>(shared.stages) + warp * 8 * 4 * 32 + lane;
#pragma unroll
  for (int octet = 0; octet < 8; ++octet) {
#pragma unroll
    for (int j = 0; j < 4; ++j) partial[(octet * 4 + j) * 32] = Part<Tile>(acc, octet, j);
  }
  ClusterArrive();
  ClusterWait();
  constexpr int kOctets = 8 / Tile::kSplit;
  const int rank = static_cast<int>(ClusterRank());
#pragma unroll
  for (int i = 0; i < kOctets; ++i) {
    const int octet = rank * kOctets + i;
    float2 sums[4] = {};
#pragma unroll
    for (int peer = 0; peer < Tile::kSplit; ++peer) {
      const uint32_t source = MapShared(SharedAddress(partial + octet * 4 * 32), peer);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 part = LoadCluster8(source + j * 32 * 8);
        sums[j].x += part.x;
        sums[j].y += part.y;
      }
    }
    if (unit >= 0) StoreOctet<Tile>(params, sums, place, unit, octet);
  }
}

// Adds the products of this warp's blocks in one stage.
template <typename Tile>
__device__ __forceinline__ void MultiplyStage(Sums<Tile>& acc, uint32_t stage) {
  const unsigned lane = threadIdx.x % 32;
  const uint2 place = LoadShared8(stage + Tile::kPlaces + threadIdx.x / 32 * 8);
  uint32_t block = stage + Tile::kXBytes + place.x * Tile::kBlockBytes;
  uint32_t list = stage + Tile::kOffsets + place.x * 4;
  if constexpr (Tile::kB == 8) list += lane / 16 * 4;
  uint32_t offset = LoadShared4(list);  // loaded one step ahead, past the last too: whatever is there is not used
#pragma unroll
  for (int c = 0; c < Tile::kUnitCols; ++c) {
    const uint32_t end = block + (place.y >> 8 * c & 255) * Tile::kBlockBytes;
    if constexpr (Tile::kB == 8) {
#pragma unroll 1
      for (; block + Tile::kBlockBytes < end; block += 2 * Tile::kBlockBytes) {
        list += 8;
        const uint32_t next = LoadShared4(list);
        MultiplyPair<Tile>(acc[c], stage, offset, block);
        offset = next;
      }
      if (block < end) {
        list += 4;
        const uint32_t next = LoadShared4(list);
        MultiplyBlock<Tile>(acc[c], stage, __shfl_sync(0xffffffff, offset, 0), block);
        offset = next;
        block += Tile::kBlockBytes;
      }
    } else {
#pragma unroll 1
      for (; block < end; block += Tile::kBlockBytes) {
        list += 4;
        const uint32_t next = LoadShared4(list);
        MultiplyBlock<Tile>(acc[c], stage, offset, block);
        offset = next;
      }
    }
  }
}

// A consumer warp.
template <typename Tile>
__device__ void Consume(const Params& params, const Shared<Tile>& shared) {
  RingPosition<Tile::kStages> ring;
  const int warp = threadIdx.x / 32, stride = gridDim.x / Tile::kSplit;
  const bool speaks = threadIdx.x % 32 == 0;
  int next_stages = 0;  // of the next tile
  const auto load_stages = [&](int tile) {
    if (tile >= params.num_tiles) return;
    const int2 stages = StagesOf<Tile>(params, PlaceOf(params, tile).col_group);
    next_stages = stages.y - stages.x;
  };
  load_stages(blockIdx.x / Tile::kSplit);
  for (int tile = blockIdx.x / Tile::kSplit; tile < params.num_tiles; tile += stride) {
    int stages = next_stages;
    load_stages(tile + stride);
    Sums<Tile> acc = {};  // zeros are what an empty list stores
    for (; stages > 0; --stages) {
      MbarrierWait(shared.full + ring.slot, ring.parity);
      MultiplyStage<Tile>(acc, SharedAddress(shared.stages) + ring.slot * Tile::kStageBytes);
      __syncwarp();
      if (speaks) MbarrierArrive(shared.empty + ring.slot);
      ring.Advance();
    }
    const Place place = PlaceOf(params, tile);
    const int unit = __ldg(params.units + place.col_group * Tile::kWarps + warp);
    if constexpr (Tile::kSplit > 1) {
      ClusterArrive();
      ClusterWait();  // all of this CTA are done with the stages
      StoreShared<Tile>(params, acc, shared, place, unit, warp);
    } else if (unit >= 0) {
#pragma unroll
      for (int octet = 0; octet < 8; ++octet) {
        float2 tiles[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) tiles[j] = Part<Tile>(acc, octet, j);
        StoreOctet<Tile>(params, tiles, place, unit, octet);
      }
    }
  }
}

template <typename Tile>
__global__ __launch_bounds__(Tile::kThreads, 1) void SpmmStagedKernelSm90(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // setmaxnreg is in sm_90a only; other targets of a build get a kernel nobody launches
  extern __shared__ __align__(1024) char dynamic_shared[];
  const Shared<Tile> shared(dynamic_shared);
  const int32_t seal = __ldg(params.seal);  // on its way while the barriers are set up
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Tile::kStages; ++slot) {
      MbarrierInit(shared.full + slot, 1 + Tile::kProducers);
      MbarrierInit(shared.empty + slot, Tile::kWarps);
    }
    FenceAsyncProxy();  // the copy engine sees the barriers initialised
  }
  __syncthreads();
  if (seal != kSeal) return FillWithNan(params.y, params.y_bytes);
  if (threadIdx.x >= 32 * Tile::kWarps) {
    FreeRegisters<64>();
    if (threadIdx.x < 32 * (Tile::kWarps + Tile::kCopiers)) {
      ProduceBlocks<Tile>(params, shared);
    } else {
      ProduceTiles<Tile>(params, shared);
    }
    if constexpr (Tile::kSplit > 1) {
      __syncwarp();
      for (int i = 0; i < 3; ++i) {  // as often as a consumer
        ClusterArrive();
        ClusterWait();
      }
    }
  } else {
    TakeRegisters<104>();  // 16 * 104 + 4 * 64 of the 20 * 96 that the CTA was given: it gets no others
    Consume<Tile>(params, shared);
    if constexpr (Tile::kSplit > 1) {  // the others may still read this CTA's sums
      ClusterArrive();
      ClusterWait();
    }
  }
#endif
}

template <typename Tile>
cudaError_t Launch(const SpmmArgs& args, cudaStream_t stream) {
  constexpr CUtensorMapDataType kType =
      std::is_same_v<typename Tile::T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const SpmmSchedule schedule(args.k, args.n, Tile::kB, args.num_blocks);
  Params params;
  params.x_groups = args.x_group_stride == 0 ? 0 : 1;
  cudaError_t status = EncodeTensorMap(&params.x, kType, args.x, params.x_groups ? args.num_groups : 1, args.m, args.k,
                                       args.x_group_stride, Tile::kTileM);
  int device = 0, num_sms = 0;
  if (status == cudaSuccess) status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  params.blocks = static_cast<const char*>(args.blocks);
  params.y = static_cast<char*>(args.y);
  params.seal = args.seal;
  params.units = args.schedule;
  params.stage_begin = args.schedule + schedule.stage_begin;
  params.tiles = args.schedule + schedule.tiles;
  params.entry_begin = args.schedule + schedule.entry_begin;
  params.places = args.schedule + schedule.places;
  params.block_ids = args.schedule + schedule.block_ids;
  params.offsets = args.schedule + schedule.offsets;
  params.blocks_group_bytes = args.blocks_group_stride * 2;
  params.y_bytes = args.num_groups * args.m * args.n * 2;
  params.m = args.m;
  params.n = args.n;
  params.num_blocks = static_cast<int32_t>(args.num_blocks);
  params.num_row_tiles = static_cast<int32_t>((args.m + Tile::kTileM - 1) / Tile::kTileM);
  params.num_col_groups = static_cast<int32_t>(schedule.num_groups);
  params.num_tiles = static_cast<int32_t>(args.num_groups * params.num_row_tiles * params.num_col_groups);
  // A cluster takes one tile: its CTAs end together. Alone, CTAs walk.
  const int num_walks = Tile::kSplit > 1 ? params.num_tiles : std::min(params.num_tiles, num_sms);
  return LaunchTiles<SpmmStagedKernelSm90<Tile>>(num_walks, Tile::kThreads, Tile::kSharedBytes, params, stream,
                                                 Tile::kSplit);
}

template <typename T, int kB, bool kTranspose>
cudaError_t LaunchSplit(const SpmmArgs& args, int split, cudaStream_t stream) {
  switch (split) {
    case 1:
      return Launch<Tile<T, kB, kTranspose, 1>>(args, stream);
    case 2:
      return Launch<Tile<T, kB, kTranspose, 2>>(args, stream);
    case 4:
      return Launch<Tile<T, kB, kTranspose, 4>>(args, stream);
    case 8:
      return Launch<Tile<T, kB, kTranspose, 8>>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename T>
cudaError_t LaunchType(const SpmmArgs& args, int split, cudaStream_t stream) {
  switch (args.block_size) {
    case 8:
      return args.transpose ? LaunchSplit<T, 8, true>(args, split, stream)
                            : LaunchSplit<T, 8, false>(args, split, stream);
    case 16:
      return args.transpose ? LaunchSplit<T, 16, true>(args, split, stream)
                            : LaunchSplit<T, 16, false>(args, split, stream);
    case 32:
      return args.transpose ? LaunchSplit<T, 32, true>(args, split, stream)
                            : LaunchSplit<T, 32, false>(args, split, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchSpmmStagedSm90(const SpmmArgs& args, int split, cudaStream_t stream) {
  if (!SpmmSm90Fits(args) || args.schedule == nullptr) return cudaErrorInvalidValue;
  if (args.m == 0 || args.n == 0 || args.num_groups == 0) return cudaSuccess;
  if (args.num_blocks == 0 || args.k == 0) {  // no tensor to map, and the answer is known
    return cudaMemsetAsync(args.y, 0, args.num_groups * args.m * args.n * 2, stream);
  }
  return args.dtype == DType::kF16 ? LaunchType<__half>(args, split, stream)
                                   : LaunchType<__nv_bfloat16>(args, split, stream);
}

}  // namespace bsjax
