// Selection on Hopper: a list is read once and chosen from within one launch, by a cluster of thread blocks that keep
// its scores in their shared memory.
//
// Every CTA owns a slice of the list, every thread runs of neighbouring scores in it. A sample, the same in every CTA,
// brackets the threshold; a bit per score says which are worth a second look. The keys of those are counted in bins,
// the counts of all CTAs exchanged, and the few keys of the bin that holds the threshold too, from which each CTA knows
// the threshold and how many tokens earlier slices write. Where the sample misleads, or too many keys share a bin, the
// counting repeats with another interval: slower, never wrong. Integers alone decide, so results are identical on
// every run, and to those of the portable kernels.
#pragma once

#include <cuda_runtime.h>

#include "common/warp_scan.cuh"
#include "select/hopper_exchange.cuh"
#include "select/hopper_slice.cuh"
#include "select/wave.h"

namespace vegas_ops::selection::hopper {

constexpr int kIntervalBins = 128;  // the last counts what lies above the others
constexpr int kSampleBins = 256;
constexpr int kListed = 256;                   // keys that are ranked one by one
constexpr uint32_t kLowestKey = 0x00800000u;   // of -FLT_MAX
constexpr uint32_t kHighestKey = 0xff800000u;  // of +inf

// How a launch divides lists: CTAs of a cluster, and scores of a thread, at most. Powers of two, by their exponents,
// spare the kernel divisions.
struct Shape {
  int32_t cluster_bits;
  int32_t run_bits;
};

struct Interval {  // of keys, both ends included
  uint32_t low;
  uint32_t high;
};

struct alignas(16) Shared {
  uint32_t sample[kSampleBins];
  uint32_t histogram[kIntervalBins];
  uint32_t own[kListed];                 // keys of the threshold's bin in this slice
  uint32_t listed[kListed];              // received: those of all slices
  uint32_t received_least[kMaxCluster];  // received, where these are too many: the extremes of every CTA's
  uint32_t received_most[kMaxCluster];
  Mailbox count_mail;
  Mailbox key_mail;
  Quota quota;
  uint32_t warp_least[kWarps];
  uint32_t warp_most[kWarps];
  uint32_t warp_sums[kWarps];
  Interval interval;
  uint32_t least;
  uint32_t most;
  uint32_t num_own;
  uint32_t better;  // tokens above the threshold in earlier slices
  uint32_t equal;
  uint32_t threshold;
  uint32_t ties;
  uint32_t bin;
  uint32_t rank;
  uint32_t count;
  uint32_t total;
};
// Then the histograms of the cluster's CTAs, and the slice's scores.

__host__ __device__ constexpr int shared_bytes(const Shape& shape) {
  return static_cast<int>(sizeof(Shared) + (kIntervalBins * sizeof(uint32_t) << shape.cluster_bits) +
                          (kThreads * sizeof(float) << shape.run_bits));
}

// ---- the interval ---------------------------------------------------------------------------------------------------

// The least shift that maps keys 0 ... width to bins 0 ... most, for most = 2^bits - 1 or less.
__device__ __forceinline__ int bin_shift(uint32_t width, uint32_t most, int bits) {
  const int shift = larger(32 - bits - __clz(width), 0);
  return width >> shift > most ? shift + 1 : shift;
}

// The last key of the bin of 2^shift keys that begins with `low`, in an interval that ends with `high`.
__device__ __forceinline__ uint32_t bin_end(uint32_t low, int shift, uint32_t high) {
  return high - low >> shift ? low + ((1u << shift) - 1) : high;
}

// A warp's bins, best first: those of lane l begin with the bin kPerLane * l from the top.
template <int kPerLane>
struct Ranking {
  uint32_t through[kPerLane];  // keys of a bin and of all better ones
  uint32_t total;

  __device__ __forceinline__ explicit Ranking(const uint32_t (&counts)[kPerLane]) {
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) through[i] = sum += counts[i];
    uint32_t inclusive = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t better = __shfl_up_sync(kAllLanes, inclusive, offset);
      if (lane_of_thread() >= offset) inclusive += better;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) through[i] += inclusive - sum;
    total = __shfl_sync(kAllLanes, inclusive, 31);
  }

  // How many bins from the top hold fewer than `rank` keys together, which makes it the bin of the rank-th key.
  __device__ __forceinline__ uint32_t find(uint32_t rank) const {
    uint32_t passed = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) passed += through[i] < rank;
    return __reduce_add_sync(kAllLanes, passed);
  }

  // Keys of the bins before that, and with it.
  __device__ __forceinline__ uint2 around(uint32_t rank) const {
    uint32_t before = 0, with = kAllLanes;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (through[i] < rank) before = max(before, through[i]);
      if (through[i] >= rank) with = min(with, through[i]);
    }
    return make_uint2(__reduce_max_sync(kAllLanes, before), __reduce_min_sync(kAllLanes, with));
  }
};

// The key of a thread's sample, the last of a group; 0 where that is not ranked.
template <int kReach>
__device__ __forceinline__ uint32_t sample_key(const Slice& slice) {
  const int32_t count = slice.end - slice.begin;
  const int32_t drawn = slice.begin + static_cast<int32_t>(static_cast<int64_t>(threadIdx.x) * count / kThreads);
  const int32_t group = drawn - ((drawn - slice.first) & 3), place = group + 3;
  if (place < slice.begin || place >= slice.end) return 0;
  const float low = negative_infinity();
  float4 older = make_float4(low, low, low, low), old = older;
  if (kReach > 0) old = load_group(slice, group - 4);
  if (kReach > 4) older = load_group(slice, group - 8);
  const float4 own = load_group(slice, group);
  const float itself = slice.after ? slice.scores[place - slice.after] : own.w;
  const float most = window_maxima<kReach>(older, old, own).w;
  return itself > low ? order_key(__float_as_uint(most)) : 0;
}

// Keys between which the threshold of a list probably lies: ranks three deviations around the expected one, widened to
// bins. `share` is that of the selected tokens.
__device__ __forceinline__ Interval sample_interval(Shared& shared, uint32_t key, float share) {
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const uint32_t warp_least = __reduce_min_sync(kAllLanes, key ? key : kAllLanes);
  const uint32_t warp_most = __reduce_max_sync(kAllLanes, key);
  if (lane == 0) shared.warp_least[warp] = warp_least, shared.warp_most[warp] = warp_most;
  __syncthreads();
  const uint32_t least = __reduce_min_sync(kAllLanes, shared.warp_least[lane % kWarps]);
  const uint32_t most = __reduce_max_sync(kAllLanes, shared.warp_most[lane % kWarps]);
  if (most == 0) return {kLowestKey, kHighestKey};
  const int shift = bin_shift(most - least, kSampleBins - 1, 8);
  if (key) atomicAdd(&shared.sample[key - least >> shift], 1u);
  __syncthreads();
  if (warp == 0) {
    constexpr int kPerLane = kSampleBins / 32;
    uint32_t counts[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(shared.sample + kSampleBins - 4 - kPerLane * lane - i);
      counts[i] = v.w, counts[i + 1] = v.z, counts[i + 2] = v.y, counts[i + 3] = v.x;
    }
    const Ranking<kPerLane> ranking(counts);
    const float expected = share * ranking.total, variance = expected * (1 - share) + 1e-6f;
    const float margin = 3 * variance * rsqrtf(variance) + 2;
    const int32_t upper = static_cast<int32_t>(expected - margin);
    const uint32_t lower = static_cast<uint32_t>(expected + margin) + 1;
    const auto low_of = [&](uint32_t from_top) { return least + (kSampleBins - 1 - from_top << shift); };
    Interval interval = {kLowestKey, most};
    if (upper > 0) interval.high = bin_end(low_of(ranking.find(upper)), shift, most);
    if (lower <= ranking.total) interval.low = low_of(ranking.find(lower));
    if (lane == 0) shared.interval = interval;
  }
  __syncthreads();
  return shared.interval;
}

// ---- the threshold --------------------------------------------------------------------------------------------------

struct Chosen {
  uint32_t threshold;
  uint32_t ties;    // tokens equal to it that are taken
  uint32_t taken;   // in all
  uint32_t better;  // above it in earlier slices
  uint32_t equal;
};

// Exclusive sum over the CTA's threads; `total` is the sum of all.
__device__ __forceinline__ uint32_t block_scan(uint32_t value, Shared& shared, uint32_t& total) {
  const uint32_t inclusive = warp_scan(value);
  if (lane_of_thread() == 31) shared.warp_sums[warp_of_thread()] = inclusive;
  __syncthreads();
  const uint32_t sum = shared.warp_sums[lane_of_thread() % kWarps];
  const bool counts = lane_of_thread() < kWarps;
  const uint32_t before = __reduce_add_sync(kAllLanes, counts && lane_of_thread() < warp_of_thread() ? sum : 0);
  total = __reduce_add_sync(kAllLanes, counts ? sum : 0);
  __syncthreads();
  return before + inclusive - value;
}

// output_of, without divisions where a page has 2^n tokens.
__device__ __forceinline__ int32_t written_for(const VegasSelectParams& p, int32_t request, int32_t token) {
  const int32_t offset_bits = p.page_size - 1;
  if (p.page_size & offset_bits || p.page_size == 0) return output_of(p, request, token);
  return slot_at(p, request, token >> __popc(offset_bits), token & offset_bits);
}

// The cluster's search for the threshold of one list, and the writing of what beats it.
struct Selector {
  const VegasSelectParams& p;
  Shared& shared;
  uint32_t* histograms;  // (ctas, kIntervalBins), received
  float4* scores;
  const Slice& slice;
  uint32_t ctas;  // of the cluster
  uint32_t cta;   // this one
  uint32_t mask;  // reordered: scores that may be chosen
  uint32_t counted = 0;
  uint32_t exchanged = 0;

  template <class Visit>
  __device__ __forceinline__ void visit(Visit visit) const {
    visit_scores(slice, scores, mask, visit);
  }

  // Counts keys by bins of 2^shift from interval.low on, and those above the interval in the last bin; then every CTA
  // has the counts of all.
  __device__ __forceinline__ void count(const Interval& interval, int shift) {
    uint32_t above = 0;
    visit([&](int, uint32_t key) {
      if (key > interval.high) {
        ++above;
      } else if (key >= interval.low) {
        atomicAdd(&shared.histogram[(key - interval.low) >> shift], 1u);
      }
    });
    above = __reduce_add_sync(kAllLanes, above);
    if (lane_of_thread() == 0 && above) atomicAdd(&shared.histogram[kIntervalBins - 1], above);
    __syncthreads();
    const bool alone = ctas == 1;
    if (threadIdx.x == 0) shared.count_mail.expect(ctas * kIntervalBins * sizeof(uint32_t), alone);
    if (warp_of_thread() < ctas) {
      const int lane = lane_of_thread();
      shared.count_mail.send(reinterpret_cast<uint4*>(histograms + kIntervalBins * cta) + lane, warp_of_thread(),
                             reinterpret_cast<uint4*>(shared.histogram)[lane], alone);
    }
    shared.count_mail.wait(counted++, alone);
  }

  // Finds the bin of the rank-th key, and makes ready for the next count.
  __device__ __forceinline__ void locate(uint32_t rank) {
    if (warp_of_thread() == 0) {
      uint32_t counts[kIntervalBins / 32] = {};
      const uint32_t* at = histograms + kIntervalBins - 4 - kIntervalBins / 32 * lane_of_thread();
#pragma unroll 4
      for (uint32_t from = 0; from < ctas; ++from, at += kIntervalBins) {
        const uint4 v = *reinterpret_cast<const uint4*>(at);
        counts[0] += v.w, counts[1] += v.z, counts[2] += v.y, counts[3] += v.x;
      }
      const Ranking<kIntervalBins / 32> ranking(counts);
      const uint32_t from_top = ranking.find(rank);
      const uint2 around = ranking.around(rank);
      if (lane_of_thread() == 0) {
        shared.total = ranking.total;
        shared.bin = kIntervalBins - 1 - from_top;
        shared.rank = rank - around.x;
        shared.count = around.y - around.x;
        shared.num_own = 0;
        shared.least = kAllLanes, shared.most = 0;
        shared.better = shared.equal = 0;
      }
    }
    __syncthreads();
    if (threadIdx.x < kIntervalBins) shared.histogram[threadIdx.x] = 0;  // only now have all warps sent their copies
  }

  // Sends the `count` keys of an interval to all CTAs, after those of earlier slices.
  __device__ __forceinline__ void list_keys(const Interval& interval, uint32_t count, uint32_t earlier) {
    visit([&](int, uint32_t key) {
      if (key >= interval.low && key <= interval.high) shared.own[atomicAdd(&shared.num_own, 1u)] = key;
    });
    __syncthreads();
    const bool alone = ctas == 1;
    if (threadIdx.x == 0) shared.key_mail.expect(count * sizeof(uint32_t), alone);
    if (warp_of_thread() < ctas) {
      for (uint32_t i = lane_of_thread(); i < shared.num_own; i += 32) {
        shared.key_mail.send(shared.listed + earlier + i, warp_of_thread(), shared.own[i], alone);
      }
    }
    shared.key_mail.wait(exchanged++, alone);
  }

  // The keys of an interval that occur.
  __device__ __forceinline__ Interval occupied(const Interval& interval) {
    uint32_t least = kAllLanes, most = 0;
    visit([&](int, uint32_t key) {
      if (key < interval.low || key > interval.high) return;
      least = min(least, key);
      most = max(most, key);
    });
    least = __reduce_min_sync(kAllLanes, least);
    most = __reduce_max_sync(kAllLanes, most);
    if (lane_of_thread() == 0) {
      atomicMin(&shared.least, least);
      atomicMax(&shared.most, most);
    }
    __syncthreads();
    const bool alone = ctas == 1;
    if (threadIdx.x == 0) shared.key_mail.expect(ctas * 2 * sizeof(uint32_t), alone);
    if (threadIdx.x < ctas) {
      shared.key_mail.send(shared.received_least + cta, threadIdx.x, shared.least, alone);
      shared.key_mail.send(shared.received_most + cta, threadIdx.x, shared.most, alone);
    }
    shared.key_mail.wait(exchanged++, alone);
    const uint32_t from = lane_of_thread() & (ctas - 1);
    return {__reduce_min_sync(kAllLanes, shared.received_least[from]),
            __reduce_max_sync(kAllLanes, shared.received_most[from])};
  }

  // The rank-th of the listed keys becomes the threshold. As many threads as there are share a key's comparisons.
  __device__ __forceinline__ void rank_listed(uint32_t count, uint32_t rank) {
    if (threadIdx.x < 3 && count + threadIdx.x < kListed) shared.listed[count + threadIdx.x] = 0;  // of the last four
    __syncthreads();
    int threads = kThreads / kListed;
    while (threads < 32 && count * 2 * threads <= kThreads) threads *= 2;
    const uint32_t mine = threadIdx.x / threads, part = threadIdx.x % threads;
    const uint32_t key = mine < count ? shared.listed[mine] : 0;
    uint32_t order = 0;  // better keys, and 2^16 times equal ones
    if (mine < count) {
      for (uint32_t other = part; other < (count + 3) / 4; other += threads) {
        const uint4 theirs = reinterpret_cast<const uint4*>(shared.listed)[other];
        order += (theirs.x > key) + (theirs.y > key) + (theirs.z > key) + (theirs.w > key);
        order += (theirs.x == key) + (theirs.y == key) + (theirs.z == key) + (theirs.w == key) << 16;
      }
    }
    for (int offset = 1; offset < threads; offset *= 2) order += __shfl_xor_sync(kAllLanes, order, offset);
    const uint32_t better = order & 0xffff, equal = order >> 16;
    if (mine < count && better < rank && rank <= better + equal) {
      shared.threshold = key;
      shared.ties = rank - better;
    }
    __syncthreads();
  }

  __device__ __forceinline__ Chosen find_threshold(Interval interval, uint32_t rank) {
    Chosen chosen = {0, 0, rank, 0, 0};
    int bin;
    uint32_t listed = 0;  // keys, of which earlier slices' come first
    uint32_t earlier = 0;
    for (;;) {
      const int shift = bin_shift(interval.high - interval.low, kIntervalBins - 2, 7);
      count(interval, shift);
      locate(rank);
      if (shared.total < rank) {
        if (interval.low == kLowestKey) {
          // Too few are selectable: all of them are taken.
          chosen.taken = shared.total;
          bin = -1;
          break;
        }
        interval = {kLowestKey, interval.low - 1};
        mask = reorder(slice, score_slice<0>(slice, scores, __uint_as_float(key_bits(kLowestKey))));
        __syncwarp();
        synchronize_cluster();  // before counts are overwritten that another CTA still reads
        continue;
      }
      bin = shared.bin;
      const uint32_t low =
          bin == kIntervalBins - 1 ? interval.high + 1 : interval.low + (static_cast<uint32_t>(bin) << shift);
      interval.high = bin == kIntervalBins - 1 ? kHighestKey : bin_end(low, shift, interval.high);
      interval.low = low;
      chosen.threshold = low;
      chosen.ties = shared.rank;
      const int lane = lane_of_thread();
      earlier = __reduce_add_sync(kAllLanes, lane < static_cast<int>(cta) ? histograms[lane * kIntervalBins + bin] : 0);
      if (interval.low == interval.high) break;
      if (shared.count <= kListed) {
        listed = shared.count;
        list_keys(interval, listed, earlier);
        rank_listed(listed, shared.rank);
        chosen.threshold = shared.threshold;
        chosen.ties = shared.ties;
        break;
      }
      interval = occupied(interval);
      chosen.threshold = interval.low;
      if (interval.low == interval.high) break;
    }
    // What earlier slices write.
    uint32_t better = 0, equal = 0;
    for (uint32_t i = threadIdx.x; i < cta * kIntervalBins; i += kThreads) {
      better += static_cast<int>(i % kIntervalBins) > bin ? histograms[i] : 0;
    }
    if (listed && threadIdx.x < earlier) {
      better += shared.listed[threadIdx.x] > chosen.threshold;
      equal += shared.listed[threadIdx.x] == chosen.threshold;
    }
    better = __reduce_add_sync(kAllLanes, better);
    equal = __reduce_add_sync(kAllLanes, equal);
    if (lane_of_thread() == 0 && better) atomicAdd(&shared.better, better);
    if (lane_of_thread() == 0 && equal) atomicAdd(&shared.equal, equal);
    __syncthreads();
    chosen.better = shared.better;
    chosen.equal = listed ? shared.equal : bin < 0 ? 0 : earlier;
    return chosen;
  }

  // Writes the positions whose keys beat the threshold, and as many equal to it as are taken: ascending, after those of
  // earlier slices. Positions are gathered in place of the scores first, so that all threads translate and store.
  __device__ __forceinline__ void emit(const Chosen& chosen, int32_t request, int32_t* out) {
    uint32_t better_mask = 0, equal_mask = 0;
    visit([&](int bit, uint32_t key) {
      better_mask |= static_cast<uint32_t>(key > chosen.threshold) << bit;
      equal_mask |= static_cast<uint32_t>(key == chosen.threshold) << bit;
    });
    better_mask = reorder(slice, better_mask), equal_mask = reorder(slice, equal_mask);
    uint32_t total;
    const uint32_t before = block_scan(__popc(better_mask) | __popc(equal_mask) << 16, shared, total);
    uint32_t better = before & 0xffff, equal = chosen.equal + (before >> 16);
    const uint32_t skipped = min(chosen.equal, chosen.ties);  // equal ones that earlier slices took
    const int32_t position = slice.first + 4 * slice.groups * threadIdx.x - slice.after;
    int32_t* gathered = reinterpret_cast<int32_t*>(scores);
#pragma unroll 1
    for (uint32_t left = better_mask | equal_mask; left; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      const bool is_equal = equal_mask >> bit & 1;
      if (!is_equal || equal < chosen.ties) gathered[better + min(equal, chosen.ties) - skipped] = position + bit;
      better += !is_equal;
      equal += is_equal;
    }
    __syncthreads();
    out += chosen.better + skipped;
    const uint32_t count = (total & 0xffff) + min(chosen.equal + (total >> 16), chosen.ties) - skipped;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) out[i] = written_for(p, request, gathered[i]);
  }
};

// Grid: a cluster per list.
template <int kReach>
__global__ void __launch_bounds__(kThreads, 3)
    select_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, const Shape shape) {
  extern __shared__ __align__(128) char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  if (threadIdx.x == 0) shared.count_mail.open(), shared.key_mail.open();
  join_cluster();
  if (threadIdx.x < kSampleBins) shared.sample[threadIdx.x] = 0;
  if (threadIdx.x < kIntervalBins) shared.histogram[threadIdx.x] = 0;
  const int32_t index = blockIdx.x >> shape.cluster_bits, cta = blockIdx.x & ((1 << shape.cluster_bits) - 1);
  const int64_t list_index = wave.first + index;
  const List list = list_at(p, list_index);
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const Planes planes = planes_of(p, list);
  Quota quota = quota_of(p, list.request);
  int32_t* out = p.indices + list_index * p.max_k;
  Chosen chosen = {};
  if (planes.rows > 0 && quota.free > 0) {
    Slice slice;
    slice.scores =
        wave.source ? wave.source + index * wave.stride : static_cast<const float*>(p.logits) + planes.offset;
    slice.length = candidates(p, list.request);
    slice.after = p.pool_after;
    slice.begin = quota.begin + slice.after;
    slice.end = quota.end + slice.after;
    const int32_t unaligned = reinterpret_cast<uintptr_t>(slice.scores) / sizeof(float) % 4;
    const int32_t origin = (slice.begin + unaligned) / 4 * 4 - unaligned;
    const int32_t share = (slice.end - origin + (1 << shape.cluster_bits) - 1) >> shape.cluster_bits;
    int32_t run_bits = kShortestRunBits;
    while (run_bits < shape.run_bits && kThreads << run_bits < share) ++run_bits;
    slice.groups = 1 << (run_bits - 2);
    slice.first = origin + (cta * kThreads << run_bits);

    uint32_t* histograms = reinterpret_cast<uint32_t*>(&shared + 1);
    float4* scores = reinterpret_cast<float4*>(histograms + (kIntervalBins << shape.cluster_bits));
    load_slice(slice, scores);
    if (threadIdx.x == 0) shared.quota = quota;
    const uint32_t rank = quota.free;
    const float sampled_share = __fdividef(rank, quota.end - quota.begin);
    const Interval interval = sample_interval(shared, sample_key<kReach>(slice), sampled_share);
    const uint32_t mask = score_slice<kReach>(slice, scores, __uint_as_float(key_bits(interval.low)));
    __syncwarp();  // of whose scores a thread visits any
    Selector select = {p,
                       shared,
                       histograms,
                       scores,
                       slice,
                       1u << shape.cluster_bits,
                       static_cast<uint32_t>(cta),
                       reorder(slice, mask)};
    await_cluster();
    chosen = select.find_threshold(interval, rank);
    quota = shared.quota;  // kept there while registers are scarce
    select.emit(chosen, list.request, out + quota.head);
  } else {
    await_cluster();
  }

  // Forced tokens, padding and the length, shared by the cluster: by its last warps first, which have written least.
  const int32_t step = kThreads << shape.cluster_bits, first = (cta + 1) * kThreads - 1 - threadIdx.x;
  const int32_t before_tail = quota.head + static_cast<int32_t>(chosen.taken), count = before_tail + quota.tail;
  for (int32_t i = first; i < quota.head; i += step) out[i] = written_for(p, list.request, i);
  for (int32_t i = first; i < quota.tail; i += step) {
    out[before_tail + i] = written_for(p, list.request, quota.end + i);
  }
  for (int32_t i = count + first; i < p.max_k; i += step) out[i] = -1;
  if (first == 0) p.topk_length[list_index] = count;
}

}  // namespace vegas_ops::selection::hopper
