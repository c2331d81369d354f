// The address that instructions on shared memory take: 32 bits, in the shared window.
#ifndef BSJAX_CUDA_DEVICE_SHARED_ADDRESS_CUH_
#define BSJAX_CUDA_DEVICE_SHARED_ADDRESS_CUH_

#include <cstdint>

namespace bsjax {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_SHARED_ADDRESS_CUH_
