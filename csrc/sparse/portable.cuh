// Attention of one query row per request over listed tokens and a tail of newer ones (mma.sync and cp.async,
// any GPU from sm_80). One CTA: one KV head, up to 16 rows of its group, one chunk of the list and tail.
#pragma once

#include <cuda_runtime.h>

#include "common/finish_rows.cuh"

namespace vegas_ops::portable {

constexpr int kSparseRowTiles = 1;
constexpr int kSparseRows = 16 * kSparseRowTiles;
constexpr int kMaxKeys = INT_MAX - 4096;  // tiles are looked up ahead of the last one: their indices fit int

// What a request attends: entries [0, listed) of its list, then positions [tail_begin, tail_end).
struct SparseRequest {
  bool empty;
  int first_seen;  // positions outside [first_seen, last_seen] are masked, where positions are known
  int last_seen;
  int tail_begin;
  int tail_end;

  __device__ SparseRequest(const VegasSparseParams& p, int b) {
    // Positions are looked up in the table for a tail and for token indices; a length alone may lie beyond it.
    const bool uses_table = p.tail_start || !p.indices_are_slots;
    const int64_t capacity = int64_t{p.cache.max_pages} * p.cache.page_size;
    const int bound = uses_table && capacity < INT_MAX ? static_cast<int>(capacity) : INT_MAX;
    const int length = p.seqused_k ? min(max(p.seqused_k[b], 0), bound) : bound;
    empty = p.seqused_k && p.seqused_k[b] <= 0;
    first_seen = 0;
    last_seen = length - 1;
    if (p.seqused_k) {
      const int64_t position = int64_t{length} - 1;
      if (p.window_left >= 0 && position - p.window_left > 0) {
        first_seen = static_cast<int>(position - p.window_left);
      }
      if (p.window_right >= 0 && position + p.window_right < last_seen) {
        last_seen = static_cast<int>(position + p.window_right);
      }
    }
    tail_begin = tail_end = 0;
    if (p.tail_start && p.seqused_k) {
      tail_begin = max(max(p.tail_start[b], 0), first_seen);
      tail_end = max(last_seen + 1, tail_begin);
    }
  }

  // Entries of the list that a KV head attends.
  __device__ int listed(const VegasSparseParams& p, int b, int kv_head) const {
    if (empty || p.max_k == 0) return 0;
    const int count = p.topk_length[b * p.topk_length_stride_batch + kv_head * p.topk_length_stride_head];
    return min(max(count, 0), p.max_k);
  }

  // A list of that length with the tail.
  __device__ int keys_with(int listed) const {
    const int64_t keys = int64_t{listed} + (tail_end - tail_begin);
    return keys < kMaxKeys ? static_cast<int>(keys) : kMaxKeys;
  }

  // The longest list of all KV heads, with the tail.
  __device__ int keys(const VegasSparseParams& p, int b) const {
    int most = listed(p, b, 0);
    if (p.topk_length_stride_head != 0) {
      for (int head = 1; head < p.cache.num_heads_kv; ++head) most = max(most, listed(p, b, head));
    }
    return keys_with(most);
  }
};

template <class Element>
__device__ inline RowOutput<Element> row_output(const VegasSparseParams& p, int b, int kv_head, int head) {
  RowOutput<Element> target = {};
  target.out = static_cast<Element*>(p.out) + b * p.out_stride_row + head * p.out_stride_head;
  target.lse = p.lse + int64_t{head} * p.batch + b;
  target.sink = p.sinks ? p.sinks + head : nullptr;
  target.v_descale = descale_of(p.cache.v, b, kv_head);
  return target;
}

// Keys [begin, end) of a request's list followed by its tail.
struct ListedKeys {
  const int32_t* list;
  const int32_t* table;  // null where only slots are listed
  int page_size;
  bool slots;
  int begin;
  int end;
  int listed;
  SparseRequest request;
  int64_t num_slots;
  LaneAddress address;
  int entry;  // slot or position; -1: none
  bool is_slot;
  int page;
  int slot;

  __device__ void fetch(int tile) {
    const int i = begin + tile * kTileKeys + threadIdx.x % kTileKeys;
    entry = -1;
    is_slot = slots && i < listed;
    if (i < end) entry = i < listed ? __ldg(list + i) : request.tail_begin + (i - listed);
  }

  __device__ void lookup() {
    page = -1;
    if (is_slot) {
      if (entry >= 0 && entry < num_slots) page = entry / page_size;
    } else if (entry >= request.first_seen && entry <= request.last_seen) {
      page = __ldg(table + entry / page_size);
    }
    slot = entry % page_size;
  }

  __device__ int64_t offset() const { return address(page, slot); }
};

struct NoDump {
  __device__ __forceinline__ bool wants(int) const { return false; }
  __device__ __forceinline__ void see_keys(const char*, int, uint32_t, const Scoring&) const {}
  template <class Logits>
  __device__ __forceinline__ void operator()(const Logits&, float, const RowInfo*, int, uint32_t) const {}
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    sparse_kernel(const __grid_constant__ VegasSparseParams p, const __grid_constant__ PlanWorkspace w, int stages) {
  using Element = typename T::Element;
  extern __shared__ __align__(128) char shared_bytes[];
  const int unit_index = blockIdx.x / p.cache.num_heads_kv;
  const int kv_head = blockIdx.x % p.cache.num_heads_kv;
  if (unit_index >= *w.num_units) return;
  const PlannedUnit unit = w.units[unit_index];
  const PlannedRequest plan = w.requests[unit.request];
  const int b = unit.request;
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const int first_row = unit.row_tile * kSparseRows;
  const int num_rows = min(kSparseRows, group - first_row);
  const int first_head = kv_head * group + first_row;
  const SharedTile<T> shared = {shared_bytes, stages};

  const SparseRequest request(p, b);
  const int listed = request.listed(p, b, kv_head);
  const int keys_of_head = request.keys_with(listed);
  const int begin = min(unit.chunk * plan.chunk_keys, keys_of_head);
  const int end = begin + min(keys_of_head - begin, plan.chunk_keys);
  ListedKeys keys = {p.indices + b * p.indices_stride_batch + kv_head * p.indices_stride_head,
                     p.cache.block_table ? p.cache.block_table + b * p.cache.block_table_stride : nullptr,
                     p.cache.page_size,
                     p.indices_are_slots != 0,
                     begin,
                     end,
                     listed,
                     request,
                     p.cache.num_pages * p.cache.page_size,
                     LaneAddress{p.cache, kv_head, T::kCacheBytes},
                     -1,
                     false,
                     -1,
                     0};
  const Scoring scoring = {p.softmax_scale * descale_of(p.cache.k, b, kv_head), p.softcap, INT_MIN, INT_MAX};
  const auto prepare = [&] {
    const Element* q = static_cast<const Element*>(p.q) + b * p.q_stride_row + first_head * p.q_stride_head;
    const bool aligned = ((reinterpret_cast<uintptr_t>(p.q) | (p.q_stride_row * 2) | (p.q_stride_head * 2)) & 15) == 0;
    for (int i = threadIdx.x; i < T::kRows * T::kQuerySegments; i += kThreads) {
      const int row = i / T::kQuerySegments;
      const int chunk = i % T::kQuerySegments;
      uint4 values = make_uint4(0, 0, 0, 0);
      if (row < num_rows && chunk * 8 < p.cache.head_dim) {
        values = load_query(q + row * p.q_stride_head + chunk * 8, aligned);
      }
      shared.query().store(row, chunk, values);
    }
    for (int row = threadIdx.x; row < T::kRows; row += kThreads) shared.rows()[row] = {INT_MIN, INT_MAX, -1};
  };
  SoftmaxState<T> state;
  NoDump dump;
  attend(shared, keys, p.cache, scoring, dump, prepare, num_rows, begin, ceil_div(end - begin, kTileKeys), stages,
         state);

  merge_warps(shared, state, num_rows, [&](int row, const RowNorm& norm, const auto& value) {
    if (plan.chunks == 1) {
      finish_row(row_output<Element>(p, b, kv_head, first_head + row), norm, p.cache.head_dim, value);
    } else {
      store_partial(w, w.partial_row(plan, w.row_tiles, unit.chunk, unit.row_tile, kv_head, row), norm, value);
    }
  });
}

}  // namespace vegas_ops::portable
