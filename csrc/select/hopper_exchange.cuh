// Messages between the CTAs of a cluster: words stored into each other's shared memory, which the receiver awaits by
// their bytes. Barriers of the whole cluster would order them too, but flush what has nothing to do with them.
#pragma once

#include <cutlass/arch/barrier.h>
#include <stdint.h>

#include <cute/arch/cluster_sm90.hpp>

namespace vegas_ops::selection::hopper {

// In shared memory, at the same address in every CTA. A CTA `alone` in its cluster stores like any other.
struct Mailbox {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  uint64_t barrier;

  // By one thread, before the cluster's first barrier.
  __device__ __forceinline__ void open() { Barrier::init(&barrier, 1); }
  // By one thread, for every use.
  __device__ __forceinline__ void expect(uint32_t bytes, bool alone) {
    if (!alone) Barrier::arrive_and_expect_tx(&barrier, bytes);
  }
  // By all threads; `use` counts from 0.
  __device__ __forceinline__ void wait(uint32_t use, bool alone) {
    if (alone) {
      __syncthreads();
    } else {
      Barrier::wait(&barrier, use & 1);
      asm volatile("" ::: "memory");  // CUTLASS does not tell the compiler that memory has changed
    }
  }

  // `to` is in this CTA's shared memory; the word goes to the same place in that of `cta`.
  __device__ __forceinline__ void send(uint32_t* to, uint32_t cta, uint32_t word, bool alone) {
    if (alone) {
      *to = word;
    } else {
      cute::store_shared_remote(word, cute::cast_smem_ptr_to_uint(to), cute::cast_smem_ptr_to_uint(&barrier), cta);
    }
  }

  __device__ __forceinline__ void send(uint2* to, uint32_t cta, const uint2& words, bool alone) {
    if (alone) {
      *to = words;
      return;
    }
    const uint32_t address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(to), cta);
    const uint32_t remote = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&barrier), cta);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address),
                 "r"(words.x), "r"(words.y), "r"(remote)
                 : "memory");
  }

  __device__ __forceinline__ void send(uint4* to, uint32_t cta, const uint4& words, bool alone) {
    if (alone) {
      *to = words;
      return;
    }
    const uint32_t address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(to), cta);
    const uint32_t remote = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&barrier), cta);
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(remote)
        : "memory");
  }
};

// Makes open mailboxes known to the cluster; nothing may be sent before `await_cluster`.
__device__ __forceinline__ void join_cluster() {
  cutlass::arch::fence_barrier_init();
  cute::cluster_arrive_relaxed();
}

__device__ __forceinline__ void await_cluster() { cute::cluster_wait(); }

// All that was sent before is received, and read, by all.
__device__ __forceinline__ void synchronize_cluster() {
  cute::cluster_arrive();
  cute::cluster_wait();
}

}  // namespace vegas_ops::selection::hopper
