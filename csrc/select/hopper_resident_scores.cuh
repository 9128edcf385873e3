// Scores of a thread of the resident selection: loading them, pooling their windows, numbering them in bins.
#pragma once

#include <cuda_runtime.h>
#include <float.h>

#include <cute/arch/copy_sm80.hpp>

#include "select/hopper_bracket.cuh"

namespace vegas_ops::selection::hopper::resident {

constexpr int kGroup = 8;  // neighbouring scores that are loaded, and pooled, together
constexpr int kMostReach = kGroup - 1;
constexpr int kMostRows = 3;  // of a warp's groups
constexpr int kSampleBins = 128;

// x[i] becomes the maximum of the last kReach + 1 scores before and at i. Those before are the previous lane's, and for
// lane 0 the halo, which lane 31 has.
template <int kReach>
__device__ __forceinline__ void pool(float (&x)[kGroup], const float* halo) {
  const int lane = lane_of_thread();
  float tail[kGroup];  // maxima of the last m scores
  float before_warp = halo[kGroup - 1];
  tail[1] = x[kGroup - 1];
#pragma unroll
  for (int m = 2; m <= kReach; ++m) tail[m] = fmaxf(tail[m - 1], x[kGroup - m]);
#pragma unroll
  for (int m = 1; m <= kReach; ++m) {
    if (m > 1) before_warp = fmaxf(before_warp, halo[kGroup - m]);
    tail[m] = __shfl_sync(kAllLanes, lane == 31 ? before_warp : tail[m], lane - 1 & 31);
  }
  // Windows within the group all contain x[kReach], or lie behind it.
  float most[kGroup];
  float through = x[kReach];
  most[kReach] = through;
#pragma unroll
  for (int i = kReach - 1; i >= 0; --i) most[i] = fmaxf(most[i + 1], x[i]);
  float pooled[kGroup];
  pooled[kReach] = most[0];
#pragma unroll
  for (int i = kReach + 1; i < kGroup; ++i) {
    through = i == kReach + 1 ? x[i] : fmaxf(through, x[i]);
    pooled[i] = i - kReach <= kReach ? fmaxf(most[i - kReach], through) : through;
  }
  if (2 * kReach + 1 < kGroup) {
    // Short windows that do not contain x[kReach].
#pragma unroll
    for (int i = 2 * kReach + 1; i < kGroup; ++i) {
      pooled[i] = x[i];
#pragma unroll
      for (int m = 1; m <= kReach; ++m) pooled[i] = fmaxf(pooled[i], x[i - m]);
    }
  }
  float before = x[0];
#pragma unroll
  for (int i = 0; i < kReach; ++i) {
    if (i) before = fmaxf(before, x[i]);
    pooled[i] = fmaxf(before, tail[kReach - i]);
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = pooled[i];
}

// The same for a reach of 1 to kMostReach.
__device__ __forceinline__ void pool_windows(float (&x)[kGroup], const float* halo, int reach) {
  switch (reach) {
    case 1:
      return pool<1>(x, halo);
    case 2:
      return pool<2>(x, halo);
    case 3:
      return pool<3>(x, halo);
    case 4:
      return pool<4>(x, halo);
    case 5:
      return pool<5>(x, halo);
    case 6:
      return pool<6>(x, halo);
    default:
      return pool<kMostReach>(x, halo);
  }
}

// The 8 scores from `position` on, which is at a multiple of 32 bytes; -inf outside the list.
__device__ __forceinline__ void load_group(float (&x)[kGroup], const float* scores, int32_t position, int32_t length) {
  if (position >= 0 && position + kGroup <= length) {
    const float4* from = reinterpret_cast<const float4*>(scores + position);
    const float4 a = from[0], b = from[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      x[i] = position + i >= 0 && position + i < length ? scores[position + i] : negative_infinity();
    }
  }
}

// The same into shared memory, by copies that take no register.
__device__ __forceinline__ void stage_group(float* to, const float* scores, int32_t position, int32_t length) {
  if (position >= 0 && position + kGroup <= length) {
    const cute::uint128_t* from = reinterpret_cast<const cute::uint128_t*>(scores + position);
#pragma unroll
    for (int i = 0; i < kGroup / 4; ++i) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(from[i], reinterpret_cast<cute::uint128_t*>(to)[i]);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kGroup; ++i) {
    to[i] = position + i >= 0 && position + i < length ? scores[position + i] : negative_infinity();
  }
}

// Numbers scores in bins of equal width, at first of values, then of keys. Larger scores have no smaller number.
struct Bins {
  bool by_key = false;
  float low, scale;
  uint32_t least, most;
  int shift;

  // From 1 for `from` to kAbove - 1 for `to`.
  __device__ __forceinline__ static Bins of_values(float from, float to) {
    Bins bins;
    bins.low = from;
    const float width = (.5f * to - .5f * from) * (static_cast<float>(kAbove) / (kAbove - 2));
    bins.scale = fmaxf(fminf(__fdividef(.5f, width), FLT_MAX), FLT_MIN);
    return bins;
  }
  __device__ __forceinline__ static Bins of_keys(uint32_t least, uint32_t most) {
    Bins bins;
    bins.by_key = true;
    bins.least = least, bins.most = most;
    bins.shift = bin_shift(most - least, kAbove - 2, 8);
    return bins;
  }

  // A value's bin as a whole number from kUnit on. Saturation takes no instruction, as other limits would.
  static constexpr float kUnit = 8388608;  // 2^23: a float's last bit counts 1 from here
  __device__ __forceinline__ float position(float x) const {
    return fmaf(__saturatef(fmaf(x - low, scale, 1.f / kAbove)), kAbove, kUnit);
  }
  // 0 is not counted.
  __device__ __forceinline__ uint32_t of_value(float x) const {
    return __float_as_uint(position(x)) - __float_as_uint(kUnit);
  }
  __device__ __forceinline__ uint32_t of_key(float x) const {
    const uint32_t key = order_key(__float_as_uint(x));
    return key < least || key > most ? 0 : 1 + (key - least >> shift);
  }
  // The first and the last bin take what lies beyond.
  __device__ __forceinline__ uint32_t of_key_within(float x) const {
    return 1 + (min(max(order_key(__float_as_uint(x)), least), most) - least >> shift);
  }

  __device__ __forceinline__ uint32_t operator()(float x) const { return by_key ? of_key(x) : of_value(x); }
};

}  // namespace vegas_ops::selection::hopper::resident
