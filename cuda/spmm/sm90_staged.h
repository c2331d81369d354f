#ifndef BSJAX_CUDA_SPMM_SM90_STAGED_H_
#define BSJAX_CUDA_SPMM_SM90_STAGED_H_

#include <cuda_runtime_api.h>

#include "cuda/spmm/args.h"

namespace bsjax {

// float16 and bfloat16, block sizes 8, 16 and 32, with a schedule: `split` (1, 2, 4 or 8) CTAs share each tile of y.
cudaError_t LaunchSpmmStagedSm90(const SpmmArgs& args, int split, cudaStream_t stream);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SPMM_SM90_STAGED_H_
