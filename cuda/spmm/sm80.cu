// A CTA computes kTileM rows of one block column of y; neighbouring CTAs take the next columns of the same rows, so
// that those rows of x stay in L2. It gathers: a step of the pipeline takes 128 bytes of k of every row (several list
// entries where b is small, a part of one where it is large) and the pieces of the blocks that belong to them.
// All warps load by cp.async, 16 bytes a thread and copy, kStages - 1 steps ahead; then each multiplies its
// kWarpM x kWarpN part by mma.sync (float32: by fused multiply-add), one barrier a step.
// Shared memory: kStages * 128 bytes * (kTileM + b); the largest is 3 * 128 * (128 + 128) = 96 KB.
// Entries that contribute nothing, and rows past m, are filled with zeros and never read.
// Limits: x is read from L2 once for each block, which bounds b <= 32; half-type rows of b = 8 are half an L2 sector.
#include <type_traits>
#include <utility>

#include "cuda/device/cp_async.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/ldmatrix.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/seal.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/spmm/config.h"
#include "cuda/spmm/sm80.h"

namespace bsjax {
namespace {

constexpr int kStepBytes = 128;  // of k, of each row of x, in one step
constexpr int kStepPieces = kStepBytes / 16;
constexpr int kSlabs = kStepBytes / 32;  // one mma.sync takes 32 bytes of k
constexpr unsigned kAllLanes = 0xffffffff;

template <Math kMath_, int kB_, bool kTranspose_, int kConfig>
struct Tile {
  static constexpr Math kMath = kMath_;
  static constexpr int kB = kB_;
  static constexpr bool kTranspose = kTranspose_;
  using Element = typename MathTraits<kMath>::Element;
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kTileM = kSpmmConfigs[kConfig].tile_m;
  static constexpr int kStages = kSpmmConfigs[kConfig].stages;
  // Wide warps (64 x 32) read each fragment often enough to keep the tensor cores fed; few rows leave no choice.
  static constexpr int kWarpM = kTileM >= 128 && kB >= 64 ? 64 : 32;
  static constexpr int kWarpN = kTileM >= 128 ? (kB < 32 ? kB : 32) : (kB == 8 ? 8 : kB == 128 ? 32 : 16);
  static constexpr int kWarpsM = kTileM / kWarpM;
  static constexpr int kWarpsN = kB / kWarpN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kStepK = kStepBytes / kElementBytes;
  static constexpr int kEntries = kB < kStepK ? kStepK / kB : 1;  // list entries of one step
  static constexpr int kParts = kB > kStepK ? kB / kStepK : 1;    // steps of one list entry
  static constexpr int kEntryPieces = kStepPieces / kEntries;     // of a row of x, of one entry in one step
  // W's pieces lie as they are stored: rows of k if not transposed, else rows of n, kEntries blocks one after another.
  static constexpr int kWRowPieces = kTranspose ? kEntryPieces : kB * kElementBytes / 16;
  static constexpr int kWEntryRows = kTranspose ? kB : kStepK / kEntries;
  static constexpr int kWPieces = kStepPieces * kB;
  static constexpr bool kWordReads = kMath == Math::kTF32 && !kTranspose;  // ldmatrix cannot transpose 4-byte elements
  static constexpr Swizzle kWSwizzle = kWordReads                          ? Swizzle::kWords
                                       : kMath == Math::kF32 && kTranspose ? Swizzle::kEachFourth
                                                                           : Swizzle::kRows;
  static constexpr int kXBytes = kTileM * kStepBytes;
  static constexpr int kStageBytes = kXBytes + kB * kStepBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // Bounds the registers; 8 warps of 64 float32 sums each need a few more than two CTAs leave them.
  static constexpr int kMinCtas = kThreads == 256 ? (kMath == Math::kF32 ? 1 : 2) : kThreads == 128 ? 3 : 8;

  static_assert(kTileM % kWarpM == 0 && kB % kWarpN == 0, "Warps must fill the tile.");
  static_assert(kThreads % kStepPieces == 0 && kTileM % (kThreads / kStepPieces) == 0, "Threads must share x evenly.");
  static_assert(kStages >= 2 && kSharedBytes <= 99 * 1024, "sm_86 and sm_89 have 99 KB of shared memory a CTA.");
};

// One list, 32 entries at a time, lane l holding entry l of the window; the next window is already on its way.
struct Entries {
  const int32_t* indices;
  const int32_t* block_ids;
  unsigned num_inputs, num_blocks;  // unsigned, so that one comparison refuses negative entries too
  int begin, end;
  int index, block;            // -1 where the entry contributes nothing
  int next_index, next_block;  // as read, not checked: a check would wait for the load

  __device__ Entries(const SpmmArgs& args, int64_t column, int block_size)
      : indices(args.indices), block_ids(args.block_ids) {
    num_inputs = static_cast<unsigned>(min(args.k / block_size, int64_t{INT32_MAX}));
    num_blocks = static_cast<unsigned>(min(args.num_blocks, int64_t{INT32_MAX}));
    begin = min(max(args.indptr[column], 0), static_cast<int>(num_blocks));
    end = max(min(args.indptr[column + 1], static_cast<int>(num_blocks)), begin);
    Fetch(threadIdx.x % 32);
  }

  __device__ __forceinline__ int Length() const { return end - begin; }

  __device__ __forceinline__ void Fetch(unsigned entry) {
    const bool inside = entry < static_cast<unsigned>(Length());
    next_index = inside ? __ldg(indices + begin + entry) : -1;
    next_block = inside ? __ldg(block_ids + begin + entry) : -1;
  }

  // Moves on to entries `first` .. `first` + 31 of the list.
  __device__ __forceinline__ void Advance(unsigned first) {
    const bool counts =
        static_cast<unsigned>(next_index) < num_inputs && static_cast<unsigned>(next_block) < num_blocks;
    index = counts ? next_index : -1;
    block = counts ? next_block : -1;
    Fetch(first + 32 + threadIdx.x % 32);
  }
};

// Starts the copies of step `step` into the stage at `shared`. Steps come in order, every lane of the warp takes part.
template <typename T>
__device__ __forceinline__ void LoadStep(const char* x, const char* blocks, int64_t row_bytes, int rows_left,
                                         unsigned step, Entries& entries, uint32_t shared) {
  const unsigned first = step / T::kParts * T::kEntries, part = step % T::kParts;
  if (first % 32 == 0 && part == 0) entries.Advance(first);

  // Of x, a thread copies the same piece of rows kRowStep apart, so it needs one entry only.
  constexpr int kRowStep = T::kThreads / kStepPieces;
  const unsigned piece = threadIdx.x % kStepPieces, row = threadIdx.x / kStepPieces;
  const int index = __shfl_sync(kAllLanes, entries.index, (first + piece / T::kEntryPieces) % 32);
  const char* source = x + row * row_bytes + int64_t{index} * (T::kB * T::kElementBytes) +
                       (part * kStepPieces + piece % T::kEntryPieces) * 16;
  const int valid_rows = index >= 0 ? rows_left : 0;
#pragma unroll
  for (int i = 0; i < T::kTileM / kRowStep; ++i) {
    const bool valid = static_cast<int>(row) + i * kRowStep < valid_rows;
    const uint32_t offset = PieceOffset<Swizzle::kRows, kStepPieces>(row + i * kRowStep, piece);
    CopyAsync16(shared + offset, valid ? source : x, valid);
    source += kRowStep * row_bytes;
  }

#pragma unroll
  for (int i = 0; i < (T::kWPieces + T::kThreads - 1) / T::kThreads; ++i) {
    const unsigned w_piece = threadIdx.x + i * T::kThreads;
    const unsigned w_row = w_piece / T::kWRowPieces, column = w_piece % T::kWRowPieces;
    const int block = __shfl_sync(kAllLanes, entries.block, (first + w_row / T::kWEntryRows) % 32);
    constexpr int kBlockRowBytes = T::kB * T::kElementBytes;
    const unsigned offset = T::kTranspose ? w_row % T::kB * kBlockRowBytes + (part * kStepPieces + column) * 16
                                          : (part * T::kStepK + w_row % T::kWEntryRows) * kBlockRowBytes + column * 16;
    if (T::kWPieces % T::kThreads == 0 || w_piece < T::kWPieces) {
      CopyAsync16(shared + T::kXBytes + PieceOffset<T::kWSwizzle, T::kWRowPieces>(w_row, column),
                  block >= 0 ? blocks + int64_t{block} * (T::kB * kBlockRowBytes) + offset : blocks, block >= 0);
    }
  }
}

// The operand b of mma.sync for 32 bytes of k and 8 columns, or 16 columns at a time: (*b)[1] is the right half.
template <typename T, int kCount>
__device__ __forceinline__ void LoadW(uint32_t (&b)[kCount][2], const char* w, unsigned slab, unsigned n,
                                      unsigned lane) {
  if constexpr (T::kWordReads) {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const unsigned k = slab * 8 + i % 2 * 4 + lane % 4, column = n + i / 2 * 8 + lane / 4;
      b[i / 2][i % 2] = RoundOperand<T::kMath>(
          LoadShared4(w + PieceOffset<T::kWSwizzle, T::kWRowPieces>(k, column / 4) + column % 4 * 4));
    }
  } else {
    const unsigned half = lane / 8 % 2, column = n + lane / 16 % kCount * 8;
    uint32_t offset;
    if constexpr (T::kTranspose) {
      const unsigned piece = slab * 2 + half;
      const unsigned w_row = piece / T::kEntryPieces * T::kB + column + lane % 8;
      offset = PieceOffset<T::kWSwizzle, T::kWRowPieces>(w_row, piece % T::kEntryPieces);
    } else {
      offset = PieceOffset<T::kWSwizzle, T::kWRowPieces>(slab * 16 + half * 8 + lane % 8, column / 8);
    }
    if constexpr (kCount == 2) {
      uint32_t r[4];
      LoadMatrix4<!T::kTranspose>(r, SharedAddress(w) + offset);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = RoundOperand<T::kMath>(r[i]);
    } else {
      LoadMatrix2<!T::kTranspose>(b[0], SharedAddress(w) + offset);
#pragma unroll
      for (int i = 0; i < 2; ++i) b[0][i] = RoundOperand<T::kMath>(b[0][i]);
    }
  }
}

// The sum of one warp by tensor cores.
template <typename T>
struct TensorSum {
  static constexpr int kRows = T::kWarpM / 16, kColumns = T::kWarpN / 8;
  static constexpr int kPair = kColumns > 1 ? 2 : 1;
  static constexpr int kUnroll = kRows * kColumns == 16 ? 1 : kSlabs;  // 64 sums leave no registers for more: spills
  float sum[kRows][kColumns][4];

  __device__ explicit TensorSum(float start) {
#pragma unroll
    for (int i = 0; i < kRows * kColumns * 4; ++i) sum[i / 4 / kColumns][i / 4 % kColumns][i % 4] = start;
  }

  __device__ __forceinline__ void Multiply(const char* stage, unsigned warp_m, unsigned warp_n, unsigned lane) {
#pragma unroll(kUnroll)
    for (int slab = 0; slab < kSlabs; ++slab) {
      uint32_t a[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint32_t offset =
            PieceOffset<Swizzle::kRows, kStepPieces>(warp_m + i * 16 + lane % 16, slab * 2 + lane / 16);
        LoadMatrix4<false>(a[i], SharedAddress(stage) + offset);
#pragma unroll
        for (int j = 0; j < 4; ++j) a[i][j] = RoundOperand<T::kMath>(a[i][j]);
      }
#pragma unroll
      for (int j = 0; j < kColumns; j += kPair) {
        uint32_t b[kPair][2];
        LoadW<T>(b, stage + T::kXBytes, slab, warp_n + j * 8, lane);
#pragma unroll
        for (int p = 0; p < kPair; ++p) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) Mma<T::kMath>(sum[i][j + p], a[i], b[p]);
        }
      }
    }
  }

  // `y` is the top left of the warp's part.
  __device__ __forceinline__ void Store(char* y, int64_t row_bytes, int rows_left, unsigned lane) {
    using Rows = TileRows<typename T::Element>;
    constexpr int kAcross = kColumns < Rows::kCount ? kColumns : Rows::kCount;  // 8 x 8 tiles of one store, by side
    constexpr int kDown = Rows::kCount / kAcross;
#pragma unroll
    for (int i = 0; i < 2 * kRows; i += kDown) {
#pragma unroll
      for (int j = 0; j < kColumns; j += kAcross) {
        float2 tiles[Rows::kCount];
#pragma unroll
        for (int t = 0; t < Rows::kCount; ++t) {
          const int down = i + t / kAcross;
          const float (&part)[4] = sum[down / 2][j + t % kAcross];
          tiles[t] = make_float2(part[down % 2 * 2], part[down % 2 * 2 + 1]);
        }
        const uint4 piece = Rows::Gather(tiles, lane);
        const unsigned t = Rows::Tile(lane);
        const int row = (i + t / kAcross) * 8 + lane / 4, column = (j + t % kAcross) * 8 + Rows::Column(lane);
        if (row < rows_left) StoreGlobal16(y + row * row_bytes + column * T::kElementBytes, piece);
      }
    }
  }
};

// The sum of one warp in real float32: a lane owns 4 neighbouring columns of rows kLanesM apart.
template <typename T>
struct PlainSum {
  static constexpr int kLanesN = T::kWarpN / 4, kLanesM = 32 / kLanesN, kRows = T::kWarpM / kLanesM;
  float sum[kRows][4];

  __device__ explicit PlainSum(float start) {
#pragma unroll
    for (int i = 0; i < kRows * 4; ++i) sum[i / 4][i % 4] = start;
  }

  __device__ __forceinline__ void Multiply(const char* stage, unsigned warp_m, unsigned warp_n, unsigned lane) {
    const unsigned lane_m = warp_m + lane / kLanesN, lane_n = warp_n / 4 + lane % kLanesN;
    const char* w_tile = stage + T::kXBytes;
#pragma unroll(kRows == 16 ? 1 : 2)
    for (int piece = 0; piece < kStepPieces; ++piece) {
      float4 w[4];  // of k if not transposed, else of n
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned w_row = T::kTranspose ? piece / T::kEntryPieces * T::kB + lane_n * 4 + i : piece * 4 + i;
        const unsigned w_piece = T::kTranspose ? piece % T::kEntryPieces : lane_n;
        w[i] = LoadShared16(w_tile + PieceOffset<T::kWSwizzle, T::kWRowPieces>(w_row, w_piece));
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 x = LoadShared16(stage + PieceOffset<Swizzle::kRows, kStepPieces>(lane_m + i * kLanesM, piece));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (T::kTranspose) {
            Add(sum[i][j], x, w[j].x, w[j].y, w[j].z, w[j].w);
          } else {
            Add(sum[i][j], x, At(w[0], j), At(w[1], j), At(w[2], j), At(w[3], j));
          }
        }
      }
    }
  }

  __device__ __forceinline__ void Store(char* y, int64_t row_bytes, int rows_left, unsigned lane) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = lane / kLanesN + i * kLanesM;
      const float (&s)[4] = sum[i];
      if (row < rows_left) {
        StoreGlobal16(
            y + row * row_bytes + lane % kLanesN * 16,
            make_uint4(__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]), __float_as_uint(s[3])));
      }
    }
  }

 private:
  static __device__ __forceinline__ float At(float4 v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }
  static __device__ __forceinline__ void Add(float& sum, float4 x, float w0, float w1, float w2, float w3) {
    sum = fmaf(x.x, w0, sum);
    sum = fmaf(x.y, w1, sum);
    sum = fmaf(x.z, w2, sum);
    sum = fmaf(x.w, w3, sum);
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kMinCtas) SpmmKernelSm80(const __grid_constant__ SpmmArgs args) {
  extern __shared__ __align__(128) char shared[];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned warp_m = warp / T::kWarpsN * T::kWarpM, warp_n = warp % T::kWarpsN * T::kWarpN;
  const int64_t num_columns = args.n / T::kB, num_row_tiles = (args.m + T::kTileM - 1) / T::kTileM;
  const int64_t x_row_bytes = args.k * T::kElementBytes, y_row_bytes = args.n * T::kElementBytes;

  for (int64_t tile = blockIdx.x; tile < args.num_groups * num_row_tiles * num_columns; tile += gridDim.x) {
    const int64_t column = tile % num_columns, row = tile / num_columns % num_row_tiles * T::kTileM;
    const int64_t group = tile / num_columns / num_row_tiles;
    const int rows_left = static_cast<int>(min(args.m - row, int64_t{T::kTileM}));
    const char* x =
        static_cast<const char*>(args.x) + group * args.x_group_stride * T::kElementBytes + row * x_row_bytes;
    const char* blocks = static_cast<const char*>(args.blocks) + group * args.blocks_group_stride * T::kElementBytes;
    Entries entries(args, column, T::kB);
    const int num_steps = (entries.Length() + T::kEntries - 1) / T::kEntries * T::kParts;
    std::conditional_t<T::kMath == Math::kF32, PlainSum<T>, TensorSum<T>> result(StartOfSums(args.seal));

    auto load = [&](int step) {
      if (step < num_steps) {
        LoadStep<T>(x, blocks, x_row_bytes, rows_left, step, entries,
                    SharedAddress(shared) + step % T::kStages * T::kStageBytes);
      }
      CommitAsync();  // an empty group too: WaitAsync counts groups
    };
#pragma unroll 1
    for (int step = 0; step < T::kStages - 1; ++step) load(step);
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
      WaitAsync<T::kStages - 2>();
      __syncthreads();  // this step has arrived for all warps, and all have left the stage that is filled next
      load(step + T::kStages - 1);
      result.Multiply(shared + step % T::kStages * T::kStageBytes, warp_m, warp_n, lane);
    }
    result.Store(static_cast<char*>(args.y) +
                     ((group * args.m + row + warp_m) * args.n + column * T::kB + warp_n) * T::kElementBytes,
                 y_row_bytes, rows_left - static_cast<int>(warp_m), lane);
    __syncthreads();  // before the next tile fills the stages
  }
}

template <Math kMath, int kB, bool kTranspose, int kConfig>
cudaError_t LaunchTile(const SpmmArgs& args, cudaStream_t stream) {
  if constexpr (kSpmmConfigs[kConfig].arch != 80) {
    return cudaErrorInvalidValue;
  } else {
    using T = Tile<kMath, kB, kTranspose, kConfig>;
    const int64_t num_tiles = args.num_groups * ((args.m + T::kTileM - 1) / T::kTileM) * (args.n / kB);
    return LaunchTiles<SpmmKernelSm80<T>>(num_tiles, T::kThreads, T::kSharedBytes, args, stream);
  }
}

template <Math kMath, int kB, bool kTranspose, int... kConfig>
cudaError_t LaunchConfig(const SpmmArgs& args, int config, cudaStream_t stream,
                         std::integer_sequence<int, kConfig...>) {
  cudaError_t status = cudaErrorInvalidValue;
  ((config == kConfig ? void(status = LaunchTile<kMath, kB, kTranspose, kConfig>(args, stream)) : void()), ...);
  return status;
}

template <Math kMath, int kB>
cudaError_t LaunchBlockSize(const SpmmArgs& args, int config, cudaStream_t stream) {
  constexpr auto kConfigs = std::make_integer_sequence<int, kNumSpmmConfigs>();
  return args.transpose ? LaunchConfig<kMath, kB, true>(args, config, stream, kConfigs)
                        : LaunchConfig<kMath, kB, false>(args, config, stream, kConfigs);
}

template <Math kMath>
cudaError_t LaunchMath(const SpmmArgs& args, int config, cudaStream_t stream) {
  switch (args.block_size) {
    case 8:
      return LaunchBlockSize<kMath, 8>(args, config, stream);
    case 16:
      return LaunchBlockSize<kMath, 16>(args, config, stream);
    case 32:
      return LaunchBlockSize<kMath, 32>(args, config, stream);
    case 64:
      return LaunchBlockSize<kMath, 64>(args, config, stream);
    case 128:
      return LaunchBlockSize<kMath, 128>(args, config, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchSpmmSm80(const SpmmArgs& args, int config, cudaStream_t stream) {
  if (args.num_groups == 0 || args.m == 0 || args.n == 0) return cudaSuccess;  // a grid must not be empty
  switch (args.dtype) {
    case DType::kF32:
      return args.tf32 ? LaunchMath<Math::kTF32>(args, config, stream) : LaunchMath<Math::kF32>(args, config, stream);
    case DType::kF16:
      return LaunchMath<Math::kF16>(args, config, stream);
    case DType::kBF16:
      return LaunchMath<Math::kBF16>(args, config, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace bsjax
