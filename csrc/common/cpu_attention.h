// Attention of a tile of query rows over blocks of keys: what verify and sparse share on the CPU.
//
// Guaranteed, bit for bit: the result of a (row, head) depends on its query, on the keys it sees and on
// their order, and on nothing else. Not on other requests, on the rows verified with it, on the number
// of threads, or on keys that it does not see. Keys are taken in blocks of kBlock and chunks of kChunk
// counted from the sequence's start; a logit is summed over head_dim in order, in pieces of kPiece; a
// block's weighted values are summed key by key; chunks are merged in order. So verifying rows together
// gives what decoding them one by one gives, and a sparse list of all tokens what full attention gives.
#pragma once

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "common/cpu_vector.h"
#include "common/status.h"

namespace vegas_ops::VEGAS_ISA {

constexpr int kBlock = 64;    // keys
constexpr int kChunk = 1024;  // keys: the unit of work, merged afterwards
constexpr int kPiece = 64;    // elements of head_dim
constexpr int kRows = 4;      // rows of a register tile
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kColumns = 4;  // vectors of a register tile
#else
constexpr int kColumns = 2;
#endif
static_assert(kBlock % (kColumns * kWidth) == 0, "register tiles cover a block of keys");
static_assert(kChunk % kBlock == 0, "chunks are whole blocks");

// Memory that grows and stays with its thread, so that small calls do not pay for fresh pages.
class Buffer {
 public:
  ~Buffer() { free(data_); }
  // NULL where there is no memory. The content is undefined.
  char* reserve(size_t bytes) {
    if (bytes > bytes_) {
      free(data_);
      bytes_ = 0;
      bytes = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(aligned_alloc(4096, bytes));
      if (data_) bytes_ = bytes;
    }
    return data_;
  }
  void trim(size_t bytes) {
    if (bytes_ <= bytes) return;
    free(data_);
    data_ = nullptr;
    bytes_ = 0;
  }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// The keys of a block. Those that are not there at all have position -1 and point to zeros.
struct KeyBlock {
  const void* k[kBlock];
  const void* v[kBlock];
  int32_t position[kBlock];
  int32_t count;         // keys after the last one are not there
  int32_t position_min;  // of all keys; -1 where any is not there
  int32_t position_max;

  void finish(int n, const void* zeros) {
    count = n;
    for (int j = n; j < kBlock; ++j) {
      k[j] = v[j] = zeros;
      position[j] = -1;
    }
    position_min = position_max = position[0];
    for (int j = 1; j < kBlock; ++j) {
      position_min = position[j] < position_min ? position[j] : position_min;
      position_max = position[j] > position_max ? position[j] : position_max;
    }
  }
};

// The rows of one KV head that share keys: first the rows with an output, then guide rows.
struct Tile {
  int rows;
  int rows_out;
  int head_dim;
  int padded_dim;  // head_dim, rounded up to whole vectors
  float scale;     // softmax_scale times k_descale
  float softcap;
  bool spread;  // a token's row lies more than 512 bytes from the next
  float* q;     // (rows, padded_dim)
  int32_t* lo;  // (rows,) a row sees positions in [lo, hi)
  int32_t* hi;
  float* alpha;       // (rows,)
  float* scores;      // (rows, kBlock)
  float* keys;        // (padded_dim, kBlock)
  float* values;      // (kBlock, padded_dim)
  const void* zeros;  // padded_dim elements of any type
  KeyBlock* block;
  KeyBlock* next;  // what comes after it; its keys are fetched while the block is worked on
  float* m;        // (rows,) running maximum
  float* l;        // (rows,) running sum
  float* o;        // (rows_out, padded_dim)
};

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

inline int padded(int head_dim) { return (head_dim + kWidth - 1) / kWidth * kWidth; }

// Bytes of a thread's buffers for tiles of up to `rows` rows.
inline size_t tile_bytes(int rows, int head_dim) {
  const size_t d = padded(head_dim);
  return aligned(rows * d * 4) + 3 * aligned(rows * 4) + aligned(size_t(rows) * kBlock * 4) +
         2 * aligned(kBlock * d * 4) + aligned(d * 4) + 2 * aligned(sizeof(KeyBlock));
}

inline void place_tile(Tile& tile, char* memory, int rows, int head_dim) {
  const size_t d = padded(head_dim);
  auto take = [&memory](size_t bytes) {
    char* p = memory;
    memory += aligned(bytes);
    return p;
  };
  tile.head_dim = head_dim;
  tile.padded_dim = int(d);
  tile.q = reinterpret_cast<float*>(take(rows * d * 4));
  tile.lo = reinterpret_cast<int32_t*>(take(rows * 4));
  tile.hi = reinterpret_cast<int32_t*>(take(rows * 4));
  tile.alpha = reinterpret_cast<float*>(take(rows * 4));
  tile.scores = reinterpret_cast<float*>(take(size_t(rows) * kBlock * 4));
  tile.keys = reinterpret_cast<float*>(take(kBlock * d * 4));
  tile.values = reinterpret_cast<float*>(take(kBlock * d * 4));
  char* zeros = take(d * 4);
  memset(zeros, 0, d * 4);
  tile.zeros = zeros;
  tile.block = reinterpret_cast<KeyBlock*>(take(sizeof(KeyBlock)));
  tile.next = reinterpret_cast<KeyBlock*>(take(sizeof(KeyBlock)));
}

// Floats of the partial result of a chunk: o, m and l.
inline size_t partial_floats(int rows, int rows_out, int head_dim) {
  return (size_t(rows_out) * padded(head_dim) + 2 * size_t(rows) + 15) / 16 * 16;
}

inline void place_partial(Tile& tile, float* partial) {
  tile.o = partial;
  tile.m = partial + size_t(tile.rows_out) * tile.padded_dim;
  tile.l = tile.m + tile.rows;
}

inline void clear_partial(Tile& tile) {
  memset(tile.o, 0, size_t(tile.rows_out) * tile.padded_dim * 4);
  for (int r = 0; r < tile.rows; ++r) {
    tile.m[r] = -kInfinity;
    tile.l[r] = 0;
  }
}

template <class T>
inline void copy_as_float(const T* from, float* to, int n) {
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) store(to + i, load(from + i));
  if (i < n) store(to + i, load_partial(from + i, n - i));
}

// A query row, its tail padded with zeros.
inline void load_row(const void* from, int64_t offset, VegasDtype dtype, float* to, int head_dim) {
  switch (dtype) {
    case VEGAS_BFLOAT16:
      return copy_as_float(static_cast<const Bf16*>(from) + offset, to, head_dim);
    case VEGAS_FLOAT16:
      return copy_as_float(static_cast<const Fp16*>(from) + offset, to, head_dim);
    default:
      return copy_as_float(static_cast<const float*>(from) + offset, to, head_dim);
  }
}

inline void store_row(const float* from, void* to, int64_t offset, VegasDtype dtype, int head_dim) {
  switch (dtype) {
    case VEGAS_BFLOAT16:
      for (int d = 0; d < head_dim; ++d) static_cast<uint16_t*>(to)[offset + d] = to_bf16(from[d]);
      return;
    case VEGAS_FLOAT16:
      for (int d = 0; d < head_dim; ++d) static_cast<uint16_t*>(to)[offset + d] = to_fp16(from[d]);
      return;
    default:
      memcpy(static_cast<float*>(to) + offset, from, size_t(head_dim) * 4);
  }
}

// Rows of a paged cache lie too scattered for the processor to foresee, so they are fetched while the
// work before them goes on, evenly, because only so many lines can be on their way at once: V of a block
// while its keys are scored, K of the next while its values are summed. Rows far apart share few sets of
// the first cache and would push each other out of it: they are fetched into the second.
VEGAS_INLINE void prefetch(const Tile& tile, const void* row, int bytes) {
  if (tile.spread) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i, 0, 2);
  } else {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i, 0, 3);
  }
}

// keys[d][i] = K[i][d] for kWidth keys and as many d as fill a vector register.
template <class T>
VEGAS_INLINE void transpose_tile(const T* const* k, int d, float* keys) {
  vfloat a[kWidth];
  if constexpr (std::is_same_v<T, Bf16>) {
    // Two bf16 are one element of the transposition, and part into two rows afterwards.
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) a[i] = load_as<vfloat>(k[i] + d);
    transpose(a);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      const vuint pair = bit_cast<vuint>(a[i]);
      store(keys + size_t(d + 2 * i) * kBlock, pair << 16);
      store(keys + size_t(d + 2 * i + 1) * kBlock, pair & 0xffff0000u);
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) a[i] = load(k[i] + d);
    transpose(a);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) store(keys + size_t(d + i) * kBlock, a[i]);
  }
}

// tile.keys[d][j] = K[j][d]
template <class T>
inline void transpose_keys(const Tile& tile) {
  constexpr int kStep = std::is_same_v<T, Bf16> ? 2 * kWidth : kWidth;
  const KeyBlock& block = *tile.block;
  for (int j = 0; j < block.count; j += kWidth) {
    const T* const* k = reinterpret_cast<const T* const*>(block.k) + j;
    float* keys = tile.keys + j;
    int d = 0;
    for (; d + kStep <= tile.head_dim; d += kStep) {
      for (int i = 0; i < kWidth / 2; ++i)
        prefetch(tile, static_cast<const T*>(block.v[j + i]) + d, kStep * int(sizeof(T)));
      transpose_tile(k, d, keys);
    }
    for (; d < tile.head_dim; d += kWidth) {
      vfloat a[kWidth];
      const int n = tile.head_dim - d < kWidth ? tile.head_dim - d : kWidth;
      for (int i = 0; i < kWidth; ++i) a[i] = load_partial(k[i] + d, n);
      transpose(a);
      for (int i = 0; i < kWidth; ++i) store(keys + size_t(d + i) * kBlock, a[i]);
    }
  }
}

template <bool kFetch, int kTileRows, class T>
inline void score_rows(const Tile& tile, int row) {
  const int stride = tile.padded_dim;
  const float* q = tile.q + size_t(row) * stride;
  float* scores = tile.scores + size_t(row) * kBlock;
  for (int j = 0; j < tile.block->count; j += kColumns * kWidth) {
    for (int piece = 0; piece < tile.head_dim; piece += kPiece) {
      const int end = piece + kPiece < tile.head_dim ? piece + kPiece : tile.head_dim;
      vfloat acc[kTileRows][kColumns] = {};
      for (int d = piece; d < end; ++d) {
        const float* keys = tile.keys + size_t(d) * kBlock + j;
        vfloat k[kColumns];
        if (kFetch && j == 0 && (d & 8)) {
          prefetch(tile, static_cast<const T*>(tile.block->v[d - piece]) + piece, kPiece * int(sizeof(T)));
        }
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) k[c] = load(keys + c * kWidth);
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
          for (int c = 0; c < kColumns; ++c) acc[r][c] += q[r * stride + d] * k[c];
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          float* s = scores + r * kBlock + j + c * kWidth;
          store(s, piece ? load(s) + acc[r][c] : acc[r][c]);
        }
      }
    }
  }
}

// Scores become logits: scaled, softcapped, -inf where the row does not see the key.
inline void finish_scores(const Tile& tile) {
  const KeyBlock& block = *tile.block;
  for (int r = 0; r < tile.rows; ++r) {
    float* s = tile.scores + size_t(r) * kBlock;
    const int lo = tile.lo[r], hi = tile.hi[r];
    const bool masked = block.position_min < lo || block.position_max >= hi;
    for (int j = 0; j < kBlock; j += kWidth) {
      vfloat x = load(s + j) * tile.scale;
      if (tile.softcap > 0) x = tile.softcap * tanh(x / tile.softcap);
      if (masked) {
        const vint position = load_as<vint>(block.position + j);
        x = ((position >= lo) & (position < hi)) ? x : splat(-kInfinity);
      }
      store(s + j, x);
    }
  }
}

template <class T>
inline void score_block(const Tile& tile) {
  transpose_keys<T>(tile);
  int r = 0;
  for (; r + kRows <= tile.rows; r += kRows)
    r ? score_rows<false, kRows, T>(tile, r) : score_rows<true, kRows, T>(tile, r);
  if (tile.rows - r == 3) score_rows<true, 3, T>(tile, r);
  if (tile.rows - r == 2) score_rows<true, 2, T>(tile, r);
  if (tile.rows - r == 1) score_rows<true, 1, T>(tile, r);
  finish_scores(tile);
}

// Logits become weights relative to the running maximum; alpha rescales what came before.
inline void softmax_block(const Tile& tile) {
  for (int r = 0; r < tile.rows; ++r) {
    float* s = tile.scores + size_t(r) * kBlock;
    vfloat block_max = load(s);
    for (int j = kWidth; j < kBlock; j += kWidth) {
      const vfloat x = load(s + j);
      block_max = (x > block_max) ? x : block_max;
    }
    const float before = tile.m[r];
    float m = maximum(block_max);
    m = m > before ? m : before;
    if (!(m > -kInfinity)) {
      // Nothing visible so far, unless a NaN hides from the comparisons; it has to come through.
      bool unordered = false;
      for (int j = 0; j < kBlock; ++j) unordered |= s[j] != s[j];
      if (!unordered) {
        memset(s, 0, kBlock * 4);
        tile.alpha[r] = 1;
        continue;
      }
      m = 0;
    }
    vfloat total = {};
    for (int j = 0; j < kBlock; j += kWidth) {
      const vfloat p = exp(load(s + j) - m);
      total += p;
      store(s + j, p);
    }
    tile.alpha[r] = m == before ? 1 : exp(before - m);
    tile.l[r] = tile.l[r] * tile.alpha[r] + sum(total);
    tile.m[r] = m;
  }
}

template <bool kFetch, int kTileRows, int kTileColumns, class T>
inline void accumulate_rows(const Tile& tile, const T* const* v, int row, int d) {
  const float* p = tile.scores + size_t(row) * kBlock;
  vfloat acc[kTileRows][kTileColumns] = {};
  for (int j = 0; j < tile.block->count; ++j) {
    vfloat value[kTileColumns];
    if (kFetch && row == 0)
      prefetch(tile, static_cast<const T*>(tile.next->k[j]) + d, kTileColumns * kWidth * int(sizeof(T)));
#pragma GCC unroll 4
    for (int c = 0; c < kTileColumns; ++c) value[c] = load(v[j] + d + c * kWidth);
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kTileColumns; ++c) acc[r][c] += p[r * kBlock + j] * value[c];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kTileColumns; ++c) {
      float* o = tile.o + size_t(row + r) * tile.padded_dim + d + c * kWidth;
      store(o, load(o) * tile.alpha[row + r] + acc[r][c]);
    }
  }
}

template <bool kFetch, int kTileRows, class T>
inline void accumulate_columns(const Tile& tile, const T* const* v, int row) {
  int d = 0;
  for (; d + kColumns * kWidth <= tile.padded_dim; d += kColumns * kWidth) {
    accumulate_rows<kFetch, kTileRows, kColumns>(tile, v, row, d);
  }
  for (; d < tile.padded_dim; d += kWidth) accumulate_rows<kFetch, kTileRows, 1>(tile, v, row, d);
}

template <bool kFetch, class T>
inline void accumulate_block(const Tile& tile, const T* const* v) {
  int r = 0;
  for (; r + kRows <= tile.rows_out; r += kRows) accumulate_columns<kFetch, kRows>(tile, v, r);
  if (tile.rows_out - r == 3) accumulate_columns<kFetch, 3>(tile, v, r);
  if (tile.rows_out - r == 2) accumulate_columns<kFetch, 2>(tile, v, r);
  if (tile.rows_out - r == 1) accumulate_columns<kFetch, 1>(tile, v, r);
}

// o = o * alpha + weights * V
template <class T>
inline void value_block(const Tile& tile) {
  const T* const* v = reinterpret_cast<const T* const*>(tile.block->v);
  const bool whole_vectors = tile.padded_dim == tile.head_dim;
  if (whole_vectors && (sizeof(T) == 4 || tile.rows_out <= kRows)) return accumulate_block<true>(tile, v);
  const float* rows[kBlock];
  for (int j = 0; j < tile.block->count; ++j) {
    float* row = tile.values + size_t(j) * tile.padded_dim;
    prefetch(tile, tile.next->k[j], tile.head_dim * int(sizeof(T)));
    copy_as_float(v[j], row, tile.head_dim);
    rows[j] = row;
  }
  accumulate_block<false>(tile, rows);
}

// Folds the partial results of `chunks` chunks, `stride` floats apart, into the first.
inline void merge_partials(Tile& tile, float* partials, size_t stride, int chunks) {
  place_partial(tile, partials);
  for (int r = 0; r < tile.rows; ++r) {
    const size_t m_offset = size_t(&tile.m[r] - partials), l_offset = size_t(&tile.l[r] - partials);
    float m = -kInfinity;
    for (int c = 0; c < chunks; ++c) {
      const float mc = partials[c * stride + m_offset];
      m = mc > m ? mc : m;
    }
    if (!(m > -kInfinity)) continue;
    float* o = tile.o + size_t(r) * tile.padded_dim;
    float total = 0;
    bool first = true;
    for (int c = 0; c < chunks; ++c) {
      const float* from = partials + c * stride;
      if (!(from[m_offset] > -kInfinity)) continue;
      const float weight = exp(from[m_offset] - m);
      total = first ? from[l_offset] * weight : total + from[l_offset] * weight;
      if (r < tile.rows_out) {
        const float* oc = from + size_t(r) * tile.padded_dim;
        for (int d = 0; d < tile.padded_dim; d += kWidth) {
          const vfloat x = load(oc + d) * weight;
          store(o + d, first ? x : load(o + d) + x);
        }
      }
      first = false;
    }
    tile.m[r] = m;
    tile.l[r] = total;
  }
}

// Log-sum-exp of a merged row; -inf where it saw no key.
inline float merged_lse(const Tile& tile, int row) {
  return tile.m[row] > -kInfinity ? tile.m[row] + logf(tile.l[row]) : -kInfinity;
}

// Normalises a merged row, its sink included, and writes it.
inline void write_row(const Tile& tile, int row, float v_descale, const float* sink, void* out, int64_t offset,
                      VegasDtype dtype) {
  float* o = tile.o + size_t(row) * tile.padded_dim;
  float scale = 0;
  if (tile.m[row] > -kInfinity) {
    const float denominator = tile.l[row] + (sink ? exp(*sink - tile.m[row]) : 0.0f);
    scale = v_descale / denominator;
    for (int d = 0; d < tile.padded_dim; d += kWidth) store(o + d, load(o + d) * scale);
  } else {
    memset(o, 0, size_t(tile.padded_dim) * 4);
  }
  store_row(o, out, offset, dtype, tile.head_dim);
}

// What every op's item of work begins with: one request, or some rows of one.
struct WorkItem {
  int32_t chunks;      // of keys, 1 and more
  int64_t floats;      // that its partial results need
  int64_t work;        // multiply-adds, roughly
  int64_t offset;      // of its floats, in those of a wave
  int64_t task_begin;  // its tasks (chunk, KV head), counted within a wave
};

constexpr int64_t kWaveFloats = 16 << 20;            // partial results held at a time, an item's at least
constexpr size_t kKeptBytes = size_t(96) << 20;      // of the buffer, between calls
constexpr int64_t kParallelWork = int64_t(1) << 17;  // multiply-adds worth a second thread

template <class Item>
const Item& find_item(const Item* items, int64_t count, int64_t task) {
  int64_t lo = 0, hi = count - 1;
  while (lo < hi) {
    const int64_t middle = (lo + hi + 1) / 2;
    if (items[middle].task_begin <= task)
      lo = middle;
    else
      hi = middle - 1;
  }
  return items[lo];
}

// Calls attend(item, chunk, head, tile, floats) for all tasks, then merge with the same arguments.
template <class Item, class Attend, class Merge>
int run_items(Buffer& buffer, Item* items, int64_t count, int heads, int max_rows, int head_dim, Attend attend,
              Merge merge) {
  const size_t bytes_per_tile = tile_bytes(max_rows, head_dim);
  for (int64_t begin = 0, end; begin < count; begin = end) {
    int64_t total = 0, tasks = 0, work = 0;
    for (end = begin; end < count; ++end) {
      Item& item = items[end];
      if (end > begin && total + item.floats > kWaveFloats) break;
      item.offset = total;
      item.task_begin = tasks;
      total += (item.floats + 15) / 16 * 16;
      tasks += int64_t(item.chunks) * heads;
      work += item.work;
    }
    int64_t threads = work > kParallelWork ? omp_get_max_threads() : 1;
    threads = threads < tasks ? threads : tasks;
    const size_t bytes = threads * bytes_per_tile + size_t(total) * 4;
    char* memory = buffer.reserve(bytes);
    if (!memory) return fail(VEGAS_OUT_OF_MEMORY, "out of memory: %lld bytes", (long long)bytes);
    float* floats = reinterpret_cast<float*>(memory + threads * bytes_per_tile);
    const Item* wave = items + begin;
    const int64_t wave_count = end - begin, grain = tasks / (threads * 64) + 1;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
      Tile tile;
      place_tile(tile, memory + omp_get_thread_num() * bytes_per_tile, max_rows, head_dim);
#pragma omp for schedule(dynamic, grain)
      for (int64_t task = 0; task < tasks; ++task) {
        const Item& item = find_item(wave, wave_count, task);
        const int64_t t = task - item.task_begin;
        attend(item, int(t / heads), int(t % heads), tile, floats + item.offset);
      }
#pragma omp for schedule(dynamic, grain)
      for (int64_t task = 0; task < tasks; ++task) {
        const Item& item = find_item(wave, wave_count, task);
        const int64_t t = task - item.task_begin;
        merge(item, int(t / heads), int(t % heads), tile, floats + item.offset);
      }
    }
  }
  buffer.trim(kKeptBytes);
  return VEGAS_OK;
}

inline int clamped(int64_t x, int64_t lo, int64_t hi) { return int(x < lo ? lo : x > hi ? hi : x); }

inline float descale(const VegasCacheView& view, int request, int head) {
  if (!view.descale) return 1;
  return view.descale[request * view.descale_stride_batch + head * view.descale_stride_head];
}

}  // namespace vegas_ops::VEGAS_ISA
