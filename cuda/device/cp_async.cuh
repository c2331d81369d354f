// cp.async (sm_80): copies from global to shared memory that bypass registers and complete in groups.
#ifndef BSJAX_CUDA_DEVICE_CP_ASYNC_CUH_
#define BSJAX_CUDA_DEVICE_CP_ASYNC_CUH_

#include <cstdint>

#include "cuda/device/shared_address.cuh"

namespace bsjax {

// Copies 16 bytes, or writes 16 zero bytes and reads nothing where not `valid`. Both addresses 16-byte aligned.
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Copies 4 bytes.
__device__ __forceinline__ void CopyAsync4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Closes the group of this thread's copies since the last commit; an empty group is fine and counts.
__device__ __forceinline__ void CommitAsync() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the kPending youngest groups of this thread are still in flight.
template <int kPending>
__device__ __forceinline__ void WaitAsync() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_CP_ASYNC_CUH_
