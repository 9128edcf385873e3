// Selection on Hopper from lists that fit into the registers of a cluster: every thread keeps 8 neighbouring scores,
// pools their windows by shuffles, and writes what it chooses of them.
//
// A sample, the same in every CTA, brackets the threshold. Scores are counted in bins of the bracket, the counts of all
// CTAs exchanged, then the scores of the bin that holds the threshold, which every CTA ranks one against another. Where
// the bracket misses, or the bin holds too many, what it holds is counted again between its extremes: slower, never
// wrong.
#pragma once

#include <cuda_runtime.h>

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
                                  const RequestWords& words, bool draws) {
    const Planes planes = planes_of(p, list, words);
    length = smaller(larger(words.seqlen, 0), p.max_seqlen_k);
    quota = quota_of(p, length, words.k);
    if (planes.rows == 0) quota.free = 0;
    if (quota.free == 0) length = 0;
    scores = wave.source ? wave.source + index * wave.stride : static_cast<const float*>(p.logits) + planes.offset;
    origin = -static_cast<int32_t>(reinterpret_cast<uintptr_t>(scores) / 4 % kGroup);
    sample = -1;
    if (draws) {
      const uint32_t samples = num_samples(), jitter = threadIdx.x * 0x9e3779b1u / samples;
      const int32_t at =
          quota.begin + __umulhi(threadIdx.x * (0x80000000u / samples * 2) + jitter, quota.end - quota.begin);
      const int32_t group = at - ((at - origin) & kGroup - 1);
      if (group >= 0 && group + kGroup > quota.begin && group + kGroup <= smaller(quota.end, length)) sample = group;
    }
  }

  __device__ __forceinline__ static int32_t num_samples() { return smaller(threads(), kSamples); }
};

// Grid: a cluster per list.
template <bool kPooled>
__global__ void __launch_bounds__(kThreads, 1)
    resident_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, const int cluster_bits) {
  extern __shared__ __align__(128) char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  const int64_t index = blockIdx.x >> cluster_bits;
  const uint32_t ctas = 1u << cluster_bits, cta = blockIdx.x & (ctas - 1);
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
  uint32_t* const histograms = reinterpret_cast<uint32_t*>(&shared + 1);
  Selector select = {p, shared, histograms, reinterpret_cast<float*>(histograms + kBins * ctas), ctas, cta};
  float (&x)[kGroup] = select.x;
  const int32_t place = select.place(), forced_at = (cta + 1) * threads() - 1 - threadIdx.x;
  const bool draws = ctas > 1 && threadIdx.x < Plan::num_samples();
  Plan plan(p, wave, list, index, shared.words[0], draws);
  float sample;
  constexpr int kGroupsOfLine = 32 / kGroup;
  if (plan.sample >= 0) prefetch(plan.scores + plan.sample);
  if (lane_of_thread() % kGroupsOfLine == 0 && plan.origin + place >= 0 && plan.origin + place < plan.length) {
    prefetch(plan.scores + plan.origin + place);
  }
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    // All loads before the first use of one.
    const Quota& quota = plan.quota;
    const int32_t position = plan.origin + place;
    float halo[kGroup], sampled[kGroup];
    if (plan.sample >= 0) {
      if (kPooled) {
        load_group(sampled, plan.scores, plan.sample, plan.length);
      } else {
        sampled[kGroup - 1] = plan.scores[plan.sample + kGroup - 1];
      }
    }
    load_group(x, plan.scores, position, plan.length);
    if (kPooled && lane_of_thread() == 31) load_group(halo, plan.scores, position - 32 * kGroup, plan.length);
    if (threadIdx.x == 0) {
      const RequestWords current = request_words(p, list.request, load_current);
      shared.stale = differ(current, shared.words[turn]), shared.words[turn ^ 1] = current;
      shared.quota = quota, shared.origin = plan.origin, shared.length = plan.length;  // registers are scarce
    }
    sample = negative_infinity();
    if (plan.sample >= 0 && sampled[kGroup - 1] > negative_infinity()) {
      sample = sampled[kGroup - 1];
#pragma unroll
      for (int m = 1; m <= kMostReach; ++m) {
        if (kPooled && m <= p.pool_before) sample = fmaxf(sample, sampled[kGroup - 1 - m]);
      }
    }
    uint32_t ranked = 0;  // bits
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const bool counts = position + i >= quota.begin && position + i < quota.end && x[i] > negative_infinity();
      ranked |= counts << i;
    }
    if (kPooled) pool_windows(x, halo, p.pool_before);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) x[i] = ranked >> i & 1 ? x[i] : negative_infinity();
    if (ctas == 1) sample = x[kGroup - 1];
    select.note_extremes(sample);
    __syncthreads();
    if (!shared.stale) break;
    __syncthreads();
    plan = Plan(p, wave, list, index, shared.words[turn ^ 1], draws);
  }
  const Quota quota = shared.quota;
  // Looked up now, for the end: the slots of a forced token and of the thread's page.
  int32_t page, forced;
  const bool in_page = shared.origin == 0 && p.page_size >= kGroup && !(p.page_size & p.page_size - 1);
  if (in_page && place < shared.length) page = slot_at(p, list.request, place >> __popc(p.page_size - 1), 0);
  if (forced_at < quota.head + quota.tail) {
    forced = written_for(p, list.request, forced_at < quota.head ? forced_at : quota.end + forced_at - quota.head);
  }
  uint32_t taken = 0;
  int32_t* const out = p.indices + (wave.first + index) * p.max_k;
  if (quota.free > 0) {
    const int32_t ranked = quota.end - quota.begin;
    const int32_t samples = ctas > 1 ? Plan::num_samples() : smaller(ranked / kGroup, threads());
    const Bins bins = select.bracket(sample, samples, __fdividef(quota.free, ranked));
    if (ctas > 1) await_cluster();
    taken = select.find_threshold(bins, quota.free);
    select.write(list.request, in_page, page, out + quota.head);
  } else if (ctas > 1) {
    await_cluster();
  }

  // Forced tokens, padding and the length, by the last threads first, which may have no scores.
  const int32_t forced_tokens = quota.head + quota.tail, count = forced_tokens + static_cast<int32_t>(taken);
  const int32_t step = threads() << cluster_bits;
  if (forced_at < forced_tokens) out[forced_at < quota.head ? forced_at : forced_at + taken] = forced;
#pragma unroll 1
  for (int32_t i = forced_at + step; i < forced_tokens; i += step) {
    const int32_t token = i < quota.head ? i : quota.end + i - quota.head;
    out[i < quota.head ? i : i + taken] = written_for(p, list.request, token);
  }
#pragma unroll 1
  for (int32_t i = count + forced_at; i < p.max_k; i += step) out[i] = -1;
  if (forced_at == 0) p.topk_length[wave.first + index] = count;
}

}  // namespace vegas_ops::selection::hopper::resident
