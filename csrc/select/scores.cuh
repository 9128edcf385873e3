// Scores of the candidates on the GPU: planes of a dump summed, windows pooled. Plain streaming kernels
// whose grid does not depend on lengths; CTAs beyond a list's length return at once.
#pragma once

#include "select/plan.h"
#include "select/wave.h"

namespace vegas_ops::selection {

constexpr int kScoreThreads = 256;
constexpr int kTile = 4 * kScoreThreads;  // positions that a CTA scores at once
constexpr int kNorms = 256;               // normalisers kept in shared memory

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ bool aligned_to(const void* pointer, int64_t stride_a, int64_t stride_b, int bytes) {
  return ((reinterpret_cast<uintptr_t>(pointer) | stride_a | stride_b) & (bytes - 1)) == 0;
}

// fp32, and bf16 as its bits.
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

__device__ __forceinline__ void load4(const float* from, float (&x)[4]) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

__device__ __forceinline__ void load4(const uint16_t* from, float (&x)[4]) {
  const uint2 v = *reinterpret_cast<const uint2*>(from);
  x[0] = __uint_as_float(v.x << 16), x[1] = __uint_as_float(v.x & 0xffff0000u);
  x[2] = __uint_as_float(v.y << 16), x[3] = __uint_as_float(v.y & 0xffff0000u);
}

__device__ __forceinline__ float log_add_exp(float a, float b) {
  const float most = fmaxf(a, b), least = fminf(a, b);
  if (isnan(a) || isnan(b)) return a + b;
  return isinf(most) ? most : most + log1pf(expf(least - most));
}

// Natural log of what a plane's weights are divided by.
__device__ __forceinline__ float normaliser(const VegasSelectParams& p, const Planes& planes, int32_t row,
                                            int32_t head) {
  const int64_t at = planes.norm_offset + row * planes.norm_row_stride + head * planes.norm_head_stride;
  if (p.dump == VEGAS_DUMP_KV_HEAD) return p.guide_lse[at];
  return p.sinks ? log_add_exp(p.lse[at], p.sinks[planes.sink_offset + head]) : p.lse[at];
}

// Running sums of 4 neighbouring positions, and the least logit of each: -inf in any plane makes a
// candidate unselectable, whatever its sum.
struct Sums {
  float sum[4];
  float least[4];

  template <bool kWeights>
  __device__ __forceinline__ void add(const float (&logits)[4], float norm) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] += kWeights ? expf(logits[i] - norm) : logits[i];
      least[i] = fminf(least[i], logits[i]);
    }
  }
};

// Adds `count` planes, starting with the head-th of a row at `plane`; rows follow each other.
template <class T, bool kVector, bool kWeights>
__device__ __forceinline__ void add_planes(Sums& sums, const T* plane, const Planes& planes, int32_t head,
                                           int32_t count, int32_t valid, const float* norms) {
#pragma unroll 8
  for (int32_t i = 0; i < count; ++i) {
    float logits[4];
    if (kVector) {
      load4(plane, logits);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) logits[j] = j < valid ? widen(plane[j]) : 0;
    }
    sums.add<kWeights>(logits, kWeights ? norms[i] : 0);
    plane += planes.head_stride;
    if (++head == planes.heads) {
      head = 0;
      plane += planes.row_stride - planes.heads * planes.head_stride;
    }
  }
}

// Launched so, a kernel starts while the one before it ends, and lets the next one do the same.
__device__ __forceinline__ void take_turn() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// CTAs of a multiprocessor that registers suffice for; with a fourth the compiler spills from sm_100 on.
constexpr int sum_ctas(int wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return wanted < 3 ? wanted : 3;
#else
  return wanted;
#endif
}

// The sums of a wave's lists, to `rows` (lists, row_stride) or, where that is NULL, to p.sums.
template <class T, int kCtas>
__global__ void __launch_bounds__(kScoreThreads, sum_ctas(kCtas))
    sum_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, float* rows) {
  __shared__ float norms[kNorms];
  const int32_t index = blockIdx.x / wave.ctas;
  take_turn();
  const List list = list_at(p, wave.first + index);
  const int32_t length = candidates(p, list.request), first_tile = (blockIdx.x % wave.ctas) * kTile;
  if (first_tile >= length) return;
  const Planes planes = planes_of(p, list);
  float* out = rows ? rows + index * wave.stride
                    : p.sums + list.layer * p.sums_stride_layer + list.request * p.sums_stride_batch;
  const bool weights = uses_weights(p);
  const T* base = static_cast<const T*>(p.logits) + planes.offset;
  const bool vector = aligned_to(base, planes.row_stride * sizeof(T), planes.head_stride * sizeof(T), 4 * sizeof(T));
  const int32_t num_planes = planes.rows * planes.heads;

  for (int32_t tile = first_tile; tile < length; tile += wave.ctas * kTile) {
    const int32_t position = tile + 4 * threadIdx.x, valid = length - position;
    Sums sums;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums.sum[i] = num_planes ? 0 : negative_infinity();
      sums.least[i] = 0;
    }
    for (int32_t first = 0; first < num_planes; first += kNorms) {
      const int32_t count = smaller(num_planes - first, kNorms);
      if (weights) {
        __syncthreads();
        for (int32_t i = threadIdx.x; i < count; i += kScoreThreads) {
          norms[i] = normaliser(p, planes, (first + i) / planes.heads, (first + i) % planes.heads);
        }
        __syncthreads();
      }
      const int32_t head = first % planes.heads;
      const T* plane = base + position + first / planes.heads * planes.row_stride + head * planes.head_stride;
      if (vector && valid >= 4) {
        if (weights) {
          add_planes<T, true, true>(sums, plane, planes, head, count, 4, norms);
        } else {
          add_planes<T, true, false>(sums, plane, planes, head, count, 4, norms);
        }
      } else if (valid > 0) {
        if (weights) {
          add_planes<T, false, true>(sums, plane, planes, head, count, valid, norms);
        } else {
          add_planes<T, false, false>(sums, plane, planes, head, count, valid, norms);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < valid) out[position + i] = sums.least[i] == negative_infinity() ? negative_infinity() : sums.sum[i];
    }
  }
}

// Windows that a CTA can hold whole; wider ones have a middle that all of a tile's windows share.
constexpr int kWindow = 1024;
constexpr int kWindowSlots = kTile + kWindow - 1;
constexpr int kWindowRounds = (kWindowSlots + kScoreThreads - 1) / kScoreThreads;

__device__ __forceinline__ float selectable(const float* scores, int64_t position, int32_t length) {
  if (position < 0 || position >= length) return negative_infinity();
  const float score = scores[position];
  return isnan(score) ? negative_infinity() : score;
}

// window[i] = maximum of scores[start + i ... start + i + width), for i < kTile, by doubling.
__device__ __forceinline__ void window_maxima(const float* scores, int32_t length, int64_t start, int32_t width,
                                              float* window) {
  const int32_t slots = kTile + width - 1;
  __syncthreads();
  for (int32_t i = threadIdx.x; i < slots; i += kScoreThreads) window[i] = selectable(scores, start + i, length);
  __syncthreads();
  for (int32_t covered = 1; covered < width;) {
    const int32_t step = smaller(covered, width - covered);
    float maximum[kWindowRounds];
#pragma unroll
    for (int j = 0; j < kWindowRounds; ++j) {
      const int32_t i = threadIdx.x + j * kScoreThreads;
      if (i + step < slots) maximum[j] = fmaxf(window[i], window[i + step]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kWindowRounds; ++j) {
      const int32_t i = threadIdx.x + j * kScoreThreads;
      if (i + step < slots) window[i] = maximum[j];
    }
    __syncthreads();
    covered += step;
  }
}

// rows[i] = maximum over [i - before, i + after], or -inf where a candidate is unselectable itself.
__global__ void __launch_bounds__(kScoreThreads)
    pool_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, float* rows) {
  __shared__ float window[kWindowSlots];
  __shared__ float partial[kScoreThreads / 32];
  const int32_t index = blockIdx.x / wave.ctas;
  const List list = list_at(p, wave.first + index);
  const int32_t length = candidates(p, list.request), first_tile = (blockIdx.x % wave.ctas) * kTile;
  if (first_tile >= length) return;
  const Planes planes = planes_of(p, list);
  if (planes.rows == 0) return;
  const float* scores =
      wave.source ? wave.source + index * wave.stride : static_cast<const float*>(p.logits) + planes.offset;
  float* out = rows + index * wave.stride;
  const int64_t before = smaller(p.pool_before, length), after = smaller(p.pool_after, length);
  const int64_t width = before + after + 1;

  for (int32_t tile = first_tile; tile < length; tile += wave.ctas * kTile) {
    window_maxima(scores, length, tile - before, width < kWindow ? static_cast<int32_t>(width) : kWindow, window);
    float pooled[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pooled[j] = window[threadIdx.x + j * kScoreThreads];
    if (width > kWindow) {
      // Left end, right end, and between them what every window of the tile contains.
      window_maxima(scores, length, tile + after - (kWindow - 1), kWindow, window);
      float middle = negative_infinity();
      const int64_t from = tile + kTile - 1 - before, to = tile + after;
      for (int64_t i = (from < 0 ? 0 : from) + threadIdx.x; i <= to && i < length; i += kScoreThreads) {
        middle = fmaxf(middle, selectable(scores, i, length));
      }
#pragma unroll
      for (int offset = 16; offset; offset /= 2) middle = fmaxf(middle, __shfl_xor_sync(0xffffffffu, middle, offset));
      if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = middle;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kScoreThreads / 32; ++i) middle = fmaxf(middle, partial[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) pooled[j] = fmaxf(fmaxf(pooled[j], middle), window[threadIdx.x + j * kScoreThreads]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t i = tile + threadIdx.x + j * kScoreThreads;
      if (i < length) out[i] = order_key(__float_as_uint(scores[i])) ? pooled[j] : negative_infinity();
    }
  }
}

}  // namespace vegas_ops::selection
