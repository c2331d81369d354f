// Launcher of the sddmm kernel for every card from sm_80 on.
#ifndef BSJAX_CUDA_SDDMM_SM80_H_
#define BSJAX_CUDA_SDDMM_SM80_H_

#include <cuda_runtime_api.h>

#include "cuda/sddmm/args.h"

namespace bsjax {

// dblocks[g, e] = x[g, :, rows[e]].T @ dy[g, :, cols[e]] as sddmm/args.h says, on `stream` of the current device; no
// workspace, nothing allocated, nothing waited for. The same inputs give the same bits on every run: each element is
// summed over rising rows. cudaErrorInvalidValue where `config` is not a row of kSddmmConfigs.
cudaError_t LaunchSddmmSm80(const SddmmArgs& args, int config, cudaStream_t stream);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SDDMM_SM80_H_
