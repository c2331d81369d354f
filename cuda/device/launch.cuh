// Starting a kernel with more than 48 KB of dynamic shared memory, on whichever device is current, also in clusters.
#ifndef BSJAX_CUDA_DEVICE_LAUNCH_CUH_
#define BSJAX_CUDA_DEVICE_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace bsjax {

// Launches kKernel(args) with one CTA a tile, or as many as a grid holds: the kernel loops over what is left. Where
// `cluster_size` is more than 1 (sm_90 alone), it is that many CTAs a tile, which run together.
//
// The shared-memory limit is a property of a kernel on one device, so it is set once for each device; two threads that
// race here both set the same value. Legal while a stream is being captured: neither call touches a stream's work.
template <auto kKernel, typename Args>
cudaError_t LaunchTiles(int64_t num_tiles, int num_threads, int shared_bytes, const Args& args, cudaStream_t stream,
                        int cluster_size = 1) {
  constexpr int kMaxDevices = 64;  // beyond it the attribute is simply set on every call
  static std::atomic<bool> ready[kMaxDevices];
  const void* kernel = reinterpret_cast<const void*>(kKernel);
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess && (device >= kMaxDevices || !ready[device].load(std::memory_order_acquire))) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status == cudaSuccess && device < kMaxDevices) ready[device].store(true, std::memory_order_release);
  }
  if (status == cudaSuccess) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(num_tiles, INT32_MAX / cluster_size) * cluster_size));
    config.blockDim = dim3(static_cast<unsigned>(num_threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = cluster_size > 1 ? 1 : 0;  // older cards know no clusters
    void* parameters[] = {const_cast<Args*>(&args)};
    status = cudaLaunchKernelExC(&config, kernel, parameters);
  }
  if (status != cudaSuccess) cudaGetLastError();  // reported here, so it must not surface in somebody else's call
  return status;
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_LAUNCH_CUH_
