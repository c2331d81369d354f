// 16-byte pieces: how they lie in shared memory, and how mma.sync results become 16-byte stores.
#ifndef BSJAX_CUDA_DEVICE_VECTOR_CUH_
#define BSJAX_CUDA_DEVICE_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bsjax {

// The byte offset of 16-byte piece `piece` of row `row` in a tile of kPieces pieces a row, a power of two. Pieces are
// permuted inside their row (XOR) so that these reads meet no bank twice:
enum class Swizzle {
  kRows,       // one piece of 8 consecutive rows: an 8 x 8 tile of ldmatrix
  kWords,      // 8 consecutive words of 4 consecutive rows: an mma.sync operand of 4-byte elements, read word by word
  kEachFourth  // one piece of up to 8 rows that are 4 apart: threads that own 4 neighbouring rows each
};

template <Swizzle kSwizzle, int kPieces>
__device__ __forceinline__ uint32_t PieceOffset(unsigned row, unsigned piece) {
  static_assert((kPieces & (kPieces - 1)) == 0, "A row must have a power of two of pieces.");
  constexpr unsigned kSpread = kPieces < 8 ? kPieces : 8;  // 8 pieces are the 128 bytes of all 32 banks
  constexpr unsigned kRowsPerLine = 8 / kSpread;
  unsigned flip = 0;
  if constexpr (kSwizzle == Swizzle::kRows) flip = (row / kRowsPerLine) % kSpread;
  if constexpr (kSwizzle == Swizzle::kWords && kSpread > 1) flip = 2 * ((row / kRowsPerLine) % (kSpread / 2));
  if constexpr (kSwizzle == Swizzle::kEachFourth) flip = (row / 4) % kSpread;
  return (row * kPieces + (piece ^ flip)) * 16;
}

__device__ __forceinline__ float4 LoadShared16(const char* pointer) {
  return *reinterpret_cast<const float4*>(pointer);
}

__device__ __forceinline__ uint32_t LoadShared4(const char* pointer) {
  return *reinterpret_cast<const uint32_t*>(pointer);
}

// The same from an address in the shared window, as SharedAddress gives it.
__device__ __forceinline__ uint32_t LoadShared4(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ uint2 LoadShared8(uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
  return words;
}

// One warp has kCount 8 x 8 tiles of float32, lane l holding row l / 4, columns 2 (l % 4) and + 1 of each. Gather gives
// each lane 16 bytes of converted elements: row l / 4 of tile Tile(l), from column Column(l) on.
template <typename Element>
struct TileRows;

template <>
struct TileRows<float> {
  static constexpr int kCount = 2;
  static __device__ __forceinline__ unsigned Tile(unsigned lane) { return lane % 2; }
  static __device__ __forceinline__ unsigned Column(unsigned lane) { return lane / 2 % 2 * 4; }

  static __device__ __forceinline__ uint4 Gather(const float2 (&tiles)[2], unsigned lane) {
    const bool odd = lane % 2 != 0;
    const float2 keep = odd ? tiles[1] : tiles[0];
    float2 swap = odd ? tiles[0] : tiles[1];
    swap.x = __shfl_xor_sync(0xffffffff, swap.x, 1);
    swap.y = __shfl_xor_sync(0xffffffff, swap.y, 1);
    const float2 left = odd ? swap : keep, right = odd ? keep : swap;
    return make_uint4(__float_as_uint(left.x), __float_as_uint(left.y), __float_as_uint(right.x),
                      __float_as_uint(right.y));
  }
};

__device__ __forceinline__ uint32_t Pack(float2 pair, __half) {
  const __half2 packed = __floats2half2_rn(pair.x, pair.y);
  return reinterpret_cast<const uint32_t&>(packed);
}

__device__ __forceinline__ uint32_t Pack(float2 pair, __nv_bfloat16) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(pair.x, pair.y);
  return reinterpret_cast<const uint32_t&>(packed);
}

template <typename Element>
struct TileRows {
  static_assert(sizeof(Element) == 2, "Elements have 2 or 4 bytes.");
  static constexpr int kCount = 4;
  static __device__ __forceinline__ unsigned Tile(unsigned lane) { return lane % 4; }
  static __device__ __forceinline__ unsigned Column(unsigned) { return 0; }

  // A 4 x 4 transpose of words inside each four lanes, in two butterfly steps.
  static __device__ __forceinline__ uint4 Gather(const float2 (&tiles)[4], unsigned lane) {
    const bool odd = lane % 2 != 0, high = lane / 2 % 2 != 0;
    uint32_t low_pair[2], high_pair[2];  // words of tile 0 or 1, and of tile 2 or 3, from this lane and its neighbour
    Exchange(low_pair, Pack(tiles[0], Element()), Pack(tiles[1], Element()), odd);
    Exchange(high_pair, Pack(tiles[2], Element()), Pack(tiles[3], Element()), odd);
    const uint32_t first = __shfl_xor_sync(0xffffffff, high ? low_pair[0] : high_pair[0], 2);
    const uint32_t second = __shfl_xor_sync(0xffffffff, high ? low_pair[1] : high_pair[1], 2);
    return high ? make_uint4(first, second, high_pair[0], high_pair[1])
                : make_uint4(low_pair[0], low_pair[1], first, second);
  }

 private:
  static __device__ __forceinline__ void Exchange(uint32_t (&pair)[2], uint32_t even, uint32_t odd, bool is_odd) {
    const uint32_t swap = __shfl_xor_sync(0xffffffff, is_odd ? even : odd, 1);
    pair[0] = is_odd ? swap : even;
    pair[1] = is_odd ? odd : swap;
  }
};

__device__ __forceinline__ void StoreGlobal16(void* pointer, uint4 value) { *static_cast<uint4*>(pointer) = value; }

}  // namespace bsjax

#endif  // BSJAX_CUDA_DEVICE_VECTOR_CUH_
