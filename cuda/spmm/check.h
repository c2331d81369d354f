// The check of a bsjax_spmm call.
#ifndef BSJAX_CUDA_SPMM_CHECK_H_
#define BSJAX_CUDA_SPMM_CHECK_H_

#include "cuda/check.h"
#include "cuda/spmm/args.h"

namespace bsjax {

// Fills `args` from the operands of one bsjax_spmm call, or says what is wrong with them.
// A schedule is of the size that follows from the others', or a header alone, which says that there is none.
ffi::Error CheckSpmm(const ffi::AnyBuffer& x, const ffi::AnyBuffer& blocks, const ffi::AnyBuffer& indptr,
                     const ffi::AnyBuffer& indices, const ffi::AnyBuffer& block_ids, const ffi::AnyBuffer& schedule,
                     ffi::AnyBuffer& y, bool transpose, bool tf32, SpmmArgs* args);

}  // namespace bsjax

#endif  // BSJAX_CUDA_SPMM_CHECK_H_
