// sparse_paged_decode on the CPU: the keys of a row are its list, then its tail, cut into the same blocks
// and chunks as a sequence in verify/cpu.cpp; see common/cpu_attention.h for what that guarantees.
#include "common/cpu_attention.h"

namespace vegas_ops::VEGAS_ISA {
namespace {

struct Item : WorkItem {
  int32_t request;
  int32_t lo;  // positions in [lo, hi) are visible; for slots without a window, any
  int32_t hi;
  int32_t tail_begin;  // attended: [tail_begin, tail_end)
  int32_t tail_end;
};

thread_local Buffer item_buffer;
thread_local Buffer work_buffer;

int list_length(const VegasSparseParams& p, int request, int head) {
  if (p.max_k == 0 || (p.seqused_k && p.seqused_k[request] == 0)) return 0;
  const int32_t n = p.topk_length[request * p.topk_length_stride_batch + head * p.topk_length_stride_head];
  return clamped(n, 0, p.max_k);
}

void plan_item(const VegasSparseParams& p, int request, Item& item) {
  const VegasPagedCache& cache = p.cache;
  item.request = request;
  item.lo = 0;
  // Without a length the table, or for slots the cache, is the only bound; both are checked per token.
  int64_t hi = INT32_MAX;
  if (p.seqused_k) {
    const int64_t n = p.seqused_k[request];
    hi = n;  // the row stands at the last token: window_right never hides one
    if (p.window_left >= 0) item.lo = clamped(n - 1 - p.window_left, 0, n);
  }
  item.hi = int32_t(hi);
  item.tail_begin = item.tail_end = 0;
  if (p.tail_start) {
    item.tail_end = item.hi;
    item.tail_begin = clamped(p.tail_start[request] > item.lo ? p.tail_start[request] : item.lo, 0, item.hi);
  }
  int longest = 0;
  for (int h = 0; h < cache.num_heads_kv; ++h) {
    const int n = list_length(p, request, h);
    longest = n > longest ? n : longest;
  }
  const int64_t keys = int64_t(longest) + item.tail_end - item.tail_begin;
  item.chunks = keys > 0 ? int((keys + kChunk - 1) / kChunk) : 1;
  const int group = p.num_heads_q / cache.num_heads_kv;
  item.floats = int64_t(item.chunks) * cache.num_heads_kv * partial_floats(group, group, cache.head_dim);
  item.work = keys * p.num_heads_q * cache.head_dim;
}

template <class T>
void fill_block(const VegasSparseParams& p, const Item& item, int head, int length, int64_t base, const void* zeros,
                KeyBlock& block) {
  const VegasPagedCache& cache = p.cache;
  const int32_t* table = cache.block_table ? cache.block_table + item.request * cache.block_table_stride : nullptr;
  const int32_t* list =
      length ? p.indices + item.request * p.indices_stride_batch + head * p.indices_stride_head : nullptr;
  const T* k = static_cast<const T*>(cache.k.data) + head * cache.k.stride_head;
  const T* v = static_cast<const T*>(cache.v.data) + head * cache.v.stride_head;
  const int64_t total = int64_t(length) + item.tail_end - item.tail_begin;
  const int n = int(total - base < kBlock ? total - base : kBlock);
  const int64_t table_tokens = int64_t(cache.max_pages) * cache.page_size;
  for (int j = 0; j < n; ++j) {
    const bool listed = base + j < length;
    const int64_t index = listed ? list[base + j] : item.tail_begin + (base + j - length);
    const bool slot = listed && p.indices_are_slots;
    int64_t page = -1;
    if (slot) {
      page = index >= 0 ? index / cache.page_size : -1;
    } else if (index >= item.lo && index < item.hi && index < table_tokens) {
      page = table[index / cache.page_size];
    }
    const bool there = page >= 0 && page < cache.num_pages;
    const int64_t offset = there ? index % cache.page_size : 0;
    block.position[j] = there ? (slot ? item.lo : int32_t(index)) : -1;
    block.k[j] = there ? k + page * cache.k.stride_page + offset * cache.k.stride_token : zeros;
    block.v[j] = there ? v + page * cache.v.stride_page + offset * cache.v.stride_token : zeros;
  }
  block.finish(n, zeros);
}

template <class T>
void attend_chunk(const VegasSparseParams& p, const Item& item, int chunk, int head, Tile& tile, float* floats) {
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  tile.rows = tile.rows_out = group;
  tile.softcap = p.softcap;
  tile.spread = p.cache.k.stride_token * int64_t(sizeof(T)) > 512;
  tile.scale = p.softmax_scale * descale(p.cache.k, item.request, head);
  for (int g = 0; g < group; ++g) {
    const int64_t offset = item.request * p.q_stride_row + (int64_t(head) * group + g) * p.q_stride_head;
    load_row(p.q, offset, p.q_dtype, tile.q + size_t(g) * tile.padded_dim, tile.head_dim);
    tile.lo[g] = item.lo;
    tile.hi[g] = item.hi;
  }
  place_partial(tile, floats + (int64_t(head) * item.chunks + chunk) * partial_floats(group, group, tile.head_dim));
  clear_partial(tile);
  const int length = list_length(p, item.request, head);
  const int64_t total = int64_t(length) + item.tail_end - item.tail_begin;
  const int64_t begin = int64_t(chunk) * kChunk;
  const int64_t end = begin + kChunk < total ? begin + kChunk : total;
  if (begin < end) fill_block<T>(p, item, head, length, begin, tile.zeros, *tile.next);
  for (int64_t base = begin; base < end; base += kBlock) {
    std::swap(tile.block, tile.next);
    if (base + kBlock < end) {
      fill_block<T>(p, item, head, length, base + kBlock, tile.zeros, *tile.next);
    } else {
      tile.next->finish(0, tile.zeros);
    }
    score_block<T>(tile);
    softmax_block(tile);
    value_block<T>(tile);
  }
}

void merge_head(const VegasSparseParams& p, const Item& item, int head, Tile& tile, float* floats) {
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const size_t stride = partial_floats(group, group, tile.head_dim);
  tile.rows = tile.rows_out = group;
  merge_partials(tile, floats + int64_t(head) * item.chunks * stride, stride, item.chunks);
  const float v_descale = descale(p.cache.v, item.request, head);
  for (int g = 0; g < tile.rows_out; ++g) {
    const int64_t h = int64_t(head) * tile.rows_out + g;
    p.lse[h * p.batch + item.request] = merged_lse(tile, g);
    write_row(tile, g, v_descale, p.sinks ? p.sinks + h : nullptr, p.out,
              item.request * p.out_stride_row + h * p.out_stride_head, p.q_dtype);
  }
}

template <class T>
int run(const VegasSparseParams& p) {
  if (p.batch == 0) return VEGAS_OK;
  const size_t bytes = p.batch * sizeof(Item);
  Item* items = reinterpret_cast<Item*>(item_buffer.reserve(bytes));
  if (!items) return fail(VEGAS_OUT_OF_MEMORY, "out of memory: %lld bytes", (long long)bytes);
  for (int b = 0; b < p.batch; ++b) plan_item(p, b, items[b]);
  const int heads = p.cache.num_heads_kv;
  return run_items(
      work_buffer, items, p.batch, heads, p.num_heads_q / heads, p.cache.head_dim,
      [&p](const Item& item, int chunk, int head, Tile& tile, float* floats) {
        attend_chunk<T>(p, item, chunk, head, tile, floats);
      },
      [&p](const Item& item, int chunk, int head, Tile& tile, float* floats) {
        if (chunk == 0) merge_head(p, item, head, tile, floats);
      });
}

}  // namespace

int sparse(const VegasSparseParams& p) {
  switch (p.cache.dtype) {
    case VEGAS_FLOAT32:
      return run<float>(p);
    case VEGAS_BFLOAT16:
      return run<Bf16>(p);
    case VEGAS_FLOAT16:
      return run<Fp16>(p);
    case VEGAS_FP8_E4M3:
      return run<Fp8E4M3>(p);
  }
  return VEGAS_UNSUPPORTED;
}

}  // namespace vegas_ops::VEGAS_ISA
