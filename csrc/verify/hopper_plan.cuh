// How the Hopper verify kernel shares work among persistent CTAs, and what it leaves in the workspace.
//
// A small call waits for every step before its first load, so nothing here divides where a quotient can be known.
#pragma once

#include <cutlass/fast_math.h>

#include "common/split_plan.cuh"
#include "verify/request.cuh"

namespace vegas_ops::hopper {

using portable::block_scan;
using portable::ceil_div;
using portable::ceil_div64;
using portable::SplitMode;
using portable::SplitRule;
using portable::VerifyRequest;

constexpr int kMinTileKeys = 64;
constexpr int kMostTileKeys = 128;
constexpr int kInvariantKeys = 2048;  // of a chunk where results must not depend on other requests
constexpr int kPlanThreads = 128;
constexpr int kMinShareKeys = 256;  // of a CTA where there is little work
constexpr int kFewRequests = 32;    // of a call, at most, whose plan a warp makes by itself
constexpr int kMostRingTiles = 16;
constexpr int kFirstGuideRow = 48;
constexpr int kMostPending = 4;  // tiles that one CTA of a team adds up at a time

struct RequestPlan;

// CTAs work in teams: the CTAs of a team read the same keys of as many KV heads at the same time, which memory serves
// best since a token's heads lie side by side. The grid is (CTAs of a team, teams). A team takes one contiguous share
// of the list of all units: requests, their rounds of heads, row tiles, and units of key tiles.

// Pointers into the workspace, and what the host knows of the call. Nothing in it outlives a call.
struct Workspace {
  RequestPlan* requests;  // (batch,)
  float2* partial_norm;   // (slot, norm_rows): maximum in log2 units, sum; the guide rows come last
  float* partial_output;  // (slot, tile_rows, padded head_dim), not yet divided by the sum
  float* dump;            // the KV heads' parts of a summed dump, if they do not go through the ring
  uint32_t* ring;         // (team, tile of ring_tiles, KV head, key): such parts, zeros between calls
  int ring_tiles;         // a multiple of the team; 0: no ring
  int* pace;              // steps of all CTAs that keep step; zero between calls
  int pace_slack;         // tiles that a CTA may be ahead of the average; -1: any number
  SplitRule rule;
  int tile_shift;  // log2 of the keys of a tile
  cutlass::FastDivmod teams;
  cutlass::FastDivmod group_rows;  // packed rows of a row tile: a multiple of 64
  int group;                       // query heads of a KV head
  int team;                        // CTAs, a divisor of the KV heads
  int rounds;                      // of a team over the KV heads
  int tile_rows;                   // of group_rows, this many can be in use
  int norm_rows;
  bool guides_in_rows;  // guide rows are kFirstGuideRow and the next of the last row group
};

__device__ inline int ceil_div(int a, const cutlass::FastDivmod& by) {
  int quotient, remainder;
  by.fast_divmod(quotient, remainder, a + by.divisor - 1);
  return quotient;
}

// A request's units of work. A pair is one of its row tiles and one round of heads; every pair has the same tiles of
// keys.
struct RequestUnits {
  int tiles;
  int unit_tiles;  // of a unit; where results may depend on the batch, teams take runs of units of one tile
  int units;       // of a pair
  int row_tiles;
  int all;

  RequestUnits() = default;
  __device__ RequestUnits(const Workspace& w, const VerifyRequest& request) {
    row_tiles = ceil_div(request.q_len * w.group, w.group_rows);
    tiles = max(1, (request.end_key - request.first_key + (1 << w.tile_shift) - 1) >> w.tile_shift);
    unit_tiles = 1;
    units = tiles;
    if (w.rule.mode != SplitMode::kBalanced) {
      unit_tiles =
          w.rule.mode == SplitMode::kForced ? ceil_div(tiles, w.rule.num_splits) : kInvariantKeys >> w.tile_shift;
      units = ceil_div(tiles, unit_tiles);
    }
    all = units * row_tiles * w.rounds;
  }
};

// What the launch that merges needs of a request.
struct RequestPlan {
  VerifyRequest request;
  int row_tiles;
  int units;
  int unit_begin;  // where its units start in the list of all
  int share;       // units of a team
};

// Reads what the previous launch may still write: not from the L1 cache, where it would be found again.
struct EarlyLoad {
  __device__ __forceinline__ int operator()(const int32_t* from) const {
    int word;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
  }
};

// A request whose tiles start where a box of a page may.
template <class Load = portable::PlainLoad>
__device__ inline VerifyRequest request_of(const VegasVerifyParams& p, const Workspace& w, int b,
                                           const Load& load = {}) {
  VerifyRequest request(p, b, load);
  request.first_key = request.first_key >> w.tile_shift << w.tile_shift;
  return request;
}

// The units of one team: [begin, end) of all, starting within a request whose units start at request_begin.
struct Share {
  int begin;
  int end;
  int request_begin;
  int request;
  int size;   // of all teams' shares
  int total;  // units
};

// A run of key tiles of one pair, attended by one CTA.
struct Segment {
  VerifyRequest request;
  int index;  // of the request; -1: no more segments
  int packed_rows;
  int row_tile;
  int kv_head;
  int first_tile;
  int end_tile;    // first_tile where no row sees any key
  bool whole;      // all tiles of the pair: nothing to merge
  int slot;        // of the partial results otherwise
  int first_seen;  // no row sees earlier keys

  int left;  // a query row at position x sees keys in [x - left, x + right]
  int right;

  // Keys that a query row sees, unclamped.
  __device__ void visible(int query, int& first, int& last) const {
    const int position = request.keys - request.q_len + query;
    first = position - left;
    last = min(position + right, request.keys - 1);
  }
  template <int kTileKeys>
  __device__ int key_of(int tile) const {
    return request.first_key + tile * kTileKeys;
  }
};

// Takes the next segment of this CTA off its team's share, which starts within the request.
__device__ inline Segment cut_segment(const VegasVerifyParams& p, const Workspace& w, const VerifyRequest& request,
                                      const RequestUnits& units, Share& left) {
  Segment s;
  int unit = left.begin - left.request_begin;
  int pair = 0;
  if (unit >= units.units) {
    pair = unit / units.units;
    unit -= pair * units.units;
  }
  int round = 0;
  s.row_tile = pair;
  if (pair >= units.row_tiles) {
    round = pair / units.row_tiles;
    s.row_tile -= round * units.row_tiles;
  }
  const bool balanced = w.rule.mode == SplitMode::kBalanced;
  const int run = balanced ? min(units.units - unit, left.end - left.begin) : 1;
  s.request = request;
  s.index = left.request;
  s.packed_rows = request.q_len * w.group;
  s.kv_head = round * w.team + blockIdx.x;
  s.first_tile = unit * units.unit_tiles;
  s.end_tile = request.end_key == 0 ? 0 : min(s.first_tile + run * units.unit_tiles, units.tiles);
  s.whole = run == units.units;
  // A CTA has one run that ends within a pair, and one that starts within.
  s.slot = balanced ? (blockIdx.y * w.team + blockIdx.x) * 2 + (unit == 0) : left.begin * w.team + blockIdx.x;
  left.begin += run;

  const int all = request.keys + request.q_len;
  s.left = p.window_left >= 0 ? min(p.window_left, all) : all;
  s.right = p.causal ? 0 : p.window_right >= 0 ? min(p.window_right, all) : all;
  int unused;
  s.visible(0, s.first_seen, unused);
  s.first_seen = max(s.first_seen, 0);
  return s;
}

__device__ inline Segment next_segment(const VegasVerifyParams& p, const Workspace& w, Share& left) {
  while (left.begin < left.end) {
    const VerifyRequest request = request_of(p, w, left.request);
    const RequestUnits units(w, request);
    if (left.begin - left.request_begin < units.all) return cut_segment(p, w, request, units, left);
    left.request_begin += units.all;
    ++left.request;
  }
  Segment none;
  none.index = -1;
  return none;
}

__device__ inline int share_of(const Workspace& w, int total) {
  const int least = w.rule.mode == SplitMode::kBalanced ? kMinShareKeys >> w.tile_shift : 1;
  return max(least, ceil_div(total, w.teams));
}

// Called by the first kPlanThreads threads, which `sync` makes wait for each other: finds the CTA's share and its first
// segment; the thread that has written them calls `ready`. `scratch` is shared memory, an int per warp.
template <class Sync, class Ready>
__device__ inline void make_plan(const VegasVerifyParams& p, const Workspace& w, Share& share, Segment& segment,
                                 int* scratch, const Sync& sync, const Ready& ready) {
  const int requests = ceil_div(p.batch, kPlanThreads);  // of a thread
  const int first = threadIdx.x * requests;
  const int last = min(first + requests, p.batch);
  const bool writes = blockIdx.x + blockIdx.y == 0;  // the plan of every request, for the merge
  VerifyRequest request;
  RequestUnits units;
  int at = 0;
  int begin = 0;
  int size = 0;
  int total = 0;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const int before = at;
#pragma unroll 1
    for (int b = first; b < last; ++b) {
      if (pass == 0 || requests > 1) {
        request = request_of(p, w, b);
        units = RequestUnits(w, request);
      }
      if (pass == 1) {
        if (writes) w.requests[b] = {request, units.row_tiles, units.units, at, size};
        if (at <= begin && begin < at + units.all) {
          Share left = {begin, min(total, begin + size), at, b, size, total};
          segment = cut_segment(p, w, request, units, left);
          share = left;
          ready();
        }
      }
      at += units.all;
    }
    if (pass == 1) return;
    const int mine = at - before;
    at = block_scan(mine, &total, scratch, kPlanThreads, sync);
    size = share_of(w, total);
    begin = min(total, static_cast<int>(blockIdx.y) * size);
    if (begin == total && threadIdx.x == 0) {
      share = {};
      segment.index = -1;
      ready();
    }
    const bool here = at <= begin && begin < at + mine;
    if (!writes && !here) return;
  }
}

// One of up to kFewRequests requests, this lane's; read in a way that finds out what has changed since.
__device__ inline VerifyRequest lane_request(const VegasVerifyParams& p, const Workspace& w) {
  return request_of(p, w, min(static_cast<int>(threadIdx.x) % 32, p.batch - 1), EarlyLoad());
}

// As make_plan, but by one warp, whose lanes have a request each.
template <class Ready>
__device__ inline void make_warp_plan(const VegasVerifyParams& p, const Workspace& w, const VerifyRequest& request,
                                      Share& share, Segment& segment, const Ready& ready) {
  const int lane = threadIdx.x % 32;
  RequestUnits units(w, request);
  if (lane >= p.batch) units.all = 0;
  const int end = warp_scan(units.all);
  const int at = end - units.all;
  const int total = __shfl_sync(0xffffffffu, end, 31);
  const int size = share_of(w, total);
  const int begin = min(total, static_cast<int>(blockIdx.y) * size);
  if (begin == total && lane == 0) {
    share = {};
    segment.index = -1;
    ready();
  }
  if (at <= begin && begin < end) {
    Share left = {begin, min(total, begin + size), at, lane, size, total};
    segment = cut_segment(p, w, request, units, left);
    share = left;
    ready();
  }
}

// The plan of one of up to kFewRequests requests, made by a warp whose lanes look at one each.
__device__ inline RequestPlan plan_of(const VegasVerifyParams& p, const Workspace& w, int b) {
  const int lane = threadIdx.x % 32;
  const VerifyRequest own = request_of(p, w, min(lane, p.batch - 1));
  const RequestUnits units(w, own);
  const int all = lane < p.batch ? units.all : 0;
  const int end = warp_scan(all);
  const auto of_request = [&](int x) { return __shfl_sync(0xffffffffu, x, b); };
  RequestPlan plan;
  plan.request.q_begin = of_request(own.q_begin);
  plan.request.q_len = of_request(own.q_len);
  plan.request.keys = of_request(own.keys);
  plan.request.bits = of_request(own.bits);
  plan.request.dump_len = of_request(own.dump_len);
  plan.request.num_guides = of_request(own.num_guides);
  plan.request.first_key = of_request(own.first_key);
  plan.request.end_key = of_request(own.end_key);
  plan.request.first_full_key = of_request(own.first_full_key);
  plan.request.last_full_key = of_request(own.last_full_key);
  plan.row_tiles = of_request(units.row_tiles);
  plan.units = of_request(units.units);
  plan.unit_begin = of_request(end - all);
  plan.share = share_of(w, __shfl_sync(0xffffffffu, end, 31));
  return plan;
}

// The partial results of a row tile and KV head, in the order of the keys.
struct Chunks {
  int count;
  int first;  // team, or unit
  int in_team;
  int team;
  bool balanced;

  __device__ Chunks(const Workspace& w, const RequestPlan& plan, int kv_head, int row_tile) {
    team = w.team;
    in_team = kv_head;
    balanced = w.rule.mode == SplitMode::kBalanced;
    int round = 0;
    if (w.rounds > 1) {
      round = kv_head / team;
      in_team -= round * team;
    }
    first = plan.unit_begin + (round * plan.row_tiles + row_tile) * plan.units;
    count = plan.units;
    if (balanced) {
      const int last = (first + plan.units - 1) / plan.share;
      first /= plan.share;
      count = last - first + 1;
    }
  }
  // From a chunk's to the next one's, but for the first.
  __device__ int slot_step() const { return balanced ? 2 * team : team; }
  __device__ int slot(int chunk) const {
    const int cta = (first + chunk) * team + in_team;
    return balanced ? 2 * cta + (chunk == 0) : cta;
  }
};

// What a row's accumulated output is multiplied with; a row without keys is zero instead.
template <class Element>
__device__ inline float output_factor(const portable::RowOutput<Element>& row, const portable::RowNorm& norm) {
  const float sink = row.sink ? exp2f(*row.sink * portable::kLog2e - norm.base()) : 0.0f;
  return row.v_descale / (norm.sum + sink);
}

}  // namespace vegas_ops::hopper
