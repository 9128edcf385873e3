// A request of a verification as the kernels see it: its rows and keys, and what its packed rows stand for.
#pragma once

#include <cuda_runtime.h>

#include "common/finish_rows.cuh"

namespace vegas_ops::portable {

// Reads what no launch in progress writes.
struct PlainLoad {
  __device__ __forceinline__ int operator()(const int32_t* from) const { return *from; }
};

// The group of a KV head and q_len rows are packed into rows of one tile: the heads of the first row, of the last row,
// and of all others. Guide rows are not among them.
struct VerifyRequest {
  int q_begin;
  int q_len;
  int keys;  // seqused_k
  int bits;  // dumped rows; 0 without a dump
  int dump_len;
  int num_guides;  // rows whose heads are dumped as one: 2, or 1 where the first is the last or one is asked for
  int first_key;   // keys that are attended: [first_key, end_key)
  int end_key;
  int first_full_key;  // keys that every row sees: [first_full_key, last_full_key]
  int last_full_key;

  VerifyRequest() = default;
  template <class Load = PlainLoad>
  __device__ VerifyRequest(const VegasVerifyParams& p, int b, const Load& load = {}) {
    q_begin = clamp(load(p.cu_seqlens_q + b), 0, p.total_q);
    q_len = min(clamp(load(p.cu_seqlens_q + b + 1), q_begin, p.total_q) - q_begin, p.max_seqlen_q);
    const int64_t capacity = int64_t{p.cache.max_pages} * p.cache.page_size;
    const int bound = capacity < p.max_seqlen_k ? static_cast<int>(capacity) : p.max_seqlen_k;
    keys = clamp(load(p.seqused_k + b), 0, bound);
    bits = p.dump == VEGAS_DUMP_NONE || q_len == 0 ? 0 : p.dump_rows ? load(p.dump_rows + b) & 3 : 3;
    dump_len = bits == 0 ? 0 : clamp(p.dump_len ? load(p.dump_len + b) : keys - q_len + 1, 0, keys);
    const bool guided = p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT || p.dump == VEGAS_DUMP_KV_HEAD;
    num_guides = !guided || bits == 0 ? 0 : bits == 3 && q_len > 1 ? 2 : 1;
    int last;
    visible(p, 0, first_key, last_full_key);
    visible(p, q_len - 1, first_full_key, last);
    end_key = last + 1;
    // Rows write their masked positions, too; those of other dumps are left to the last launch.
    if (dump_len > 0 && !guided) {
      first_key = 0;
      end_key = keys;
    }
    if (end_key <= first_key) first_key = end_key = 0;
  }

  // All else follows from these.
  __device__ bool operator==(const VerifyRequest& other) const {
    return q_begin == other.q_begin && q_len == other.q_len && keys == other.keys && bits == other.bits &&
           dump_len == other.dump_len;
  }

  __device__ static int clamp(int x, int low, int high) { return max(low, min(x, high)); }

  // Keys that a query row of the request sees; last < first for a row without keys.
  __device__ void visible(const VegasVerifyParams& p, int row, int& first, int& last) const {
    const int position = keys - q_len + row;
    int low = 0;
    int high = keys - 1;
    if (p.causal) high = min(high, position);
    if (p.window_right >= 0 && p.window_right < high - position) high = position + p.window_right;
    if (p.window_left >= 0 && p.window_left < position) low = position - p.window_left;
    first = min(low, keys);
    last = max(high, -1);
  }

  __device__ int packed_rows(const VegasVerifyParams& p) const {
    return q_len * (p.num_heads_q / p.cache.num_heads_kv);
  }
  __device__ int row_tiles(const VegasVerifyParams& p, int tile_rows) const {
    return ceil_div(packed_rows(p), tile_rows);
  }
  // Plane of the dump that guide row g stands for, and its query row.
  __device__ int guide_plane(int g) const { return bits & VEGAS_FIRST_ROW ? g : 1; }
  __device__ int guide_query(int g) const { return guide_plane(g) == 0 ? 0 : q_len - 1; }
};

// What a packed row stands for.
struct PackedRow {
  int query;   // row within the request
  int head;    // of the query
  int dumped;  // bits of the dumped rows that `query` is

  __device__ PackedRow(const VegasVerifyParams& p, const VerifyRequest& request, int kv_head, int row) {
    const int group = p.num_heads_q / p.cache.num_heads_kv;
    const int order = row / group;
    query = order == 0 ? 0 : order == 1 ? request.q_len - 1 : order - 1;
    head = kv_head * group + row % group;
    dumped = ((query == 0 ? VEGAS_FIRST_ROW : 0) | (query == request.q_len - 1 ? VEGAS_LAST_ROW : 0)) & request.bits;
  }
};

__device__ __forceinline__ void store_logit(void* logits, bool bf16, int64_t at, float value) {
  if (bf16) {
    static_cast<__nv_bfloat16*>(logits)[at] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(logits)[at] = value;
  }
}

template <class Element>
__device__ inline RowOutput<Element> row_output(const VegasVerifyParams& p, const VerifyRequest& request, int b,
                                                int kv_head, int row) {
  const PackedRow packed(p, request, kv_head, row);
  RowOutput<Element> target = {};
  const int64_t q_row = request.q_begin + packed.query;
  target.out = static_cast<Element*>(p.out) + q_row * p.out_stride_row + packed.head * p.out_stride_head;
  target.lse = p.lse + int64_t{packed.head} * p.total_q + q_row;
  target.sink = p.sinks ? p.sinks + packed.head : nullptr;
  target.v_descale = descale_of(p.cache.v, b, kv_head);
  return target;
}

}  // namespace vegas_ops::portable
