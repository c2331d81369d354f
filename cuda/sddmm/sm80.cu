// A CTA computes kBlocks stored blocks, neighbours in the list (so mostly of one row of w, whose x it reads once): 64
// columns of x and of dy in all, or one block of 128. It streams the rows of x and dy, 16 to 64 of them in a stage.
// All warps load by cp.async, 16 bytes a thread and copy, kStages - 1 stages ahead; then each multiplies its
// kWarpM x kWarpN part of one block (b = 8: two whole blocks) by mma.sync (float32: by fused multiply-add), one barrier
// a stage. Both operands have the rows as k, so both come through ldmatrix.trans.
// Shared memory: kStages * 2 * 8 KB = 64 KB. Rows past m and blocks outside the pattern are zeros, never read.
// Limits: each block streams its own dy from L2, which bounds b <= 32; b = 8 uses half of mma.sync's 16 rows; blocks
// of one CTA are not split over rows, so fewer than about 400 CTAs leave SMs idle.
#include <type_traits>
#include <utility>

#include "cuda/device/cp_async.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/ldmatrix.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/seal.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/sddmm/config.h"
#include "cuda/sddmm/sm80.h"

namespace bsjax {
namespace {

constexpr int kOperandBytes = 8192;  // of x, and of dy, in one stage

template <Math kMath_, int kB_, int kConfig>
struct Tile {
  static constexpr Math kMath = kMath_;
  static constexpr int kB = kB_;
  using Element = typename MathTraits<kMath>::Element;
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kStages = kSddmmConfigs[kConfig].stages;
  static constexpr int kBlocks = kB < 64 ? 64 / kB : 1;
  static constexpr int kPieces = kBlocks * kB * kElementBytes / 16;  // of one row in shared memory
  static constexpr int kBlockPieces = kPieces / kBlocks;
  static constexpr int kRows = kOperandBytes / 16 / kPieces;  // of x and dy in one stage
  static constexpr int kWarpM = kB == 128 ? 64 : kB < 32 ? kB : 32;
  static constexpr int kWarpN = kB == 32 ? 16 : kB < 32 ? kB : 32;
  static constexpr int kWarpBlocks = kB == 8 ? 2 : 1;
  static constexpr int kWarpsM = kB / kWarpM;
  static constexpr int kWarpsN = kB / kWarpN;
  static constexpr int kThreads = 32 * kBlocks / kWarpBlocks * kWarpsM * kWarpsN;
  // 4-byte elements: ldmatrix cannot transpose them, so fragments are read word by word.
  static constexpr Swizzle kSwizzle = kElementBytes == 4 ? Swizzle::kWords : Swizzle::kRows;
  static constexpr int kSlabRows = 32 / kElementBytes;  // of one mma.sync
  static constexpr int kStageBytes = 2 * kOperandBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;

  static_assert(kThreads % kPieces == 0 && kRows % (kThreads / kPieces) == 0, "Threads must share a stage evenly.");
  static_assert(kRows % kSlabRows == 0, "A stage must be whole mma.sync steps.");
  static_assert(kStages >= 2 && kSharedBytes <= 99 * 1024, "sm_86 and sm_89 have 99 KB of shared memory a CTA.");

  static __device__ __forceinline__ uint32_t Offset(unsigned row, unsigned piece) {
    return PieceOffset<kSwizzle, kPieces>(row, piece);
  }
  static __device__ __forceinline__ uint32_t WordOffset(unsigned row, unsigned column) {
    return Offset(row, column / 4) + column % 4 * 4;
  }
};

// Starts this thread's copies of one operand of one stage: one piece of rows kRowStep apart, so of one block.
template <typename T>
__device__ __forceinline__ void LoadOperand(const char* source, int64_t row_bytes, int valid_rows, const char* base,
                                            uint32_t shared) {
  constexpr int kRowStep = T::kThreads / T::kPieces;
  const unsigned row = threadIdx.x / T::kPieces;
#pragma unroll
  for (int i = 0; i < T::kRows / kRowStep; ++i) {
    const bool valid = static_cast<int>(row) + i * kRowStep < valid_rows;
    CopyAsync16(shared + T::Offset(row + i * kRowStep, threadIdx.x % T::kPieces), valid ? source : base, valid);
    source += kRowStep * row_bytes;
  }
}

// Where one warp works: the first of its blocks in the CTA, and its part of that block.
struct WarpPart {
  unsigned block, m, n, lane;
};

// The sums of one warp by tensor cores.
template <typename T>
struct TensorSum {
  static constexpr bool kHalfRows = T::kB == 8;  // rows 8 to 15 of mma.sync stay zero
  static constexpr int kRows = kHalfRows ? 1 : T::kWarpM / 16, kColumns = T::kWarpN / 8;
  static constexpr int kPair = kColumns > 1 ? 2 : 1;
  static constexpr int kUnroll = T::kB == 128 ? 1 : T::kRows / T::kSlabRows;  // 64 sums leave no registers for more
  float sum[T::kWarpBlocks][kRows][kColumns][4];

  __device__ explicit TensorSum(float start) {
#pragma unroll
    for (int i = 0; i < T::kWarpBlocks * kRows * kColumns * 4; ++i) {
      sum[i / 4 / kColumns / kRows][i / 4 / kColumns % kRows][i / 4 % kColumns][i % 4] = start;
    }
  }

  __device__ __forceinline__ void Multiply(const char* x, const char* dy, const WarpPart& warp) {
#pragma unroll(kUnroll)
    for (int row = 0; row < T::kRows; row += T::kSlabRows) {
#pragma unroll
      for (int e = 0; e < T::kWarpBlocks; ++e) {
        const unsigned first = (warp.block + e) * T::kB;
        uint32_t a[kRows][4] = {};
#pragma unroll
        for (int i = 0; i < kRows; ++i) LoadX(a[i], x, row, first + warp.m + i * 16, warp.lane);
#pragma unroll
        for (int j = 0; j < kColumns; j += kPair) {
          uint32_t b[kPair][2];
          LoadDy(b, dy, row, first + warp.n + j * 8, warp.lane);
#pragma unroll
          for (int p = 0; p < kPair; ++p) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) Mma<T::kMath>(sum[e][i][j + p], a[i], b[p]);
          }
        }
      }
    }
  }

  // `dblocks` is the warp's first block; blocks from `num_blocks` on do not exist.
  __device__ __forceinline__ void Store(char* dblocks, int num_blocks, const WarpPart& warp) {
    using Rows = TileRows<typename T::Element>;
    constexpr int kAcross = kColumns < Rows::kCount ? kColumns : Rows::kCount;  // 8 x 8 tiles of one store, by side
    constexpr int kDown = Rows::kCount / kAcross;
    constexpr int kTileRows = kHalfRows ? T::kWarpBlocks : 2 * kRows;  // for b = 8 a row of tiles is a block
#pragma unroll
    for (int i = 0; i < kTileRows; i += kDown) {
#pragma unroll
      for (int j = 0; j < kColumns; j += kAcross) {
        float2 tiles[Rows::kCount] = {};
#pragma unroll
        for (int t = 0; t < Rows::kCount; ++t) {
          const int down = i + t / kAcross;
          if (down >= kTileRows) continue;
          const float (&part)[4] =
              kHalfRows ? sum[down % T::kWarpBlocks][0][j] : sum[0][down / 2 % kRows][j + t % kAcross];
          const int first = kHalfRows ? 0 : down % 2 * 2;
          tiles[t] = make_float2(part[first], part[first + 1]);
        }
        const uint4 piece = Rows::Gather(tiles, warp.lane);
        const unsigned t = Rows::Tile(warp.lane);
        const int down = i + t / kAcross;
        const int row = warp.m + down * 8 + warp.lane / 4;  // for b = 8 row 8 is the first of the second block
        const int column = warp.n + (j + t % kAcross) * 8 + Rows::Column(warp.lane);
        if (down < kTileRows && row / T::kB < num_blocks) {
          StoreGlobal16(dblocks + (row * T::kB + column) * T::kElementBytes, piece);
        }
      }
    }
  }

 private:
  // The operand a: 16 columns of x from `column` on, as rows.
  static __device__ __forceinline__ void LoadX(uint32_t (&a)[4], const char* x, unsigned row, unsigned column,
                                               unsigned lane) {
    if constexpr (T::kElementBytes == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kHalfRows && i % 2 != 0) continue;
        const unsigned k = row + i / 2 * 4 + lane % 4, m = column + i % 2 * 8 + lane / 4;
        a[i] = RoundOperand<T::kMath>(LoadShared4(x + T::WordOffset(k, m)));
      }
    } else if constexpr (kHalfRows) {
      uint32_t r[2];
      LoadMatrix2<true>(r, SharedAddress(x) + T::Offset(row + lane % 16, column / 8));
      a[0] = r[0];
      a[2] = r[1];
    } else {
      LoadMatrix4<true>(a, SharedAddress(x) + T::Offset(row + lane / 16 * 8 + lane % 8, column / 8 + lane / 8 % 2));
    }
  }

  // The operand b: 8 columns of dy from `column` on, or 16: b[1] is the right half.
  static __device__ __forceinline__ void LoadDy(uint32_t (&b)[kPair][2], const char* dy, unsigned row, unsigned column,
                                                unsigned lane) {
    if constexpr (T::kElementBytes == 4) {
#pragma unroll
      for (int i = 0; i < 2 * kPair; ++i) {
        const unsigned k = row + i % 2 * 4 + lane % 4, n = column + i / 2 * 8 + lane / 4;
        b[i / 2][i % 2] = RoundOperand<T::kMath>(LoadShared4(dy + T::WordOffset(k, n)));
      }
    } else if constexpr (kPair == 1) {
      LoadMatrix2<true>(b[0], SharedAddress(dy) + T::Offset(row + lane % 16, column / 8));
    } else {
      uint32_t r[4];
      LoadMatrix4<true>(r, SharedAddress(dy) + T::Offset(row + lane % 16, column / 8 + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = r[i];
    }
  }
};

// The sums of one warp in real float32: a lane owns 4 neighbouring columns and kLaneRows rows of one block.
template <typename T>
struct PlainSum {
  static constexpr int kLaneRows = T::kWarpM * T::kWarpN * T::kWarpBlocks / 128;
  static constexpr int kLanesN = T::kWarpN / 4, kLanesM = T::kWarpM / kLaneRows;
  static constexpr int kGroup = kLaneRows < 4 ? kLaneRows : 4;  // neighbouring rows, read by one load
  float sum[kLaneRows][4];

  __device__ explicit PlainSum(float start) {
#pragma unroll
    for (int i = 0; i < kLaneRows * 4; ++i) sum[i / 4][i % 4] = start;
  }

  struct Place {
    unsigned block, m, n;  // of the lane: block of the warp, first row and first column in the warp's part
  };
  static __device__ __forceinline__ Place Find(unsigned lane) {
    return {lane / (kLanesN * kLanesM), lane / kLanesN % kLanesM * kGroup, lane % kLanesN * 4};
  }
  // Of the lane's i-th row in the warp's part.
  static __device__ __forceinline__ unsigned Row(const Place& place, unsigned i) {
    return i / kGroup * (kLanesM * kGroup) + place.m + i % kGroup;
  }

  __device__ __forceinline__ void Multiply(const char* x, const char* dy, const WarpPart& warp) {
    const Place place = Find(warp.lane);
    const unsigned first = (warp.block + place.block) * T::kB;
#pragma unroll(kLaneRows == 16 ? 2 : 4)
    for (int row = 0; row < T::kRows; ++row) {
      const float4 right = LoadShared16(dy + T::WordOffset(row, first + warp.n + place.n));
#pragma unroll
      for (int i = 0; i < kLaneRows; i += kGroup) {
        float left[kGroup];
        const char* source = x + T::WordOffset(row, first + warp.m + Row(place, i));
        if constexpr (kGroup == 4) {
          *reinterpret_cast<float4*>(left) = LoadShared16(source);
        } else {
#pragma unroll
          for (int g = 0; g < kGroup; ++g) left[g] = __uint_as_float(LoadShared4(source + g * 4));
        }
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          sum[i + g][0] = fmaf(left[g], right.x, sum[i + g][0]);
          sum[i + g][1] = fmaf(left[g], right.y, sum[i + g][1]);
          sum[i + g][2] = fmaf(left[g], right.z, sum[i + g][2]);
          sum[i + g][3] = fmaf(left[g], right.w, sum[i + g][3]);
        }
      }
    }
  }

  __device__ __forceinline__ void Store(char* dblocks, int num_blocks, const WarpPart& warp) {
    const Place place = Find(warp.lane);
    if (static_cast<int>(place.block) >= num_blocks) return;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const unsigned row = place.block * T::kB + warp.m + Row(place, i), column = warp.n + place.n;
      StoreGlobal16(dblocks + (row * T::kB + column) * 4,
                    make_uint4(__float_as_uint(sum[i][0]), __float_as_uint(sum[i][1]), __float_as_uint(sum[i][2]),
                               __float_as_uint(sum[i][3])));
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kThreads == 256 ? 2 : 3)
    SddmmKernelSm80(const __grid_constant__ SddmmArgs args) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kBlockBytes = T::kB * T::kB * T::kElementBytes;
  const unsigned warp = threadIdx.x / 32, part = warp % (T::kWarpsM * T::kWarpsN);
  const WarpPart place = {warp / (T::kWarpsM * T::kWarpsN) * T::kWarpBlocks, part / T::kWarpsN * T::kWarpM,
                          part % T::kWarpsN * T::kWarpN, threadIdx.x % 32};
  const int64_t x_row_bytes = args.k * T::kElementBytes, dy_row_bytes = args.n * T::kElementBytes;
  const int64_t num_lists = (args.num_blocks + T::kBlocks - 1) / T::kBlocks;
  const int64_t num_steps = (args.m + T::kRows - 1) / T::kRows;

  for (int64_t tile = blockIdx.x; tile < args.num_groups * num_lists; tile += gridDim.x) {
    const int64_t group = tile / num_lists, first = tile % num_lists * T::kBlocks;
    const char* x = static_cast<const char*>(args.x) + group * args.x_group_stride * T::kElementBytes;
    const char* dy = static_cast<const char*>(args.dy) + group * args.dy_group_stride * T::kElementBytes;
    const unsigned piece = threadIdx.x % T::kPieces, row = threadIdx.x / T::kPieces;
    const int64_t entry = first + piece / T::kBlockPieces;
    int64_t block_row = 0, block_column = 0;
    bool counts = entry < args.num_blocks;
    if (counts) {
      block_row = __ldg(args.rows + entry);
      block_column = __ldg(args.cols + entry);
      counts = block_row >= 0 && block_row < args.k / T::kB && block_column >= 0 && block_column < args.n / T::kB;
    }
    const char* x_source = x + row * x_row_bytes + (block_row * T::kBlockPieces + piece % T::kBlockPieces) * 16;
    const char* dy_source = dy + row * dy_row_bytes + (block_column * T::kBlockPieces + piece % T::kBlockPieces) * 16;
    std::conditional_t<T::kMath == Math::kF32, PlainSum<T>, TensorSum<T>> result(StartOfSums(args.seal));

    auto load = [&](int64_t step) {
      if (step < num_steps) {
        const uint32_t stage = SharedAddress(shared) + static_cast<unsigned>(step % T::kStages) * T::kStageBytes;
        const int valid_rows = counts ? static_cast<int>(min(args.m - step * T::kRows, int64_t{T::kRows})) : 0;
        LoadOperand<T>(x_source, x_row_bytes, valid_rows, x, stage);
        LoadOperand<T>(dy_source, dy_row_bytes, valid_rows, dy, stage + kOperandBytes);
        x_source += T::kRows * x_row_bytes;
        dy_source += T::kRows * dy_row_bytes;
      }
      CommitAsync();  // an empty group too: WaitAsync counts groups
    };
#pragma unroll 1
    for (int step = 0; step < T::kStages - 1; ++step) load(step);
#pragma unroll 1
    for (int64_t step = 0; step < num_steps; ++step) {
      WaitAsync<T::kStages - 2>();
      __syncthreads();  // this step has arrived for all warps, and all have left the stage that is filled next
      load(step + T::kStages - 1);
      const char* stage = shared + static_cast<unsigned>(step % T::kStages) * T::kStageBytes;
      result.Multiply(stage, stage + kOperandBytes, place);
    }
    const int64_t stored = group * args.num_blocks + first + place.block;
    const int64_t blocks_left = args.num_blocks - first - place.block;
    result.Store(static_cast<char*>(args.dblocks) + stored * kBlockBytes,
                 static_cast<int>(max(min(blocks_left, int64_t{T::kWarpBlocks}), int64_t{0})), place);
    __syncthreads();  // before the next tile fills the stages
  }
}

template <Math kMath, int kB, int... kConfig>
cudaError_t LaunchConfig(const SddmmArgs& args, int config, cudaStream_t stream,
                         std::integer_sequence<int, kConfig...>) {
  cudaError_t status = cudaErrorInvalidValue;
  auto launch = [&](auto tile) {
    using T = decltype(tile);
    const int64_t num_tiles = args.num_groups * ((args.num_blocks + T::kBlocks - 1) / T::kBlocks);
    status = LaunchTiles<SddmmKernelSm80<T>>(num_tiles, T::kThreads, T::kSharedBytes, args, stream);
  };
  auto launch_if = [&](auto index) {
    if constexpr (kSddmmConfigs[index()].arch == 80) {
      if (config == index()) launch(Tile<kMath, kB, index()>());
    }
  };
  (launch_if(std::integral_constant<int, kConfig>()), ...);
  return status;
}

template <Math kMath>
cudaError_t LaunchMath(const SddmmArgs& args, int config, cudaStream_t stream) {
  constexpr auto kConfigs = std::make_integer_sequence<int, kNumSddmmConfigs>();
  switch (args.block_size) {
    case 8:
      return LaunchConfig<kMath, 8>(args, config, stream, kConfigs);
    case 16:
      return LaunchConfig<kMath, 16>(args, config, stream, kConfigs);
    case 32:
      return LaunchConfig<kMath, 32>(args, config, stream, kConfigs);
    case 64:
      return LaunchConfig<kMath, 64>(args, config, stream, kConfigs);
    case 128:
      return LaunchConfig<kMath, 128>(args, config, stream, kConfigs);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchSddmmSm80(const SddmmArgs& args, int config, cudaStream_t stream) {
  if (args.num_groups == 0 || args.num_blocks == 0) return cudaSuccess;  // a grid must not be empty
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
