// What kernels do about the seal of a schedule (seal.h): where it is broken, results are NaN, never plausible numbers.
#ifndef BSJAX_CUDA_DEVICE_SEAL_CUH_
#define BSJAX_CUDA_DEVICE_SEAL_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/../seal.h"

namespace bsjax {

// For kernels that follow the lists, whose every index is checked: what sums start from, 0 or NaN, which stays.
__device__ __forceinline__ float StartOfSums(const int32_t* seal) {
  return __ldg(seal) == kSeal ? 0.0f : __int_as_float(-1);
}

// For kernels that trust their schedule: fills `bytes` of the result, a multiple of 16, instead of following it. All
// CTAs of the grid call it. A word of ones is a NaN of every type. Inlined, it would cost the staged spmm's consumers
// registers, which then spill.
static __device__ __noinline__ void FillWithNan(void* result, int64_t bytes) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes / 16; i += stride) {
    static_cast<uint4*>(result)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_SEAL_CUH_
