// Paged attention over a few query rows per request, dumping logits on the way (mma.sync and cp.async, any
// GPU from sm_80). One CTA: one KV head, one tile of packed rows of one request, one chunk of its keys.
#pragma once

#include <cuda_runtime.h>

#include "verify/guides.cuh"

namespace vegas_ops::portable {

// The keys [begin, end) of a request, through its block table.
struct PagedKeys {
  const int32_t* table;  // of the request
  int page_size;
  int begin;
  int first_read;  // keys outside [first_read, end_read) are beyond the chunk or masked for all rows: never read
  int end_read;
  LaneAddress address;
  int position;
  int column;  // of the position in the table, and its slot in the page: kept up without dividing
  int column_slot;
  int step_columns;  // from one tile of a warp to its next
  int step_slots;
  int page;
  int slot;

  __device__ PagedKeys(const int32_t* request_table, int page_tokens, int begin_key, int end_key, int first_seen_key,
                       int last_seen_key, const LaneAddress& lane_address)
      : table(request_table),
        page_size(page_tokens),
        begin(begin_key),
        first_read(first_seen_key),
        end_read(min(end_key, last_seen_key + 1)),
        address(lane_address),
        step_columns(kWarps * kTileKeys / page_tokens),
        step_slots(kWarps * kTileKeys % page_tokens),
        page(-1),
        slot(0) {
    position = begin + threadIdx.x / 32 * kTileKeys + threadIdx.x % kTileKeys;
    column = position / page_size - step_columns;
    column_slot = position % page_size - step_slots;
  }

  __device__ void fetch(int tile) {
    position = begin + tile * kTileKeys + threadIdx.x % kTileKeys;
    column += step_columns;
    column_slot += step_slots;
    if (column_slot >= page_size) {
      column_slot -= page_size;
      ++column;
    }
  }
  __device__ void lookup() {
    page = -1;
    if (position >= first_read && position < end_read) {
      page = __ldg(table + column);
      slot = column_slot;
    }
  }
  __device__ int64_t offset() const { return address(page, slot); }
};

// What a CTA dumps, in shared memory: registers are short.
struct SharedDump {
  GuideDump guides;
  const void* guide_heads[2];  // query of the first head of each guide row
  int group;
  int64_t head_stride;
  // rows, all: planes of logits
  int length;  // keys at or beyond are not written
  void* logits;
  bool bf16;
  int64_t second_plane;        // distance of a second plane that gets the same values, or 0
  RowNorm norms[kWarps * 32];  // of each lane's keys and guide row
};

template <class T>
struct VerifyDump {
  using Element = typename T::Element;
  SharedDump& shared;
  const uint2* columns;  // (k step, 4 columns, 4 lanes): the guide rows as B operand
  int head_dim;

  // Logits of rows.
  __device__ __forceinline__ bool wants(int first_key) const { return first_key < shared.length; }

  // x * scale are the logits.
  template <int kRowTiles>
  __device__ __forceinline__ void operator()(const float (&x)[kRowTiles][2][4], float scale, const RowInfo* rows,
                                             int first_key, uint32_t valid) const {
    if (!wants(first_key)) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int64_t row = rows[16 * m + lane / 4 + 8 * i].dump;
        if (row < 0) continue;
        const int key = first_key + 2 * (lane % 4);
        const int64_t at = row + key;
        const int left = shared.length - key;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = 8 * (c / 2) + c % 2;
          if (column >= left) continue;
          const float value = (i == 0 ? x[m][c / 2][c % 2] : x[m][c / 2][2 + c % 2]) * scale;
          store_logit(shared.logits, shared.bf16, at + column, value);
          if (shared.second_plane) store_logit(shared.logits, shared.bf16, at + shared.second_plane + column, value);
        }
      }
    }
  }

  // Multiplies a tile's keys with the guide rows, and writes what these dump.
  __device__ __forceinline__ void see_keys(const char* k_tile, int first_key, uint32_t valid,
                                           const Scoring& scoring) const {
    const GuideDump& guides = shared.guides;
    if (guides.num_guides == 0) return;
    const int lane = threadIdx.x % 32;
    const bool token = guides.kind == VEGAS_DUMP_TOKEN;
    if (token && first_key >= guides.length) return;
    // The four lanes with the same products take turns in the two keys, and in the guide rows.
    const int second = lane % 2;
    const int own = lane / 2 % 2;
    const int column = lane / 4 + 8 * second;
    float logit;
    if (token && scoring.softcap > 0.0f) {
      logit = capped_sum(k_tile, scoring);
    } else {
      float x[4];
      multiply_columns<T, T::kHeadDim / 32>(x, [&](int k) { return columns[16 * k + lane % 16]; }, k_tile);
      float product = own ? (second ? x[3] : x[1]) : (second ? x[2] : x[0]);
      if (token) {
        // The neighbour has the sum's other two terms of this key.
        product = second ? x[2] + x[3] : x[0] + x[1];
        product += __shfl_xor_sync(0xffffffffu, second ? x[0] + x[1] : x[2] + x[3], 1);
      }
      logit = scoring.logit(product);
    }
    const int key = first_key + column;
    if (!(valid >> column & 1) || !guides.sees(own, key)) logit = -INFINITY;
    const float other = __shfl_xor_sync(0xffffffffu, logit, 2);
    if (!own) guides.write(key, logit, other);
    if (!token) add_logits(shared.norms[threadIdx.x], {logit});
  }

  // A cap comes before the sum over heads: products with all their rows, eight at a time.
  __device__ __forceinline__ float capped_sum(const char* k_tile, const Scoring& scoring) const {
    const int lane = threadIdx.x % 32;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int row = lane / 4; row - lane / 4 < shared.group * shared.guides.num_guides; row += 8) {
      const int guide = row / shared.group;
      const bool exists = guide < shared.guides.num_guides;
      const Element* query =
          static_cast<const Element*>(shared.guide_heads[exists ? guide : 0]) + row % shared.group * shared.head_stride;
      const auto pair = [&](int d) {
        const bool read = exists && d < head_dim;
        return read ? pack<Element>(to_float(query[d]), to_float(query[d + 1])) : 0;
      };
      float x[4];
      multiply_columns<T, 1>(
          x,
          [&](int k) {
            const int d = 16 * k + (T::kFp8 ? 4 : 2) * (lane % 4);
            return make_uint2(pair(d), pair(d + (T::kFp8 ? 2 : 8)));
          },
          k_tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i / 2] += scoring.logit(x[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
    }
    return lane % 2 ? sums[1] : sums[0];
  }
};

// Query rows and what each row sees and dumps, into shared memory.
template <class T>
__device__ inline void load_rows(const SharedTile<T>& shared, const VegasVerifyParams& p, const VerifyRequest& request,
                                 int b, int kv_head, int first_row, int tile_rows, int num_rows) {
  using Element = typename T::Element;
  const Element* q = static_cast<const Element*>(p.q);
  const bool aligned = query_aligned(p);
  for (int i = threadIdx.x; i < tile_rows * T::kQuerySegments; i += blockDim.x) {
    const int row = i / T::kQuerySegments;
    const int chunk = i % T::kQuerySegments;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (row < num_rows && chunk * 8 < p.cache.head_dim) {
      const PackedRow packed(p, request, kv_head, first_row + row);
      const Element* source =
          q + (request.q_begin + int64_t{packed.query}) * p.q_stride_row + packed.head * p.q_stride_head + chunk * 8;
      values = load_query(source, aligned);
    }
    shared.query().store(row, chunk, values);
  }
  for (int row = threadIdx.x; row < tile_rows; row += blockDim.x) {
    RowInfo info = {0, -1, -1};
    if (row < num_rows) {
      const PackedRow packed(p, request, kv_head, first_row + row);
      request.visible(p, packed.query, info.first_key, info.last_key);
      // A plane stands for the last row only where it is not the first as well.
      const int plane = packed.dumped & VEGAS_FIRST_ROW ? 0 : 1;
      const int64_t* stride = p.logits_stride;
      if (p.dump == VEGAS_DUMP_ROWS && packed.dumped) {
        info.dump = b * stride[0] + packed.head * stride[1] + plane * stride[2];
      } else if (p.dump == VEGAS_DUMP_ALL && request.bits) {
        info.dump = (request.q_begin + packed.query) * stride[0] + packed.head * stride[1];
      }
    }
    shared.rows()[row] = info;
  }
}

// The guide rows as the B operand of multiply_columns, into shared memory.
template <class T>
__device__ inline void load_guides(const VegasVerifyParams& p, const VerifyRequest& request, int kv_head,
                                   uint2* columns) {
  for (int i = threadIdx.x; i < kGuideColumns * T::kQuerySegments; i += blockDim.x) {
    const int column = i / T::kQuerySegments;
    const int segment = i % T::kQuerySegments;
    const int half = segment % 2;
    uint4 values[1];
    guide_column<typename T::Element>(p, request, kv_head, column, segment, values);
    const uint32_t pairs[4] = {values[0].x, values[0].y, values[0].z, values[0].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // The order of k within a step is that of the widened keys, see QueryTile.
      const int lane = T::kFp8 ? 2 * half + j / 2 : j;
      uint2& words = columns[16 * (segment / 2) + 4 * column + lane];
      ((T::kFp8 ? j % 2 : half) ? words.y : words.x) = pairs[j];
    }
  }
}

template <class T>
__device__ inline void describe_dump(SharedDump& dump, const VegasVerifyParams& p, const PlanWorkspace& w,
                                     const VerifyRequest& request, int b, int kv_head, int row_tile) {
  using Element = typename T::Element;
  describe_guides(dump.guides, p, request, b, kv_head, kv_head, p.cache.num_heads_kv, w.dump);
  if (row_tile > 0) dump.guides.num_guides = 0;
  for (int g = 0; g < request.num_guides; ++g) dump.guide_heads[g] = guide_heads<Element>(p, request, kv_head, g);
  dump.group = p.num_heads_q / p.cache.num_heads_kv;
  dump.head_stride = p.q_stride_head;
  dump.length = p.dump == VEGAS_DUMP_ROWS || p.dump == VEGAS_DUMP_ALL ? request.dump_len : 0;
  dump.logits = p.logits;
  dump.bf16 = p.logits_dtype == VEGAS_BFLOAT16;
  const bool one_row_twice = request.q_len == 1 && request.bits == 3;
  dump.second_plane = p.dump == VEGAS_DUMP_ROWS && one_row_twice ? p.logits_stride[2] : 0;
}

// CTAs of the largest size per SM that registers are bounded for: on sm_80, code that splits rows of wide heads would
// spill at that bound.
template <class T>
constexpr int min_ctas() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
  return T::kSplitRows && T::kHeadDim > 64 ? 1 : 2;
#else
  return 2;
#endif
}

template <class T>
__global__ void __launch_bounds__(32 * T::kMaxWarps, min_ctas<T>())
    verify_kernel(const __grid_constant__ VegasVerifyParams p, const __grid_constant__ PlanWorkspace w, int stages) {
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ SharedDump dumps;
  __shared__ Scoring scoring;
  __shared__ uint2 guide_columns[kGuideColumns * T::kHeadDim / 4];
  const int unit_index = blockIdx.x / p.cache.num_heads_kv;
  const int kv_head = blockIdx.x % p.cache.num_heads_kv;
  if (unit_index >= *w.num_units) return;
  const PlannedUnit unit = w.units[unit_index];
  const int chunk_keys = w.requests[unit.request].chunk_keys;
  const int b = unit.request;
  const VerifyRequest request(p, b);
  const int warps = blockDim.x / 32;
  const int tile_rows = T::kSplitRows ? warps * T::kWarpRows : T::kRows;
  const int first_row = unit.row_tile * tile_rows;
  const int num_rows = min(tile_rows, request.packed_rows(p) - first_row);
  const SharedTile<T> shared = {shared_bytes, stages};

  const int begin = request.first_key + unit.chunk * chunk_keys;
  const int end = begin + min(request.end_key - begin, chunk_keys);
  int first_seen, last_seen, unused;
  request.visible(p, 0, first_seen, unused);
  request.visible(p, request.q_len - 1, unused, last_seen);
  PagedKeys keys = {
      p.cache.block_table + b * p.cache.block_table_stride, p.cache.page_size, begin, end, first_seen, last_seen,
      LaneAddress{p.cache, kv_head, T::kCacheBytes}};
  if (threadIdx.x < kThreads) dumps.norms[threadIdx.x] = {-INFINITY, 0.0f};
  if (threadIdx.x == 0) {
    scoring = {p.softmax_scale * descale_of(p.cache.k, b, kv_head), p.softcap, request.first_full_key,
               request.last_full_key};
    describe_dump<T>(dumps, p, w, request, b, kv_head, unit.row_tile);
  }
  const auto prepare = [&] {
    load_rows(shared, p, request, b, kv_head, first_row, tile_rows, num_rows);
    if (request.num_guides > 0 && unit.row_tile == 0) load_guides<T>(p, request, kv_head, guide_columns);
  };
  VerifyDump<T> dump = {dumps, guide_columns, p.cache.head_dim};
  SoftmaxState<T> state;
  attend(shared, keys, p.cache, scoring, dump, prepare, num_rows, begin, ceil_div(end - begin, kTileKeys), stages,
         state);
  if (dumps.guides.num_guides > 0 && threadIdx.x < kThreads) {
    RowNorm norm = dumps.norms[threadIdx.x];
#pragma unroll
    for (int step : {1, 4, 8, 16}) merge_lanes(norm, step);
    dumps.norms[threadIdx.x] = norm;
  }

  // Read again, for registers are short while keys are attended.
  const PlannedUnit done = w.units[unit_index];
  const PlannedRequest plan = w.requests[done.request];
  const VerifyRequest finished(p, done.request);
  const int rows = min(tile_rows, finished.packed_rows(p) - done.row_tile * tile_rows);
  merge_warps(shared, state, rows, [&](int row, const RowNorm& norm, const auto& value) {
    if (plan.chunks == 1) {
      const int packed_row = done.row_tile * tile_rows + row;
      finish_row(row_output<typename T::Element>(p, finished, done.request, kv_head, packed_row), norm,
                 p.cache.head_dim, value);
    } else {
      const int tiles = finished.row_tiles(p, tile_rows);
      store_partial(w, w.partial_row(plan, tiles, done.chunk, done.row_tile, kv_head, row), norm, value);
    }
  });
  const int guide = threadIdx.x;
  if (p.dump == VEGAS_DUMP_TOKEN || guide >= dumps.guides.num_guides) return;
  const RowNorm* parts = dumps.norms + 2 * guide;  // of the lanes that had it
  RowNorm whole = {-INFINITY, 0.0f};
  for (int i = 0; i < kWarps; ++i) whole.maximum = fmaxf(whole.maximum, parts[32 * i].maximum);
  for (int i = 0; i < kWarps; ++i) whole.sum += parts[32 * i].sum * parts[32 * i].weight_in(whole);
  if (plan.chunks == 1) {
    write_guide_lse(p, finished, done.request, kv_head, guide, whole.lse());
  } else {
    *w.extra_norm_of(plan, finished.row_tiles(p, tile_rows), done.chunk, kv_head, guide) =
        make_float2(whole.maximum, whole.sum);
  }
}

}  // namespace vegas_ops::portable
