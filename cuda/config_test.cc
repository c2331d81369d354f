// ChooseSpmmConfig and ChooseSddmmConfig on the host: every call gets a compiled kernel that serves it, or none at all.
#include "cuda/sddmm/config.h"

#include <cstdio>
#include <initializer_list>

#include "cuda/expect.h"
#include "cuda/spmm/config.h"

namespace bsjax {
namespace {

SpmmArgs Spmm(DType dtype, int block_size, int64_t m, int64_t k, int64_t n) {
  SpmmArgs args;
  args.dtype = dtype;
  args.block_size = block_size;
  args.m = m;
  args.k = k;
  args.n = n;
  args.num_blocks = (k / block_size) * (n / block_size) / 10;
  return args;
}

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr int kBlockSizes[] = {8, 16, 32, 64, 128};
constexpr int kArchs[] = {80, 86, 87, 89, 90, 100, 103, 120};

// sm_80 code (or its PTX) runs everywhere from there on; sm_90a code on 9.x alone.
bool Runs(int config_arch, int arch) { return config_arch == 80 ? arch >= 80 : arch / 10 == config_arch / 10; }

void EveryCallGetsAKernel() {
  for (int arch : kArchs) {
    for (DType dtype : kTypes) {
      for (int b : kBlockSizes) {
        for (int64_t m : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, int64_t{300}, int64_t{1} << 33}) {
          for (int64_t n : {int64_t{0}, int64_t{b}, int64_t{b} * 512}) {
            const SpmmArgs args = Spmm(dtype, b, m, int64_t{b} * 512, n);
            const int config = ChooseSpmmConfig(args, arch);
            EXPECT(SpmmConfigFits(config, args, arch), "config %d arch %d b %d m %lld n %lld", config, arch, b,
                   static_cast<long long>(m), static_cast<long long>(n));
            EXPECT(config >= 0 && Runs(kSpmmConfigs[config].arch, arch), "config %d arch %d", config, arch);
          }
        }
      }
    }
    EXPECT(SddmmConfigFits(ChooseSddmmConfig(SddmmArgs(), arch), SddmmArgs(), arch), "arch %d", arch);
  }
}

void OldCardsAndUnknownConfigsGetNone() {
  const SpmmArgs args = Spmm(DType::kBF16, 64, 1024, 4096, 4096);
  for (int arch : {60, 70, 75}) {
    EXPECT(ChooseSpmmConfig(args, arch) == -1, "arch %d", arch);
    EXPECT(ChooseSddmmConfig(SddmmArgs(), arch) == -1, "arch %d", arch);
    for (int config = 0; config < kNumSpmmConfigs; ++config) {
      EXPECT(!SpmmConfigFits(config, args, arch), "config %d arch %d", config, arch);
    }
  }
  for (int config : {-2, -1, kNumSpmmConfigs, 1 << 30}) {
    EXPECT(!SpmmConfigFits(config, args, 90), "config %d", config);
  }
  for (int config : {-2, -1, kNumSddmmConfigs, 1 << 30}) {
    EXPECT(!SddmmConfigFits(config, SddmmArgs(), 90), "config %d", config);
  }
}

void HopperServesHalfTypesOfLargeBlocks() {
  for (int config = 0; config < kNumSpmmConfigs; ++config) {
    if (kSpmmConfigs[config].arch != 90 || kSpmmConfigs[config].split > 0) continue;
    EXPECT(SpmmConfigFits(config, Spmm(DType::kBF16, 64, 64, 4096, 4096), 90), "config %d", config);
    EXPECT(SpmmConfigFits(config, Spmm(DType::kF16, 128, 8192, 4096, 4096), 90), "config %d", config);
    EXPECT(!SpmmConfigFits(config, Spmm(DType::kF32, 64, 64, 4096, 4096), 90), "config %d", config);
    EXPECT(!SpmmConfigFits(config, Spmm(DType::kBF16, 32, 64, 4096, 4096), 90), "config %d", config);
    EXPECT(!SpmmConfigFits(config, Spmm(DType::kBF16, 64, 63, 4096, 4096), 90), "config %d", config);
    EXPECT(!SpmmConfigFits(config, Spmm(DType::kBF16, 64, int64_t{1} << 31, 4096, 4096), 90), "config %d", config);
    EXPECT(!SpmmConfigFits(config, Spmm(DType::kBF16, 64, 64, 4096, 4096), 100), "config %d", config);
  }
}

// A schedule, of which the choice sees no more than that it is there.
constexpr int32_t kSchedule[] = {0};

void HopperServesSmallBlocksBySchedule() {
  for (int b : {8, 16, 32}) {
    SpmmArgs args = Spmm(DType::kBF16, b, 8192, 4096, 4096);
    EXPECT(kSpmmConfigs[ChooseSpmmConfig(args, 90)].arch == 80, "b %d", b);
    args.schedule = kSchedule;
    EXPECT(kSpmmConfigs[ChooseSpmmConfig(args, 90)].split == 1, "b %d", b);
    EXPECT(kSpmmConfigs[ChooseSpmmConfig(args, 100)].arch == 80, "b %d", b);
    args.dtype = DType::kF32;
    EXPECT(kSpmmConfigs[ChooseSpmmConfig(args, 90)].arch == 80, "b %d", b);
    args.dtype = DType::kF16;
    args.m = 128;  // 16 tiles of y: too few for the SMs
    EXPECT(kSpmmConfigs[ChooseSpmmConfig(args, 90)].split > 1, "b %d", b);
    args.num_blocks = 10;
    EXPECT(kSpmmConfigs[ChooseSpmmConfig(args, 90)].arch == 80, "b %d", b);
  }
  SddmmArgs args;
  args.dtype = DType::kBF16;
  args.m = 8192;
  args.k = args.n = 4096;
  args.block_size = 32;
  args.num_blocks = 1638;
  EXPECT(ChooseSddmmConfig(args, 90) == 0, "without a schedule");
  args.bins = kSchedule;
  args.max_bins = SddmmMaxBins(args.k, args.n, args.block_size, args.num_blocks);
  EXPECT(kSddmmConfigs[ChooseSddmmConfig(args, 90)].split == 2, "66 bins");
  EXPECT(ChooseSddmmConfig(args, 89) == 0 && ChooseSddmmConfig(args, 120) == 0, "other cards");
  args.num_blocks = 290;
  EXPECT(kSddmmConfigs[ChooseSddmmConfig(args, 90)].split == 4, "30 bins");
  args.num_blocks = 32768;
  EXPECT(kSddmmConfigs[ChooseSddmmConfig(args, 90)].split == 1, "many bins");
}

void FewRowsGetSmallTiles() {
  const int few = ChooseSpmmConfig(Spmm(DType::kF32, 32, 16, 4096, 4096), 80);
  const int many = ChooseSpmmConfig(Spmm(DType::kF32, 32, 8192, 4096, 4096), 80);
  EXPECT(kSpmmConfigs[few].tile_m < kSpmmConfigs[many].tile_m, "few %d many %d", few, many);
}

}  // namespace
}  // namespace bsjax

int main() {
  bsjax::EveryCallGetsAKernel();
  bsjax::OldCardsAndUnknownConfigsGetNone();
  bsjax::HopperServesHalfTypesOfLargeBlocks();
  bsjax::HopperServesSmallBlocksBySchedule();
  bsjax::FewRowsGetSmallTiles();
  if (bsjax::failures == 0) std::printf("ok\n");
  return bsjax::failures == 0 ? 0 : 1;
}
