// The CPU kernels in AVX2, FMA and F16C: vectors of 8 floats.
#define BSJAX_CPU_KERNELS kCpuKernelsAvx2
#define BSJAX_CPU_LANES 8
#define BSJAX_CPU_SUMS 8  // 4 x 2, beside 2 of w and 1 of x, in 16 registers
#include "cuda/cpu/kernels.inc"
