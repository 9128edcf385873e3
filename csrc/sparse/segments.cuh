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

// Divides numbers below 2^31 by one that the host knows.
struct Divisor {
  uint32_t factor;
  int shift;

  void set(int divisor) {
    for (shift = 0; (int64_t{1} << shift) < divisor; ++shift) {
    }
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
    shift += 31;
  }
  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor >> shift);
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
  int bound;        // positions at or beyond it are not in the block table
  Divisor teams;
  Divisor page_size;
};

// The tiles of a request's pairs, and the units in which they are shared out. Teams take runs of units of one tile, or
// where results must not depend on other requests, one unit after the other.
struct RequestTiles {
  int tiles;
  int unit_tiles;
  int units;

  __device__ RequestTiles(const SparsePlan& plan, int keys) {
    tiles = max(1, ceil_div(keys, kSparseTile));
    unit_tiles = 1;
    units = tiles;
    if (plan.rule.mode == SplitMode::kBalanced) return;
    const bool forced = plan.rule.mode == SplitMode::kForced;
    unit_tiles = max((forced ? kForcedKeys : kInvariantKeys) / kSparseTile,
                     ceil_div(tiles, forced ? plan.rule.num_splits : kMaxFixedChunks));
    units = ceil_div(tiles, unit_tiles);
  }
};

// The share of a CTA, in segments: runs of tiles of one pair, a request's row tile and KV head.
struct SegmentWalk {
  const VegasSparseParams& p;
  const SparsePlan& plan;
  SparseRequest looked_up;  // request `lane` among the first 32
  int share;                // higher CTAs take lower shares
  int size;                 // of every share, in units
  int begin;
  int end;
  int unit;  // next one
  int request;
  int request_begin;  // its first unit
  SparseRequest lengths;
  RequestTiles all;
  // The segment.
  int pair;
  int pair_begin;  // unit
  int tile;
  int tiles;

  __device__ static SparseRequest first_request(const VegasSparseParams& p, const SparsePlan& plan) {
    return SparseRequest(p, plan.bound, min(static_cast<int>(threadIdx.x % 32), p.batch - 1));
  }

  // Called by all lanes of a warp.
  __device__ SegmentWalk(const VegasSparseParams& params, const SparsePlan& the_plan)
      : p(params),
        plan(the_plan),
        looked_up(first_request(p, plan)),
        share(gridDim.y - 1 - blockIdx.y),
        request(threadIdx.x % 32),
        lengths(looked_up),
        all(plan, lengths.keys_with(lengths.listed)) {
    const int lane = threadIdx.x % 32;
    const int mine = request < p.batch ? all.units * plan.pairs : 0;
    int last = mine;  // up to this lane
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, last, step);
      if (lane >= step) last += below;
    }
    int total = __shfl_sync(0xffffffffu, last, 31);
    if (p.batch > 32) {
      int more = 0;
#pragma unroll 1
      for (int b = lane + 32; b < p.batch; b += 32) more += units_of(b);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) more += __shfl_xor_sync(0xffffffffu, more, step);
      total += more;
    }
    const bool balanced = plan.rule.mode == SplitMode::kBalanced;
    size = max(plan.teams.divide(total + gridDim.y - 1), balanced ? plan.least_tiles : 1);
    begin = unit = share * size;
    end = min(unit + size, total);
    if (unit >= end) return;
    const uint32_t beyond = __ballot_sync(0xffffffffu, last > unit);
    if (beyond != 0) {
      const int source = __ffs(beyond) - 1;
      request = source;
      request_begin = __shfl_sync(0xffffffffu, last - mine, source);
      lengths.listed = __shfl_sync(0xffffffffu, lengths.listed, source);
      lengths.tail_begin = __shfl_sync(0xffffffffu, lengths.tail_begin, source);
      lengths.tail_keys = __shfl_sync(0xffffffffu, lengths.tail_keys, source);
      lengths.first_seen = __shfl_sync(0xffffffffu, lengths.first_seen, source);
      lengths.last_seen = __shfl_sync(0xffffffffu, lengths.last_seen, source);
      all.tiles = __shfl_sync(0xffffffffu, all.tiles, source);
      all.unit_tiles = __shfl_sync(0xffffffffu, all.unit_tiles, source);
      all.units = __shfl_sync(0xffffffffu, all.units, source);
    } else {
      search(__shfl_sync(0xffffffffu, last, 31));
    }
  }

  __device__ int units_of(int b) const {
    const SparseRequest other(p, plan.bound, b);
    return RequestTiles(plan, other.keys_with(other.listed)).units * plan.pairs;
  }

  // Finds the request of the unit behind the first 32, which have `before` units.
  __device__ __forceinline__ void search(int before) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 32;; first += 32) {
      const int mine = first + lane < p.batch ? units_of(first + lane) : 0;
      int last = before + mine;
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, last - before, step);
        if (lane >= step) last += below;
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
    lengths = SparseRequest(p, plan.bound, b);
    all = RequestTiles(plan, lengths.keys_with(lengths.listed));
  }

  // Goes on to the next segment; false where there is none.
  __device__ __forceinline__ bool next() {
    if (unit >= end) return false;
    if (unit - request_begin >= all.units * plan.pairs) {
      request_begin += all.units * plan.pairs;
      enter(request + 1);
    }
    pair = plan.pairs == 1 ? 0 : (unit - request_begin) / all.units;
    pair_begin = request_begin + pair * all.units;
    const int in = unit - pair_begin;
    const int run = plan.rule.mode == SplitMode::kBalanced ? min(all.units - in, end - unit) : 1;
    tile = in * all.unit_tiles;
    tiles = min(run * all.unit_tiles, all.tiles - tile);
    unit += run;
    return true;
  }

  __device__ int kv_head() const {
    return plan.pairs == 1 ? blockIdx.x : pair / plan.row_tiles * gridDim.x + blockIdx.x;
  }
  __device__ int row_tile() const { return plan.pairs == 1 ? 0 : pair % plan.row_tiles; }
};

// The segments of a pair, in the order of the keys. The CTA that has the first one collects the others when it comes to
// its last one of the pair, which ends its share: it waits for what other CTAs begin with. Those have lower indices,
// and CTAs start in the order of their indices, so they run already.
struct Chunks {
  int count;
  int own;  // the segment's
  bool collects;
  int64_t first_slot;  // of the partial results, the next one's is gridDim.x further

  __device__ explicit Chunks(const SegmentWalk& walk) : count(1), own(0), collects(true), first_slot(0) {
    if (walk.tiles == walk.all.tiles) return;
    const int pair_end = walk.pair_begin + walk.all.units;
    collects = walk.pair_begin >= walk.begin && walk.unit == min(pair_end, walk.end);
    if (walk.plan.rule.mode == SplitMode::kBalanced) {
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
