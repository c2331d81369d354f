// Clusters (sm_90): CTAs that run at the same time on neighbouring SMs and can read each other's shared memory.
#ifndef BSJAX_CUDA_DEVICE_CLUSTER_CUH_
#define BSJAX_CUDA_DEVICE_CLUSTER_CUH_

#include <cstdint>

namespace bsjax {

// CTAs of this cluster, along x; 1 where the kernel was launched without clusters.
__device__ inline uint32_t ClusterSize() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}

__device__ inline uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of the cluster that have not exited. What a thread wrote before it arrives, to its own
// CTA's shared memory too, is visible to every thread that has waited.
__device__ inline void ClusterArrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void ClusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in the cluster's window of what lies at `shared` (of this CTA's window) in the CTA of rank `rank`.
__device__ inline uint32_t MapShared(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// 16 bytes from an address that MapShared gave.
__device__ inline float4 LoadCluster16(uint32_t mapped) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(mapped)
               : "memory");
  return value;
}

// 8 bytes, likewise.
__device__ inline float2 LoadCluster8(uint32_t mapped) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(mapped) : "memory");
  return value;
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_CLUSTER_CUH_
