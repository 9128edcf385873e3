// What VEGAS_OPS_CHECK=1 asks of the lengths and pages of a verification.
#pragma once

#include "common/value_check.h"

namespace vegas_ops {

struct VerifyValues {
  VegasVerifyParams p;
  int64_t zero_words = 0;  // at the start of the workspace

  // Offsets, then four values per request, then its table, then the workspace.
  VEGAS_HOST_DEVICE int64_t count() const { return p.batch == 0 ? 0 : request_values() + zero_words; }
  VEGAS_HOST_DEVICE int64_t request_values() const { return p.batch + 1 + int64_t{p.batch} * (4 + p.cache.max_pages); }

  VEGAS_HOST_DEVICE bool find(int64_t i, Fault* fault) const {
    if (i >= request_values()) {
      const int word = static_cast<int>(i - request_values());
      return is_fault(fault, Value::kWorkspace, word, -1, static_cast<const int32_t*>(p.workspace)[word], 0, 0);
    }
    const int32_t* cu = p.cu_seqlens_q;
    if (i <= p.batch) {
      const int at = static_cast<int>(i);
      return is_fault(fault, Value::kCuSeqlensQ, at, -1, cu[at], at > 0 ? cu[at - 1] : 0, p.total_q);
    }
    i -= p.batch + 1;
    const bool table = i >= int64_t{p.batch} * 4;
    if (table) i -= int64_t{p.batch} * 4;
    const int b = static_cast<int>(table ? i / p.cache.max_pages : i % p.batch);
    const int64_t rows = int64_t{cu[b + 1]} - cu[b];
    const int32_t keys = p.seqused_k[b];
    if (rows == 0) return false;  // nothing of it is read
    if (table) {
      const int column = static_cast<int>(i % p.cache.max_pages);
      const int64_t first = int64_t{column} * p.cache.page_size;
      // Keys to the left of every row's window may have lost their pages.
      const bool hidden = p.window_left >= 0 && first + p.cache.page_size <= keys - rows - p.window_left;
      if (first >= keys || hidden) return false;
      return is_fault(fault, Value::kPage, b, column, p.cache.block_table[b * p.cache.block_table_stride + column], 0,
                      p.cache.num_pages - 1);
    }
    const int64_t capacity = int64_t{p.cache.max_pages} * p.cache.page_size;
    switch (i / p.batch) {
      case 0:
        return is_fault(fault, Value::kRows, b, -1, static_cast<int32_t>(rows), 0, p.max_seqlen_q);
      case 1:
        return is_fault(fault, Value::kSequsedK, b, -1, keys, 0, capacity < p.max_seqlen_k ? capacity : p.max_seqlen_k);
      case 2:
        return p.dump != VEGAS_DUMP_NONE && p.dump_rows &&
               is_fault(fault, Value::kDumpRows, b, -1, p.dump_rows[b], 0, VEGAS_FIRST_ROW | VEGAS_LAST_ROW);
      default:
        // Rows that pad a batch have no keys, and a `dump_len` that says nothing.
        return p.dump != VEGAS_DUMP_NONE && p.dump_len && keys != 0 &&
               is_fault(fault, Value::kDumpLen, b, -1, p.dump_len[b], 0, keys);
    }
  }
};

}  // namespace vegas_ops
