// A CTA computes kTileM rows of one block column of y. It gathers: for each entry of the column's list, and each 64 of
// the block's k, the copy engine (TMA) brings the [kTileM, 64] piece of x and the [64, b] piece of w (b rows of 64 if
// transposed) into a ring of kStages slots; wgmma multiplies them where they lie.
// Warps 0 to 7 are two warpgroups that multiply and store, kTileM / 2 rows each; one thread of warp 8 issues the
// copies. A stored block is row-major, so x @ w reads it as an operand with n contiguous and x @ w.T as one with k
// contiguous: only the descriptor differs, nothing is copied or transposed. Shared memory: kStages * 128 bytes *
// (kTileM + b) for the ring, 2 * 64 * b * 2 bytes to pass y to the copy engine. Where one CTA fills an SM, as many are
// launched as there are SMs and each walks many tiles, so that the copies of a tile run while the one before is stored.
// Where two fit, each takes one tile: they hide each other's ends, and the hardware hands out tiles as SMs get free,
// which balances columns of uneven length. Limits: x is read from L2 once for each block; tiles are dealt round robin
// when CTAs walk, so SMs end unevenly where columns differ.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cuda/device/launch.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/seal.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/spmm/config.h"
#include "cuda/spmm/sm90.h"

namespace bsjax {
namespace {

template <typename T_, int kB_, bool kTranspose_, int kConfig>
struct Tile {
  using T = T_;
  static constexpr int kB = kB_;
  static constexpr bool kTranspose = kTranspose_;
  static constexpr int kTileM = kSpmmConfigs[kConfig].tile_m;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * kConsumers + 32;
  static constexpr int kMmas = kTileM / (64 * kConsumers);  // wgmma's of 64 rows, one below the other, a warpgroup
  static constexpr int kStepK = kBoxCols;                   // of k in one stage
  static constexpr int kSteps = kB / kStepK;                // stages of one entry
  static constexpr int kHalves = kB / kBoxCols;             // 64-column boxes that the tile's columns span
  static constexpr int kXBytes = kTileM * kBoxRowBytes;
  static constexpr int kWBoxRows = kTranspose ? kB : kStepK;
  static constexpr int kWBoxes = kTranspose ? 1 : kHalves;
  static constexpr int kWBoxBytes = kWBoxRows * kBoxRowBytes;
  static constexpr int kStageBytes = kXBytes + kWBoxes * kWBoxBytes;
  static constexpr int kYBoxBytes = 64 * kBoxRowBytes;
  static constexpr int kYBytes = kHalves * kYBoxBytes;  // of one warpgroup: 64 rows at a time
  static constexpr int kMaxStages = (227 * 1024 - 1024 - kConsumers * kYBytes) / kStageBytes;  // 227 KB: a CTA's limit
  static constexpr int kStages = std::min(kSpmmConfigs[kConfig].stages, kMaxStages);
  static constexpr int kSharedBytes = kStages * (kStageBytes + 2 * sizeof(uint64_t)) + kConsumers * kYBytes;
  // An SM has 228 KB, of which each CTA costs 1 KB beside its own.
  static constexpr int kCtasPerSm = 228 * 1024 / (kSharedBytes + 1024) >= 2 ? 2 : 1;

  static_assert(kTileM % (64 * kConsumers) == 0, "Each warpgroup multiplies 64 rows at a time.");
  static_assert(kTileM <= 256, "A box of the copy engine has at most 256 rows.");
  static_assert(kXBytes % kSwizzleBytes == 0 && kStageBytes % kSwizzleBytes == 0 && kYBytes % kSwizzleBytes == 0,
                "Every box starts at a multiple of the swizzle's period.");
  static_assert(kStages >= 2, "One stage fills while another is multiplied.");
};

struct Params {
  CUtensorMap x;  // [groups or 1, m, k]
  CUtensorMap w;  // [groups or 1, num_blocks * b, b]
  CUtensorMap y;  // [groups, m, n]
  const int32_t* indptr;
  const int32_t* indices;
  const int32_t* block_ids;
  const int32_t* seal;
  int32_t num_blocks, num_block_rows, num_block_cols;
  int32_t num_row_tiles, band;  // a band is so many row tiles
  int32_t num_tiles;
  int32_t x_groups, w_groups;  // 1 where each group has its own, 0 where all share one
};

// The order of tiles. CTAs that run together take neighbouring ones, so a band of row tiles is walked column by column:
// what runs together shares a few block columns of w, and the band's rows of x, all in L2.
struct Place {
  int group, row_tile, block_col;
};

__device__ Place PlaceOf(const Params& params, int tile) {
  const int tiles_of_group = params.num_row_tiles * params.num_block_cols;
  const int in_group = tile % tiles_of_group;
  const int band = in_group / (params.band * params.num_block_cols);
  const int in_band = in_group - band * params.band * params.num_block_cols;
  const int rows = min(params.band, params.num_row_tiles - band * params.band);
  return {tile / tiles_of_group, band * params.band + in_band % rows, in_band / rows};
}

// The list of a tile's block column, as loaded: bounds are applied at use, so that a load ahead of its use is no wait.
struct List {
  int32_t begin, end;

  __device__ int Begin() const { return max(begin, 0); }
  __device__ int End(const Params& params) const { return min(max(end, 0), params.num_blocks); }
};

__device__ List LoadList(const Params& params, int tile) {
  if (tile >= params.num_tiles) return {0, 0};
  const int32_t* indptr = params.indptr + PlaceOf(params, tile).block_col;
  return {__ldg(indptr), __ldg(indptr + 1)};
}

// An entry of a list, as loaded. An entry that contributes nothing is fetched from beyond both tensors, where the copy
// engine fills in zeros: multiplying them costs time only where such entries are, and nobody has to count them.
struct Entry {
  int32_t index, block_id;

  __device__ bool Valid(const Params& params) const {
    return static_cast<uint32_t>(index) < static_cast<uint32_t>(params.num_block_rows) &&
           static_cast<uint32_t>(block_id) < static_cast<uint32_t>(params.num_blocks);
  }
};

__device__ Entry LoadEntry(const Params& params, const List& list, int e) {
  if (e < list.Begin() || e >= list.End(params)) return {-1, -1};
  return {__ldg(params.indices + e), __ldg(params.block_ids + e)};
}

template <typename Tile>
struct Shared {
  char* ring;       // kStages x (x piece, w piece)
  char* y;          // kConsumers x 64 rows of y
  uint64_t* full;   // kStages: the slot's copies have landed
  uint64_t* empty;  // kStages: all consumer warps are done with the slot

  __device__ explicit Shared(char* base)
      : ring(base),
        y(ring + Tile::kStages * Tile::kStageBytes),
        full(reinterpret_cast<uint64_t*>(y + Tile::kConsumers * Tile::kYBytes)),
        empty(full + Tile::kStages) {}
};

// Fills one slot: step `step` of `entry` for the rows of `place`.
template <typename Tile>
__device__ void CopyStep(const Params& params, const Shared<Tile>& shared, int slot, const Place& place,
                         const Entry& entry, int step) {
  const bool valid = entry.Valid(params);
  const int x_col = (valid ? entry.index : params.num_block_rows) * Tile::kB + step * Tile::kStepK;
  const int w_row = (valid ? entry.block_id : params.num_blocks) * Tile::kB;
  char* x = shared.ring + slot * Tile::kStageBytes;
  char* w = x + Tile::kXBytes;
  uint64_t* full = shared.full + slot;
  MbarrierArriveExpect(full, Tile::kStageBytes);
  TmaLoad(x, params.x, full, x_col, place.row_tile * Tile::kTileM, place.group * params.x_groups);
#pragma unroll
  for (int box = 0; box < Tile::kWBoxes; ++box) {
    const int col = Tile::kTranspose ? step * Tile::kStepK : box * kBoxCols;
    const int row = Tile::kTranspose ? w_row : w_row + step * Tile::kStepK;
    TmaLoad(w + box * Tile::kWBoxBytes, params.w, full, col, row, place.group * params.w_groups);
  }
}

// The producer: one thread. Lists are loaded two tiles ahead and entries one ahead, across tiles too: each of these
// loads takes as long as a stage or two.
template <typename Tile>
__device__ void Produce(const Params& params, const Shared<Tile>& shared) {
  RingPosition<Tile::kStages> ring;
  const int stride = gridDim.x;
  List list = LoadList(params, blockIdx.x);
  List next_list = LoadList(params, blockIdx.x + stride);
  Entry entry = LoadEntry(params, list, list.Begin());
  for (int tile = blockIdx.x; tile < params.num_tiles; tile += stride) {
    const Place place = PlaceOf(params, tile);
    const List later_list = LoadList(params, tile + 2 * stride);
    const Entry next_tile_entry = LoadEntry(params, next_list, next_list.Begin());
    const int end = list.End(params);
    for (int e = list.Begin(); e < end; ++e) {
      const Entry next_entry = LoadEntry(params, list, e + 1);
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
        MbarrierWait(shared.empty + ring.slot, ring.parity ^ 1);
        CopyStep(params, shared, ring.slot, place, entry, step);
        ring.Advance();
      }
      entry = next_entry;
    }
    entry = next_tile_entry;
    list = next_list;
    next_list = later_list;
  }
}

// acc += the slot's piece of x (this warpgroup's rows) @ its piece of w.
template <typename Tile>
__device__ void MultiplyStep(float (&acc)[Tile::kMmas][Tile::kB / 2], uint32_t x, uint32_t w) {
  // x: rows of 128 bytes, 64 of k: K-major, 8-row groups 1024 bytes apart, and 16 of k further is 32 bytes further.
  // w, transposed: the same, its rows being columns of the product. w as stored: a row is one k, so MN-major: 8 of k
  // are 1024 bytes, 16 of k further is 2048 bytes further, and columns 64 to 127 are the second box.
  constexpr Major kMajor = Tile::kTranspose ? Major::kK : Major::kMN;
  constexpr int kXStep = 16 * 2, kWStep = Tile::kTranspose ? 16 * 2 : 16 * kBoxRowBytes;
  const uint64_t a = WgmmaDescriptor(x, 16, kSwizzleBytes);
  const uint64_t b = WgmmaDescriptor(w, Tile::kTranspose ? 16 : Tile::kWBoxBytes, kSwizzleBytes);
#pragma unroll
  for (int k = 0; k < Tile::kStepK / 16; ++k) {
#pragma unroll
    for (int i = 0; i < Tile::kMmas; ++i) {
      Wgmma<typename Tile::T, Tile::kB, kMajor>(acc[i], WgmmaAdvance(a, i * 64 * kBoxRowBytes + k * kXStep),
                                                WgmmaAdvance(b, k * kWStep));
    }
  }
}

__device__ void Round2(float low, float high, __nv_bfloat162* out) { *out = __floats2bfloat162_rn(low, high); }
__device__ void Round2(float low, float high, __half2* out) { *out = __floats2half2_rn(low, high); }

// Rounds 64 rows of sums into the warpgroup's part of shared memory, in boxes as the copy engine wants them. The eight
// rows of a warp's store fall on eight different 16-byte pieces of the banks, thanks to the same swizzle.
template <typename Tile>
__device__ void WriteRows(const float (&acc)[Tile::kB / 2], char* y) {
  using T2 = std::conditional_t<std::is_same_v<typename Tile::T, __half>, __half2, __nv_bfloat162>;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4;  // and row + 8, which has the same place in the swizzle
#pragma unroll
  for (int j = 0; j < Tile::kB / 8; ++j) {
    char* piece = y + j / 8 * Tile::kYBoxBytes + row * kBoxRowBytes + ((j % 8) ^ (row % 8)) * 16 + lane % 4 * 4;
    Round2(acc[4 * j], acc[4 * j + 1], reinterpret_cast<T2*>(piece));
    Round2(acc[4 * j + 2], acc[4 * j + 3], reinterpret_cast<T2*>(piece + 8 * kBoxRowBytes));
  }
}

// Rounds and stores a warpgroup's sums. The copies of the last rows run on while the next tile is multiplied.
template <typename Tile>
__device__ void StoreTile(const Params& params, const float (&acc)[Tile::kMmas][Tile::kB / 2], char* y,
                          const Place& place, int warpgroup) {
  const bool leader = threadIdx.x % 128 == 0;
#pragma unroll
  for (int i = 0; i < Tile::kMmas; ++i) {
    if (leader) TmaStoreWaitRead();
    SyncWarpgroup(warpgroup);  // `y` is free
    WriteRows<Tile>(acc[i], y);
    FenceAsyncProxy();
    SyncWarpgroup(warpgroup);  // `y` is complete
    if (leader) {
      const int row = place.row_tile * Tile::kTileM + (warpgroup * Tile::kMmas + i) * 64;
#pragma unroll
      for (int half = 0; half < Tile::kHalves; ++half) {
        TmaStore(y + half * Tile::kYBoxBytes, params.y, place.block_col * Tile::kB + half * kBoxCols, row, place.group);
      }
      TmaStoreCommit();
    }
  }
}

// A consumer: one of the warps of `warpgroup`, all of them in step.
template <typename Tile>
__device__ void Consume(const Params& params, const Shared<Tile>& shared, int warpgroup) {
  RingPosition<Tile::kStages> ring;
  char* y = shared.y + warpgroup * Tile::kYBytes;
  const uint32_t x = SharedAddress(shared.ring) + warpgroup * Tile::kMmas * 64 * kBoxRowBytes;
  const uint32_t w = SharedAddress(shared.ring) + Tile::kXBytes;
  const bool speaks = threadIdx.x % 32 == 0;  // for its warp, which has waited for its own wgmma's only
  const int stride = gridDim.x;
  List list = LoadList(params, blockIdx.x);
  for (int tile = blockIdx.x; tile < params.num_tiles; tile += stride) {
    const Place place = PlaceOf(params, tile);
    const List next_list = LoadList(params, tile + stride);
    const float start = StartOfSums(params.seal);
    float acc[Tile::kMmas][Tile::kB / 2];  // zeros are what an empty list stores
#pragma unroll
    for (int i = 0; i < Tile::kMmas * Tile::kB / 2; ++i) acc[i / (Tile::kB / 2)][i % (Tile::kB / 2)] = start;
    const int num_steps = (list.End(params) - list.Begin()) * Tile::kSteps;
    int last_slot = 0;
    for (int step = 0; step < num_steps; ++step) {
      MbarrierWait(shared.full + ring.slot, ring.parity);
      WgmmaFence();
      MultiplyStep<Tile>(acc, x + ring.slot * Tile::kStageBytes, w + ring.slot * Tile::kStageBytes);
      WgmmaCommit();
      WgmmaWait<1>();  // the step before is done, this one runs on
      if (step > 0 && speaks) MbarrierArrive(shared.empty + last_slot);
      last_slot = ring.slot;
      ring.Advance();
    }
    WgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kMmas; ++i) WgmmaSettle(acc[i]);
    if (num_steps > 0 && speaks) MbarrierArrive(shared.empty + last_slot);
    StoreTile<Tile>(params, acc, y, place, warpgroup);
    list = next_list;
  }
  if (threadIdx.x % 128 == 0) TmaStoreWaitRead();  // shared memory must outlive the copies from it
}

template <typename Tile>
__global__ __launch_bounds__(Tile::kThreads,
                             Tile::kCtasPerSm) void SpmmKernelSm90(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma is in sm_90a only; other targets of a build get a kernel nobody launches
  extern __shared__ __align__(1024) char dynamic_shared[];
  const Shared<Tile> shared(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Tile::kStages; ++slot) {
      MbarrierInit(shared.full + slot, 1);
      MbarrierInit(shared.empty + slot, 4 * Tile::kConsumers);  // warps
    }
    FenceAsyncProxy();  // the copy engine sees the barriers initialised
  }
  if (threadIdx.x == 128 * Tile::kConsumers) {
    PrefetchTensorMap(params.x);
    PrefetchTensorMap(params.w);
    PrefetchTensorMap(params.y);
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < Tile::kConsumers) {
    Consume<Tile>(params, shared, warpgroup);
  } else if (threadIdx.x == 128 * Tile::kConsumers) {
    Produce<Tile>(params, shared);
  }
#endif
}

// Rows of x that the CTAs of a time walk together: 16 MB, a quarter of the 60 MB of L2 that an H100 or H200 has.
int32_t BandRowTiles(const SpmmArgs& args, int tile_m) {
  constexpr int64_t kBandBytes = 16 << 20;
  return static_cast<int32_t>(std::max<int64_t>(kBandBytes / (tile_m * args.k * 2), 1));
}

template <typename Tile>
cudaError_t MakeParams(const SpmmArgs& args, Params* params) {
  constexpr CUtensorMapDataType kType =
      std::is_same_v<typename Tile::T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const int64_t b = Tile::kB, groups = args.num_groups;
  const int64_t x_groups = args.x_group_stride == 0 ? 1 : groups, w_groups = args.blocks_group_stride == 0 ? 1 : groups;
  cudaError_t status =
      EncodeTensorMap(&params->x, kType, args.x, x_groups, args.m, args.k, args.x_group_stride, Tile::kTileM);
  if (status == cudaSuccess) {
    status = EncodeTensorMap(&params->w, kType, args.blocks, w_groups, args.num_blocks * b, b, args.blocks_group_stride,
                             Tile::kWBoxRows);
  }
  if (status == cudaSuccess) {
    status = EncodeTensorMap(&params->y, kType, args.y, groups, args.m, args.n, args.m * args.n, 64);
  }
  params->indptr = args.indptr;
  params->indices = args.indices;
  params->block_ids = args.block_ids;
  params->seal = args.seal;
  params->num_blocks = static_cast<int32_t>(args.num_blocks);
  params->num_block_rows = static_cast<int32_t>(args.k / b);
  params->num_block_cols = static_cast<int32_t>(args.n / b);
  params->num_row_tiles = static_cast<int32_t>((args.m + Tile::kTileM - 1) / Tile::kTileM);
  params->band = std::min(BandRowTiles(args, Tile::kTileM), params->num_row_tiles);
  params->num_tiles = static_cast<int32_t>(groups * params->num_row_tiles * params->num_block_cols);
  params->x_groups = x_groups > 1;
  params->w_groups = w_groups > 1;
  return status;
}

template <typename T, int kB, bool kTranspose, int kConfig>
cudaError_t LaunchTile(const SpmmArgs& args, cudaStream_t stream) {
  if constexpr (kSpmmConfigs[kConfig].arch != 90 || kSpmmConfigs[kConfig].split > 0) {
    return cudaErrorInvalidValue;
  } else {
    using Tile = Tile<T, kB, kTranspose, kConfig>;
    Params params;
    cudaError_t status = MakeParams<Tile>(args, &params);
    int device = 0, num_sms = 0;
    if (status == cudaSuccess) status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    const int num_ctas = Tile::kCtasPerSm > 1 ? params.num_tiles : std::min(params.num_tiles, num_sms);
    return LaunchTiles<SpmmKernelSm90<Tile>>(num_ctas, Tile::kThreads, Tile::kSharedBytes, params, stream);
  }
}

template <typename T, int kB, bool kTranspose, int... kConfig>
cudaError_t LaunchConfig(const SpmmArgs& args, int config, cudaStream_t stream,
                         std::integer_sequence<int, kConfig...>) {
  cudaError_t status = cudaErrorInvalidValue;  // unless `config` is a row of the table
  ((config == kConfig ? void(status = LaunchTile<T, kB, kTranspose, kConfig>(args, stream)) : void()), ...);
  return status;
}

template <typename T, int kB>
cudaError_t LaunchBlockSize(const SpmmArgs& args, int config, cudaStream_t stream) {
  constexpr auto kConfigs = std::make_integer_sequence<int, kNumSpmmConfigs>();
  return args.transpose ? LaunchConfig<T, kB, true>(args, config, stream, kConfigs)
                        : LaunchConfig<T, kB, false>(args, config, stream, kConfigs);
}

template <typename T>
cudaError_t LaunchType(const SpmmArgs& args, int config, cudaStream_t stream) {
  return args.block_size == 64 ? LaunchBlockSize<T, 64>(args, config, stream)
                               : LaunchBlockSize<T, 128>(args, config, stream);
}

}  // namespace

cudaError_t LaunchSpmmSm90(const SpmmArgs& args, int config, cudaStream_t stream) {
  if (!SpmmSm90Fits(args) || args.block_size < 64 || config < 0 || config >= kNumSpmmConfigs ||
      kSpmmConfigs[config].arch != 90) {
    return cudaErrorInvalidValue;
  }
  if (args.m == 0 || args.n == 0 || args.num_groups == 0) return cudaSuccess;
  if (args.num_blocks == 0 || args.k == 0) {  // no tensor to map, and the answer is known
    return cudaMemsetAsync(args.y, 0, args.num_groups * args.m * args.n * 2, stream);
  }
  return args.dtype == DType::kF16 ? LaunchType<__half>(args, config, stream)
                                   : LaunchType<__nv_bfloat16>(args, config, stream);
}

}  // namespace bsjax
