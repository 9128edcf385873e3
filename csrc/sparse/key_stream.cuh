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

  template <Calls kCalls>
  __device__ WarpPart(const SegmentWalk<kCalls>& walk, int warps_log2) {
    const int warp = threadIdx.x / 32;
    const int begin = walk.tiles * warp >> warps_log2;
    tile = walk.tile + begin;
    tiles = (walk.tiles * (warp + 1) >> warps_log2) - begin;
  }
};

// Keys are looked up a lane per key, in blocks of as many tiles as fill the stages. Reading the list, reading the table
// and copying are one block apart, so that none of them waits for the one before.
template <class T>
struct KeyStream {
  using Walk = SegmentWalk<T::kCalls>;
  static constexpr bool kSlots = T::kCalls == Calls::kSlots;
  static constexpr int kParts = T::kParts;  // of a block, 32 keys each

  const VegasSparseParams& p;
  const SparsePlan& plan;
  Walk walk;      // at the segment of the fetched block
  WarpPart part;  // of the segment: what is not fetched
  int listed;     // entries of the KV head's list, not clamped
  char* stages;
  uint32_t* valid;  // (stage,): which keys of its tile are there
  int num_stages;
  int warps_log2;
  int to_issue;  // by the next call of next()
  int issue_stage;
  int read_stage;
  // The block whose entries are on their way, then the one whose pages are, then the one that is copied.
  int fetched_tiles;
  int entry[kParts];   // slot or position; -1: none
  uint32_t are_slots;  // a bit per part
  int looked_tiles;
  int page[kParts];
  int slot[kParts];
  int head;
  int ready_tiles;
  int taken;  // of these
  int ready_page[kParts];
  int ready_slot[kParts];
  int ready_head;
  int row[2];  // of K and V in units, of the part that is copied
  uint32_t there;
  bool ended;
  // What prepare() read.
  bool fetched_once;
  const int32_t* entry_source[kParts];
  const int32_t* page_source[kParts];

  __device__ KeyStream(const Walk& first, char* stage_bytes, uint32_t* valid_masks, int stage_count, int log2)
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
    fetched_once = ready_tiles > 0;
    fetched_tiles = 0;
  }

  // Brings the rows of the first keys that prepare() has looked up into the L2 cache, which returns nothing and so is
  // never too early.
  __device__ __forceinline__ void bring() {
    if (ready_tiles == 0) return;
    open(0);
    if (!(there >> (threadIdx.x % 32) & 1)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint64_t source =
          plan.rows_of[i].address(reinterpret_cast<uint64_t>(i == 0 ? p.cache.k.data : p.cache.v.data), row[i]);
#pragma unroll 1
      for (int byte = 0; byte < T::head_dim(p.cache) * T::kCacheBytes; byte += 128) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(source + byte));
      }
    }
  }

  // What prepare() read, as it is now.
  struct Current {
    LookedUp<T::kCalls> looked_up;
    int counts[LongestLists<T::kCalls>::kKept];
    int listed;
    int entry[kParts];
    int page[kParts];

    __device__ __forceinline__ explicit Current(const KeyStream& s) : looked_up(s.p, s.walk.lists), listed(s.listed) {
      if (has_lists_per_head<T::kCalls>(s.p)) LongestLists<T::kCalls>::read(s.p, s.plan.heads_kv, counts);
      const int32_t* own = s.fetched_once ? s.count_source() : nullptr;
      if (own) listed = load_current(own);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        entry[i] = s.entry_source[i] ? load_current(s.entry_source[i]) : s.entry[i];
        page[i] = s.page_source[i] ? load_current(s.page_source[i]) : s.page[i];
      }
    }
    __device__ __forceinline__ bool differs(const KeyStream& s) const {
      bool changed = s.walk.looked_up != looked_up;
      changed = changed || (s.fetched_once && listed != s.listed);
#pragma unroll
      for (int i = 0; i < kParts; ++i) changed = changed || s.entry[i] != entry[i] || s.page[i] != page[i];
      if (!has_lists_per_head<T::kCalls>(s.p)) return __any_sync(0xffffffffu, changed);
      // Each thread has looked at counts that all of the CTA go by.
#pragma unroll
      for (int j = 0; j < LongestLists<T::kCalls>::kKept; ++j) changed = changed || counts[j] != s.walk.lists.counts[j];
      return __syncthreads_or(changed);
    }
  };

  // The count of a list that is not all heads' list.
  __device__ __forceinline__ const int32_t* count_source() const {
    if (kSlots || p.topk_length_stride_head == 0 || walk.lengths.listed == 0) return nullptr;
    return vegas_ops::portable::count_source(p, walk.request, walk.kv_head());
  }

  // Starts reading what names the keys of the next block.
  __device__ __forceinline__ void fetch() {
    fetched_tiles = 0;
    are_slots = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      entry[i] = -1;
      entry_source[i] = nullptr;
    }
#pragma unroll 1
    while (part.tiles == 0) {
      if (!walk.next()) return;
      part = WarpPart(walk, warps_log2);
      const int32_t* own = count_source();
      listed = own ? load_current(own) : walk.lengths.listed;
    }
    fetched_tiles = min(2 * kParts, part.tiles);
    const int first = part.tile * kTileKeys;
    const int count = min(max(listed, 0), p.max_k);
    const int end = min(first + fetched_tiles * kTileKeys, walk.lengths.keys_with(count));
    const int32_t* list = p.indices + walk.request * p.indices_stride_batch + walk.kv_head() * p.indices_stride_head;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int i = first + 32 * j + static_cast<int>(threadIdx.x % 32);
      if (i >= end) continue;
      if (kSlots || i < count) {
        entry_source[j] = list + i;
        entry[j] = load_current(entry_source[j]);
        are_slots |= kSlots || p.indices_are_slots ? 1 << j : 0;
      } else {
        entry[j] = walk.lengths.tail_begin + (i - count);
      }
    }
    part.tile += fetched_tiles;
    part.tiles -= fetched_tiles;
  }

  // Starts reading the pages of the fetched block.
  __device__ __forceinline__ void look_up() {
    const int32_t* table = p.cache.block_table + walk.request * p.cache.block_table_stride;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int in_table = plan.page_size.divide(max(entry[j], 0));
      page[j] = -1;
      page_source[j] = nullptr;
      if (kSlots || are_slots >> j & 1) {
        if (entry[j] >= 0) page[j] = in_table;
      } else if (entry[j] >= walk.lengths.first_seen && entry[j] <= walk.lengths.last_seen) {
        page_source[j] = table + in_table;
        page[j] = load_current(page_source[j]);
      }
      slot[j] = entry[j] - in_table * p.cache.page_size;
    }
    head = walk.kv_head();
    looked_tiles = fetched_tiles;
  }

  __device__ __forceinline__ void resolve() {
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      ready_page[j] = page[j];
      ready_slot[j] = slot[j];
    }
    ready_head = head;
    ready_tiles = looked_tiles;
    looked_tiles = 0;
    taken = 0;
  }

  // Finds the rows of a part of the ready block.
  __device__ __forceinline__ void open(int i) {
    int own_page = ready_page[0];
    int own_slot = ready_slot[0];
#pragma unroll
    for (int j = 1; j < kParts; ++j) {
      own_page = i == j ? ready_page[j] : own_page;
      own_slot = i == j ? ready_slot[j] : own_slot;
    }
    there = __ballot_sync(0xffffffffu, own_page >= 0 && own_page < p.cache.num_pages);
#pragma unroll
    for (int j = 0; j < 2; ++j) row[j] = plan.rows_of[j].row(own_page, own_slot, ready_head);
  }

  // Starts the copies of the next tile. Always one group, so that the number of pending groups is known.
  __device__ __forceinline__ void issue() {
#pragma unroll 1
    while (taken == ready_tiles && !ended) {
      resolve();
      look_up();
      fetch();
      ended = (ready_tiles | looked_tiles | fetched_tiles) == 0;
    }
    if (!ended) copy_tile();
    cute::cp_async_fence();
  }

  // Starts the copies of up to `most` tiles that prepare() has looked up.
  __device__ __forceinline__ void start(int most) {
#pragma unroll 1
    for (; most > 0 && to_issue > 0 && taken < ready_tiles; --most, --to_issue) {
      copy_tile();
      cute::cp_async_fence();
    }
  }

  __device__ __forceinline__ void copy_tile() {
    constexpr int kLanesPerRow = T::kSegments < 32 ? T::kSegments : 32;
    constexpr int kRowsPerPass = 32 / kLanesPerRow;
    constexpr int kUnroll = T::kHeadDim <= 128 && T::kHeadTiles == 1 ? 8 : 4;  // registers are short
    const int lane = threadIdx.x % 32;
    if (taken % 2 == 0) open(taken / 2);
    const int first_key = taken % 2 * kTileKeys;
    const uint32_t present = there >> first_key & 0xffff;
    if (lane == 0) valid[issue_stage] = present;
    const int segment = lane % kLanesPerRow;
    const int first_row = lane / kLanesPerRow;
    // Of a padded row, the rest becomes zero.
    const uint32_t reads = segment * 16 < T::head_dim(p.cache) * T::kCacheBytes ? present >> first_row : 0;
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(stages)) + issue_stage * T::kStageBytes +
                            swizzled<T::kSegments>(first_row, segment);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint64_t data = reinterpret_cast<uint64_t>(i == 0 ? p.cache.k.data : p.cache.v.data) + segment * 16;
      asm("" : "+l"(data));  // a sum of its own
#pragma unroll kUnroll
      for (int pass = 0; pass < kTileKeys; pass += kRowsPerPass) {
        // swizzled(first_row + pass, segment), of which all but the XOR is known
        const int spread = swizzled<T::kSegments>(pass, 0) - pass * T::kSegments * 16;
        const int units = __shfl_sync(0xffffffffu, row[i], first_key + first_row + pass);
        // A row that is not read becomes zeros, so that nothing of an unused slot reaches a product.
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         (target ^ spread) + pass * T::kSegments * 16 + i * T::kTileBytes),
                     "l"(plan.rows_of[i].address(data, units)), "r"((reads >> pass & 1) * 16)
                     : "memory");
      }
    }
    ++taken;
    issue_stage = issue_stage + 1 < num_stages ? issue_stage + 1 : 0;
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
