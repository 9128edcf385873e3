// The warps of a Hopper verify CTA that fill its rings of K and V tiles.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "verify/hopper_pace.cuh"
#include "verify/hopper_traits.cuh"

namespace vegas_ops::hopper {

// Of the warps that load and the one that guesses.
__device__ __forceinline__ void sync_judgement() {
  asm volatile("" ::: "memory");
  cutlass::arch::NamedBarrier::sync(kJudgeThreads, kProducerBarrier);
  asm volatile("" ::: "memory");
}

// When the previous launch has ended, the warp that has guessed the first segment looks at the lengths again. If it was
// wrong, the loading warps let their tiles come in, of which nobody else knows, and start anew.
template <class T>
__device__ __forceinline__ void judge_guess(const VegasVerifyParams& p, const Workspace& w, SharedMemory<T>& shared,
                                            const VerifyRequest& guessed) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const VerifyRequest now = lane_request(p, w);
  const bool holds = __all_sync(0xffffffffu, now == guessed);
  if (threadIdx.x % 32 == 0) {
    shared.guess_holds = holds;
    if (holds) arrive_barrier(shared.segment_full[0]);
  }
  if (holds) {
    cutlass::arch::NamedBarrier::arrive(kJudgeThreads, kProducerBarrier);
    return;
  }
  sync_judgement();
  sync_judgement();
  if (threadIdx.x % 32 == 0) {
    invalidate_full_barriers(shared);
    init_full_barriers(shared);
  }
  __syncwarp();
  make_warp_plan(p, w, now, shared.share, shared.segments[0], [&] { arrive_barrier(shared.segment_full[0]); });
  sync_judgement();
}

// A loading warp's part in it: `tiles` are on their way.
template <class T>
__device__ __forceinline__ void await_new_plan(SharedMemory<T>& shared, bool values, int tiles) {
  for (int stage = 0; stage < tiles; ++stage) {
    wait_barrier(values ? shared.values_full[stage] : shared.keys_full[stage], 0);
  }
  cutlass::arch::fence_view_async_shared();
  sync_judgement();
  sync_judgement();
}

// The K warp and the V warp: tiles come by the copy engine where they are whole and their pages allow boxes, else row
// by row, with zeros for what must not be read. The K warp also cuts the CTA's share into segments and tells the
// others.
template <class T>
__device__ __forceinline__ void load_tiles(const VegasVerifyParams& p, const Workspace& w, const CacheBoxes& boxes,
                                           SharedMemory<T>& shared) {
  using cutlass::arch::ClusterTransactionBarrier;
  const int lane = threadIdx.x % 32;
  int value_warp = threadIdx.x / 32 == kValueWarp;
  const int num_pages = p.cache.num_pages < INT_MAX ? static_cast<int>(p.cache.num_pages) : INT_MAX;
  constexpr int kKeysPerLane = T::kTileKeys / 32;
  using Tile = CacheTile<T>;
  constexpr int kRowsPerCopy = 32 / Tile::kSegments;
  const int segment = lane % Tile::kSegments;
  const bool segment_exists = segment * (16 / T::kCacheBytes) < p.cache.head_dim;
  const bool full_rows = p.cache.head_dim == T::kHeadDim;
  const int lane_row = lane / Tile::kSegments;
  const int lane_offset = swizzled_offset<T::kTileKeys, Tile::kBlockBytes>(lane_row, segment);
  const int num_boxes = boxes.box > 0 ? T::kTileKeys >> boxes.box_log2 : 0;

  RingPosition<T::kStages> ring;
  SegmentReader<T> segments = {shared};
  bool first = true;
  bool guess = T::kGuesses;  // the segment may still change
  // Whether the first segment was right, which is known once the previous launch has ended.
  const auto guess_holds = [&] {
    guess = false;
    sync_judgement();
    return shared.guess_holds != 0;
  };
  // A first look into the table, before the previous launch has ended, has the code and the entries at hand for the
  // one that counts.
  bool rehearses = guess;
  Pace pace;
  while (true) {
    // One copy of the code for both warps, which then find each other's in the cache.
    asm volatile("" : "+r"(value_warp));
    const bool values = value_warp;
    // The first is there from the start.
    if (!values && !first) {
      wait_barrier(shared.segment_empty[segments.ring.stage], segments.ring.phase ^ 1);
      if (lane == 0) {
        shared.segments[segments.ring.stage] = next_segment(p, w, shared.share);
        arrive_barrier(shared.segment_full[segments.ring.stage]);
      }
    }
    first = false;
    const Segment* next = segments.next(guess);
    if (!next) {
      rehearses = false;
      if (!guess || guess_holds()) break;
      await_new_plan(shared, values, 0);
      first = true;
      continue;
    }
    const Segment& s = *next;
    const int32_t* table = p.cache.block_table + s.index * p.cache.block_table_stride;
    const int kv_head = s.kv_head;
    const int end_tile = s.end_tile;
    const int first_key = s.request.first_key;
    const int end_key = s.request.end_key;
    const int first_seen = s.first_seen;
    // Several row tiles read the same keys, which then stay in the cache.
    const bool read_once = s.packed_rows <= T::kRows;
    // Tiles in [boxed_begin, boxed_end) may come as boxes.
    const int boxed_begin = num_boxes > 0 ? ceil_div(max(first_seen - first_key, 0), T::kTileKeys) : INT_MAX;
    const int boxed_end = (end_key - first_key) / T::kTileKeys;
    // Where rows lane + 32j of a tile lie; of a boxed tile, where box `lane` does.
    int page[kKeysPerLane] = {};
    int slot[kKeysPerLane] = {};
    const auto look_up = [&](int tile) {
      const bool boxed = tile >= boxed_begin && tile < boxed_end;
#pragma unroll
      for (int j = 0; j < kKeysPerLane; ++j) {
        const int position = first_key + tile * T::kTileKeys + (boxed ? lane * boxes.box : lane + 32 * j);
        page[j] = -1;
        slot[j] = 0;
        const bool read = boxed ? j == 0 && lane < num_boxes : position >= first_seen && position < end_key;
        if (tile < end_tile && read) {
          int column;
          boxes.page_size(column, slot[j], position);
          page[j] = T::kGuesses && rehearses ? EarlyLoad()(table + column) : __ldg(table + column);
        }
      }
    };
    bool wrong = false;
    for (int tile = s.first_tile - 1; tile < end_tile; ++tile) {
      // Nobody takes a tile before the guess is known to hold.
      if (guess && tile == s.first_tile + T::kStages && !guess_holds()) {
        wrong = true;
        break;
      }
      const int box_page = page[0];
      const int box_slot = slot[0];
      const uint32_t found = __ballot_sync(0xffffffffu, box_page >= 0 && box_page < num_pages);
      const bool boxed = tile >= boxed_begin && tile < boxed_end;
      const bool whole = boxed && found == (1ull << num_boxes) - 1;
      int64_t offset[kKeysPerLane];
      KeyMask<T::kTileKeys> valid;
      const VegasCacheView& view = values ? p.cache.v : p.cache.k;  // looked at by gathered tiles alone
#pragma unroll
      for (int j = 0; j < kKeysPerLane; ++j) {
        valid.words[j] = 0xffffffffu;
        if (whole) continue;
        if (boxed) {
          // A page that does not exist: its keys are masked, one by one.
          const int row = lane + 32 * j;
          page[j] = __shfl_sync(0xffffffffu, box_page, row / boxes.box);
          slot[j] = __shfl_sync(0xffffffffu, box_slot, row / boxes.box) + row % boxes.box;
        }
        const bool exists = page[j] >= 0 && page[j] < num_pages;
        offset[j] = exists ? (page[j] * view.stride_page + slot[j] * view.stride_token) * T::kCacheBytes : -1;
        valid.words[j] = __ballot_sync(0xffffffffu, exists);
      }
      look_up(tile + 1);
      if (rehearses) {
        rehearses = false;
        cudaGridDependencySynchronize();
        --tile;
        continue;
      }
      if (tile < s.first_tile) continue;
      if constexpr (T::kPaced) {
        // A warp that gathers tiles by itself has no time to wait.
        if (!values && !guess && num_boxes > 0) pace.next(p, w, shared.share);
      }
      wait_barrier(values ? shared.values_empty[ring.stage] : shared.keys_empty[ring.stage], ring.phase ^ 1);
      char* target = values ? shared.values[ring.stage] : shared.keys[ring.stage];
      uint64_t* full = values ? &shared.values_full[ring.stage] : &shared.keys_full[ring.stage];
      if (!values && lane == 0) {
        shared.valid[ring.stage] = valid;
        // The plain write is released by an arrival of its own.
        arrive_barrier(*full);
      }
      ring.advance();
      if (whole) {
        if (lane == 0) {
          ClusterTransactionBarrier::arrive_and_expect_tx(full, T::kTileBytes);
        } else {
          ClusterTransactionBarrier::arrive(full);
        }
        __syncwarp();
        const auto hint = read_once ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL;
        // One lane issues a batch in a straight line: a loop over boxes takes longer than memory does.
        constexpr int kBatch = 4;
#pragma unroll 1
        for (int first_box = 0; first_box < num_boxes; first_box += kBatch) {
          int pages[kBatch];
          int slots[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            pages[i] = __shfl_sync(0xffffffffu, box_page, first_box + i);
            slots[i] = __shfl_sync(0xffffffffu, box_slot, first_box + i);
          }
          if (!cute::elect_one_sync()) continue;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (first_box + i >= num_boxes) break;
#pragma unroll
            for (int block = 0; block < Tile::kBlocks; ++block) {
              cute::SM90_TMA_LOAD_4D::copy(
                  values ? &boxes.v : &boxes.k, full, static_cast<uint64_t>(hint),
                  target + (block * T::kTileKeys + (first_box + i) * boxes.box) * Tile::kBlockBytes,
                  block * Tile::kBlockColumns, kv_head, slots[i], pages[i]);
            }
          }
        }
        continue;
      }
      const char* data = static_cast<const char*>(view.data);
      const char* base = data + view.stride_head * T::kCacheBytes * kv_head + segment * 16;
      const auto gather = [&](bool all) {
#pragma unroll
        for (int j = 0; j < kKeysPerLane; ++j) {
#pragma unroll 4
          for (int row = 0; row < 32; row += kRowsPerCopy) {
            const int64_t from = __shfl_sync(0xffffffffu, offset[j], row + lane_row);
            const bool read = all || (from >= 0 && segment_exists);
            // The swizzle of `row` and `lane_row` uses different bits.
            char* to = target + (lane_offset ^ (row & 7) * 16) + (32 * j + row) * Tile::kBlockBytes;
            cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
                *reinterpret_cast<const cute::uint128_t*>(read ? base + from : data),
                *reinterpret_cast<cute::uint128_t*>(to), read);
          }
        }
      };
      if (valid.all() && full_rows) {
        gather(true);
      } else {
        gather(false);
      }
      if (num_boxes > 0) {
        // A tile among boxes: handed over to the tensor cores here, so that row groups need not look.
        cute::cp_async_wait<0>();
        cutlass::arch::fence_view_async_shared();
        arrive_barrier(*full);
      } else {
        cutlass::arch::cpasync_barrier_arrive_noinc(full);
      }
    }
    if (guess) wrong = !guess_holds();
    if (wrong) {
      await_new_plan(shared, values, ring.phase ? T::kStages : ring.stage);
      ring = {};
      first = true;
      continue;
    }
    segments.done();
  }
  cute::cp_async_wait<0>();
}

}  // namespace vegas_ops::hopper
