// Attention of a tile of packed query rows over a chunk of keys, one CTA: the main loop that verification
// and sparse decoding share. Each warp takes every fourth tile of 16 keys through its own cp.async pipeline
// and keeps its own online softmax; the warps meet once, at the end.
#pragma once

#include <limits.h>

#include "common/tile_mma.cuh"
#include "vegas_ops/params.h"

namespace vegas_ops::portable {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// A row of the query tile, in shared memory.
struct RowInfo {
  int first_key;  // sees keys in [first_key, last_key]
  int last_key;
  int64_t dump;  // where the row's logits go, in elements; -1: nowhere
};

template <class T>
struct SharedTile {
  static constexpr int kOutputStride = T::kHeadDim + 8;  // floats; spreads rows over banks
  static constexpr int kRowInfoBytes = T::kRows * sizeof(RowInfo);
  static constexpr int kNormBytes = kWarps * T::kRows * sizeof(float2);
  static constexpr int kValidBytes = kWarps * kMaxStages * sizeof(uint32_t);
  static constexpr int kQueryBytes = T::kRows * T::kHeadDim * 2;
  static constexpr int kFixedBytes = (kRowInfoBytes + kNormBytes + kValidBytes + kQueryBytes + 127) / 128 * 128;
  static constexpr int kMergeBytes = kWarps * T::kRows * kOutputStride * 4;

  char* base;

  static int bytes(int stages) {
    const int pipeline = stages * T::kStageBytes;
    return kFixedBytes + (pipeline > kMergeBytes ? pipeline : kMergeBytes);
  }

  __device__ QueryTile<T> query() const { return {base}; }
  __device__ RowInfo* rows() const { return reinterpret_cast<RowInfo*>(base + kQueryBytes); }
  __device__ float2* norm(int warp) const {
    return reinterpret_cast<float2*>(base + kQueryBytes + kRowInfoBytes) + warp * T::kRows;
  }
  __device__ uint32_t* valid(int warp) const {
    return reinterpret_cast<uint32_t*>(base + kQueryBytes + kRowInfoBytes + kNormBytes) + warp * kMaxStages;
  }
  // K, then V, of one warp's stage.
  __device__ char* stage(int warp, int stage) const {
    return base + kFixedBytes + stage * T::kStageBytes + warp * 2 * T::kTileBytes;
  }
  __device__ float* output(int warp, int row) const {
    return reinterpret_cast<float*>(base + kFixedBytes) + (warp * T::kRows + row) * kOutputStride;
  }
};

// 8 values of a query row.
template <class Element>
__device__ __forceinline__ uint4 load_query(const Element* source, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint4*>(source);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack<Element>(to_float(source[2 * i]), to_float(source[2 * i + 1]));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Byte offsets of the key (lanes 0 to 15) or value (lanes 16 to 31) rows that a lane resolves.
struct LaneAddress {
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_offset;
  int num_pages;

  __device__ LaneAddress(const VegasPagedCache& cache, int head, int element_bytes) {
    const VegasCacheView& view = (threadIdx.x & 31) < kTileKeys ? cache.k : cache.v;
    page_stride = view.stride_page * element_bytes;
    token_stride = view.stride_token * element_bytes;
    head_offset = view.stride_head * element_bytes * head;
    num_pages = static_cast<int>(cache.num_pages);
  }

  // -1 for a page outside the cache.
  __device__ int64_t operator()(int page, int slot) const {
    return page >= 0 && page < num_pages ? page * page_stride + slot * token_stride + head_offset : -1;
  }
};

// Scaling factor of a request's KV head; 1 where the cache has none.
__device__ inline float descale_of(const VegasCacheView& view, int request, int head) {
  return view.descale ? view.descale[request * view.descale_stride_batch + head * view.descale_stride_head] : 1.0f;
}

// How a product becomes a logit, and which keys every row of the tile sees.
struct Scoring {
  float scale;
  float softcap;       // 0: none
  int first_full_key;  // keys in [first_full_key, last_full_key] need no mask
  int last_full_key;
};

// A warp's running softmax: element [m][i] belongs to row 16m + lane / 4 + 8i.
template <class T>
struct SoftmaxState {
  float output[T::kRowTiles][T::kColumnTiles][4];
  float maximum[T::kRowTiles][2];  // log2 units
  float sum[T::kRowTiles][2];      // of this lane's columns

  __device__ SoftmaxState() {
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][n][i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        maximum[m][i] = -INFINITY;
        sum[m][i] = 0.0f;
      }
    }
  }

  // Turns logits into weights relative to the new maximum, rescaling what was accumulated.
  __device__ __forceinline__ void update(const float (&logits)[T::kRowTiles][2][4],
                                         uint32_t (&weights)[T::kRowTiles][4]) {
    float rescale[T::kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&x)[2][4] = logits[m];
        float top = fmaxf(fmaxf(x[0][2 * i], x[0][2 * i + 1]), fmaxf(x[1][2 * i], x[1][2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float before = maximum[m][i];
        const float now = fmaxf(before, top * kLog2e);
        moved = moved || now > before;
        // A row that has seen no key yet keeps -inf, which must not meet -inf in a difference.
        const float base = now == -INFINITY ? 0.0f : now;
        rescale[m][i] = exp2_approx(before - base);
        maximum[m][i] = now;
        float p[2][2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) p[n][e] = exp2_approx(fmaf(x[n][2 * i + e], kLog2e, -base));
          weights[m][2 * n + i] = pack<typename T::Element>(p[n][0], p[n][1]);
        }
        sum[m][i] = sum[m][i] * rescale[m][i] + ((p[0][0] + p[0][1]) + (p[1][0] + p[1][1]));
      }
    }
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][n][i] *= rescale[m][i / 2];
      }
    }
  }
};

__device__ __forceinline__ void wait_for_stage(int pending) {
  if (pending <= 0) {
    cute::cp_async_wait<0>();
  } else if (pending == 1) {
    cute::cp_async_wait<1>();
  } else {
    cute::cp_async_wait<2>();
  }
}

// One warp's stream of key and value tiles. Keys resolves them: fetch(tile) starts reading what names the
// tile's keys, lookup() turns that into pages, offset() into this lane's byte offset or -1; each step is one
// tile behind the one before, so that no load waits for another.
template <class T, class Keys>
struct TilePipeline {
  const SharedTile<T>& shared;
  Keys& keys;
  const char* k_data;
  const char* v_data;
  int segments;  // 16-byte segments of a row that exist; the rest of a padded row stays zero
  int tiles;     // of this warp
  int stages;
  int issue_stage;  // of the next tile to issue, and to attend
  int read_stage;
  int warp;
  int lane;

  __device__ TilePipeline(const SharedTile<T>& tile, Keys& source, const VegasPagedCache& cache, int chunk_tiles,
                          int num_stages)
      : shared(tile),
        keys(source),
        k_data(static_cast<const char*>(cache.k.data)),
        v_data(static_cast<const char*>(cache.v.data)),
        segments(cache.head_dim * T::kCacheBytes / 16),
        stages(num_stages),
        issue_stage(0),
        read_stage(0),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32) {
    tiles = chunk_tiles > warp ? (chunk_tiles - warp + kWarps - 1) / kWarps : 0;
  }

  __device__ void start() {
    if (segments < T::kSegments) {
      for (int s = 0; s < stages; ++s) {
        uint4* tile = reinterpret_cast<uint4*>(shared.stage(warp, s));
        for (int i = lane; i < 2 * T::kTileBytes / 16; i += 32) tile[i] = make_uint4(0, 0, 0, 0);
      }
      __syncwarp();
    }
    keys.fetch(warp);
    keys.lookup();
    keys.fetch(warp + kWarps);
    for (int s = 0; s + 1 < stages; ++s) issue(s);
  }

  // Starts the copies of the warp's n-th tile; tiles are issued in order. Always one group, so that the
  // number of pending groups is known.
  __device__ __forceinline__ void issue(int n) {
    if (n < tiles) {
      constexpr int kLanesPerRow = T::kSegments < 32 ? T::kSegments : 32;
      constexpr int kRowsPerPass = 32 / kLanesPerRow;
      const int64_t offset = keys.offset();
      const uint32_t valid = __ballot_sync(0xffffffffu, offset >= 0) & 0xffffu;
      if (lane == 0) shared.valid(warp)[issue_stage] = valid;
      char* k_tile = shared.stage(warp, issue_stage);
      const int segment = lane % kLanesPerRow;
#pragma unroll
      for (int first = 0; first < kTileKeys; first += kRowsPerPass) {
        const int row = first + lane / kLanesPerRow;
        const int64_t k_offset = __shfl_sync(0xffffffffu, offset, row);
        const int64_t v_offset = __shfl_sync(0xffffffffu, offset, row + kTileKeys);
        const bool read = k_offset >= 0;
        if (segment < segments) {
          char* target = k_tile + swizzled<T::kSegments>(row, segment);
          copy(k_data + (read ? k_offset + segment * 16 : 0), target, read);
          copy(v_data + (read ? v_offset + segment * 16 : 0), target + T::kTileBytes, read);
        }
      }
      keys.lookup();
      keys.fetch(warp + (n + 2) * kWarps);
      issue_stage = issue_stage + 1 < stages ? issue_stage + 1 : 0;
    }
    cute::cp_async_fence();
  }

  // Waits for the n-th tile and keeps the pipeline full; returns its stage.
  __device__ __forceinline__ int next(int n) {
    if (stages == 1) {
      __syncwarp();
      issue(n);
    }
    wait_for_stage(stages - 2);
    __syncwarp();
    if (stages > 1) issue(n + stages - 1);
    const int stage = read_stage;
    read_stage = stage + 1 < stages ? stage + 1 : 0;
    return stage;
  }

  // A row that is not read becomes zeros, so that nothing of an unused slot reaches a product.
  __device__ __forceinline__ static void copy(const char* source, char* target, bool read) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(source),
                                                                 *reinterpret_cast<cute::uint128_t*>(target), read);
  }
};

// Attends the query tile to `chunk_tiles` tiles of keys; the first key of tile i is position begin + 16i for
// masks and dumps. prepare() puts the query and the rows into shared memory while the first keys are on their way.
template <class T, class Keys, class Dump, class Prepare>
__device__ __forceinline__ void attend(const SharedTile<T>& shared, Keys& keys, const VegasPagedCache& cache,
                                       const Scoring& scoring, const Dump& dump, const Prepare& prepare, int begin,
                                       int chunk_tiles, int stages, SoftmaxState<T>& state) {
  const int lane = threadIdx.x % 32;
  TilePipeline<T, Keys> pipeline(shared, keys, cache, chunk_tiles, stages);
  pipeline.start();
  prepare();
  __syncthreads();
  const QueryFragments<T> query(shared.query());
  const RowInfo* rows = shared.rows();

  for (int n = 0; n < pipeline.tiles; ++n) {
    // load
    const int stage = pipeline.next(n);
    const char* k_tile = shared.stage(pipeline.warp, stage);
    const uint32_t valid = shared.valid(pipeline.warp)[stage];
    const int first_key = begin + (pipeline.warp + n * kWarps) * kTileKeys;

    // scores
    float x[T::kRowTiles][2][4];
    multiply_keys<T>(x, query, k_tile);
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][c][i] *= scoring.scale;
      }
    }
    if (scoring.softcap > 0.0f) {
#pragma unroll
      for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          // tanhf, not tanh.approx: a dumped logit promises an error below 2^-16.
          float& logit = x[m][c / 4][c % 4];
          logit = scoring.softcap * tanhf(logit / scoring.softcap);
        }
      }
    }
    if (valid != 0xffffu || first_key < scoring.first_full_key || first_key + kTileKeys - 1 > scoring.last_full_key) {
#pragma unroll
      for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const RowInfo& row = rows[16 * m + lane / 4 + 8 * i];
          const int low = row.first_key;
          const int high = row.last_key;
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int column = 8 * (c / 2) + 2 * (lane % 4) + c % 2;
            const int key = first_key + column;
            const bool seen = (valid >> column & 1) && key >= low && key <= high;
            if (!seen) x[m][c / 2][2 * i + c % 2] = -INFINITY;
          }
        }
      }
    }

    dump(x, rows, first_key, valid);

    // softmax
    uint32_t weights[T::kRowTiles][4];
    state.update(x, weights);

    // accumulate
    accumulate_values<T>(state.output, weights, k_tile + T::kTileBytes);
  }
  cute::cp_async_wait<0>();
}

// What the chunks of a row add up to: maximum in log2 units, sum relative to it.
struct RowNorm {
  float maximum;
  float sum;

  __device__ float base() const { return maximum == -INFINITY ? 0.0f : maximum; }
  // Weight of a part with this norm in a whole of norm `whole`.
  __device__ float weight_in(const RowNorm& whole) const { return exp2_approx(maximum - whole.base()); }
  // Natural log; -inf for a row without keys. NaN stays NaN.
  __device__ float lse() const { return sum == 0.0f ? -INFINITY : maximum * kLn2 + logf(sum); }
};

// Adds up the warps of a CTA in their order and hands every row to store(row, norm, value), which is called by
// all lanes of one warp; value(i) is the row's output at column lane + 32 * i.
template <class T, class Store>
__device__ __forceinline__ void merge_warps(const SharedTile<T>& shared, const SoftmaxState<T>& state, int num_rows,
                                            const Store& store) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  __syncthreads();  // the merge buffer overlays every warp's stages
#pragma unroll
  for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * m + lane / 4 + 8 * i;
      float sum = state.sum[m][i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) shared.norm(warp)[row] = make_float2(state.maximum[m][i], sum);
      float* output = shared.output(warp, row);
#pragma unroll
      for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) output[output_column<T>(n, lane % 4, e)] = state.output[m][n][2 * i + e];
      }
    }
  }
  __syncthreads();
  for (int row = warp; row < num_rows; row += kWarps) {
    RowNorm parts[kWarps];
    RowNorm whole = {-INFINITY, 0.0f};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 norm = shared.norm(w)[row];
      parts[w] = {norm.x, norm.y};
      whole.maximum = fmaxf(whole.maximum, norm.x);
    }
    float weights[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      weights[w] = parts[w].weight_in(whole);
      whole.sum += parts[w].sum * weights[w];
    }
    store(row, whole, [&](int i) {
      float value = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value += shared.output(w, row)[lane + 32 * i] * weights[w];
      return value;
    });
  }
}

}  // namespace vegas_ops::portable
