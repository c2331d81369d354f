// wgmma: the matrix instruction of four warps, on operands in shared memory in the 128-byte swizzle. sm_90a.
//
// d[64, kN] += a[64, 16] @ b[16, kN], float32 sums. In d, warp w of the four owns rows 16 w to 16 w + 15; its lane l
// holds, for each 8 columns j, d[4 j + {0, 1}] at row l / 4, columns 8 j + 2 (l % 4) + {0, 1}, and d[4 j + {2, 3}]
// eight rows below.
#ifndef BSJAX_CUDA_DEVICE_WGMMA_CUH_
#define BSJAX_CUDA_DEVICE_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace bsjax {

// Which index of an operand is contiguous in shared memory: k, or the other one (rows of a, columns of b).
enum class Major { kK = 0, kMN = 1 };

// The descriptor of an operand whose tile starts at shared `address`, a multiple of 1024 bytes.
//
// Fields: address, leading and stride offsets in units of 16 bytes from bits 0, 16 and 32; bits 62-63 = 1, 128-byte
// swizzle. In that swizzle the atom is 8 rows of 128 bytes. What the two offsets mean depends on the major index:
//   kK:  a row of the atom is one row (column) of the operand, 64 elements of k. `stride` leads to the next 8 rows;
//        `leading` is not used: an instruction takes 16 of the 64.
//   kMN: a row of the atom is one k, 64 elements of the operand's columns. `stride` leads to the next 8 of k (an
//        instruction takes two atoms), `leading` to the next 64 columns, where the operand is wider than that.
// In a cluster a shared address has the CTA's rank in its upper bits, where a descriptor has its next field.
__device__ inline uint64_t WgmmaDescriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// A descriptor moved on by `bytes`. Shared addresses are under 2^18, so the 14 bits of the field never overflow.
__device__ inline uint64_t WgmmaAdvance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// Before the first wgmma after other code touched the accumulators.
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the wgmma's since the last commit.
__device__ inline void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups of this warp are still running.
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// After the wait: `d` changes here, as far as the compiler knows, so that no read of it moves up across the wait.
template <int kSize>
__device__ inline void WgmmaSettle(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A barrier of the four warps of warpgroup `index`, 0 or 1, only. Hardware barrier 0 is __syncthreads; the numbers are
// written out because an index in a register would claim all 16 for the kernel.
__device__ inline void SyncWarpgroup(int index) {
  if (index == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

#define BSJAX_ACC4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define BSJAX_ACC32(i)                                                                                 \
  BSJAX_ACC4(i), BSJAX_ACC4((i) + 4), BSJAX_ACC4((i) + 8), BSJAX_ACC4((i) + 12), BSJAX_ACC4((i) + 16), \
      BSJAX_ACC4((i) + 20), BSJAX_ACC4((i) + 24), BSJAX_ACC4((i) + 28)

// The operands after d and the two descriptors: add to d, a and b not negated, a K-major, and whether b is MN-major.
#define BSJAX_WGMMA_N64(type)                                                                                  \
  asm volatile(                                                                                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                              \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, %34;"                          \
      : BSJAX_ACC32(0)                                                                                         \
      : "l"(a), "l"(b), "n"(static_cast<int>(kMajorB)))

#define BSJAX_WGMMA_N128(type)                                                                                 \
  asm volatile(                                                                                                \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                             \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "   \
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "   \
      "%62, %63}, %64, %65, 1, 1, 1, 0, %66;"                                                                  \
      : BSJAX_ACC32(0), BSJAX_ACC32(32)                                                                        \
      : "l"(a), "l"(b), "n"(static_cast<int>(kMajorB)))

// Begins d += a @ b. Between WgmmaFence and a WgmmaWait that covers it, d belongs to the tensor cores.
template <typename T, int kN, Major kMajorB>
__device__ inline void Wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b) {
  static_assert(kN == 64 || kN == 128, "Wgmma is written out for 64 and 128 columns.");
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>, "Wgmma takes 16-bit operands.");
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (kN == 64) {
      BSJAX_WGMMA_N64("bf16");
    } else {
      BSJAX_WGMMA_N128("bf16");
    }
  } else {
    if constexpr (kN == 64) {
      BSJAX_WGMMA_N64("f16");
    } else {
      BSJAX_WGMMA_N128("f16");
    }
  }
}

#undef BSJAX_WGMMA_N128
#undef BSJAX_WGMMA_N64
#undef BSJAX_ACC32
#undef BSJAX_ACC4

// The same with both operands MN-major, whatever their sizes: a is [16, 64] in shared memory, a row one k.
#define BSJAX_ACC4(d, i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define BSJAX_ACC32(d)                                                                                           \
  BSJAX_ACC4(d, 0), BSJAX_ACC4(d, 4), BSJAX_ACC4(d, 8), BSJAX_ACC4(d, 12), BSJAX_ACC4(d, 16), BSJAX_ACC4(d, 20), \
      BSJAX_ACC4(d, 24), BSJAX_ACC4(d, 28)

#define BSJAX_WGMMA_MN_N64(type)                                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                    \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
               "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 1, 1;"        \
               : BSJAX_ACC32(d)                                                                               \
               : "l"(a), "l"(b))

#define BSJAX_WGMMA_MN_N128(type)                                                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                   \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
               "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "   \
               "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "   \
               "%56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, 1, 1, 1, 1, 1;"                            \
               : BSJAX_ACC32(d0), BSJAX_ACC32(d1)                                                             \
               : "l"(a), "l"(b))

#define BSJAX_WGMMA_MN_N256(type)                                                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                   \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
               "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "   \
               "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "   \
               "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "   \
               "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "   \
               "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "     \
               "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "   \
               "%123, %124, %125, %126, %127}, %128, %129, 1, 1, 1, 1, 1;"                                    \
               : BSJAX_ACC32(d0), BSJAX_ACC32(d1), BSJAX_ACC32(d2), BSJAX_ACC32(d3)                           \
               : "l"(a), "l"(b))

// Begins d += a^T @ b for 64 columns of a and of b.
template <typename T>
__device__ inline void WgmmaMn64(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    BSJAX_WGMMA_MN_N64("bf16");
  } else {
    BSJAX_WGMMA_MN_N64("f16");
  }
}

// Begins the same for 128 columns of b: d0 are the sums of its first 64 columns, d1 of the 64 that the descriptor's
// leading offset leads to.
template <typename T>
__device__ inline void WgmmaMn128(float (&d0)[32], float (&d1)[32], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    BSJAX_WGMMA_MN_N128("bf16");
  } else {
    BSJAX_WGMMA_MN_N128("f16");
  }
}

// Begins the same for 256 columns of b, in four tiles as far apart as the leading offset says.
template <typename T>
__device__ inline void WgmmaMn256(float (&d0)[32], float (&d1)[32], float (&d2)[32], float (&d3)[32], uint64_t a,
                                  uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    BSJAX_WGMMA_MN_N256("bf16");
  } else {
    BSJAX_WGMMA_MN_N256("f16");
  }
}

#undef BSJAX_WGMMA_MN_N256
#undef BSJAX_WGMMA_MN_N128
#undef BSJAX_WGMMA_MN_N64
#undef BSJAX_ACC32
#undef BSJAX_ACC4
}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_WGMMA_CUH_
