// Launcher of the spmm kernel for every card from sm_80 on.
#ifndef BSJAX_CUDA_SPMM_SM80_H_
#define BSJAX_CUDA_SPMM_SM80_H_

#include <cuda_runtime_api.h>

#include "cuda/spmm/args.h"

namespace bsjax {

// y[g, m, n] = x[g, m, k] @ w[g, k, n] as spmm/args.h says, on `stream` of the current device; no workspace, nothing
// allocated, nothing waited for. The same inputs give the same bits on every run, and for every `config` of arch 80:
// each element is summed in the order of its list. cudaErrorInvalidValue where `config` is not such a row.
cudaError_t LaunchSpmmSm80(const SpmmArgs& args, int config, cudaStream_t stream);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SPMM_SM80_H_
