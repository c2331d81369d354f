// The bulk tensor copy engine (TMA): boxes of a tensor in global memory, to and from shared memory. sm_90.
//
// One form only, which is what wgmma reads: rank 3 [groups, rows, cols] of 16-bit elements, boxes of 64 columns (128
// bytes a row) in the 128-byte swizzle. In shared memory row r of a box starts at byte 128 r, and its 16-byte piece c
// lies at piece c ^ (r % 8), if the box starts at a multiple of 1024 bytes: the hardware takes the xor from bits of the
// address. Elements of a box outside the tensor are filled with zeros (loads) or left alone (stores), and a load counts
// the bytes of the whole box all the same.
#ifndef BSJAX_CUDA_DEVICE_TMA_CUH_
#define BSJAX_CUDA_DEVICE_TMA_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "cuda/device/mbarrier.cuh"

namespace bsjax {

constexpr int kBoxCols = 64;
constexpr int kBoxRowBytes = 128;    // the swizzle's width, and kBoxCols elements
constexpr int kSwizzleBytes = 1024;  // the swizzle's period: 8 rows

// Begins the fetch of a map, so that the first copy by it need not wait. The map is a __grid_constant__ parameter.
__device__ inline void PrefetchTensorMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Begins to copy the box at [group, row, col] to `destination`; `barrier` counts its bytes. Called by one thread.
__device__ inline void TmaLoad(void* destination, const CUtensorMap& map, uint64_t* barrier, int col, int row,
                               int group) {
  // A CTA launched without a cluster is a cluster of its own, so its shared memory is valid in the .cluster space.
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(SharedAddress(destination)),
      "l"(&map), "r"(col), "r"(row), "r"(group), "r"(SharedAddress(barrier))
      : "memory");
}

// Begins to copy `source` to the box at [group, row, col]. Called by one thread, after FenceAsyncProxy in each thread
// that wrote to `source` and a barrier among them all.
__device__ inline void TmaStore(const void* source, const CUtensorMap& map, int col, int row, int group) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
               "r"(col), "r"(row), "r"(group), "r"(SharedAddress(source))
               : "memory");
}

// Closes the group of this thread's stores since the last commit.
__device__ inline void TmaStoreCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all committed stores of this thread have read their sources, which may then be overwritten.
__device__ inline void TmaStoreWaitRead() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Orders this thread's ordinary accesses to shared memory before later ones by the copy engine and the tensor cores.
__device__ inline void FenceAsyncProxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Encodes the map of a row-major [groups, rows, cols] tensor for boxes of [1, box_rows, kBoxCols]. Pure host work.
// Sizes under 2^31 (coordinates are signed), strides under 2^40 bytes and multiples of 16, or it refuses.
//
// The driver's encoder is found at run time: a link to libcuda would keep machines without a driver from loading us.
inline cudaError_t EncodeTensorMap(CUtensorMap* map, CUtensorMapDataType type, const void* data, int64_t groups,
                                   int64_t rows, int64_t cols, int64_t group_stride, int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static std::atomic<void*> found{nullptr};  // one driver a process, whatever the device
  void* encode = found.load(std::memory_order_acquire);
  if (encode == nullptr) {
    constexpr unsigned kCuda12_0 = 12000;  // the version that brought the encoder, and whose signature we use
    cudaDriverEntryPointQueryResult result;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, kCuda12_0, cudaEnableDefault, &result);
    if (status != cudaSuccess) return status;
    if (result != cudaDriverEntryPointSuccess || encode == nullptr) return cudaErrorInsufficientDriver;
    found.store(encode, std::memory_order_release);
  }
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(groups)};
  // With one group its stride is never used, but must still be legal: the row's is.
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(cols) * 2,
                                static_cast<cuuint64_t>(groups > 1 ? group_stride : cols) * 2};
  const cuuint32_t box[] = {kBoxCols, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[] = {1, 1, 1};
  const CUresult result = reinterpret_cast<Encode>(encode)(
      map, type, 3, const_cast<void*>(data), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_TMA_CUH_
