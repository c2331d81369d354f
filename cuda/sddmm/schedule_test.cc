// MakeSddmmSchedule on the host: for every kind of pattern each stored block is in one slot, whose tiles hold its
// operands, and the records keep what the kernel counts on.
#include "cuda/sddmm/schedule.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "cuda/expect.h"

namespace bsjax {
namespace {

constexpr int kBlockSizes[] = {8, 16, 32, 64, 128};

struct Pattern {
  const char* name;
  int b;
  int32_t num_rows, num_cols;  // in blocks
  std::vector<int32_t> rows, cols;

  void Add(int32_t row, int32_t col) {
    rows.push_back(row);
    cols.push_back(col);
  }
  int64_t Size() const { return static_cast<int64_t>(rows.size()); }
  bool Valid(int64_t e) const { return rows[e] >= 0 && rows[e] < num_rows && cols[e] >= 0 && cols[e] < num_cols; }
};

Pattern Random(const char* name, int b, int32_t num_rows, int32_t num_cols, double density) {
  Pattern pattern{name, b, num_rows, num_cols, {}, {}};
  std::mt19937 bits(b);
  for (int32_t row = 0; row < num_rows; ++row) {
    for (int32_t col = 0; col < num_cols; ++col) {
      if (bits() < density * 4294967296.0) pattern.Add(row, col);
    }
  }
  return pattern;
}

SddmmSchedule Schedule(const Pattern& p) {
  return MakeSddmmSchedule(p.rows.data(), p.cols.data(), p.Size(), p.b, int64_t{p.num_rows} * p.b,
                           int64_t{p.num_cols} * p.b);
}

// Column 0 of what is at `place`, a position (b <= 32) or a tile, of x or of dy.
int64_t Column(const int32_t* record, int b, int place, bool dy) {
  const int tile = b <= 32 ? place / 8 : place;
  if (tile >= record[0]) return -1;
  const int32_t entry = record[SddmmBin::kHeaderWords + tile];
  if (((entry & SddmmBin::kDyTile) != 0) != dy) return -1;
  return int64_t{entry & ~SddmmBin::kDyTile} * SddmmBin::kTileCols + (b <= 32 ? place % 8 * 8 : 0);
}

// The slots of one worker, b <= 32.
void CheckSlots(const Pattern& p, const int32_t* record, int worker, std::vector<int>* seen) {
  const SddmmBin bin{p.b};
  int in_x = -1, in_second = -1, in_dy = -1;  // what the registers have
  bool computes = true;
  for (int slot = 0; slot < bin.Slots(); ++slot) {
    const int place = worker * bin.Slots() + slot;
    const uint32_t d = record[bin.DescriptorsAt() + place];
    const bool compute = (d & SddmmBin::kCompute) != 0, transposed = (d & SddmmBin::kTransposed) != 0;
    EXPECT(computes || !compute, "%s b %d: computed slots come first", p.name, p.b);
    computes = compute;
    const int x = d & 0xff, second = d >> 8 & 0xff, dy = d >> 16 & 0xff;
    if (d & SddmmBin::kLoadX) in_x = x, in_second = second;
    if (d & SddmmBin::kLoadDy) in_dy = dy;
    if (compute) {
      EXPECT(in_x == x && in_dy == dy && (p.b > 8 || in_second == second), "%s b %d: not loaded", p.name, p.b);
    }
    EXPECT(!transposed || p.b == 8, "%s b %d: transposed", p.name, p.b);
    for (int i = 0; i < bin.SlotBlocks(); ++i) {
      const int32_t id = record[bin.IdsAt() + place * bin.SlotBlocks() + i];
      if (id < 0) continue;
      ++(*seen)[id];
      EXPECT(compute == p.Valid(id), "%s b %d: block %d", p.name, p.b, id);
      if (!compute || !p.Valid(id)) continue;
      const int own = i == 0 ? x : second;
      EXPECT(Column(record, p.b, transposed ? dy : own, false) == int64_t{p.rows[id]} * p.b &&
                 Column(record, p.b, transposed ? own : dy, true) == int64_t{p.cols[id]} * p.b,
             "%s b %d: block %d", p.name, p.b, id);
    }
  }
}

// The slots of one warpgroup, b >= 64. A block is seen by its quarters, 1, 10, 100 and 1000.
void CheckWideSlots(const Pattern& p, const int32_t* record, int worker, std::vector<int>* seen) {
  const SddmmBin bin{p.b};
  const int counts = record[1] >> 8 * worker & 0xff, pairs = counts >> 4, singles = counts & 15;
  const bool four = counts == 0x40;
  const int num_slots = four ? 4 : 2 * pairs + singles;
  EXPECT(num_slots <= bin.Slots(), "%s b %d", p.name, p.b);
  for (int slot = 0; slot < bin.Slots(); ++slot) {
    const uint32_t d = record[bin.DescriptorsAt() + worker * bin.Slots() + slot];
    const int x = d & 0xff, quarter = d >> 8 & 0xff, dy = d >> 16 & 0xff;
    if (four ? slot > 0 : slot < 2 * pairs && slot % 2 != 0) {
      const uint32_t before = record[bin.DescriptorsAt() + worker * bin.Slots() + slot - 1];
      const int step = dy - static_cast<int>(before >> 16 & 0xff);
      EXPECT(x == static_cast<int>(before & 0xff) && (four ? step == 1 : step >= 0), "%s b %d: tiles of a unit", p.name,
             p.b);
    }
    const int32_t id = record[bin.IdsAt() + worker * bin.Slots() + slot];
    if (id < 0) continue;
    EXPECT((slot < num_slots) == p.Valid(id), "%s b %d: block %d", p.name, p.b, id);
    EXPECT(quarter < (p.b == 64 ? 1 : 4), "%s b %d: quarter %d", p.name, p.b, quarter);
    (*seen)[id] += p.b == 64 ? 1111 : quarter == 0 ? 1 : quarter == 1 ? 10 : quarter == 2 ? 100 : 1000;
    if (slot >= num_slots || !p.Valid(id)) continue;
    EXPECT(Column(record, p.b, x, false) == int64_t{p.rows[id]} * p.b + quarter / 2 * 64 &&
               Column(record, p.b, dy, true) == int64_t{p.cols[id]} * p.b + quarter % 2 * 64,
           "%s b %d: block %d", p.name, p.b, id);
  }
}

// The schedule's bins.
int64_t Check(const Pattern& p) {
  const SddmmBin bin{p.b};
  const SddmmSchedule schedule = Schedule(p);
  const int64_t max_bins = SddmmMaxBins(int64_t{p.num_rows} * p.b, int64_t{p.num_cols} * p.b, p.b, p.Size());
  EXPECT(static_cast<int64_t>(schedule.bins.size()) == max_bins * bin.Words(), "%s b %d", p.name, p.b);
  EXPECT(schedule.num_bins <= max_bins, "%s b %d: %d bins of %d", p.name, p.b, static_cast<int>(schedule.num_bins),
         static_cast<int>(max_bins));
  std::vector<int> seen(p.Size());
  for (int64_t i = 0; i < max_bins; ++i) {
    const int32_t* record = &schedule.bins[i * bin.Words()];
    const bool is_empty =
        record[0] == 0 && std::count(record + bin.IdsAt(), record + bin.Words(), -1) == bin.Words() - bin.IdsAt();
    EXPECT(is_empty == (i >= schedule.num_bins), "%s b %d: bin %d", p.name, p.b, static_cast<int>(i));
    EXPECT(record[0] >= 0 && record[0] <= SddmmBin::kMaxTiles, "%s b %d: %d tiles", p.name, p.b, record[0]);
    for (int worker = 0; worker < bin.Workers(); ++worker) {
      if (p.b <= 32) {
        CheckSlots(p, record, worker, &seen);
      } else {
        CheckWideSlots(p, record, worker, &seen);
      }
    }
  }
  for (int64_t e = 0; e < p.Size(); ++e) {
    EXPECT(seen[e] == (p.b >= 64 ? 1111 : 1), "%s b %d: block %d is in %d slots", p.name, p.b, static_cast<int>(e),
           seen[e]);
  }
  EXPECT(schedule.bins == Schedule(p).bins, "%s b %d: another schedule", p.name, p.b);
  return schedule.num_bins;
}

void EveryBlockIsInOneSlot() {
  for (int b : kBlockSizes) {
    const int32_t side = std::max(2048 / b, 32);
    Check({"empty", b, side, side, {}, {}});
    Check({"no matrix", b, 0, 0, {0, -1}, {0, -1}});
    Check({"one", b, side, side, {3}, {1}});
    Check(Random("ones", b, side / 2, side / 4, 1));
    for (double density : {.02, .1, .5}) Check(Random("random", b, side, side, density));
    Check(Random("packed by several threads", b, 600, 600, .5));
    Check(Random("odd sides", b, 9, 21, .4));  // no whole number of tiles
    Check(Random("one row", b, 1, 4 * side, .6));
    Check(Random("one column", b, 4 * side, 1, .6));
    Pattern hubs = Random("hubs", b, side, side, .03);
    for (int32_t i = 0; i < side; ++i) {
      hubs.Add(7, i);
      hubs.Add(i, 5);
    }
    Check(hubs);
    Pattern same{"one block 3000 times", b, side, side, std::vector<int32_t>(3000, 2), std::vector<int32_t>(3000, 3)};
    Check(same);
    Pattern padded = Random("padded", b, side, side, .05);
    for (int32_t i = 0; i < 1000; ++i) padded.Add(i % 2 == 0 ? -1 : side + i, i % 3 == 0 ? -1 - i : 0);
    Check(padded);
    Pattern shuffled = Random("shuffled", b, side, side, .1);
    std::vector<int64_t> order(shuffled.Size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    Pattern out{"shuffled", b, side, side, {}, {}};
    for (int64_t e : order) out.Add(shuffled.rows[e], shuffled.cols[e]);
    Check(out);
    // As many bins as the table has room for, or about.
    Pattern diagonal{"diagonal", b, 40 * side, 40 * side, {}, {}};
    for (int32_t i = 0; i < 40 * side; ++i) diagonal.Add(i, i);
    Check(diagonal);
    const int32_t step = std::max(64 / b, 1), patch = 6 * step;
    Pattern pairs{"one block a pair of tiles", b, 70 * step, 70 * step, {}, {}};
    for (int32_t i = 0; i < 70; ++i) {
      for (int32_t j = 0; j < 70; ++j) pairs.Add(i * step, j * step);
    }
    Check(pairs);
    Pattern patches{"one block a patch", b, 40 * patch, 40 * patch, {}, {}};
    for (int32_t i = 0; i < 40; ++i) {
      for (int32_t j = 0; j < 40; ++j) patches.Add(i * patch, j * patch);
    }
    Check(patches);
    Pattern full = Random("a full corner, else scattered", b, 8 * side, 8 * side, .001);
    for (int32_t i = 0; i < 64; ++i) {
      for (int32_t j = 0; j < 64; ++j) full.Add(4 * side + i, 4 * side + j);
    }
    Check(full);
  }
}

// One turn of 132 SMs in pairs, and no more.
void BinsFillTheCard() {
  for (int b : {8, 16, 32, 64}) {
    const int64_t num_bins = Check(Random("random", b, 4096 / b, 4096 / b, .1));
    EXPECT(num_bins > 60 && num_bins <= 66, "b %d: %d bins", b, static_cast<int>(num_bins));
  }
}

}  // namespace
}  // namespace bsjax

int main() {
  bsjax::EveryBlockIsInOneSlot();
  bsjax::BinsFillTheCard();
  if (bsjax::failures == 0) std::printf("ok\n");
  return bsjax::failures == 0 ? 0 : 1;
}
