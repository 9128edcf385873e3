// What VEGAS_OPS_CHECK=1 asks of the lists, lengths and pages of sparse decoding.
#pragma once

#include "common/value_check.h"

namespace vegas_ops {

struct SparseValues {
  VegasSparseParams p;

  VEGAS_HOST_DEVICE int lists() const {
    return p.indices_stride_head != 0 || p.topk_length_stride_head != 0 ? p.cache.num_heads_kv : 1;
  }
  VEGAS_HOST_DEVICE int64_t listed() const { return int64_t{lists()} * p.max_k; }

  // Two values per request, the lengths of its lists, its table, its lists.
  VEGAS_HOST_DEVICE int64_t count() const { return p.batch * (2 + lists() + p.cache.max_pages + listed()); }

  VEGAS_HOST_DEVICE bool find(int64_t i, Fault* fault) const {
    const int64_t batch = p.batch;
    if (i < 2 * batch) return i < batch ? find_length(i, fault) : find_tail_start(i - batch, fault);
    i -= 2 * batch;
    if (i < batch * lists()) return find_count(i / lists(), i % lists(), fault);
    i -= batch * lists();
    const int columns = p.cache.max_pages;
    if (i < batch * columns) return find_tail_page(i / columns, i % columns, fault);
    i -= batch * columns;
    return find_entry(i / listed(), i % listed() / p.max_k, i % p.max_k, fault);
  }

 private:
  VEGAS_HOST_DEVICE int64_t capacity() const { return int64_t{p.cache.max_pages} * p.cache.page_size; }
  VEGAS_HOST_DEVICE bool is_empty(int b) const { return p.seqused_k && p.seqused_k[b] == 0; }
  VEGAS_HOST_DEVICE bool in_window(int b, int64_t token) const {
    return p.window_left < 0 || token >= int64_t{p.seqused_k[b]} - 1 - p.window_left;
  }
  VEGAS_HOST_DEVICE int32_t entries(int b, int list) const {
    if (p.max_k == 0) return 0;
    return p.topk_length[b * p.topk_length_stride_batch + list * p.topk_length_stride_head];
  }

  VEGAS_HOST_DEVICE bool find_length(int b, Fault* fault) const {
    const bool uses_table = p.tail_start || (!p.indices_are_slots && p.max_k > 0);
    return p.seqused_k &&
           is_fault(fault, Value::kSequsedK, b, -1, p.seqused_k[b], 0, uses_table ? capacity() : INT32_MAX);
  }

  VEGAS_HOST_DEVICE bool find_tail_start(int b, Fault* fault) const {
    if (!p.tail_start || is_empty(b)) return false;
    return is_fault(fault, Value::kTailStart, b, -1, p.tail_start[b], 0, p.seqused_k[b]);
  }

  VEGAS_HOST_DEVICE bool find_count(int b, int list, Fault* fault) const {
    return !is_empty(b) && is_fault(fault, Value::kTopkLength, b, -1, entries(b, list), 0, p.max_k);
  }

  VEGAS_HOST_DEVICE bool find_page(int b, int column, Fault* fault) const {
    return is_fault(fault, Value::kPage, b, column, p.cache.block_table[b * p.cache.block_table_stride + column], 0,
                    p.cache.num_pages - 1);
  }

  VEGAS_HOST_DEVICE bool find_tail_page(int b, int column, Fault* fault) const {
    if (!p.tail_start || is_empty(b)) return false;
    const int64_t first = int64_t{column} * p.cache.page_size, last = first + p.cache.page_size - 1;
    if (first >= p.seqused_k[b] || last < p.tail_start[b] || !in_window(b, last)) return false;
    return find_page(b, column, fault);
  }

  VEGAS_HOST_DEVICE bool find_entry(int b, int list, int entry, Fault* fault) const {
    if (is_empty(b) || entry >= entries(b, list)) return false;
    const int32_t got = p.indices[b * p.indices_stride_batch + list * p.indices_stride_head + entry];
    if (p.indices_are_slots) {
      return is_fault(fault, Value::kSlot, b, entry, got, 0, p.cache.num_pages * p.cache.page_size - 1);
    }
    int64_t end = capacity();
    if (p.seqused_k && p.seqused_k[b] < end) end = p.seqused_k[b];
    if (p.tail_start && p.tail_start[b] < end) end = p.tail_start[b];
    if (is_fault(fault, Value::kToken, b, entry, got, 0, end - 1)) return true;
    return in_window(b, got) && find_page(b, got / p.cache.page_size, fault);
  }
};

}  // namespace vegas_ops
