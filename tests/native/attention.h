// A paged cache with traps around the visible keys, and attention in double precision: what the tests of verify and
// sparse share.
#pragma once

#include "support.h"

namespace native {

struct CacheShape {
  VegasDtype q_dtype = VEGAS_BFLOAT16;
  bool fp8 = false;
  int heads_kv = 1;
  int head_dim = 128;
  int page_size = 16;
  bool heads_first = false;  // pages (num_heads_kv, page_size, head_dim) instead of (page_size, num_heads_kv, head_dim)
  bool descale = false;      // factors per request and KV head

  VegasDtype dtype() const { return fp8 ? VEGAS_FP8_E4M3 : q_dtype; }
};

// A shape for every type and head dimension that attention kernels are instantiated for.
std::vector<CacheShape> instantiated_shapes();

// Keys of every request in pages handed out at random. Slots beyond a length and the whole of page 0 hold NaN;
// table entries beyond the last page of a request lead out of the cache.
class PagedCache {
 public:
  // `bad_pages`: the second page of every request is negative or beyond the cache.
  PagedCache(VegasDevice device, Random& random, const CacheShape& shape, const std::vector<int32_t>& lengths,
             bool bad_pages);

  VegasPagedCache view() const;
  int64_t num_pages() const { return num_pages_; }
  int64_t num_slots() const { return num_pages_ * shape_.page_size; }
  int64_t slot_of(int request, int64_t position) const;  // -1: none
  const double* k(int64_t slot, int head) const { return k_.values.data() + row(slot, head); }
  const double* v(int64_t slot, int head) const { return v_.values.data() + row(slot, head); }
  double k_descale(int request, int head) const { return factor(k_descale_, request, head); }
  double v_descale(int request, int head) const { return factor(v_descale_, request, head); }

 private:
  size_t row(int64_t slot, int head) const;
  std::vector<double> draw_rows(Random& random, const std::vector<int32_t>& lengths) const;
  std::vector<double> draw_descale(Random& random, size_t requests) const;
  double factor(const Floats& descale, int request, int head) const;
  VegasCacheView view(const Floats& rows, const Floats& descale) const;

  CacheShape shape_;
  int max_pages_;
  int64_t num_pages_;
  Ints table_;  // (requests, max_pages)
  Floats k_, v_, k_descale_, v_descale_;
};

// Maximum error of a logit is 2^-16 of its products' magnitudes.
struct Logit {
  double value;
  double error;
};

Logit logit(const double* q, const double* k, int head_dim, double scale, double softcap);

// A log-sum-exp is off by no more than its worst logit, and by its own rounding.
Logit log_sum_exp(const std::vector<Logit>& logits);

// The output row and log-sum-exp over `logits` of keys with the given rows of V. `dtype` rounds the weights.
struct AttentionRow {
  std::vector<double> out;
  std::vector<double> error;
  Logit lse;
};
AttentionRow attend(const std::vector<Logit>& logits, const std::vector<const double*>& values, double v_descale,
                    const double* sink, int head_dim, VegasDtype dtype);

}  // namespace native
