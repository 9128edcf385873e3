// One warp's stream of listed keys and values: looks their rows up and copies tiles of 16 of them into shared memory,
// several tiles ahead.
#pragma once

#include "sparse/head_tile.cuh"
#include "sparse/segments.cuh"

namespace vegas_ops::portable {

constexpr int kSparseMaxStages = 6;

// Waits until no more than `newer` groups of copies are on their way.
__device__ __forceinline__ void wait_for_tile(int newer) {
  static_assert(kSparseMaxStages == 6, "a case for every number of tiles on their way behind the awaited one");
  switch (newer) {
    case 1:
      return cute::cp_async_wait<1>();
    case 2:
      return cute::cp_async_wait<2>();
    case 3:
      return cute::cp_async_wait<3>();
    case 4:
      return cute::cp_async_wait<4>();
    default:
      return cute::cp_async_wait<5>();
  }
}

// The part of a segment's tiles that a warp attends.
struct WarpPart {
  int tile;
  int tiles;

  __device__ WarpPart(const SegmentWalk& walk, int warps_log2) {
    const int warp = threadIdx.x / 32;
    const int begin = walk.tiles * warp >> warps_log2;
    tile = walk.tile + begin;
    tiles = (walk.tiles * (warp + 1) >> warps_log2) - begin;
  }
};

// Keys are looked up in blocks of up to two tiles, a lane per key. Reading the list, reading the table and copying are
// one block apart, so that none of them waits for the one before.
template <class T>
struct KeyStream {
  const VegasSparseParams& p;
  const SparsePlan& plan;
  SegmentWalk walk;  // at the segment of the fetched block
  WarpPart part;     // of the segment: what is not fetched
  int listed;        // entries of the KV head's list
  char* stages;
  uint32_t* valid;  // (stage,): which keys of its tile are there
  int num_stages;
  int warps_log2;
  int to_issue;  // by the next call of next()
  int issue_stage;
  int read_stage;
  // The block whose entries are on their way, then the one whose pages are, then the one that is copied.
  int fetched_tiles;
  int entry;  // slot or position; -1: none
  const int32_t* entry_source;
  const int32_t* page_source;
  bool fetched_once;  // by prepare()
  bool is_slot;
  int looked_tiles;
  int page;
  int slot;
  int head;
  int ready_tiles;
  int taken;          // of these
  int64_t offset[2];  // of K and V
  uint32_t there;
  bool ended;

  __device__ KeyStream(const SegmentWalk& first, char* stage_bytes, uint32_t* valid_masks, int stage_count, int log2)
      : p(first.p),
        plan(first.plan),
        walk(first),
        part(walk, log2),
        stages(stage_bytes),
        valid(valid_masks),
        num_stages(stage_count),
        warps_log2(log2),
        to_issue(stage_count),
        issue_stage(0),
        read_stage(0),
        fetched_tiles(0),
        entry(-1),
        entry_source(nullptr),
        page_source(nullptr),
        fetched_once(false),
        is_slot(false),
        looked_tiles(0),
        ready_tiles(0),
        taken(0),
        ended(false) {
    part.tiles = 0;
  }

  // Looks the first block up.
  __device__ __forceinline__ void prepare() {
    fetch();
    look_up();
    resolve();
    fetched_once = fetched_tiles > 0;
    looked_tiles = fetched_tiles = 0;
  }

  // Brings the rows of the block that prepare() has looked up into the L2 cache, which returns nothing and so is never
  // too early.
  __device__ __forceinline__ void bring() const {
    if (!(there >> (threadIdx.x % 32) & 1)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* row = static_cast<const char*>(i == 0 ? p.cache.k.data : p.cache.v.data) + offset[i];
#pragma unroll 1
      for (int byte = 0; byte < p.cache.head_dim * T::kCacheBytes; byte += 128) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + byte));
      }
    }
  }

  // Whether what prepare() read has changed since.
  __device__ __forceinline__ bool is_stale() const {
    bool changed = !(walk.looked_up == walk.first_request(p, plan));
    if (fetched_once) {
      changed = changed || listed != listed_of_head();
      if (entry_source) changed = changed || *entry_source != entry;
      if (page_source) changed = changed || *page_source != page;
    }
    return __any_sync(0xffffffffu, changed);
  }

  __device__ __forceinline__ int listed_of_head() const {
    if (p.topk_length_stride_head == 0 || walk.lengths.listed == 0) return walk.lengths.listed;
    return min(max(walk.lengths.count_of(p, walk.request, walk.kv_head()), 0), p.max_k);
  }

  // Starts reading what names the keys of the next block.
  __device__ __forceinline__ void fetch() {
    fetched_tiles = 0;
    entry = -1;
    entry_source = nullptr;
    is_slot = false;
#pragma unroll 1
    while (part.tiles == 0) {
      if (!walk.next()) return;
      part = WarpPart(walk, warps_log2);
      listed = listed_of_head();
    }
    fetched_tiles = min(2, part.tiles);
    const int lane = threadIdx.x % 32;
    const int i = part.tile * kTileKeys + lane;
    if (lane < fetched_tiles * kTileKeys && i < walk.lengths.keys_with(listed)) {
      if (i < listed) {
        is_slot = p.indices_are_slots;
        entry_source = p.indices + walk.request * p.indices_stride_batch + walk.kv_head() * p.indices_stride_head + i;
        entry = *entry_source;
      } else {
        entry = walk.lengths.tail_begin + (i - listed);
      }
    }
    part.tile += fetched_tiles;
    part.tiles -= fetched_tiles;
  }

  // Starts reading the pages of the fetched block.
  __device__ __forceinline__ void look_up() {
    const int in_table = plan.page_size.divide(max(entry, 0));
    page = -1;
    page_source = nullptr;
    if (is_slot) {
      if (entry >= 0) page = in_table;
    } else if (entry >= walk.lengths.first_seen && entry <= walk.lengths.last_seen) {
      page_source = p.cache.block_table + walk.request * p.cache.block_table_stride + in_table;
      page = *page_source;
    }
    slot = entry - in_table * p.cache.page_size;
    head = walk.kv_head();
    looked_tiles = fetched_tiles;
  }

  __device__ __forceinline__ void resolve() {
    there = __ballot_sync(0xffffffffu, page >= 0 && page < p.cache.num_pages);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const VegasCacheView& view = i == 0 ? p.cache.k : p.cache.v;
      offset[i] = (page * view.stride_page + slot * view.stride_token + head * view.stride_head) * T::kCacheBytes;
    }
    ready_tiles = looked_tiles;
    taken = 0;
  }

  // Starts the copies of the next tile. Always one group, so that the number of pending groups is known.
  __device__ __forceinline__ void issue() {
    // The first tile takes three turns, one per step; its copies start before the next block's entries are waited for.
#pragma unroll 1
    for (bool copied = ended; !copied;) {
      if (taken == ready_tiles) resolve();
      copied = taken < ready_tiles;
      if (copied) {
        copy_tile();
        ++taken;
        issue_stage = issue_stage + 1 < num_stages ? issue_stage + 1 : 0;
      }
      if (taken == ready_tiles) {
        look_up();
        fetch();
        ended = looked_tiles == 0 && fetched_tiles == 0;
        copied = copied || ended;
      }
    }
    cute::cp_async_fence();
  }

  __device__ __forceinline__ void copy_tile() const {
    constexpr int kLanesPerRow = T::kSegments < 32 ? T::kSegments : 32;
    constexpr int kRowsPerPass = 32 / kLanesPerRow;
    constexpr int kUnroll = T::kHeadDim <= 128 ? 8 : 4;  // registers are short
    const int lane = threadIdx.x % 32;
    const int first_key = taken * kTileKeys;
    const uint32_t present = there >> first_key & 0xffff;
    if (lane == 0) valid[issue_stage] = present;
    const int segment = lane % kLanesPerRow;
    const int first_row = lane / kLanesPerRow;
    // Of a padded row, the rest becomes zero.
    const uint32_t reads = segment * 16 < p.cache.head_dim * T::kCacheBytes ? present >> first_row : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* data = static_cast<const char*>(i == 0 ? p.cache.k.data : p.cache.v.data) + segment * 16;
      char* tile = stages + issue_stage * T::kStageBytes + i * T::kTileBytes;
#pragma unroll kUnroll
      for (int pass = 0; pass < kTileKeys; pass += kRowsPerPass) {
        const int row = first_row + pass;
        const char* source = data + __shfl_sync(0xffffffffu, offset[i], first_key + row);
        // A row that is not read becomes zeros, so that nothing of an unused slot reaches a product.
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<const cute::uint128_t*>(source),
            *reinterpret_cast<cute::uint128_t*>(tile + swizzled<T::kSegments>(row, segment)), reads >> pass & 1);
      }
    }
  }

  // Fills the stages that are free and waits for the next tile; returns its stage.
  __device__ __forceinline__ int next() {
    __syncwarp();
#pragma unroll 1
    for (; to_issue > 0; --to_issue) issue();
    to_issue = 1;
    wait_for_tile(num_stages - 1);
    __syncwarp();
    const int stage = read_stage;
    read_stage = stage + 1 < num_stages ? stage + 1 : 0;
    return stage;
  }
};

}  // namespace vegas_ops::portable
