// The second check of a call, in the handler: a caller that went round the Python door gets an error, not a crash.
// Shared by the CUDA and the CPU handlers, so that both refuse the same calls in the same words.
#ifndef BSJAX_CUDA_CHECK_H_
#define BSJAX_CUDA_CHECK_H_

#include <cstdint>
#include <string>

#include "dtype.h"
#include "sddmm.h"
#include "spmm.h"
#include "xla/ffi/api/ffi.h"

namespace bsjax {

namespace ffi = xla::ffi;

// Fills `args` from the operands of one bsjax_spmm call, or says what is wrong with them. A schedule is of the size
// that follows from the others', or a header alone, which says that there is none.
ffi::Error CheckSpmm(const ffi::AnyBuffer& x, const ffi::AnyBuffer& blocks, const ffi::AnyBuffer& indptr,
                     const ffi::AnyBuffer& indices, const ffi::AnyBuffer& block_ids, const ffi::AnyBuffer& schedule,
                     ffi::AnyBuffer& y, bool transpose, bool tf32, SpmmArgs* args);

// The same for one bsjax_sddmm call.
ffi::Error CheckSddmm(const ffi::AnyBuffer& x, const ffi::AnyBuffer& dy, const ffi::AnyBuffer& rows,
                      const ffi::AnyBuffer& cols, const ffi::AnyBuffer& schedule, ffi::AnyBuffer& dblocks, bool tf32,
                      SddmmArgs* args);

// Refuses a broken seal (seal.h), for handlers whose schedule lies in host memory; CUDA kernels see to it themselves.
ffi::Error CheckSeal(const char* op, const int32_t* seal);

}  // namespace bsjax

#endif  // BSJAX_CUDA_CHECK_H_
