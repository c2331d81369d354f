// The table of compiled sddmm tiles and the choice among them: host-only and pure, so that it is tested without a GPU.
// The .cu file instantiates exactly these rows; the FFI attribute `config` is an index into the table.
#ifndef BSJAX_CUDA_SDDMM_CONFIG_H_
#define BSJAX_CUDA_SDDMM_CONFIG_H_

#include <cstdint>
#include <iterator>

#include "sddmm.h"

namespace bsjax {

struct SddmmConfig {
  int32_t arch;    // 80: sddmm_sm80.cu, any card from sm_80 on
  int32_t stages;  // slots of the shared-memory pipeline, 8 KB of x and 8 KB of dy each
};

inline constexpr SddmmConfig kSddmmConfigs[] = {
    {80, 4},  // 0: 64 KB, so three CTAs fit the 227 KB of sm_90 and two the 164 KB of sm_80
};

inline constexpr int kNumSddmmConfigs = static_cast<int>(std::size(kSddmmConfigs));

// Whether the kernel of `config` serves calls on a device of compute capability `arch` (major * 10 + minor).
constexpr bool SddmmConfigFits(int config, const SddmmArgs&, int arch) {
  return config >= 0 && config < kNumSddmmConfigs && arch >= kSddmmConfigs[config].arch;
}

// The config for this call, or -1 where no compiled one runs on `arch`.
constexpr int ChooseSddmmConfig(const SddmmArgs&, int arch) { return arch >= 80 ? 0 : -1; }

}  // namespace bsjax

#endif  // BSJAX_CUDA_SDDMM_CONFIG_H_
