// The CPU kernels in the instructions that every processor of the target has: SSE2 or NEON, vectors of 4 floats.
#define BSJAX_CPU_KERNELS kCpuKernelsGeneric
#define BSJAX_CPU_LANES 4
#define BSJAX_CPU_SUMS 8  // 4 x 2, beside 2 of w and 1 of x, in 16 registers
#include "cuda/cpu/kernels.inc"
