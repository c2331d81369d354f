// ldmatrix: 8 x 8 tiles of 2-byte elements (8 rows of 16 bytes) from shared memory into mma.sync fragments.
//
// Lane l supplies the address of row l % 8 of tile l / 8. It receives of each tile row l / 4, elements 2 (l % 4) and
// 2 (l % 4) + 1; with kTrans column l / 4, rows 2 (l % 4) and 2 (l % 4) + 1. Read as 4-byte elements, a tile is 8 x 4
// and the lane receives row l / 4, element l % 4 (no transpose).
#ifndef BSJAX_CUDA_DEVICE_LDMATRIX_CUH_
#define BSJAX_CUDA_DEVICE_LDMATRIX_CUH_

#include <cstdint>

namespace bsjax {

template <bool kTrans>
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t shared) {
  if constexpr (kTrans) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
  }
}

// Two tiles; the addresses of lanes 16 to 31 are not used.
template <bool kTrans>
__device__ __forceinline__ void LoadMatrix2(uint32_t (&r)[2], uint32_t shared) {
  if constexpr (kTrans) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared)
                 : "memory");
  }
}

// One tile; the addresses of lanes 8 to 31 are not used.
template <bool kTrans>
__device__ __forceinline__ void LoadMatrix1(uint32_t& r, uint32_t shared) {
  if constexpr (kTrans) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(shared) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(shared) : "memory");
  }
}

// LoadMatrix4<true> where `load`, the same in all lanes, is not 0; else r stays. A predicate, not a branch: the code
// around it stays straight, so that the compiler can move loads ahead.
__device__ __forceinline__ void LoadMatrix4TransIf(uint32_t (&r)[4], uint32_t shared, uint32_t load) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
      : "r"(shared), "r"(load)
      : "memory");
}

// The transpose of an 8 x 8 tile in registers: lane l has row l / 4, elements 2 (l % 4) and + 1, before and after.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

// Hides from the compiler how `word` came about, so that it is kept rather than computed again.
__device__ __forceinline__ void Opaque(uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_LDMATRIX_CUH_
