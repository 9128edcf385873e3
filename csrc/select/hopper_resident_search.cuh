// The search of the resident selection for the threshold of a list, and the writing of what is at or above it.
#pragma once

#include <cuda_runtime.h>
#include <float.h>
#include <limits.h>

#include "common/warp_scan.cuh"
#include "select/hopper_exchange.cuh"
#include "select/hopper_resident_scores.cuh"
#include "select/hopper_write.cuh"

namespace vegas_ops::selection::hopper::resident {

// Extremes of the scores that a bin holds, and how many: 16 bytes, to be sent at once.
struct Extremes {
  uint32_t least;
  uint32_t most;
  uint32_t count;
  uint32_t unused;
};

struct alignas(16) Shared {
  uint32_t histogram[kBins];
  uint32_t sample[kSampleBins];
  float own[kRanked];                          // scores of the threshold's bin
  float ranked[kRanked];                       // received: those of all CTAs
  alignas(16) Extremes received[kMaxCluster];  // received, where these are too many
  uint32_t warp_least[kWarps];
  uint32_t warp_most[kWarps];
  uint32_t warp_sums[kWarps];
  Mailbox count_mail;
  Mailbox key_mail;
  RequestWords words[2];  // that were read last, and before: they take turns, for others still look at these
  bool stale;             // they differ
  Quota quota;
  int32_t origin;  // position of the first place, whose score is at a multiple of 32 bytes
  int32_t length;  // of what is read
  bool in_page;    // all places of a row are in one page
  float bracket_low;
  float bracket_high;
  float scale;
  uint32_t bin;            // that holds the threshold; 0: it is below all that were counted
  uint32_t rank;           // within it
  uint32_t count;          // of its scores
  uint32_t earlier;        // of these, in earlier CTAs
  uint32_t better;         // in earlier CTAs: in better bins
  uint32_t better_in_bin;  // in that of the threshold, above it
  uint32_t equal;          // to the threshold
  uint32_t num_own;
  float threshold;
  uint32_t ties;               // of scores equal to the threshold, that are taken
  bool all_ties;               // are taken
  alignas(16) uint32_t least;  // read at once with the next two, and with nothing that others write meanwhile
  uint32_t most;
  uint32_t members;
  uint32_t unused;
};

// Then (ctas, kBins) counts that are received, where a closer look is taken the scores of all threads, and the pages of
// a thread's rows and of a forced token.
__host__ __device__ constexpr int shared_bytes(int ctas, int threads, int rows) {
  return static_cast<int>(sizeof(Shared)) + kBins * 4 * ctas + (kGroup * rows + rows + 1) * 4 * threads;
}

// The cluster's search for the threshold of one list, and the writing of what beats it.
template <int kRows>
struct Selector {
  const VegasSelectParams& p;
  Shared& shared;
  uint32_t* histograms;    // (ctas, kBins), received
  uint32_t ctas;           // of the cluster
  uint32_t cta;            // this one
  float x[kRows][kGroup];  // the thread's scores, pooled; -inf where a place is not ranked
  uint32_t counts_sent = 0;
  uint32_t keys_sent = 0;

  // Known to the compiler where threads have several groups, for CTAs then are of all threads.
  __device__ __forceinline__ static int threads() { return kRows > 1 ? kThreads : hopper::threads(); }
  __device__ __forceinline__ static int warps() { return threads() / 32; }

  // Of the thread's first score of a row: a warp's rows follow each other.
  __device__ __forceinline__ int32_t place(int row, uint32_t thread = threadIdx.x) const {
    return ((cta * warps() + thread / 32) * kRows + row) * kRow + thread % 32 * kGroup;
  }

  // (kRows * kGroup, threads), for a closer look.
  __device__ __forceinline__ float* kept() const { return reinterpret_cast<float*>(histograms + kBins * ctas); }
  // Of a row of the thread, or of its forced token.
  __device__ __forceinline__ int32_t* page(int row, uint32_t thread = threadIdx.x) const {
    return reinterpret_cast<int32_t*>(kept()) + (kRows * kGroup + row) * threads() + thread;
  }

  // Calls visit(score) for the thread's, in a short loop.
  template <class Visit>
  __device__ __forceinline__ void visit_kept(Visit visit) const {
#pragma unroll 1
    for (int i = 0; i < kRows * kGroup; ++i) visit(kept()[i * threads() + threadIdx.x]);
  }

  __device__ __forceinline__ bool alone() const { return ctas == 1; }

  // The extremes of a warp's samples; -inf is none.
  __device__ __forceinline__ void note_extremes(float sampled) const {
    const uint32_t key = order_key(__float_as_uint(sampled));
    const uint32_t least = __reduce_min_sync(kAllLanes, key ? key : kAllLanes);
    const uint32_t most = __reduce_max_sync(kAllLanes, key);
    if (lane_of_thread() == 0) shared.warp_least[warp_of_thread()] = least, shared.warp_most[warp_of_thread()] = most;
  }

  // Values between which the threshold probably lies, from a thread's sample; of `drawn`, a share is expected to be
  // better than the threshold.
  __device__ __forceinline__ Bins bracket(float sampled, int32_t drawn, float share) const {
    const int lane = lane_of_thread(), warp = warp_of_thread();
    const uint32_t least = __reduce_min_sync(kAllLanes, lane < warps() ? shared.warp_least[lane] : kAllLanes);
    const uint32_t most = __reduce_max_sync(kAllLanes, lane < warps() ? shared.warp_most[lane] : 0);
    const float low = most ? fminf(score_at(least), FLT_MAX) : 0, high = most ? fminf(score_at(most), FLT_MAX) : 1;
    const float width = fmaxf(high * (1.f / kSampleBins) - low * (1.f / kSampleBins), FLT_MIN);
    constexpr float kUnit = 8388608;
    const float scale = fmaxf(fminf(__fdividef(1, width), FLT_MAX), FLT_MIN);
    if (sampled > negative_infinity()) {
      const float at = fminf(fmaxf(fmaf(sampled - low, scale, kUnit - .5f), kUnit), kUnit + kSampleBins - 1);
      atomicAdd(&shared.sample[__float_as_uint(at) - __float_as_uint(kUnit)], 1u);
    }
    __syncthreads();
    if (warp == 0) {
      const float expected = share * drawn, variance = expected * (1 - share) + 1e-6f;
      const float margin = 4 * variance * rsqrtf(variance) + 2;
      const int32_t upper = static_cast<int32_t>(expected - margin),
                    lower = static_cast<int32_t>(expected + margin) + 1;
      const uint4 four = reinterpret_cast<const uint4*>(shared.sample)[31 - lane];
      const uint32_t counts[4] = {four.w, four.z, four.y, four.x};  // the best first
      const int32_t sum = counts[0] + counts[1] + counts[2] + counts[3], inclusive = warp_scan(sum);
      const int32_t all = __shfl_sync(kAllLanes, inclusive, 31);
      int32_t through = inclusive - sum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t before = through;
        through += counts[i];
        const int bin = kSampleBins - 1 - 4 * lane - i;
        if (before < upper && upper <= through) shared.bracket_high = low + width * (bin + 1);
        if (before < lower && lower <= through) shared.bracket_low = low + width * bin;
      }
      // Beyond the sample, as far again.
      if (lane == 0 && upper <= 0) shared.bracket_high = high + (.5f * high - .5f * low);
      if (lane == 0 && lower > all) shared.bracket_low = low - (.5f * high - .5f * low);
      if (lane == 0 && upper > all) shared.bracket_high = low;
      __syncwarp();
      if (lane == 0) {
        const Bins bins = Bins::of_values(fmaxf(shared.bracket_low, -FLT_MAX), fminf(shared.bracket_high, FLT_MAX));
        shared.bracket_low = bins.low, shared.scale = bins.scale;
      }
    }
    __syncthreads();
    Bins bins;
    bins.low = shared.bracket_low, bins.scale = shared.scale;
    return bins;
  }

  // Every CTA gets the counts of all.
  __device__ __forceinline__ void exchange_counts() {
    __syncthreads();
    if (alone()) return;
    if (threadIdx.x == 0) shared.count_mail.expect(ctas * kBins * sizeof(uint32_t), false);
#pragma unroll 1
    for (uint32_t to = warp_of_thread(); to < ctas; to += warps()) {
#pragma unroll
      for (int i = lane_of_thread(); i < kBins / 4; i += 32) {
        shared.count_mail.send(reinterpret_cast<uint4*>(histograms + kBins * cta) + i, to,
                               reinterpret_cast<uint4*>(shared.histogram)[i], false);
      }
    }
    shared.count_mail.wait(counts_sent++, false);
  }

  // Finds the bin of the rank-th score; 0 if there are fewer. What was counted in bin 0 does not count.
  __device__ __forceinline__ void locate(uint32_t rank) {
    const int lane = lane_of_thread(), warp = warp_of_thread();
    const uint32_t bin = kBins - 1 - threadIdx.x;
    uint32_t count = 0, earlier = 0, through = 0;
    if (threadIdx.x < kBins) {
      if (alone()) {
        count = bin ? shared.histogram[bin] : 0;
      } else {
#pragma unroll 4
        for (uint32_t from = 0; from < ctas; ++from) {
          const uint32_t theirs = bin ? histograms[kBins * from + bin] : 0;
          count += theirs;
          if (from < cta) earlier += theirs;
        }
      }
      through = warp_scan(count);
      if (lane == 31) shared.warp_sums[warp] = through;
    }
    __syncthreads();
    if (threadIdx.x < kBins) {
      const uint32_t sums = lane < kBins / 32 ? shared.warp_sums[lane] : 0;
      through += __reduce_add_sync(kAllLanes, lane < warp ? sums : 0);
      if (through - count < rank && rank <= through) {
        shared.bin = bin, shared.rank = rank - (through - count), shared.count = count, shared.earlier = earlier;
      }
      if (bin == 0 && through < rank) shared.bin = 0, shared.rank = rank - through;
      if (!alone()) {
        const uint32_t better = __reduce_add_sync(kAllLanes, through < rank ? earlier : 0);
        if (lane == 0 && better) atomicAdd(&shared.better, better);
      }
    }
    __syncthreads();
  }

  // Counts begin anew. The address is found anew, too: known since the launch began, it would take a register.
  __device__ __forceinline__ void clear_histogram() const {
    uint32_t bin = threadIdx.x;
    asm volatile("" : "+r"(bin));
    if (bin < kBins) shared.histogram[bin] = 0;
    __syncthreads();
  }

  // The extremes of a bin's scores, and how many: of all CTAs, and how many in earlier ones.
  __device__ __forceinline__ Extremes extremes(const Bins& bins, uint32_t bin, uint32_t* earlier) {
    uint32_t least = kAllLanes, most = 0, count = 0;
    visit_kept([&](float x) {
      const uint32_t key = order_key(__float_as_uint(x));
      if (key && bins(x) == bin) least = min(least, key), most = max(most, key), ++count;
    });
    least = __reduce_min_sync(kAllLanes, least);
    most = __reduce_max_sync(kAllLanes, most);
    count = __reduce_add_sync(kAllLanes, count);
    if (threadIdx.x == 0) shared.least = kAllLanes, shared.most = 0, shared.members = 0;
    __syncthreads();
    if (lane_of_thread() == 0 && count) {
      atomicMin(&shared.least, least);
      atomicMax(&shared.most, most);
      atomicAdd(&shared.members, count);
    }
    __syncthreads();
    Extremes all = {shared.least, shared.most, shared.members, 0};
    *earlier = 0;
    if (alone()) return all;
    if (threadIdx.x == 0) shared.key_mail.expect(ctas * sizeof(uint4), false);
    if (threadIdx.x < ctas) {
      shared.key_mail.send(reinterpret_cast<uint4*>(shared.received + cta), threadIdx.x,
                           make_uint4(all.least, all.most, all.count, 0), false);
    }
    shared.key_mail.wait(keys_sent++, false);
    const uint32_t lane = lane_of_thread();
    const Extremes from = shared.received[min(lane, ctas - 1)];
    all.least = __reduce_min_sync(kAllLanes, from.least);
    all.most = __reduce_max_sync(kAllLanes, from.most);
    all.count = __reduce_add_sync(kAllLanes, lane < ctas ? from.count : 0);
    *earlier = __reduce_add_sync(kAllLanes, lane < cta ? from.count : 0);
    return all;
  }

  // Where a thread's own scores of the threshold's bin go, before they are exchanged.
  __device__ __forceinline__ float* room_for(uint32_t members) const {
    return (alone() ? shared.ranked : shared.own) + atomicAdd(&shared.num_own, members);
  }

  // Sends the scores of a bin to all CTAs, after those of earlier ones.
  __device__ __forceinline__ void exchange_scores() {
    if (!alone() && threadIdx.x == 0) shared.key_mail.expect(shared.count * sizeof(float), false);
    __syncthreads();
    if (alone()) return;
    const uint32_t earlier = shared.earlier, cluster_bits = __popc(ctas - 1);
    const uint32_t sent = shared.num_own * ctas;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < sent; i += threads()) {
      // Clusters of other sizes than powers of two serve several rows alone.
      const uint32_t at = kRows > 1 ? i / ctas : i >> cluster_bits, to = i - at * ctas;
      shared.key_mail.send(reinterpret_cast<uint32_t*>(shared.ranked) + earlier + at, to,
                           __float_as_uint(shared.own[at]), false);
    }
    shared.key_mail.wait(keys_sent++, false);
  }

  // The rank-th of the scores received becomes the threshold. All threads share the comparisons, a power of two of
  // neighbours those of a score.
  __device__ __forceinline__ void rank_scores() const {
    const uint32_t count = shared.count, rank = shared.rank, earlier = shared.earlier;
    const int sharing_bits = smaller(31 - __clz(threads()) - (32 - __clz(count - 1)), 5);
    const uint32_t sharing = 1u << sharing_bits, mine = threadIdx.x >> sharing_bits;
    const float score = mine < count ? shared.ranked[mine] : negative_infinity();
    uint32_t better = 0, equal = 0;
    if (mine < count) {
#pragma unroll 2
      for (uint32_t other = threadIdx.x & sharing - 1; other < count; other += sharing) {
        const float theirs = shared.ranked[other];
        // In the high half, of earlier CTAs.
        const uint32_t one = other < earlier ? 0x10001u : 1;
        better += theirs > score ? one : 0;
        equal += theirs == score ? one : 0;
      }
    }
    for (uint32_t lanes = 1; lanes < sharing; lanes *= 2) {
      better += __shfl_xor_sync(kAllLanes, better, lanes), equal += __shfl_xor_sync(kAllLanes, equal, lanes);
    }
    const uint32_t all_better = better & 0xffff, all_equal = equal & 0xffff;
    if (mine < count && (threadIdx.x & sharing - 1) == 0 && all_better < rank && rank <= all_better + all_equal) {
      // Equal scores write the same.
      shared.threshold = score;
      shared.ties = rank - all_better, shared.all_ties = all_better + all_equal == rank;
      shared.equal = equal >> 16;
      shared.better_in_bin = better >> 16;
    }
    __syncthreads();
  }

  // Returns how many are taken. `kForgets`: bins are found anew rather than kept.
  template <bool kForgets>
  __device__ __forceinline__ uint32_t find_threshold(const Bins& bins, uint32_t rank) {
    // Those of bin 0 as well, for equal addresses of a warp take one addition, and branches take longer.
#pragma unroll
    for (int i = 0; i < kRows * kGroup; ++i) {
      atomicAdd(&shared.histogram[bins.of_value(x[i / kGroup][i % kGroup])], 1u);
    }
    exchange_counts();
    locate(rank);
    const uint32_t bin = shared.bin;
    if (bin == 0 || bin == kAbove || shared.count > kRanked) return look_closer(bins, rank);
    const float sought = __uint_as_float(__float_as_uint(Bins::kUnit) + bin);
    Bins again = bins;
    if (kForgets) asm volatile("" : "+f"(again.low));
    uint32_t members = 0;
#pragma unroll
    for (int i = 0; i < kRows * kGroup; ++i) members |= (again.position(x[i / kGroup][i % kGroup]) == sought) << i;
    if (members) {
      float* to = room_for(__popc(members));
#pragma unroll
      for (int i = 0; i < kRows * kGroup; ++i) {
        if (members >> i & 1) *to++ = x[i / kGroup][i % kGroup];
      }
    }
    exchange_scores();
    rank_scores();
    return rank;
  }

  // What the bin of the threshold holds is counted between its ends, by key, which divides a heavy tail better. Returns
  // whether that found the threshold; where a large part of the list shares a bin, its scores are probably equal.
  __device__ __forceinline__ bool look_between_ends(const Bins& bins) {
    const uint32_t bin = shared.bin, within = shared.rank, better = shared.better;
    const float scale = fminf(kAbove * bins.scale, FLT_MAX);
    const float from = bins.low + __fdividef(bin - 1.5f, scale), to = bins.low + __fdividef(bin - .5f, scale);
    if (bin == 0 || bin == kAbove || 16 * shared.count > shared.length || !(from < to)) return false;
    const Bins closer = Bins::of_keys(order_key(__float_as_uint(from)), order_key(__float_as_uint(to)));
    // Counts were exchanged a moment ago: nobody sends others before all have read those.
    if (alone()) {
      __syncthreads();
    } else {
      synchronize_cluster();
    }
    clear_histogram();
    visit_kept([&](float x) {
      if (bins.of_value(x) == bin) atomicAdd(&shared.histogram[closer.of_key_within(x)], 1u);
    });
    exchange_counts();
    locate(within);
    if (shared.count > kRanked) {
      __syncthreads();
      if (threadIdx.x == 0) shared.bin = bin, shared.rank = within, shared.better = better;
      __syncthreads();
      return false;
    }
    visit_kept([&](float x) {
      if (bins.of_value(x) == bin && closer.of_key_within(x) == shared.bin) *room_for(1) = x;
    });
    exchange_scores();
    rank_scores();
    return true;
  }

  // What the bin of the threshold holds is counted between its extremes, until few are left.
  __device__ __forceinline__ uint32_t look_closer(Bins bins, uint32_t rank) {
#pragma unroll
    for (int i = 0; i < kRows * kGroup; ++i) kept()[i * threads() + threadIdx.x] = x[i / kGroup][i % kGroup];
    if (look_between_ends(bins)) return rank;
    do {
      const uint32_t within = shared.rank;
      uint32_t earlier;
      const Extremes all = extremes(bins, shared.bin, &earlier);
      const bool too_few = all.count < within;
      if (too_few || all.least == all.most) {
        if (threadIdx.x == 0) {
          shared.threshold = too_few ? -FLT_MAX : score_at(all.least);
          shared.ties = too_few ? INT_MAX : within, shared.all_ties = too_few || within == all.count;
          shared.equal = too_few ? 0 : earlier;
          shared.better_in_bin = 0;
          if (too_few) shared.better += earlier;
        }
        __syncthreads();
        return too_few ? rank - within + all.count : rank;
      }
      bins = Bins::of_keys(all.least, all.most);
      clear_histogram();
      visit_kept([&](float x) {
        const uint32_t bin = bins.of_key(x);
        if (bin) atomicAdd(&shared.histogram[bin], 1u);
      });
      exchange_counts();
      locate(within);
    } while (shared.count > kRanked);
    visit_kept([&](float x) {
      if (bins.of_key(x) == shared.bin) *room_for(1) = x;
    });
    exchange_scores();
    rank_scores();
    return rank;
  }

  // Bit i for scores below or above a threshold: the sign of a difference says it, and that of NaN, of two infinities,
  // is positive, as that of -0 - -0 and of 0 - -0.
  __device__ __forceinline__ static uint32_t below(const float (&x)[kGroup], float threshold) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = kGroup - 1; i >= 0; --i) bits = __funnelshift_l(__float_as_uint(x[i] - threshold), bits, 1);
    return bits;
  }
  __device__ __forceinline__ static uint32_t above(const float (&x)[kGroup], float threshold) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = kGroup - 1; i >= 0; --i) bits = __funnelshift_l(__float_as_uint(threshold - x[i]), bits, 1);
    return bits;
  }

  static constexpr int kCountBits = 10;  // of up to 256 places of a row
  __device__ __forceinline__ static uint32_t of_row(uint32_t counts, int row) {
    return counts >> kCountBits * row & (1u << kCountBits) - 1;
  }

  // Stores a value where a bit is set, and goes on. With predicates, for what the compiler makes of a condition takes
  // twice the instructions.
  __device__ __forceinline__ static void store_if(uint32_t set, int32_t*& to, int32_t value) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "@p st.global.b32 [%0], %2;\n"
        "@p add.u64 %0, %0, 4;\n"
        "}"
        : "+l"(to)
        : "r"(set), "r"(value)
        : "memory");
  }

  // Writes what is chosen: ascending, after what earlier CTAs write. `in_page`: all places of a row are in its page.
  __device__ __forceinline__ void write(int32_t request, bool in_page, int32_t* out) const {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // not to take a register since the launch began
    const int lane = thread % 32, warp = thread / 32;
    // Either zero is above or below nothing that equals it.
    const float threshold = shared.threshold, upper = threshold == 0 ? 0.f : threshold,
                lower = threshold == 0 ? -0.f : threshold;
    const bool all_ties = shared.all_ties;
    const uint32_t ties = shared.ties;
    uint32_t chosen[kRows], equal[kRows];  // bits
    uint32_t counts = 0, tie_counts = 0;   // of a row in kCountBits each
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      chosen[row] = ~below(x[row], lower) & (1u << kGroup) - 1;
      equal[row] = 0;
      if (!all_ties) {
        const uint32_t better = above(x[row], upper);
        equal[row] = chosen[row] & ~better;
        chosen[row] = better;
      }
      counts |= __popc(chosen[row]) << kCountBits * row;
      if (!all_ties) tie_counts |= __popc(equal[row]) << kCountBits * row;
    }
    uint32_t through, ties_through = 0;
    if (kRows == 1) {
      const uint32_t both = warp_scan(counts + (tie_counts << 16));
      through = both & 0xffff, ties_through = both >> 16;
    } else if (all_ties) {
      through = warp_scan(counts);
    } else {
      const uint64_t both = warp_scan(counts + (uint64_t{tie_counts} << 32));
      through = static_cast<uint32_t>(both), ties_through = both >> 32;
    }
    if (lane == 31) {
      uint32_t all = 0;  // of ties, in the high half
#pragma unroll
      for (int row = 0; row < kRows; ++row) all += of_row(through, row) + (of_row(ties_through, row) << 16);
      shared.warp_sums[warp] = all;
    }
    __syncthreads();
    uint32_t of_rows = __reduce_add_sync(kAllLanes, lane < warp ? shared.warp_sums[lane] : 0);
    out += shared.better + shared.better_in_bin;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const uint32_t ties_before = shared.equal + (of_rows >> 16) + of_row(ties_through - tie_counts, row);
      int32_t* to = out + (of_rows & 0xffff) + of_row(through - counts, row) + min(ties_before, ties);
      if (row + 1 < kRows) {
        const uint32_t in_row = __shfl_sync(kAllLanes, of_row(through, row) + (of_row(ties_through, row) << 16), 31);
        of_rows += in_row;
      }
      uint32_t taken = chosen[row], left = equal[row];
      if (ties_before + __popc(left) <= ties) {
        taken |= left;
      } else {
        for (uint32_t i = ties_before; i < ties; ++i) taken |= left & -left, left &= left - 1;
      }
      const int32_t position = shared.origin + place(row, thread);
      if (in_page) {
        // Of pages of 2^n tokens: as slot_of.
        const uint32_t page = *this->page(row, thread), page_bits = __popc(p.page_size - 1);
        const int32_t first = page >> (31 - page_bits) ? -1 : page << page_bits;
        const int32_t slot = first | (position & p.page_size - 1);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          store_if(taken & 1u << i, to, slot | i);
        }
      } else {
#pragma unroll 1
        for (; taken; taken &= taken - 1) *to++ = written_for(p, request, position + __ffs(taken) - 1);
      }
    }
  }
};

}  // namespace vegas_ops::selection::hopper::resident
