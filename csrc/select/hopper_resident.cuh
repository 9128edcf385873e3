// Selection on Hopper from lists that fit into the registers of a cluster: every thread keeps one to three groups of 8
// neighbouring scores, pools their windows by shuffles, and writes what it chooses of them. A warp's groups of a row
// follow each other, and so do its rows.
//
// A sample, the same in every CTA, brackets the threshold. Scores are counted in bins of the bracket, the counts of all
// CTAs exchanged, then the scores of the bin that holds the threshold, which every CTA ranks one against another. Where
// the bracket misses, or the bin holds too many, what it holds is counted again between its extremes: slower, never
// wrong.
#pragma once

#include <cuda_runtime.h>

#include <cute/arch/copy_sm80.hpp>

#include "select/hopper_resident_search.cuh"
#include "select/wave.h"

namespace vegas_ops::selection::hopper::resident {

__device__ __forceinline__ bool differ(const RequestWords& a, const RequestWords& b) {
  return a.seqlen != b.seqlen || a.k != b.k || a.dump_rows != b.dump_rows || a.first_row != b.first_row ||
         a.end_row != b.end_row;
}

// What a thread reads, by what memory says of its request.
struct Plan {
  Quota quota;
  const float* scores;
  int32_t length;
  int32_t origin;
  int32_t sample;  // first position of the group that it draws a sample from, or -1

  __device__ __forceinline__ Plan(const VegasSelectParams& p, const Wave& wave, const List& list, int64_t index,
                                  const RequestWords& words, int32_t drawn) {
    const Planes planes = planes_of(p, list, words);
    length = smaller(larger(words.seqlen, 0), p.max_seqlen_k);
    quota = quota_of(p, length, words.k);
    if (planes.rows == 0) quota.free = 0;
    if (quota.free == 0) length = 0;
    scores = wave.source ? wave.source + index * wave.stride : static_cast<const float*>(p.logits) + planes.offset;
    origin = -static_cast<int32_t>(reinterpret_cast<uintptr_t>(scores) / 4 % kGroup);
    sample = -1;
    if (drawn >= 0) {
      const uint32_t samples = num_samples(), jitter = drawn * 0x9e3779b1u / samples;
      const int32_t at = quota.begin + __umulhi(drawn * (0x80000000u / samples * 2) + jitter, quota.end - quota.begin);
      const int32_t group = at - ((at - origin) & kGroup - 1);
      if (group >= 0 && group + kGroup > quota.begin && group + kGroup <= smaller(quota.end, length)) sample = group;
    }
  }

  __device__ __forceinline__ static int32_t num_samples() { return smaller(threads(), kSamples); }
};

// Scores that a window reaches back: none, the look-ahead's, whose steps are then known to the compiler, or
// p.pool_before.
enum Reach { kNone = 0, kLookAhead = 6, kAny = -1 };

// Grid: a cluster per list.
template <Reach kReach, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    resident_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, const uint32_t ctas) {
  constexpr bool kPooled = kReach != kNone;
  const int reach = kReach == kAny ? p.pool_before : kReach;
  extern __shared__ __align__(128) char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  const uint32_t cta = ctas > 1 ? cute::block_rank_in_cluster() : 0, index = cute::cluster_id_in_grid().x;
  const List list = list_at(p, wave.first + index);
  // What memory says of the request is read while the previous launch ends, and again beside the scores: rarely is
  // there a difference.
  if (threadIdx.x == 0) {
    shared.words[0] = request_words(p, list.request, load_current);
    if (ctas > 1) shared.count_mail.open(), shared.key_mail.open();
    shared.better = 0, shared.num_own = 0, shared.earlier = 0;
  }
  if (threadIdx.x < kBins) shared.histogram[threadIdx.x] = 0;
  if (threadIdx.x < kSampleBins) shared.sample[threadIdx.x] = 0;
  if (ctas > 1) join_cluster();
  __syncthreads();
  Selector<kRows> select = {p, shared, reinterpret_cast<uint32_t*>(&shared + 1), ctas, cta};
  float (&x)[kRows][kGroup] = select.x;
  const auto forced_at = [&] { return static_cast<int32_t>((cta + 1) * select.threads() - 1 - threadIdx.x); };
  // Which sample a thread draws, or -1. Where threads have several groups, registers are scarce, and what lane 31 reads
  // for its warp's first windows has the place of a sample's window.
  constexpr bool kShares = kPooled && (kRows > 1 || kReach == kAny);
  float* const staged = select.kept() + kGroup * threadIdx.x;
  const auto drawn = [&] {
    const int32_t sample = kShares ? threadIdx.x - warp_of_thread() : threadIdx.x;
    return ctas == 1 || sample >= Plan::num_samples() || (kShares && lane_of_thread() == 31) ? -1 : sample;
  };
  Plan plan(p, wave, list, index, shared.words[0], drawn());
  float sample;
  constexpr int kGroupsOfLine = 32 / kGroup;
  if (plan.sample >= 0) prefetch(plan.scores + plan.sample);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int32_t position = plan.origin + select.place(row);
    if (lane_of_thread() % kGroupsOfLine == 0 && position >= 0 && position < plan.length) {
      prefetch(plan.scores + position);
    }
  }
  // Of the thread's scores and of a forced token: looked up beside the scores, for the end.
  const bool by_bits = p.page_size > 0 && !(p.page_size & p.page_size - 1);
  const bool may_be_in_page = by_bits && p.page_size >= kGroup;
  const int page_bits = __popc(p.page_size - 1);
  // By copies that take no register: those are scarce where threads have several groups.
  const auto load_page = [&](int row, int32_t column) {
    if (column < p.max_pages) {
      cute::SM80_CP_ASYNC_CACHEALWAYS<int32_t>::copy(p.block_table[list.request * p.block_table_stride + column],
                                                     *select.page(row));
    } else {
      *select.page(row) = -1;
    }
  };
  const auto forced_token = [&](const Quota& quota) {
    return forced_at() < quota.head ? forced_at() : quota.end + forced_at() - quota.head;
  };
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    // All loads before the first use of one.
    const Quota& quota = plan.quota;
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // what was prefetched is found anew, for registers are scarce
    const int32_t halo_at = plan.origin + select.place(0, thread) - kRow;
    float halo[kGroup], sampled[kGroup];
    if (kShares) {
      const bool last = lane_of_thread() == 31;
      if (last || plan.sample >= 0) stage_group(staged, plan.scores, last ? halo_at : plan.sample, plan.length);
      cute::cp_async_fence();
    } else if (plan.sample >= 0) {
      if (kPooled) {
        load_group(sampled, plan.scores, plan.sample, plan.length);
      } else {
        sampled[kGroup - 1] = plan.scores[plan.sample + kGroup - 1];
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      load_group(x[row], plan.scores, plan.origin + select.place(row, thread), plan.length);
    }
    if (kPooled && !kShares && lane_of_thread() == 31) load_group(halo, plan.scores, halo_at, plan.length);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int32_t place = select.place(row, thread);
      if (may_be_in_page && place < plan.length) load_page(row, place >> page_bits);
    }
    if (by_bits && forced_at() < quota.head + quota.tail) load_page(kRows, forced_token(quota) >> page_bits);
    if (threadIdx.x == 0) {
      const RequestWords current = request_words(p, list.request, load_current);
      shared.stale = differ(current, shared.words[turn]), shared.words[turn ^ 1] = current;
      shared.quota = quota, shared.origin = plan.origin, shared.length = plan.length;  // registers are scarce
      shared.in_page = may_be_in_page && plan.origin == 0;
    }
    sample = negative_infinity();
    if (kShares) {
      cute::cp_async_fence();
      cute::cp_async_wait<1>();  // but not for pages
    }
    const float* const drawn_from = kShares ? staged : sampled;
    if (plan.sample >= 0 && drawn_from[kGroup - 1] > negative_infinity()) {
      sample = drawn_from[kGroup - 1];
#pragma unroll
      for (int m = 1; m <= kMostReach; ++m) {
        if (kPooled && m <= reach) sample = fmaxf(sample, drawn_from[kGroup - 1 - m]);
      }
    }
    // The last row first, for its windows reach unpooled scores of the one before.
#pragma unroll
    for (int row = kRows - 1; row >= 0; --row) {
      const int32_t position = plan.origin + select.place(row, thread);
      constexpr uint32_t kAll = (1u << kGroup) - 1;
      uint32_t ranked = kAll;  // bits
      float sum = x[row][0];
#pragma unroll
      for (int i = 1; i < kGroup; ++i) sum += x[row][i];
      if (!(position >= quota.begin && position + kGroup <= quota.end && sum > negative_infinity())) {
        ranked = 0;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const bool counts =
              position + i >= quota.begin && position + i < quota.end && x[row][i] > negative_infinity();
          ranked |= counts << i;
        }
      }
      if (kPooled) pool_windows(x[row], row > 0 ? x[larger(row - 1, 0)] : kShares ? staged : halo, reach);
      if (ranked != kAll) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) x[row][i] = ranked >> i & 1 ? x[row][i] : negative_infinity();
      }
    }
    if (ctas == 1) sample = x[kRows / 2][kGroup - 1];
    select.note_extremes(sample);
    __syncthreads();
    if (!shared.stale) break;
    cute::cp_async_wait<0>();  // others go to the same places
    __syncthreads();
    plan = Plan(p, wave, list, index, shared.words[turn ^ 1], drawn());
  }
  const Quota quota = shared.quota;
  uint32_t taken = 0;
  constexpr bool kForgets = kRows == kMostRows && kReach == kAny;  // for no register is free
  const auto list_index = [&] { return wave.first + (kForgets ? cute::cluster_id_in_grid().x : index); };
  int32_t* const out = p.indices + list_index() * p.max_k;
  if (quota.free > 0) {
    const int32_t ranked = quota.end - quota.begin;
    const int32_t samples = ctas > 1 ? Plan::num_samples() : smaller(ranked / (kRows * kGroup), select.threads());
    const Bins bins = select.bracket(sample, samples, __fdividef(quota.free, ranked));
    if (ctas > 1) await_cluster();
    taken = select.template find_threshold<kForgets>(bins, quota.free);
    cute::cp_async_wait<0>();
    select.write(list.request, shared.in_page, out + quota.head);
  } else if (ctas > 1) {
    await_cluster();
  }

  // Forced tokens, padding and the length, by the last threads first, which may have no scores.
  const int32_t forced_tokens = quota.head + quota.tail, count = forced_tokens + static_cast<int32_t>(taken);
  const int32_t step = select.threads() * ctas;
  if (forced_at() < forced_tokens) {
    const int32_t token = forced_token(quota);
    cute::cp_async_wait<0>();
    out[forced_at() < quota.head ? forced_at() : forced_at() + taken] =
        by_bits ? slot_of(p, *select.page(kRows), token & p.page_size - 1) : output_of(p, list.request, token);
  }
#pragma unroll 1
  for (int32_t i = forced_at() + step; i < forced_tokens; i += step) {
    const int32_t token = i < quota.head ? i : quota.end + i - quota.head;
    out[i < quota.head ? i : i + taken] = written_for(p, list.request, token);
  }
#pragma unroll 1
  for (int32_t i = count + forced_at(); i < p.max_k; i += step) out[i] = -1;
  if (forced_at() == 0) p.topk_length[list_index()] = count;
}

}  // namespace vegas_ops::selection::hopper::resident
