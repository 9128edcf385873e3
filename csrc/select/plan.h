// What one list of selected tokens is made of: shared by the CPU and the CUDA backend, so that the
// rules of the contract are written, and tested on the CPU, once.
#pragma once

#include "vegas_ops/params.h"

// Static and always inlined: the CPU files must define no weak symbol (see common/cpu_isa.h).
#if defined(__CUDACC__)
#define VEGAS_SELECT_INLINE static __host__ __device__ __forceinline__
#else
#define VEGAS_SELECT_INLINE static inline __attribute__((always_inline))
#endif

namespace vegas_ops::selection {

VEGAS_SELECT_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
VEGAS_SELECT_INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// Orders float bits as unsigned integers: larger scores get larger keys, +0 and -0 the same one, and
// what may not be selected (-inf, NaN) key 0.
VEGAS_SELECT_INLINE uint32_t order_key(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u || bits == 0xff800000u) return 0;
  if (magnitude == 0) return 0x80000000u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

VEGAS_SELECT_INLINE uint32_t key_bits(uint32_t key) {
  if (key == 0) return 0xff800000u;
  return key >> 31 ? key & 0x7fffffffu : ~key;
}

// Radix digits of a key, most significant first: 11, 11 and 10 bits.
constexpr int kDigits = 3;
constexpr int kBins = 2048;
VEGAS_SELECT_INLINE int digit_shift(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
VEGAS_SELECT_INLINE uint32_t digit_of(uint32_t key, int digit) {
  return (key >> digit_shift(digit)) & (digit == 2 ? 1023u : 2047u);
}
// Whether the digits before `digit` equal those of `prefix`.
VEGAS_SELECT_INLINE bool has_prefix(uint32_t key, uint32_t prefix, int digit) {
  return digit == 0 || (key >> (digit == 1 ? 21 : 10)) == (prefix >> (digit == 1 ? 21 : 10));
}

// Coordinates of a list: `head` is -1 unless every KV head has a list of its own.
struct List {
  int32_t layer;
  int32_t request;
  int32_t head;
};

VEGAS_SELECT_INLINE int64_t num_lists(const VegasSelectParams& p) {
  return static_cast<int64_t>(p.layers) * p.batch * (p.per_kv_head ? p.num_heads : 1);
}

// There are fewer than 2^31 lists, and 32-bit divisions are the cheaper ones on a GPU.
VEGAS_SELECT_INLINE List list_at(const VegasSelectParams& p, int64_t index) {
  List list;
  list.head = -1;
  uint32_t rest = static_cast<uint32_t>(index);
  if (p.per_kv_head) {
    list.head = static_cast<int32_t>(rest % static_cast<uint32_t>(p.num_heads));
    rest /= static_cast<uint32_t>(p.num_heads);
  }
  list.request = static_cast<int32_t>(rest % static_cast<uint32_t>(p.batch));
  list.layer = static_cast<int32_t>(rest / static_cast<uint32_t>(p.batch));
  return list;
}

VEGAS_SELECT_INLINE int32_t candidates(const VegasSelectParams& p, int32_t request) {
  return smaller(larger(p.seqlens[request], 0), p.max_seqlen_k);
}

// What memory says of a request.
struct RequestWords {
  int32_t seqlen;
  int32_t k;
  int32_t dump_rows;
  int32_t first_row;  // of cu_seqlens_q
  int32_t end_row;
};

// Loads them with load(pointer).
template <class Load>
VEGAS_SELECT_INLINE RequestWords request_words(const VegasSelectParams& p, int32_t request, Load load) {
  RequestWords words;
  words.seqlen = load(p.seqlens + request);
  words.k = p.k_per_request ? load(p.k_per_request + request) : p.k;
  words.dump_rows = p.dump_rows ? load(p.dump_rows + request) : 3;
  words.first_row = p.cu_seqlens_q ? load(p.cu_seqlens_q + request) : 0;
  words.end_row = p.cu_seqlens_q ? load(p.cu_seqlens_q + request + 1) : 0;
  return words;
}

// The planes of the dump that a list sums: rows x heads of them, none where a request has no scores.
// Offsets count elements.
struct Planes {
  int64_t offset;
  int64_t row_stride;
  int64_t head_stride;
  int64_t norm_offset;  // into lse or guide_lse, whichever the dump needs in weight mode
  int64_t norm_row_stride;
  int64_t norm_head_stride;
  int64_t sink_offset;
  int32_t rows;
  int32_t heads;
};

VEGAS_SELECT_INLINE bool uses_weights(const VegasSelectParams& p) {
  return p.mode == VEGAS_MODE_WEIGHT && p.dump >= VEGAS_DUMP_KV_HEAD;
}

VEGAS_SELECT_INLINE Planes planes_of(const VegasSelectParams& p, const List& list, const RequestWords& words) {
  Planes planes = {};
  const int64_t layer = list.layer, request = list.request;
  int32_t bits = words.dump_rows & (VEGAS_FIRST_ROW | VEGAS_LAST_ROW);
  if (bits == 0) return planes;
  int32_t first = 0, last = 0;
  if (p.cu_seqlens_q) {
    first = larger(words.first_row, 0);
    last = larger(words.end_row, 0) - 1;
    // Where rows are looked up, whatever a device tensor holds must not lead outside.
    if (p.dump == VEGAS_DUMP_ALL || (p.dump == VEGAS_DUMP_ROWS && uses_weights(p))) last = smaller(last, p.total_q - 1);
    if (last < first) return planes;
    // A request of one row wrote it to every plane, with equal values: it counts once.
    if (last == first && bits == 3) bits = VEGAS_FIRST_ROW;
  }
  const int32_t plane = bits == VEGAS_LAST_ROW;
  planes.rows = bits == 3 ? 2 : 1;
  planes.heads = list.head < 0 ? p.num_heads : 1;
  planes.sink_offset = layer * p.sinks_stride_layer;
  const int32_t head = larger(list.head, 0);
  switch (p.dump) {
    case VEGAS_DUMP_KV_HEAD:
      planes.offset = layer * p.logits_stride[0] + request * p.logits_stride[1] + plane * p.logits_stride[2] +
                      head * p.logits_stride[3];
      planes.row_stride = p.logits_stride[2];
      planes.head_stride = p.logits_stride[3];
      planes.norm_offset = ((layer * p.batch + request) * 2 + plane) * p.num_heads + head;
      planes.norm_row_stride = p.num_heads;
      planes.norm_head_stride = 1;
      break;
    case VEGAS_DUMP_ROWS:
      planes.offset = layer * p.logits_stride[0] + request * p.logits_stride[1] + plane * p.logits_stride[3];
      planes.row_stride = p.logits_stride[3];
      planes.head_stride = p.logits_stride[2];
      planes.norm_offset = layer * p.num_heads * p.total_q + (plane ? last : first);
      planes.norm_row_stride = static_cast<int64_t>(last) - first;
      planes.norm_head_stride = p.total_q;
      break;
    case VEGAS_DUMP_ALL:
      planes.rows = last - first + 1;
      planes.offset = layer * p.logits_stride[0] + first * p.logits_stride[1];
      planes.row_stride = p.logits_stride[1];
      planes.head_stride = p.logits_stride[2];
      planes.norm_offset = layer * p.num_heads * p.total_q + first;
      planes.norm_row_stride = 1;
      planes.norm_head_stride = p.total_q;
      break;
    default:
      planes.rows = planes.heads = 1;
      planes.offset = layer * p.logits_stride[0] + request * p.logits_stride[1];
  }
  return planes;
}

VEGAS_SELECT_INLINE Planes planes_of(const VegasSelectParams& p, const List& list) {
  return planes_of(p, list, request_words(p, list.request, [](const int32_t* word) { return *word; }));
}

// How many tokens a list takes, and from where, in ascending order: [0, head), then `free` of
// [begin, end) by score, then [end, end + tail).
struct Quota {
  int32_t begin;
  int32_t end;
  int32_t head;
  int32_t free;
  int32_t tail;
};

// `length` is within bounds.
VEGAS_SELECT_INLINE Quota quota_of(const VegasSelectParams& p, int32_t length, int32_t k_of_request) {
  Quota quota;
  quota.begin = smaller(p.num_sink, length);
  quota.end = larger(quota.begin, length - smaller(p.num_recent, length));
  const int32_t k = smaller(larger(k_of_request, 0), length);
  int32_t forced = smaller(quota.begin + (length - quota.end), p.max_k);
  if (p.count_forced) forced = smaller(forced, k);
  quota.head = smaller(quota.begin, forced);
  quota.tail = forced - quota.head;
  quota.free = smaller(p.count_forced ? k - forced : k, p.max_k - forced);
  quota.free = smaller(quota.free, quota.end - quota.begin);
  return quota;
}

VEGAS_SELECT_INLINE Quota quota_of(const VegasSelectParams& p, int32_t request) {
  return quota_of(p, candidates(p, request), p.k_per_request ? p.k_per_request[request] : p.k);
}

// What is written for a chosen token: the token itself, or its slot in the cache; -1 where the page is
// negative, not in the table, or so far out that its slot is no int32.
VEGAS_SELECT_INLINE int32_t slot_of(const VegasSelectParams& p, int64_t page, int32_t offset) {
  const int64_t slot = page * p.page_size + offset;
  return page < 0 || slot > 0x7fffffff ? -1 : static_cast<int32_t>(slot);
}

VEGAS_SELECT_INLINE int32_t slot_at(const VegasSelectParams& p, int32_t request, int32_t column, int32_t offset) {
  return column < p.max_pages ? slot_of(p, p.block_table[request * p.block_table_stride + column], offset) : -1;
}

VEGAS_SELECT_INLINE int32_t output_of(const VegasSelectParams& p, int32_t request, int32_t token) {
  return p.page_size == 0 ? token : slot_at(p, request, token / p.page_size, token % p.page_size);
}

}  // namespace vegas_ops::selection
