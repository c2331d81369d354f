// What every schedule begins with: four words, which keep what follows aligned to 16 bytes.
//   [0]       the seal
//   [1]       of sddmm: the number of bins in use
//   [2], [3]  0
// A schedule is a leaf of a training state, which programs map over: zeros, doubles, averages, casts to floating point
// and back. The seal is a number that none of that leaves as it is: odd, so that it is no double and no sum of two
// equal ones; negative, so that absolute values and clips change it; beyond 2^24, so that float32 and narrower types
// cannot hold it; within 2^30, so that it doubles without overflow. Where it is broken, the indices beside it are as
// good as random.
#ifndef BSJAX_CUDA_SEAL_H_
#define BSJAX_CUDA_SEAL_H_

#include <cstdint>

namespace bsjax {

inline constexpr int kScheduleHeaderWords = 4;
inline constexpr int32_t kSeal = -0x05ea1ed1;  // "sealed", almost

// Writes the header of a schedule.
inline void WriteScheduleHeader(int32_t* words, int32_t num_bins = 0) {
  words[0] = kSeal;
  words[1] = num_bins;
  words[2] = words[3] = 0;
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_SEAL_H_
