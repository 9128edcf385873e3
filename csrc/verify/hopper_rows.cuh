// The guide warps of a Hopper verify CTA where the rows themselves are dumped: they write logits of the first and last
// row, off the other roles' path.
#pragma once

#include "verify/hopper_traits.cuh"

namespace vegas_ops::hopper {

// Keys on the 16-row side of mma.m16n8k16, dumped rows on its 8-column side: with up to four heads of a KV head those
// of both planes, and each warp takes half of a tile's keys; with up to eight those of the warp's plane, and it takes
// all. Which key a row of a product is may be chosen: a lane finds four neighbours in its accumulators, which it stores
// at once, eight lanes 64 bytes of a row. Lanes that read keys at the same time find two of them whose swizzles differ
// in half a line.
template <class T>
__device__ __forceinline__ void dump_rows(const VegasVerifyParams& p, SharedMemory<T>& shared) {
  using Element = typename T::Element;
  constexpr int kSteps = T::kHeadDim / 32;
  constexpr int kBlockKeys = 32;
  constexpr int kOwnKeys = 4;  // of a lane, of a block
  const int lane = threadIdx.x % 32;
  const int guide_warp = threadIdx.x / 32 - kFirstGuideWarp;
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const bool shares_keys = group <= 4;
  const int heads = shares_keys ? 4 : 8;  // columns of a plane
  const int first_plane = shares_keys ? 0 : guide_warp;
  const int warp_keys = shares_keys ? T::kTileKeys / kGuideWarps : T::kTileKeys;
  const int own_key = (shares_keys ? guide_warp * warp_keys : 0) + lane / 4 * kOwnKeys;
  const int lane_offset = swizzled_offset<T::kTileKeys>(own_key, lane % 4);
  // This lane multiplies column lane / 4, and finds columns 2 * (lane % 4) and the next: heads of one plane.
  const int column_plane = first_plane + lane / 4 / heads;
  const int column_head = lane / 4 % heads;
  const int own_plane = first_plane + 2 * (lane % 4) / heads;
  const int own_head = 2 * (lane % 4) % heads;
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(p.logits) / 2 | p.logits_stride[0] | p.logits_stride[1] | p.logits_stride[2]) &
       (kOwnKeys - 1)) == 0;
  RingPosition<T::kStages> ring;
  SegmentReader<T> segments = {shared};
  for (const Segment* next; (next = segments.next()); segments.done()) {
    const Segment& s = *next;
    const int length = s.row_tile == 0 ? s.request.dump_len : 0;
    const auto query_row = [&](int plane) { return plane == 0 ? 0 : s.request.q_len - 1; };
    uint4 query[kSteps];
    const int segment = lane % 4;
    const Element* source = static_cast<const Element*>(p.q) +
                            (s.request.q_begin + int64_t{query_row(column_plane)}) * p.q_stride_row +
                            (s.kv_head * group + column_head) * p.q_stride_head + segment * 8;
    const int segments_left = length > 0 && column_head < group ? p.cache.head_dim / 8 - segment : 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      query[k] = make_uint4(0, 0, 0, 0);
      if (4 * k < segments_left) query[k] = *reinterpret_cast<const uint4*>(source + 32 * k);
    }
    __nv_bfloat16* const own = static_cast<__nv_bfloat16*>(p.logits) + s.index * p.logits_stride[0] +
                               (s.kv_head * group + own_head) * p.logits_stride[1] + own_plane * p.logits_stride[2];
    const int own_heads = s.request.bits >> own_plane & 1 ? group - own_head : 0;
    const float scale = p.softmax_scale * portable::descale_of(p.cache.k, s.index, s.kv_head);
    int first_key = s.template key_of<T::kTileKeys>(s.first_tile);
    for (int tile = s.first_tile; tile < s.end_tile; ++tile, first_key += T::kTileKeys) {
      wait_barrier(shared.keys_full[ring.stage], ring.phase);
      if (first_key >= length) {
        arrive_barrier(shared.keys_empty[ring.stage]);
        ring.advance();
        continue;
      }
#pragma unroll 1
      for (int first = 0; first < warp_keys; first += kBlockKeys) {
        const char* keys = shared.keys[ring.stage] + first * 128;
        const uint32_t valid = shared.valid[ring.stage].words[(own_key + first) / 32] >> own_key % 32;
        // Products of even and odd words are chains of their own.
        float x[2][4] = {};
        float odd[2][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint4 rows[kOwnKeys];
#pragma unroll
          for (int i = 0; i < kOwnKeys; ++i) {
            rows[i] = *reinterpret_cast<const uint4*>(keys + (lane_offset ^ (64 * (k % 2) + 16 * i)) + 128 * i +
                                                      k / 2 * (T::kTileKeys * 128));
          }
          if (first + kBlockKeys == warp_keys && k + 1 == kSteps) arrive_barrier(shared.keys_empty[ring.stage]);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const uint4& low = rows[2 * m];
            const uint4& high = rows[2 * m + 1];
            const uint32_t even_words[4] = {low.x, high.x, low.y, high.y};
            const uint32_t odd_words[4] = {low.z, high.z, low.w, high.w};
            portable::mma<Element>(x[m], even_words, query[k].x, query[k].y);
            portable::mma<Element>(odd[m], odd_words, query[k].z, query[k].w);
          }
        }
        const int key = first_key + own_key + first;
        const int left = length - key;
        uint32_t seen = valid;  // a bit per key
        if (key < s.request.first_full_key || key + kOwnKeys - 1 > s.request.last_full_key) {
          int first_seen, last_seen;
          s.visible(query_row(own_plane), first_seen, last_seen);
#pragma unroll
          for (int i = 0; i < kOwnKeys; ++i) {
            if (key + i < first_seen || key + i > last_seen) seen &= ~(1u << i);
          }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (j >= own_heads) continue;
          float logit[kOwnKeys];
#pragma unroll
          for (int i = 0; i < kOwnKeys; ++i) {
            const int at = 2 * (i % 2) + j;
            logit[i] = seen >> i & 1 ? (x[i / 2][at] + odd[i / 2][at]) * scale : -INFINITY;
          }
          __nv_bfloat16* to = own + j * p.logits_stride[1] + key;
          if (aligned && left >= kOwnKeys) {
            *reinterpret_cast<uint2*>(to) = make_uint2(portable::pack<__nv_bfloat16>(logit[0], logit[1]),
                                                       portable::pack<__nv_bfloat16>(logit[2], logit[3]));
          } else {
#pragma unroll
            for (int i = 0; i < kOwnKeys; ++i) {
              if (i < left) to[i] = __float2bfloat16_rn(logit[i]);
            }
          }
        }
      }
      ring.advance();
    }
  }
}

}  // namespace vegas_ops::hopper
