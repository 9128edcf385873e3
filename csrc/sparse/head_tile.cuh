// What a warp does with one tile of 16 keys: fragments and products of m16n8k16 with the keys, or the columns of V, on
// the 16 side and up to 8 query heads of a group on the 8 side, and their softmax. Lane l holds rows l / 4 (and + 8) of
// an accumulator and heads 2 * (l % 4) + {0, 1}.
#pragma once

#include "common/paged_attention.cuh"
#include "sparse/request.cuh"

namespace vegas_ops::portable {

// One kernel: query type, whether the cache is fp8_e4m3, the padded head dimension, tiles of 8 query heads, and the
// calls.
template <class Element_, bool kFp8_, int kHeadDim_, int kHeadTiles_, Calls kCalls_ = Calls::kAny>
struct HeadTraits {
  static constexpr Calls kCalls = kCalls_;
  using Element = Element_;
  // Weights and an fp8 V meet as fp16, which holds fp8_e4m3 exactly and takes one conversion.
  using Weight = std::conditional_t<kFp8_, __half, Element_>;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadTiles = kHeadTiles_;
  static constexpr int kHeads = 8 * kHeadTiles;
  static constexpr int kCacheBytes = kFp8 ? 1 : 2;
  static constexpr int kSegments = kHeadDim * kCacheBytes / 16;  // 16-byte segments of a cache row
  static constexpr int kTileBytes = kTileKeys * kSegments * 16;
  static constexpr int kStageBytes = 2 * kTileBytes;  // K and V
  static constexpr int kSteps = kHeadDim / 16;
  // Parts of 32 keys that are looked up at once, and partial results that are on their way: registers are short.
  static constexpr int kParts = kHeadDim == 64 ? 3 : kHeadDim == 128 && kHeadTiles == 1 ? 2 : 1;
  static constexpr int kChunkBatch = kHeadDim == 64 || kHeadTiles == 2 ? 4 : 8;
  __device__ static int head_dim(const VegasPagedCache& cache) {
    return kCalls == Calls::kAny ? cache.head_dim : kHeadDim;
  }
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "head dimensions are padded to 64, 128 or 256");
};

// The transpose of an 8 x 8 matrix of 16-bit elements.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// The query heads of one KV head as B operands, in the order of columns that ldmatrix makes of the keys.
template <class T>
struct HeadQuery {
  uint32_t words[T::kHeadTiles][T::kSteps][2];

  __device__ __forceinline__ HeadQuery(const typename T::Element* q, int64_t stride_head, int heads, int head_dim) {
    if (T::kCalls != Calls::kAny || ((reinterpret_cast<uintptr_t>(q) | (stride_head * 2)) & 3) == 0) {
      load<uint32_t>(q, stride_head, heads, head_dim);
    } else {
      load<uint16_t>(q, stride_head, heads, head_dim);
    }
  }

  // In words, or in pairs of half words.
  template <class Unit>
  __device__ __forceinline__ void load(const typename T::Element* q, int64_t stride_head, int heads, int head_dim) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < T::kHeadTiles; ++m) {
      const int head = 8 * m + lane / 4;
#pragma unroll
      for (int k = 0; k < T::kSteps; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = 16 * k + (T::kFp8 ? 4 * (lane % 4) + 2 * half : 2 * (lane % 4) + 8 * half);
          const Unit* pair = reinterpret_cast<const Unit*>(q + head * stride_head + d);
          uint32_t word = 0;
          if (head < heads && d < head_dim) {
            word = pair[0];
            if constexpr (sizeof(Unit) == 2) word |= uint32_t{pair[1]} << 16;
          }
          words[m][k][half] = word;
        }
      }
    }
  }
};

// scores[m][i]: raw product of key l / 4 + 8 * (i / 2) and head 8 * m + 2 * (l % 4) + i % 2.
template <class T>
__device__ __forceinline__ void multiply_keys(float (&scores)[T::kHeadTiles][4], const HeadQuery<T>& query,
                                              const char* k_tile) {
  const int lane_offset = key_lane_offset<T>();
  float chains[2][T::kHeadTiles][4] = {};
#pragma unroll
  for (int segment = 0; segment < T::kSegments; segment += 2) {
    uint32_t r[4];
    load_matrices(r, k_tile + stepped(lane_offset, segment));
#pragma unroll
    for (int h = 0; h < (T::kFp8 ? 2 : 1); ++h) {
      const int step = T::kFp8 ? segment + h : segment / 2;
      const uint32_t a[4] = {key_word<T>(r, 0, h, 0), key_word<T>(r, 1, h, 0), key_word<T>(r, 0, h, 1),
                             key_word<T>(r, 1, h, 1)};
#pragma unroll
      for (int m = 0; m < T::kHeadTiles; ++m) {
        mma<typename T::Element>(chains[step % 2][m], a, query.words[m][step][0], query.words[m][step][1]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < T::kHeadTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[m][i] = chains[0][m][i] + chains[1][m][i];
  }
}

// A warp's running softmax over the keys of one row tile.
template <class T>
struct HeadState {
  static constexpr float kHeadroom = 8.0f;  // log2 of the largest weight

  float output[T::kHeadTiles][T::kSteps][4];  // V's columns as the rows
  // Weights are relative to this, in log2 units. It follows the maximum when a weight would exceed 2^kHeadroom: the
  // output is rarely rescaled.
  float reference[T::kHeadTiles][2];
  float sum[T::kHeadTiles][2];  // of this lane's keys

  __device__ HeadState() {
#pragma unroll
    for (int m = 0; m < T::kHeadTiles; ++m) {
#pragma unroll
      for (int t = 0; t < T::kSteps; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][t][i] = 0.0f;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        reference[m][e] = -INFINITY;
        sum[m][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void follow(const float (&x)[T::kHeadTiles][4], float scale) {
#pragma unroll
    for (int m = 0; m < T::kHeadTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(x[m][e], x[m][2 + e]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        const float now = fmaxf(reference[m][e], top * scale);
        // A head that has seen no key yet keeps -inf, which must not meet -inf in a difference.
        const float rescale = exp2_approx(reference[m][e] - (now == -INFINITY ? 0.0f : now));
        reference[m][e] = now;
        sum[m][e] *= rescale;
#pragma unroll
        for (int t = 0; t < T::kSteps; ++t) {
          output[m][t][e] *= rescale;
          output[m][t][2 + e] *= rescale;
        }
      }
    }
  }

  // Turns x * scale (log2 units, scale > 0) into weights, the B operand over the tile's keys.
  __device__ __forceinline__ void weigh(const float (&x)[T::kHeadTiles][4], float scale,
                                        uint32_t (&weights)[T::kHeadTiles][2]) {
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < T::kHeadTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        exceeds = exceeds || fmaxf(x[m][e], x[m][2 + e]) * scale > reference[m][e] + kHeadroom;
      }
    }
    if (__any_sync(0xffffffffu, exceeds)) follow(x, scale);
#pragma unroll
    for (int m = 0; m < T::kHeadTiles; ++m) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float base = reference[m][e] == -INFINITY ? 0.0f : reference[m][e];
#pragma unroll
        for (int i = 0; i < 2; ++i) p[2 * i + e] = exp2_approx(fmaf(x[m][2 * i + e], scale, -base));
        sum[m][e] += p[e] + p[2 + e];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) weights[m][i] = transposed(pack<typename T::Weight>(p[2 * i], p[2 * i + 1]));
    }
  }

  // output += V * weights
  __device__ __forceinline__ void accumulate(const uint32_t (&weights)[T::kHeadTiles][2], const char* v_tile) {
    const int lane_offset = key_lane_offset<T>();
#pragma unroll
    for (int segment = 0; segment < T::kSegments; segment += 2) {
      uint32_t r[4];
      load_matrices_transposed(r, v_tile + stepped(lane_offset, segment));
      if constexpr (T::kFp8) {
        // Each register holds two neighbouring columns of two keys: the even column is a row of one product, the odd
        // one of the next (column undoes this).
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[i] = widen_fp8<typename T::Weight>(__byte_perm(r[i], 0, odd ? 0x4431 : 0x4420));
          }
#pragma unroll
          for (int m = 0; m < T::kHeadTiles; ++m) {
            mma<typename T::Weight>(output[m][segment + odd], a, weights[m][0], weights[m][1]);
          }
        }
      } else {
#pragma unroll
        for (int m = 0; m < T::kHeadTiles; ++m) {
          mma<typename T::Weight>(output[m][segment / 2], r, weights[m][0], weights[m][1]);
        }
      }
    }
  }

  // Head-dimension index of row 8 * half + i of an output tile.
  __device__ __forceinline__ static int column(int t, int half, int i) {
    return T::kFp8 ? 32 * (t / 2) + 16 * half + 2 * i + t % 2 : 16 * t + 8 * half + i;
  }

  // The sum over all keys, in every lane.
  __device__ __forceinline__ RowNorm norm(int m, int e) const {
    float all = sum[m][e];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
    return {reference[m][e], all};
  }
};

// Place of a row's column among rows of floats in shared memory; the XOR spreads heads over banks.
template <class T>
__device__ __forceinline__ int row_place(int row, int d) {
  return row * T::kHeadDim + (d ^ (row / 2 % 4 * 8));
}

// Writes heads [8 * m, 8 * m + 8) of a warp, those below `heads`, to shared memory, the first one to row 0.
template <class T>
__device__ __forceinline__ void write_heads(const HeadState<T>& state, int m, int heads, float* rows, float2* norms) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = 2 * (lane % 4) + e;
    const RowNorm norm = state.norm(m, e);
    if (8 * m + row >= heads) continue;
    if (lane < 4) norms[row] = make_float2(norm.maximum, norm.sum);
#pragma unroll
    for (int t = 0; t < T::kSteps; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[row_place<T>(row, state.column(t, half, lane / 4))] = state.output[m][t][2 * half + e];
      }
    }
  }
}

}  // namespace vegas_ops::portable
