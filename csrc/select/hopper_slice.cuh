// The part of a list that a CTA reads: where it lies, and how windows are pooled on its way through registers.
#pragma once

#include <cuda_runtime.h>

#include "select/plan.h"

namespace vegas_ops::selection::hopper {

constexpr int kThreadBits = 9;
constexpr int kThreads = 1 << kThreadBits;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = kWarps;  // a warp sends a histogram to one CTA
constexpr int kGroup = 4;            // neighbouring places of a lane: 16 bytes
constexpr int kMaxReach = 8;         // pool_before + pool_after: what the two groups before a score hold
constexpr uint32_t kAllLanes = 0xffffffffu;

// A warp reads a row at a time. Where windows are pooled, its first lanes read groups of the row before.
constexpr int halo_lanes(int reach) { return reach > 0 ? 2 : 0; }
constexpr int row_places(int reach) { return kGroup * (32 - halo_lanes(reach)); }

// The part of a list that a CTA owns. Places are those of the last score in a pooled window: a candidate's position
// plus `after`. Groups of 4 places from `first` on lie at multiples of 16 bytes.
struct Slice {
  int64_t offset;  // of the list's first score
  int32_t request;
  int32_t length;  // of the scores
  int32_t width;   // of their row in memory
  int32_t after;
  int32_t begin;  // places of the list that are ranked
  int32_t end;
  int32_t first;
  int32_t rows;        // the warps take turns
  int32_t last_group;  // the place of the last group that the list's memory holds whole
};

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_of_thread() { return threadIdx.x % 32; }

// 16 aligned bytes may be read where the list begins within them.
__device__ __forceinline__ void load_group(float4& group, const float* scores, int32_t place, int32_t last_group) {
  if (place > -kGroup && place <= last_group) group = *reinterpret_cast<const float4*>(scores + place);
}

// Corrects a group at an end of the list for what lies outside.
__device__ __forceinline__ void trim_group(float4& group, const Slice& slice, const float* scores, int32_t place) {
  if (place > slice.last_group && place < slice.width) {
#pragma unroll 1
    for (int i = 0; i < kGroup; ++i) {
      const float score = place + i < slice.width ? scores[place + i] : negative_infinity();
      group = make_float4(group.y, group.z, group.w, score);
    }
  }
  const auto inside = [&](int i) { return static_cast<uint32_t>(place + i) < static_cast<uint32_t>(slice.length); };
  if (!inside(0)) group.x = negative_infinity();
  if (!inside(1)) group.y = negative_infinity();
  if (!inside(2)) group.z = negative_infinity();
  if (!inside(3)) group.w = negative_infinity();
}

// Maxima of the last 1, 2, 3 and 4 scores of a group. NaN is ignored beside numbers.
struct Tails {
  float of[kGroup];

  __device__ __forceinline__ explicit Tails(const float4& x) {
    of[0] = x.w;
    of[1] = fmaxf(x.z, x.w);
    of[2] = fmaxf(x.y, of[1]);
    of[3] = fmaxf(x.x, of[2]);
  }
};

// Maxima over the last kReach + 1 scores, for the four places of a group, in place.
template <int kReach>
__device__ __forceinline__ void pool(float (&x)[kGroup], const Tails& own) {
  float near[kGroup], far[kGroup];  // the same of the group before, and of the one before that
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const int count = i + 1;
    if (count == 4 ? kReach >= 4 : kReach >= count && kReach <= count + 3) {
      near[i] = __shfl_up_sync(kAllLanes, own.of[i], 1);
    }
    if (kReach - 4 >= count && kReach - 4 <= count + 3) far[i] = __shfl_up_sync(kAllLanes, own.of[i], 2);
  }
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    float most = i == 3 && kReach >= 3 ? own.of[3] : x[i];
#pragma unroll
    for (int back = 1; back <= i && back <= kReach && (i < 3 || kReach < 3); ++back) most = fmaxf(most, x[i - back]);
    const int missing = kReach - i;
    if (missing > 0) most = fmaxf(most, near[missing < 4 ? missing - 1 : 3]);
    if (missing > 4) most = fmaxf(most, far[missing - 5]);
    x[i] = most;
  }
}

// Replaces what says whether a place is selectable, its score, by that `after` places earlier.
__device__ __forceinline__ void delay(float (&itself)[kGroup], int32_t after) {
  const float low = negative_infinity();
  uint32_t bits = (itself[3] > low) | (itself[2] > low) << 1 | (itself[1] > low) << 2 | (itself[0] > low) << 3;
  bits |= __shfl_up_sync(kAllLanes, bits, 1) << 4 | __shfl_up_sync(kAllLanes, bits, 2) << 8;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) itself[i] = bits >> after & (8 >> i) ? 0 : low;
}

}  // namespace vegas_ops::selection::hopper
