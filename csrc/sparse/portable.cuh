// Attention of one query row per request over listed tokens and a tail of newer ones (mma.sync and cp.async, any GPU
// from sm_80), in one launch. A CTA attends its share of the keys for one KV head, segment by segment: each warp its
// part of the segment's tiles, which it loads ahead, across segments; then the warps meet and add up.
//
// Calls of a few microseconds are a chain of memory accesses and of dependent instructions that are executed once, so
// this path avoids barriers, divisions and loops that most calls do not need.
#pragma once

#include <cuda_runtime.h>

#include "sparse/cluster_merge.cuh"
#include "sparse/key_stream.cuh"

namespace vegas_ops::portable {

constexpr int kFewTiles = 2;  // of a warp

// Programmatic dependent launch: the next launch of the stream may start while this one runs, and waits for its end
// before it touches memory.
__device__ __forceinline__ void wait_for_previous_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void release_next_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// What a CTA keeps in shared memory: the stages of its warps, and twice what they hand over at the end of a segment, so
// that a warp may be a segment ahead.
template <class T>
struct SparseShared {
  char* base;
  int warps;
  int stages;
  int rows;

  static constexpr int kRowBytes = T::kHeadDim * 4;

  static constexpr int bytes(int warps, int stages, int rows) {
    return warps * (stages * T::kStageBytes + 2 * rows * (kRowBytes + static_cast<int>(sizeof(float2))) +
                    kSparseMaxStages * static_cast<int>(sizeof(uint32_t))) +
           kLookedUp * static_cast<int>(sizeof(int));
  }

  __device__ char* stage_bytes(int warp) const { return base + warp * stages * T::kStageBytes; }
  __device__ float* output(int turn, int warp) const {
    return reinterpret_cast<float*>(stage_bytes(warps) + (turn * warps + warp) * rows * kRowBytes);
  }
  __device__ float2* norms(int turn, int warp) const {
    return reinterpret_cast<float2*>(output(2, 0)) + (turn * warps + warp) * rows;
  }
  __device__ uint32_t* valid(int warp) const {
    return reinterpret_cast<uint32_t*>(norms(2, 0)) + warp * kSparseMaxStages;
  }
  __device__ int* longest_lists() const { return reinterpret_cast<int*>(valid(warps)); }
};

// Scales and caps products where softmax does not do it by itself; one copy of tanhf, the elements taking turns in the
// first place, keeps the main loop small.
template <int kHeadTiles>
__device__ __forceinline__ void cap_scores(float (&x)[kHeadTiles][4], const Scoring& scoring) {
#pragma unroll 1
  for (int turn = 0; turn < 4 * kHeadTiles; ++turn) {
    const float logit = scoring.logit(x[0][0]);
#pragma unroll
    for (int i = 0; i + 1 < 4 * kHeadTiles; ++i) x[i / 4][i % 4] = x[(i + 1) / 4][(i + 1) % 4];
    x[kHeadTiles - 1][3] = logit;
  }
}

// A value on its way to another CTA, which waits for anything but zero bits.
__device__ __forceinline__ float present(float value) { return value == 0.0f ? -0.0f : value; }
__device__ __forceinline__ bool is_present(float2 pair) {
  return __float_as_uint(pair.x) != 0 && __float_as_uint(pair.y) != 0;
}

// Volatile, for __ldcv is not: a loop that waits for a value would read it once.
__device__ __forceinline__ float2 load_current(const float2* source) {
  float2 pair;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "l"(source) : "memory");
  return pair;
}

// Adds the segments of the pair in their order, the CTA's own among them, and clears the others' columns for the next
// call. The slot of the own one may hold what the CTA left for another pair. Called by all lanes of a warp, for one
// row: they wait on norms, a lane per segment, for looking at everything takes twice as long.
template <class T>
__device__ __forceinline__ RowPart<float2> add_chunks(const SparsePlan& plan, const Chunks& chunks, int row, int d,
                                                      int head_dim, const RowPart<float2>& own) {
  constexpr int kBatch = T::kChunkBatch;  // on their way at a time
  const int64_t place = chunks.first_slot * plan.rows + row;
  const int step = gridDim.x * plan.rows;
  const bool has_columns = d < head_dim;
  float* const columns = plan.partial_output + place * head_dim + min(d, head_dim - 2);
  RowPart<float2> sum;
#pragma unroll 1
  for (int first = 0; first < chunks.count; first += kBatch) {
    const int mine = first + static_cast<int>(threadIdx.x % kBatch);
    const bool is_other = mine < chunks.count && mine != chunks.own;
    const float2* norm_source =
        reinterpret_cast<const float2*>(plan.partial_norm) + place + int64_t{min(mine, chunks.count - 1)} * step;
    float* const batch = columns + int64_t{first} * step * head_dim;
    const auto is_read = [&](int i) { return has_columns && first + i < chunks.count && first + i != chunks.own; };
    float2 norm;
    float2 values[kBatch];
#pragma unroll 1
    while (true) {
      norm = load_current(norm_source);
      // All loads before the first look at one of them: a branch in between would wait for each.
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        values[i] = make_float2(0.0f, 0.0f);
        if (is_read(i)) values[i] = load_current(reinterpret_cast<const float2*>(batch + i * step * head_dim));
      }
      bool there = is_present(norm) || !is_other;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) there = there && (is_present(values[i]) || !is_read(i));
      if (!__any_sync(0xffffffffu, !there)) break;
      while (__any_sync(0xffffffffu, is_other && !is_present(load_current(norm_source)))) {
      }
    }
    if (mine == chunks.own) norm = make_float2(own.norm.maximum, own.norm.sum);
    if (mine >= chunks.count) norm = make_float2(-INFINITY, 0.0f);
    float maximum = norm.x;
#pragma unroll
    for (int lanes = kBatch / 2; lanes > 0; lanes /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, lanes));
    }
    sum.raise(maximum);
    const float weight = RowNorm{norm.x, norm.y}.weight_in(sum.norm);
    float total = norm.y * weight;
#pragma unroll
    for (int lanes = kBatch / 2; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
    sum.norm.sum += total;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float2 value = first + i == chunks.own ? own.value : values[i];
      sum.value = multiply_add(value, __shfl_sync(0xffffffffu, weight, i), sum.value);
      if (is_read(i)) __stcg(reinterpret_cast<float2*>(batch + i * step * head_dim), make_float2(0.0f, 0.0f));
    }
  }
  return sum;
}

// What the warps of the CTA have found out about columns of a row.
template <class T, class Columns>
__device__ __forceinline__ RowPart<Columns> add_warps(const SparseShared<T>& shared, int turn, int row, int d) {
  float2 norms[kSparseMaxWarps];
  Columns values[kSparseMaxWarps];
#pragma unroll
  for (int i = 0; i < kSparseMaxWarps; ++i) {
    const int warp = min(i, shared.warps - 1);
    norms[i] = i < shared.warps ? shared.norms(turn, i)[row] : make_float2(-INFINITY, 0.0f);
    values[i] = *reinterpret_cast<const Columns*>(shared.output(turn, warp) + row_place<T>(row, d));
  }
  RowPart<Columns> sum;
  sum.add(norms, values);
  return sum;
}

// Adds up the warps' parts of a segment, a thread per four columns of a row; per two where the pair has several
// segments, which the CTA that collects them puts together.
template <class T>
__device__ __forceinline__ void finish_segment(const VegasSparseParams& p, const SparsePlan& plan,
                                               const SparseShared<T>& shared, int turn,
                                               const SegmentWalk<T::kCalls>& segment, const Chunks& chunks,
                                               int first_head, int heads) {
  constexpr int kQuads = T::kHeadDim / 4;
  constexpr int kPairs = T::kHeadDim / 2;
  const int head_dim = T::head_dim(p.cache);
  const float v_descale = descale_of(p.cache.v, segment.request, segment.kv_head());
  const auto sink_of = [&](int row) { return p.sinks ? p.sinks[first_head + row] : -INFINITY; };
  if (chunks.count == 1) {
#pragma unroll 1
    for (int item = threadIdx.x; item < heads * kQuads; item += blockDim.x) {
      const int row = item / kQuads;
      const int d = item % kQuads * 4;
      const float sink_logit = sink_of(row);
      const auto sum = add_warps<T, float4>(shared, turn, row, d);
      write_columns<T>(p, segment.request, first_head + row, d, sum, sink_logit, v_descale);
    }
    return;
  }
#pragma unroll 1
  for (int item = threadIdx.x; item < heads * kPairs; item += blockDim.x) {
    const int row = item / kPairs;
    const int d = item % kPairs * 2;
    const float sink_logit = sink_of(row);
    const auto own = add_warps<T, float2>(shared, turn, row, d);
    if (chunks.collects) {
      const auto sum = add_chunks<T>(plan, chunks, row, d, head_dim, own);
      write_columns<T>(p, segment.request, first_head + row, d, sum, sink_logit, v_descale);
      continue;
    }
    const int64_t place = (chunks.first_slot + int64_t{chunks.own} * gridDim.x) * plan.rows + row;
    if (d < head_dim) {
      __stcg(reinterpret_cast<float2*>(plan.partial_output + place * head_dim + d),
             make_float2(present(own.value.x), present(own.value.y)));
    }
    if (d == 0) {
      __stcg(reinterpret_cast<float2*>(plan.partial_norm) + place,
             make_float2(present(own.norm.maximum), present(own.norm.sum)));
    }
  }
  if (!chunks.collects) return;
  __syncthreads();
#pragma unroll 1
  for (int chunk = threadIdx.x / 32; chunk < chunks.count; chunk += shared.warps) {
    const int row = threadIdx.x % 32;
    if (chunk == chunks.own || row >= heads) continue;
    const int64_t place = (chunks.first_slot + int64_t{chunk} * gridDim.x) * plan.rows + row;
    __stcg(reinterpret_cast<float2*>(plan.partial_norm) + place, make_float2(0.0f, 0.0f));
  }
}

// Requests without keys, which are many where a batch is padded: a segment each would cost as much as many tiles.
template <class T>
__device__ __forceinline__ void write_keyless(const VegasSparseParams& p, const SparsePlan& plan,
                                              const SegmentWalk<T::kCalls>& walk) {
  constexpr int kQuads = T::kHeadDim / 4;
#pragma unroll 1
  for (int b = walk.share; b < p.batch; b += gridDim.y) {
    if (!walk.is_keyless(b)) continue;
#pragma unroll 1
    for (int first_head = blockIdx.x * plan.group; first_head < p.num_heads_q; first_head += gridDim.x * plan.group) {
#pragma unroll 1
      for (int item = threadIdx.x; item < plan.group * kQuads; item += blockDim.x) {
        write_columns<T>(p, b, first_head + item / kQuads, item % kQuads * 4, RowPart<float4>(), -INFINITY, 1.0f);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kSparseMaxWarps, 1)
    sparse_kernel(const __grid_constant__ VegasSparseParams p, const __grid_constant__ SparsePlan plan, int stages,
                  int warps_log2) {
  using Element = typename T::Element;
  using Lists = LongestLists<T::kCalls>;
  extern __shared__ __align__(128) char shared_bytes[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const SparseShared<T> shared = {shared_bytes, 1 << warps_log2, stages, plan.rows};
  release_next_launch();
  // A few requests are looked up while the previous launch ends, and again when it has: rarely is there a difference.
#pragma unroll 1
  for (bool early = (T::kCalls != Calls::kAny || p.batch <= kLookedUp) && Lists::keeps_all(p);; early = false) {
    if (!early) wait_for_previous_launch();
    const Lists lists(p, plan.heads_kv, shared.longest_lists());
    SegmentWalk<T::kCalls> segment(p, plan, lists);
    KeyStream<T> stream(segment, shared.stage_bytes(warp), shared.valid(warp), stages, warps_log2);
    stream.prepare();
    if (early) {
      stream.bring();
      wait_for_previous_launch();
    }
    bool stale = false;
    bool first = true;
#pragma unroll 1
    for (int turn = 0;; turn ^= 1) {
      if (!segment.next() && !first) break;
      const int kv_head = segment.kv_head();
      const int first_row = segment.row_tile() * T::kHeads;
      const int first_head = kv_head * plan.group + first_row;
      const bool is_cluster = plan.cluster > 1 && !segment.has_shares();
      const int heads = segment.tiles > 0 || is_cluster ? min(plan.rows, plan.group - first_row) : 0;
      // Where memory is what a call waits for, it gets something to do before all else.
      if (first && stream.ready_tiles > kFewTiles) stream.start(1);
      const HeadQuery<T> query(
          static_cast<const Element*>(p.q) + segment.request * p.q_stride_row + first_head * p.q_stride_head,
          p.q_stride_head, heads, T::head_dim(p.cache));
      if (first) {
        // The copies of what was found early start beside the look at what is there now.
        const typename KeyStream<T>::Current current(stream);
        stream.start(stages);
        stale = early && current.differs(stream);
        if (stale || heads == 0) break;
        stream.fetch();
      }
      const Scoring scoring = {p.softmax_scale * descale_of(p.cache.k, segment.request, kv_head), p.softcap, INT_MIN,
                               INT_MAX};
      const Chunks chunks(segment);
      HeadState<T> state;
      const int tiles = WarpPart(segment, warps_log2).tiles;
#pragma unroll 1
      for (int n = 0; n < tiles; ++n) {
        const int stage = stream.next();
        const char* k_tile = shared.stage_bytes(warp) + stage * T::kStageBytes;

        // scores
        float x[T::kHeadTiles][4];
        multiply_keys<T>(x, query, k_tile);
        const uint32_t valid = shared.valid(warp)[stage];
        if (T::kCalls == Calls::kAny && !scoring.keeps_products()) cap_scores(x, scoring);
        if (valid != 0xffffu) {
#pragma unroll
          for (int i = 0; i < T::kHeadTiles * 4; ++i) {
            if (!(valid >> (lane / 4 + i % 4 / 2 * 8) & 1)) x[i / 4][i % 4] = -INFINITY;
          }
        }

        // softmax
        uint32_t weights[T::kHeadTiles][2];
        state.weigh(x, (T::kCalls == Calls::kAny ? scoring.logit_scale() : scoring.scale) * kLog2e, weights);

        // accumulate
        state.accumulate(weights, k_tile + T::kTileBytes);
      }

#pragma unroll
      for (int m = 0; m < T::kHeadTiles; ++m) {
        write_heads(state, m, heads, shared.output(turn, warp) + 8 * m * T::kHeadDim, shared.norms(turn, warp) + 8 * m);
      }
      if (is_cluster) {
        merge_cluster<T>(p, plan, shared, segment.request, kv_head, first_head, heads);
        break;
      }
      __syncthreads();
      finish_segment(p, plan, shared, turn, segment, chunks, first_head, heads);
      first = false;
    }
    if (!stale) {
      write_keyless<T>(p, plan, segment);
      break;
    }
    cute::cp_async_wait<0>();
  }
  cute::cp_async_wait<0>();
}

}  // namespace vegas_ops::portable
