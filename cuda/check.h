// What the checks of all ops share. They are the second check of a call, in the handler: a caller that went round the
// Python door gets an error, not a crash. The CUDA and the CPU handlers of an op share its check (<op>/check.h), so
// that both refuse the same calls in the same words.
#ifndef BSJAX_CUDA_CHECK_H_
#define BSJAX_CUDA_CHECK_H_

#include <cstdint>
#include <string>

#include "cuda/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace bsjax {

namespace ffi = xla::ffi;

using Dims = ffi::Span<const int64_t>;

#define BSJAX_RETURN_IF_ERROR(expr)      \
  do {                                   \
    ffi::Error error_ = (expr);          \
    if (error_.failure()) return error_; \
  } while (false)

// A shape as Python writes it.
std::string Show(Dims dims);

// The error that `op` gives to its caller; `what` is a sentence without its full stop.
ffi::Error Refuse(const char* op, const std::string& what);

// Whether there are kernels for blocks of this side.
bool Serves(int64_t block_size);

ffi::Error ToDType(const char* op, ffi::DataType type, DType* dtype);

// Refuses an index array that is not one-dimensional int32.
ffi::Error CheckIndices(const char* op, const char* name, const ffi::AnyBuffer& buffer);

// Whether a schedule has a body of `size` words behind its header, none, or a size that no schedule has.
ffi::Error CheckSchedule(const char* op, const ffi::AnyBuffer& schedule, int64_t size, bool* has_body);

// Refuses a broken seal (seal.h), for handlers whose schedule lies in host memory; CUDA kernels see to it themselves.
ffi::Error CheckSeal(const char* op, const int32_t* seal);

int64_t Product(Dims dims, size_t begin, size_t end);

// Whether two activations [g, ..., f] have the same rows; f and g may differ.
bool SameRows(Dims a, Dims b);

// The number of groups that `ours` brings to a call with `groups` groups so far: equal, or 1 and so shared.
bool JoinGroups(int64_t ours, int64_t* groups);

}  // namespace bsjax

#endif  // BSJAX_CUDA_CHECK_H_
