// What VEGAS_OPS_CHECK=1 asks of the lengths and pages of a selection.
#pragma once

#include "common/value_check.h"

namespace vegas_ops {

struct SelectValues {
  VegasSelectParams p;

  VEGAS_HOST_DEVICE int table_columns() const { return p.page_size > 0 ? p.max_pages : 0; }

  // Offsets, then three values per request, then its table.
  VEGAS_HOST_DEVICE int64_t count() const {
    return p.batch == 0 || p.layers == 0 ? 0 : p.batch + 1 + int64_t{p.batch} * (3 + table_columns());
  }

  VEGAS_HOST_DEVICE bool find(int64_t i, Fault* fault) const {
    const int32_t* cu = p.cu_seqlens_q;
    if (i <= p.batch) {
      // A token or KV-head dump does not say how many rows its requests had in all.
      const bool rows_known = p.dump == VEGAS_DUMP_ALL || (p.dump == VEGAS_DUMP_ROWS && p.mode == VEGAS_MODE_WEIGHT);
      const int at = static_cast<int>(i);
      return cu && is_fault(fault, Value::kCuSeqlensQ, at, -1, cu[at], at > 0 ? cu[at - 1] : 0,
                            rows_known ? p.total_q : INT32_MAX);
    }
    i -= p.batch + 1;
    const bool table = i >= int64_t{p.batch} * 3;
    if (table) i -= int64_t{p.batch} * 3;
    const int b = static_cast<int>(table ? i / table_columns() : i % p.batch);
    if (table) {
      const int column = static_cast<int>(i % table_columns());
      if (int64_t{column} * p.page_size >= p.seqlens[b]) return false;
      return is_fault(fault, Value::kPage, b, column, p.block_table[b * p.block_table_stride + column], 0,
                      INT32_MAX / p.page_size - 1);
    }
    const int64_t capacity = int64_t{p.max_pages} * p.page_size;
    const bool by_table = p.page_size > 0 && capacity < p.max_seqlen_k;
    switch (i / p.batch) {
      case 0:
        return is_fault(fault, Value::kSeqlens, b, -1, p.seqlens[b], 0, by_table ? capacity : p.max_seqlen_k);
      case 1:
        return p.dump_rows &&
               is_fault(fault, Value::kDumpRows, b, -1, p.dump_rows[b], 0, VEGAS_FIRST_ROW | VEGAS_LAST_ROW);
      default: {
        if (p.sums) return false;  // nothing is selected
        const int32_t k = p.k_per_request ? p.k_per_request[b] : p.k;
        // More than there are candidates means all of them.
        return is_fault(fault, Value::kK, b, -1, k, 0, p.seqlens[b] > p.max_k ? p.max_k : INT32_MAX);
      }
    }
  }
};

}  // namespace vegas_ops
