// flash_attn_with_logit_dump on the CPU. Work is cut into tasks (request, tile of query rows, chunk of
// keys, KV head) whose partial results are merged in order; see common/cpu_attention.h for what that
// guarantees. All query heads of a KV head and all rows of a tile share one pass over K and V.
#include "common/cpu_attention.h"

namespace vegas_ops::VEGAS_ISA {
namespace {

constexpr int kTileRows = 128;  // packed rows (query rows x group) of a tile

// Some query rows of one request. The first item of a request holds the first and the last row, which
// are the ones that are dumped; the others follow in order.
struct Item : WorkItem {
  int32_t request;
  int32_t q_start;  // the request's first row in q
  int32_t q_len;
  int32_t first;  // of the rows in the order above
  int32_t rows;
  int32_t seqused_k;
  int32_t lo;  // positions in [lo, hi) are visible to some row
  int32_t hi;
  int32_t chunk_first;
  int32_t dump_len;       // 0: dumps nothing here
  int32_t dumped;         // distinct dumped rows, the item's first ones unless only the last row is dumped
  int32_t dumped_row[2];  // among the item's rows
  int32_t planes[2];      // bits: the planes that each writes
  int32_t guides;
  int64_t token;  // offset, in the item's floats, of the sums over a KV head's rows: (num_heads_kv, dump_len)
};

thread_local Buffer item_buffer;
thread_local Buffer work_buffer;

struct Call {
  const VegasVerifyParams& p;
  int group;
  int tile_rows;  // query rows
  bool guide_dump;
};

int row_of(const Item& item, int i) {
  const int ordinal = item.first + i;
  if (ordinal == 0) return 0;
  return ordinal == 1 ? item.q_len - 1 : ordinal - 1;
}

void visible(const VegasVerifyParams& p, const Item& item, int row, int32_t* lo, int32_t* hi) {
  const int64_t n = item.seqused_k, position = n - item.q_len + row;
  int64_t end = n;
  if (p.causal && position + 1 < end) end = position + 1;
  if (p.window_right >= 0 && position + p.window_right + 1 < end) end = position + p.window_right + 1;
  *hi = clamped(end, 0, n);
  *lo = p.window_left >= 0 ? clamped(position - p.window_left, 0, *hi) : 0;
}

int64_t packed_rows(const Call& call, const Item& item) { return int64_t(item.rows) * call.group + item.guides; }

size_t item_stride(const Call& call, const Item& item) {
  return partial_floats(int(packed_rows(call, item)), item.rows * call.group, call.p.cache.head_dim);
}

bool sums_heads(VegasDump dump) { return dump == VEGAS_DUMP_TOKEN || dump == VEGAS_DUMP_TOKEN_WEIGHT; }

void plan_dump(const Call& call, Item& item) {
  const VegasVerifyParams& p = call.p;
  const int bits = p.dump_rows ? p.dump_rows[item.request] & 3 : 3;
  item.dump_len = item.dumped = item.guides = 0;
  if (p.dump == VEGAS_DUMP_NONE || !bits || (item.first && p.dump != VEGAS_DUMP_ALL)) return;
  const int64_t wanted = p.dump_len ? p.dump_len[item.request] : int64_t(item.seqused_k) - item.q_len + 1;
  item.dump_len = clamped(wanted, 0, item.seqused_k);
  if (p.dump == VEGAS_DUMP_ALL) return;
  if (item.q_len == 1) {
    item.dumped = 1;
    item.dumped_row[0] = 0;
    item.planes[0] = bits;
  } else {
    for (int plane = 0; plane < 2; ++plane) {
      if (!(bits >> plane & 1)) continue;
      item.dumped_row[item.dumped] = plane;
      item.planes[item.dumped++] = 1 << plane;
    }
  }
  if (call.guide_dump) item.guides = item.dumped;
}

void plan_item(const Call& call, Item& item) {
  item.lo = item.seqused_k;
  item.hi = 0;
  for (int i = 0; i < item.rows; ++i) {
    int32_t lo, hi;
    visible(call.p, item, row_of(item, i), &lo, &hi);
    if (lo >= hi) continue;
    item.lo = lo < item.lo ? lo : item.lo;
    item.hi = hi > item.hi ? hi : item.hi;
  }
  plan_dump(call, item);
  int begin = item.lo, end = item.hi;
  if (item.dump_len) {
    begin = 0;
    end = item.dump_len > end ? item.dump_len : end;
  }
  item.chunk_first = begin < end ? begin / kChunk : 0;
  item.chunks = begin < end ? (end - 1) / kChunk - item.chunk_first + 1 : 1;
  const int64_t heads = call.p.cache.num_heads_kv;
  item.token = item.chunks * heads * int64_t(item_stride(call, item));
  item.floats = item.token + (sums_heads(call.p.dump) ? item.dump_len * heads : 0);
  const int64_t keys = item.hi > item.lo ? item.hi - item.lo : 0;
  item.work = keys * packed_rows(call, item) * heads * call.p.cache.head_dim;
}

// Guide rows: the mean of a group's query rows, rounded to q's dtype.
void load_guide(const Tile& tile, int group, int row, VegasDtype dtype, float* guide) {
  for (int d = 0; d < tile.padded_dim; d += kWidth) {
    const float* q = tile.q + size_t(row) * group * tile.padded_dim + d;
    vfloat total = load(q);
    for (int g = 1; g < group; ++g) total += load(q + size_t(g) * tile.padded_dim);
    store(guide + d, total / float(group));
  }
  store_row(guide, tile.values, 0, dtype, tile.head_dim);
  load_row(tile.values, 0, dtype, guide, tile.head_dim);
}

template <class T>
void fill_tile(const Call& call, const Item& item, int head, Tile& tile) {
  const VegasVerifyParams& p = call.p;
  tile.rows_out = item.rows * call.group;
  tile.rows = tile.rows_out + item.guides;
  tile.scale = p.softmax_scale * descale(p.cache.k, item.request, head);
  tile.softcap = p.softcap;
  tile.spread = p.cache.k.stride_token * int64_t(sizeof(T)) > 512;
  for (int i = 0; i < item.rows; ++i) {
    const int row = row_of(item, i);
    int32_t lo, hi;
    visible(p, item, row, &lo, &hi);
    for (int g = 0; g < call.group; ++g) {
      const int r = i * call.group + g;
      const int64_t offset =
          int64_t(item.q_start + row) * p.q_stride_row + (int64_t(head) * call.group + g) * p.q_stride_head;
      load_row(p.q, offset, p.q_dtype, tile.q + size_t(r) * tile.padded_dim, tile.head_dim);
      tile.lo[r] = lo;
      tile.hi[r] = hi;
    }
  }
  for (int i = 0; i < item.guides; ++i) {
    const int r = tile.rows_out + i, of = item.dumped_row[i];
    load_guide(tile, call.group, of, p.q_dtype, tile.q + size_t(r) * tile.padded_dim);
    tile.lo[r] = tile.lo[of * call.group];
    tile.hi[r] = tile.hi[of * call.group];
  }
}

template <class T>
void fill_block(const VegasPagedCache& cache, const Item& item, int head, int base, const void* zeros,
                KeyBlock& block) {
  const int32_t* table = cache.block_table + item.request * cache.block_table_stride;
  const T* k = static_cast<const T*>(cache.k.data) + head * cache.k.stride_head;
  const T* v = static_cast<const T*>(cache.v.data) + head * cache.v.stride_head;
  const int n = item.hi - base < kBlock ? item.hi - base : kBlock;
  for (int j = 0; j < n;) {
    const int position = base + j;
    const int slot = position % cache.page_size;
    const int left = cache.page_size - slot;
    const int end = left < n - j ? j + left : n;
    const int64_t page = position + (end - j) > item.lo ? table[position / cache.page_size] : -1;
    for (int s = slot; j < end; ++j, ++s) {
      const bool there = base + j >= item.lo && page >= 0 && page < cache.num_pages;
      block.position[j] = there ? base + j : -1;
      block.k[j] = there ? k + page * cache.k.stride_page + s * cache.k.stride_token : zeros;
      block.v[j] = there ? v + page * cache.v.stride_page + s * cache.v.stride_token : zeros;
    }
  }
  block.finish(n, zeros);
}

void write_logits(const VegasVerifyParams& p, int64_t offset, const float* s, int n) {
  if (p.logits_dtype == VEGAS_FLOAT32) {
    memcpy(static_cast<float*>(p.logits) + offset, s, size_t(n) * 4);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(p.logits) + offset;
  for (int j = 0; j < n; j += kWidth) {
    const vhalf x = to_bf16(load(s + j));
    memcpy(to + j, &x, size_t(n - j < kWidth ? n - j : kWidth) * 2);
  }
}

// The sum over this KV head's part of a token or token_weight dump, for one block.
void sum_block(const Call& call, const Item& item, int head, const Tile& tile, int n, float* to) {
  const VegasVerifyParams& p = call.p;
  const bool weights = p.dump == VEGAS_DUMP_TOKEN_WEIGHT;
  const int32_t* positions = tile.block->position;
  for (int j = 0; j < kBlock; j += kWidth) {
    vfloat total = {};
    vint seen = splat(-1);
    for (int i = 0; i < item.dumped; ++i) {
      const int of = item.dumped_row[i] * call.group;
      if (weights) {
        const int plane = item.planes[i] >> 1;  // a row of both planes uses the last row's hint
        const float hint = p.guide_lse_hint[(int64_t(item.request) * 2 + plane) * p.cache.num_heads_kv + head];
        total += exp(load(tile.scores + size_t(tile.rows_out + i) * kBlock + j) - hint);
      } else {
        for (int g = 0; g < call.group; ++g) total += load(tile.scores + size_t(of + g) * kBlock + j);
      }
      const vint position = load_as<vint>(positions + j);
      seen &= (position >= tile.lo[of]) & (position < tile.hi[of]);
    }
    total = seen ? total : splat(-kInfinity);
    if (j + kWidth <= n) {
      store(to + j, total);
    } else if (j < n) {
      memcpy(to + j, &total, size_t(n - j) * 4);
    }
  }
}

void dump_block(const Call& call, const Item& item, int head, const Tile& tile, int base, float* token) {
  const VegasVerifyParams& p = call.p;
  const int n = item.dump_len - base < kBlock ? item.dump_len - base : kBlock;
  if (n <= 0) return;
  if (sums_heads(p.dump)) {
    sum_block(call, item, head, tile, n, token + int64_t(head) * item.dump_len + base);
    return;
  }
  const int64_t* stride = p.logits_stride;
  if (p.dump == VEGAS_DUMP_ALL) {
    for (int r = 0; r < tile.rows_out; ++r) {
      const int row = item.q_start + row_of(item, r / call.group);
      const int64_t h = int64_t(head) * call.group + r % call.group;
      write_logits(p, row * stride[0] + h * stride[1] + base, tile.scores + size_t(r) * kBlock, n);
    }
    return;
  }
  for (int i = 0; i < item.dumped; ++i) {
    for (int plane = 0; plane < 2; ++plane) {
      if (!(item.planes[i] >> plane & 1)) continue;
      const int64_t request = item.request * stride[0];
      if (p.dump == VEGAS_DUMP_KV_HEAD) {
        write_logits(p, request + plane * stride[1] + head * stride[2] + base,
                     tile.scores + size_t(tile.rows_out + i) * kBlock, n);
        continue;
      }
      for (int g = 0; g < call.group; ++g) {
        const int64_t h = int64_t(head) * call.group + g;
        write_logits(p, request + h * stride[1] + plane * stride[2] + base,
                     tile.scores + (size_t(item.dumped_row[i]) * call.group + g) * kBlock, n);
      }
    }
  }
}

template <class T>
void attend_chunk(const Call& call, const Item& item, int chunk, int head, Tile& tile, float* floats) {
  fill_tile<T>(call, item, head, tile);
  place_partial(tile, floats + (int64_t(head) * item.chunks + chunk) * item_stride(call, item));
  clear_partial(tile);
  const int64_t begin = int64_t(item.chunk_first + chunk) * kChunk;
  int64_t end = item.hi > item.dump_len ? item.hi : item.dump_len;
  end = begin + kChunk < end ? begin + kChunk : end;
  int64_t filled = -1;  // where tile.next begins
  for (int64_t base = begin; base < end; base += kBlock) {
    if (base >= item.hi || base + kBlock <= item.lo) {
      if (base >= item.dump_len) continue;
      tile.block->finish(0, tile.zeros);
      for (int r = 0; r < tile.rows; ++r) {
        for (int j = 0; j < kBlock; ++j) tile.scores[size_t(r) * kBlock + j] = -kInfinity;
      }
      dump_block(call, item, head, tile, int(base), floats + item.token);
      continue;
    }
    if (filled == base) {
      std::swap(tile.block, tile.next);
    } else {
      fill_block<T>(call.p.cache, item, head, int(base), tile.zeros, *tile.block);
    }
    filled = base + kBlock;
    if (filled < end && filled < item.hi) {
      fill_block<T>(call.p.cache, item, head, int(filled), tile.zeros, *tile.next);
    } else {
      tile.next->finish(0, tile.zeros);
    }
    score_block<T>(tile);
    dump_block(call, item, head, tile, int(base), floats + item.token);
    softmax_block(tile);
    value_block<T>(tile);
  }
}

void merge_head(const Call& call, const Item& item, int head, Tile& tile, float* floats) {
  const VegasVerifyParams& p = call.p;
  const size_t stride = item_stride(call, item);
  tile.rows_out = item.rows * call.group;
  tile.rows = tile.rows_out + item.guides;
  merge_partials(tile, floats + int64_t(head) * item.chunks * stride, stride, item.chunks);
  const float v_descale = descale(p.cache.v, item.request, head);
  for (int r = 0; r < tile.rows_out; ++r) {
    const int64_t row = item.q_start + row_of(item, r / call.group);
    const int64_t h = int64_t(head) * call.group + r % call.group;
    p.lse[h * p.total_q + row] = merged_lse(tile, r);
    write_row(tile, r, v_descale, p.sinks ? p.sinks + h : nullptr, p.out,
              row * p.out_stride_row + h * p.out_stride_head, p.q_dtype);
  }
  for (int i = 0; i < item.guides; ++i) {
    const float lse = merged_lse(tile, tile.rows_out + i);
    for (int plane = 0; plane < 2; ++plane) {
      // A plane that was not dumped repeats the other.
      if (item.guides == 1 || item.planes[i] >> plane & 1) {
        p.guide_lse[(int64_t(item.request) * 2 + plane) * p.cache.num_heads_kv + head] = lse;
      }
    }
  }
}

// Sums a token or token_weight dump over the KV heads, in order.
void sum_token(const Call& call, const Item& item, int chunk, const float* floats) {
  const VegasVerifyParams& p = call.p;
  const int64_t begin = int64_t(item.chunk_first + chunk) * kChunk;
  const int64_t end = begin + kChunk < item.dump_len ? begin + kChunk : item.dump_len;
  float* to = static_cast<float*>(p.logits) + item.request * p.logits_stride[0];
  const float* from = floats + item.token;
  const bool weights = p.dump == VEGAS_DUMP_TOKEN_WEIGHT;
  for (int64_t j = begin; j < end; ++j) {
    float total = from[j];
    for (int h = 1; h < p.cache.num_heads_kv; ++h) total += from[int64_t(h) * item.dump_len + j];
    to[j] = weights && total > __FLT_MAX__ ? __FLT_MAX__ : total;
  }
}

template <class T>
int run(const Call& call) {
  const VegasVerifyParams& p = call.p;
  int64_t count = 0;
  for (int b = 0; b < p.batch; ++b) {
    const int64_t rows = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
    count += (rows + call.tile_rows - 1) / call.tile_rows;
  }
  if (count == 0) return VEGAS_OK;
  Item* items = reinterpret_cast<Item*>(item_buffer.reserve(count * sizeof(Item)));
  if (!items) return fail(VEGAS_OUT_OF_MEMORY, "out of memory: %lld bytes", (long long)(count * sizeof(Item)));
  int64_t n = 0;
  int max_rows = 1;
  for (int b = 0; b < p.batch; ++b) {
    const int q_len = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
    for (int first = 0; first < q_len; first += call.tile_rows) {
      Item& item = items[n++];
      item.request = b;
      item.q_start = p.cu_seqlens_q[b];
      item.q_len = q_len;
      item.first = first;
      item.rows = q_len - first < call.tile_rows ? q_len - first : call.tile_rows;
      item.seqused_k = p.seqused_k[b];
      plan_item(call, item);
      const int rows = int(packed_rows(call, item));
      max_rows = rows > max_rows ? rows : max_rows;
    }
  }
  return run_items(
      work_buffer, items, count, p.cache.num_heads_kv, max_rows, p.cache.head_dim,
      [&call](const Item& item, int chunk, int head, Tile& tile, float* floats) {
        attend_chunk<T>(call, item, chunk, head, tile, floats);
      },
      [&call](const Item& item, int chunk, int head, Tile& tile, float* floats) {
        if (chunk == 0) merge_head(call, item, head, tile, floats);
        if (head == 0 && sums_heads(call.p.dump)) sum_token(call, item, chunk, floats);
      });
}

}  // namespace

int verify(const VegasVerifyParams& p) {
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const int tile_rows = kTileRows / group > 2 ? kTileRows / group : 2;  // a tile holds both dumped rows
  const bool guides = p.dump == VEGAS_DUMP_TOKEN_WEIGHT || p.dump == VEGAS_DUMP_KV_HEAD;
  const Call call = {p, group, tile_rows, guides};
  switch (p.cache.dtype) {
    case VEGAS_FLOAT32:
      return run<float>(call);
    case VEGAS_BFLOAT16:
      return run<Bf16>(call);
    case VEGAS_FLOAT16:
      return run<Fp16>(call);
    case VEGAS_FP8_E4M3:
      return run<Fp8E4M3>(call);
  }
  return VEGAS_UNSUPPORTED;
}

}  // namespace vegas_ops::VEGAS_ISA
