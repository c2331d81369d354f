// The element types that the kernels serve.
#ifndef BSJAX_CUDA_DTYPE_H_
#define BSJAX_CUDA_DTYPE_H_

namespace bsjax {

enum class DType { kF32, kF16, kBF16 };

}  // namespace bsjax

#endif  // BSJAX_CUDA_DTYPE_H_
