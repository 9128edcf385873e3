// Selection on Hopper: a list is chosen from within one launch, by a cluster of thread blocks that read it once.
//
// Windows are never pooled: the places whose window holds a score above a threshold are those of the scores above it,
// each widened to the places that reach it. So only bits of unpooled scores are kept.
//
// A sample, the same in every CTA, brackets the threshold. Scores then stream through registers: a bit says which lie
// above the bracket, and the few inside it are listed, warp by warp, each of which counts as often as it is the maximum
// of a window. These are counted in bins, the counts of all CTAs exchanged, and the few keys of the bin that holds the
// threshold too, from which each CTA knows the threshold and how many tokens earlier slices write. Where the sample
// misleads, or a list has no room, scores are read again: slower, never wrong. Integers alone decide, so results are
// identical on every run, and to those of the portable kernels.
#pragma once

#include <cuda_runtime.h>

#include "common/warp_scan.cuh"
#include "select/hopper_bracket.cuh"
#include "select/hopper_write.cuh"
#include "select/wave.h"

namespace vegas_ops::selection::hopper {

// The cluster's search for the threshold of one list, and the writing of what beats it.
template <bool kPooled>
struct Selector {
  const VegasSelectParams& p;
  Shared& shared;
  const Arrays& arrays;
  const Slice& slice;
  uint32_t ctas;                              // of the cluster
  uint32_t cta;                               // this one
  int32_t room;                               // of a warp's list
  int32_t num_listed = 0;                     // by the warp of the lane's number
  int32_t chunks_before = 0, num_chunks = 0;  // of up to 32 listed scores: in earlier warps' lists, and in all
  bool one_key = false;
  bool fits = true;  // all lists have room
  uint32_t counts_sent = 0;
  uint32_t keys_sent = 0;

  __device__ __forceinline__ bool alone() const { return ctas == 1; }
  __device__ __forceinline__ int32_t reach() const { return p.pool_before + p.pool_after; }
  __device__ __forceinline__ int rows() const { return (slice.words + kRowWords - 1) / kRowWords; }

  // Where the table of listed scores has that of a bit. Every thread has slots of its own, for what it reads itself.
  __device__ __forceinline__ static uint32_t recent_slot(int32_t bit) {
    const uint32_t place = bit - 32;
    return kRecent * (place / kRow & warps() - 1) + place % kRecent;
  }

  // ---- reading ------------------------------------------------------------------------------------------------------

  // Whether scores are above a threshold, from bit 0 on, before others. The sign of a difference says it, and that of
  // NaN is positive.
  __device__ __forceinline__ static uint32_t add_bits(uint32_t bits, const float (&x)[kRowWords], float threshold) {
#pragma unroll
    for (int i = kRowWords - 1; i >= 0; --i) {
      bits = __funnelshift_l(__float_as_uint(__fsub_rn(threshold, x[i])), bits, 1);
    }
    return bits;
  }

  __device__ __forceinline__ static float picked(const float (&x)[kRowWords], uint32_t i) {
    const float a = i & 1 ? x[1] : x[0], b = i & 1 ? x[3] : x[2], c = i & 1 ? x[5] : x[4], d = i & 1 ? x[7] : x[6];
    return i & 4 ? i & 2 ? d : c : i & 2 ? b : a;
  }

  // Bits say which scores are at or above the interval, and which inside it; these are listed too, unless they are all
  // the same. `next` is this warp's first row, loaded.
  __device__ __forceinline__ void stream(float (&next)[kRowWords], const Interval& interval) {
    const int lane = lane_of_thread();
    float low = score_below(interval.low), high = score_below(interval.high - 1);
    asm volatile("" : "+f"(low), "+f"(high));  // not to be computed again for every row
    one_key = is_one_key(interval);
    Listed* const list = arrays.listed + warp_of_thread() * room;
    int32_t* const count = shared.num_listed + warp_of_thread();
    if (lane == 0) *count = 0;
    __syncwarp();
    if (kPooled && warp_of_thread() == warps() - 1) {
      const float x = score_at_place(slice, slice.place_of(lane));
      const uint32_t above = __ballot_sync(kAllLanes, x > high);
      const uint32_t inside = __ballot_sync(kAllLanes, x > low && !(x > high));
      const uint32_t selectable = __ballot_sync(kAllLanes, x > negative_infinity());
      if (lane == 0) arrays.above[0] = above, arrays.inside[0] = inside, arrays.selectable[0] = selectable;
      if (!one_key && inside >> lane & 1) {
        const Listed listed = {__float_as_uint(x), static_cast<uint32_t>(lane)};
        list[atomicAdd(count, 1)] = listed;  // always has room
        arrays.recent[recent_slot(lane)] = listed;
      }
    }
    const Rows loader(slice);
    const uint32_t end = 32 * slice.words, step = kRow * warps();
    Listed* const recent = arrays.recent + recent_slot(32 + kRow * warp_of_thread() + 4 * lane);
    // A byte of every set.
    char* bytes =
        reinterpret_cast<char*>(arrays.inside) + 4 + (lane % 2 * kRow / 16 + lane / 2) + kRow / 8 * warp_of_thread();
    const int32_t set_bytes = reinterpret_cast<char*>(arrays.above) - reinterpret_cast<char*>(arrays.inside);
#pragma unroll 1
    for (uint32_t at = kRow * warp_of_thread(); at < end; at += step, bytes += step / 8) {
      float x[kRowWords];
#pragma unroll
      for (int i = 0; i < kRowWords; ++i) x[i] = next[i];
      if (at + step < end) loader.load(next, at + step);
      uint32_t bits = 0xff;
      if (kPooled) {
        float sum = x[0];
#pragma unroll
        for (int i = 1; i < kRowWords; ++i) sum += x[i];
        if (__any_sync(kAllLanes, !(sum > negative_infinity()))) bits = add_bits(0, x, negative_infinity());
      }
      bits = add_bits(add_bits(bits, x, high), x, low);
      const uint32_t inside = bits & ~(bits >> kRowWords) & 0xff;
      bits = neighbours((bits & ~0xffu) | inside);
      bytes[0] = static_cast<char>(bits), bytes[set_bytes] = static_cast<char>(bits >> 8);
      if (kPooled) bytes[2 * set_bytes] = static_cast<char>(bits >> 16);
      if (!one_key && inside) {
        const int32_t own = __popc(inside), slot = atomicAdd(count, own);
        if (slot + own <= room) {
          Listed* to = list + slot;
          uint32_t left = inside;
#pragma unroll 1
          do {
            const uint32_t which = __ffs(left) - 1;
            const Listed listed = {__float_as_uint(picked(x, which)), 32u + at + place_in_row(lane, which)};
            *to++ = listed;
            if (kPooled) recent[which % 4] = listed;
          } while (left &= left - 1);
        }
      }
    }
    __syncthreads();
    num_listed = lane < warps() ? shared.num_listed[lane] : 0;
    fits = !__any_sync(kAllLanes, num_listed > room);
    const int32_t chunks = (num_listed + 31) / 32, through = warp_scan(chunks);
    chunks_before = through - chunks;
    num_chunks = __shfl_sync(kAllLanes, through, 31);
  }

  // Calls visit(Listed&) for all that is listed, shared out to all threads, always in the same way.
  template <class Visit>
  __device__ __forceinline__ void visit_listed(Visit visit) const {
#pragma unroll 1
    for (int32_t chunk = warp_of_thread(); chunk < num_chunks; chunk += warps()) {
      const int owner = 31 - __clz(__ballot_sync(kAllLanes, chunks_before <= chunk));
      const int32_t at = 32 * (chunk - __shfl_sync(kAllLanes, chunks_before, owner)) + lane_of_thread();
      if (at < __shfl_sync(kAllLanes, num_listed, owner)) visit(arrays.listed[owner * room + at]);
    }
  }

  // At how many open places a score inside the interval is the maximum of the window, the first of equals.
  __device__ __forceinline__ uint32_t weight_of(float score, int32_t bit) const {
    const int32_t word = bit / 32, shift = bit % 32, reach = this->reach();
    const auto score_of = [&](int32_t other) {
      const Listed recent = arrays.recent[recent_slot(other)];
      return recent.bit == other ? __uint_as_float(recent.score) : *slice.at(slice.place_of(other));
    };
    // Bit i for i places after it.
    const uint32_t in_reach = kAllLanes >> (31 - reach);
    uint32_t places = __funnelshift_r(arrays.open[word], arrays.open[word + 1], shift) & in_reach;
    uint32_t later = __funnelshift_r(arrays.inside[word], arrays.inside[word + 1], shift) & in_reach & ~1u;
    while (later) {
      const int distance = __ffs(later) - 1;
      if (!(places >> distance)) break;
      if (score_of(bit + distance) > score) places &= (1u << distance) - 1;
      later &= later - 1;
    }
    // The highest bit for the place before it.
    uint32_t earlier = __funnelshift_l(word > 0 ? arrays.inside[word - 1] : 0, arrays.inside[word], 31 - shift) << 1;
    earlier &= ~(kAllLanes >> reach);
    while (earlier) {
      const int distance = __clz(earlier) + 1;
      const uint32_t shared_places = (1u << (reach - distance + 1)) - 1;
      if (!(places & shared_places)) break;
      if (score_of(bit - distance) >= score) places &= ~shared_places;
      earlier &= ~(0x80000000u >> (distance - 1));
    }
    return __popc(places);
  }

  // Counts what was streamed, by bins of the interval, and what lies above.
  __device__ __forceinline__ void count(const Interval& interval) {
    const bool by_bins = fits && !one_key;
    uint32_t above = 0, inside = 0;
#pragma unroll 1
    for (int32_t word = 1 + threadIdx.x; word <= slice.words; word += threads()) {
      if (kPooled) {
        const uint32_t ranked = ranked_places(slice, arrays.selectable, word, p.pool_after);
        const uint32_t open = ranked & ~widened(arrays.above, word, reach());
        above += __popc(ranked & ~open);
        arrays.ranked[word] = ranked;
        arrays.open[word] = open;
        if (!by_bins) inside += __popc(open & widened(arrays.inside, word, reach()));
      } else {
        above += __popc(arrays.above[word]);
        if (!by_bins) inside += __popc(arrays.inside[word]);
      }
    }
    if (kPooled) {
      if (threadIdx.x == 0) arrays.open[0] = 0, arrays.open[slice.words + 1] = 0;
      __syncthreads();
    }
    above = __reduce_add_sync(kAllLanes, above);
    if (!by_bins) inside = __reduce_add_sync(kAllLanes, inside);
    if (lane_of_thread() == 0) {
      if (!one_key && !fits && threadIdx.x == 0) above += kOverflow;
      if (above) atomicAdd(&shared.histogram[kAbove], above);
      if (inside) atomicAdd(&shared.histogram[0], inside);
    }
    if (by_bins) {
      const int shift = bin_shift(interval);
      visit_listed([&](Listed& listed) {
        const uint32_t weight = kPooled ? weight_of(__uint_as_float(listed.score), listed.bit) : 1;
        const uint32_t key = key_of_selectable(listed.score);
        listed = {key, listed.bit | weight << kWeightShift};
        if (weight) atomicAdd(&shared.histogram[key - interval.low - 1 >> shift], weight | 1u << kCountBits);
      });
    }
    exchange_counts();
    // From now on of the threshold.
#pragma unroll 1
    for (int32_t word = 1 + threadIdx.x; word <= slice.words; word += threads()) {
      arrays.equal[word] = one_key ? arrays.inside[word] : 0;
    }
    if (threadIdx.x == 0) arrays.equal[0] = one_key ? arrays.inside[0] : 0;
  }

  // Counts all scores by bins of an interval, however many are inside.
  __device__ __forceinline__ void count_all(const Interval& interval) {
    const int shift = bin_shift(interval);
    uint32_t above = 0;
    const int32_t end = smaller(slice.end, slice.stop());
#pragma unroll 1
    for (int32_t place = larger(slice.first, slice.begin) + threadIdx.x; place < end; place += threads()) {
      if (!(score_at_place(slice, place - p.pool_after) > negative_infinity())) continue;
      float most = negative_infinity();
      for (int32_t i = 0; i <= reach(); ++i) most = fmaxf(most, score_at_place(slice, place - i));
      const uint32_t key = key_of_selectable(__float_as_uint(most));
      above += key >= interval.high;
      if (key > interval.low && key < interval.high) {
        atomicAdd(&shared.histogram[key - interval.low - 1 >> shift], 1u);
      }
    }
    if (above) atomicAdd(&shared.histogram[kAbove], above);
    exchange_counts();
  }

  // ---- the threshold ------------------------------------------------------------------------------------------------

  // Every CTA gets the counts of all.
  __device__ __forceinline__ void exchange_counts() {
    __syncthreads();
    if (threadIdx.x == 0) shared.count_mail.expect(ctas * kBins * sizeof(uint32_t), alone());
    if (warp_of_thread() < ctas) {
#pragma unroll
      for (int i = lane_of_thread(); i < kBins / 4; i += 32) {
        shared.count_mail.send(reinterpret_cast<uint4*>(arrays.histograms + kBins * cta) + i, warp_of_thread(),
                               reinterpret_cast<uint4*>(shared.histogram)[i], alone());
      }
    }
    shared.count_mail.wait(counts_sent++, alone());
  }

  // Finds the bin of the rank-th key, unless there are fewer. Earlier slices have `better_bins` keys in better ones
  // that are not counted.
  __device__ __forceinline__ void locate(uint32_t rank, uint32_t better_bins) {
    const int lane = lane_of_thread(), warp = warp_of_thread();
    const uint32_t bin = kBins - 1 - threadIdx.x;
    uint32_t count = 0, earlier = 0, listed = 0, earlier_listed = 0, through = 0;
    if (threadIdx.x < kBins) {
#pragma unroll 4
      for (uint32_t from = 0; from < ctas; ++from) {
        const uint32_t theirs = arrays.histograms[kBins * from + bin];
        count += theirs & kCounted, listed += theirs >> kCountBits;
        if (from < cta) earlier += theirs & kCounted, earlier_listed += theirs >> kCountBits;
      }
      if (bin == kAbove) {
        shared.overflows = listed;
        shared.num_own = 0;
        shared.least = kAllLanes, shared.most = 0;
        shared.better = better_bins, shared.equal = 0;
      }
      through = warp_scan(count);
      if (lane == 31) shared.warp_sums[warp] = through;
    }
    __syncthreads();
    if (threadIdx.x < kBins) {
      through += __reduce_add_sync(kAllLanes, lane < warp ? shared.warp_sums[lane] : 0);
      if (through - count < rank && rank <= through) {
        shared.found = {bin, rank - (through - count), count, earlier, listed, earlier_listed};
      }
      const uint32_t better = __reduce_add_sync(kAllLanes, through < rank ? earlier : 0);
      if (lane == 0 && better) atomicAdd(&shared.better, better);
      if (bin == 0) shared.total = through;
    }
    __syncthreads();
  }

  template <class Visit>
  __device__ __forceinline__ void visit_listed(const Interval& interval, Visit visit) const {
    visit_listed([&](const Listed& listed) {
      const uint32_t weight = listed.bit >> kWeightShift;
      if (listed.score > interval.low && listed.score < interval.high && weight) visit(listed.score, weight);
    });
  }

  // Sends the listed keys of an interval to all CTAs, after those of earlier slices.
  __device__ __forceinline__ void exchange_keys(const Interval& interval) {
    if (threadIdx.x == 0) shared.key_mail.expect(shared.found.listed * sizeof(uint2), alone());
    visit_listed(interval, [&](uint32_t key, uint32_t weight) {
      shared.own[atomicAdd(&shared.num_own, 1u)] = make_uint2(key, weight);
    });
    __syncthreads();
    const uint32_t earlier = shared.found.earlier_listed, cluster_bits = __popc(ctas - 1);
    const uint32_t sent = shared.num_own << cluster_bits;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < sent; i += threads()) {
      const uint32_t at = i >> cluster_bits, to = i & (ctas - 1);
      shared.key_mail.send(shared.ranked + earlier + at, to, shared.own[at], alone());
    }
    shared.key_mail.wait(keys_sent++, alone());
  }

  // The listed keys of an interval that occur lie in the interval returned.
  __device__ __forceinline__ Interval occupied(const Interval& interval) {
    uint32_t least = kAllLanes, most = 0;
    visit_listed(interval, [&](uint32_t key, uint32_t) {
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
    if (threadIdx.x == 0) shared.key_mail.expect(ctas * 2 * sizeof(uint32_t), alone());
    if (threadIdx.x < ctas) {
      shared.key_mail.send(shared.received_least + cta, threadIdx.x, shared.least, alone());
      shared.key_mail.send(shared.received_most + cta, threadIdx.x, shared.most, alone());
    }
    shared.key_mail.wait(keys_sent++, alone());
    const uint32_t from = lane_of_thread() & (ctas - 1);
    return {__reduce_min_sync(kAllLanes, shared.received_least[from]) - 1,
            __reduce_max_sync(kAllLanes, shared.received_most[from]) + 1};
  }

  // The key of the rank-th place among those received becomes the threshold. Four threads share a key's comparisons;
  // keys beyond the count are 0.
  __device__ __forceinline__ void rank_keys(const Found& found) {
    const uint32_t mine = threadIdx.x / 4;
    if (mine < (found.listed + 7 & ~7u)) {
      const uint32_t key = shared.ranked[mine].x;
      uint32_t better = 0, equal = 0;
#pragma unroll 1
      for (uint32_t other = threadIdx.x % 4; other < found.listed; other += 4) {
        const uint2 theirs = shared.ranked[other];
        better += theirs.x > key ? theirs.y : 0;
        equal += theirs.x == key ? theirs.y : 0;
      }
      better += __shfl_xor_sync(kAllLanes, better, 1), equal += __shfl_xor_sync(kAllLanes, equal, 1);
      better += __shfl_xor_sync(kAllLanes, better, 2), equal += __shfl_xor_sync(kAllLanes, equal, 2);
      if (key && better < found.rank && found.rank <= better + equal) {
        shared.threshold = key;
        shared.ties = found.rank - better;
        shared.all_equal = equal;
      }
    }
    __syncthreads();
    if (warp_of_thread() == 0) {
      // Of the bin, in earlier slices.
      uint32_t better = 0, equal = 0;
#pragma unroll 1
      for (uint32_t i = lane_of_thread(); i < found.earlier_listed; i += 32) {
        const uint2 theirs = shared.ranked[i];
        better += theirs.x > shared.threshold ? theirs.y : 0;
        equal += theirs.x == shared.threshold ? theirs.y : 0;
      }
      better = __reduce_add_sync(kAllLanes, better);
      equal = __reduce_add_sync(kAllLanes, equal);
      if (lane_of_thread() == 0) shared.better += better, shared.equal = equal;
    }
  }

  __device__ __forceinline__ void take_one_key(uint32_t key, const Found& found) {
    if (threadIdx.x == 0) {
      shared.threshold = key;
      shared.ties = found.rank;
      shared.all_equal = found.count;
      shared.equal = found.earlier;
    }
    __syncthreads();
  }

  // Before counts are overwritten that another CTA still reads.
  __device__ __forceinline__ void begin_anew() {
    if (threadIdx.x < kBins) shared.histogram[threadIdx.x] = 0;
    synchronize_cluster();
  }

  // On return, bits say which scores beat the threshold, and which equal it, but for those that are listed; shared, how
  // many of these are taken. Returns how many are in all.
  __device__ __forceinline__ uint32_t find_threshold(float (&first)[kRowWords], Interval interval, uint32_t rank) {
    for (int misses = 0;; ++misses) {
      stream(first, interval);
      count(interval);
      locate(rank, 0);
      const bool below = shared.total < rank, above = !below && shared.found.bin == kAbove;
      const bool to_lowest = interval.low == kLowestKey - 1;
      if (!above && (!below || to_lowest) && !shared.overflows) break;
      begin_anew();
      if (below && to_lowest) {
        // All that are selectable are taken, if not by their list.
        interval = {kLowestKey - 1, kLowestKey + 1};
      } else if (above || below) {
        const uint32_t end = above ? interval.high : interval.low;
        const bool of_sample = threadIdx.x < kSamples && shared.sample_keys[threadIdx.x] == end;
        if (misses == 0 && __syncthreads_count(of_sample) >= kManyEqual) {
          interval = {end - 1, end + 1};
        } else if (above) {
          interval = {end - 1, kHighestKey + 1};
        } else if (misses < kMostMisses) {
          interval = bracket_below(shared, end, rank);
        } else {
          interval = {kLowestKey - 1, end + 1};
        }
      } else {
        // Too many to be listed: those of one bin.
        do {
          count_all(interval);
          locate(rank, 0);
          interval = bin_of(interval, shared.found.bin);
          begin_anew();
        } while (!is_one_key(interval) && shared.found.count > room);
      }
      if (warp_of_thread() < rows()) Rows(slice).load(first, kRow * warp_of_thread());
    }
    if (shared.total < rank) {
      // Too few are selectable: all of them are taken.
      take_one_key(0, {});
      return shared.total;
    }
    for (;;) {
      const Found found = shared.found;
      interval = bin_of(interval, found.bin);
      if (!is_one_key(interval) && found.listed > threads() / 4) {
        if (threadIdx.x < kBins) shared.histogram[threadIdx.x] = 0;
        interval = occupied(interval);
        if (!is_one_key(interval)) {
          const uint32_t better = shared.better;
          const int shift = bin_shift(interval);
          visit_listed(interval, [&](uint32_t key, uint32_t weight) {
            atomicAdd(&shared.histogram[key - interval.low - 1 >> shift], weight | 1u << kCountBits);
          });
          exchange_counts();
          locate(found.rank, better);
          continue;
        }
      }
      if (is_one_key(interval)) {
        take_one_key(interval.low + 1, found);
      } else {
        exchange_keys(interval);
        rank_keys(found);
      }
      return rank;
    }
  }

  // ---- the chosen ---------------------------------------------------------------------------------------------------

  // Adds listed scores to the bits of what is above the threshold, or equal to it.
  __device__ __forceinline__ void mark() const {
    if (!one_key) {
      const uint32_t threshold = shared.threshold;
      visit_listed([&](const Listed& listed) {
        if (listed.score < threshold) return;
        const uint32_t bit = listed.bit & (1u << kWeightShift) - 1;
        atomicOr((listed.score > threshold ? arrays.above : arrays.equal) + bit / 32, 1u << bit % 32);
      });
    }
    __syncthreads();
  }
};

__device__ __forceinline__ int64_t list_of_cta(const Wave& wave, const Shape& shape) {
  return wave.first + (blockIdx.x >> shape.cluster_bits);
}

__device__ __forceinline__ int32_t* output(const VegasSelectParams& p, const Wave& wave, const Shape& shape) {
  return p.indices + list_of_cta(wave, shape) * p.max_k;
}

// Grid: a cluster per list.
template <bool kPooled>
__global__ void __launch_bounds__(kThreads, 1)
    select_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, const Shape shape) {
  extern __shared__ __align__(128) char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  if (threadIdx.x == 0) shared.count_mail.open(), shared.key_mail.open();
  if (threadIdx.x < kSampleBins / 4) reinterpret_cast<uint4*>(shared.sample)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < kBins) shared.histogram[threadIdx.x] = 0;
  if (threadIdx.x < kRanked) shared.ranked[threadIdx.x] = make_uint2(0, 0);
  join_cluster();
  const int32_t index = blockIdx.x >> shape.cluster_bits, cta = blockIdx.x & ((1 << shape.cluster_bits) - 1);
  const List list = list_at(p, list_of_cta(wave, shape));
  const auto slice_of = [&](const Planes& planes, const Quota& quota, int32_t length) {
    const float* const scores =
        wave.source ? wave.source + index * wave.stride : static_cast<const float*>(p.logits) + planes.offset;
    return Slice(p, scores, quota, length, list.request, kPooled, cta, shape.cluster_bits);
  };
  // While the previous launch ends; what it has yet to write is read again.
  const RequestWords early = request_words(p, list.request, load_current);
  const int32_t length = smaller(larger(early.seqlen, 0), p.max_seqlen_k);
  const Planes early_planes = planes_of(p, list, early);
  const Quota early_quota = quota_of(p, length, early.k);
  if (early_planes.rows > 0 && early_quota.free > 0) {
    const Slice slice = slice_of(early_planes, early_quota, length);
#pragma unroll
    for (int i = 0; i < Sample<kPooled>::kMost; ++i) {
      const int32_t place = Sample<kPooled>::draw(slice, Sample<kPooled>::window(i));
      if (place >= 0 && Sample<kPooled>::part() == 0) prefetch(slice.at(place));
    }
    prefetch_pages(p, slice);
    if (threadIdx.x == 0) prefetch(output(p, wave, shape));
  }
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const Planes planes = planes_of(p, list);
  Quota quota = quota_of(p, list.request);
  uint32_t taken = 0;
  if (planes.rows > 0 && quota.free > 0) {
    const Slice slice = slice_of(planes, quota, candidates(p, list.request));
    if (threadIdx.x == 0) shared.quota = quota, shared.slice = slice;  // registers are scarce
    const uint32_t rank = quota.free;
    Sample<kPooled> sample;
    sample.load(slice);
    float first[kRowWords];
    if (kRowWords * warp_of_thread() < slice.words) Rows(slice).load(first, kRow * warp_of_thread());
    const Margins margins(__fdividef(rank, quota.end - quota.begin));
    uint32_t least = kAllLanes, most = 0;
#pragma unroll
    for (int i = 0; i < sample.kMost; ++i) {
      const uint32_t key = sample.key(slice, i), window = sample.window(i);
      if (window < kSamples && sample.part() == 0) shared.sample_keys[window] = key;
      if (key) least = min(least, key), most = max(most, key);
    }
    least = __reduce_min_sync(kAllLanes, least);
    most = __reduce_max_sync(kAllLanes, most);
    if (lane_of_thread() == 0) shared.warp_least[warp_of_thread()] = least, shared.warp_most[warp_of_thread()] = most;
    __syncthreads();
    bracket_by_value(shared, margins);
    if (!shared.close) {
      const Interval bracketed = bracket(shared, margins);
      if (threadIdx.x == 0) shared.bracket = bracketed;
      __syncthreads();
    }
    const Interval interval = shared.bracket;
    const Arrays arrays(&shared + 1, shape);
    Selector<kPooled> select = {
        p, shared, arrays, shared.slice, 1u << shape.cluster_bits, static_cast<uint32_t>(cta), most_listed(shape)};
    await_cluster();
    taken = select.find_threshold(first, interval, rank);
    quota = shared.quota;
    select.mark();
    write_chosen<kPooled>(p, shared, arrays, shared.slice, output(p, wave, shape) + quota.head);
  } else {
    await_cluster();
  }

  // Forced tokens, padding and the length, shared by the cluster: by its last warps first, which have written least.
  int32_t* const out = output(p, wave, shape);
  const int32_t step = threads() << shape.cluster_bits, first = (cta + 1) * threads() - 1 - threadIdx.x;
  const int32_t before_tail = quota.head + static_cast<int32_t>(taken), count = before_tail + quota.tail;
#pragma unroll 1
  for (int32_t i = first; i < quota.head; i += step) out[i] = written_for(p, list.request, i);
#pragma unroll 1
  for (int32_t i = first; i < quota.tail; i += step) {
    out[before_tail + i] = written_for(p, list.request, quota.end + i);
  }
#pragma unroll 1
  for (int32_t i = count + first; i < p.max_k; i += step) out[i] = -1;
  if (first == 0) p.topk_length[list_of_cta(wave, shape)] = count;
}

}  // namespace vegas_ops::selection::hopper
