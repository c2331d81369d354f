// ScheduleSpmm on the host: whatever the pattern, every entry that counts is in exactly one stage, where its x is.
#include "cuda/spmm/schedule.h"

#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/expect.h"

namespace bsjax {
namespace {

struct Lists {
  int64_t k, n;
  int b;
  std::vector<int32_t> indptr{0}, indices, ids;

  int64_t NumBlocks() const { return static_cast<int64_t>(indices.size()); }
};

// Block column `col` has row `row` where `stored(row, col)`; ids count down, so that they differ from positions.
template <typename Stored>
Lists Make(int b, int64_t rows, int64_t cols, Stored stored) {
  Lists lists{rows * b, cols * b, b};
  for (int64_t col = 0; col < cols; ++col) {
    for (int64_t row = 0; row < rows; ++row) {
      if (stored(row, col)) lists.indices.push_back(static_cast<int32_t>(row));
    }
    lists.indptr.push_back(static_cast<int32_t>(lists.indices.size()));
  }
  for (int64_t e = 0; e < lists.NumBlocks(); ++e) lists.ids.push_back(static_cast<int32_t>(lists.NumBlocks() - 1 - e));
  return lists;
}

using Product = std::tuple<int64_t, int64_t, int32_t>;  // block row, block column, block id

std::multiset<Product> Expected(const Lists& lists) {
  std::multiset<Product> products;
  for (int64_t col = 0; col < lists.n / lists.b; ++col) {
    for (int32_t e = lists.indptr[col]; e < lists.indptr[col + 1]; ++e) {
      if (lists.indices[e] < 0 || lists.indices[e] >= lists.k / lists.b) continue;
      products.insert({lists.indices[e], col, lists.ids[e]});
    }
  }
  return products;
}

// Walks the schedule as the kernel does.
std::multiset<Product> Walk(const Lists& lists, const SpmmSchedule& s, const std::vector<int32_t>& words) {
  std::multiset<Product> products;
  const int64_t unit_cols = SpmmSchedule::kUnitCols / lists.b;
  std::set<int32_t> units;
  for (int64_t group = 0; group < s.num_groups; ++group) {
    for (int32_t stage = words[s.stage_begin + group]; stage < words[s.stage_begin + group + 1]; ++stage) {
      const int64_t first = words[s.entry_begin + stage], last = words[s.entry_begin + stage + 1];
      EXPECT(stage < s.max_stages, "stage %d of %lld", stage, static_cast<long long>(s.max_stages));
      EXPECT(first < last && last - first <= SpmmSchedule::MaxBlocks(lists.b), "entries %lld to %lld",
             static_cast<long long>(first), static_cast<long long>(last));
      int64_t at = first;
      for (int64_t place = 0; place < SpmmSchedule::kUnits; ++place) {
        const int32_t* pair = &words[s.places + (stage * SpmmSchedule::kUnits + place) * 2];
        EXPECT(pair[0] == at - first, "place %lld begins at %d", static_cast<long long>(place), pair[0]);
        for (int64_t c = 0; c < unit_cols; ++c) {
          for (int i = 0; i < (pair[1] >> (8 * c) & 255); ++i, ++at) {
            const int32_t offset = words[s.offsets + at];
            const int32_t tile = words[s.tiles + stage * SpmmSchedule::kTiles + offset / SpmmSchedule::kTileBytes];
            const int64_t column = tile * SpmmSchedule::kTileCols + offset % SpmmSchedule::kTileBytes / 2;
            EXPECT(tile >= 0 && offset % SpmmSchedule::kTileBytes < 128, "offset %d", offset);
            const int32_t unit = words[group * SpmmSchedule::kUnits + place];
            products.insert({column / lists.b, unit * unit_cols + c, words[s.block_ids + at]});
          }
        }
      }
      EXPECT(at == last, "stage %d has entries of nobody", stage);
    }
  }
  for (int64_t place = 0; place < s.num_units; ++place) {
    if (words[place] >= 0) EXPECT(units.insert(words[place]).second, "unit %d twice", words[place]);
  }
  EXPECT(static_cast<int64_t>(units.size()) == (lists.n + 31) / 32, "%zu units", units.size());
  return products;
}

void Check(const char* name, const Lists& lists) {
  const SpmmSchedule s(lists.k, lists.n, lists.b, lists.NumBlocks());
  std::vector<int32_t> words(s.size, 7);
  EXPECT(ScheduleSpmm(lists.indptr.data(), lists.indices.data(), lists.ids.data(), lists.k, lists.n, lists.b,
                      lists.NumBlocks(), words.data()),
         "%s", name);
  EXPECT(Walk(lists, s, words) == Expected(lists), "%s, b = %d", name, lists.b);
}

void EveryEntryOnce() {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int b : {8, 16, 32}) {
    Check("one block", Make(b, 1, 1, [](int64_t, int64_t) { return true; }));
    Check("none", Make(b, 5, 3, [](int64_t, int64_t) { return false; }));
    Check("all", Make(b, 37, 70, [](int64_t, int64_t) { return true; }));
    Check("random", Make(b, 131, 259, [&](int64_t, int64_t) { return uniform(random) < 0.1; }));
    Check("sparse", Make(b, 1031, 97, [&](int64_t, int64_t) { return uniform(random) < 0.002; }));
    Check("hubs", Make(b, 64, 64, [](int64_t row, int64_t col) { return row % 9 == 0 || col % 7 == 0; }));
    Check("diagonal", Make(b, 300, 300, [](int64_t row, int64_t col) { return row == col; }));
    Lists padded = Make(b, 40, 40, [&](int64_t, int64_t) { return uniform(random) < 0.3; });
    for (size_t e = 0; e < padded.indices.size(); e += 3) padded.indices[e] = e % 2 == 0 ? -1 : INT32_MAX;
    Check("padding", padded);
  }
}

void WildListsAreRefusedOrServed() {
  Lists lists = Make(8, 4, 4, [](int64_t, int64_t) { return true; });
  lists.indptr = {-5, 1 << 30, 3, INT32_MIN, 16};  // neither rising nor inside
  const SpmmSchedule s(lists.k, lists.n, lists.b, lists.NumBlocks());
  std::vector<int32_t> words(s.size);
  ScheduleSpmm(lists.indptr.data(), lists.indices.data(), lists.ids.data(), lists.k, lists.n, 8, lists.NumBlocks(),
               words.data());
  Lists same = Make(8, 4, 1, [](int64_t, int64_t) { return true; });
  same.indices.assign(1000, 2);
  same.ids.assign(1000, 0);
  same.indptr = {0, 1000};
  const SpmmSchedule t(same.k, same.n, 8, 1000);
  words.assign(t.size, 0);
  EXPECT(!ScheduleSpmm(same.indptr.data(), same.indices.data(), same.ids.data(), same.k, same.n, 8, 1000, words.data()),
         "a block row named 1000 times");
}

}  // namespace
}  // namespace bsjax

int main() {
  bsjax::EveryEntryOnce();
  bsjax::WildListsAreRefusedOrServed();
  if (bsjax::failures == 0) std::printf("ok\n");
  return bsjax::failures == 0 ? 0 : 1;
}
