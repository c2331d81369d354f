// What one sddmm call needs, whatever runs it. No XLA, no CUDA: every launcher and the CPU code share it.
#ifndef BSJAX_CUDA_SDDMM_ARGS_H_
#define BSJAX_CUDA_SDDMM_ARGS_H_

#include <cstdint>

#include "cuda/dtype.h"

namespace bsjax {

// dblocks[g, e] = x[g, :, rows[e] * b : (rows[e] + 1) * b].T @ dy[g, :, cols[e] * b : (cols[e] + 1) * b]
//
// for each stored block e, summed over the m rows in float32 in a fixed order, rounded once at the end. m = 0 gives
// exact zeros, and so does a block whose indices are out of range (padding).
struct SddmmArgs {
  DType dtype = DType::kF32;      // of x, dy and dblocks
  const void* x = nullptr;        // [g or 1, m, k] row-major, 16-byte aligned
  const void* dy = nullptr;       // [g or 1, m, n] row-major, 16-byte aligned
  const int32_t* rows = nullptr;  // [num_blocks], block row of each stored block
  const int32_t* cols = nullptr;  // [num_blocks], block column of each stored block
  const int32_t* seal = nullptr;  // the first word of the schedule (seal.h): where it is broken, dblocks is NaN
  const int32_t* bins = nullptr;  // SddmmSchedule of rows and cols (sddmm/schedule.h), or null where there is none
  int64_t max_bins = 0;           // that its table has room for; how many are in use, the device alone knows
  void* dblocks = nullptr;        // [g, num_blocks, b, b] row-major, 16-byte aligned; every element is written
  int64_t num_groups = 1;
  int64_t x_group_stride = 0;   // in elements; 0 where all groups share x
  int64_t dy_group_stride = 0;  // in elements; 0 where all groups share dy
  int64_t m = 0, k = 0, n = 0;  // k and n are multiples of block_size
  int64_t num_blocks = 0;
  int32_t block_size = 0;  // 8, 16, 32, 64 or 128
  bool tf32 = false;       // round float32 operands to TF32; ignored for other types
};

}  // namespace bsjax

#endif  // BSJAX_CUDA_SDDMM_ARGS_H_
