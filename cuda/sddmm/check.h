// The check of a bsjax_sddmm call.
#ifndef BSJAX_CUDA_SDDMM_CHECK_H_
#define BSJAX_CUDA_SDDMM_CHECK_H_

#include "cuda/check.h"
#include "cuda/sddmm/args.h"

namespace bsjax {

// Fills `args` from the operands of one bsjax_sddmm call, or says what is wrong with them.
ffi::Error CheckSddmm(const ffi::AnyBuffer& x, const ffi::AnyBuffer& dy, const ffi::AnyBuffer& rows,
                      const ffi::AnyBuffer& cols, const ffi::AnyBuffer& schedule, ffi::AnyBuffer& dblocks, bool tf32,
                      SddmmArgs* args);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SDDMM_CHECK_H_
