// Selection on Hopper: a list is chosen from within one launch, by a cluster of thread blocks that read it once.
//
// A sample, the same in every CTA, brackets the threshold. Scores then stream through registers: a bit says which lie
// above the bracket, and the few inside it are listed, warp by warp. These are counted in bins, the counts of all CTAs
// exchanged, and the few keys of the bin that holds the threshold too, from which each CTA knows the threshold and how
// many tokens earlier slices write. Where the sample misleads, or a list has no room, scores are read again: slower,
// never wrong. Integers alone decide, so results are identical on every run, and to those of the portable
// kernels.
#pragma once

#include <cuda_runtime.h>

#include "common/warp_scan.cuh"
#include "select/hopper_bracket.cuh"
#include "select/wave.h"

namespace vegas_ops::selection::hopper {

// ---- the threshold --------------------------------------------------------------------------------------------------

// output_of, without divisions where a page has 2^n tokens.
__device__ __forceinline__ int32_t written_for(const VegasSelectParams& p, int32_t request, int32_t token) {
  const int32_t offset_bits = p.page_size - 1;
  if (p.page_size & offset_bits || p.page_size == 0) return output_of(p, request, token);
  return slot_at(p, request, token >> __popc(offset_bits), token & offset_bits);
}

// The cluster's search for the threshold of one list, and the writing of what beats it.
template <int kReach>
struct Selector {
  static constexpr int kHalo = halo_lanes(kReach), kRow = row_places(kReach);
  const VegasSelectParams& p;
  Shared& shared;
  const Arrays& arrays;
  const Slice& slice;
  const float* memory;  // to which the slice counts
  uint32_t ctas;        // of the cluster
  uint32_t cta;         // this one
  int32_t room;         // of a warp's list
  int32_t num_inside = 0;
  bool streamed_one_key = false;
  uint32_t counts_sent = 0;
  uint32_t keys_sent = 0;

  __device__ __forceinline__ const float* scores() const { return memory + slice.offset; }
  __device__ __forceinline__ static int32_t place_of_lane() { return kGroup * (lane_of_thread() - kHalo); }

  // Reads the slice, of which this warp's first row is loaded. Bits say which scores are selectable and at or above the
  // interval; those inside it are listed, or counted at once, or, if they are all the same, have a bit of their own.
  __device__ __forceinline__ void stream(float4& next, const Interval& interval, bool at_once) {
    const float* const scores = this->scores();
    const int lane = lane_of_thread(), warp = warp_of_thread();
    const float low = lane < kHalo ? __int_as_float(0x7f800000) : score_below(interval.low);
    const float high = score_at(interval.high);
    const bool one_key = is_one_key(interval);
    const int32_t after = slice.after, rows = slice.rows, last_group = slice.last_group;
    const int32_t whole_from = slice.begin + kGroup * kHalo, whole_end = smaller(slice.end, slice.length) - kRow;
    Listed* const list = arrays.listed + warp * room;
    num_inside = 0;
    int32_t from = slice.first + warp * kRow;
#pragma unroll 1
    for (int row = warp; row < rows; row += kWarps, from += kWarps * kRow) {
      float4 group = next;
      const int32_t place = from + place_of_lane();
      if (row + kWarps < rows) load_group(next, scores, place + kWarps * kRow, last_group);
      const bool whole = from >= whole_from && from <= whole_end;
      if (!whole) trim_group(group, slice, scores, place);
      float x[kGroup] = {group.x, group.y, group.z, group.w}, itself[kGroup] = {group.x, group.y, group.z, group.w};
      if (kReach > 0) {
        pool<kReach>(x, Tails(group));
        if (after) delay(itself, after);
      }
      if (!whole) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const bool ranked =
              static_cast<uint32_t>(place + i - slice.begin) < static_cast<uint32_t>(slice.end - slice.begin);
          if (!ranked) itself[i] = negative_infinity();
        }
      }
      uint32_t above[kGroup], inside[kGroup];
      bool is_inside[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float score = kReach > 0 ? x[i] : itself[i];
        const bool taken = (kReach == 0 || itself[i] > negative_infinity()) && score > low;
        is_inside[i] = taken && !(score >= high);
        above[i] = __ballot_sync(kAllLanes, taken && score >= high);
        inside[i] = __ballot_sync(kAllLanes, is_inside[i]);
      }
      const uint4 inside_words = make_uint4(inside[0], inside[1], inside[2], inside[3]);
      if (lane == 0) {
        arrays.above[row] = make_uint4(above[0], above[1], above[2], above[3]);
        arrays.equal[row] = one_key ? inside_words : make_uint4(0, 0, 0, 0);
      }
      int32_t slot = at_once ? 0 : num_inside;
      num_inside += popc(inside_words);
      if (!one_key && slot + popc(inside_words) <= room) {
        const uint32_t before = (1u << lane) - 1;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (is_inside[i]) {
            const float score = kReach > 0 ? x[i] : itself[i];
            list[slot + __popc(inside[i] & before)] = {__float_as_uint(score),
                                                       static_cast<uint32_t>(128 * row + 32 * i + lane)};
          }
          slot += __popc(inside[i]);
        }
        if (at_once) {
          __syncwarp();
          count_listed(interval, slot);
          __syncwarp();
        }
      }
    }
  }

  // Adds a warp's listed scores, from now on keys, to the histogram of an interval.
  __device__ __forceinline__ void count_listed(const Interval& interval, int32_t count) const {
    Listed* const list = arrays.listed + warp_of_thread() * room;
    const int shift = bin_shift(interval);
#pragma unroll 1
    for (int32_t i = lane_of_thread(); i < count; i += 32) {
      const uint32_t key = key_of_selectable(list[i].score);
      list[i].score = key;
      atomicAdd(&shared.histogram[key - interval.low - 1 >> shift], 1u);
    }
  }

  __device__ __forceinline__ bool alone() const { return ctas == 1; }

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

  // Counts what was streamed, by bins of the interval, and what lies above.
  __device__ __forceinline__ void count(const Interval& interval, bool at_once) {
    __syncwarp();
    uint32_t above = 0;
#pragma unroll 1
    for (int row = warp_of_thread() + kWarps * lane_of_thread(); row < slice.rows; row += 32 * kWarps) {
      above += popc(arrays.above[row]);
    }
    above = __reduce_add_sync(kAllLanes, above);
    const bool fits = num_inside <= room, by_bins = fits && !is_one_key(interval);
    if (lane_of_thread() == 0) {
      above += fits || at_once || is_one_key(interval) ? 0 : kOverflow;
      if (above) atomicAdd(&shared.histogram[kAbove], above);
      if (!by_bins && !at_once && num_inside) atomicAdd(&shared.histogram[0], num_inside);
    }
    if (by_bins && !at_once) count_listed(interval, num_inside);
    exchange_counts();
  }

  // Finds the bin of the rank-th key, unless there are fewer. Earlier slices have `better_bins` keys in better ones
  // that are not counted.
  __device__ __forceinline__ void locate(uint32_t rank, uint32_t better_bins) {
    if (warp_of_thread() == 0) {
      constexpr int kOwn = kBins / 32;
      const int lane = lane_of_thread();
      uint32_t counts[kOwn] = {}, earlier[kOwn] = {}, sum = 0;
      const uint4* at = reinterpret_cast<const uint4*>(arrays.histograms + kBins - kOwn * (lane + 1));
#pragma unroll 2
      for (uint32_t from = 0; from < ctas; ++from, at += kBins / 4) {
        const uint4 low = at[0], high = at[1];
        const uint32_t theirs[kOwn] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
#pragma unroll
        for (int i = 0; i < kOwn; ++i) counts[i] += theirs[i], earlier[i] += from < cta ? theirs[i] : 0;
      }
      if (lane == 0) {
        shared.overflows = counts[0] / kOverflow;
        shared.num_own = 0;
        shared.least = kAllLanes, shared.most = 0;
        counts[0] %= kOverflow, earlier[0] %= kOverflow;
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) sum += counts[i];
      uint32_t through = warp_scan(sum);
      const uint32_t total = __shfl_sync(kAllLanes, through, 31);
      through -= sum;
      uint32_t better = lane == 0 ? better_bins : 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t before = through;
        through += counts[i];
        if (through < rank) better += earlier[i];
        if (before < rank && rank <= through) {
          shared.found = {kAbove - kOwn * static_cast<uint32_t>(lane) - i, rank - before, counts[i], earlier[i]};
        }
      }
      better = __reduce_add_sync(kAllLanes, better);
      if (lane == 0) shared.total = total, shared.better = better, shared.equal = 0;
    }
    __syncthreads();
  }

  template <class Visit>
  __device__ __forceinline__ void visit_listed(const Interval& interval, Visit visit) const {
    const Listed* const list = arrays.listed + warp_of_thread() * room;
#pragma unroll 1
    for (int32_t i = lane_of_thread(); i < num_inside; i += 32) {
      const uint32_t key = list[i].score;
      if (key > interval.low && key < interval.high) visit(key);
    }
  }

  // Sends the listed keys of an interval to all CTAs, after those of earlier slices.
  __device__ __forceinline__ void exchange_keys(const Interval& interval) {
    if (threadIdx.x == 0) shared.key_mail.expect(shared.found.count * sizeof(uint32_t), alone());
    const uint32_t earlier = shared.found.earlier;
    visit_listed(interval, [&](uint32_t key) {
      const uint32_t at = earlier + atomicAdd(&shared.num_own, 1u);
#pragma unroll 1
      for (uint32_t to = 0; to < ctas; ++to) shared.key_mail.send(shared.ranked + at, to, key, alone());
    });
    shared.key_mail.wait(keys_sent++, alone());
  }

  // The listed keys of an interval that occur lie in the interval returned.
  __device__ __forceinline__ Interval occupied(const Interval& interval) {
    uint32_t least = kAllLanes, most = 0;
    visit_listed(interval, [&](uint32_t key) {
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

  // The rank-th of the keys received becomes the threshold. Four threads share a key's comparisons; keys beyond the
  // count are 0.
  __device__ __forceinline__ void rank_keys(const Found& found) {
    const uint32_t mine = threadIdx.x / 4;
    if (mine < (found.count + 7 & ~7u)) {
      const uint32_t key = shared.ranked[mine];
      uint32_t order = 0;  // better keys, and 2^16 times equal ones
#pragma unroll 1
      for (uint32_t other = threadIdx.x % 4; 4 * other < found.count; other += 4) {
        const uint4 theirs = reinterpret_cast<const uint4*>(shared.ranked)[other];
        order += (theirs.x > key) + (theirs.y > key) + (theirs.z > key) + (theirs.w > key);
        order += (theirs.x == key) + (theirs.y == key) + (theirs.z == key) + (theirs.w == key) << 16;
      }
      order += __shfl_xor_sync(kAllLanes, order, 1);
      order += __shfl_xor_sync(kAllLanes, order, 2);
      const uint32_t better = order & 0xffff, equal = order >> 16;
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
      for (uint32_t i = lane_of_thread(); i < found.earlier; i += 32) {
        better += shared.ranked[i] > shared.threshold;
        equal += shared.ranked[i] == shared.threshold;
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

  // On return, bits say which scores beat the threshold, and which equal it; shared, how many of these are taken.
  // Returns how many are in all.
  __device__ __forceinline__ uint32_t find_threshold(float4& first, Interval interval, uint32_t rank) {
    bool at_once = false, sampled = true;
    for (;;) {
      stream(first, interval, at_once);
      count(interval, at_once);
      locate(rank, 0);
      const Found found = shared.found;
      const bool below = shared.total < rank, above = !below && found.bin == kAbove;
      if (!above && (!below || interval.low == kLowestKey - 1) && !shared.overflows && !at_once) break;
      if (!above && !below) {
        // Too many to be listed, or just counted: those of one bin next.
        if (at_once) interval = bin_of(interval, found.bin);
        at_once = !is_one_key(interval) && (shared.overflows || found.count > room);
      } else if (below && interval.low == kLowestKey - 1) {
        // All that are selectable are taken, if not by their list.
        interval = {kLowestKey - 1, kLowestKey + 1};
        at_once = false;
      } else if (sampled) {
        // Probably one end of the interval, of which there are many.
        const uint32_t end = above ? interval.high : interval.low;
        interval = {end - 1, end + 1};
        sampled = false;
      } else {
        interval = {kLowestKey - 1, kHighestKey + 1};
        at_once = true;
      }
      if (threadIdx.x < kBins) shared.histogram[threadIdx.x] = 0;
      synchronize_cluster();  // before counts are overwritten that another CTA still reads
      const int row = warp_of_thread();
      if (row < slice.rows) load_group(first, scores(), slice.first + row * kRow + place_of_lane(), slice.last_group);
    }
    streamed_one_key = is_one_key(interval);
    if (shared.total < rank) {
      // Too few are selectable: all of them are taken.
      take_one_key(0, {0, 0, 0, 0});
      return shared.total;
    }
    for (;;) {
      const Found found = shared.found;
      interval = bin_of(interval, found.bin);
      if (!is_one_key(interval) && found.count > kRanked) {
        if (threadIdx.x < kBins) shared.histogram[threadIdx.x] = 0;
        interval = occupied(interval);
        if (!is_one_key(interval)) {
          const uint32_t better = shared.better;
          const int shift = bin_shift(interval);
          visit_listed(interval,
                       [&](uint32_t key) { atomicAdd(&shared.histogram[key - interval.low - 1 >> shift], 1u); });
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

  // Adds to the bits of what is above the threshold those of listed scores, and of equal ones where all are taken.
  __device__ __forceinline__ void mark() const {
    const bool all_ties = shared.ties == shared.all_equal;
    if (!streamed_one_key) {
      const uint32_t threshold = shared.threshold;
      const Listed* const list = arrays.listed + warp_of_thread() * room;
#pragma unroll 1
      for (int32_t i = lane_of_thread(); i < num_inside; i += 32) {
        const Listed listed = list[i];
        if (listed.score < threshold) continue;
        uint4* const words = listed.score > threshold || all_ties ? arrays.above : arrays.equal;
        atomicOr(reinterpret_cast<uint32_t*>(words) + listed.mask / 32, 1u << listed.mask % 32);
      }
    } else if (all_ties) {
#pragma unroll 1
      for (int row = warp_of_thread() + kWarps * lane_of_thread(); row < slice.rows; row += 32 * kWarps) {
        uint4& above = arrays.above[row];
        const uint4 equal = arrays.equal[row];
        above = make_uint4(above.x | equal.x, above.y | equal.y, above.z | equal.z, above.w | equal.w);
      }
    }
    __syncwarp();
  }

  // Counts the bits of rows, for visit_bits.
  __device__ __forceinline__ void count_bits(const uint4* words) const {
#pragma unroll 1
    for (int row = warp_of_thread() + kWarps * lane_of_thread(); row < padded_rows(); row += 32 * kWarps) {
      shared.row_totals[row] = static_cast<uint8_t>(row < slice.rows ? popc(words[row]) : 0);
    }
    __syncthreads();
  }

  __device__ __forceinline__ int padded_rows() const { return (slice.rows + kWarps - 1) & -kWarps; }

  // Calls visit(row, its bits in this lane, how many bits there are before them) for this warp's rows among the 32
  // turns that begin with one. Returns the bits of all warps.
  template <class Visit>
  __device__ __forceinline__ uint32_t visit_bits(const uint4* words, int turn, Visit visit) const {
    const int lane = lane_of_thread(), warp = warp_of_thread(), turns = smaller(padded_rows() / kWarps - turn, 32);
    // A lane for each turn: sixteen totals, a byte each.
    uint4 totals = make_uint4(0, 0, 0, 0);
    if (lane < turns) totals = reinterpret_cast<const uint4*>(shared.row_totals)[turn + lane];
    const auto earlier = [&](int word) {
      const int bytes = smaller(larger(warp - 4 * word, 0), 4);
      return bytes == 4 ? 0x01010101u : 0x01010101u & ((1u << 8 * bytes) - 1);
    };
    constexpr uint32_t kOnes = 0x01010101u;
    const uint32_t all =
        __dp4a(totals.x, kOnes, __dp4a(totals.y, kOnes, __dp4a(totals.z, kOnes, __dp4a(totals.w, kOnes, 0u))));
    const uint32_t through = warp_scan(all);
    const uint32_t starts =
        through - all +
        __dp4a(totals.x, earlier(0),
               __dp4a(totals.y, earlier(1), __dp4a(totals.z, earlier(2), __dp4a(totals.w, earlier(3), 0u))));
    const uint32_t before = (1u << lane) - 1;
#pragma unroll 1
    for (int i = 0; i < turns; ++i) {
      const int row = (turn + i) * kWarps + warp;
      const uint32_t start = __shfl_sync(kAllLanes, starts, i);
      if (row >= slice.rows) break;
      const uint4 bits = words[row];
      if (!(bits.x | bits.y | bits.z | bits.w)) continue;  // most, where these are ties
      const uint32_t own =
          (bits.x >> lane & 1) | (bits.y >> lane & 1) << 1 | (bits.z >> lane & 1) << 2 | (bits.w >> lane & 1) << 3;
      visit(row, own, start + popc(make_uint4(bits.x & before, bits.y & before, bits.z & before, bits.w & before)));
    }
    return __shfl_sync(kAllLanes, through, 31);
  }

  // Writes the positions of the chosen: ascending, after those of earlier slices. They are gathered first, so that all
  // threads translate and store.
  __device__ __forceinline__ void emit(int32_t* out) const {
    mark();
    const uint32_t taken_ties = shared.ties;
    if (taken_ties != shared.all_equal) {
      // Some equal ones are taken: the first.
      count_bits(arrays.equal);
      uint32_t passed = shared.equal;
      for (int turn = 0; turn * kWarps < slice.rows; turn += 32) {
        passed += visit_bits(arrays.equal, turn, [&](int row, uint32_t own, uint32_t rank) {
          rank += passed;
          uint32_t taken[kGroup];
#pragma unroll
          for (int i = 0; i < kGroup; ++i) taken[i] = __ballot_sync(kAllLanes, own >> i & 1 && rank++ < taken_ties);
          uint4& above = arrays.above[row];
          if (lane_of_thread() == 0) {
            above = make_uint4(above.x | taken[0], above.y | taken[1], above.z | taken[2], above.w | taken[3]);
          }
        });
      }
      __syncthreads();
    }
    count_bits(arrays.above);
    out += shared.better + min(shared.equal, taken_ties);
    for (int turn = 0; turn * kWarps < slice.rows; turn += 32) {
      const int32_t first_row = turn * kWarps;
      const uint32_t count = visit_bits(arrays.above, turn, [&](int row, uint32_t own, uint32_t at) {
        const int32_t place = (row - first_row) * kRow + place_of_lane();
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (own >> i & 1) arrays.gathered[at++] = static_cast<uint16_t>(place + i);
        }
      });
      __syncthreads();
      const int32_t origin = slice.first + first_row * kRow - slice.after;
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
        out[i] = written_for(p, slice.request, origin + arrays.gathered[i]);
      }
      out += count;
      if ((turn + 32) * kWarps < slice.rows) __syncthreads();
    }
  }
};

__device__ __forceinline__ int64_t list_of_cta(const Wave& wave, const Shape& shape) {
  return wave.first + (blockIdx.x >> shape.cluster_bits);
}

__device__ __forceinline__ int32_t* output(const VegasSelectParams& p, const Wave& wave, const Shape& shape) {
  return p.indices + list_of_cta(wave, shape) * p.max_k;
}

// Grid: a cluster per list.
template <int kReach>
__global__ void __launch_bounds__(kThreads, 2)
    select_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, const Shape shape) {
  extern __shared__ __align__(128) char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  if (threadIdx.x == 0) shared.count_mail.open(), shared.key_mail.open();
  if (threadIdx.x < kSampleBins / 4) reinterpret_cast<uint4*>(shared.sample)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < kBins) shared.histogram[threadIdx.x] = 0;
  if (threadIdx.x < kRanked) shared.ranked[threadIdx.x] = 0;
  join_cluster();
  const int32_t index = blockIdx.x >> shape.cluster_bits, cta = blockIdx.x & ((1 << shape.cluster_bits) - 1);
  const List list = list_at(p, list_of_cta(wave, shape));
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const Planes planes = planes_of(p, list);
  Quota quota = quota_of(p, list.request);
  uint32_t taken = 0;
  if (planes.rows > 0 && quota.free > 0) {
    using Select = Selector<kReach>;
    const float* const memory = wave.source ? wave.source : static_cast<const float*>(p.logits);
    Slice slice;
    slice.offset = wave.source ? index * wave.stride : planes.offset;
    slice.request = list.request;
    const float* const scores = memory + slice.offset;
    slice.length = candidates(p, list.request);
    slice.width = p.max_seqlen_k;
    slice.after = p.pool_after;
    slice.begin = quota.begin + slice.after;
    slice.end = quota.end + slice.after;
    const int32_t unaligned = reinterpret_cast<uintptr_t>(scores) / sizeof(float) % kGroup;
    const int32_t origin = (slice.begin + unaligned) / kGroup * kGroup - unaligned;
    const int32_t rows = (slice.end - origin + Select::kRow - 1) / Select::kRow;
    const int32_t share = (rows + (1 << shape.cluster_bits) - 1) >> shape.cluster_bits;
    slice.first = origin + cta * share * Select::kRow;
    slice.rows = larger(smaller(share, rows - cta * share), 0);
    slice.last_group = (slice.width + unaligned) / kGroup * kGroup - unaligned - kGroup;
    float4 first;
    const int32_t place = slice.first + warp_of_thread() * Select::kRow + Select::place_of_lane();
    if (warp_of_thread() < slice.rows) load_group(first, scores, place, slice.last_group);
    if (threadIdx.x == 0) shared.quota = quota, shared.slice = slice;  // registers are scarce
    shared.sample_keys[threadIdx.x] = sample_key<kReach>(slice, scores);
    __syncthreads();
    const uint32_t rank = quota.free;
    if (threadIdx.x < kBracketThreads) bracket(shared, __fdividef(rank, quota.end - quota.begin));
    __syncthreads();
    Interval interval = shared.interval;
    if (interval.low == interval.high) --interval.low, ++interval.high;
    const Arrays arrays(&shared + 1, shape);
    Select select = {p,
                     shared,
                     arrays,
                     shared.slice,
                     memory,
                     1u << shape.cluster_bits,
                     static_cast<uint32_t>(cta),
                     most_listed(shape.turns)};
    await_cluster();
    taken = select.find_threshold(first, interval, rank);
    quota = shared.quota;
    select.emit(output(p, wave, shape) + quota.head);
  } else {
    await_cluster();
  }

  // Forced tokens, padding and the length, shared by the cluster: by its last warps first, which have written least.
  int32_t* const out = output(p, wave, shape);
  const int32_t step = kThreads << shape.cluster_bits, first = (cta + 1) * kThreads - 1 - threadIdx.x;
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
