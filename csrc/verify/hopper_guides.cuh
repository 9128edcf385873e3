// The warps of a Hopper verify CTA that multiply its guide rows and dump what they say, off the other roles' path.
#pragma once

#include "verify/hopper_team.cuh"

namespace vegas_ops::hopper {

// Of an fp8 cache: the guide columns, for the row group to multiply among its own, in the order of its queries. Called
// by the guide warps, `thread` among them.
template <class T>
__device__ __forceinline__ void hand_guides(const VegasVerifyParams& p, const Segment& s, RowMemory<T>& rows,
                                            int thread) {
  constexpr int kColumns = portable::kGuideColumns;
#pragma unroll 1
  for (int task = thread; task < kColumns * (T::kHeadDim / 8); task += 32 * kGuideWarps) {
    uint4 made[1];
    portable::guide_column<typename T::Element>(p, s.request, s.kv_head, task % kColumns, task / kColumns, made);
    const int segment = task / kColumns;
    const int row = T::kRows + task % kColumns;
    char* const to = rows.query + segment % 2 * 8;
    *reinterpret_cast<uint2*>(to + swizzled_offset<T::kColumns>(row, segment / 2 * 2)) =
        make_uint2(made[0].x, made[0].z);
    *reinterpret_cast<uint2*>(to + swizzled_offset<T::kColumns>(row, segment / 2 * 2 + 1)) =
        make_uint2(made[0].y, made[0].w);
  }
  cutlass::arch::fence_view_async_shared();
  arrive_barrier(rows.guides_ready);
}

// Dimensions [8 * segment, 8 * segment + 8) of a guide row, as guide_column makes it of head rows.
template <class Element>
__device__ __forceinline__ uint4 guide_segment(const VegasVerifyParams& p, const VerifyRequest& request, int kv_head,
                                               int guide, int segment) {
  constexpr int kBatch = 4;  // heads that are read at once
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const int own = segment * 8;
  const Element* heads = portable::guide_heads<Element>(p, request, kv_head, guide) + own;
  float sum[8] = {};
#pragma unroll 1
  for (int first = 0; first < group; first += kBatch) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      values[i] = make_uint4(0, 0, 0, 0);
      if (own >= p.cache.head_dim || first + i >= group) continue;
      values[i] = portable::load_query(heads + (first + i) * p.q_stride_head, true);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = portable::unpack<Element>(words[j]);
        sum[2 * j] += pair.x;
        sum[2 * j + 1] += pair.y;
      }
    }
  }
  const float share = 1.0f / group;
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) words[j] = portable::pack<Element>(sum[2 * j] * share, sum[2 * j + 1] * share);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A guide column by all lanes of a warp: each makes one segment of a guide row and hands it on. It runs once, as the
// first keys arrive, and instructions that are not at hand come late then: this takes fewer.
template <class Element, int kSegments>
__device__ __forceinline__ void make_guide_column(const VegasVerifyParams& p, const VerifyRequest& request, int kv_head,
                                                  int column, int segment, uint4 (&made)[kSegments]) {
  constexpr int kOfRow = 4 * kSegments;  // segments of a guide row
  static_assert(2 * kOfRow <= 32, "a lane makes one segment");
  const int lane = threadIdx.x % 32;
  const uint4 mine =
      guide_segment<Element>(p, request, kv_head, min(lane / kOfRow % 2, request.num_guides - 1), lane % kOfRow);
  const uint32_t words[4] = {mine.x, mine.y, mine.z, mine.w};
#pragma unroll
  for (int s = 0; s < kSegments; ++s) {
    uint32_t got[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) got[j] = __shfl_sync(0xffffffffu, words[j], column % 2 * kOfRow + segment + 4 * s);
    made[s] = make_uint4(got[0], got[1], got[2], got[3]);
  }
}

// The same of a `token` dump, as guide_column makes it: lanes sum one segment of all dumped rows, read several rows at
// once, and keep some of its terms.
template <class Element, int kSegments>
__device__ __forceinline__ void make_token_column(const VegasVerifyParams& p, const VerifyRequest& request, int kv_head,
                                                  int column, int segment, uint4 (&made)[kSegments]) {
  constexpr int kBatch = 8;  // rows that are read at once
  constexpr int kOfRow = 4 * kSegments;
  static_assert(32 % kOfRow == 0, "a lane sums one segment");
  constexpr int kTerms = portable::kGuideColumns * kOfRow / 32;  // of a lane
  const int lane = threadIdx.x % 32;
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const int own = lane % kOfRow * 8;
  const Element* const first_heads = portable::guide_heads<Element>(p, request, kv_head, 0) + own;
  const Element* const last_heads =
      portable::guide_heads<Element>(p, request, kv_head, request.num_guides - 1) + own - group * p.q_stride_head;
  const int rows = own < p.cache.head_dim ? request.num_guides * group : 0;
  float sum[8] = {};
#pragma unroll 1
  for (int first = 0; first < rows; first += kBatch) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      values[i] = make_uint4(0, 0, 0, 0);
      const int row = first + i;
      if (row < rows) {
        values[i] = portable::load_query((row < group ? first_heads : last_heads) + row * p.q_stride_head, true);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = portable::unpack<Element>(words[j]);
        sum[2 * j] += pair.x;
        sum[2 * j + 1] += pair.y;
      }
    }
  }
  uint32_t terms[kTerms][4];
#pragma unroll
  for (int term = 0; term < portable::kGuideColumns; ++term) {
    uint32_t words[4];
    portable::take_term<Element>(sum, words);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (term < kTerms || term / kTerms == lane / kOfRow) terms[term % kTerms][j] = words[j];
    }
  }
#pragma unroll
  for (int s = 0; s < kSegments; ++s) {
    const int from = column / kTerms * kOfRow + segment + 4 * s;
    uint32_t got[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        const uint32_t word = __shfl_sync(0xffffffffu, terms[term][j], from);
        if (term == 0 || column % kTerms == term) got[j] = word;
      }
    }
    made[s] = make_uint4(got[0], got[1], got[2], got[3]);
  }
}

// Keys on the 16-row side of mma.m16n8k16, guide columns on the 8-column side; the guide warps share the keys of a
// tile. Lanes read and keep whole segments of 16 bytes, whose words are their operands of two products: a product takes
// its dimensions in any order, if only both sides have the same. Keys take turns within 8, so that the lanes that read
// at once find two rows whose swizzles differ in half a line.
template <class T, bool kHanded>
__device__ __forceinline__ void multiply_guides(const VegasVerifyParams& p, const Workspace& w,
                                                SharedMemory<T>& shared) {
  using Element = typename T::Element;
  constexpr int kSteps = T::kHeadDim / 32;
  constexpr int kProducts = T::kTileKeys / 16 / kGuideWarps;  // of 16 keys, of a warp
  constexpr int kOwnKeys = kProducts / 2;                     // of a lane
  const int lane = threadIdx.x % 32;
  const int guide_warp = threadIdx.x / 32 - kFirstGuideWarp;
  const int first_row = guide_warp * kProducts * 16;
  // Four lanes find the same keys in their accumulators: row lane / 4 and 8 further, of every product. Each looks
  // after one half of a product of its own, or both.
  const int own_product = lane % 4 % kProducts;
  const int own_half = lane % 4 / kProducts;
  const int own_row = lane / 8 + lane / 4 % 2 * 4;
  const int own_column = first_row + 16 * own_product + own_row + 8 * own_half;
  const int lane_offset = swizzled_offset<T::kTileKeys>(first_row + own_row, lane % 4);
  const bool token = p.dump == VEGAS_DUMP_TOKEN;
  int parity = 0;
  TeamDump<T::kTileKeys, kOwnKeys> team(w, shared.pending[guide_warp], own_column);
  RingPosition<T::kStages> ring;
  RingPosition<T::kGuideSlots> products_ring;
  SegmentReader<T> segments = {shared};
  for (const Segment* next; (next = segments.next()); segments.done()) {
    const Segment& s = *next;
    if (s.request.num_guides == 0 || s.row_tile > 0) {
      if constexpr (!kHanded) {
        for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
          wait_barrier(shared.keys_full[ring.stage], ring.phase);
          arrive_barrier(shared.keys_empty[ring.stage]);
          ring.advance();
        }
      }
      continue;
    }
    portable::GuideDump dump;
    portable::describe_guides(dump, p, s.request, s.index, s.kv_head, s.kv_head, p.cache.num_heads_kv, w.dump);
    uint4 query[kHanded ? 1 : kSteps];
    if constexpr (T::kFp8) {
      if (s.first_tile < s.end_tile) hand_guides<T>(p, s, shared.rows, 32 * guide_warp + lane);
    } else if constexpr (!kHanded) {
      if (token) {
        make_token_column<Element>(p, s.request, s.kv_head, lane / 4 % portable::kGuideColumns, lane % 4, query);
      } else if constexpr (!T::kGuesses) {
        portable::guide_column<Element>(p, s.request, s.kv_head, lane / 4 % portable::kGuideColumns, lane % 4, query);
      } else if constexpr (T::kGuesses) {
        make_guide_column<Element>(p, s.request, s.kv_head, lane / 4, lane % 4, query);
      }
    }
    const bool capped = p.softcap > 0.0f;
    float to_logit = p.softmax_scale * portable::descale_of(p.cache.k, s.index, s.kv_head);
    if (capped) to_logit /= p.softcap;
    const Cap cap(to_logit);
    // Of this lane's keys of the next tile; returns a bit per key that exists.
    const auto multiply = [&](float (&products)[2][kOwnKeys]) __attribute__((always_inline)) {
      wait_barrier(shared.keys_full[ring.stage], ring.phase);
      const char* keys = shared.keys[ring.stage] + lane_offset;
      // Products of even and odd words are chains of their own.
      float x[kProducts][4] = {};
      float odd[kProducts][4] = {};
      uint32_t valid = 0;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        // The swizzle depends on the row within 8 alone, so 8 rows further is 1024 bytes further.
        const char* from = keys + (lane_offset ^ 64 * (k % 2)) - lane_offset + k / 2 * (T::kTileKeys * 128);
        uint4 rows[kProducts][2];
#pragma unroll
        for (int m = 0; m < kProducts; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) rows[m][i] = *reinterpret_cast<const uint4*>(from + (2 * m + i) * 1024);
        }
        if (k + 1 == kSteps) {
          valid = shared.valid[ring.stage].words[own_column / 32] >> own_column % 32;
          arrive_barrier(shared.keys_empty[ring.stage]);
        }
#pragma unroll
        for (int m = 0; m < kProducts; ++m) {
          const uint32_t even_words[4] = {rows[m][0].x, rows[m][1].x, rows[m][0].y, rows[m][1].y};
          const uint32_t odd_words[4] = {rows[m][0].z, rows[m][1].z, rows[m][0].w, rows[m][1].w};
          portable::mma<Element>(x[m], even_words, query[k].x, query[k].y);
          portable::mma<Element>(odd[m], odd_words, query[k].z, query[k].w);
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
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          products[g][i] = kOwnKeys == 2 ? own[2 * i + g] : own_half == 0 ? own[g] : own[2 + g];
        }
      }
      return valid;
    };
    RowNorm norm[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};  // of this lane's keys
    int key = s.template key_of<T::kTileKeys>(s.first_tile) + own_column;
    for (int tile = s.first_tile; tile < s.end_tile; ++tile, key += T::kTileKeys) {
      float logits[2][kOwnKeys];  // of guide rows
      float products[2][kOwnKeys];
      uint32_t valid;
      if constexpr (T::kFp8) {
        wait_barrier(shared.guide_full[products_ring.stage], products_ring.phase);
#pragma unroll
        for (int i = 0; i < kOwnKeys; ++i) {
          const float2 received = shared.rows.guide_products[products_ring.stage][own_column + 8 * i];
          products[0][i] = received.x;
          products[1][i] = received.y;
        }
        valid = shared.guide_valid[products_ring.stage].words[own_column / 32] >> own_column % 32;
        arrive_barrier(shared.guide_empty[products_ring.stage]);
        products_ring.advance();
      } else if constexpr (kHanded) {
        wait_barrier(shared.guide_full[products_ring.stage], products_ring.phase);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const float* received = shared.rows.guide_products(products_ring.stage, g) + own_column;
#pragma unroll
          for (int i = 0; i < kOwnKeys; ++i) products[g][i] = received[8 * i];
        }
        valid = shared.guide_valid[products_ring.stage].words[own_column / 32] >> own_column % 32;
        arrive_barrier(shared.guide_empty[products_ring.stage]);
        products_ring.advance();
      } else {
        valid = multiply(products);
      }
      if (capped) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < kOwnKeys; ++i) {
#pragma unroll
          for (int g = 0; g < 2; ++g) most = fmaxf(most, fabsf(products[g][i]));
        }
        if (__all_sync(0xffffffffu, cap.is_small(most))) {
#pragma unroll
          for (int i = 0; i < kOwnKeys; ++i) {
#pragma unroll
            for (int g = 0; g < 2; ++g) products[g][i] = p.softcap * cap.small(products[g][i]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kOwnKeys; ++i) {
#pragma unroll
            for (int g = 0; g < 2; ++g) products[g][i] = p.softcap * cap(products[g][i]);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kOwnKeys; ++i) {
#pragma unroll
          for (int g = 0; g < 2; ++g) products[g][i] *= to_logit;
        }
      }
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
        const bool exists = valid >> 8 * i & 1;
#pragma unroll
        for (int g = 0; g < 2; ++g) logits[g][i] = exists && dump.sees(g, key + 8 * i) ? products[g][i] : -INFINITY;
      }
      if (!token) {
#pragma unroll
        for (int g = 0; g < 2; ++g) portable::add_logits(norm[g], logits[g]);
      }
      if (p.dump == VEGAS_DUMP_KV_HEAD) {
#pragma unroll
        for (int i = 0; i < kOwnKeys; ++i) dump.write(key + 8 * i, logits[0][i], logits[1][i]);
        continue;
      }
      float parts[kOwnKeys];
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) parts[i] = dump.part_of(logits[0][i], logits[1][i]);
      if (w.ring_tiles > 0) {
        float* row = static_cast<float*>(p.logits) + s.index * p.logits_stride[0];
        team.put(p, parts, row, key - own_column, dump.length);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) dump.write_part(key + 8 * i, parts[i]);
    }
    if (token) continue;

#pragma unroll
    for (int g = 0; g < 2; ++g) {
      RowNorm whole = norm[g];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        whole.maximum = fmaxf(whole.maximum, __shfl_xor_sync(0xffffffffu, whole.maximum, step));
      }
      whole.sum = norm[g].sum * norm[g].weight_in(whole);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) whole.sum += __shfl_xor_sync(0xffffffffu, whole.sum, step);
      norm[g] = whole;
      if (guide_warp > 0 && lane == 0) shared.guide_norm[parity][g] = whole;
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
  if (w.ring_tiles > 0) team.finish(p);
}

}  // namespace vegas_ops::hopper
