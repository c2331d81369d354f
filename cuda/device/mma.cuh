// mma.sync (sm_80): one warp, d[16, 8] += a[16, K] b[K, 8] in float32; K is 32 bytes of elements for every type.
//
// With l the lane, a[0..3] hold row l / 4 (+ 8 for odd ones) and bytes 4 (l % 4) .. + 3 of the K bytes (+ 16 from a[2]
// on); b[0..1] hold column l / 4 and the same bytes (+ 16 for b[1]); d holds row l / 4 (+ 8 for d[2..3]), columns
// 2 (l % 4) and 2 (l % 4) + 1.
#ifndef BSJAX_CUDA_DEVICE_MMA_CUH_
#define BSJAX_CUDA_DEVICE_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bsjax {

// How elements are multiplied. kF32 is plain fused multiply-add, with float32's accuracy; kTF32 rounds the operands.
enum class Math { kF32, kTF32, kF16, kBF16 };

template <Math kMath>
struct MathTraits {
  using Element = float;
};
template <>
struct MathTraits<Math::kF16> {
  using Element = __half;
};
template <>
struct MathTraits<Math::kBF16> {
  using Element = __nv_bfloat16;
};

// The fragment word of one float32: nearest TF32, ties away from zero; as it is for types that need no rounding.
template <Math kMath>
__device__ __forceinline__ uint32_t RoundOperand(uint32_t word) {
  if constexpr (kMath == Math::kTF32) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(__uint_as_float(word)));
  }
  return word;
}

template <Math kMath>
__device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(kMath != Math::kF32, "mma.sync has no real float32; use fused multiply-add.");
#define BSJAX_MMA(shape_and_types)                                                                                    \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (kMath == Math::kTF32) BSJAX_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  if constexpr (kMath == Math::kF16) BSJAX_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  if constexpr (kMath == Math::kBF16) BSJAX_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
#undef BSJAX_MMA
}

// The same over half the K, 16 bytes, for 2-byte elements: a[0..1] hold row l / 4 (+ 8 for a[1]), bytes 4 (l % 4) ..
// + 3.
template <Math kMath>
__device__ __forceinline__ void MmaHalfK(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  static_assert(kMath == Math::kF16 || kMath == Math::kBF16, "MmaHalfK takes 16-bit operands.");
#define BSJAX_MMA(shape_and_types)                                                                        \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
               : "r"(a0), "r"(a1), "r"(b))
  if constexpr (kMath == Math::kF16) BSJAX_MMA("m16n8k8.row.col.f32.f16.f16.f32");
  if constexpr (kMath == Math::kBF16) BSJAX_MMA("m16n8k8.row.col.f32.bf16.bf16.f32");
#undef BSJAX_MMA
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_MMA_CUH_
