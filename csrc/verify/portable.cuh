// Paged attention over a few query rows per request, dumping logits on the way (mma.sync and cp.async, any
// GPU from sm_80). One CTA: one KV head, one tile of packed rows of one request, one chunk of its keys.
#pragma once

#include <cuda_runtime.h>

#include "common/finish_rows.cuh"

namespace vegas_ops::portable {

// The group of a KV head and q_len rows are packed into rows of one tile, those that are dumped first, so that
// they share a tile: guide rows, then the heads of the first row, of the last row, and of all others.
struct VerifyRequest {
  int q_begin;
  int q_len;
  int keys;  // seqused_k
  int bits;  // dumped rows; 0 without a dump
  int dump_len;
  int num_guides;
  int first_key;  // keys that are attended: [first_key, end_key)
  int end_key;
  int first_full_key;  // keys that every row sees: [first_full_key, last_full_key]
  int last_full_key;

  __device__ VerifyRequest(const VegasVerifyParams& p, int b) {
    q_begin = clamp(p.cu_seqlens_q[b], 0, p.total_q);
    q_len = min(clamp(p.cu_seqlens_q[b + 1], q_begin, p.total_q) - q_begin, p.max_seqlen_q);
    const int64_t capacity = int64_t{p.cache.max_pages} * p.cache.page_size;
    const int bound = capacity < p.max_seqlen_k ? static_cast<int>(capacity) : p.max_seqlen_k;
    keys = clamp(p.seqused_k[b], 0, bound);
    bits = p.dump == VEGAS_DUMP_NONE || q_len == 0 ? 0 : p.dump_rows ? p.dump_rows[b] & 3 : 3;
    dump_len = bits == 0 ? 0 : clamp(p.dump_len ? p.dump_len[b] : keys - q_len + 1, 0, keys);
    const bool guided = p.dump == VEGAS_DUMP_TOKEN_WEIGHT || p.dump == VEGAS_DUMP_KV_HEAD;
    num_guides = !guided || bits == 0 ? 0 : bits == 3 && q_len > 1 ? 2 : 1;
    int last;
    visible(p, 0, first_key, last_full_key);
    visible(p, q_len - 1, first_full_key, last);
    end_key = last + 1;
    // Masked positions of a dump are written too.
    if (dump_len > 0) {
      first_key = 0;
      end_key = keys;
    }
    if (end_key <= first_key) first_key = end_key = 0;
  }

  __device__ static int clamp(int x, int low, int high) { return max(low, min(x, high)); }

  // Keys that a query row of the request sees; last < first for a row without keys.
  __device__ void visible(const VegasVerifyParams& p, int row, int& first, int& last) const {
    const int64_t position = int64_t{keys} - q_len + row;
    int64_t low = 0;
    int64_t high = keys - 1;
    if (p.causal && position < high) high = position;
    if (p.window_right >= 0 && position + p.window_right < high) high = position + p.window_right;
    if (p.window_left >= 0 && position - p.window_left > low) low = position - p.window_left;
    first = static_cast<int>(low < keys ? low : keys);
    last = static_cast<int>(high > -1 ? high : -1);
  }

  __device__ int packed_rows(const VegasVerifyParams& p) const {
    return q_len == 0 ? 0 : num_guides + q_len * (p.num_heads_q / p.cache.num_heads_kv);
  }
  __device__ int row_tiles(const VegasVerifyParams& p, int tile_rows) const {
    return ceil_div(packed_rows(p), tile_rows);
  }
  // Plane of the dump that guide row g stands for.
  __device__ int guide_plane(int g) const { return bits & VEGAS_FIRST_ROW ? g : 1; }
  // Warps' rows that hold rows counted by a token dump.
  __device__ int token_tiles(const VegasVerifyParams& p, int warp_rows) const {
    return ceil_div(min(q_len, 2) * (p.num_heads_q / p.cache.num_heads_kv), warp_rows);
  }
};

// What a packed row stands for.
struct PackedRow {
  int guide;   // index of the guide row, or -1
  int query;   // row within the request
  int head;    // of the query; of a guide row, the first of its group
  int dumped;  // bits of the dumped rows that `query` is

  __device__ PackedRow(const VegasVerifyParams& p, const VerifyRequest& request, int kv_head, int row) {
    const int group = p.num_heads_q / p.cache.num_heads_kv;
    guide = row < request.num_guides ? row : -1;
    if (guide >= 0) {
      query = request.guide_plane(guide) == 0 ? 0 : request.q_len - 1;
      head = kv_head * group;
    } else {
      const int order = (row - request.num_guides) / group;
      query = order == 0 ? 0 : order == 1 ? request.q_len - 1 : order - 1;
      head = kv_head * group + (row - request.num_guides) % group;
    }
    dumped = ((query == 0 ? VEGAS_FIRST_ROW : 0) | (query == request.q_len - 1 ? VEGAS_LAST_ROW : 0)) & request.bits;
  }
};

template <class Element>
__device__ inline RowOutput<Element> row_output(const VegasVerifyParams& p, const VerifyRequest& request, int b,
                                                int kv_head, int row) {
  const PackedRow packed(p, request, kv_head, row);
  RowOutput<Element> target = {};
  if (packed.guide >= 0) {
    float* planes = p.guide_lse + int64_t{b} * 2 * p.cache.num_heads_kv + kv_head;
    const int plane = request.guide_plane(packed.guide);
    target.lse = planes + plane * p.cache.num_heads_kv;
    // A plane that was not dumped repeats the other.
    if (request.num_guides == 1) target.second_lse = planes + (1 - plane) * p.cache.num_heads_kv;
    return target;
  }
  const int64_t q_row = request.q_begin + packed.query;
  target.out = static_cast<Element*>(p.out) + q_row * p.out_stride_row + packed.head * p.out_stride_head;
  target.lse = p.lse + int64_t{packed.head} * p.total_q + q_row;
  target.sink = p.sinks ? p.sinks + packed.head : nullptr;
  target.v_descale = descale_of(p.cache.v, b, kv_head);
  return target;
}

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

// How a warp's logits of a tile of keys are written, as the kind of dump wants it. Kept in shared memory: registers are
// short.
struct LogitDump {
  VegasDump kind;
  int length;  // keys at or beyond are not written
  // token, token_weight: the part of this warp's rows, and which keys are masked for a dumped row
  float* sums;
  int first_seen;
  int last_seen;
  int num_guides;
  float hint[2];  // token_weight: normalisers of guide rows
  // planes of logits
  void* logits;
  bool bf16;
  int64_t second_plane;  // distance of a second plane that gets the same values, or 0

  __device__ __forceinline__ void store(int64_t at, float value) const {
    if (bf16) {
      static_cast<__nv_bfloat16*>(logits)[at] = __float2bfloat16_rn(value);
    } else {
      static_cast<float*>(logits)[at] = value;
    }
  }

  // x * scale are the logits.
  template <int kRowTiles>
  __device__ __forceinline__ void operator()(const float (&x)[kRowTiles][2][4], float scale, const RowInfo* rows,
                                             int first_key, uint32_t valid) const {
    if (first_key >= length) return;
    if (kind == VEGAS_DUMP_TOKEN) {
      add_rows(x, scale, rows, first_key, valid);
    } else if (kind == VEGAS_DUMP_TOKEN_WEIGHT) {
      add_weights(x, scale, first_key, valid);
    } else {
      store_planes(x, scale, rows, first_key);
    }
  }

  template <int kRowTiles>
  __device__ __forceinline__ void store_planes(const float (&x)[kRowTiles][2][4], float scale, const RowInfo* rows,
                                               int first_key) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int64_t row = rows[16 * m + lane / 4 + 8 * i].dump;
        if (row < 0) continue;
        const int key = first_key + 2 * (lane % 4);
        const int64_t at = row + key;
        const int left = length - key;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = 8 * (c / 2) + c % 2;
          if (column >= left) continue;
          const float value = (i == 0 ? x[m][c / 2][c % 2] : x[m][c / 2][2 + c % 2]) * scale;
          store(at + column, value);
          if (second_plane) store(at + second_plane + column, value);
        }
      }
    }
  }

  // Sum over the dumped rows of the warp, in a fixed order.
  template <int kRowTiles>
  __device__ __forceinline__ void add_rows(const float (&x)[kRowTiles][2][4], float scale, const RowInfo* rows,
                                           int first_key, uint32_t valid) const {
    const int lane = threadIdx.x % 32;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool counted = rows[16 * m + lane / 4 + 8 * i].dump >= 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += counted ? x[m][c / 2][2 * i + c % 2] * scale : 0.0f;
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], step);
    }
    store_sums(sum, first_key, valid);
  }

  template <int kRowTiles>
  __device__ __forceinline__ void add_weights(const float (&x)[kRowTiles][2][4], float scale, int first_key,
                                              uint32_t valid) const {
    const int row = threadIdx.x % 32 / 4;
    const bool guide = row < num_guides;
    const float normaliser = row == 0 ? hint[0] : hint[1];
    float sum[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sum[c] = guide ? expf(x[0][c / 2][c % 2] * scale - normaliser) : 0.0f;
      sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], 4);
    }
    store_sums(sum, first_key, valid);
  }

  __device__ __forceinline__ void store_sums(const float (&sum)[4], int first_key, uint32_t valid) const {
    const int lane = threadIdx.x % 32;
    if (lane >= 4) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int column = 8 * (c / 2) + 2 * lane + c % 2;
      const int key = first_key + column;
      if (key >= length) continue;
      const bool masked = !(valid >> column & 1) || key < first_seen || key > last_seen;
      sums[key] = masked ? -INFINITY : sum[c];
    }
  }
};

// Mean of a group's heads: summed in fp32, rounded once.
template <class Element>
__device__ inline uint4 load_guide(const Element* source, int64_t stride_head, int group, bool aligned) {
  float2 sum[4] = {};
  for (int g = 0; g < group; ++g) {
    const uint4 values = load_query(source + g * stride_head, aligned);
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Element>(words[i]);
      sum[i].x += pair.x;
      sum[i].y += pair.y;
    }
  }
  uint32_t mean[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) mean[i] = pack<Element>(sum[i].x / group, sum[i].y / group);
  return make_uint4(mean[0], mean[1], mean[2], mean[3]);
}

// Query rows and what each row sees and dumps, into shared memory.
template <class T>
__device__ inline void load_rows(const SharedTile<T>& shared, const VegasVerifyParams& p, const VerifyRequest& request,
                                 int b, int kv_head, int first_row, int tile_rows, int num_rows) {
  using Element = typename T::Element;
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const Element* q = static_cast<const Element*>(p.q);
  const bool aligned = ((reinterpret_cast<uintptr_t>(q) | (p.q_stride_row * 2) | (p.q_stride_head * 2)) & 15) == 0;
  for (int i = threadIdx.x; i < tile_rows * T::kQuerySegments; i += blockDim.x) {
    const int row = i / T::kQuerySegments;
    const int chunk = i % T::kQuerySegments;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (row < num_rows && chunk * 8 < p.cache.head_dim) {
      const PackedRow packed(p, request, kv_head, first_row + row);
      const Element* source =
          q + (request.q_begin + int64_t{packed.query}) * p.q_stride_row + packed.head * p.q_stride_head + chunk * 8;
      values = packed.guide >= 0 ? load_guide(source, p.q_stride_head, group, aligned) : load_query(source, aligned);
    }
    shared.query().store(row, chunk, values);
  }
  for (int row = threadIdx.x; row < tile_rows; row += blockDim.x) {
    RowInfo info = {0, -1, -1};
    if (row < num_rows) {
      const PackedRow packed(p, request, kv_head, first_row + row);
      request.visible(p, packed.query, info.first_key, info.last_key);
      const bool guide = packed.guide >= 0;
      // A plane stands for the last row only where it is not the first as well.
      const int plane = packed.dumped & VEGAS_FIRST_ROW ? 0 : 1;
      const int64_t* stride = p.logits_stride;
      if (p.dump == VEGAS_DUMP_KV_HEAD && guide) {
        info.dump = b * stride[0] + request.guide_plane(packed.guide) * stride[1] + kv_head * stride[2];
      } else if (p.dump == VEGAS_DUMP_ROWS && packed.dumped) {
        info.dump = b * stride[0] + packed.head * stride[1] + plane * stride[2];
      } else if (p.dump == VEGAS_DUMP_ALL && request.bits) {
        info.dump = (request.q_begin + packed.query) * stride[0] + packed.head * stride[1];
      } else if (p.dump == VEGAS_DUMP_TOKEN && packed.dumped) {
        info.dump = 0;
      }
    }
    shared.rows()[row] = info;
  }
}

// What a warp dumps: warp_tile numbers the rows of warps within the request.
template <class T>
__device__ inline LogitDump logit_dump(const VegasVerifyParams& p, const PlanWorkspace& w, const VerifyRequest& request,
                                       int b, int kv_head, int warp_tile, int token_tiles) {
  LogitDump dump = {};
  dump.kind = p.dump;
  dump.length = request.dump_len;
  dump.logits = p.logits;
  dump.bf16 = p.logits_dtype == VEGAS_BFLOAT16;
  const bool one_row_twice = request.q_len == 1 && request.bits == 3;
  if (p.dump == VEGAS_DUMP_KV_HEAD && one_row_twice) dump.second_plane = p.logits_stride[1];
  if (p.dump == VEGAS_DUMP_ROWS && one_row_twice) dump.second_plane = p.logits_stride[2];

  const bool sums = p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT;
  const bool guides = p.dump == VEGAS_DUMP_TOKEN_WEIGHT || p.dump == VEGAS_DUMP_KV_HEAD;
  if ((guides && warp_tile > 0) || (sums && warp_tile >= token_tiles)) dump.length = 0;
  if (!sums) return dump;
  dump.sums = w.dump + ((int64_t{b} * p.cache.num_heads_kv + kv_head) * token_tiles + warp_tile) * p.max_seqlen_k;
  dump.first_seen = 0;
  dump.last_seen = INT_MAX;
  for (int plane = 0; plane < 2; ++plane) {
    if (!(request.bits >> plane & 1)) continue;
    int first, last;
    request.visible(p, plane == 0 ? 0 : request.q_len - 1, first, last);
    dump.first_seen = max(dump.first_seen, first);
    dump.last_seen = min(dump.last_seen, last);
  }
  dump.num_guides = request.num_guides;
  if (p.dump == VEGAS_DUMP_TOKEN_WEIGHT) {
#pragma unroll
    for (int guide = 0; guide < 2; ++guide) {
      if (guide >= request.num_guides) break;
      // A row that is both first and last counts once, with the last row's hint where that was asked for.
      const int plane = request.q_len == 1 ? request.bits >> 1 : request.guide_plane(guide);
      dump.hint[guide] = p.guide_lse_hint[(int64_t{b} * 2 + plane) * p.cache.num_heads_kv + kv_head];
    }
  }
  return dump;
}

// The dumps of all warps, in shared memory.
struct WarpDumps {
  const LogitDump* dumps;

  __device__ __forceinline__ bool wants(int first_key) const { return first_key < dumps[threadIdx.x / 32].length; }
  template <int kRowTiles>
  __device__ __forceinline__ void operator()(const float (&x)[kRowTiles][2][4], float scale, const RowInfo* rows,
                                             int first_key, uint32_t valid) const {
    dumps[threadIdx.x / 32](x, scale, rows, first_key, valid);
  }
};

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
    verify_kernel(const __grid_constant__ VegasVerifyParams p, const __grid_constant__ PlanWorkspace w, int token_tiles,
                  int stages) {
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ LogitDump dumps[T::kMaxWarps];
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
  const Scoring scoring = {p.softmax_scale * descale_of(p.cache.k, b, kv_head), p.softcap, request.first_full_key,
                           request.last_full_key};
  const int warp_tile = T::kSplitRows ? unit.row_tile * warps + static_cast<int>(threadIdx.x / 32) : unit.row_tile;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) dumps[warp] = logit_dump<T>(p, w, request, b, kv_head, warp_tile, token_tiles);
  __syncwarp();
  const WarpDumps dump = {dumps};
  const auto prepare = [&] { load_rows(shared, p, request, b, kv_head, first_row, tile_rows, num_rows); };
  SoftmaxState<T> state;
  attend(shared, keys, p.cache, scoring, dump, prepare, num_rows, begin, ceil_div(end - begin, kTileKeys), stages,
         state);

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
}

}  // namespace vegas_ops::portable
