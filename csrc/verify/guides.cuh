// Guide rows: what verification multiplies with every key beside its packed rows, and how those logits are dumped. They
// are the columns of a product of their own, whose rows are keys.
#pragma once

#include <float.h>

#include "verify/request.cuh"

namespace vegas_ops::portable {

constexpr int kGuideColumns = 4;  // that differ; the other columns of a product repeat them

// KV heads leave their parts of a summed dump in the workspace. For every kPartKeys keys all parts lie side by side:
// they are written at about the same time, and memory then serves them as one.
constexpr int kPartKeys = 32;

__host__ __device__ inline int64_t part_floats(int parts, int64_t max_seqlen_k) {
  return ceil_div64(max_seqlen_k, kPartKeys) * kPartKeys * parts;
}

__host__ __device__ __forceinline__ bool query_aligned(const VegasVerifyParams& p) {
  return ((reinterpret_cast<uintptr_t>(p.q) | (p.q_stride_row * 2) | (p.q_stride_head * 2)) & 15) == 0;
}

template <class Element>
__device__ __forceinline__ const Element* guide_heads(const VegasVerifyParams& p, const VerifyRequest& request,
                                                      int kv_head, int guide) {
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  return static_cast<const Element*>(p.q) + (request.q_begin + int64_t{request.guide_query(guide)}) * p.q_stride_row +
         int64_t{kv_head} * group * p.q_stride_head;
}

// The next term of eight sums, of the query's type, which they lose.
template <class Element>
__device__ __forceinline__ void take_term(float (&sum)[8], uint32_t (&words)[4]) {
  // A sum that exceeds fp16 goes on in the next term; infinities and NaN stay.
  constexpr float kLargest = std::is_same_v<Element, __half> ? 65504.0f : INFINITY;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float part[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float value = sum[2 * j + e];
      part[e] = fabsf(value) < INFINITY ? fmaxf(-kLargest, fminf(value, kLargest)) : value;
    }
    words[j] = pack<Element>(part[0], part[1]);
    const float2 rounded = unpack<Element>(words[j]);
    sum[2 * j] -= rounded.x;
    sum[2 * j + 1] -= rounded.y;
  }
}

// Dimensions [8 * s, 8 * s + 8) of a column, for segments s = segment, segment + 4 and so on. Columns take turns in
// being the two guide rows, so that each lane finds both in its accumulators; one guide row stands for two equal ones.
// A token dump sums logits over heads and rows in fp32: its four columns are the sum of all those rows, split into
// terms of the query's type.
template <class Element, int kSegments>
__device__ inline void guide_column(const VegasVerifyParams& p, const VerifyRequest& request, int kv_head, int column,
                                    int segment, uint4 (&made)[kSegments]) {
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const bool aligned = kSegments > 1 || query_aligned(p);
  const bool token = p.dump == VEGAS_DUMP_TOKEN;
  const int first = token ? 0 : min(column % 2, request.num_guides - 1);
  const int end = token ? request.num_guides : first + 1;
  const int left = p.cache.head_dim / 8 - segment;  // segments beyond are zero
  float sum[kSegments][8] = {};
  for (int guide = first; guide < end; ++guide) {
    const Element* heads = guide_heads<Element>(p, request, kv_head, guide) + segment * 8;
#pragma unroll kSegments> 1 ? 1 : 4
    for (int h = 0; h < group; ++h) {
      uint4 values[kSegments];
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        values[s] = make_uint4(0, 0, 0, 0);
        if (s * 4 < left) values[s] = load_query(heads + h * p.q_stride_head + s * 32, aligned);
      }
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        const uint32_t words[4] = {values[s].x, values[s].y, values[s].z, values[s].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack<Element>(words[j]);
          sum[s][2 * j] += pair.x;
          sum[s][2 * j + 1] += pair.y;
        }
      }
    }
  }
  const float share = 1.0f / group;
#pragma unroll
  for (int s = 0; s < kSegments; ++s) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!token) words[j] = pack<Element>(sum[s][2 * j] * share, sum[s][2 * j + 1] * share);
    }
    for (int term = 0; token && term <= column; ++term) take_term<Element>(sum[s], words);
    made[s] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Where the guide rows' logits go, and what masks them.
struct GuideDump {
  VegasDump kind;
  int num_guides;  // 0: nothing to do
  int length;      // keys at or beyond are not written
  int first[2];    // keys that guide row g sees
  int last[2];
  float hint[2];  // log2 units
  float* sums;    // token, token_weight: this KV head's first part
  int step;       // floats from a part to its next
  void* logits;   // kv_head: planes of both guide rows, in elements; -1: none
  int64_t plane[2];
  bool bf16;

  __device__ __forceinline__ bool sees(int g, int key) const { return key >= first[g] && key <= last[g]; }

  // Logits are -inf where a guide row does not see the key; of a token dump they are the one sum, twice.
  __device__ __forceinline__ void write(int key, float first_logit, float second_logit) const {
    if (key >= length) return;
    if (kind == VEGAS_DUMP_KV_HEAD) {
      store_logit(logits, bf16, plane[0] + key, first_logit);
      if (plane[1] >= 0) store_logit(logits, bf16, plane[1] + key, second_logit);
      return;
    }
    write_part(key, part_of(first_logit, second_logit));
  }

  // What this KV head adds to a summed dump.
  __device__ __forceinline__ float part_of(float first_logit, float second_logit) const {
    float sum = first_logit;
    if (kind == VEGAS_DUMP_TOKEN_WEIGHT) {
      sum = exp2_approx(fmaf(first_logit, kLog2e, -hint[0]));
      if (num_guides == 2) sum += exp2_approx(fmaf(second_logit, kLog2e, -hint[1]));
    }
    return first_logit == -INFINITY || second_logit == -INFINITY ? -INFINITY : sum;
  }

  __device__ __forceinline__ void write_part(int key, float part) const {
    if (key >= length) return;
    const unsigned at = key;
    sums[int64_t{at / kPartKeys} * step + at % kPartKeys] = part;
  }
};

// The KV head leaves the `part`-th of `parts` parts.
__device__ inline void describe_guides(GuideDump& dump, const VegasVerifyParams& p, const VerifyRequest& request, int b,
                                       int kv_head, int part, int parts, float* workspace) {
  dump.kind = p.dump;
  dump.num_guides = request.num_guides;
  dump.length = request.dump_len;
  dump.sums = workspace + b * part_floats(parts, p.max_seqlen_k) + part * kPartKeys;
  dump.step = kPartKeys * parts;
  dump.logits = p.logits;
  dump.bf16 = p.logits_dtype == VEGAS_BFLOAT16;
  if (request.num_guides == 0) return;
  const bool one_row_twice = request.q_len == 1 && request.bits == 3;
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const int of = min(g, request.num_guides - 1);
    const int plane = request.guide_plane(of);
    request.visible(p, request.guide_query(of), dump.first[g], dump.last[g]);
    if (p.dump == VEGAS_DUMP_TOKEN_WEIGHT) {
      // A row that is both first and last counts once, with the last row's hint where that was asked for.
      const int from = request.q_len == 1 ? request.bits >> 1 : plane;
      dump.hint[g] = p.guide_lse_hint[(int64_t{b} * 2 + from) * p.cache.num_heads_kv + kv_head] * kLog2e;
    } else if (p.dump == VEGAS_DUMP_KV_HEAD) {
      const bool written = g < request.num_guides || one_row_twice;
      const int64_t head = b * p.logits_stride[0] + kv_head * p.logits_stride[2];
      dump.plane[g] = written ? head + (g < request.num_guides ? plane : 1) * p.logits_stride[1] : -1;
    }
  }
}

// What a summed dump says of a key. Weights may overflow where the hint is far from the row's own normaliser; NaN
// stays.
__device__ __forceinline__ float summed_logit(const VegasVerifyParams& p, float total, bool masked) {
  if (masked) return -INFINITY;
  return p.dump == VEGAS_DUMP_TOKEN_WEIGHT && total > FLT_MAX ? FLT_MAX : total;
}

// Called by `threads` threads of `ctas` CTAs: logits[b, key] = sum of the parts, in the order of their heads. Keys that
// no row attends have no parts, and are masked.
__device__ inline void reduce_dump(const VegasVerifyParams& p, const float* dump, int parts,
                                   const VerifyRequest& request, int b, int cta, int ctas, int threads) {
  float* logits = static_cast<float*>(p.logits) + b * p.logits_stride[0];
  const float* sums = dump + b * part_floats(parts, p.max_seqlen_k);
  const int dump_len = request.dump_len;
  for (int64_t key = (int64_t{cta} * threads + threadIdx.x) * 4; key < dump_len; key += int64_t{ctas} * threads * 4) {
    const float* from = sums + key / kPartKeys * kPartKeys * parts + key % kPartKeys;
    float total[4] = {};
    uint32_t masked = 0;  // a bit per key
#pragma unroll
    for (int i = 0; i < 4; ++i) masked |= (key + i < request.first_key || key + i >= request.end_key) << i;
    const int attended = key + 3 < request.first_key || key >= request.end_key ? 0 : parts;
#pragma unroll 4
    for (int part = 0; part < attended; ++part) {
      const float4 values = *reinterpret_cast<const float4*>(from + part * kPartKeys);
      const float x[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        masked |= (x[i] == -INFINITY) << i;
        total[i] += x[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key + i >= dump_len) break;
      logits[key + i] = summed_logit(p, total[i], masked >> i & 1);
    }
  }
}

// Masks what no row attends, the rest of dumps that are written while keys are attended.
__device__ inline void mask_dump(const VegasVerifyParams& p, const VerifyRequest& request, int b, int cta, int ctas,
                                 int threads) {
  if (request.num_guides == 0) return;
  const bool planes = p.dump == VEGAS_DUMP_KV_HEAD;
  float* logits = static_cast<float*>(p.logits) + b * p.logits_stride[0];
  for (int kv_head = 0; kv_head < (planes ? p.cache.num_heads_kv : 1); ++kv_head) {
    GuideDump dump;
    describe_guides(dump, p, request, b, kv_head, 0, 1, nullptr);
    for (int key = cta * threads + threadIdx.x; key < dump.length; key += ctas * threads) {
      if (key >= request.first_key && key < request.end_key) continue;
      if (planes) {
        dump.write(key, -INFINITY, -INFINITY);
      } else {
        logits[key] = -INFINITY;
      }
    }
  }
}

// How many CTAs finish a request's dump; all requests' are about `most`. `parts`: the last launch adds up parts.
inline int dump_ctas(const VegasVerifyParams& p, bool parts, int most, int threads) {
  const bool guided = p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT || p.dump == VEGAS_DUMP_KV_HEAD;
  const bool masks = guided && (p.window_left >= 0 || p.window_right >= 0);
  if (!parts && !masks) return 0;
  const int needed = ceil_div(p.max_seqlen_k, 4 * threads);
  const int wanted = ceil_div(most, p.batch);
  return needed < wanted ? needed : wanted;
}

// Adds logits to a lane's running norm of a guide row.
template <int kKeys>
__device__ __forceinline__ void add_logits(RowNorm& running, const float (&logits)[kKeys]) {
  RowNorm norm = running;
  float now = norm.maximum;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) now = fmaxf(now, logits[i] * kLog2e);
  const float base = now == -INFINITY ? 0.0f : now;
  norm.sum *= exp2_approx(norm.maximum - base);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) norm.sum += exp2_approx(fmaf(logits[i], kLog2e, -base));
  running = {now, norm.sum};
}

// Adds up the norms of lanes `step` apart; addition commutes, so both get the same.
__device__ __forceinline__ void merge_lanes(RowNorm& norm, int step) {
  const RowNorm mine = norm;
  const RowNorm other = {__shfl_xor_sync(0xffffffffu, mine.maximum, step),
                         __shfl_xor_sync(0xffffffffu, mine.sum, step)};
  norm.maximum = fmaxf(mine.maximum, other.maximum);
  norm.sum = mine.sum * mine.weight_in(norm) + other.sum * other.weight_in(norm);
}

__device__ inline void write_guide_lse(const VegasVerifyParams& p, const VerifyRequest& request, int b, int kv_head,
                                       int guide, float lse) {
  float* planes = p.guide_lse + int64_t{b} * 2 * p.cache.num_heads_kv + kv_head;
  const int plane = request.guide_plane(guide);
  planes[plane * p.cache.num_heads_kv] = lse;
  // A plane that was not dumped repeats the other.
  if (request.num_guides == 1) planes[(1 - plane) * p.cache.num_heads_kv] = lse;
}

}  // namespace vegas_ops::portable
