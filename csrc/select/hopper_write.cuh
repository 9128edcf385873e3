// What a list is written from: bits of the scores that beat its threshold, and of those that equal it.
#pragma once

#include <cuda_runtime.h>

#include "common/warp_scan.cuh"
#include "select/hopper_bracket.cuh"

namespace vegas_ops::selection::hopper {

// output_of, without divisions where a page has 2^n tokens.
__device__ __forceinline__ int32_t written_for(const VegasSelectParams& p, int32_t request, int32_t token) {
  const int32_t offset_bits = p.page_size - 1;
  if (p.page_size & offset_bits || p.page_size == 0) return output_of(p, request, token);
  return slot_at(p, request, token >> __popc(offset_bits), token & offset_bits);
}

// Has the L2 cache ready what translates the slice, unless that is as much as its scores.
__device__ __forceinline__ void prefetch_pages(const VegasSelectParams& p, const Slice& slice) {
  if (p.page_size < 8 || slice.words == 0) return;
  constexpr int kLine = 32;  // pages
  const int32_t first = larger(slice.first - slice.after, 0) / p.page_size;
  const int32_t last = smaller((slice.stop() - slice.after) / p.page_size, p.max_pages - 1);
  const int32_t page = first + kLine * threadIdx.x;
  if (page <= last) prefetch(p.block_table + slice.request * p.block_table_stride + page);
}

// Writes the positions of the chosen: ascending, after those of earlier slices. They are gathered first, so that all
// threads translate and store.
template <bool kPooled>
__device__ __forceinline__ void write_chosen(const VegasSelectParams& p, Shared& shared, const Arrays& arrays,
                                             const Slice& slice, int32_t* out) {
  const int lane = lane_of_thread(), warp = warp_of_thread(), reach = p.pool_before + p.pool_after;
  const uint32_t taken_ties = shared.ties, earlier_ties = min(shared.equal, taken_ties);
  // Of this slice: the first.
  const uint32_t most_ties = taken_ties == shared.all_equal ? kAllLanes : taken_ties - earlier_ties;
  const int32_t share = (slice.words + threads() - 1) / threads(), first = 1 + share * threadIdx.x;
  if (threadIdx.x == 0 && slice.words == 0) shared.num_chosen = 0;
  const bool works = first - share * lane <= slice.words;  // the warp has words
  uint32_t chosen[kMostShare], ties[kMostShare], counts = 0, through = 0;
  if (works) {
#pragma unroll
    for (int i = 0; i < kMostShare; ++i) {
      const int32_t word = first + i;
      chosen[i] = ties[i] = 0;
      if (i >= share || word > slice.words) continue;
      chosen[i] = arrays.above[word];
      ties[i] = arrays.equal[word];
      if (kPooled) {
        const uint32_t ranked = arrays.ranked[word];
        chosen[i] = ranked & widened(arrays.above, word, reach);
        // Few words have any.
        if (ties[i] | arrays.equal[word - 1]) ties[i] = ranked & ~chosen[i] & widened(arrays.equal, word, reach);
      }
      counts += __popc(chosen[i]) + (__popc(ties[i]) << 16);
    }
    through = warp_scan(counts);
    if (lane == 31) shared.warp_sums[warp] = through;
  }
  __syncthreads();
  if (works) {
    const int working = (slice.words + 32 * share - 1) / (32 * share);  // warps
    const uint32_t sums = lane < working ? shared.warp_sums[lane] : 0, before = lane < warp ? sums : 0;
    uint32_t ties_before = __reduce_add_sync(kAllLanes, before >> 16) + (through - counts >> 16);
    uint32_t at =
        __reduce_add_sync(kAllLanes, before & 0xffff) + (through - counts & 0xffff) + min(ties_before, most_ties);
    if (warp == working - 1) {
      const uint32_t all_ties = __reduce_add_sync(kAllLanes, sums >> 16);
      const uint32_t all = __reduce_add_sync(kAllLanes, sums & 0xffff) + min(all_ties, most_ties);
      if (lane == 0) shared.num_chosen = all;
    }
#pragma unroll
    for (int i = 0; i < kMostShare; ++i) {
      if (i >= share) break;
      uint32_t taken = ties[i], left = most_ties > ties_before ? most_ties - ties_before : 0;
      ties_before += __popc(taken);
      if (__popc(taken) > left) {
        for (taken = 0; left; --left) taken |= ties[i] & -ties[i], ties[i] &= ties[i] - 1;
      }
      for (uint32_t bits = chosen[i] | taken; bits; bits &= bits - 1) {
        arrays.gathered[at++] = static_cast<uint16_t>(32 * (first + i - 1) + __ffs(bits) - 1);
      }
    }
  }
  __syncthreads();
  out += shared.better + earlier_ties;
  const int32_t origin = slice.first - slice.after, all = shared.num_chosen;
  const int32_t offset_bits = p.page_size - 1;
  if (p.page_size & offset_bits || p.page_size == 0 || p.max_pages == 0) {
#pragma unroll 1
    for (int32_t at = threadIdx.x; at < all; at += threads()) {
      out[at] = output_of(p, slice.request, origin + arrays.gathered[at]);
    }
    return;
  }
  // Slots of several tokens at a time, since their pages are far away.
  constexpr int kOutputs = 4;
  const int page_bits = __popc(offset_bits);
  const int32_t* const table = p.block_table + slice.request * p.block_table_stride;
#pragma unroll 1
  for (int32_t from = threadIdx.x; from < all; from += kOutputs * threads()) {
    int32_t tokens[kOutputs], pages[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      tokens[i] = origin + arrays.gathered[smaller(from + i * threads(), all - 1)];
      pages[i] = table[smaller(tokens[i] >> page_bits, p.max_pages - 1)];
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int32_t at = from + i * threads();
      const bool in_table = tokens[i] >> page_bits < p.max_pages;
      if (at < all) out[at] = in_table ? slot_of(p, pages[i], tokens[i] & offset_bits) : -1;
    }
  }
}

}  // namespace vegas_ops::selection::hopper
