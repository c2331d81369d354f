#ifndef BSJAX_CUDA_SDDMM_SM90_H_
#define BSJAX_CUDA_SDDMM_SM90_H_

#include <cuda_runtime_api.h>

#include "cuda/sddmm/args.h"

namespace bsjax {

// As sddmm/args.h says, for float16 and bfloat16, with bins; `config` is one of arch 90. No workspace; the same inputs
// and config give the same bits on every run. cudaErrorInvalidValue where SddmmSm90Fits or the table says no.
cudaError_t LaunchSddmmSm90(const SddmmArgs& args, int config, cudaStream_t stream);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SDDMM_SM90_H_
