// setmaxnreg (sm_90a): registers moved between warpgroups of a CTA. All four warps of a group call the same one, each
// role in one branch, and the kernel must have a cap at entry (__launch_bounds__(threads, 1)).
#ifndef BSJAX_CUDA_DEVICE_REGISTERS_CUH_
#define BSJAX_CUDA_DEVICE_REGISTERS_CUH_

namespace bsjax {

// Gives back what exceeds kCount a thread; a multiple of 8, from 24 on.
template <int kCount>
__device__ __forceinline__ void FreeRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Waits until kCount registers a thread are there.
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_REGISTERS_CUH_
