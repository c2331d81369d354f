// The CPU kernels in AVX-512 F, BW, DQ and VL: vectors of 16 floats.
#define BSJAX_CPU_KERNELS kCpuKernelsAvx512
#define BSJAX_CPU_LANES 16
#define BSJAX_CPU_SUMS 16  // 8 x 2 or 16 x 1, of 32 registers
#include "cuda/cpu/kernels.inc"
