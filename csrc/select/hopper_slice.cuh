// The part of a list that a CTA keeps in shared memory: loaded, pooled, and its masks of scores.
#pragma once

#include <cuda_runtime.h>

#include <cute/arch/copy_sm80.hpp>

#include "select/plan.h"

namespace vegas_ops::selection::hopper {

constexpr int kThreadBits = 9;
constexpr int kThreads = 1 << kThreadBits;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = kWarps;  // a warp sends a histogram to one CTA
constexpr int kShortestRunBits = 2;  // scores: one 16-byte group
constexpr int kLongestRunBits = 5;   // a bit each in one mask
constexpr int kMaxReach = 8;         // pool_before + pool_after: what the two groups before a score hold
constexpr uint32_t kAllLanes = 0xffffffffu;

// The part of a list that a CTA owns. Places are those of the last score in a pooled window: a candidate's position
// plus `after`. Groups of 4 places from `first` on lie at multiples of 16 bytes.
struct Slice {
  const float* scores;
  int32_t length;  // of the scores
  int32_t after;
  int32_t begin;  // places of the list that are ranked
  int32_t end;
  int32_t first;
  int32_t groups;  // of 4 scores, in a run
};

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_of_thread() { return threadIdx.x % 32; }

__device__ __forceinline__ float4 load_group(const Slice& slice, int32_t place) {
  if (place >= 0 && place + 4 <= slice.length) return *reinterpret_cast<const float4*>(slice.scores + place);
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = place + i >= 0 && place + i < slice.length ? slice.scores[place + i] : negative_infinity();
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

// Where a slice keeps a group: 8 neighbouring threads read one group of their runs each from different banks.
__device__ __forceinline__ int slot_of(const Slice& slice, int group) {
  return group ^ ((group >> 3) & (slice.groups - 1));
}

// Starts to load a slice. A warp loads what its own threads will read.
__device__ __forceinline__ void load_slice(const Slice& slice, float4* scores) {
  int group = 32 * slice.groups * warp_of_thread() + lane_of_thread();
#pragma unroll 1
  for (int i = 0; i < slice.groups; ++i, group += 32) {
    const int32_t place = slice.first + 4 * group;
    if (place >= slice.end) break;
    float4* to = scores + slot_of(slice, group);
    if (place >= 0 && place + 4 <= slice.length) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
          *reinterpret_cast<const cute::uint128_t*>(slice.scores + place), *reinterpret_cast<cute::uint128_t*>(to));
    } else {
      *to = load_group(slice, place);
    }
  }
  cute::cp_async_fence();
}

// Maxima over the last kReach + 1 scores, for the four places of the last group. NaN is ignored beside numbers.
template <int kReach>
__device__ __forceinline__ float4 window_maxima(const float4& older, const float4& old, const float4& own) {
  if (kReach == 0) return own;
  const float x[12] = {older.x, older.y, older.z, older.w, old.x, old.y, old.z, old.w, own.x, own.y, own.z, own.w};
  float most[4];
  if (kReach < 3) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      most[i] = x[8 + i];
#pragma unroll
      for (int back = 1; back <= kReach; ++back) most[i] = fmaxf(most[i], x[8 + i - back]);
    }
  } else {
    // What all four windows share, and what the first and the last of them have beside it.
    constexpr int kOldest = kReach < 3 ? 0 : 8 - kReach;
    float shared = x[8];
#pragma unroll
    for (int i = kOldest + 3; i < 8; ++i) shared = fmaxf(shared, x[i]);
    const float left = fmaxf(x[kOldest + 1], x[kOldest + 2]), right = fmaxf(x[9], x[10]);
    most[0] = fmaxf(shared, fmaxf(left, x[kOldest]));
    most[1] = fmaxf(shared, fmaxf(left, x[9]));
    most[2] = fmaxf(shared, fmaxf(x[kOldest + 2], right));
    most[3] = fmaxf(shared, fmaxf(right, x[11]));
  }
  return make_float4(most[0], most[1], most[2], most[3]);
}

// Bits of the selectable scores of a group, the last in bit 0.
__device__ __forceinline__ uint32_t selectable_bits(const float4& x) {
  const float low = negative_infinity();
  return (x.w > low) | (x.z > low) << 1 | (x.y > low) << 2 | (x.x > low) << 3;
}

// Pools a slice in place, once it is loaded, and returns the mask of this thread's ranked scores >= `floor`.
// kReach 0 leaves pooled scores as they are.
template <int kReach>
__device__ __forceinline__ uint32_t score_slice(const Slice& slice, float4* scores, float floor) {
  const int group = slice.groups * threadIdx.x, warp_group = 32 * slice.groups * warp_of_thread();
  const float low = negative_infinity();
  float4 older = make_float4(low, low, low, low), old = older;
  // Two groups before the run; those of another warp come from memory.
  const bool own_old = group - 1 >= warp_group, own_older = group - 2 >= warp_group;
  if (kReach > 0 && !own_old) old = load_group(slice, slice.first + 4 * (group - 1));
  if (kReach > 4 && !own_older) older = load_group(slice, slice.first + 4 * (group - 2));
  cute::cp_async_wait<0>();
  __syncwarp();
  if (kReach > 0) {
    if (own_old) old = scores[slot_of(slice, group - 1)];
    if (kReach > 4 && own_older) older = scores[slot_of(slice, group - 2)];
    __syncwarp();  // nobody pools what another still has to read
  }
  const int32_t place = slice.first + 4 * group;
  if (place >= slice.end) return 0;
  uint32_t mask = 0, history = selectable_bits(older) << 4 | selectable_bits(old);
#pragma unroll 2
  for (int i = 0; i < slice.groups; ++i) {
    float4& slot = scores[slot_of(slice, group + i)];
    const float4 own = slot;
    float4 most = window_maxima<kReach>(older, old, own);
    if (kReach == 0 || slice.after == 0) {
      most.x = own.x > low ? most.x : low;
      most.y = own.y > low ? most.y : low;
      most.z = own.z > low ? most.z : low;
      most.w = own.w > low ? most.w : low;
    } else {
      history = history << 4 | selectable_bits(own);
      const uint32_t own_bits = history >> slice.after;
      most.x = own_bits & 8 ? most.x : low;
      most.y = own_bits & 4 ? most.y : low;
      most.z = own_bits & 2 ? most.z : low;
      most.w = own_bits & 1 ? most.w : low;
    }
    if (kReach > 0) slot = most;
    const uint32_t bits = (most.x >= floor) | (most.y >= floor) << 1 | (most.z >= floor) << 2 | (most.w >= floor) << 3;
    mask |= bits << (4 * i);
    older = old;
    old = own;
  }
  const int from = larger(slice.begin - place, 0), to = smaller(slice.end - place, 4 * slice.groups);
  return to > from ? mask & (kAllLanes >> (32 - (to - from)) << from) : 0;
}

// Neighbouring scores tend to be chosen together. A lane therefore visits one score each of several runs, not those of
// its own: lanes then have about as many. This takes masks from one order to the other, by swapping bits with lanes
// among as many lanes as a run has scores.
__device__ __forceinline__ uint32_t reorder(const Slice& slice, uint32_t mask) {
  uint32_t low = 0x0000ffffu;
#pragma unroll
  for (int step = 16; step; step /= 2, low ^= low << step) {
    if (step >= 4 * slice.groups) continue;
    const uint32_t other = __shfl_xor_sync(kAllLanes, mask, step);
    mask = lane_of_thread() & step ? (mask & ~low) | (other >> step & low) : (mask & low) | (other & low) << step;
  }
  return mask;
}

// Calls visit(bit, key) for the scores that a reordered mask names.
template <class Visit>
__device__ __forceinline__ void visit_scores(const Slice& slice, const float4* scores, uint32_t mask, Visit visit) {
  const int offset = threadIdx.x & (4 * slice.groups - 1);
  const int first = slice.groups * (threadIdx.x - offset) + offset / 4;
  const float* at = reinterpret_cast<const float*>(scores) + offset % 4;
#pragma unroll 1
  for (; mask; mask &= mask - 1) {
    const int bit = __ffs(mask) - 1;
    visit(bit, order_key(__float_as_uint(at[4 * slot_of(slice, first + slice.groups * bit)])));
  }
}

}  // namespace vegas_ops::selection::hopper
