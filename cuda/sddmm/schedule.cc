// Two ways to cluster, of which the cheaper by the cost model is taken:
//   patches  Tiles of x and of dy are put into groups; a bin is a pair of groups. Swapping tiles between groups evens
//            out the blocks of the bins. For patterns with many blocks in a patch.
//   growth   A bin grows from a tile by the tile that brings it the most blocks, a tile that few others need first.
//            For sparse patterns, where a patch would have as many tiles as blocks.
// Where both need more bins than the table has room for (the patterns are adversarial), the plain cut that its size
// comes from (SddmmCut) is taken instead.
// Then the blocks of each bin are dealt to warps, in an order in which neighbours share a block row or column.
#include "cuda/sddmm/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <thread>
#include <tuple>
#include <utility>

namespace bsjax {
namespace {

// Stored blocks of one unit of x and one of dy; a unit is a tile, or for b = 128 the two tiles of a block.
struct Edge {
  int32_t x, y;
  int32_t begin, end;  // in Pattern::order

  int32_t Size() const { return end - begin; }
};

// A stored block, and its place in its units of x and dy, in blocks.
struct Stored {
  int32_t id;
  int16_t x, y;
};

struct Pattern {
  int block_size;
  int unit_shift;                // log2 of the blocks of a unit, side by side
  int32_t unit_tiles;            // tiles of a unit
  int32_t num_x, num_y;          // units of x and dy
  std::vector<Stored> order;     // valid blocks, by (x, y)
  std::vector<int32_t> invalid;  // blocks outside the matrix
  std::vector<Edge> edges;       // by (x, y)

  Pattern(const int32_t* rows, const int32_t* cols, int64_t num_blocks, int block_size, int64_t k, int64_t n);
};

// Sorts `items` stably by key(item), 0 to num_keys - 1.
template <typename Item, typename Key>
void SortByKey(std::vector<Item>* items, int32_t num_keys, Key key) {
  std::vector<int32_t> next(static_cast<size_t>(num_keys) + 1);
  std::vector<Item> sorted(items->size());
  for (const Item& item : *items) ++next[key(item) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (const Item& item : *items) sorted[next[key(item)]++] = item;
  items->swap(sorted);
}

Pattern::Pattern(const int32_t* rows, const int32_t* cols, int64_t num_blocks, int b, int64_t k, int64_t n)
    : block_size(b),
      unit_shift(b == 8    ? 3
                 : b == 16 ? 2
                 : b == 32 ? 1
                           : 0),
      unit_tiles(SddmmBin{b}.UnitTiles()),
      num_x(static_cast<int32_t>(((k / b - 1) >> unit_shift) + 1)),
      num_y(static_cast<int32_t>(((n / b - 1) >> unit_shift) + 1)) {
  struct Item {
    int32_t id, row, col;
  };
  std::vector<Item> items;
  items.reserve(num_blocks);
  const int64_t num_rows = k / b, num_cols = n / b;
  for (int32_t id = 0; id < static_cast<int32_t>(num_blocks); ++id) {
    if (rows[id] >= 0 && rows[id] < num_rows && cols[id] >= 0 && cols[id] < num_cols) {
      items.push_back({id, rows[id], cols[id]});
    } else {
      invalid.push_back(id);
    }
  }
  if (items.empty()) return;
  SortByKey(&items, num_y, [this](const Item& item) { return item.col >> unit_shift; });
  SortByKey(&items, num_x, [this](const Item& item) { return item.row >> unit_shift; });
  const int32_t mask = (1 << unit_shift) - 1;
  order.reserve(items.size());
  for (const Item& item : items) {
    const int32_t place = static_cast<int32_t>(order.size());
    const int32_t x = item.row >> unit_shift, y = item.col >> unit_shift;
    if (edges.empty() || edges.back().x != x || edges.back().y != y) edges.push_back({x, y, place, place});
    edges.back().end = place + 1;
    order.push_back({item.id, static_cast<int16_t>(item.row & mask), static_cast<int16_t>(item.col & mask)});
  }
}

// What a CTA can hold, and what a bin costs it: clocks for 16 rows.
struct Costs {
  int block_size;
  int32_t unit_tiles, max_units;
  int32_t max_blocks;     // that surely fit
  int32_t target_blocks;  // that a bin should have at most, so that uneven bins still fit

  explicit Costs(int b)
      : block_size(b), unit_tiles(SddmmBin{b}.UnitTiles()), max_units(SddmmBin{b}.MaxTiles() / unit_tiles) {
    const SddmmBin bin{b};
    max_blocks = bin.MaxBlocks();
    if (block_size == 8) max_blocks = 464;  // not surely: of 64 block columns half have an odd block left
    target_blocks = bin.TargetBlocks();
  }

  // Measured on an H200, with copies alone and with products alone. Both run at the same time: the longer decides, the
  // other gets in its way a little.
  double Bin(double units, double blocks) const {
    constexpr double kTile = 48;  // 2 KB that come from L2
    const double block = block_size == 8    ? 2.95
                         : block_size == 16 ? 7
                         : block_size == 32 ? 24
                         : block_size == 64 ? 45
                                            : 150;
    const double copies = kTile * units * unit_tiles, products = block * blocks;
    return std::max(copies, products) + .15 * std::min(copies, products);
  }

  // What `num_bins` bins take together if the dearest costs `most`: clusters take them in turns, as
  // SddmmSm90Config (sddmm/config.h) has it. For many rows, 8192.
  static double Total(int64_t num_bins, double most) {
    struct Clusters {
      int64_t split, count;  // CTAs of one, and how many an H200 runs at a time
    };
    constexpr double kTurn = 14;  // a turn's beginning and end, 4 us
    double best = std::numeric_limits<double>::infinity();
    for (const Clusters& clusters : {Clusters{1, 132}, {2, 66}, {4, 30}, {8, 15}}) {
      const int64_t turns = (num_bins + clusters.count - 1) / clusters.count;
      best = std::min(best, static_cast<double>(turns) * (most / static_cast<double>(clusters.split) + kTurn));
    }
    return best;
  }
};

// A part of an edge's blocks, [begin, end) in Pattern::order, and the bin that has it.
struct Piece {
  int32_t bin;
  int32_t edge;
  int32_t begin, end;
};

struct Clustering {
  std::vector<Piece> pieces;  // by bin, then by edge
  int64_t num_bins = 0;
  double cost = std::numeric_limits<double>::infinity();
};

// -- patches ---------------------------------------------------------------------------------------------------------

struct PatchShape {
  int32_t x, y;  // units
  double cost;
};

// The best size of patches if the blocks were spread evenly.
PatchShape ChoosePatch(const Pattern& pattern, const Costs& costs) {
  PatchShape best{1, 1, std::numeric_limits<double>::infinity()};
  const double density =
      static_cast<double>(pattern.order.size()) / pattern.num_x / pattern.num_y;  // blocks a pair of units
  for (int32_t x = 1; x < costs.max_units; ++x) {
    for (int32_t y = x; y <= 2 * x && x + y <= costs.max_units; ++y) {
      const int64_t groups_x = (pattern.num_x + x - 1) / x, groups_y = (pattern.num_y + y - 1) / y;
      const double own_x = static_cast<double>(pattern.num_x) / groups_x;
      const double own_y = static_cast<double>(pattern.num_y) / groups_y;
      const double blocks = density * own_x * own_y;
      if (blocks > costs.target_blocks && x + y > 2) continue;
      const double cost = Costs::Total(groups_x * groups_y, costs.Bin(own_x + own_y, blocks));
      if (cost < best.cost) best = {x, y, cost};
    }
  }
  return best;
}

// Evens out the loads by swapping units between groups along one axis, while that lowers the sum of their squares.
// counts[unit * num_other + g]: blocks of the unit in group g of the other axis; loads[group * stride_own + g *
// stride_other].
int SwapUnits(const std::vector<int32_t>& counts, int32_t num_other, std::vector<int32_t>* group,
              std::vector<int64_t>* loads, int32_t stride_own, int32_t stride_other) {
  // A pair of units costs num_other steps; for very many, each is tried with some of the others only.
  constexpr int64_t kMaxSteps = 1 << 20;
  const int32_t num = static_cast<int32_t>(group->size());
  const int64_t steps = int64_t{num} * num / 2 * num_other;
  const int32_t stride = static_cast<int32_t>(std::max<int64_t>(steps / kMaxSteps, 1));
  int num_swaps = 0;
  for (int32_t i = 0; i < num; ++i) {
    for (int32_t j = i + 1 + i % stride; j < num; j += stride) {
      const int32_t from = (*group)[i], to = (*group)[j];
      if (from == to) continue;
      const int32_t *own = &counts[size_t(i) * num_other], *their = &counts[size_t(j) * num_other];
      int64_t *load_from = &(*loads)[size_t(from) * stride_own], *load_to = &(*loads)[size_t(to) * stride_own];
      int64_t change = 0;  // half of that of the sum of squares
      for (int32_t g = 0; g < num_other; ++g) {
        const int64_t more = their[g] - own[g];
        change += more * (load_from[size_t(g) * stride_other] - load_to[size_t(g) * stride_other] + more);
      }
      if (change >= 0) continue;
      for (int32_t g = 0; g < num_other; ++g) {
        const int64_t more = their[g] - own[g];
        load_from[size_t(g) * stride_other] += more;
        load_to[size_t(g) * stride_other] -= more;
      }
      std::swap((*group)[i], (*group)[j]);
      ++num_swaps;
    }
  }
  return num_swaps;
}

Clustering MakePatches(const Pattern& pattern, const PatchShape& shape) {
  const int32_t groups_x = (pattern.num_x + shape.x - 1) / shape.x;
  const int32_t groups_y = (pattern.num_y + shape.y - 1) / shape.y;
  std::vector<int32_t> group_x(pattern.num_x), group_y(pattern.num_y);
  for (int32_t x = 0; x < pattern.num_x; ++x) group_x[x] = static_cast<int32_t>(int64_t{x} * groups_x / pattern.num_x);
  for (int32_t y = 0; y < pattern.num_y; ++y) group_y[y] = static_cast<int32_t>(int64_t{y} * groups_y / pattern.num_y);
  std::vector<int64_t> loads(size_t(groups_x) * groups_y);
  for (const Edge& e : pattern.edges) loads[size_t(group_x[e.x]) * groups_y + group_y[e.y]] += e.Size();
  constexpr int kMaxPasses = 4;  // most of the gain is in the first two
  constexpr size_t kMaxCounts = 4 << 20;
  if (std::max(size_t(pattern.num_x) * groups_y, size_t(pattern.num_y) * groups_x) <= kMaxCounts) {
    for (int pass = 0; pass < kMaxPasses; ++pass) {
      std::vector<int32_t> counts(size_t(pattern.num_x) * groups_y);
      for (const Edge& e : pattern.edges) counts[size_t(e.x) * groups_y + group_y[e.y]] += e.Size();
      int num_swaps = SwapUnits(counts, groups_y, &group_x, &loads, groups_y, 1);
      counts.assign(size_t(pattern.num_y) * groups_x, 0);
      for (const Edge& e : pattern.edges) counts[size_t(e.y) * groups_x + group_x[e.x]] += e.Size();
      num_swaps += SwapUnits(counts, groups_x, &group_y, &loads, 1, groups_y);
      if (num_swaps == 0 || pattern.edges.size() > 100000) break;
    }
  }
  Clustering clustering;
  clustering.num_bins = static_cast<int64_t>(loads.size());
  clustering.pieces.reserve(pattern.edges.size());
  for (size_t i = 0; i < pattern.edges.size(); ++i) {
    const Edge& e = pattern.edges[i];
    clustering.pieces.push_back({group_x[e.x] * groups_y + group_y[e.y], static_cast<int32_t>(i), e.begin, e.end});
  }
  SortByKey(&clustering.pieces, static_cast<int32_t>(loads.size()), [](const Piece& piece) { return piece.bin; });
  return clustering;
}

// -- the plain cut ---------------------------------------------------------------------------------------------------

Clustering Cut(const Pattern& pattern, const SddmmCut& cut) {
  const auto segment = [&](int32_t edge) {
    const Edge& e = pattern.edges[edge];
    return std::pair(e.x * pattern.unit_tiles / cut.x_tiles, e.y * pattern.unit_tiles / cut.y_tiles);
  };
  std::vector<int32_t> order(pattern.edges.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const auto key = [&](int32_t edge) { return std::tuple(segment(edge), pattern.edges[edge].y, edge); };
    return key(a) < key(b);
  });
  Clustering clustering;
  int32_t room = 0;  // blocks that the last bin can still take
  for (size_t i = 0; i < order.size(); ++i) {
    const Edge& e = pattern.edges[order[i]];
    if (i > 0 && segment(order[i]) != segment(order[i - 1])) room = 0;
    for (int32_t begin = e.begin; begin < e.end;) {
      if (room == 0) {
        ++clustering.num_bins;
        room = cut.bin_blocks;
      }
      const int32_t end = begin + std::min(room, e.end - begin);
      clustering.pieces.push_back({static_cast<int32_t>(clustering.num_bins - 1), order[i], begin, end});
      room -= end - begin;
      begin = end;
    }
  }
  std::sort(clustering.pieces.begin(), clustering.pieces.end(),
            [](const Piece& a, const Piece& b) { return std::pair(a.bin, a.edge) < std::pair(b.bin, b.edge); });
  return clustering;
}

// -- growth ----------------------------------------------------------------------------------------------------------

// Grows bins of `edges` (indices into pattern.edges), about `num_bins`.
class Growth {
 public:
  Growth(const Pattern& pattern, const Costs& costs, int32_t max_units)
      : pattern_(pattern),
        costs_(costs),
        max_units_(max_units),
        num_units_(pattern.num_x + pattern.num_y),
        next_(pattern.edges.size()),
        first_(size_t(num_units_) + 1),
        links_(2 * pattern.edges.size()),
        degree_(num_units_),
        gain_(num_units_),
        inside_(num_units_) {
    for (size_t i = 0; i < pattern.edges.size(); ++i) {
      const Edge& e = pattern.edges[i];
      next_[i] = e.begin;
      ++first_[e.x + 1];
      ++first_[pattern.num_x + e.y + 1];
      degree_[e.x] += e.Size();
      degree_[pattern.num_x + e.y] += e.Size();
      left_ += e.Size();
    }
    std::partial_sum(first_.begin(), first_.end(), first_.begin());
    for (int32_t u = num_units_ - 1; u >= 0; --u) DegreeList(u).push_back(u);
    std::vector<int32_t> place(first_.begin(), first_.end() - 1);
    for (size_t i = 0; i < pattern.edges.size(); ++i) {
      const Edge& e = pattern.edges[i];
      links_[place[e.x]++] = {pattern.num_x + e.y, static_cast<int32_t>(i)};
      links_[place[pattern.num_x + e.y]++] = {e.x, static_cast<int32_t>(i)};
    }
  }

  Clustering Run(int64_t num_bins) {
    for (int64_t bins_left = num_bins; left_ > 0 && bins_left > 0; --bins_left) {
      GrowBin(std::min<int64_t>(costs_.max_blocks, (left_ + bins_left - 1) / bins_left));
    }
    Absorb();
    while (left_ > 0) GrowBin(costs_.target_blocks);
    // By bin and edge; a bin that took a part of an edge may have taken the next part later.
    SortByKey(&pieces_, static_cast<int32_t>(pattern_.edges.size()), [](const Piece& piece) { return piece.edge; });
    SortByKey(&pieces_, num_bins_, [](const Piece& piece) { return piece.bin; });
    Clustering clustering;
    clustering.pieces = std::move(pieces_);
    clustering.num_bins = num_bins_;
    return clustering;
  }

 private:
  struct Link {
    int32_t unit, edge;
  };

  // Takes up to `room` blocks of an edge into a bin.
  int32_t Take(int32_t edge, int64_t room, int32_t bin) {
    const Edge& e = pattern_.edges[edge];
    const int32_t taken = static_cast<int32_t>(std::min<int64_t>(e.end - next_[edge], room));
    if (taken <= 0) return 0;
    pieces_.push_back({bin, edge, next_[edge], next_[edge] + taken});
    next_[edge] += taken;
    for (int32_t u : {e.x, pattern_.num_x + e.y}) {
      degree_[u] -= taken;
      DegreeList(u).push_back(u);
    }
    left_ -= taken;
    return taken;
  }

  // The unit with the fewest blocks left, so that what is left over at the end stays well connected; -1 where all that
  // have any are inside.
  int32_t Seed() {
    for (std::vector<int32_t>& units : by_degree_) {
      while (!units.empty()) {
        const int32_t u = units.back();
        if (!inside_[u] && degree_[u] > 0 && &units == &DegreeList(u)) return u;
        units.pop_back();  // has another degree by now, or is inside: then GrowBin puts it back at its end
      }
    }
    return -1;
  }

  std::vector<int32_t>& DegreeList(int32_t u) {
    return by_degree_[std::min<size_t>(degree_[u], by_degree_.size() - 1)];
  }

  void GrowBin(int64_t target) {
    const int32_t bin = num_bins_++;
    units_.clear();
    touched_.clear();
    int64_t size = 0;
    while (size < target && left_ > 0 && static_cast<int32_t>(units_.size()) < max_units_) {
      int32_t best = -1;
      int64_t best_score = 0;
      size_t kept = 0;
      for (int32_t u : touched_) {
        if (inside_[u] || gain_[u] <= 0) continue;
        touched_[kept++] = u;
        constexpr int64_t kGainCounts = 1 << 16;  // before the blocks it has elsewhere, which only decide ties
        const int64_t score = std::min<int64_t>(gain_[u], target - size) * kGainCounts -
                              std::min<int64_t>(degree_[u] - gain_[u], kGainCounts - 1);
        if (best < 0 || score > best_score) best = u, best_score = score;
      }
      touched_.resize(kept);
      if (best < 0) best = Seed();
      if (best < 0) break;
      inside_[best] = 1;
      units_.push_back(best);
      for (int32_t i = first_[best]; i < first_[best + 1]; ++i) {
        const Link& link = links_[i];
        const int32_t blocks = pattern_.edges[link.edge].end - next_[link.edge];
        if (blocks == 0) continue;
        if (inside_[link.unit]) {
          size += Take(link.edge, target - size, bin);
        } else {
          if (gain_[link.unit] == 0) touched_.push_back(link.unit);
          gain_[link.unit] += blocks;
        }
      }
    }
    for (int32_t u : touched_) gain_[u] = 0;
    for (int32_t u : units_) {
      inside_[u] = 0;
      gain_[u] = 0;
      DegreeList(u).push_back(u);
    }
  }

  // Puts what is left into the bins there are, where it costs least; a bin may then take more than its target.
  void Absorb() {
    const size_t num_bins = num_bins_;
    constexpr size_t kMaxFlags = 32 << 20;
    if (left_ == 0 || num_bins * num_units_ > kMaxFlags) return;
    std::vector<char> has(num_bins * num_units_);
    std::vector<int32_t> units(num_bins), sizes(num_bins);
    auto add = [&](size_t bin, const Edge& e) {
      for (size_t u : {size_t(e.x), size_t(pattern_.num_x + e.y)}) {
        char& flag = has[bin * num_units_ + u];
        units[bin] += !flag;
        flag = 1;
      }
    };
    for (const Piece& piece : pieces_) {
      add(piece.bin, pattern_.edges[piece.edge]);
      sizes[piece.bin] += piece.end - piece.begin;
    }
    for (size_t i = 0; i < pattern_.edges.size(); ++i) {
      const Edge& e = pattern_.edges[i];
      while (next_[i] < e.end) {
        size_t best = num_bins;
        double best_cost = 0;
        for (size_t bin = 0; bin < num_bins; ++bin) {
          const char* flags = &has[bin * num_units_];
          const int32_t more = !flags[e.x] + !flags[pattern_.num_x + e.y];
          if (units[bin] + more > max_units_ || sizes[bin] >= costs_.max_blocks) continue;
          const double cost = costs_.Bin(units[bin] + more, sizes[bin] + 1);
          if (best == num_bins || cost < best_cost) best = bin, best_cost = cost;
        }
        if (best == num_bins) break;
        add(best, e);
        sizes[best] += Take(static_cast<int32_t>(i), costs_.max_blocks - sizes[best], static_cast<int32_t>(best));
      }
    }
  }

  const Pattern& pattern_;
  const Costs& costs_;
  int32_t max_units_;           // of a bin
  int32_t num_units_;           // those of x, then those of dy
  std::vector<int32_t> next_;   // of each edge: its first block in no bin yet
  std::vector<int32_t> first_;  // of each unit: its links
  std::vector<Link> links_;
  std::vector<int32_t> degree_;  // of each unit: its blocks in no bin yet
  // Units by their degree, as it was when they were put there; the last list has all larger ones.
  std::array<std::vector<int32_t>, 64> by_degree_;
  std::vector<int32_t> gain_;     // of each unit: its blocks with units of the bin that grows
  std::vector<char> inside_;      // whether it is in that bin
  std::vector<int32_t> units_;    // of that bin
  std::vector<int32_t> touched_;  // units with a gain
  int64_t left_ = 0;
  std::vector<Piece> pieces_;
  int32_t num_bins_ = 0;
};

// -- dealing ---------------------------------------------------------------------------------------------------------

// Writes the records of bins.
class Packer {
 public:
  explicit Packer(const Pattern& pattern)
      : pattern_(pattern), bin_{pattern.block_size}, place_x_(pattern.num_x, -1), place_y_(pattern.num_y, -1) {}

  // One record, or more where the pieces, in the order of their edges, are too many for one.
  void Add(const Piece* begin, const Piece* end) {
    if (begin == end || TryAdd(begin, end)) return;
    int64_t size = 0;
    for (const Piece* piece = begin; piece < end; ++piece) size += piece->end - piece->begin;
    std::vector<Piece> left, right;
    int32_t room = static_cast<int32_t>(size / 2);
    for (const Piece* piece = begin; piece < end; ++piece) {
      const int32_t cut = piece->begin + std::min(room, piece->end - piece->begin);
      if (cut > piece->begin) left.push_back({piece->bin, piece->edge, piece->begin, cut});
      if (cut < piece->end) right.push_back({piece->bin, piece->edge, cut, piece->end});
      room -= cut - piece->begin;
    }
    Add(left.data(), left.data() + left.size());
    Add(right.data(), right.data() + right.size());
  }

  void Reserve(int64_t num_bins) { schedule_.bins.reserve(num_bins * bin_.Words()); }

  // Blocks that are not computed.
  void AddZeros(const std::vector<int32_t>& blocks) {
    const int per_bin = bin_.MaxBlocks();
    for (size_t first = 0; first < blocks.size(); first += per_bin) {
      int32_t* record = NewRecord();
      for (size_t i = first; i < blocks.size() && i < first + per_bin; ++i) {
        if (pattern_.block_size == 128) {
          SetQuarters(record, static_cast<int>(i - first), blocks[i], 0, 0);
        } else {
          record[bin_.IdsAt() + (i - first)] = blocks[i];
        }
      }
    }
  }

  SddmmSchedule Finish() {
    schedule_.num_bins = static_cast<int64_t>(schedule_.bins.size()) / bin_.Words();
    return std::move(schedule_);
  }

 private:
  struct Block {
    int32_t id;
    int32_t x, y;  // positions in the bin: of its operands, in blocks, or of their tiles
  };
  // What a slot holds.
  struct Slot {
    int32_t x, second_x, y;
    int32_t id, second_id;
    bool transposed;  // where x and y have changed places
  };

  int32_t* NewRecord() {
    const size_t size = schedule_.bins.size();
    schedule_.bins.resize(size + bin_.Words());
    int32_t* record = &schedule_.bins[size];
    std::fill(record + bin_.IdsAt(), record + bin_.Words(), -1);
    return record;
  }

  bool TryAdd(const Piece* begin, const Piece* end) {
    size_t num_blocks = 0;
    for (const Piece* piece = begin; piece < end; ++piece) num_blocks += piece->end - piece->begin;
    const size_t max_blocks =
        pattern_.block_size == 128 ? 2 : size_t(bin_.Workers()) * bin_.Slots() * bin_.SlotBlocks();
    if (num_blocks > max_blocks) return false;
    const bool fits = PlaceTiles(begin, end) && (PlaceBlocks(begin, end), Pack());
    for (const Piece* piece = begin; piece < end; ++piece) {
      place_x_[pattern_.edges[piece->edge].x] = -1;
      place_y_[pattern_.edges[piece->edge].y] = -1;
    }
    return fits;
  }

  // The tiles: those of x, then those of dy, each in rising order. False if they are too many.
  bool PlaceTiles(const Piece* begin, const Piece* end) {
    const int32_t weight = pattern_.unit_tiles;
    tiles_.clear();
    units_y_.clear();
    int32_t num_units = 0;
    for (const Piece* piece = begin; piece < end; ++piece) {
      const Edge& e = pattern_.edges[piece->edge];
      if (place_x_[e.x] < 0) {
        place_x_[e.x] = num_units++;
        for (int32_t t = 0; t < weight; ++t) tiles_.push_back(e.x * weight + t);
      }
      if (place_y_[e.y] < 0) {
        place_y_[e.y] = 0;
        units_y_.push_back(e.y);
      }
    }
    if (static_cast<int>(tiles_.size() + units_y_.size() * weight) > bin_.MaxTiles()) return false;
    std::sort(units_y_.begin(), units_y_.end());
    for (int32_t y : units_y_) {
      place_y_[y] = num_units++;
      for (int32_t t = 0; t < weight; ++t) tiles_.push_back((y * weight + t) | SddmmBin::kDyTile);
    }
    return true;
  }

  void PlaceBlocks(const Piece* begin, const Piece* end) {
    blocks_.clear();
    const int shift = pattern_.unit_shift;
    for (const Piece* piece = begin; piece < end; ++piece) {
      const Edge& e = pattern_.edges[piece->edge];
      const int32_t x = place_x_[e.x] << shift, y = place_y_[e.y] << shift;
      for (int32_t i = piece->begin; i < piece->end; ++i) {
        const Stored& stored = pattern_.order[i];
        blocks_.push_back({stored.id, x + stored.x, y + stored.y});
      }
    }
  }

  bool Pack() {
    if (pattern_.block_size >= 64) {
      PackWide();
      return true;
    }
    if (pattern_.block_size == 8) {
      MakePairs();
    } else {
      MakePath();
    }
    if (static_cast<int>(slots_.size()) > bin_.Workers() * bin_.Slots()) return false;
    PackSlots();
    return true;
  }

  int32_t* NewBin() {
    int32_t* record = NewRecord();
    record[0] = static_cast<int32_t>(tiles_.size());
    std::copy(tiles_.begin(), tiles_.end(), record + SddmmBin::kHeaderWords);
    return record;
  }

  // b = 8: two blocks of one block column fill the 16 rows of mma.sync; slots of one column follow each other. Columns
  // with an odd number of blocks leave one, such that as many as possible find another left in their row: two blocks of
  // one row fill a slot too, transposed.
  void MakePairs() {
    slots_.clear();
    constexpr int kPlaces = SddmmBin::kMaxTiles * 8;
    std::array<int32_t, kPlaces> odd = {}, waiting;  // of a column: whether a block of it must leave
    std::array<int32_t, kPlaces + 1> first_x = {}, first_y = {};
    for (const Block& block : blocks_) {
      odd[block.y] ^= 1;
      ++first_x[block.x + 1];
      ++first_y[block.y + 1];
    }
    std::partial_sum(first_x.begin(), first_x.end(), first_x.begin());
    std::partial_sum(first_y.begin(), first_y.end(), first_y.begin());
    const int32_t size = static_cast<int32_t>(blocks_.size());
    by_x_.resize(size);
    by_y_.resize(size);
    used_.assign(size, 0);
    std::array<int32_t, kPlaces + 1> next = first_x;
    for (int32_t i = 0; i < size; ++i) by_x_[next[blocks_[i].x]++] = i;
    next = first_y;
    for (int32_t i = 0; i < size; ++i) by_y_[next[blocks_[i].y]++] = i;
    waiting.fill(-1);
    for (int32_t i : by_x_) {
      const Block& block = blocks_[i];
      if (!odd[block.y]) continue;
      int32_t& other = waiting[block.x];
      if (other >= 0 && (used_[other] || !odd[blocks_[other].y])) other = -1;  // its column has left another block
      if (other < 0) {
        other = i;
      } else if (blocks_[other].y != block.y) {
        const Block& before = blocks_[other];
        transposed_.push_back({before.y, block.y, block.x, before.id, block.id, true});
        used_[i] = used_[other] = 1;
        odd[block.y] = odd[before.y] = 0;
        other = -1;
      }
    }
    int32_t waits = -1;
    for (int32_t i : by_y_) {
      if (used_[i]) continue;
      const Block& block = blocks_[i];
      if (waits >= 0 && blocks_[waits].y == block.y) {
        slots_.push_back({blocks_[waits].x, block.x, block.y, blocks_[waits].id, block.id, false});
        waits = -1;
        continue;
      }
      if (waits >= 0) AddSingle(blocks_[waits]);
      waits = i;
    }
    if (waits >= 0) AddSingle(blocks_[waits]);
    slots_.insert(slots_.end(), transposed_.begin(), transposed_.end());
    transposed_.clear();
  }

  void AddSingle(const Block& block) { slots_.push_back({block.x, block.x, block.y, block.id, -1, false}); }

  // b = 16, 32: an order in which neighbours share a row or a column where possible. From each block to one of its
  // neighbours in the bin with the fewest neighbours left; where there is none, on to the block with the fewest.
  void MakePath() {
    slots_.clear();
    constexpr int kPlaces = SddmmBin::kMaxTiles * 4;
    const int32_t size = static_cast<int32_t>(blocks_.size());
    std::array<int32_t, kPlaces + 1> first_x = {}, first_y = {};
    for (const Block& block : blocks_) ++first_x[block.x + 1], ++first_y[block.y + 1];
    std::array<int32_t, kPlaces> left_x, left_y;
    for (int i = 0; i < kPlaces; ++i) {
      left_x[i] = first_x[i + 1];
      left_y[i] = first_y[i + 1];
      first_x[i + 1] += first_x[i];
      first_y[i + 1] += first_y[i];
    }
    by_x_.resize(size);
    by_y_.resize(size);
    {
      std::array<int32_t, kPlaces + 1> next_x = first_x, next_y = first_y;
      for (int32_t i = 0; i < size; ++i) {
        by_x_[next_x[blocks_[i].x]++] = i;
        by_y_[next_y[blocks_[i].y]++] = i;
      }
    }
    used_.assign(size, 0);
    int32_t current = -1;
    for (int32_t step = 0; step < size; ++step) {
      int32_t best = -1, best_left = 0;
      auto consider = [&](int32_t i) {
        if (used_[i]) return;
        const int32_t neighbours = left_x[blocks_[i].x] + left_y[blocks_[i].y];
        if (best < 0 || neighbours < best_left) best = i, best_left = neighbours;
      };
      if (current >= 0) {
        const Block& block = blocks_[current];
        for (int32_t i = first_x[block.x]; i < first_x[block.x + 1]; ++i) consider(by_x_[i]);
        for (int32_t i = first_y[block.y]; i < first_y[block.y + 1]; ++i) consider(by_y_[i]);
      }
      if (best < 0) {
        for (int32_t i = 0; i < size; ++i) consider(i);
      }
      current = best;
      used_[current] = 1;
      const Block& block = blocks_[current];
      --left_x[block.x];
      --left_y[block.y];
      AddSingle(block);
    }
  }

  // Deals the slots to the warps, each a run of them.
  void PackSlots() {
    int32_t* record = NewBin();
    const int num_slots = static_cast<int>(slots_.size()), workers = bin_.Workers();
    const int pieces = pattern_.block_size / 8;  // of 16 bytes in a row of a block
    for (int worker = 0; worker < workers; ++worker) {
      const int first = num_slots * worker / workers, end = num_slots * (worker + 1) / workers;
      for (int s = first; s < end; ++s) {
        const Slot& slot = slots_[s];
        const int place = worker * bin_.Slots() + s - first;
        const Slot* before = s > first ? &slots_[s - 1] : nullptr;
        const bool same_x = before != nullptr && before->x == slot.x && before->second_x == slot.second_x;
        const bool same_y = before != nullptr && before->y == slot.y;
        record[bin_.DescriptorsAt() + place] = static_cast<int32_t>(
            static_cast<uint32_t>(slot.x * pieces | slot.second_x * pieces << 8 | slot.y * pieces << 16) |
            (same_x ? 0 : SddmmBin::kLoadX) | (same_y ? 0 : SddmmBin::kLoadDy) | SddmmBin::kCompute |
            (slot.transposed ? SddmmBin::kTransposed : 0));
        int32_t* ids = record + bin_.IdsAt() + place * bin_.SlotBlocks();
        ids[0] = slot.id;
        if (bin_.SlotBlocks() == 2) ids[1] = slot.second_id;
      }
    }
  }

  void SetSlot(int32_t* record, int worker, int slot, int32_t id, int32_t x, int32_t y, int quarter) {
    const int place = worker * bin_.Slots() + slot;
    record[bin_.DescriptorsAt() + place] = x | quarter << 8 | y << 16;
    record[bin_.IdsAt() + place] = id;
  }

  // The four quarters of a block of 128, as two pairs; `x` and `y` are places of its first tiles.
  void SetQuarters(int32_t* record, int worker, int32_t id, int32_t x, int32_t y) {
    for (int q = 0; q < 4; ++q) SetSlot(record, worker, q, id, x + q / 2, y + q % 2, q);
  }

  void PackBlocks128() {
    int32_t* record = NewBin();
    const Block& first = blocks_[0];
    if (blocks_.size() == 2 && blocks_[1].x == first.x && blocks_[1].y == first.y + 1) {
      // Two of one row: each warpgroup takes 64 rows of both, which reads x once.
      for (int worker = 0; worker < 2; ++worker) {
        for (int i = 0; i < 4; ++i) {
          SetSlot(record, worker, i, blocks_[i / 2].id, 2 * first.x + worker, 2 * first.y + i, 2 * worker + i % 2);
        }
      }
      record[1] = 0x4040;
      return;
    }
    for (int worker = 0; worker < static_cast<int>(blocks_.size()); ++worker) {
      SetQuarters(record, worker, blocks_[worker].id, blocks_[worker].x * 2, blocks_[worker].y * 2);
      record[1] |= 0x20 << 8 * worker;
    }
  }

  void PackWide() {
    if (pattern_.block_size == 128) return PackBlocks128();
    int32_t* record = NewBin();
    // Fours, then pairs of one row, to the warpgroup with the least; then the singles. (Blocks of one row follow each
    // other, their columns rising, as the edges do.)
    std::array<int, 2> used = {}, kinds = {};
    auto put = [&](size_t first, int count, int kind) {
      const int worker = used[1] < used[0] ? 1 : 0;
      for (int i = 0; i < count; ++i) {
        const Block& block = blocks_[first + i];
        SetSlot(record, worker, used[worker]++, block.id, block.x, block.y, 0);
      }
      kinds[worker] += kind;
    };
    const size_t size = blocks_.size();
    used_.assign(size, 0);
    for (size_t i = 0; i + 4 <= size && used[1] == 0; ++i) {
      const Block &first = blocks_[i], &last = blocks_[i + 3];
      if (last.x != first.x || used_[i]) continue;
      bool follow = true;
      for (int j = 1; j < 4; ++j) follow = follow && blocks_[i + j].y == first.y + j;
      if (!follow) continue;
      put(i, 4, 0x40);
      for (int j = 0; j < 4; ++j) used_[i + j] = 1;
    }
    for (size_t i = 0; i + 2 <= size; ++i) {
      if (used_[i] || used_[i + 1] || blocks_[i + 1].x != blocks_[i].x) continue;
      put(i, 2, 0x10);
      used_[i] = used_[i + 1] = 1;
    }
    for (size_t i = 0; i < size; ++i) {
      if (!used_[i]) put(i, 1, 1);
    }
    record[1] = kinds[0] | kinds[1] << 8;
  }

  const Pattern& pattern_;
  SddmmBin bin_;
  SddmmSchedule schedule_;
  std::vector<int32_t> place_x_, place_y_;  // of each unit in the bin at hand, -1 where it has none
  std::vector<int32_t> tiles_, units_y_;
  std::vector<Block> blocks_, sorted_;
  std::vector<Slot> slots_, transposed_;
  std::vector<int32_t> by_x_, by_y_;
  std::vector<char> used_;
};

// What a clustering costs once its bins are cut to size: infinitely much where they are more than `max_bins`.
double CostOf(const Clustering& clustering, const Pattern& pattern, const Costs& costs, int64_t max_bins) {
  std::vector<int32_t> seen_x(pattern.num_x, -1), seen_y(pattern.num_y, -1);
  int64_t num_bins = 0, units = 0, blocks = 0;
  double most = 0;
  for (size_t i = 0; i < clustering.pieces.size(); ++i) {
    const Piece& piece = clustering.pieces[i];
    const Edge& e = pattern.edges[piece.edge];
    units += (seen_x[e.x] != piece.bin) + (seen_y[e.y] != piece.bin);
    seen_x[e.x] = seen_y[e.y] = piece.bin;
    blocks += piece.end - piece.begin;
    if (i + 1 < clustering.pieces.size() && clustering.pieces[i + 1].bin == piece.bin) continue;
    const int64_t parts = (blocks + costs.max_blocks - 1) / costs.max_blocks;
    num_bins += parts;
    most = std::max(most, costs.Bin(static_cast<double>(units), static_cast<double>(blocks) / parts));
    units = blocks = 0;
  }
  return num_bins > max_bins ? std::numeric_limits<double>::infinity() : Costs::Total(num_bins, most);
}

Clustering Cluster(const Pattern& pattern, int64_t max_bins) {
  const Costs costs(pattern.block_size);
  Clustering best = MakePatches(pattern, ChoosePatch(pattern, costs));
  best.cost = CostOf(best, pattern, costs, max_bins);
  constexpr size_t kMaxGrowthEdges = 40000;  // it takes about a microsecond an edge
  // Where most pairs of tiles have blocks, a patch is as good as any other choice of tiles.
  constexpr double kMaxGrowthDensity = .6;
  const int64_t num_blocks = static_cast<int64_t>(pattern.order.size());
  const double density = static_cast<double>(pattern.edges.size()) / pattern.num_x / pattern.num_y;
  if (pattern.edges.size() <= kMaxGrowthEdges && density <= kMaxGrowthDensity) {
    int64_t num_bins = (num_blocks + costs.target_blocks - 1) / costs.target_blocks;
    // Fewer tiles a bin are the cheaper the more even the bins stay: tried from the most downwards while it pays.
    int num_worse = 0;
    int64_t edges_left = kMaxGrowthEdges;  // that all tries may go over, after the first
    for (int32_t max_units = costs.max_units; max_units >= 2 && num_worse < 3; --max_units) {
      double cost = std::numeric_limits<double>::infinity();
      for (const bool whole_turns : {true, false}) {
        const int64_t bins = std::min(whole_turns ? RoundSddmmBins(num_bins) : num_bins, num_blocks);
        Clustering grown = Growth(pattern, costs, max_units).Run(bins);
        grown.cost = CostOf(grown, pattern, costs, max_bins);
        cost = std::min(cost, grown.cost);
        num_bins = std::max(num_bins, grown.num_bins > bins ? grown.num_bins : 0);  // tiles were short, not blocks
        if (grown.cost < best.cost) best = std::move(grown);
      }
      num_worse = cost > best.cost ? num_worse + 1 : 0;
      edges_left -= static_cast<int64_t>(pattern.edges.size());
      if (edges_left < 0) break;
    }
  }
  return best;
}

SddmmSchedule Pack(const Pattern& pattern, const Clustering& clustering) {
  const Piece *begin = clustering.pieces.data(), *end = begin + clustering.pieces.size();
  // Bins are packed independently of each other, so threads take shares of them; one is enough for few blocks.
  constexpr size_t kThreadBlocks = 1 << 16;  // some milliseconds of packing, far more than a thread's start
  const size_t num_shares =
      std::clamp<size_t>(pattern.order.size() / kThreadBlocks, 1, std::max(std::thread::hardware_concurrency(), 1u));
  std::vector<SddmmSchedule> shares(num_shares);
  const auto bin_at = [&](size_t share) {  // the first piece of a share: of a bin too
    const Piece* piece = begin + (end - begin) * static_cast<ptrdiff_t>(share) / static_cast<ptrdiff_t>(num_shares);
    while (piece > begin && piece < end && piece->bin == (piece - 1)->bin) ++piece;
    return piece;
  };
  const auto pack = [&](size_t share) {
    Packer packer(pattern);
    packer.Reserve(clustering.num_bins / static_cast<int64_t>(num_shares) + 1);
    for (const Piece *piece = bin_at(share), *last = bin_at(share + 1); piece < last;) {
      const Piece* next = piece;
      while (next < last && next->bin == piece->bin) ++next;
      packer.Add(piece, next);
      piece = next;
    }
    if (share + 1 == num_shares) packer.AddZeros(pattern.invalid);
    shares[share] = packer.Finish();
  };
  std::vector<std::thread> threads;
  for (size_t share = 1; share < num_shares; ++share) threads.emplace_back(pack, share);
  pack(0);
  for (std::thread& thread : threads) thread.join();
  SddmmSchedule schedule = std::move(shares[0]);
  for (size_t share = 1; share < num_shares; ++share) {
    schedule.num_bins += shares[share].num_bins;
    schedule.bins.insert(schedule.bins.end(), shares[share].bins.begin(), shares[share].bins.end());
  }
  return schedule;
}

}  // namespace

int64_t EstimateSddmmBins(int64_t k, int64_t n, int block_size, int64_t num_blocks) {
  const Costs costs(block_size);
  const double unit_cols = SddmmBin::kTileCols * costs.unit_tiles, unit_blocks = std::max(unit_cols / block_size, 1.0);
  const double pairs = std::ceil(static_cast<double>(k) / unit_cols) * std::ceil(static_cast<double>(n) / unit_cols);
  if (num_blocks == 0 || pairs == 0) return std::min<int64_t>(num_blocks, 1);
  const double density = std::min(static_cast<double>(num_blocks) / (pairs * unit_blocks * unit_blocks), 1.0);
  const double used_pairs = pairs * (1 - std::pow(1 - density, unit_blocks * unit_blocks));  // that have a block
  const double blocks = static_cast<double>(num_blocks);
  // Units of a bin: a square patch has all pairs of its units, a tree one pair less than units.
  const auto units = [&](double bins) {
    return std::max(std::min(2 * std::ceil(std::sqrt(pairs / bins)), 1 + used_pairs / bins), 2.0);
  };
  const auto fits = [&](double bins) { return units(bins) <= costs.max_units && blocks / bins <= costs.target_blocks; };
  int64_t many = std::max<int64_t>(SddmmTargetBins(block_size, num_blocks), 132);
  while (many < num_blocks && !fits(static_cast<double>(many))) many = RoundSddmmBins(many + many / 4);
  int64_t best = std::min(many, num_blocks);
  double best_cost = std::numeric_limits<double>::infinity();
  for (const int64_t in_turns : {int64_t{15}, int64_t{30}, int64_t{66}, int64_t{132}, many}) {
    const double bins = static_cast<double>(std::min(in_turns, num_blocks));
    if (!fits(bins)) continue;
    const double cost = Costs::Total(static_cast<int64_t>(bins), costs.Bin(units(bins), blocks / bins));
    if (cost < best_cost) best = static_cast<int64_t>(bins), best_cost = cost;
  }
  return best;
}

SddmmCut SpreadSddmmCut(int64_t k, int64_t n, int block_size, int64_t num_blocks) {
  SddmmCut cut = ChooseSddmmCut(k, n, block_size, num_blocks);
  const int64_t segments = std::clamp<int64_t>(cut.Segments(k, n), 1, std::max<int64_t>(num_blocks, 1));
  const int64_t parts = EstimateSddmmBins(k, n, block_size, num_blocks) / segments;
  if (parts <= 1) return cut;
  const int most = cut.bin_blocks;
  cut.bin_blocks = static_cast<int>(std::min<int64_t>((num_blocks - 1) / (segments * parts) + 1, most));
  const int64_t room = SddmmMaxBins(k, n, block_size, num_blocks);
  while (cut.bin_blocks < most && cut.MaxBins(k, n, num_blocks) > room) ++cut.bin_blocks;
  return cut;
}

SddmmSchedule MakeSddmmSchedule(const int32_t* rows, const int32_t* cols, int64_t num_blocks, int block_size, int64_t k,
                                int64_t n) {
  const SddmmBin bin{block_size};
  const int64_t max_bins = SddmmMaxBins(k, n, block_size, num_blocks);
  const Pattern pattern(rows, cols, num_blocks, block_size, k, n);
  const int64_t bins_of_padding =
      (static_cast<int64_t>(pattern.invalid.size()) + bin.MaxBlocks() - 1) / bin.MaxBlocks();
  SddmmSchedule schedule;
  Clustering clustering;
  if (!pattern.order.empty()) clustering = Cluster(pattern, max_bins - bins_of_padding);
  const bool clustered = pattern.order.empty() || clustering.cost < std::numeric_limits<double>::infinity();
  if (clustered) schedule = Pack(pattern, clustering);
  if (!clustered || schedule.num_bins > max_bins) {  // packing may cut bins again
    schedule = Pack(pattern, Cut(pattern, ChooseSddmmCut(k, n, block_size, num_blocks)));
  }
  // Bins that are not in use.
  const int64_t words = bin.Words();
  schedule.bins.resize(max_bins * words, 0);
  for (int64_t i = schedule.num_bins; i < max_bins; ++i) {
    std::fill_n(schedule.bins.begin() + i * words + bin.IdsAt(), words - bin.IdsAt(), -1);
  }
  return schedule;
}

}  // namespace bsjax
