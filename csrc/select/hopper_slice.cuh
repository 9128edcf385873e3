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

  __device__ __forceinline__ const float* at(int32_t place) const {
    __builtin_assume(__isGlobal(scores));
    return scores + place;
  }
  __device__ __forceinline__ int32_t place_of(int32_t bit) const { return first - 32 + bit; }
  __device__ __forceinline__ int32_t stop() const { return first + 32 * words; }
};

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_of_thread() { return threadIdx.x % 32; }
__device__ __forceinline__ int threads() { return blockDim.x; }
__device__ __forceinline__ int warps() { return blockDim.x / 32; }

__device__ __forceinline__ float score_at_place(const Slice& slice, int32_t place) {
  return place >= slice.from && place < slice.to ? *slice.at(place) : negative_infinity();
}

// The scores of a row of the slice at this lane's places, one in every word.
__device__ __forceinline__ void load_row(float (&x)[kRowWords], const Slice& slice, int row) {
  const int32_t from = slice.first + kRow * row, stop = slice.stop();
  const float* const at = slice.at(from + lane_of_thread());
  if (from >= slice.from && from + kRow <= smaller(slice.to, stop)) {
#pragma unroll
    for (int i = 0; i < kRowWords; ++i) x[i] = at[32 * i];
  } else {
#pragma unroll
    for (int i = 0; i < kRowWords; ++i) {
      const int32_t place = from + 32 * i + lane_of_thread();
      x[i] = place < stop ? score_at_place(slice, place) : negative_infinity();
    }
  }
}

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

// Bit i of lane k becomes bit k of lane i.
struct Transposition {
  uint32_t halves, bytes, turn[3], keep[3];

  __device__ __forceinline__ Transposition() {
    const int lane = threadIdx.x % 32;
    halves = lane & 16 ? 0x3276 : 0x5410;
    bytes = lane & 8 ? 0x3715 : 0x6240;
    constexpr uint32_t kLow[3] = {0x0f0f0f0fu, 0x33333333u, 0x55555555u};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int step = 4 >> i;
      turn[i] = lane & step ? 32 - step : step;
      keep[i] = lane & step ? ~kLow[i] : kLow[i];
    }
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t bits) const {
    bits = __byte_perm(bits, __shfl_xor_sync(kAllLanes, bits, 16), halves);
    bits = __byte_perm(bits, __shfl_xor_sync(kAllLanes, bits, 8), bytes);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, bits, 4 >> i);
      bits = (bits & keep[i]) | (__funnelshift_l(other, other, turn[i]) & ~keep[i]);
    }
    return bits;
  }
};

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
