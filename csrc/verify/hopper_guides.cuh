// The warps of a Hopper verify CTA that multiply its guide rows and dump what they say, off the other roles' path.
#pragma once

#include "verify/hopper_traits.cuh"

namespace vegas_ops::hopper {

// The guide columns as the B operand of mma.m16n8k16, whose column is lane / 4: lane `segment` makes a segment, and all
// lanes take their words of it.
template <class T>
__device__ __forceinline__ void load_guides(const VegasVerifyParams& p, const Segment& s,
                                            uint32_t (&query)[T::kHeadDim / 16][2]) {
  const int lane = threadIdx.x % 32;
  const int columns = p.dump == VEGAS_DUMP_TOKEN ? portable::kGuideColumns : 2;
  for (int column = 0; column < columns; ++column) {
    uint4 made = make_uint4(0, 0, 0, 0);
    if (lane < T::kSegments) {
      made = portable::guide_column<typename T::Element>(p, s.request, s.kv_head, column, lane);
    }
    const uint32_t words[4] = {made.x, made.y, made.z, made.w};
#pragma unroll
    for (int segment = 0; segment < T::kSegments; ++segment) {
      uint32_t value = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = __shfl_sync(0xffffffffu, words[i], segment);
        if (lane % 4 == i) value = word;
      }
      if (lane / 4 % columns == column) query[segment / 2][segment % 2] = value;
    }
  }
}

// Keys on the 16-row side of mma.m16n8k16, guide columns on the 8-column side; the guide warps share the keys of a
// tile.
template <class T>
__device__ __forceinline__ void multiply_guides(const VegasVerifyParams& p, const Workspace& w,
                                                SharedMemory<T>& shared) {
  using Element = typename T::Element;
  constexpr int kSteps = T::kHeadDim / 16;
  constexpr int kProducts = kTileKeys / 16 / kGuideWarps;  // of 16 keys, of a warp
  constexpr int kOwnKeys = kProducts / 2;                  // of a lane
  const int lane = threadIdx.x % 32;
  const int guide_warp = threadIdx.x / 32 - kFirstGuideWarp;
  const int first_row = guide_warp * kProducts * 16;
  // Four lanes find the same keys in their accumulators: row lane / 4 and 8 further, of every product. Each looks
  // after one half of a product of its own, or both.
  const int own_product = lane % 4 % kProducts;
  const int own_half = lane % 4 / kProducts;
  const int own_column = first_row + 16 * own_product + lane / 4 + 8 * own_half;
  const int lane_offset = swizzled_offset<kTileKeys>(first_row + lane % 16, lane / 16);
  const bool token = p.dump == VEGAS_DUMP_TOKEN;
  int parity = 0;
  RingPosition<T::kStages> ring;
  SegmentReader<T> segments = {shared};
  for (const Segment* next; (next = segments.next()); segments.done()) {
    const Segment& s = *next;
    if (s.request.num_guides == 0 || s.row_tile > 0) {
      for (int tile = s.live_begin; tile < s.live_end; ++tile) {
        wait_barrier(shared.keys_full[ring.stage], ring.phase);
        arrive_as_warp(shared.keys_empty[ring.stage]);
        ring.advance();
      }
      continue;
    }
    uint32_t query[kSteps][2] = {};
    load_guides<T>(p, s, query);
    portable::GuideDump dump;
    portable::describe_guides(dump, p, s.request, s.index, s.kv_head,
                              w.dump + (int64_t{s.index} * p.cache.num_heads_kv + s.kv_head) * w.dump_stride);
    const float scale = p.softmax_scale * portable::descale_of(p.cache.k, s.index, s.kv_head);
    // Masked for all rows: the guide warps take turns.
    const auto write_masked = [&](int begin, int end) {
      for (int key = begin + guide_warp * 32 + lane; key < end; key += 32 * kGuideWarps) {
        dump.write(key, -INFINITY, -INFINITY);
      }
    };
    write_masked(s.key_of(s.first_tile), s.key_of(s.live_begin));
    RowNorm norm[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};  // of this lane's keys
    const int end_key = s.request.end_key;
    const int live_end = s.live_end;
    int key = s.key_of(s.live_begin) + own_column;
    for (int tile = s.live_begin; tile < live_end; ++tile, key += kTileKeys) {
      wait_barrier(shared.keys_full[ring.stage], ring.phase);
      const char* keys = shared.keys[ring.stage] + lane_offset;
      // Fragments are read one step ahead of the products, and those of even and odd steps are chains of their own.
      uint32_t fragments[2][kProducts][4];
      const auto read = [&](int k) {
#pragma unroll
        for (int m = 0; m < kProducts; ++m) {
          // The swizzle depends on the row within 8 alone, so 16 rows further is 2048 bytes further.
          const int moved = (lane_offset ^ 32 * (k % 4)) - lane_offset;
          portable::load_matrices(fragments[k % 2][m], keys + moved + k / 4 * (kTileKeys * 128) + m * 2048);
        }
      };
      float x[kProducts][4] = {};
      float odd[kProducts][4] = {};
      read(0);
      uint32_t valid = 0;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k + 1 < kSteps) {
          read(k + 1);
        } else {
          valid = shared.valid[ring.stage].words[own_column / 32] >> own_column % 32;
          arrive_as_warp(shared.keys_empty[ring.stage]);
        }
#pragma unroll
        for (int m = 0; m < kProducts; ++m) {
          portable::mma<Element>(k % 2 ? odd[m] : x[m], fragments[k % 2][m], query[k][0], query[k][1]);
        }
      }
#pragma unroll
      for (int m = 0; m < kProducts; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][i] += odd[m][i];
      }
      ring.advance();

      if (token) {
        // Its four terms are in two columns each of neighbours.
#pragma unroll
        for (int m = 0; m < kProducts; ++m) {
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            x[m][i] += x[m][i + 1];
            x[m][i] += __shfl_xor_sync(0xffffffffu, x[m][i], 1);
            x[m][i + 1] = x[m][i];
          }
        }
      }
      float own[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[i] = x[0][i];
#pragma unroll
        for (int m = 1; m < kProducts; ++m) own[i] = own_product == m ? x[m][i] : own[i];
      }
      float logits[2][kOwnKeys];  // of guide rows
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
        const int at = key + 8 * i;
        const bool exists = at < end_key && (valid >> 8 * i & 1);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          float value = kOwnKeys == 2 ? own[2 * i + g] : own_half == 0 ? own[g] : own[2 + g];
          value *= scale;
          if (p.softcap > 0.0f) value = p.softcap * tanhf(value / p.softcap);
          logits[g][i] = exists && dump.sees(g, at) ? value : -INFINITY;
        }
        dump.write(at, logits[0][i], logits[1][i]);
      }
      if (token) continue;
#pragma unroll
      for (int g = 0; g < 2; ++g) portable::add_logits(norm[g], logits[g]);
    }
    write_masked(s.key_of(live_end), min(s.key_of(s.first_tile + s.tiles), end_key));
    if (token) continue;

#pragma unroll
    for (int g = 0; g < 2; ++g) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) portable::merge_lanes(norm[g], step);
      if (guide_warp > 0 && lane == 0) shared.guide_norm[parity][g] = norm[g];
    }
    cutlass::arch::NamedBarrier::sync(32 * kGuideWarps, kGuideBarrier);
    if (guide_warp == 0 && lane < s.request.num_guides) {
      const RowNorm mine = lane == 0 ? norm[0] : norm[1];
      const RowNorm other = shared.guide_norm[parity][lane];
      RowNorm whole = {fmaxf(mine.maximum, other.maximum), 0.0f};
      whole.sum = mine.sum * mine.weight_in(whole) + other.sum * other.weight_in(whole);
      if (s.whole) {
        portable::write_guide_lse(p, s.request, s.index, s.kv_head, lane, whole.lse());
      } else {
        w.partial_norm[int64_t{s.slot} * w.norm_rows + w.tile_rows + lane] = make_float2(whole.maximum, whole.sum);
      }
    }
    parity ^= 1;
  }
}

}  // namespace vegas_ops::hopper
