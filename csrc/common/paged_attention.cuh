// Attention of a tile of packed query rows over a chunk of keys, one CTA: the main loop that verification
// and sparse decoding share. Each warp loads every fourth tile of 16 keys through its own cp.async pipeline.
// Few rows: each warp attends all of them to the keys it loaded, and the warps meet once, at the end. Many
// rows (kSplitRows): the warps meet at every step, and each attends its own rows to the keys of all.
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
  static constexpr int kNormBytes = kWarps * T::kWarpRows * sizeof(float2);
  static constexpr int kValidBytes = kWarps * kMaxStages * sizeof(uint32_t);
  static constexpr int kQueryBytes = T::kRows * T::kHeadDim * 2;
  static constexpr int kFixedBytes = (kRowInfoBytes + kNormBytes + kValidBytes + kQueryBytes + 127) / 128 * 128;
  static constexpr int kMergeRows = T::kSplitRows ? 16 : T::kRows;  // of a warp at a time
  static constexpr int kMergeBytes = kWarps * kMergeRows * kOutputStride * 4;

  char* base;

  static int bytes(int stages) {
    const int pipeline = stages * T::kStageBytes;
    return kFixedBytes + (pipeline > kMergeBytes ? pipeline : kMergeBytes);
  }

  __device__ QueryTile<T> query() const { return {base}; }
  __device__ RowInfo* rows() const { return reinterpret_cast<RowInfo*>(base + kQueryBytes); }
  __device__ float2* norm(int warp) const {
    return reinterpret_cast<float2*>(base + kQueryBytes + kRowInfoBytes) + warp * T::kWarpRows;
  }
  __device__ uint32_t* valid(int warp) const {
    return reinterpret_cast<uint32_t*>(base + kQueryBytes + kRowInfoBytes + kNormBytes) + warp * kMaxStages;
  }
  // K, then V, of one warp's stage.
  __device__ char* stage(int warp, int stage) const {
    return base + kFixedBytes + stage * T::kStageBytes + warp * 2 * T::kTileBytes;
  }
  __device__ float* output(int warp, int row) const {
    return reinterpret_cast<float*>(base + kFixedBytes) + (warp * kMergeRows + row) * kOutputStride;
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
    // Page ids are 32-bit, so no table names a page beyond.
    num_pages = cache.num_pages < INT_MAX ? static_cast<int>(cache.num_pages) : INT_MAX;
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
  __device__ __forceinline__ void update(const float (&logits)[T::kKeyTiles][T::kRowTiles][2][4],
                                         uint32_t (&weights)[T::kKeyTiles][T::kRowTiles][4]) {
    float rescale[T::kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = -INFINITY;
#pragma unroll
        for (int t = 0; t < T::kKeyTiles; ++t) {
          const float (&x)[2][4] = logits[t][m];
          top = fmaxf(top, fmaxf(fmaxf(x[0][2 * i], x[0][2 * i + 1]), fmaxf(x[1][2 * i], x[1][2 * i + 1])));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float before = maximum[m][i];
        const float now = fmaxf(before, top * kLog2e);
        moved = moved || now > before;
        // A row that has seen no key yet keeps -inf, which must not meet -inf in a difference.
        const float base = now == -INFINITY ? 0.0f : now;
        rescale[m][i] = exp2_approx(before - base);
        maximum[m][i] = now;
        sum[m][i] *= rescale[m][i];
#pragma unroll
        for (int t = 0; t < T::kKeyTiles; ++t) {
          float p[2][2];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) p[n][e] = exp2_approx(fmaf(logits[t][m][n][2 * i + e], kLog2e, -base));
            weights[t][m][2 * n + i] = pack<typename T::Element>(p[n][0], p[n][1]);
          }
          sum[m][i] += (p[0][0] + p[0][1]) + (p[1][0] + p[1][1]);
        }
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
// tile's keys (every fourth tile, in order), lookup() turns that into pages, offset() into this lane's byte offset or
// -1; each step is one tile behind the one before, so that no load waits for another.
template <class T, class Keys>
struct TilePipeline {
  const SharedTile<T>& shared;
  Keys& keys;
  const char* k_data;
  const char* v_data;
  int segments;  // 16-byte segments of a row that exist; the rest of a padded row becomes zero
  int tiles;     // of this warp; where warps split rows, the same number for all (tiles past the end hold no key)
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
    const int first = T::kSplitRows ? 0 : warp;
    tiles = chunk_tiles > first ? (chunk_tiles - first + kWarps - 1) / kWarps : 0;
  }

  __device__ void start() {
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
        const bool read = k_offset >= 0 && segment < segments;
        char* target = k_tile + swizzled<T::kSegments>(row, segment);
        copy(k_data + (read ? k_offset + segment * 16 : 0), target, read);
        copy(v_data + (read ? v_offset + segment * 16 : 0), target + T::kTileBytes, read);
      }
      keys.lookup();
      keys.fetch(warp + (n + 2) * kWarps);
      issue_stage = issue_stage + 1 < stages ? issue_stage + 1 : 0;
    }
    cute::cp_async_fence();
  }

  // Those who read what this warp loads.
  __device__ __forceinline__ static void meet_readers() {
    if constexpr (T::kSplitRows) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // Waits for the n-th tile and keeps the pipeline full; returns its stage.
  __device__ __forceinline__ int next(int n) {
    if (stages == 1) {
      meet_readers();
      issue(n);
    }
    wait_for_stage(stages - 2);
    meet_readers();
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

// Scales, caps and masks the products of a warp's rows with one tile of keys.
template <class T>
__device__ __forceinline__ void finish_logits(float (&x)[T::kRowTiles][2][4], const Scoring& scoring,
                                              const RowInfo* rows, int first_key, uint32_t valid) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
    for (int c = 0; c < 8; ++c) x[m][c / 4][c % 4] *= scoring.scale;
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
  if (valid == 0xffffu && first_key >= scoring.first_full_key && first_key + kTileKeys - 1 <= scoring.last_full_key) {
    return;
  }
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

// Attends the query tile, of which num_rows rows are in use, to `chunk_tiles` tiles of keys; the first key of
// tile i is position begin + 16i for masks and dumps. prepare() puts the query and the rows into shared memory
// while the first keys are on their way.
template <class T, class Keys, class Dump, class Prepare>
__device__ __forceinline__ void attend(const SharedTile<T>& shared, Keys& keys, const VegasPagedCache& cache,
                                       const Scoring& scoring, const Dump& dump, const Prepare& prepare, int num_rows,
                                       int begin, int chunk_tiles, int stages, SoftmaxState<T>& state) {
  TilePipeline<T, Keys> pipeline(shared, keys, cache, chunk_tiles, stages);
  pipeline.start();
  prepare();
  __syncthreads();
  const QueryFragments<T> query(shared.query());
  const int first_row = T::kSplitRows ? pipeline.warp * T::kWarpRows : 0;
  const RowInfo* rows = shared.rows() + first_row;
  constexpr int kTileDistance = 2 * T::kTileBytes;  // from one warp's tile of a stage to the next one's

  for (int n = 0; n < pipeline.tiles; ++n) {
    const int stage = pipeline.next(n);
    if (first_row >= num_rows) continue;
    const int first_tile = T::kSplitRows ? 0 : pipeline.warp;
    const int end_tile = T::kSplitRows ? kWarps : first_tile + 1;
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; tile += T::kKeyTiles) {
      const char* k_tile = shared.stage(tile, stage);

      // scores
      float x[T::kKeyTiles][T::kRowTiles][2][4];
      multiply_keys<T>(x, query, k_tile, kTileDistance);
#pragma unroll
      for (int t = 0; t < T::kKeyTiles; ++t) {
        const uint32_t valid = shared.valid(tile + t)[stage];
        const int first_key = begin + (n * kWarps + tile + t) * kTileKeys;
        finish_logits<T>(x[t], scoring, rows, first_key, valid);
        dump(x[t], rows, first_key, valid);
      }

      // softmax
      uint32_t weights[T::kKeyTiles][T::kRowTiles][4];
      state.update(x, weights);

      // accumulate
#pragma unroll
      for (int t = 0; t < T::kKeyTiles; ++t) {
        accumulate_values<T>(state.output, weights[t], k_tile + t * kTileDistance + T::kTileBytes);
      }
    }
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

// Writes 16 rows of a warp, from its 16-row tile m, to shared memory as rows first_row and following.
template <class T>
__device__ __forceinline__ void write_rows(const SharedTile<T>& shared, const SoftmaxState<T>& state, int m,
                                           int first_row) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + lane / 4 + 8 * i;
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

// Hands every row, all its keys added up, to store(row, norm, value), which is called by all lanes of one
// warp; value(i) is the row's output at column lane + 32 * i. Warps that split keys are added in their order.
template <class T, class Store>
__device__ __forceinline__ void merge_warps(const SharedTile<T>& shared, const SoftmaxState<T>& state, int num_rows,
                                            const Store& store) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  __syncthreads();  // the merge buffer overlays every warp's stages
  if constexpr (T::kSplitRows) {
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) {
      const int first_row = warp * T::kWarpRows + 16 * m;
      __syncwarp();
      write_rows(shared, state, m, 0);
      __syncwarp();
      for (int row = 0; row < 16 && first_row + row < num_rows; ++row) {
        const float2 norm = shared.norm(warp)[row];
        store(first_row + row, RowNorm{norm.x, norm.y}, [&](int i) { return shared.output(warp, row)[lane + 32 * i]; });
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) write_rows(shared, state, m, 16 * m);
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
}

}  // namespace vegas_ops::portable
