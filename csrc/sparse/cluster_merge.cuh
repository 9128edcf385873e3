// Where the CTAs that attend a request for one KV head are a cluster (from sm_90), each of them adds up a share of the
// output's columns, from the parts that the warps of all have left in shared memory.
#pragma once

#include "sparse/head_tile.cuh"
#include "sparse/row_part.cuh"
#include "sparse/segments.cuh"

namespace vegas_ops::portable {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Where this place lies in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t remote_address(const void* place, int rank) {
  uint32_t address = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(place))), "r"(rank));
#endif
  return address;
}
__device__ __forceinline__ void load_remote(float2& value, const void* place, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(remote_address(place, rank))
               : "memory");
#endif
}
__device__ __forceinline__ void load_remote(float4& value, const void* place, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(remote_address(place, rank))
               : "memory");
#endif
}

// Called by all threads of a cluster, each warp of which has left its part.
template <class T, class Shared>
__device__ __forceinline__ void merge_cluster(const VegasSparseParams& p, const SparsePlan& plan, const Shared& shared,
                                              int request, int kv_head, int first_head, int heads) {
  constexpr int kQuads = T::kHeadDim / 4;
  const int quads = heads * kQuads;
  const int per_cta = ceil_div(quads, plan.cluster);
  const int first_quad = cluster_rank() * per_cta;
  float4* values_of_ctas = reinterpret_cast<float4*>(shared.base);  // (CTA, quad)
  float2* norms_of_ctas = reinterpret_cast<float2*>(values_of_ctas + per_cta * plan.cluster);
  cluster_arrive();
  const float v_descale = descale_of(p.cache.v, request, kv_head);
  cluster_wait();
#pragma unroll 1
  for (int item = threadIdx.x; item < per_cta * plan.cluster; item += blockDim.x) {
    const int cta = __float2int_rz(__fdividef(item + 0.5f, static_cast<float>(per_cta)));
    const int quad = min(first_quad + item - cta * per_cta, quads - 1);
    const int row = quad / kQuads;
    const int place = row_place<T>(row, quad % kQuads * 4);
    float2 norms[kSparseMaxWarps] = {};
    float4 values[kSparseMaxWarps] = {};
#pragma unroll
    for (int i = 0; i < kSparseMaxWarps; ++i) {
      const int warp = min(i, shared.warps - 1);
      load_remote(norms[i], shared.norms(0, warp) + row, cta);
      load_remote(values[i], shared.output(0, warp) + place, cta);
    }
#pragma unroll
    for (int i = 0; i < kSparseMaxWarps; ++i) {
      if (i >= shared.warps) norms[i] = make_float2(-INFINITY, 0.0f);
    }
    RowPart<float4> sum;
    sum.add(norms, values);
    norms_of_ctas[item] = make_float2(sum.norm.maximum, sum.norm.sum);
    values_of_ctas[item] = sum.value;
  }
  cluster_arrive();
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < min(per_cta, quads - first_quad); i += blockDim.x) {
    const int row = (first_quad + i) / kQuads;
    const int head = first_head + row;
    const float sink_logit = p.sinks ? p.sinks[head] : -INFINITY;
    RowPart<float4> sum;
#pragma unroll
    for (int cta = 0; cta < kMaxCluster; ++cta) {
      sum.norm.maximum = fmaxf(sum.norm.maximum, norms_of_ctas[min(cta, plan.cluster - 1) * per_cta + i].x);
    }
#pragma unroll 4
    for (int cta = 0; cta < plan.cluster; ++cta) {
      sum.add(norms_of_ctas[cta * per_cta + i], values_of_ctas[cta * per_cta + i]);
    }
    write_columns<T>(p, request, head, (first_quad + i) % kQuads * 4, sum, sink_logit, v_descale);
  }
  // No CTA leaves before the others have read its parts.
  cluster_wait();
}

}  // namespace vegas_ops::portable
