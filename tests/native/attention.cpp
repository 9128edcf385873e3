#include "attention.h"

#include <limits.h>
#include <math.h>

#include <algorithm>
#include <numeric>

namespace native {
namespace {

int pages_of(int length, int page_size) { return (length + page_size - 1) / page_size; }

int columns(const std::vector<int32_t>& lengths, int page_size) {
  return pages_of(*std::max_element(lengths.begin(), lengths.end()), page_size);
}

int64_t count_pages(const std::vector<int32_t>& lengths, int page_size) {
  int64_t pages = 1;  // the trap
  for (int length : lengths) pages += pages_of(length, page_size);
  return pages;
}

std::vector<int32_t> make_table(Random& random, const std::vector<int32_t>& lengths, int page_size, bool bad_pages) {
  const int width = columns(lengths, page_size);
  std::vector<int32_t> order(count_pages(lengths, page_size) - 1);
  std::iota(order.begin(), order.end(), 1);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int32_t> table(lengths.size() * width);
  size_t next = 0;
  for (size_t b = 0; b < lengths.size(); ++b) {
    for (int column = 0; column < width; ++column) {
      const bool used = column < pages_of(lengths[b], page_size);
      int32_t& entry = table[b * width + column];
      entry = used ? order[next++] : (b + column) % 2 ? -1 : INT_MAX;
      if (used && bad_pages && column == 1) entry = b % 2 ? static_cast<int32_t>(order.size()) + 1 : -7;
    }
  }
  return table;
}

}  // namespace

std::vector<CacheShape> instantiated_shapes() {
  std::vector<CacheShape> shapes;
  for (int head_dim : {64, 128, 256}) {
    for (VegasDtype dtype : {VEGAS_BFLOAT16, VEGAS_FLOAT16}) {
      for (bool fp8 : {false, true}) {
        shapes.push_back({.q_dtype = dtype, .fp8 = fp8, .head_dim = head_dim, .descale = fp8});
      }
    }
  }
  return shapes;
}

PagedCache::PagedCache(VegasDevice device, Random& random, const CacheShape& shape, const std::vector<int32_t>& lengths,
                       bool bad_pages)
    : shape_(shape),
      max_pages_(columns(lengths, shape.page_size)),
      num_pages_(count_pages(lengths, shape.page_size)),
      table_(device, make_table(random, lengths, shape.page_size, bad_pages)),
      k_(device, shape.dtype(), draw_rows(random, lengths)),
      v_(device, shape.dtype(), draw_rows(random, lengths)),
      k_descale_(device, VEGAS_FLOAT32, draw_descale(random, lengths.size())),
      v_descale_(device, VEGAS_FLOAT32, draw_descale(random, lengths.size())) {}

size_t PagedCache::row(int64_t slot, int head) const {
  const int64_t page = slot / shape_.page_size, token = slot % shape_.page_size;
  const int64_t in_page = shape_.heads_first ? head * shape_.page_size + token : token * shape_.heads_kv + head;
  return (page * shape_.page_size * shape_.heads_kv + in_page) * shape_.head_dim;
}

std::vector<double> PagedCache::draw_rows(Random& random, const std::vector<int32_t>& lengths) const {
  std::vector<double> rows(num_slots() * shape_.heads_kv * shape_.head_dim, NAN);
  for (size_t b = 0; b < lengths.size(); ++b) {
    for (int position = 0; position < lengths[b]; ++position) {
      const int64_t slot = slot_of(static_cast<int>(b), position);
      for (int head = 0; slot >= 0 && head < shape_.heads_kv; ++head) {
        const std::vector<double> values = normal(random, shape_.head_dim);
        std::copy(values.begin(), values.end(), rows.begin() + row(slot, head));
      }
    }
  }
  return rows;
}

std::vector<double> PagedCache::draw_descale(Random& random, size_t requests) const {
  std::uniform_real_distribution<double> distribution(0.25, 1.25);
  std::vector<double> factors(shape_.descale ? requests * shape_.heads_kv : 0);
  for (double& factor : factors) factor = distribution(random);
  return factors;
}

int64_t PagedCache::slot_of(int request, int64_t position) const {
  const int64_t column = position / shape_.page_size;
  if (position < 0 || column >= max_pages_) return -1;
  const int64_t page = table_.values[request * max_pages_ + column];
  return page < 0 || page >= num_pages_ ? -1 : page * shape_.page_size + position % shape_.page_size;
}

double PagedCache::factor(const Floats& descale, int request, int head) const {
  return shape_.descale ? descale.values[request * shape_.heads_kv + head] : 1.0;
}

VegasCacheView PagedCache::view(const Floats& rows, const Floats& descale) const {
  VegasCacheView view = {};
  view.data = rows.memory.at();
  const int64_t token = shape_.head_dim, heads = shape_.heads_kv;
  view.stride_page = shape_.page_size * heads * token;
  view.stride_token = shape_.heads_first ? token : heads * token;
  view.stride_head = shape_.heads_first ? shape_.page_size * token : token;
  if (shape_.descale) {
    view.descale = descale.floats();
    view.descale_stride_batch = heads;
    view.descale_stride_head = 1;
  }
  return view;
}

VegasPagedCache PagedCache::view() const {
  VegasPagedCache cache = {};
  cache.k = view(k_, k_descale_);
  cache.v = view(v_, v_descale_);
  cache.dtype = shape_.dtype();
  cache.num_pages = num_pages_;
  cache.page_size = shape_.page_size;
  cache.num_heads_kv = shape_.heads_kv;
  cache.head_dim = shape_.head_dim;
  cache.block_table = table_.data();
  cache.block_table_stride = max_pages_;
  cache.max_pages = max_pages_;
  return cache;
}

Logit logit(const double* q, const double* k, int head_dim, double scale, double softcap) {
  double sum = 0, magnitude = 0;
  for (int d = 0; d < head_dim; ++d) {
    sum += q[d] * k[d];
    magnitude += fabs(q[d] * k[d]);
  }
  const double value = scale * sum;
  return {softcap > 0 ? softcap * tanh(value / softcap) : value, ldexp(scale * magnitude, -16)};
}

Logit log_sum_exp(const std::vector<Logit>& logits) {
  if (logits.empty()) return {-INFINITY, 0};
  double most = -INFINITY, sum = 0, error = 0;
  for (const Logit& l : logits) most = std::max(most, l.value);
  for (const Logit& l : logits) {
    sum += exp(l.value - most);
    error = std::max(error, l.error);
  }
  const double value = most + log(sum);
  return {value, error + ldexp(1 + fabs(value), -20)};
}

AttentionRow attend(const std::vector<Logit>& logits, const std::vector<const double*>& values, double v_descale,
                    const double* sink, int head_dim, VegasDtype dtype) {
  AttentionRow row = {std::vector<double>(head_dim), std::vector<double>(head_dim), log_sum_exp(logits)};
  if (logits.empty()) return row;
  double norm = row.lse.value;
  if (sink) norm = std::max(norm, *sink) + log1p(exp(-fabs(norm - *sink)));
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = exp(logits[i].value - norm) * v_descale;
    for (int d = 0; d < head_dim; ++d) {
      row.out[d] += weight * values[i][d];
      row.error[d] += fabs(weight * values[i][d]);
    }
  }
  // Weights are rounded to `dtype`, and follow errors of their logit and of the normaliser.
  for (double& e : row.error) e *= unit_roundoff(dtype) + 2 * row.lse.error + ldexp(1, -18);
  return row;
}

}  // namespace native
