// mbarrier: the shared-memory barriers that a bulk tensor copy reports to. sm_90.
//
// A barrier completes a phase once all its arrivals are in and all announced bytes have landed; waiting is on the
// parity of a phase, which is 0, 1, 0, ... from the start. Everything here stays at CTA scope, which is what these
// instructions mean where no scope is written: the .cluster forms order more than one CTA needs and are far slower.
#ifndef BSJAX_CUDA_DEVICE_MBARRIER_CUH_
#define BSJAX_CUDA_DEVICE_MBARRIER_CUH_

#include <cstdint>

#include "cuda/device/shared_address.cuh"

namespace bsjax {

__device__ inline void MbarrierInit(uint64_t* barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(num_arrivals) : "memory");
}

// One arrival. What this thread did before is visible to whoever sees the phase complete (release).
__device__ inline void MbarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// One arrival that also announces `num_bytes` of copies: the phase waits for them too.
__device__ inline void MbarrierArriveExpect(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(num_bytes)
               : "memory");
}

// One arrival, made once all earlier cp.async of this thread have landed, which whoever sees the phase complete then
// sees.
__device__ inline void MbarrierArriveCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Returns once the phase of this parity has completed (acquire). The parity before the first phase, 1, counts as
// completed: a producer may fill a slot that nobody has used yet without asking.
__device__ inline void MbarrierWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {  // each try suspends the thread for a time that the hardware limits
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
}

// Where a thread stands in a ring of kStages slots: the slot, and the parity of the phase that it is in.
template <int kStages>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_MBARRIER_CUH_
