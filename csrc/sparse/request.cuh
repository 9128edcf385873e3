// What a request of sparse_paged_decode attends.
#pragma once

#include <limits.h>

#include "vegas_ops/params.h"

namespace vegas_ops::portable {

constexpr int kMaxKeys = INT_MAX - 4096;  // tiles are looked up ahead of the last one: their indices fit int

// Entries [0, listed) of its list, then `tail_keys` positions from tail_begin on.
struct SparseRequest {
  int listed;  // of the longest list of all KV heads
  int tail_begin;
  int tail_keys;
  int first_seen;  // positions outside [first_seen, last_seen] are masked, where positions are known
  int last_seen;

  // Positions at or beyond `bound` are not in the block table.
  __device__ SparseRequest(const VegasSparseParams& p, int bound, int b) {
    // All loads before the first use of one: a call of a few microseconds waits for them.
    listed = count_of(p, b, 0);
    const int used = p.seqused_k ? p.seqused_k[b] : INT_MAX;
    const int start = p.tail_start ? p.tail_start[b] : 0;
    if (p.topk_length_stride_head != 0) {
#pragma unroll 1
      for (int head = 1; head < p.cache.num_heads_kv; ++head) listed = max(listed, count_of(p, b, head));
    }
    listed = used > 0 ? min(max(listed, 0), p.max_k) : 0;
    last_seen = min(max(used, 0), bound) - 1;
    // The row is at the last position: no window hides anything to its right.
    first_seen = p.seqused_k && p.window_left >= 0 ? max(last_seen - p.window_left, 0) : 0;
    tail_begin = max(start, first_seen);
    tail_keys = p.tail_start && p.seqused_k ? max(last_seen + 1 - tail_begin, 0) : 0;
  }

  __device__ static int count_of(const VegasSparseParams& p, int b, int kv_head) {
    return p.max_k > 0 ? p.topk_length[b * p.topk_length_stride_batch + kv_head * p.topk_length_stride_head] : 0;
  }

  __device__ bool operator==(const SparseRequest& other) const {
    return listed == other.listed && tail_begin == other.tail_begin && tail_keys == other.tail_keys &&
           first_seen == other.first_seen && last_seen == other.last_seen;
  }

  // A list of that length with the tail.
  __device__ int keys_with(int entries) const {
    return static_cast<int>(min(static_cast<unsigned>(entries) + tail_keys, static_cast<unsigned>(kMaxKeys)));
  }
};

}  // namespace vegas_ops::portable
