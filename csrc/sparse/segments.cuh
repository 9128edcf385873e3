// How the keys of a sparse_paged_decode call are shared out among CTAs.
//
// The tiles of 16 keys of all requests form one list, and every team of CTAs takes one contiguous share of it. The CTAs
// of a team (blockIdx.x) read the same keys of as many KV heads at the same time, which memory serves best: a token's
// heads lie side by side. Every warp finds the share from the lengths of all requests, so that no launch has to plan.
#pragma once

#include "common/split_plan.cuh"
#include "sparse/request.cuh"

namespace vegas_ops::portable {

constexpr int kSparseTile = 16;  // keys
// Keys of a chunk where results must not depend on other requests, at least.
constexpr int kInvariantKeys = 256;
constexpr int kForcedKeys = 64;
constexpr int kMaxCluster = 8;

// Where rows of K or of V are, in units of a common divisor of their strides: in 32 bits, which are handed around among
// lanes, a shuffle each.
struct RowUnits {
  int page;
  int token;
  int head;
  int bytes;  // of a unit

  // Pages that are not there may wrap around.
  __device__ __forceinline__ int row(uint32_t of_page, uint32_t of_token, uint32_t of_head) const {
    return static_cast<int>(of_page * page + of_token * token + of_head * head);
  }
  // Written so, or the compiler sums the pieces anew for every row.
  __device__ __forceinline__ uint64_t address(uint64_t data, int units) const {
    uint64_t place;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(place) : "r"(units), "r"(bytes), "l"(data));
    return place;
  }
};

// How a call is cut, and where CTAs leave results for each other: zeros between calls, whatever their shapes.
struct SparsePlan {
  float* partial_norm;    // (slot, rows, 2): maximum in log2 units, sum
  float* partial_output;  // (slot, rows, head_dim), not yet divided by the sum
  SplitRule rule;
  int group;        // query heads of a KV head
  int row_tiles;    // of a group
  int rows;         // of a row tile that can be in use
  int pairs;        // of a request: its row tiles times KV heads / CTAs of a team
  int least_tiles;  // of a share
  int most_chunks;  // of a pair, where every team takes `rounds` whole chunks
  int rounds;
  Divisor chunks;  // divides by most_chunks
  // Where chunks do not depend on other requests: how many of them at most, and their least tiles.
  int fixed_chunks;
  int least_fixed_tiles;
  Divisor by_fixed_chunks;
  int cluster;  // CTAs of a cluster, one per chunk of a request where chunks are whole; or 1
  int bound;    // positions at or beyond it are not in the block table
  Divisor teams;
  Divisor page_size;
  Divisor heads_kv;
  RowUnits rows_of[2];  // K and V
  Calls calls;
};

// The tiles of a request's pairs, and the units in which they are shared out. Teams take runs of units of one tile, or
// where results must not depend on other requests, one unit after the other. A request without keys has no units,
// unless it has a cluster.
struct RequestTiles {
  int tiles;
  int unit_tiles;
  int units;

  // chunk_tiles: of a unit where teams take whole chunks, else 0.
  __device__ RequestTiles(const SparsePlan& plan, int keys, int chunk_tiles, bool balanced) {
    tiles = ceil_div(keys, kSparseTile);
    if (balanced && chunk_tiles == 0) {
      unit_tiles = 1;
      units = tiles;
      return;
    }
    unit_tiles = balanced ? chunk_tiles
                          : max(plan.least_fixed_tiles, plan.by_fixed_chunks.divide(tiles + plan.fixed_chunks - 1));
    units = plan.most_chunks;
    if (plan.cluster > 1) return;
    // Exact: a pair has few chunks.
    units = __float2int_rz(__fdividef(__int2float_rz(tiles), __int2float_rz(unit_tiles)));
    while (units * unit_tiles < tiles) ++units;
    while ((units - 1) * unit_tiles >= tiles) --units;
  }
};

// Of requests `lane` and `lane` + 32, as far as there are; others repeat one.
template <Calls kCalls>
struct LookedUp {
  using Words = RequestWords<kCalls>;
  Words words[2];

  __device__ __forceinline__ LookedUp(const VegasSparseParams& p, const LongestLists<kCalls>& lists)
      : words{Words(p, lists, min(static_cast<int>(threadIdx.x % 32), p.batch - 1)), words[0]} {
    if (p.batch > 32) words[1] = Words(p, lists, min(static_cast<int>(threadIdx.x % 32 + 32), p.batch - 1));
  }
  // Of request b, below kLookedUp.
  __device__ __forceinline__ Words of(int b) const {
    Words some = b < 32 ? words[0] : words[1];
    some.listed = __shfl_sync(0xffffffffu, some.listed, b);
    if (kCalls == Calls::kSlots) return some;
    some.used = __shfl_sync(0xffffffffu, some.used, b);
    some.start = __shfl_sync(0xffffffffu, some.start, b);
    return some;
  }
  __device__ bool operator!=(const LookedUp& other) const {
    return words[0] != other.words[0] || words[1] != other.words[1];
  }
};

// The share of a CTA, in segments: runs of tiles of one pair, a request's row tile and KV head.
template <Calls kCalls>
struct SegmentWalk {
  const VegasSparseParams& p;
  const SparsePlan& plan;
  const LongestLists<kCalls>& lists;
  LookedUp<kCalls> looked_up;
  int chunk_tiles;
  int share;  // higher CTAs take lower shares
  int size;   // of every share, in units
  int begin;
  int end;
  int unit;             // next one
  uint32_t keyless[2];  // a bit per looked up request that has no units
  bool keyless_beyond;  // whether others have none
  int request;
  int request_begin;  // its first unit
  SparseRequest lengths;
  RequestTiles all;
  // The segment.
  int pair;
  int pair_begin;  // unit
  int tile;
  int tiles;

  // Called by all lanes of a warp.
  __device__ SegmentWalk(const VegasSparseParams& params, const SparsePlan& the_plan,
                         const LongestLists<kCalls>& longest_lists)
      : p(params),
        plan(the_plan),
        lists(longest_lists),
        looked_up(p, lists),
        chunk_tiles(0),
        share(gridDim.y - 1 - blockIdx.y),
        keyless_beyond(false),
        request(0),
        request_begin(0),
        lengths(p, plan.bound, looked_up.words[0]),
        all(plan, 0, 0, true),
        pair(0),
        pair_begin(0),
        tile(0),
        tiles(0) {
    if (is_balanced()) choose_chunk();
    const SparseRequest of[2] = {lengths, SparseRequest(p, plan.bound, looked_up.words[1])};
    RequestTiles own[2] = {tiles_of(of[0]), all};
    if (p.batch > 32) own[1] = tiles_of(of[1]);
    int mine[2];
    int last[2];  // up to this lane
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_request = lane() + 32 * i < p.batch;
      last[i] = mine[i] = is_request ? own[i].units * pairs() : 0;
      keyless[i] = __ballot_sync(0xffffffffu, is_request && mine[i] == 0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i > 0 && p.batch <= 32) break;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, last[i], step);
        if (lane() >= step) last[i] += below;
      }
    }
    last[1] += __shfl_sync(0xffffffffu, last[0], 31);
    const int looked_up_units = __shfl_sync(0xffffffffu, last[1], 31);
    int total = looked_up_units;
    if (!is_few() && p.batch > kLookedUp) {
      int more = 0;
#pragma unroll 1
      for (int b = lane() + kLookedUp; b < p.batch; b += 32) {
        const int units = tiles_of(b).units;
        more += units * pairs();
        keyless_beyond = keyless_beyond || units == 0;
      }
      total += __reduce_add_sync(0xffffffffu, more);
      keyless_beyond = __any_sync(0xffffffffu, keyless_beyond);
    }
    size = max(plan.teams.divide(total + gridDim.y - 1), has_shares() ? plan.least_tiles : 1);
    begin = unit = share * size;
    end = min(unit + size, total);
    if (unit >= end) return;
    if (!is_few() && unit >= looked_up_units) {
      search(kLookedUp, looked_up_units);
      return;
    }
    const uint32_t beyond = __ballot_sync(0xffffffffu, last[0] > unit);
    const int i = beyond == 0;
    const int source = __ffs(i == 0 ? beyond : __ballot_sync(0xffffffffu, last[1] > unit)) - 1;
    const auto from = [&](int first, int second) { return __shfl_sync(0xffffffffu, i == 0 ? first : second, source); };
    request = source + 32 * i;
    request_begin = from(last[0] - mine[0], last[1] - mine[1]);
    lengths.listed = from(of[0].listed, of[1].listed);
    if (kCalls != Calls::kSlots) {
      lengths.tail_begin = from(of[0].tail_begin, of[1].tail_begin);
      lengths.tail_keys = from(of[0].tail_keys, of[1].tail_keys);
      lengths.first_seen = from(of[0].first_seen, of[1].first_seen);
      lengths.last_seen = from(of[0].last_seen, of[1].last_seen);
    }
    all.tiles = from(own[0].tiles, own[1].tiles);
    all.unit_tiles = from(own[0].unit_tiles, own[1].unit_tiles);
    all.units = from(own[0].units, own[1].units);
  }

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static constexpr bool is_few() { return kCalls != Calls::kAny; }
  __device__ bool is_balanced() const { return is_few() || plan.rule.mode == SplitMode::kBalanced; }
  __device__ int pairs() const { return is_few() ? 1 : plan.pairs; }
  __device__ RequestTiles tiles_of(const SparseRequest& of) const {
    return RequestTiles(plan, of.keys_with(of.listed), chunk_tiles, is_balanced());
  }
  // Of a request that is not looked up.
  __device__ RequestTiles tiles_of(int b) const {
    return tiles_of(SparseRequest(p, plan.bound, RequestWords<kCalls>(p, b)));
  }

  // Whole chunks where they are not much longer than equal shares: no CTA has the end of a request and the beginning
  // of another one then, each of which takes about as long as many tiles.
  __device__ __forceinline__ void choose_chunk() {
    int total = 0;
    int longest = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int tiles =
          lane() + 32 * i < p.batch ? tiles_of(SparseRequest(p, plan.bound, looked_up.words[i])).tiles : 0;
      total += tiles;
      longest = max(longest, tiles);
    }
#pragma unroll 1
    for (int b = lane() + kLookedUp; !is_few() && b < p.batch; b += 32) {
      const int tiles = tiles_of(b).tiles;
      total += tiles;
      longest = max(longest, tiles);
    }
    total = __reduce_add_sync(0xffffffffu, total);
    longest = __reduce_max_sync(0xffffffffu, longest);
    const int even = plan.teams.divide(total * pairs() + gridDim.y - 1);
    const int least_chunk = plan.chunks.divide(longest);
    const int chunk = max(least_chunk + (least_chunk * plan.most_chunks < longest), plan.least_tiles);
    if (int64_t{chunk} * plan.rounds > even + even / 8 + plan.least_tiles) return;
    chunk_tiles = chunk;
  }
  __device__ bool has_shares() const { return is_balanced() && chunk_tiles == 0; }

  // Finds the request of the unit among those from `first` on, which are not looked up, behind `before` units.
  __device__ __forceinline__ void search(int first, int before) {
#pragma unroll 1
    for (;; first += 32) {
      const int mine = first + lane() < p.batch ? tiles_of(first + lane()).units * pairs() : 0;
      int last = before + mine;
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, last - before, step);
        if (lane() >= step) last += below;
      }
      const uint32_t beyond = __ballot_sync(0xffffffffu, last > unit);
      if (beyond != 0) {
        const int source = __ffs(beyond) - 1;
        request_begin = __shfl_sync(0xffffffffu, last - mine, source);
        enter(first + source);
        return;
      }
      before = __shfl_sync(0xffffffffu, last, 31);
    }
  }

  __device__ __forceinline__ void enter(int b) {
    request = b;
    lengths = SparseRequest(p, plan.bound, is_few() || b < kLookedUp ? looked_up.of(b) : RequestWords<kCalls>(p, b));
    all = tiles_of(lengths);
  }

  // Goes on to the next segment; false where there is none.
  __device__ __forceinline__ bool next() {
    if (unit >= end) return false;
    if (unit - request_begin >= all.units * pairs()) {
      request_begin += all.units * pairs();
      do {
        enter(request + 1);
      } while (all.units == 0 && (is_few() || request < kLookedUp));
      if (!is_few() && all.units == 0) search(request + 1, request_begin);
    }
    pair = pairs() == 1 ? 0 : (unit - request_begin) / all.units;
    pair_begin = request_begin + pair * all.units;
    const int in = unit - pair_begin;
    const int run = has_shares() ? min(all.units - in, end - unit) : 1;
    tile = in * all.unit_tiles;
    tiles = max(min(run * all.unit_tiles, all.tiles - tile), 0);
    unit += run;
    return true;
  }

  // Whether request b is this team's to write because no team attends it.
  __device__ bool is_keyless(int b) const {
    if (is_few() || b < kLookedUp) return (b < 32 ? keyless[0] : keyless[1]) >> b % 32 & 1;
    return keyless_beyond && tiles_of(b).units == 0;
  }

  __device__ int kv_head() const { return pairs() == 1 ? blockIdx.x : pair / plan.row_tiles * gridDim.x + blockIdx.x; }
  __device__ int row_tile() const { return pairs() == 1 ? 0 : pair % plan.row_tiles; }
};

// The segments of a pair, in the order of the keys. The CTA that has the first one collects the others when it comes to
// its last one of the pair, which ends its share: it waits for what other CTAs begin with. Those have lower indices,
// and CTAs start in the order of their indices, so they run already.
struct Chunks {
  int count;
  int own;  // the segment's
  bool collects;
  int64_t first_slot;  // of the partial results, the next one's is gridDim.x further

  template <Calls kCalls>
  __device__ explicit Chunks(const SegmentWalk<kCalls>& walk) : count(1), own(0), collects(true), first_slot(0) {
    if (walk.tiles == walk.all.tiles) return;
    const int pair_end = walk.pair_begin + walk.all.units;
    collects = walk.pair_begin >= walk.begin && walk.unit == min(pair_end, walk.end);
    if (walk.has_shares()) {
      // A CTA leaves one partial result at most, of the pair that an earlier share begins.
      const int first = collects ? walk.share : walk.pair_begin / walk.size;
      own = walk.share - first;
      count = collects ? (pair_end - 1) / walk.size - first + 1 : own + 1;
      first_slot = int64_t{first} * gridDim.x + blockIdx.x;
    } else {
      own = walk.tile / walk.all.unit_tiles;
      count = walk.all.units;
      first_slot = int64_t{walk.pair_begin} * gridDim.x + blockIdx.x;
    }
  }
};

}  // namespace vegas_ops::portable
