// The CPU kernels, compiled once for each instruction set from cpu/kernels.inc, and the table that picks among them.
//
// A translation unit of one instruction set must share no inline function with the others: the linker keeps one copy of
// such a function, and could keep the one that this processor cannot run. Hence no standard templates there.
#ifndef BSJAX_CUDA_CPU_KERNELS_H_
#define BSJAX_CUDA_CPU_KERNELS_H_

#include <cstdint>

#include "cuda/sddmm/args.h"
#include "cuda/spmm/args.h"

namespace bsjax {

struct CpuKernels {
  // Rows [row_begin, row_end) of block columns [column_begin, column_end) of y[group]. Runs on the caller's stack
  // (under 256 KiB of scratch); each output element depends on its own row and list only, not on how calls cut y.
  void (*spmm)(const SpmmArgs& args, int64_t group, int64_t row_begin, int64_t row_end, int64_t column_begin,
               int64_t column_end);
  // Blocks [block_begin, block_end) of dblocks[group]; likewise.
  void (*sddmm)(const SddmmArgs& args, int64_t group, int64_t block_begin, int64_t block_end);
};

extern const CpuKernels kCpuKernelsGeneric;  // any processor
extern const CpuKernels kCpuKernelsAvx2;     // x86-64 with AVX2, FMA and F16C
extern const CpuKernels kCpuKernelsAvx512;   // and AVX-512 F, BW, DQ and VL

}  // namespace bsjax

#endif  // BSJAX_CUDA_CPU_KERNELS_H_
