// What the CUDA handlers ask of the runtime, and its failures as ffi::Error.
#ifndef BSJAX_CUDA_CHECK_CUDA_H_
#define BSJAX_CUDA_CHECK_CUDA_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace bsjax {

namespace ffi = xla::ffi;

// The error of `kernel`, or success.
inline ffi::Error FromCuda(const char* kernel, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  std::string text = std::string(kernel) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion) {
    text += "; this build has code for sm_80, sm_90 and, as PTX that the driver must translate, what comes after";
  }
  return ffi::Error::Internal(text);
}

// The compute capability of the current device as major * 10 + minor; asked once for each device.
inline ffi::Error CurrentArch(const char* op, int* arch) {
  constexpr int kMaxDevices = 64;  // beyond it the device is asked on every call
  static std::atomic<int> known[kMaxDevices];
  int device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return FromCuda(op, status);
  *arch = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (*arch == 0) {
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (status != cudaSuccess) return FromCuda(op, status);
    *arch = major * 10 + minor;
    if (device < kMaxDevices) known[device].store(*arch, std::memory_order_relaxed);
  }
  if (*arch >= 80) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    std::string(op) + ": the CUDA kernels need compute capability 8.0 (Ampere) or newer; device " +
                        std::to_string(device) + " has " + std::to_string(*arch / 10) + "." +
                        std::to_string(*arch % 10) + ".");
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_CHECK_CUDA_H_
