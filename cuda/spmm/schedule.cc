#include "cuda/spmm/schedule.h"

#include <cmath>
#include <numeric>
#include <vector>

namespace bsjax {
namespace {

// The places of units: those of about equal work side by side, heavy ones first, else as they lie in the matrix, where
// neighbours may read the same columns of x. Equal is within a factor of sqrt(2), counted from the mean: more classes
// would tear neighbours apart for the chance differences of a random pattern, which a CTA evens out by itself.
std::vector<int32_t> OrderUnits(const std::vector<int64_t>& work) {
  const double mean = std::accumulate(work.begin(), work.end(), 0.0) / std::max<size_t>(work.size(), 1);
  std::vector<int32_t> order(work.size()), weight(work.size());
  std::iota(order.begin(), order.end(), 0);
  for (size_t u = 0; u < work.size(); ++u) {
    weight[u] = work[u] == 0 ? -128 : static_cast<int32_t>(std::lround(2 * std::log2(work[u] / mean)));
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return weight[a] > weight[b]; });
  return order;
}

// An entry of one group, by block row of x.
struct Entry {
  int32_t block_id;
  int16_t place, col;  // of the unit in the group, of the block column in the unit
};

// Entries [begin, end) of one block row, whose x begins `offset` bytes into the stage.
struct Part {
  int64_t begin, end;
  int32_t offset;
};

// The tiles that have an entry, in an order that keeps the warps of a CTA in step: each next one is, of the first few
// that are left, the one after which the work of the places so far is the closest to their shares of all work.
std::vector<int64_t> OrderTiles(const std::vector<Entry>& entries, const std::vector<int64_t>& row_begin,
                                int64_t tile_rows) {
  constexpr int kUnits = SpmmSchedule::kUnits;
  constexpr size_t kChoice = 16;  // time is linear in it
  struct Tile {
    int64_t index;
    float work[kUnits];  // of each place; once in `left`, less its share
  };
  const int64_t num_rows = static_cast<int64_t>(row_begin.size()) - 1;
  std::vector<Tile> left;
  float share[kUnits] = {};
  for (int64_t row = 0; row < num_rows; row += tile_rows) {
    const int64_t begin = row_begin[row], end = row_begin[std::min(row + tile_rows, num_rows)];
    if (begin == end) continue;
    left.push_back({row / tile_rows, {}});
    for (int64_t i = begin; i < end; ++i) left.back().work[entries[i].place] += 1;
  }
  for (const Tile& tile : left) {
    for (int u = 0; u < kUnits; ++u) share[u] += tile.work[u] / static_cast<float>(entries.size());
  }
  // With few entries a stage has none of most places, whatever the order.
  const size_t first_choices = entries.size() < 2 * left.size() ? 1 : kChoice;
  for (Tile& tile : left) {
    const float work = std::accumulate(tile.work, tile.work + kUnits, 0.0f);
    for (int u = 0; u < kUnits; ++u) tile.work[u] -= work * share[u];
  }
  std::vector<int64_t> order;
  float ahead[kUnits] = {};  // each place's work so far, less its share
  for (size_t next = 0; next < left.size(); ++next) {
    size_t best = next;
    float least = 0;
    for (size_t c = next; c < std::min(next + first_choices, left.size()); ++c) {
      float sum = 0;
      for (int u = 0; u < kUnits; ++u) sum += (ahead[u] + left[c].work[u]) * (ahead[u] + left[c].work[u]);
      if (c == next || sum < least) {
        best = c;
        least = sum;
      }
    }
    for (int u = 0; u < kUnits; ++u) ahead[u] += left[best].work[u];
    order.push_back(left[best].index);
    std::rotate(left.begin() + static_cast<int64_t>(next), left.begin() + static_cast<int64_t>(best),
                left.begin() + static_cast<int64_t>(best) + 1);
  }
  return order;
}

}  // namespace

bool ScheduleSpmm(const int32_t* indptr, const int32_t* indices, const int32_t* block_ids, int64_t k, int64_t n,
                  int64_t block_size, int64_t num_blocks, int32_t* schedule) {
  using S = SpmmSchedule;
  const S s(k, n, block_size, num_blocks);
  const int64_t num_cols = n / block_size, num_rows = k / block_size, unit_cols = S::kUnitCols / block_size;
  const int64_t tile_rows = S::kTileCols / block_size, max_blocks = S::MaxBlocks(block_size);
  std::fill(schedule, schedule + s.size, 0);

  std::vector<int64_t> begin(num_cols + 1);  // indptr made to rise: lists never overlap, so no entry counts twice
  for (int64_t col = 0; col <= num_cols; ++col) {
    begin[col] = std::clamp<int64_t>(indptr[col], col == 0 ? 0 : begin[col - 1], num_blocks);
  }
  std::vector<int64_t> work((n + S::kUnitCols - 1) / S::kUnitCols, 0);
  for (int64_t col = 0; col < num_cols; ++col) work[col / unit_cols] += begin[col + 1] - begin[col];
  const std::vector<int32_t> order = OrderUnits(work);
  for (int64_t place = 0; place < s.num_units; ++place) {
    schedule[place] = place < static_cast<int64_t>(order.size()) ? order[place] : -1;
  }

  int64_t num_stages = 0, num_entries = 0;
  std::vector<int64_t> row_begin(num_rows + 1), next(num_rows);
  std::vector<Entry> entries;
  std::vector<int64_t> rows;
  std::vector<Part> parts;
  for (int64_t group = 0; group < s.num_groups; ++group) {
    schedule[s.stage_begin + group] = static_cast<int32_t>(num_stages);
    const auto visit_all = [&](auto&& visit) {  // of the group: place by place, column by column, in order of the lists
      for (int64_t place = 0; place < S::kUnits; ++place) {
        const int32_t unit = schedule[group * S::kUnits + place];
        if (unit < 0) continue;
        for (int64_t c = 0; c < unit_cols && unit * unit_cols + c < num_cols; ++c) {
          const int64_t col = unit * unit_cols + c;
          for (int64_t e = begin[col]; e < begin[col + 1]; ++e) {
            const int32_t row = indices[e], id = block_ids[e];
            if (row >= 0 && row < num_rows && id >= 0 && id < num_blocks)
              visit(row, Entry{id, int16_t(place), int16_t(c)});
          }
        }
      }
    };
    // A counting sort by block row, which keeps the order of places and columns.
    std::fill(row_begin.begin(), row_begin.end(), 0);
    visit_all([&](int32_t row, const Entry&) { ++row_begin[row + 1]; });
    std::partial_sum(row_begin.begin(), row_begin.end(), row_begin.begin());
    std::copy(row_begin.begin(), row_begin.end() - 1, next.begin());
    entries.resize(row_begin[num_rows]);
    visit_all([&](int32_t row, const Entry& entry) { entries[next[row]++] = entry; });

    // The tiles that have a block, in the order in which they are walked, and their block rows.
    rows.clear();
    for (const int64_t tile : OrderTiles(entries, row_begin, tile_rows)) {
      for (int64_t row = tile * tile_rows; row < std::min((tile + 1) * tile_rows, num_rows); ++row) {
        if (row_begin[row] < row_begin[row + 1]) rows.push_back(row);
      }
    }
    int64_t begin_of_row = rows.empty() ? 0 : row_begin[rows[0]];  // what is left of a row that two stages share
    for (size_t r = 0; r < rows.size();) {
      // A stage: rows from r on, the last perhaps in part.
      if (num_stages == s.max_stages) return false;
      int32_t* tiles = schedule + s.tiles + num_stages * S::kTiles;
      std::fill(tiles, tiles + S::kTiles, -1);
      int64_t num_tiles = 0, count = 0, last_tile = -1;
      parts.clear();
      while (r < rows.size()) {
        const int64_t row = rows[r], tile = row / tile_rows;
        if (tile != last_tile && num_tiles == S::kTiles) break;
        int64_t size = row_begin[row + 1] - begin_of_row;
        if (count + size > max_blocks) {
          if (count > 0) break;
          size = max_blocks;  // one row is more than a stage holds
        }
        if (tile != last_tile) tiles[num_tiles++] = static_cast<int32_t>(tile);
        last_tile = tile;
        const int64_t offset = (num_tiles - 1) * S::kTileBytes + row % tile_rows * block_size * 2;
        parts.push_back({begin_of_row, begin_of_row + size, static_cast<int32_t>(offset)});
        count += size;
        begin_of_row += size;
        if (begin_of_row < row_begin[row + 1]) break;
        if (++r < rows.size()) begin_of_row = row_begin[rows[r]];
      }
      schedule[s.entry_begin + num_stages] = static_cast<int32_t>(num_entries);

      // A counting sort of the stage's entries by place and column, which keeps the order of rows.
      int32_t starts[S::kUnits * S::kUnitCols + 1] = {};
      for (const Part& part : parts) {
        for (int64_t i = part.begin; i < part.end; ++i) ++starts[entries[i].place * unit_cols + entries[i].col + 1];
      }
      int32_t* places = schedule + s.places + num_stages * S::kUnits * 2;
      for (int64_t i = 0; i < S::kUnits * unit_cols; ++i) {
        if (starts[i + 1] > 255) return false;
        places[i / unit_cols * 2 + 1] |= starts[i + 1] << (8 * (i % unit_cols));
        starts[i + 1] += starts[i];
        if (i % unit_cols == 0) places[i / unit_cols * 2] = starts[i];
      }
      for (const Part& part : parts) {
        for (int64_t i = part.begin; i < part.end; ++i) {
          const int64_t at = num_entries + starts[entries[i].place * unit_cols + entries[i].col]++;
          schedule[s.block_ids + at] = entries[i].block_id;
          schedule[s.offsets + at] = part.offset;
        }
      }
      num_entries += count;
      ++num_stages;
    }
  }
  schedule[s.stage_begin + s.num_groups] = static_cast<int32_t>(num_stages);
  schedule[s.entry_begin + num_stages] = static_cast<int32_t>(num_entries);
  return true;
}

}  // namespace bsjax
