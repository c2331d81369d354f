// The table of compiled spmm tiles and the choice among them: host-only and pure, so that it is tested without a GPU.
// The .cu files instantiate exactly the rows of their arch; the FFI attribute `config` is an index into the table.
#ifndef BSJAX_CUDA_SPMM_CONFIG_H_
#define BSJAX_CUDA_SPMM_CONFIG_H_

#include <cstdint>
#include <iterator>

#include "cuda/spmm/args.h"

namespace bsjax {

struct SpmmConfig {
  int32_t arch;    // 80: spmm/sm80.cu, any card from sm_80 on; 90: spmm/sm90.cu, only cards of compute capability 9.x
  int32_t tile_m;  // rows of y that one CTA computes, of one block column, or of 512 columns where `split` > 0
  int32_t stages;  // slots of the shared-memory pipeline
  int32_t split;   // spmm_sm90_staged.cu: CTAs that share a tile of y; 0: another kernel
};

inline constexpr SpmmConfig kSpmmConfigs[] = {
    {80, 128, 3,
     0},  // 0: three stages of b = 128 are 96 KB: two CTAs on sm_80 and sm_90, one where 99 KB is all there is
    {80, 32, 4, 0},  // 1: few rows: a quarter of the tile, so four times the CTAs, and one stage more to hide latency
    // Rows of arch 90: float16 and bfloat16, block sizes 64 and 128, m >= 64. Fewer stages where shared memory ends.
    {90, 256, 5,
     0},  // 2: moves least through L2, 40 KB for each 256 x 64 x 64 products; one CTA an SM walks many tiles
    {90, 128, 4, 0},  // 3: few rows; two CTAs an SM at b = 64, one tile each, so the hardware balances uneven columns
    // With a schedule: float16 and bfloat16, block sizes 8, 16 and 32. One CTA an SM, since 64 x 512 sums fill it.
    {90, 64, 3, 1},  // 4: many tiles walked by each CTA
    {90, 64, 3, 2},  // 5 to 7: few tiles, each shared by the CTAs of a cluster
    {90, 64, 3, 4},
    {90, 64, 3, 8},
};

inline constexpr int kNumSpmmConfigs = static_cast<int>(std::size(kSpmmConfigs));

// Whether the kernels of arch 90 serve a call of these sizes. Coordinates of the copy engine are signed 32-bit numbers
// (2^16 is left for tiles that reach past the end), its strides under 2^40 bytes in steps of 16; tiles are counted in
// 32 bits, which all memory there is cannot exceed.
constexpr bool SpmmSm90Fits(const SpmmArgs& args) {
  constexpr int64_t kMaxSize = INT32_MAX - (1 << 16);
  constexpr int64_t kMaxStride = (int64_t{1} << 40) / 2;  // in elements of 2 bytes
  const int64_t b = args.block_size;
  if (args.dtype == DType::kF32) return false;
  if (args.m > kMaxSize || args.k > kMaxSize || args.n > kMaxSize || args.num_groups > kMaxSize) return false;
  if (args.num_blocks > kMaxSize / b || args.m * args.n >= kMaxStride) return false;
  if (args.x_group_stride >= kMaxStride || args.blocks_group_stride >= kMaxStride) return false;
  if (args.x_group_stride % 8 != 0 || args.blocks_group_stride % 8 != 0) return false;
  const int64_t tiles_of_group = (args.m + 63) / 64 * (args.n / b + 1);
  return tiles_of_group == 0 || args.num_groups <= (int64_t{1} << 29) / tiles_of_group;
}

// Whether the kernel of `config` serves this call on a device of compute capability `arch` (major * 10 + minor).
constexpr bool SpmmConfigFits(int config, const SpmmArgs& args, int arch) {
  if (config < 0 || config >= kNumSpmmConfigs) return false;
  if (kSpmmConfigs[config].arch == 80) return arch >= 80;
  if (arch / 10 != 9 || !SpmmSm90Fits(args)) return false;  // sm_90a code runs on nothing but 9.x
  if (kSpmmConfigs[config].split > 0) return args.block_size <= 32 && args.schedule != nullptr;
  return args.block_size >= 64 && args.m >= 64;  // under 64 rows a wgmma (m64) multiplies mostly padding
}

// The config of the staged kernel for this call: one CTA a tile where there are many, else as many as run at a time.
constexpr int StagedSpmmConfig(const SpmmArgs& args) {
  constexpr int64_t kClusters[] = {132, 66, 30, 15};  // of 1, 2, 4 and 8 CTAs, on an H200 at a time
  const int64_t tiles = args.num_groups * ((args.m + 63) / 64) * ((args.n + 511) / 512);
  int config = 4;
  for (int i = 1; i < 4; ++i) {
    if (tiles <= kClusters[i]) config = 4 + i;
  }
  return config;
}

// Whether the staged kernel, which reads all of x that some of 512 columns need, is faster than those that read x for
// each block: where enough of those blocks read each 64 columns of x. H200, bfloat16, 8192 rows, 4096 x 4096, fprop,
// us, configs 4 and 0: b = 32, density .10 (3.2 such blocks): 114 and 143; .02 (.6): 57 and 67; b = 16, .10 (13): 132
// and 368; b = 8, .10 (51): 201 and 1473. Under 64 rows half or more of its work would be padding, which b = 32 feels.
constexpr bool StagedSpmmPays(const SpmmArgs& args) {
  const int64_t tiles = (args.n + 511) / 512 * ((args.k + 63) / 64);
  return args.num_blocks * 2 >= tiles && (args.m > 64 || args.block_size < 32);
}

// The config for this call, or -1 where no compiled one runs on `arch`.
constexpr int ChooseSpmmConfig(const SpmmArgs& args, int arch) {
  if (arch < 80) return -1;
  // H200, bfloat16, k = 4096, density .10, us, config 2 against 3: m = 128, n = 16384: 20.3 and 8.6 (b = 64), 15.7
  // and 8.7 (b = 128); m = 1024, n = 4096: 13.1 and 14.8; m = 8192, b = 128: 82.5 and 87.2.
  const int hopper = args.m <= 128 ? 3 : 2;
  if (SpmmConfigFits(hopper, args, arch)) return hopper;
  if (SpmmConfigFits(StagedSpmmConfig(args), args, arch) && StagedSpmmPays(args)) return StagedSpmmConfig(args);
  if (args.m == 0 || args.n == 0 || args.num_groups == 0) return 0;
  // Small tiles where large ones would be mostly padding, or too few for two on each of 132 SMs. H200, bfloat16, n =
  // 16384, us, config 0 against 1: m = 64: 14.2 and 11.9 (b = 32), 18.1 and 12.0 (128), but 56 and 62 (8), 19.5
  // and 19.4 (16); m = 128: 15.5 and 17.5 (32), 15.6 and 15.3 (64), 18.4 and 18.4 (128).
  const int64_t large_tiles = args.num_groups * ((args.m + 127) / 128) * (args.n / args.block_size);
  return (args.m <= 64 && args.block_size >= 32) || large_tiles < 2 * 132 ? 1 : 0;
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_SPMM_CONFIG_H_
