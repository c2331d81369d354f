// What one spmm call needs, whatever runs it. No XLA, no CUDA: every launcher and the CPU code share it.
#ifndef BSJAX_CUDA_SPMM_ARGS_H_
#define BSJAX_CUDA_SPMM_ARGS_H_

#include <cstdint>

#include "cuda/dtype.h"

namespace bsjax {

// y[g, m, n] = x[g, m, k] @ w[g, k, n], summed in float32 in the order of the lists, rounded once at the end.
//
// Output block column j of `y` is the sum over e in [indptr[j], indptr[j + 1]) of
//   x[:, indices[e] * b : (indices[e] + 1) * b] @ op(blocks[block_ids[e]])
// where op transposes the stored block if `transpose`. An empty list gives exact zeros. k and n are those of this
// product: with `transpose` the caller passes the row lists of w and its columns as k.
struct SpmmArgs {
  DType dtype = DType::kF32;           // of x, blocks and y
  const void* x = nullptr;             // [g or 1, m, k] row-major, 16-byte aligned
  const void* blocks = nullptr;        // [g or 1, num_blocks, b, b] row-major, 16-byte aligned
  const int32_t* indptr = nullptr;     // [n / b + 1]
  const int32_t* indices = nullptr;    // [num_blocks], input block column of each entry
  const int32_t* block_ids = nullptr;  // [num_blocks], which stored block each entry is
  const int32_t* seal = nullptr;       // the first word of the schedule (seal.h): where it is broken, y is NaN
  const int32_t* schedule = nullptr;   // SpmmSchedule of these lists (spmm/schedule.h), or null where there is none
  void* y = nullptr;                   // [g, m, n] row-major, 16-byte aligned; every element is written
  int64_t num_groups = 1;
  int64_t x_group_stride = 0;       // in elements; 0 where all groups share x
  int64_t blocks_group_stride = 0;  // in elements; 0 where all groups share blocks
  int64_t m = 0, k = 0, n = 0;      // k and n are multiples of block_size
  int64_t num_blocks = 0;
  int32_t block_size = 0;  // 8, 16, 32, 64 or 128
  bool transpose = false;
  bool tf32 = false;  // round float32 operands to TF32; ignored for other types
};

}  // namespace bsjax

#endif  // BSJAX_CUDA_SPMM_ARGS_H_
