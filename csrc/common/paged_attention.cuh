// Attention of a tile of packed query rows over a chunk of keys, one CTA: the main loop that verification and sparse
// decoding share. Four warps load, each every fourth tile of 16 keys through its own cp.async pipeline. Few rows: each
// warp attends all of them to the keys it loaded, and the warps meet once, at the end. Many rows (kSplitRows): there
// may be more warps, they meet at every step, and each attends its own 16 rows to the keys of all.
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
  static constexpr int kNormBytes = T::kMaxWarps * T::kWarpRows * sizeof(float2);
  static constexpr int kValidBytes = kWarps * kMaxStages * sizeof(uint32_t);
  static constexpr int kQueryBytes = T::kRows * T::kHeadDim * 2;
  // A query that is kept in registers may use the last stage, which is not loaded before that.
  static constexpr bool kQueryInStage = T::kQueryInRegisters && T::kSplitRows && kQueryBytes <= T::kStageBytes;
  static constexpr int kFixedBytes =
      (kRowInfoBytes + kNormBytes + kValidBytes + (kQueryInStage ? 0 : kQueryBytes) + 127) / 128 * 128;
  static constexpr int kMergeRows = T::kSplitRows ? 16 : T::kRows;  // of a warp at a time
  static constexpr int kMergeBytes = T::kMaxWarps * kMergeRows * kOutputStride * 4;

  static constexpr int bytes(int stages) {
    const int pipeline = stages * T::kStageBytes;
    return kFixedBytes + (pipeline > kMergeBytes ? pipeline : kMergeBytes);
  }
  // Every GPU has room for two stages, except where head dimensions are large: 99 KiB at least, of which kernels may
  // take one for other things.
  static constexpr int kMinStages = bytes(2) <= 98 * 1024 ? 2 : 1;
  static_assert(!kQueryInStage || kMinStages == 2, "the query would overwrite keys");

  char* base;
  int stages;

  __device__ RowInfo* rows() const { return reinterpret_cast<RowInfo*>(base); }
  __device__ float2* norm(int warp) const {
    return reinterpret_cast<float2*>(base + kRowInfoBytes) + warp * T::kWarpRows;
  }
  __device__ uint32_t* valid(int warp) const {
    return reinterpret_cast<uint32_t*>(base + kRowInfoBytes + kNormBytes) + warp * kMaxStages;
  }
  __device__ QueryTile<T> query() const {
    return {kQueryInStage ? stage(0, stages - 1) : base + kFixedBytes - kQueryBytes};
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
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(source);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = halves[2 * i] | uint32_t{halves[2 * i + 1]} << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Byte offsets of the key (lanes 0 to 15) or value (lanes 16 to 31) rows that a lane resolves. The strides stay where
// the kernel's parameters are: registers are short.
struct LaneAddress {
  const VegasPagedCache& cache;
  int head;
  int element_bytes;

  // -1 for a page outside the cache.
  __device__ int64_t operator()(int page, int slot) const {
    const bool key = (threadIdx.x & 31) < kTileKeys;
    if (page < 0 || page >= cache.num_pages) return -1;
    const int64_t elements = page * (key ? cache.k.stride_page : cache.v.stride_page) +
                             slot * (key ? cache.k.stride_token : cache.v.stride_token) +
                             head * (key ? cache.k.stride_head : cache.v.stride_head);
    return elements * element_bytes;
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

  // Softmax takes products and applies the scale itself, unless a cap comes in between or the scale changes
  // which product is largest.
  __device__ bool keeps_products() const { return softcap <= 0.0f && scale > 1e-30f; }
  __device__ __forceinline__ float logit(float product) const {
    const float scaled = product * scale;
    // tanhf, not tanh.approx: a dumped logit promises an error below 2^-16.
    return softcap > 0.0f ? softcap * tanhf(scaled / softcap) : scaled;
  }
  // What turns the x of the main loop into logits.
  __device__ float logit_scale() const { return keeps_products() ? scale : 1.0f; }
  __device__ bool masks(int first_key, uint32_t valid) const {
    return valid != 0xffffu || first_key < first_full_key || first_key + kTileKeys - 1 > last_full_key;
  }
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

  // Turns x * scale (log2 units, scale > 0) into weights relative to the new maximum, rescaling what was
  // accumulated.
  __device__ __forceinline__ void update(const float (&x)[T::kKeyTiles][T::kRowTiles][2][4], float scale,
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
          const float (&row)[2][4] = x[t][m];
          top = fmaxf(top, fmaxf(fmaxf(row[0][2 * i], row[0][2 * i + 1]), fmaxf(row[1][2 * i], row[1][2 * i + 1])));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float before = maximum[m][i];
        const float now = fmaxf(before, top * scale);
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
            for (int e = 0; e < 2; ++e) p[n][e] = exp2_approx(fmaf(x[t][m][n][2 * i + e], scale, -base));
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
  bool loads;  // this warp has keys to load

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
        lane(threadIdx.x % 32),
        loads(!T::kSplitRows || warp < kWarps) {
    const int first = T::kSplitRows ? 0 : warp;
    tiles = chunk_tiles > first ? (chunk_tiles - first + kWarps - 1) / kWarps : 0;
  }

  __device__ void start() {
    if (loads) {
      keys.fetch(warp);
      keys.lookup();
      keys.fetch(warp + kWarps);
    }
    for (int s = 0; s + 1 < stages; ++s) issue(s);
  }

  // Starts the copies of the warp's n-th tile; tiles are issued in order. Always one group, so that the
  // number of pending groups is known.
  __device__ __forceinline__ void issue(int n) {
    if (loads && n < tiles) {
      constexpr int kLanesPerRow = T::kSegments < 32 ? T::kSegments : 32;
      constexpr int kRowsPerPass = 32 / kLanesPerRow;
      const int64_t offset = keys.offset();
      const uint32_t valid = __ballot_sync(0xffffffffu, offset >= 0) & 0xffffu;
      if (lane == 0) shared.valid(warp)[issue_stage] = valid;
      // Of a skipped page, an address that is not read.
      const int64_t address = reinterpret_cast<int64_t>(lane < kTileKeys ? k_data : v_data) + offset;
      const int segment = lane % kLanesPerRow;
      const int first_row = lane / kLanesPerRow;
      char* k_tile = shared.stage(warp, issue_stage);
      const uint32_t reads = segment < segments ? valid >> first_row : 0;
#pragma unroll
      for (int pass = 0; pass < kTileKeys; pass += kRowsPerPass) {
        const int row = first_row + pass;
        const bool read = reads >> pass & 1;
        char* target = k_tile + swizzled<T::kSegments>(row, segment);
        const int64_t k_address = __shfl_sync(0xffffffffu, address, row) + segment * 16;
        const int64_t v_address = __shfl_sync(0xffffffffu, address, row + kTileKeys) + segment * 16;
        copy(reinterpret_cast<const char*>(k_address), target, read);
        copy(reinterpret_cast<const char*>(v_address), target + T::kTileBytes, read);
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
    const bool one_stage = SharedTile<T>::kMinStages == 1 && stages == 1;
    if (one_stage) {
      meet_readers();
      issue(n);
    }
    wait_for_stage(stages - 2);
    meet_readers();
    if (!one_stage) issue(n + stages - 1);
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

// Scales and caps products where softmax does not do it by itself. Few calls come here: one copy of tanhf, the
// elements taking turns in the first place, keeps the main loop small.
template <int kRowTiles>
__device__ __forceinline__ void cap_logits(float (&x)[kRowTiles][2][4], const Scoring& scoring) {
  constexpr int kElements = kRowTiles * 8;
#pragma unroll 1
  for (int turn = 0; turn < kElements; ++turn) {
    const float logit = scoring.logit(x[0][0][0]);
#pragma unroll
    for (int i = 0; i + 1 < kElements; ++i) x[i / 8][i / 4 % 2][i % 4] = x[(i + 1) / 8][(i + 1) / 4 % 2][(i + 1) % 4];
    x[kRowTiles - 1][1][3] = logit;
  }
}

// Masks the keys of a tile that a row does not see.
template <int kRowTiles>
__device__ __forceinline__ void mask_logits(float (&x)[kRowTiles][2][4], const RowInfo* rows, int first_key,
                                            uint32_t valid) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowInfo& row = rows[16 * m + lane / 4 + 8 * i];
      const int low = min(max(row.first_key, first_key) - first_key, kTileKeys);
      const int end = max(min(row.last_key, first_key + kTileKeys - 1) - first_key + 1, 0);
      const uint32_t seen = (valid & ((1u << end) - 1) & ~((1u << low) - 1)) >> (2 * (lane % 4));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!(seen >> (8 * (c / 2) + c % 2) & 1)) x[m][c / 2][2 * i + c % 2] = -INFINITY;
      }
    }
  }
}

// x[t] becomes what x[t + 1] was; the first becomes the last.
template <int kKeyTiles, int kRowTiles>
__device__ __forceinline__ void rotate(float (&x)[kKeyTiles][kRowTiles][2][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float first = x[0][m][i / 4][i % 4];
#pragma unroll
      for (int t = 0; t + 1 < kKeyTiles; ++t) x[t][m][i / 4][i % 4] = x[t + 1][m][i / 4][i % 4];
      x[kKeyTiles - 1][m][i / 4][i % 4] = first;
    }
  }
}

// Attends the query tile, of which num_rows rows are in use, to `chunk_tiles` tiles of keys; the first key of
// tile i is position begin + 16i for masks and dumps. prepare() puts the query and the rows into shared memory
// while the first keys are on their way. The dump takes the logits that it wants(), and sees the keys of each tile
// once, in the warp that loaded them.
template <class T, class Keys, class Dump, class Prepare>
__device__ __forceinline__ void attend(const SharedTile<T>& shared, Keys& keys, const VegasPagedCache& cache,
                                       const Scoring& scoring, Dump& dump, const Prepare& prepare, int num_rows,
                                       int begin, int chunk_tiles, int stages, SoftmaxState<T>& state) {
  TilePipeline<T, Keys> pipeline(shared, keys, cache, chunk_tiles, stages);
  pipeline.start();
  prepare();
  __syncthreads();
  const QueryFragments<T> query(shared.query());
  const int first_row = T::kSplitRows ? pipeline.warp * T::kWarpRows : 0;
  const RowInfo* rows = shared.rows() + first_row;
  const bool keeps_products = scoring.keeps_products();
  const float logit_scale = scoring.logit_scale();
  const float softmax_scale = logit_scale * kLog2e;
  constexpr int kTileDistance = 2 * T::kTileBytes;  // from one warp's tile of a stage to the next one's

  for (int n = 0; n < pipeline.tiles; ++n) {
    const int stage = pipeline.next(n);
    if (pipeline.loads) {
      dump.see_keys(shared.stage(pipeline.warp, stage), begin + (n * kWarps + pipeline.warp) * kTileKeys,
                    shared.valid(pipeline.warp)[stage], scoring);
    }
    if (first_row >= num_rows) continue;
    const int first_tile = T::kSplitRows ? 0 : pipeline.warp;
    const int end_tile = T::kSplitRows ? kWarps : first_tile + 1;
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; tile += T::kKeyTiles) {
      const char* k_tile = shared.stage(tile, stage);

      // scores
      float x[T::kKeyTiles][T::kRowTiles][2][4];
      multiply_keys<T>(x, query, k_tile, kTileDistance);
      const int first_key = begin + (n * kWarps + tile) * kTileKeys;
      bool plain = keeps_products && !dump.wants(first_key);
#pragma unroll
      for (int t = 0; t < T::kKeyTiles; ++t) {
        plain = plain && !scoring.masks(first_key + t * kTileKeys, shared.valid(tile + t)[stage]);
      }
      if (!plain) {
        // Tiles take turns in the first place: most do not come here, and the code of one is enough.
#pragma unroll 1
        for (int t = 0; t < T::kKeyTiles; ++t) {
          const uint32_t valid = shared.valid(tile + t)[stage];
          const int tile_key = first_key + t * kTileKeys;
          if (!keeps_products) cap_logits(x[0], scoring);
          if (scoring.masks(tile_key, valid)) mask_logits(x[0], rows, tile_key, valid);
          dump(x[0], logit_scale, rows, tile_key, valid);
          rotate(x);
        }
      }

      // softmax
      uint32_t weights[T::kKeyTiles][T::kRowTiles][4];
      state.update(x, softmax_scale, weights);

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

  __device__ __forceinline__ float base() const { return maximum == -INFINITY ? 0.0f : maximum; }
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
#pragma unroll 1
      for (int row = 0; row < 16 && first_row + row < num_rows; ++row) {
        const float2 norm = shared.norm(warp)[row];
        store(first_row + row, RowNorm{norm.x, norm.y}, [&](int i) { return shared.output(warp, row)[lane + 32 * i]; });
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) write_rows(shared, state, m, 16 * m);
    __syncthreads();
#pragma unroll 1
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
