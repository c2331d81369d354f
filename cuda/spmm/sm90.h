// Launcher of the spmm kernel for Hopper.
#ifndef BSJAX_CUDA_SPMM_SM90_H_
#define BSJAX_CUDA_SPMM_SM90_H_

#include <cuda_runtime_api.h>

#include "cuda/spmm/args.h"

namespace bsjax {

// y[g, m, n] = x[g, m, k] @ w[g, k, n] as spmm/args.h says, for float16 and bfloat16 and block sizes 64 and 128, on
// `stream` of the current device, which must be of compute capability 9.0; no workspace, nothing allocated, nothing
// waited for. The same inputs give the same bits on every run, and for every `config` of arch 90: each element is
// summed in the order of its list. cudaErrorInvalidValue where `config` is not such a row or SpmmSm90Fits
// (spmm/config.h) says no.
cudaError_t LaunchSpmmSm90(const SpmmArgs& args, int config, cudaStream_t stream);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SPMM_SM90_H_
