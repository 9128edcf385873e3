// What a warp does with one tile of the cache in shared memory: fragments of m16n8k16 and the products.
// 16-bit and fp8 caches differ only here. Fragment positions follow the PTX description of mma.m16n8k16:
// lane l holds row l / 4 (and + 8) and columns 2 * (l % 4) + {0, 1} of an accumulator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <type_traits>

namespace vegas_ops::portable {

constexpr int kWarps = 4;  // that load keys
constexpr int kThreads = 32 * kWarps;
constexpr int kTileKeys = 16;  // keys that one warp loads per step
constexpr int kMaxStages = 4;

// Warps of a CTA that splits rows, at most. Two CTAs of that size share an SM, which bounds a thread's registers: 128
// for head dimensions up to 64, 168 up to 128.
__host__ __device__ constexpr int max_row_warps(int head_dim) { return head_dim <= 64 ? 8 : 6; }

// One attention kernel: query type, whether the cache is fp8_e4m3, the padded head dimension, how many 16-row
// tiles of packed query rows a warp holds, and whether the warps of a CTA share keys and split rows (at least
// kWarps of them, as the launch says), or share rows and split keys.
template <class Element_, bool kFp8_, int kHeadDim_, int kRowTiles_, bool kSplitRows_ = false>
struct Traits {
  using Element = Element_;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr bool kSplitRows = kSplitRows_;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kMaxWarps = kSplitRows ? max_row_warps(kHeadDim) : kWarps;
  static constexpr int kRows = kSplitRows ? kMaxWarps * kWarpRows : kWarpRows;  // of the largest CTA
  // Tiles of keys that a warp attends together.
  static constexpr int kKeyTiles = kSplitRows ? 2 : 1;
  static constexpr int kCacheBytes = kFp8 ? 1 : 2;
  static constexpr int kSegments = kHeadDim * kCacheBytes / 16;  // 16-byte segments of a cache row
  static constexpr int kTileBytes = kTileKeys * kSegments * 16;
  static constexpr int kStageBytes = kWarps * 2 * kTileBytes;  // K and V of all warps
  static constexpr int kQuerySegments = kHeadDim / 8;
  static constexpr int kColumnTiles = kHeadDim / 8;  // accumulator tiles of the output
  static constexpr bool kQueryInRegisters = kRowTiles * kHeadDim <= 128;
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "head dimensions are padded to 64, 128 or 256");
  static_assert(kRowTiles * kHeadDim <= 256, "the output accumulators must fit the register file");
};

template <class Element>
__device__ __forceinline__ float to_float(Element x) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half2float(x);
  } else {
    return __bfloat162float(x);
  }
}

template <class Element>
__device__ __forceinline__ Element from_float(float x) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
  } else {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
  }
}

// The two fp8 values in the low 16 bits, exactly.
template <class Element>
__device__ __forceinline__ uint32_t widen_fp8(uint32_t bits) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), __NV_E4M3);
  const uint32_t halves = static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
  if constexpr (std::is_same_v<Element, __half>) {
    return halves;
  } else {
    const float2 values = unpack<__half>(halves);
    return pack<Element>(values.x, values.y);
  }
}

// 2^x; denormal results are flushed to zero, which only drops weights below 2^-126 of the largest.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Byte offset of a segment of a row; the XOR spreads the 8 rows that ldmatrix reads over all banks.
template <int kSegments>
__device__ __forceinline__ int swizzled(int row, int segment) {
  const int key = kSegments >= 8 ? row & 7 : (row >> 1) & 3;
  return (row * kSegments + (segment ^ key)) * 16;
}

// The same for a row's segment + odd (0 | 1) with an even segment: of swizzled(row, odd), all that depends on
// the lane, only three bits change from segment to segment.
__device__ __forceinline__ int stepped(int swizzled_odd, int segment) {
  return (swizzled_odd ^ ((segment & 6) * 16)) + (segment & ~7) * 16;
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const char* address) {
  cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(address), r[0], r[1], r[2], r[3]);
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const char* address) {
  cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(address), r[0], r[1], r[2], r[3]);
}

template <class Element>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using Atom = std::conditional_t<std::is_same_v<Element, __half>, cute::SM80_16x8x16_F32F16F16F32_TN,
                                  cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}

// The query tile (kRows x kHeadDim) in shared memory. A register of ldmatrix holds 4 consecutive fp8 values,
// which become the pairs k = 2j and k = 2j + 8 of an operand; products do not depend on the order of k, so
// for fp8 caches the query's columns are stored in that order instead of shuffling every key.
template <class T>
struct QueryTile {
  char* data;

  // Stores columns [8 * chunk, 8 * chunk + 8) of a row.
  __device__ __forceinline__ void store(int row, int chunk, uint4 values) const {
    if constexpr (T::kFp8) {
      const uint32_t pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int segment = (chunk & ~1) + (i & 1);
        const int slot = 2 * (chunk & 1) + (i >> 1);
        *reinterpret_cast<uint32_t*>(data + swizzled<T::kQuerySegments>(row, segment) + 4 * slot) = pairs[i];
      }
    } else {
      *reinterpret_cast<uint4*>(data + swizzled<T::kQuerySegments>(row, chunk)) = values;
    }
  }

  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int row_tile, int k_step) const {
    const int lane = threadIdx.x & 31;
    const char* rows = data + 16 * row_tile * T::kQuerySegments * 16;
    load_matrices(a, rows + stepped(swizzled<T::kQuerySegments>(lane & 15, lane >> 4), 2 * k_step));
  }
};

// Query fragments of a warp: kept where registers allow, else read again for every tile of keys.
template <class T>
struct QueryFragments {
  static constexpr int kSteps = T::kHeadDim / 16;
  uint32_t kept[T::kQueryInRegisters ? T::kRowTiles : 1][T::kQueryInRegisters ? kSteps : 1][4];
  QueryTile<T> tile;
  int first_tile;  // of the warp's rows

  __device__ __forceinline__ explicit QueryFragments(QueryTile<T> query)
      : tile(query), first_tile(T::kSplitRows ? threadIdx.x / 32 * T::kRowTiles : 0) {
    if constexpr (T::kQueryInRegisters) {
#pragma unroll
      for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) tile.fragment(kept[m][k], first_tile + m, k);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&scores)[T::kKeyTiles][T::kRowTiles][2][4],
                                           const uint32_t (&keys)[T::kKeyTiles][2][2], int k_step) const {
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) {
      uint32_t a[4];
      if constexpr (T::kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = kept[m][k_step][i];
      } else {
        tile.fragment(a, first_tile + m, k_step);
      }
#pragma unroll
      for (int t = 0; t < T::kKeyTiles; ++t) {
#pragma unroll
        for (int n = 0; n < 2; ++n) mma<typename T::Element>(scores[t][m][n], a, keys[t][n][0], keys[t][n][1]);
      }
    }
  }
};

// Keys 8n to 8n + 7 of a k step as the B operand: its word `half`. Of a 16-bit cache, r[2 * n + half] are these keys of
// two neighbouring segments; of an fp8 cache, r[2 * n + h] are those of one segment, which is one k step.
template <class T>
__device__ __forceinline__ uint32_t key_word(const uint32_t (&r)[4], int n, int h, int half) {
  if constexpr (T::kFp8) {
    return widen_fp8<typename T::Element>(half ? r[2 * n + h] >> 16 : r[2 * n + h] & 0xffff);
  } else {
    return r[2 * n + half];
  }
}

// Byte offset of what a lane hands to load_matrices of a K tile: r[2 * n + h] are keys 8n to 8n + 7 of segment + h.
template <class T>
__device__ __forceinline__ int key_lane_offset() {
  const int lane = threadIdx.x & 31;
  return swizzled<T::kSegments>((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
}

// Raw products q.k of all rows with the keys of kKeyTiles tiles, `tile_distance` bytes apart.
template <class T>
__device__ __forceinline__ void multiply_keys(float (&scores)[T::kKeyTiles][T::kRowTiles][2][4],
                                              const QueryFragments<T>& query, const char* k_tile, int tile_distance) {
  const int lane_offset = key_lane_offset<T>();
#pragma unroll
  for (int t = 0; t < T::kKeyTiles; ++t) {
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) scores[t][m][i / 4][i % 4] = 0.0f;
    }
  }
#pragma unroll
  for (int segment = 0; segment < T::kSegments; segment += 2) {
    uint32_t r[T::kKeyTiles][4];
#pragma unroll
    for (int t = 0; t < T::kKeyTiles; ++t) {
      load_matrices(r[t], k_tile + t * tile_distance + stepped(lane_offset, segment));
    }
    constexpr int kSteps = T::kFp8 ? 2 : 1;
#pragma unroll
    for (int h = 0; h < kSteps; ++h) {
      uint32_t keys[T::kKeyTiles][2][2];
#pragma unroll
      for (int t = 0; t < T::kKeyTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) keys[t][i / 2][i % 2] = key_word<T>(r[t], i / 2, h, i % 2);
      }
      query.multiply(scores, keys, T::kFp8 ? segment + h : segment / 2);
    }
  }
}

// Raw products of a tile's 16 keys with 8 columns, in two chains: keys are the rows of the accumulators. What
// multiplies keys as the B operand is, in another order, an A operand too. columns(k_step) are the columns' two words.
template <class T, int kUnroll, class Columns>
__device__ __forceinline__ void multiply_columns(float (&products)[4], const Columns& columns, const char* k_tile) {
  const int lane_offset = key_lane_offset<T>();
  float chains[2][4] = {};
#pragma unroll kUnroll
  for (int i = 0; i < T::kHeadDim / 32; ++i) {
    uint32_t r[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!T::kFp8 || h == 0) load_matrices(r, k_tile + stepped(lane_offset, T::kFp8 ? 2 * i : 4 * i + 2 * h));
      const uint32_t a[4] = {key_word<T>(r, 0, h, 0), key_word<T>(r, 1, h, 0), key_word<T>(r, 0, h, 1),
                             key_word<T>(r, 1, h, 1)};
      const uint2 b = columns(2 * i + h);
      mma<typename T::Element>(chains[h], a, b.x, b.y);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) products[i] = chains[0][i] + chains[1][i];
}

// output += weights * V; weights[m] is the A operand over the tile's 16 keys.
template <class T>
__device__ __forceinline__ void accumulate_values(float (&output)[T::kRowTiles][T::kColumnTiles][4],
                                                  const uint32_t (&weights)[T::kRowTiles][4], const char* v_tile) {
  using Element = typename T::Element;
  const int lane = threadIdx.x & 31;
  const int row = (lane & 7) + ((lane >> 3) & 1) * 8;
  const int lane_offset = swizzled<T::kSegments>(row, lane >> 4);
#pragma unroll
  for (int segment = 0; segment < T::kSegments; segment += 2) {
    // r[2 * h + n]: keys 8n to 8n + 7 of segment + h
    uint32_t r[4];
    load_matrices_transposed(r, v_tile + stepped(lane_offset, segment));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (T::kFp8) {
        // Each register holds two neighbouring columns of two keys: the even column makes one tile, the
        // odd one the next (output_column undoes this).
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t select = odd ? 0x4431 : 0x4420;
          const uint32_t b0 = widen_fp8<Element>(__byte_perm(r[2 * h], 0, select));
          const uint32_t b1 = widen_fp8<Element>(__byte_perm(r[2 * h + 1], 0, select));
#pragma unroll
          for (int m = 0; m < T::kRowTiles; ++m) {
            mma<Element>(output[m][2 * (segment + h) + odd], weights[m], b0, b1);
          }
        }
      } else {
#pragma unroll
        for (int m = 0; m < T::kRowTiles; ++m) {
          mma<Element>(output[m][segment + h], weights[m], r[2 * h], r[2 * h + 1]);
        }
      }
    }
  }
}

// Head-dimension index of element e (0 | 1) of an accumulator tile, for lane % 4 == j.
template <class T>
__device__ __forceinline__ int output_column(int tile, int j, int e) {
  return T::kFp8 ? 16 * (tile / 2) + 2 * (2 * j + e) + (tile & 1) : 8 * tile + 2 * j + e;
}

}  // namespace vegas_ops::portable
