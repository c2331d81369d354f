// The table of compiled sddmm tiles and the choice among them: host-only and pure, so that it is tested without a GPU.
// The .cu files instantiate exactly the rows of their arch; the FFI attribute `config` is an index into the table.
#ifndef BSJAX_CUDA_SDDMM_CONFIG_H_
#define BSJAX_CUDA_SDDMM_CONFIG_H_

#include <cstdint>
#include <iterator>

#include "cuda/sddmm/args.h"
#include "cuda/sddmm/schedule.h"

namespace bsjax {

struct SddmmConfig {
  int32_t arch;      // 80: sddmm/sm80.cu, any card from sm_80 on; 90: sddmm/sm90.cu, compute capability 9.x alone
  int32_t stages;    // of arch 80: slots of the shared-memory pipeline, 8 KB of x and 8 KB of dy each
  int32_t split;     // of arch 90: CTAs that share the rows of one bin: the size of a cluster
  int32_t clusters;  // of arch 90: clusters of that size that an H200 runs at a time
};

inline constexpr SddmmConfig kSddmmConfigs[] = {
    {80, 4, 1, 0},  // 0: 64 KB, so three CTAs fit the 227 KB of sm_90 and two the 164 KB of sm_80
    // With a schedule: float16 and bfloat16.
    {90, 0, 1, 132},  // 1: many bins, or few rows
    {90, 0, 2, 66},   // 2 to 4: few bins of many rows, each shared by the CTAs of a cluster
    {90, 0, 4, 30},
    {90, 0, 8, 15},
};

inline constexpr int kNumSddmmConfigs = static_cast<int>(std::size(kSddmmConfigs));

// Whether the kernel of arch 90 serves a call of these sizes. Coordinates of the copy engine are signed 32-bit numbers
// (2^16 is left for boxes that reach past the end), its strides are under 2^40 bytes in steps of 16.
constexpr bool SddmmSm90Fits(const SddmmArgs& args) {
  constexpr int64_t kMaxSize = INT32_MAX - (1 << 16);
  constexpr int64_t kMaxStride = (int64_t{1} << 40) / 2;  // in elements of 2 bytes
  if (args.dtype == DType::kF32 || args.bins == nullptr) return false;
  if (args.m > kMaxSize || args.k > kMaxSize || args.n > kMaxSize) return false;
  if (args.num_blocks > kMaxSize || args.num_groups > (1 << 16)) return false;
  if (args.max_bins * args.num_groups > kMaxSize) return false;
  if (args.x_group_stride >= kMaxStride || args.dy_group_stride >= kMaxStride) return false;
  return args.x_group_stride % 8 == 0 && args.dy_group_stride % 8 == 0;
}

// Whether the kernel of `config` serves this call on a device of compute capability `arch` (major * 10 + minor).
constexpr bool SddmmConfigFits(int config, const SddmmArgs& args, int arch) {
  if (config < 0 || config >= kNumSddmmConfigs) return false;
  return kSddmmConfigs[config].arch == 80 ? arch >= 80 : arch / 10 == 9 && SddmmSm90Fits(args);
}

// The config of arch 90 for this call: clusters take bins in turns, and the last turn may be partly idle. Clusters of 4
// and 8 pay only where one turn is enough for all bins. How many those are, the device alone knows: the choice goes by
// an estimate, which is the same for all patterns of one size. H200, bfloat16, 8192 rows, 4096 x 4096,
// b = 32, density .02 (32 bins), us, splits 1, 2, 4, 8: 100, 68, 61, 82.
inline int SddmmSm90Config(const SddmmArgs& args) {
  constexpr int64_t kTurnRows = 200;  // that a turn's beginning and end cost as much as
  const int64_t num_tasks = EstimateSddmmBins(args.k, args.n, args.block_size, args.num_blocks) * args.num_groups;
  int best = 1;
  int64_t best_rows = 0;
  for (int config = 1; config < kNumSddmmConfigs; ++config) {
    const int64_t clusters = kSddmmConfigs[config].clusters, split = kSddmmConfigs[config].split;
    if (split > 2 && num_tasks > clusters) continue;
    const int64_t turns = (num_tasks + clusters - 1) / clusters;
    const int64_t rows = turns * ((args.m + split - 1) / split + kTurnRows);
    if (config == 1 || rows < best_rows) {
      best = config;
      best_rows = rows;
    }
  }
  return best;
}

// The config for this call, or -1 where no compiled one runs on `arch`.
inline int ChooseSddmmConfig(const SddmmArgs& args, int arch) {
  if (arch < 80) return -1;
  const int hopper = SddmmSm90Config(args);
  return SddmmConfigFits(hopper, args, arch) ? hopper : 0;
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_SDDMM_CONFIG_H_
