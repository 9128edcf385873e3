// What a request of sparse_paged_decode attends.
#pragma once

#include <limits.h>

#include "vegas_ops/params.h"

namespace vegas_ops::portable {

// What memory holds now: not what this multiprocessor has read before, and read again each time.
__device__ __forceinline__ int load_current(const int32_t* source) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

// Divides numbers below 2^31 by one that the host knows.
struct Divisor {
  uint32_t factor;
  int shift;

  void set(int divisor) {
    for (shift = 0; (int64_t{1} << shift) < divisor; ++shift) {
    }
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
    shift += 31;
  }
  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor >> shift);
  }
};

constexpr int kLookedUp = 64;             // requests whose lengths a warp holds, two to a lane
constexpr int kMaxKeys = INT_MAX - 4096;  // tiles are looked up ahead of the last one: their indices fit int

__device__ __forceinline__ const int32_t* count_source(const VegasSparseParams& p, int b, int kv_head) {
  return p.topk_length + b * p.topk_length_stride_batch + kv_head * p.topk_length_stride_head;
}

// The calls that a kernel serves. What it need not ask for is code that no warp goes through or jumps over: most of
// what happens before the first copy starts and after the last key is executed once.
enum class Calls {
  kAny,
  kFew,    // up to kLookedUp requests in balanced shares, one pair each; rows without padding, products without a cap
  kSlots,  // and with lists of slots of one length for all KV heads, and no tail
};

template <Calls kCalls>
__device__ __forceinline__ bool has_lists_per_head(const VegasSparseParams& p) {
  return kCalls != Calls::kSlots && p.topk_length_stride_head != 0 && p.max_k > 0;
}

// The longest list of each of the first kLookedUp requests, where KV heads have lists of their own. A CTA reads every
// count once: were every warp to read them all, the few lines that hold them would be what the call waits for.
template <Calls kCalls>
struct LongestLists {
  static constexpr int kKept = 4;

  int* longest;       // (kLookedUp,), in shared memory
  int counts[kKept];  // of this thread

  // Called by all threads of the CTA.
  __device__ LongestLists(const VegasSparseParams& p, const Divisor& heads, int* shared) : longest(shared) {
    if (!has_lists_per_head<kCalls>(p)) return;
    for (int i = threadIdx.x; i < kLookedUp; i += blockDim.x) longest[i] = 0;
    __syncthreads();
    read(p, heads, counts);
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i < size(p)) atomicMax(longest + heads.divide(i), counts[j]);
    }
#pragma unroll 1
    for (int i = threadIdx.x + kKept * blockDim.x; i < size(p); i += blockDim.x) {
      atomicMax(longest + heads.divide(i), load_current(source(p, heads, i)));
    }
    __syncthreads();
  }

  __device__ static int size(const VegasSparseParams& p) { return min(p.batch, kLookedUp) * p.cache.num_heads_kv; }
  // Whether counts[] are all that there are.
  __device__ static bool keeps_all(const VegasSparseParams& p) {
    return !has_lists_per_head<kCalls>(p) || size(p) <= kKept * static_cast<int>(blockDim.x);
  }
  __device__ static const int32_t* source(const VegasSparseParams& p, const Divisor& heads, int i) {
    const int b = heads.divide(i);
    return count_source(p, b, i - b * p.cache.num_heads_kv);
  }
  // What memory holds now.
  __device__ static void read(const VegasSparseParams& p, const Divisor& heads, int (&now)[kKept]) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      now[j] = i < size(p) ? load_current(source(p, heads, i)) : 0;
    }
  }
};

// What memory says of a request.
template <Calls kCalls>
struct RequestWords {
  int listed;  // of the longest list of all KV heads
  int used;
  int start;

  // Of one of the first kLookedUp requests.
  __device__ RequestWords(const VegasSparseParams& p, const LongestLists<kCalls>& lists, int b) {
    // All loads before the first use of one: a call of a few microseconds waits for them.
    const bool per_head = has_lists_per_head<kCalls>(p);
    listed = p.max_k > 0 && !per_head ? load_current(count_source(p, b, 0)) : 0;
    used = kCalls != Calls::kSlots && p.seqused_k ? load_current(p.seqused_k + b) : INT_MAX;
    start = kCalls != Calls::kSlots && p.tail_start ? load_current(p.tail_start + b) : 0;
    if (per_head) listed = lists.longest[b];
  }
  // Of any request.
  __device__ RequestWords(const VegasSparseParams& p, int b) {
    listed = p.max_k > 0 ? load_current(count_source(p, b, 0)) : 0;
    used = p.seqused_k ? load_current(p.seqused_k + b) : INT_MAX;
    start = p.tail_start ? load_current(p.tail_start + b) : 0;
    if (!has_lists_per_head<kCalls>(p)) return;
#pragma unroll 4
    for (int head = 1; head < p.cache.num_heads_kv; ++head)
      listed = max(listed, load_current(count_source(p, b, head)));
  }

  __device__ bool operator!=(const RequestWords& other) const {
    return listed != other.listed || used != other.used || start != other.start;
  }
};

// Entries [0, listed) of its list, then `tail_keys` positions from tail_begin on.
struct SparseRequest {
  int listed;  // of the longest list of all KV heads
  int tail_begin;
  int tail_keys;
  int first_seen;  // positions outside [first_seen, last_seen] are masked, where positions are known
  int last_seen;

  // Positions at or beyond `bound` are not in the block table.
  template <Calls kCalls>
  __device__ SparseRequest(const VegasSparseParams& p, int bound, const RequestWords<kCalls>& words) {
    listed = words.used > 0 ? min(max(words.listed, 0), p.max_k) : 0;
    last_seen = min(max(words.used, 0), bound) - 1;
    // The row is at the last position: no window hides anything to its right.
    first_seen = kCalls != Calls::kSlots && p.seqused_k && p.window_left >= 0 ? max(last_seen - p.window_left, 0) : 0;
    tail_begin = max(words.start, first_seen);
    tail_keys = kCalls != Calls::kSlots && p.tail_start && p.seqused_k ? max(last_seen + 1 - tail_begin, 0) : 0;
  }

  // A list of that length with the tail.
  __device__ int keys_with(int entries) const {
    return static_cast<int>(min(static_cast<unsigned>(entries) + tail_keys, static_cast<unsigned>(kMaxKeys)));
  }
};

}  // namespace vegas_ops::portable
