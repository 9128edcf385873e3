// How the Hopper verify kernel shares work among persistent CTAs, and what it leaves in the workspace.
#pragma once

#include "common/split_plan.cuh"
#include "verify/request.cuh"

namespace vegas_ops::hopper {

using portable::block_scan;
using portable::ceil_div;
using portable::ceil_div64;
using portable::SplitMode;
using portable::SplitRule;
using portable::VerifyRequest;

constexpr int kTileKeys = 64;
constexpr int kInvariantKeys = 2048;  // of a chunk where results must not depend on other requests
constexpr int kPlanThreads = 128;
constexpr int kMinShareKeys = 256;  // of a CTA where there is little work

// CTAs work in teams: the CTAs of a team read the same keys of as many KV heads at the same time, which memory serves
// best since a token's heads lie side by side. A team takes one contiguous share of the list of all units: requests,
// their rounds of heads, row tiles, and units of key tiles.

// Pointers into the workspace, and the call's bounds. Nothing in it outlives a call.
struct Workspace {
  int* unit_begin;        // (batch,): where the request's units start in the list of all
  int* share;             // units of a team
  float2* partial_norm;   // (slot, norm_rows): maximum in log2 units, sum; the guide rows come last
  float* partial_output;  // (slot, tile_rows, padded head_dim), not yet divided by the sum
  float* dump;            // (batch, num_heads_kv, dump_stride): the KV heads' parts of a summed dump
  int64_t dump_stride;
  SplitRule rule;
  int team;        // CTAs, a divisor of the KV heads
  int group_rows;  // packed rows of a row tile: a multiple of 64
  int tile_rows;   // of which this many can be in use
  int norm_rows;
};

// A request's units of work. A pair is one of its row tiles and one round of heads; every pair has the same tiles of
// keys.
struct RequestUnits {
  int tiles;
  int unit_tiles;  // of a unit; where results may depend on the batch, teams take runs of units of one tile
  int units;       // of a pair
  int row_tiles;
  int all;

  __device__ RequestUnits(const VegasVerifyParams& p, const Workspace& w, const VerifyRequest& request) {
    row_tiles = request.row_tiles(p, w.group_rows);
    tiles = max(1, ceil_div(request.end_key - request.first_key, kTileKeys));
    unit_tiles = 1;
    if (w.rule.mode == SplitMode::kInvariant) unit_tiles = kInvariantKeys / kTileKeys;
    if (w.rule.mode == SplitMode::kForced) unit_tiles = ceil_div(tiles, w.rule.num_splits);
    units = ceil_div(tiles, unit_tiles);
    all = units * row_tiles * (p.cache.num_heads_kv / w.team);
  }
};

// A request whose tiles start where a box of a page may.
__device__ inline VerifyRequest request_of(const VegasVerifyParams& p, int b) {
  VerifyRequest request(p, b);
  request.first_key = request.first_key / kTileKeys * kTileKeys;
  return request;
}

// The units of one team: [begin, end) of all, starting within a request whose units start at request_begin.
struct Share {
  int begin;
  int end;
  int request_begin;
  int request;
};

// A run of key tiles of one pair, attended by one CTA.
struct Segment {
  VerifyRequest request;
  int index;  // of the request; -1: no more segments
  int packed_rows;
  int row_tile;
  int kv_head;
  int first_tile;
  int tiles;
  bool whole;      // all tiles of the pair: nothing to merge
  int slot;        // of the partial results otherwise
  int first_seen;  // no row sees keys outside [first_seen, last_seen], and tiles outside [live_begin, live_end)
  int last_seen;
  int live_begin;
  int live_end;

  int left;  // a query row at position x sees keys in [x - left, x + right]
  int right;

  // Keys that a query row sees, unclamped.
  __device__ void visible(int query, int& first, int& last) const {
    const int position = request.keys - request.q_len + query;
    first = position - left;
    last = min(position + right, request.keys - 1);
  }
  __device__ int key_of(int tile) const { return request.first_key + tile * kTileKeys; }
};

// Takes the next segment of this CTA off its team's share, which starts within the request.
__device__ inline Segment cut_segment(const VegasVerifyParams& p, const Workspace& w, const VerifyRequest& request,
                                      const RequestUnits& units, Share& left) {
  Segment s;
  const int in = left.begin - left.request_begin;
  const int pair = in / units.units;
  const int unit = in - pair * units.units;
  const bool balanced = w.rule.mode == SplitMode::kBalanced;
  const int run = balanced ? min(units.units - unit, left.end - left.begin) : 1;
  s.request = request;
  s.index = left.request;
  s.packed_rows = s.request.packed_rows(p);
  s.row_tile = pair % units.row_tiles;
  s.kv_head = pair / units.row_tiles * w.team + blockIdx.x % w.team;
  s.first_tile = unit * units.unit_tiles;
  s.tiles = min(run * units.unit_tiles, units.tiles - s.first_tile);
  s.whole = run == units.units;
  // A CTA has one run that ends within a pair, and one that starts within.
  s.slot = balanced ? blockIdx.x * 2 + (unit == 0) : left.begin * w.team + blockIdx.x % w.team;
  left.begin += run;

  const int all = s.request.keys + s.request.q_len;
  s.left = p.window_left >= 0 ? min(p.window_left, all) : all;
  s.right = p.causal ? 0 : p.window_right >= 0 ? min(p.window_right, all) : all;
  int unused;
  s.visible(0, s.first_seen, unused);
  s.visible(s.request.q_len - 1, unused, s.last_seen);
  s.first_seen = max(s.first_seen, 0);
  const int end = s.first_tile + s.tiles;
  s.live_begin = s.live_end = s.first_tile;
  if (s.last_seen >= s.first_seen) {
    const int first = (max(s.first_seen, s.request.first_key) - s.request.first_key) / kTileKeys;
    const int last = (s.last_seen - s.request.first_key) / kTileKeys;
    s.live_begin = min(max(first, s.first_tile), end);
    s.live_end = max(s.live_begin, min(last + 1, end));
  }
  return s;
}

__device__ inline Segment next_segment(const VegasVerifyParams& p, const Workspace& w, Share& left) {
  while (left.begin < left.end) {
    const VerifyRequest request = request_of(p, left.request);
    const RequestUnits units(p, w, request);
    if (left.begin - left.request_begin < units.all) return cut_segment(p, w, request, units, left);
    left.request_begin += units.all;
    ++left.request;
  }
  Segment none;
  none.index = -1;
  return none;
}

// Called by the first kPlanThreads threads, which `sync` makes wait for each other: finds the CTA's share and its first
// segment, which are there after the next barrier. `scratch` is shared memory, 8 bytes a warp.
template <class Sync>
__device__ inline void find_share(const VegasVerifyParams& p, const Workspace& w, Share& share, Segment& segment,
                                  uint64_t* scratch, const Sync& sync) {
  constexpr int threads = kPlanThreads;
  const int teams = gridDim.x / w.team;
  const auto look = [&](int b, VerifyRequest& request) {
    if (b >= p.batch) return 0;
    request = request_of(p, b);
    return RequestUnits(p, w, request).all;
  };
  VerifyRequest request;
  int mine = 0;
  for (int b = threadIdx.x; b < p.batch; b += threads) mine += look(b, request);
  uint64_t total;
  int at = static_cast<int>(block_scan(mine, &total, scratch, threads, sync));
  const int all = static_cast<int>(total);
  const int least = w.rule.mode == SplitMode::kBalanced ? kMinShareKeys / kTileKeys : 1;
  const int size = max(least, ceil_div(all, teams));
  const int begin = min(all, static_cast<int>(blockIdx.x) / w.team * size);
  if (blockIdx.x == 0 && threadIdx.x == 0) *w.share = size;
  if (begin == all && threadIdx.x == 0) {
    share = {0, 0, 0, 0};
    segment.index = -1;
  }
  int before = 0;
  for (int first = 0; first < p.batch; first += threads) {
    const int b = first + threadIdx.x;
    if (p.batch > threads) {
      mine = look(b, request);
      uint64_t sum;
      at = before + static_cast<int>(block_scan(mine, &sum, scratch, threads, sync));
      before += static_cast<int>(sum);
    }
    if (b >= p.batch) continue;
    if (at <= begin && begin < at + mine) {
      Share left = {begin, min(all, begin + size), at, b};
      segment = cut_segment(p, w, request, RequestUnits(p, w, request), left);
      share = left;
    }
    // The first CTA lists where every request starts, for the merge.
    if (blockIdx.x == 0) w.unit_begin[b] = at;
  }
}

// The partial results of a row tile and KV head, in the order of the keys.
struct Chunks {
  int count;
  int first;  // team, or unit
  int in_team;
  int team;
  bool balanced;

  __device__ Chunks(const Workspace& w, const RequestUnits& units, int unit_begin, int kv_head, int row_tile) {
    team = w.team;
    in_team = kv_head % team;
    balanced = w.rule.mode == SplitMode::kBalanced;
    first = unit_begin + (kv_head / team * units.row_tiles + row_tile) * units.units;
    count = units.units;
    if (balanced) {
      const int size = *w.share;
      const int last = (first + units.units - 1) / size;
      first /= size;
      count = last - first + 1;
    }
  }
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
