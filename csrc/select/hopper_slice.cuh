// The part of a list that a CTA reads, and sets of its places as bits: pooling a window is widening such a set.
#pragma once

#include <cuda_runtime.h>

#include "select/plan.h"

namespace vegas_ops::selection::hopper {

constexpr int kThreads = 1024;  // of a CTA at most
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = 16;
constexpr int kRowWords = 8;          // that a warp reads at a time
constexpr int kRow = 32 * kRowWords;  // places of a row
constexpr int kMostWords = 2048;      // of a slice, whose places have 16 bits
constexpr int kMostShare = 4;         // of these, by thread
constexpr int kMaxReach = 31;         // pool_before + pool_after
constexpr uint32_t kAllLanes = 0xffffffffu;

// The part of a list that a CTA owns. Places are those of the last score in a pooled window: a candidate's position
// plus `after`. A word has a bit for each of 32 neighbouring places; word 0 is the one before the slice, whose scores
// windows reach.
struct Slice {
  const float* scores;  // of the list
  int32_t request;
  int32_t reach;
  int32_t after;
  int32_t from;  // places of the list whose scores count
  int32_t to;
  int32_t begin;  // places of the list that are ranked
  int32_t end;
  int32_t first;  // place of word 1, at a multiple of 128 bytes
  int32_t words;  // from word 1 on

  // Of a list of `length` scores, what the cta-th of a cluster owns.
  __device__ __forceinline__ Slice(const VegasSelectParams& p, const float* scores, const Quota& quota, int32_t length,
                                   int32_t request, bool pooled, int32_t cta, int32_t cluster_bits)
      : scores(scores), request(request), reach(p.pool_before + p.pool_after), after(p.pool_after) {
    begin = quota.begin + after, end = quota.end + after;
    from = pooled ? 0 : begin, to = pooled ? length : end;
    const int32_t origin = begin - static_cast<int32_t>((reinterpret_cast<uintptr_t>(scores) / 4 + begin) % 32);
    const int32_t all = (end - origin + 31) / 32, share = (all + (1 << cluster_bits) - 1) >> cluster_bits;
    first = origin + 32 * cta * share;
    words = larger(smaller(share, all - cta * share), 0);
  }

  __device__ __forceinline__ const float* at(int32_t place) const {
    __builtin_assume(__isGlobal(scores));
    return scores + place;
  }
  __device__ __forceinline__ int32_t place_of(int32_t bit) const { return first - 32 + bit; }
  __device__ __forceinline__ int32_t stop() const { return first + 32 * words; }
};

// What memory holds now, not what this multiprocessor has read before.
__device__ __forceinline__ int32_t load_current(const int32_t* word) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Has the L2 cache, and the translation of addresses, ready for what is read soon.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_of_thread() { return threadIdx.x % 32; }
__device__ __forceinline__ int threads() { return blockDim.x; }
__device__ __forceinline__ int warps() { return blockDim.x / 32; }

__device__ __forceinline__ float score_at_place(const Slice& slice, int32_t place) {
  return place >= slice.from && place < slice.to ? *slice.at(place) : negative_infinity();
}

// A lane's scores of a row: 4 neighbours in either half.
__device__ __forceinline__ int32_t place_in_row(uint32_t lane, uint32_t i) {
  return kRow / 2 * (i / 4) + 4 * lane + i % 4;
}

// Where a lane reads rows of the slice; places are counted from its first.
struct Rows {
  const float* scores;  // the lane's first of the first row
  int32_t begin;        // places whose scores count
  int32_t end;

  __device__ __forceinline__ explicit Rows(const Slice& slice) {
    scores = slice.at(slice.first + 4 * lane_of_thread());
    begin = slice.from - slice.first, end = smaller(slice.to, slice.stop()) - slice.first;
  }

  __device__ __forceinline__ void load(float (&x)[kRowWords], int32_t row_begin) const {
    const float* const at = scores + row_begin;
    if (row_begin >= begin && row_begin + kRow <= end) {
      const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + kRow / 2);
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
#pragma unroll
      for (int i = 0; i < kRowWords; ++i) {
        const int32_t place = row_begin + place_in_row(lane_of_thread(), i);
        x[i] = place >= begin && place < end ? at[place_in_row(0, i)] : negative_infinity();
      }
    }
  }
};

// Places whose window contains one of a set.
__device__ __forceinline__ uint32_t widened(const uint32_t* words, int32_t word, int32_t reach) {
  uint32_t low = words[word - 1], high = words[word];
#pragma unroll
  for (int32_t covered = 1; covered < 32; covered *= 2) {
    if (covered > reach) break;
    const int32_t step = smaller(covered, reach + 1 - covered);
    high |= __funnelshift_l(low, high, step);
    low |= low << step;
  }
  return high;
}

// Bits of a lane's scores of a row, in the lower half of every byte those of the row's first half, become those of 8
// neighbouring places: of the first half in even lanes.
__device__ __forceinline__ uint32_t neighbours(uint32_t bits) {
  const uint32_t other = __shfl_xor_sync(kAllLanes, bits, 1);
  const bool odd = lane_of_thread() & 1;
  return ((odd ? other >> 4 : bits) & 0x0f0f0f0fu) | ((odd ? bits : other << 4) & 0xf0f0f0f0u);
}

__device__ __forceinline__ uint32_t bits_from(int32_t bit) {
  return bit <= 0 ? kAllLanes : bit < 32 ? kAllLanes << bit : 0;
}

// Ranked places of a word, given which scores are selectable.
__device__ __forceinline__ uint32_t ranked_places(const Slice& slice, const uint32_t* selectable, int32_t word,
                                                  int32_t after) {
  const int32_t from = slice.place_of(32 * word);
  return __funnelshift_l(selectable[word - 1], selectable[word], after) & bits_from(slice.begin - from) &
         ~bits_from(smaller(slice.end, slice.stop()) - from);
}

}  // namespace vegas_ops::selection::hopper
