// A cluster of 1 to 8 CTAs computes one bin of the schedule (sddmm/schedule.h): the stored blocks among a few tiles of
// 64 columns of x and dy. Its CTAs take the steps of 32 or 64 rows in turn. Of each step the copy engine brings all
// tiles of the bin into a slot of a ring; the sums of the blocks stay in registers from the first row to the last.
// Four producer warps issue the copies, a quarter of the tiles each (one thread alone takes 65 ns a copy). b <= 32: 16
// warps (b = 32: 8), each with its own list of blocks, multiply by mma.sync; both operands have the rows as k, so both
// come through ldmatrix.trans, and what the block before has in registers already is not read again. b >= 64: two
// warpgroups multiply by wgmma where the tiles lie, a tile of x with one, two or four of dy at once.
// Shared memory: a ring of 224 KB, 3 stages with 16 tiles of 4 KB, 4 with 7 of 8 KB. In a cluster each CTA then leaves
// its sums there, and stores a share of the blocks after adding all CTAs' sums of it in the order of their ranks.
// Clusters walk the bins where there are more than fit the card. Limits: an SM takes in about 42 bytes a clock, 2 KB a
// tile and 16 rows, which bounds b = 16 to 128; b = 8 is bound by reading shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/device/cluster.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/ldmatrix.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/registers.cuh"
#include "cuda/device/seal.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sddmm/config.h"
#include "cuda/sddmm/schedule.h"
#include "cuda/sddmm/sm90.h"

namespace bsjax {
namespace {

constexpr int kRingBytes = 224 * 1024;  // a CTA has 227
constexpr int kMaxStages = 16;
constexpr int kProducers = 4;  // warps
constexpr int kSharedBytes = kRingBytes + 2 * kMaxStages * sizeof(uint64_t);

static_assert(SddmmBin::kTileCols == kBoxCols, "A tile is a box.");
static_assert(SddmmBin::kMaxTiles % kProducers == 0, "Each producer warp has as many tiles at most.");
static_assert(kSharedBytes <= 227 * 1024, "A CTA of sm_90 has 227 KB.");

template <typename T>
constexpr Math kMathOf = std::is_same_v<T, __half> ? Math::kF16 : Math::kBF16;

template <typename T_, int kB_>
struct Tile {
  using T = T_;
  static constexpr int kB = kB_;
  static constexpr bool kWide = kB >= 64;  // wgmma
  static constexpr SddmmBin kBin{kB};
  static constexpr int kSlots = kBin.Slots();
  static constexpr int kIds = kSlots * kBin.SlotBlocks();  // of a worker
  static constexpr int kBinWords = kBin.Words(), kDescriptorsAt = kBin.DescriptorsAt(), kIdsAt = kBin.IdsAt();
  static constexpr int kConsumers = kBin.Workers() * (kWide ? 4 : 1);  // warps
  static constexpr int kThreads = 32 * (kConsumers + kProducers);
  // H200, us, 64 rows against 32: ones, b = 64: 365 and 390, b = 128: 365 and 412; density .10, b = 64: 60 and 65.
  static constexpr int kStageRows = kWide ? 64 : 32;
  static constexpr int kBoxBytes = kStageRows * kBoxRowBytes;
  static constexpr int kRingBoxes = kRingBytes / kBoxBytes;
  // Sums of a thread. A chunk of them is what is stored together: 16 rows of a block or so.
  static constexpr int kSums = kWide ? 128 : kIds * kB * kB / 32;
  static constexpr int kChunkSums = kB < 32 ? 8 : 16;
  static constexpr int kChunks = kSums / kChunkSums;
  // Registers: 64 K, given out evenly at the start; producers give theirs to the consumers.
  static constexpr int kProducerRegisters = kConsumers == 16 ? 56 : 72;
  static constexpr int kConsumerRegisters = kConsumers == 16 ? 104 : 216;

  static_assert(2 * kBin.MaxTiles() <= kRingBoxes, "One stage fills while another is multiplied.");
  static_assert(kConsumers * kSums * 128 <= kRingBytes, "The ring holds a CTA's sums.");
};

struct Params {
  CUtensorMap x;          // [groups or 1, m, k]
  CUtensorMap dy;         // [groups or 1, m, n]
  const int32_t* header;  // of the schedule: the seal, and the number of bins in use
  const int32_t* bins;
  void* dblocks;  // [groups, num_blocks, b, b]
  int64_t num_blocks;
  int32_t num_groups;
  int32_t max_bins;             // that the table has room for
  int32_t num_steps;            // of Tile::kStageRows rows
  int32_t x_groups, dy_groups;  // 1 where each group has its own, 0 where all share one
};

// What a cluster works on at a time.
struct Place {
  const int32_t* bin;
  int group;
  int rank, size;  // of this CTA in the cluster
  int num_tiles, num_stages;
  int num_steps;  // of this CTA: rank, rank + size, ...

  __device__ Place(const Params& params, int index, int num_bins, int words, int ring_boxes)
      : rank(ClusterRank()), size(ClusterSize()) {
    group = index / num_bins;
    bin = params.bins + static_cast<int64_t>(index - group * num_bins) * words;
    num_tiles = __ldg(bin);
    num_stages = num_tiles == 0 ? 1 : min(ring_boxes / num_tiles, kMaxStages);
    num_steps = num_tiles == 0 ? 0 : (params.num_steps - rank + size - 1) / size;
  }
};

struct Shared {
  char* ring;       // num_stages x num_tiles boxes; at the end the sums
  uint64_t* full;   // [kMaxStages]: the slot's copies have landed
  uint64_t* empty;  // [kMaxStages]: all consumer warps are done with the slot

  __device__ explicit Shared(char* base)
      : ring(base), full(reinterpret_cast<uint64_t*>(base + kRingBytes)), empty(full + kMaxStages) {}
};

// Where a thread stands in the ring. Its length depends on the bin, so each slot has a parity of its own.
struct Ring {
  int num_stages = 1;
  int slot = 0;
  uint32_t parities = 0;  // a bit a slot

  __device__ void Begin(int stages) {
    num_stages = stages;
    slot = 0;
  }
  __device__ uint32_t Parity() const { return parities >> slot & 1; }
  __device__ void Advance() {
    parities ^= 1u << slot;
    if (++slot == num_stages) slot = 0;
  }
};

// A producer: one thread of each producer warp copies the tiles warp, warp + kProducers, ...
template <typename Tile>
__device__ __forceinline__ void Produce(const Params& params, const Shared& shared, const Place& place, int warp,
                                        Ring& ring) {
  constexpr int kTiles = SddmmBin::kMaxTiles / kProducers, kStageRows = Tile::kStageRows, kBoxBytes = Tile::kBoxBytes;
  int32_t tiles[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) tiles[i] = __ldg(place.bin + SddmmBin::kHeaderWords + warp + i * kProducers);
  const int x_group = place.group * params.x_groups, dy_group = place.group * params.dy_groups;
  const int num_own = (place.num_tiles - warp + kProducers - 1) / kProducers;
  // The slots of this bin lie across those of the last one: all of those must be free.
  for (int slot = 0; slot < ring.num_stages; ++slot) {
    MbarrierWait(shared.empty + slot, ring.parities >> slot & 1 ^ 1);
  }
  ring.Begin(place.num_stages);
  int row = place.rank * kStageRows;
#pragma unroll 1
  for (int step = 0; step < place.num_steps; ++step) {
    MbarrierWait(shared.empty + ring.slot, ring.Parity() ^ 1);
    MbarrierArriveExpect(shared.full + ring.slot, num_own * kBoxBytes);
    char* box = shared.ring + (ring.slot * place.num_tiles + warp) * kBoxBytes;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i < num_own) {
        const bool is_dy = (tiles[i] & SddmmBin::kDyTile) != 0;
        TmaLoad(box + i * kProducers * kBoxBytes, is_dy ? params.dy : params.x, shared.full + ring.slot,
                (tiles[i] & ~SddmmBin::kDyTile) * kBoxCols, row, is_dy ? dy_group : x_group);
      }
    }
    row += place.size * kStageRows;
    ring.Advance();
  }
}

template <typename Tile>
struct Sums {
  float v[Tile::kSums / 4][4] = {};  // of mma.sync, or eight in a row of wgmma

  __device__ float (&Wide(int slot))[32] { return reinterpret_cast<float (&)[32]>(v[8 * slot][0]); }
};

// The operands of one slot, for the 32 rows of a stage.
template <typename Tile>
struct Fragments {
  static constexpr int kParts = Tile::kB / 16;  // of 16 columns; b = 8: see below
  static constexpr int kA = Tile::kB == 8 ? 2 : 2 * kParts;
  static constexpr int kWords = Tile::kB == 8 ? 1 : 2 * kParts;
  uint32_t a[kA][4] = {};      // [16 rows, 16 columns of x] each, by rows, then by columns
  uint32_t b[kWords][4] = {};  // the same of dy; b = 8: [32 rows, 8 columns]
};

// Loads what differs from the slot before. `slot`: the lane's offset in the stage for x and, from bit 16 on, for dy.
template <typename Tile>
__device__ __forceinline__ void LoadFragments(Fragments<Tile>& f, uint32_t stage, uint32_t slot, uint32_t load_a,
                                              uint32_t load_b) {
  constexpr int kHalf = 16 * kBoxRowBytes;
  const uint32_t a = stage + (slot & 0xffff), b = stage + (slot >> 16);
  if constexpr (Tile::kB == 8) {
    LoadMatrix4TransIf(f.a[0], a, load_a);
    LoadMatrix4TransIf(f.a[1], a + kHalf, load_a);
    LoadMatrix4TransIf(f.b[0], b, load_b);
  } else {
    constexpr int kParts = Fragments<Tile>::kParts;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {  // 16 columns further: two pieces, a bit that no carry reaches
      const uint32_t a_i = i == 0 ? a : stage + ((slot & 0xffff) ^ 32);
      const uint32_t b_i = i == 0 ? b : stage + ((slot >> 16) ^ 32);
      LoadMatrix4TransIf(f.a[i], a_i, load_a);
      LoadMatrix4TransIf(f.b[i], b_i, load_b);
      LoadMatrix4TransIf(f.a[kParts + i], a_i + kHalf, load_a);
      LoadMatrix4TransIf(f.b[kParts + i], b_i + kHalf, load_b);
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void MultiplyFragments(Sums<Tile>& sums, int slot, const Fragments<Tile>& f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (Tile::kB == 8) {
      Mma<kMathOf<typename Tile::T>>(sums.v[slot], f.a[half], {f.b[0][2 * half], f.b[0][2 * half + 1]});
    } else {
      constexpr int kRows = Tile::kB / 16, kColumns = Tile::kB / 8;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const uint32_t (&b)[4] = f.b[half * kRows + j / 2];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          Mma<kMathOf<typename Tile::T>>(sums.v[(slot * kRows + i) * kColumns + j], f.a[half * kRows + i],
                                         {b[j % 2 * 2], b[j % 2 * 2 + 1]});
        }
      }
    }
  }
}

// The lane's form of a descriptor (LoadFragments says which). In a box, row r's piece p is at 128 r + 16 (p ^ (r % 8)),
// so a piece's offset and the lane's part, which has the lane's row, combine by xor.
template <typename Tile>
__device__ __forceinline__ uint32_t LaneSlot(uint32_t descriptor, unsigned lane) {
  auto offset = [](uint32_t position) { return position / 8 * Tile::kBoxBytes + position % 8 * 16; };
  auto lane_part = [](unsigned row, unsigned piece) { return row * kBoxRowBytes + ((piece ^ (row % 8)) * 16); };
  // Which row and piece a lane names for which register: ldmatrix.cuh and mma.cuh.
  const unsigned a_row = lane / 16 * 8 + lane % 8;
  uint32_t a, b;
  if constexpr (Tile::kB == 8) {  // rows 8 to 15 of a are the second block's
    a = offset((lane / 8 % 2 != 0 ? descriptor >> 8 : descriptor) & 0xff) ^ lane_part(a_row, 0);
    b = offset(descriptor >> 16 & 0xff) ^ lane_part(lane, 0);
  } else {
    a = offset(descriptor & 0xff) ^ lane_part(a_row, lane / 8 % 2);
    b = offset(descriptor >> 16 & 0xff) ^ lane_part(lane % 16, lane / 16);
  }
  return a | b << 16;
}

// The transpose of an 8 x 8 tile of sums, rounded.
template <typename T>
__device__ __forceinline__ float2 TransposeTile(float2 tile) {
  using T2 = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const uint32_t word = TransposeMatrix(Pack(tile, T()));
  const T2& pair = reinterpret_cast<const T2&>(word);
  return make_float2(static_cast<float>(pair.x), static_cast<float>(pair.y));
}

// Rounds and stores a chunk. Its 16-byte pieces come from four 8 x 8 tiles each time (vector.cuh). Of the warp's ids
// and descriptors lane l has the l-th.
template <typename Tile>
__device__ __forceinline__ void StoreChunk(const float (&sums)[Tile::kChunkSums], int chunk, int warp, unsigned lane,
                                           char* dblocks, int32_t own_id, uint32_t own_descriptor) {
  using Rows = TileRows<typename Tile::T>;
  constexpr int kB = Tile::kB;
  auto store = [&](const float2(&tiles)[4], int32_t id, int row, int col) {
    const uint4 piece = Rows::Gather(tiles, lane);
    if (id >= 0) StoreGlobal16(dblocks + (static_cast<int64_t>(id) * kB * kB + row * kB + col) * 2, piece);
  };
  const int t = Rows::Tile(lane), row = lane / 4;
  if constexpr (kB < 32) {  // two slots of two blocks of 8 x 8, or one block of 16 x 16
    float2 tiles[4] = {
        {sums[0], sums[1]},
        kB == 8 ? make_float2(sums[2], sums[3]) : make_float2(sums[4], sums[5]),
        kB == 8 ? make_float2(sums[4], sums[5]) : make_float2(sums[2], sums[3]),
        {sums[6], sums[7]},
    };
    if constexpr (kB == 8) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        if (__shfl_sync(0xffffffff, own_descriptor, 2 * chunk + i / 2) & SddmmBin::kTransposed) {
          tiles[i] = TransposeTile<typename Tile::T>(tiles[i]);
          tiles[i + 1] = TransposeTile<typename Tile::T>(tiles[i + 1]);
        }
      }
    }
    const int32_t id = __shfl_sync(0xffffffff, own_id, kB == 8 ? 4 * chunk + t : chunk);
    store(tiles, id, kB == 8 ? row : t / 2 * 8 + row, kB == 8 ? 0 : t % 2 * 8);
  } else {  // 16 rows of 32 columns
    const int slot = chunk / 2;
    const int32_t id = __shfl_sync(0xffffffff, own_id, slot);
    const int quarter = kB == 128 ? __shfl_sync(0xffffffff, own_descriptor, slot) >> 8 & 0xff : 0;
    const int first_row = kB == 32 ? chunk % 2 * 16 : quarter / 2 * 64 + warp % 4 * 16;
    const int first_col = kB == 32 ? 0 : quarter % 2 * 64 + chunk % 2 * 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 tiles[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) tiles[j] = make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
      store(tiles, id, first_row + half * 8 + row, first_col + t * 8);
    }
  }
}

// What StoreChunk wants to know of the warp's slots.
template <typename Tile>
struct Slots {
  int32_t own_id = -1;
  uint32_t own_descriptor = 0;
  char* dblocks;

  __device__ Slots(const Params& params, const Place& place, int worker, unsigned lane) {
    if (lane < Tile::kIds) own_id = __ldg(place.bin + Tile::kIdsAt + worker * Tile::kIds + lane);
    if (lane < Tile::kSlots) own_descriptor = __ldg(place.bin + Tile::kDescriptorsAt + worker * Tile::kSlots + lane);
    dblocks = static_cast<char*>(params.dblocks) + place.group * params.num_blocks * (Tile::kB * Tile::kB * 2);
  }
};

// Where a chunk of a warp's sums lies in the ring in the end: of each lane 16 bytes, then the next 16 of each.
template <typename Tile>
__device__ __forceinline__ uint32_t ChunkOffset(int warp, int chunk, unsigned lane) {
  return ((warp * Tile::kChunks + chunk) * (Tile::kChunkSums / 4) * 32 + lane) * 16;
}

// Stores a warp's sums or, in a cluster, leaves them in the ring for Combine.
template <typename Tile>
__device__ __forceinline__ void Store(const Params& params, const Shared& shared, const Place& place, int warp,
                                      unsigned lane, const Sums<Tile>& sums) {
  constexpr int kQuads = Tile::kChunkSums / 4;
  if (place.size > 1) {
    __syncthreads();  // all are done with the ring
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      char* own = shared.ring + ChunkOffset<Tile>(warp, chunk, lane);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const float (&v)[4] = sums.v[chunk * kQuads + q];
        *reinterpret_cast<float4*>(own + q * 32 * 16) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
    return;
  }
  const Slots<Tile> slots(params, place, Tile::kWide ? warp / 4 : warp, lane);
#pragma unroll
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
    float total[Tile::kChunkSums];
#pragma unroll
    for (int i = 0; i < Tile::kChunkSums; ++i) total[i] = sums.v[chunk * kQuads + i / 4][i % 4];
    StoreChunk<Tile>(total, chunk, warp, lane, slots.dblocks, slots.own_id, slots.own_descriptor);
  }
}

// Adds up the cluster's sums of this CTA's share of the chunks, rank, rank + size, ..., in the order of the ranks, and
// stores them.
template <typename Tile>
__device__ __forceinline__ void Combine(const Params& params, const Shared& shared, const Place& place, int warp,
                                        unsigned lane) {
  const Slots<Tile> slots(params, place, Tile::kWide ? warp / 4 : warp, lane);
  ClusterArrive();
  ClusterWait();
#pragma unroll 1
  for (int chunk = place.rank; chunk < Tile::kChunks; chunk += place.size) {
    const uint32_t own = SharedAddress(shared.ring) + ChunkOffset<Tile>(warp, chunk, lane);
    float total[Tile::kChunkSums] = {};
#pragma unroll 2
    for (int rank = 0; rank < place.size; ++rank) {
      const uint32_t theirs = MapShared(own, rank);
#pragma unroll
      for (int q = 0; q < Tile::kChunkSums / 4; ++q) {
        const float4 part = LoadCluster16(theirs + q * 32 * 16);
        total[4 * q] += part.x;
        total[4 * q + 1] += part.y;
        total[4 * q + 2] += part.z;
        total[4 * q + 3] += part.w;
      }
    }
    StoreChunk<Tile>(total, chunk, warp, lane, slots.dblocks, slots.own_id, slots.own_descriptor);
  }
  FenceAsyncProxy();  // of this thread's writes to the ring, before copies that overwrite them
  ClusterArrive();
  ClusterWait();  // nobody reads this CTA's ring any more
}

// A consumer warp of b <= 32.
template <typename Tile>
__device__ __forceinline__ void Consume(const Params& params, const Shared& shared, const Place& place, int warp,
                                        unsigned lane, Ring& ring) {
  constexpr int kSlots = Tile::kSlots;
  const int32_t* descriptors = place.bin + Tile::kDescriptorsAt + warp * kSlots;
  const uint32_t own = lane < kSlots ? __ldg(descriptors + lane) : 0;
  const int num_slots = __popc(__ballot_sync(0xffffffff, (own & SddmmBin::kCompute) != 0));
  // As masks over the slots, which the compiler knows to be the same in all lanes.
  const uint32_t loads_a = __ballot_sync(0xffffffff, (own & SddmmBin::kLoadX) != 0);
  const uint32_t loads_b = __ballot_sync(0xffffffff, (own & SddmmBin::kLoadDy) != 0);
  uint32_t slots[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    slots[s] = LaneSlot<Tile>(__shfl_sync(0xffffffff, own, s), lane);
    Opaque(slots[s]);  // or the compiler computes them anew at each use, to save registers
  }
  const uint32_t ring_address = SharedAddress(shared.ring);
  Sums<Tile> sums;
  ring.Begin(place.num_stages);
#pragma unroll 1
  for (int step = 0; step < place.num_steps; ++step) {
    MbarrierWait(shared.full + ring.slot, ring.Parity());
    const uint32_t stage = ring_address + ring.slot * place.num_tiles * Tile::kBoxBytes;
    if (num_slots > 0) {
      Fragments<Tile> f;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (s >= num_slots) break;
        LoadFragments(f, stage, slots[s], loads_a & 1u << s, loads_b & 1u << s);
        MultiplyFragments(sums, s, f);
      }
    }
    __syncwarp();
    if (lane == 0) MbarrierArrive(shared.empty + ring.slot);
    ring.Advance();
  }
  Store<Tile>(params, shared, place, warp, lane, sums);
}

// A consumer warpgroup of b >= 64, with so many units of each kind: a tile of x with 4, 2 or 1 tiles of dy.
template <typename Tile, int kFours, int kPairs, int kSingles>
__device__ __forceinline__ void ConsumeWide(const Params& params, const Shared& shared, const Place& place, int warp,
                                            unsigned lane, Ring& ring) {
  const int32_t* slots = place.bin + Tile::kDescriptorsAt + warp / 4 * Tile::kSlots;
  constexpr int kUnits = kFours + kPairs + kSingles;
  static_assert(4 * kFours + 2 * kPairs + kSingles <= Tile::kSlots, "A warpgroup has as many slots.");
  const uint32_t ring_address = SharedAddress(shared.ring);
  uint64_t a[kUnits + 1], b[kUnits + 1];  // one more: an array must not be empty
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    // A tile's row is one k: 8 rows are 1024 bytes, and columns 64 to 127 are another tile.
    const int slot = u < kPairs ? 2 * u : kPairs + u;
    const uint32_t descriptor = __ldg(slots + slot);
    const uint32_t dy = descriptor >> 16 & 0xff;
    const uint32_t next = u < kFours + kPairs ? (__ldg(slots + slot + 1) >> 16 & 0xff) - dy : 0;
    a[u] = WgmmaDescriptor(ring_address + (descriptor & 0xff) * Tile::kBoxBytes, 16, kSwizzleBytes);
    b[u] = WgmmaDescriptor(ring_address + dy * Tile::kBoxBytes, next * Tile::kBoxBytes, kSwizzleBytes);
  }
  Sums<Tile> sums;
  const bool speaks = lane == 0;  // for its warp, which has waited for its own wgmma's only
  ring.Begin(place.num_stages);
  int last_slot = 0;
#pragma unroll 1
  for (int step = 0; step < place.num_steps; ++step) {
    MbarrierWait(shared.full + ring.slot, ring.Parity());
    const uint32_t stage = ring.slot * place.num_tiles * Tile::kBoxBytes;
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < Tile::kStageRows / 16; ++k) {
      const uint32_t rows = stage + k * 16 * kBoxRowBytes;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (kFours > 0) {
          WgmmaMn256<typename Tile::T>(sums.Wide(0), sums.Wide(1), sums.Wide(2), sums.Wide(3), WgmmaAdvance(a[u], rows),
                                       WgmmaAdvance(b[u], rows));
        } else if (u < kPairs) {
          WgmmaMn128<typename Tile::T>(sums.Wide(2 * u), sums.Wide(2 * u + 1), WgmmaAdvance(a[u], rows),
                                       WgmmaAdvance(b[u], rows));
        } else {
          WgmmaMn64<typename Tile::T>(sums.Wide(kPairs + u), WgmmaAdvance(a[u], rows), WgmmaAdvance(b[u], rows));
        }
      }
    }
    WgmmaCommit();
    WgmmaWait<1>();  // the step before is done, this one runs on
    if (step > 0 && speaks) MbarrierArrive(shared.empty + last_slot);
    last_slot = ring.slot;
    ring.Advance();
  }
  WgmmaWait<0>();
#pragma unroll
  for (int slot = 0; slot < 4; ++slot) WgmmaSettle(sums.Wide(slot));
  if (place.num_steps > 0 && speaks) MbarrierArrive(shared.empty + last_slot);
  Store<Tile>(params, shared, place, warp, lane, sums);
}

template <typename Tile>
__device__ __forceinline__ void ConsumeWide(const Params& params, const Shared& shared, const Place& place, int warp,
                                            unsigned lane, Ring& ring) {
  // One piece of code for each mix: a branch among wgmma's in flight would make the compiler wait for them one by one.
  switch (__ldg(place.bin + 1) >> 8 * (warp / 4) & 0xff) {
    case 0x40:
      return ConsumeWide<Tile, 1, 0, 0>(params, shared, place, warp, lane, ring);
    case 0x20:
      return ConsumeWide<Tile, 0, 2, 0>(params, shared, place, warp, lane, ring);
    case 0x12:
      return ConsumeWide<Tile, 0, 1, 2>(params, shared, place, warp, lane, ring);
    case 0x11:
      return ConsumeWide<Tile, 0, 1, 1>(params, shared, place, warp, lane, ring);
    case 0x10:
      return ConsumeWide<Tile, 0, 1, 0>(params, shared, place, warp, lane, ring);
    case 0x04:
      return ConsumeWide<Tile, 0, 0, 4>(params, shared, place, warp, lane, ring);
    case 0x03:
      return ConsumeWide<Tile, 0, 0, 3>(params, shared, place, warp, lane, ring);
    case 0x02:
      return ConsumeWide<Tile, 0, 0, 2>(params, shared, place, warp, lane, ring);
    case 0x01:
      return ConsumeWide<Tile, 0, 0, 1>(params, shared, place, warp, lane, ring);
    default:
      return ConsumeWide<Tile, 0, 0, 0>(params, shared, place, warp, lane, ring);
  }
}

template <typename Tile>
__global__ __launch_bounds__(Tile::kThreads, 1) void SddmmKernelSm90(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma is in sm_90a only; other targets of a build get a kernel nobody launches
  extern __shared__ __align__(1024) char dynamic_shared[];
  const Shared shared(dynamic_shared);
  const int warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  const int2 header = __ldg(reinterpret_cast<const int2*>(params.header));  // on its way while barriers are set up
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kMaxStages; ++slot) {
      MbarrierInit(shared.full + slot, kProducers);
      MbarrierInit(shared.empty + slot, Tile::kConsumers);
    }
    FenceAsyncProxy();  // the copy engine sees the barriers initialised
  }
  if (threadIdx.x == 32) {
    PrefetchTensorMap(params.x);
    PrefetchTensorMap(params.dy);
  }
  __syncthreads();
  if (header.x != kSeal) {
    return FillWithNan(params.dblocks, params.num_groups * params.num_blocks * (Tile::kB * Tile::kB * 2));
  }
  // Clusters walk the bins in use: the copies of one run while the one before is stored.
  const int num_bins = min(max(header.y, 0), params.max_bins), num_tasks = num_bins * params.num_groups;
  const int size = ClusterSize(), first = blockIdx.x / size, stride = gridDim.x / size;
  Ring ring;
  if (warp >= Tile::kConsumers) {
    FreeRegisters<Tile::kProducerRegisters>();
    for (int task = first; task < num_tasks; task += stride) {
      const Place place(params, task, num_bins, Tile::kBinWords, Tile::kRingBoxes);
      if (lane == 0) Produce<Tile>(params, shared, place, warp - Tile::kConsumers, ring);
      __syncwarp();
      if (size > 1) {  // as Store and Combine do
        __syncthreads();
        ClusterArrive();
        ClusterWait();
        ClusterArrive();
        ClusterWait();
      }
    }
  } else {
    TakeRegisters<Tile::kConsumerRegisters>();
    for (int task = first; task < num_tasks; task += stride) {
      const Place place(params, task, num_bins, Tile::kBinWords, Tile::kRingBoxes);
      if constexpr (Tile::kWide) {
        ConsumeWide<Tile>(params, shared, place, warp, lane, ring);
      } else {
        Consume<Tile>(params, shared, place, warp, lane, ring);
      }
      if (size > 1) Combine<Tile>(params, shared, place, warp, lane);
    }
  }
#endif
}

template <typename T, int kB>
cudaError_t LaunchTile(const SddmmArgs& args, int config, cudaStream_t stream) {
  using Tile = Tile<T, kB>;
  constexpr CUtensorMapDataType kType =
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const int split = kSddmmConfigs[config].split;
  Params params;
  const int64_t x_groups = args.x_group_stride == 0 ? 1 : args.num_groups;
  const int64_t dy_groups = args.dy_group_stride == 0 ? 1 : args.num_groups;
  cudaError_t status =
      EncodeTensorMap(&params.x, kType, args.x, x_groups, args.m, args.k, args.x_group_stride, Tile::kStageRows);
  if (status != cudaSuccess) return status;
  status =
      EncodeTensorMap(&params.dy, kType, args.dy, dy_groups, args.m, args.n, args.dy_group_stride, Tile::kStageRows);
  if (status != cudaSuccess) return status;
  params.header = args.seal;
  params.bins = args.bins;
  params.dblocks = args.dblocks;
  params.num_blocks = args.num_blocks;
  params.num_groups = static_cast<int32_t>(args.num_groups);
  params.max_bins = static_cast<int32_t>(args.max_bins);
  params.num_steps = static_cast<int32_t>((args.m + Tile::kStageRows - 1) / Tile::kStageRows);
  params.x_groups = x_groups > 1;
  params.dy_groups = dy_groups > 1;
  const int64_t num_clusters = std::min<int64_t>(args.max_bins * args.num_groups, kSddmmConfigs[config].clusters);
  return LaunchTiles<SddmmKernelSm90<Tile>>(num_clusters, Tile::kThreads, kSharedBytes, params, stream, split);
}

template <typename T>
cudaError_t LaunchType(const SddmmArgs& args, int config, cudaStream_t stream) {
  switch (args.block_size) {
    case 8:
      return LaunchTile<T, 8>(args, config, stream);
    case 16:
      return LaunchTile<T, 16>(args, config, stream);
    case 32:
      return LaunchTile<T, 32>(args, config, stream);
    case 64:
      return LaunchTile<T, 64>(args, config, stream);
    case 128:
      return LaunchTile<T, 128>(args, config, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchSddmmSm90(const SddmmArgs& args, int config, cudaStream_t stream) {
  if (!SddmmSm90Fits(args) || config < 0 || config >= kNumSddmmConfigs || kSddmmConfigs[config].arch != 90) {
    return cudaErrorInvalidValue;
  }
  if (args.num_groups == 0 || args.num_blocks == 0) return cudaSuccess;
  if (args.m == 0 || args.k == 0 || args.n == 0) {  // no tensor to map, and the answer is known
    const int64_t block_bytes = int64_t{args.block_size} * args.block_size * 2;
    return cudaMemsetAsync(args.dblocks, 0, args.num_groups * args.num_blocks * block_bytes, stream);
  }
  return args.dtype == DType::kF16 ? LaunchType<__half>(args, config, stream)
                                   : LaunchType<__nv_bfloat16>(args, config, stream);
}

}  // namespace bsjax
