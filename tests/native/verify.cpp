// flash_attn_with_logit_dump against attention in double precision.
#include <float.h>
#include <math.h>

#include <algorithm>
#include <map>

#include "attention.h"

namespace native {
namespace {

struct VerifyCase {
  CacheShape shape;
  int group = 4;
  std::vector<int32_t> lengths = {333, 0, 45, 80};
  std::vector<int32_t> q_lens = {3, 3, 1, 0};
  int extra_rows = 2;  // of q, that belong to no request
  VegasDump dump = VEGAS_DUMP_TOKEN;
  VegasDtype logits_dtype = VEGAS_FLOAT32;
  std::vector<int32_t> dump_rows = {};  // none: NULL
  std::vector<int32_t> dump_len = {};
  bool causal = true;
  int window_left = -1;
  int window_right = -1;
  double softcap = 0;
  bool sinks = false;
  bool bad_pages = false;
  bool batch_invariant = false;
  int num_splits = 0;
  int bound = 0;  // of the lengths, which may be shorter

  int batch() const { return static_cast<int>(lengths.size()); }
  int heads_q() const { return group * shape.heads_kv; }
  int max_seqlen_k() const { return std::max(bound, *std::max_element(lengths.begin(), lengths.end())); }
  bool guided() const { return dump == VEGAS_DUMP_TOKEN_WEIGHT || dump == VEGAS_DUMP_KV_HEAD; }
  bool summed() const { return dump == VEGAS_DUMP_TOKEN || dump == VEGAS_DUMP_TOKEN_WEIGHT; }
};

const char* name_of(VegasDump dump) {
  const char* names[] = {"none", "token", "token_weight", "kv_head", "rows", "all"};
  return names[dump];
}

// Sizes of the dimensions of `logits` but the last.
std::vector<int> dump_shape(const VerifyCase& c, int total_q) {
  switch (c.dump) {
    case VEGAS_DUMP_NONE:
      return {};
    case VEGAS_DUMP_KV_HEAD:
      return {c.batch(), 2, c.shape.heads_kv};
    case VEGAS_DUMP_ROWS:
      return {c.batch(), c.heads_q(), 2};
    case VEGAS_DUMP_ALL:
      return {total_q, c.heads_q()};
    default:
      return {c.batch()};
  }
}

size_t elements(const std::vector<int>& dims, size_t last) {
  for (int dim : dims) last *= dim;
  return last;
}

// The mean of a group's rows as the op rounds it, and what one rounding the other way changes.
struct Guide {
  std::vector<double> row;
  std::vector<double> flip;
};

Guide guide_of(const double* q, int group, int head_dim, VegasDtype dtype) {
  Guide guide = {std::vector<double>(head_dim), std::vector<double>(head_dim)};
  for (int d = 0; d < head_dim; ++d) {
    double sum = 0, magnitude = 0;
    for (int g = 0; g < group; ++g) {
      sum += q[g * head_dim + d];
      magnitude += fabs(q[g * head_dim + d]);
    }
    const double slack = ldexp(magnitude / group, -22);  // of a mean taken in fp32
    guide.row[d] = rounded(sum / group, dtype);
    guide.flip[d] = rounded(sum / group + slack, dtype) - rounded(sum / group - slack, dtype);
  }
  return guide;
}

// What the op must write.
struct Want {
  Expected out, lse, logits, guide_lse;
};

// One request's part of it.
class Request {
 public:
  Request(const VerifyCase& c, const PagedCache& cache, const Floats& q, const Floats& sinks, const Floats& hint, int b,
          int begin, int total_q)
      : c_(c),
        cache_(cache),
        q_(q),
        sinks_(sinks),
        hint_(hint),
        b_(b),
        begin_(begin),
        total_q_(total_q),
        length_(c.lengths[b]),
        q_len_(c.q_lens[b]),
        scale_(1 / sqrt(c.shape.head_dim)) {}

  void expect(Want& want) const {
    if (q_len_ == 0) return;
    for (int row = 0; row < q_len_; ++row) {
      for (int head = 0; head < c_.heads_q(); ++head) expect_row(row, head, want);
    }
    const int bits = c_.dump == VEGAS_DUMP_NONE ? 0 : c_.dump_rows.empty() ? 3 : c_.dump_rows[b_];
    if (bits == 0) return;
    std::map<int, int> planes;  // plane -> row
    if (bits & VEGAS_FIRST_ROW) planes[0] = 0;
    if (bits & VEGAS_LAST_ROW) planes[1] = q_len_ - 1;
    const int asked = c_.dump_len.empty() ? length_ - q_len_ + 1 : c_.dump_len[b_];
    const int dump_len = std::min(std::max(asked, 0), length_);
    if (c_.guided()) expect_guide_lse(planes, want);
    if (c_.summed() && q_len_ == 1 && bits == 3) planes.erase(0);  // one row is summed once
    for (int key = 0; key < dump_len; ++key) expect_dump(planes, key, want);
  }

 private:
  bool visible(int row, int key) const {
    const int position = length_ - q_len_ + row;
    if (cache_.slot_of(b_, key) < 0 || (c_.causal && key > position)) return false;
    return (c_.window_left < 0 || key >= position - c_.window_left) &&
           (c_.window_right < 0 || key <= position + c_.window_right);
  }

  const double* query(int row, int head) const {
    return q_.values.data() + (size_t(begin_ + row) * c_.heads_q() + head) * c_.shape.head_dim;
  }

  // Logit of a query row, -inf where masked.
  Logit of_row(int row, int head, int key) const {
    if (!visible(row, key)) return {-INFINITY, 0};
    const int kv_head = head / c_.group;
    const double* k = cache_.k(cache_.slot_of(b_, key), kv_head);
    return logit(query(row, head), k, c_.shape.head_dim, scale_ * cache_.k_descale(b_, kv_head), c_.softcap);
  }

  Logit of_guide(int row, int kv_head, int key) const {
    if (!visible(row, key)) return {-INFINITY, 0};
    const int head_dim = c_.shape.head_dim;
    const Guide guide = guide_of(query(row, kv_head * c_.group), c_.group, head_dim, c_.shape.q_dtype);
    const double* k = cache_.k(cache_.slot_of(b_, key), kv_head);
    const double scale = scale_ * cache_.k_descale(b_, kv_head);
    Logit result = logit(guide.row.data(), k, head_dim, scale, c_.softcap);
    for (int d = 0; d < head_dim; ++d) result.error += scale * guide.flip[d] * fabs(k[d]);
    return result;
  }

  void expect_row(int row, int head, Want& want) const {
    const int head_dim = c_.shape.head_dim, kv_head = head / c_.group;
    std::vector<Logit> seen;
    std::vector<const double*> values;
    for (int key = 0; key < length_; ++key) {
      if (!visible(row, key)) continue;
      seen.push_back(of_row(row, head, key));
      values.push_back(cache_.v(cache_.slot_of(b_, key), kv_head));
    }
    const double* sink = c_.sinks ? &sinks_.values[head] : nullptr;
    const AttentionRow result = attend(seen, values, cache_.v_descale(b_, kv_head), sink, head_dim, c_.shape.q_dtype);
    const size_t q_row = begin_ + row;
    for (int d = 0; d < head_dim; ++d) {
      want.out.set((q_row * c_.heads_q() + head) * head_dim + d, result.out[d], result.error[d]);
    }
    want.lse.set(size_t(head) * total_q_ + q_row, result.lse.value, result.lse.error);
  }

  void expect_guide_lse(const std::map<int, int>& planes, Want& want) const {
    for (int plane = 0; plane < 2; ++plane) {
      const int row = planes.count(plane) ? planes.at(plane) : planes.at(1 - plane);
      for (int kv_head = 0; kv_head < c_.shape.heads_kv; ++kv_head) {
        std::vector<Logit> seen;
        for (int key = 0; key < length_; ++key) {
          if (visible(row, key)) seen.push_back(of_guide(row, kv_head, key));
        }
        const Logit lse = log_sum_exp(seen);
        want.guide_lse.set((size_t(b_) * 2 + plane) * c_.shape.heads_kv + kv_head, lse.value, lse.error);
      }
    }
  }

  void expect_dump(const std::map<int, int>& planes, int key, Want& want) const {
    const size_t width = c_.max_seqlen_k();
    const auto set = [&](size_t vector, Logit l) { want.logits.set(vector * width + key, l.value, l.error); };
    switch (c_.dump) {
      case VEGAS_DUMP_KV_HEAD:
        for (auto [plane, row] : planes) {
          for (int head = 0; head < c_.shape.heads_kv; ++head) {
            set((size_t(b_) * 2 + plane) * c_.shape.heads_kv + head, of_guide(row, head, key));
          }
        }
        return;
      case VEGAS_DUMP_ROWS:
        for (auto [plane, row] : planes) {
          for (int head = 0; head < c_.heads_q(); ++head) {
            set((size_t(b_) * c_.heads_q() + head) * 2 + plane, of_row(row, head, key));
          }
        }
        return;
      case VEGAS_DUMP_ALL:
        for (int row = 0; row < q_len_; ++row) {
          for (int head = 0; head < c_.heads_q(); ++head) {
            set(size_t(begin_ + row) * c_.heads_q() + head, of_row(row, head, key));
          }
        }
        return;
      default:
        set(b_, c_.dump == VEGAS_DUMP_TOKEN ? sum_of_logits(planes, key) : sum_of_weights(planes, key));
    }
  }

  Logit sum_of_logits(const std::map<int, int>& planes, int key) const {
    Logit sum = {0, 0};
    for (auto [plane, row] : planes) {
      for (int head = 0; head < c_.heads_q(); ++head) {
        const Logit l = of_row(row, head, key);
        sum.value += l.value;
        sum.error += l.error;
      }
    }
    return sum;
  }

  Logit sum_of_weights(const std::map<int, int>& planes, int key) const {
    double low = 0, high = 0;
    for (auto [plane, row] : planes) {
      if (!visible(row, key)) return {-INFINITY, 0};
      for (int head = 0; head < c_.shape.heads_kv; ++head) {
        const Logit l = of_guide(row, head, key);
        const double norm = hint_.values[(size_t(b_) * 2 + plane) * c_.shape.heads_kv + head];
        const double slack = l.error + ldexp(fabs(l.value) + fabs(norm), -21);
        low += exp(l.value - slack - norm);
        high += exp(l.value + slack - norm);
      }
    }
    low = std::min(low * (1 - ldexp(1, -19)), double{FLT_MAX});
    high = std::min(high * (1 + ldexp(1, -19)), double{FLT_MAX});
    return {(low + high) / 2, (high - low) / 2};
  }

  const VerifyCase& c_;
  const PagedCache& cache_;
  const Floats& q_;
  const Floats& sinks_;
  const Floats& hint_;
  const int b_;
  const int begin_;
  const int total_q_;
  const int length_;
  const int q_len_;
  const double scale_;
};

std::string describe(const VerifyCase& c) {
  std::string text = std::string("verify ") + name_of(c.dump);
  const auto add = [&](const char* name, int value) { text += std::string(" ") + name + std::to_string(value); };
  text += c.shape.q_dtype == VEGAS_FLOAT16 ? " fp16" : " bf16";
  if (c.shape.fp8) text += "/fp8";
  add("d", c.shape.head_dim);
  add("heads ", c.heads_q());
  text += "/" + std::to_string(c.shape.heads_kv);
  add("rows ", *std::max_element(c.q_lens.begin(), c.q_lens.end()));
  add("keys ", c.max_seqlen_k());
  add("page ", c.shape.page_size);
  if (c.window_left >= 0) add("window ", c.window_left);
  if (!c.causal) text += " not causal";
  if (c.softcap > 0) text += " softcap";
  if (c.sinks) text += " sinks";
  if (c.bad_pages) text += " bad pages";
  if (c.batch_invariant) text += " invariant";
  if (c.num_splits) add("splits ", c.num_splits);
  return text;
}

void check(const VerifyCase& c, VegasDevice device, Random& random) {
  const PagedCache cache(device, random, c.shape, c.lengths, c.bad_pages);
  std::vector<int32_t> cu = {0};
  for (int rows : c.q_lens) cu.push_back(cu.back() + rows);
  const int total_q = cu.back() + c.extra_rows, heads_q = c.heads_q(), heads_kv = c.shape.heads_kv;
  const size_t head_dim = c.shape.head_dim, width = c.max_seqlen_k();
  std::vector<double> rows = normal(random, size_t(cu.back()) * heads_q * head_dim);
  rows.resize(size_t(total_q) * heads_q * head_dim, NAN);
  const Floats q(device, c.shape.q_dtype, rows);
  const Floats sinks(device, VEGAS_FLOAT32, normal(random, heads_q));
  std::vector<double> norms = normal(random, size_t(c.batch()) * 2 * heads_kv);
  for (double& norm : norms) norm += 3;
  const Floats hint(device, VEGAS_FLOAT32, norms);
  const Ints lengths(device, c.lengths), cu_seqlens_q(device, cu);
  const Ints dump_rows(device, c.dump_rows), dump_len(device, c.dump_len);
  const std::vector<int> dims = dump_shape(c, total_q);
  const Output out(device, size_of(c.shape.q_dtype), rows.size());
  const Output lse(device, 4, size_t(heads_q) * total_q);
  const Output logits(device, size_of(c.logits_dtype), dims.empty() ? 0 : elements(dims, width));
  const Output guide_lse(device, 4, c.guided() ? norms.size() : 0);
  VegasBounds bounds = {};
  bounds.max_batch = c.batch();
  bounds.max_q_len = *std::max_element(c.q_lens.begin(), c.q_lens.end());
  bounds.max_seqlen_k = c.max_seqlen_k();
  bounds.num_heads_q = heads_q;
  bounds.num_heads_kv = heads_kv;
  bounds.head_dim = c.shape.head_dim;
  Memory workspace(device, vegas_workspace_bytes(VEGAS_OP_VERIFY, &bounds, device));
  workspace.fill(0);

  VegasVerifyParams p = {};
  p.cache = cache.view();
  p.q = q.memory.at();
  p.q_stride_row = heads_q * head_dim;
  p.q_stride_head = head_dim;
  p.q_dtype = c.shape.q_dtype;
  p.seqused_k = lengths.data();
  p.cu_seqlens_q = cu_seqlens_q.data();
  p.batch = c.batch();
  p.total_q = total_q;
  p.num_heads_q = heads_q;
  p.max_seqlen_q = bounds.max_q_len;
  p.max_seqlen_k = c.max_seqlen_k();
  p.softmax_scale = static_cast<float>(1 / sqrt(c.shape.head_dim));
  p.causal = c.causal;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.softcap = static_cast<float>(c.softcap);
  p.sinks = c.sinks ? sinks.floats() : nullptr;
  p.dump = c.dump;
  p.guide_lse_hint = c.dump == VEGAS_DUMP_TOKEN_WEIGHT ? hint.floats() : nullptr;
  p.dump_rows = c.dump_rows.empty() ? nullptr : dump_rows.data();
  p.dump_len = c.dump_len.empty() ? nullptr : dump_len.data();
  p.batch_invariant = c.batch_invariant;
  p.num_splits = c.num_splits;
  p.out_stride_row = heads_q * head_dim;
  p.out_stride_head = head_dim;
  for (size_t i = 0; i < dims.size(); ++i) {
    p.logits_stride[i] = elements(std::vector<int>(dims.begin() + i + 1, dims.end()), width);
  }
  p.logits_dtype = c.logits_dtype;
  p.workspace = workspace.at();
  p.workspace_bytes = workspace.bytes();
  for (bool fresh : {false, true}) {
    const auto of = [&](const Output& output) { return fresh ? output.fresh() : output.poisoned(); };
    p.out = of(out);
    p.lse = static_cast<float*>(of(lse));
    p.logits = of(logits);
    p.guide_lse = static_cast<float*>(of(guide_lse));
    require_ok(vegas_flash_attn_with_logit_dump(&p, device, nullptr), device);
  }

  Want want = {Expected(rows.size()), Expected(size_t(heads_q) * total_q), Expected(elements(dims, width)),
               Expected(norms.size())};
  for (int b = 0; b < c.batch(); ++b) Request(c, cache, q, sinks, hint, b, cu[b], total_q).expect(want);
  out.compare("out", c.shape.q_dtype, want.out);
  lse.compare("lse", VEGAS_FLOAT32, want.lse);
  if (!dims.empty()) logits.compare("logits", c.logits_dtype, want.logits);
  if (c.guided()) guide_lse.compare("guide_lse", VEGAS_FLOAT32, want.guide_lse);
}

// A case for every kernel that is instantiated: types, head dims, and numbers of packed rows.
std::vector<VerifyCase> instances() {
  const int rows[] = {3, 7, 12, 12, 20}, groups[] = {4, 4, 5, 8, 8};
  const int page_sizes[] = {16, 1, 48, 64};
  std::vector<VerifyCase> cases;
  for (const CacheShape& shape : instantiated_shapes()) {
    for (int i = 0; i < (shape.head_dim == 256 ? 1 : 5); ++i) {
      const int n = static_cast<int>(cases.size());
      VerifyCase c;
      c.shape = shape;
      c.shape.heads_kv = 1 + n % 2;
      c.shape.page_size = page_sizes[n % 4];
      c.shape.heads_first = n % 3 == 0;
      c.group = groups[i];
      c.q_lens = {rows[i], 2, 1, 0};
      c.dump = static_cast<VegasDump>((n + n / 6) % 6);
      if (!c.summed() && n % 4 != 1) c.logits_dtype = VEGAS_BFLOAT16;
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace

void run_verify(Session& session) {
  std::vector<VerifyCase> cases = instances();
  const auto add = [&](const VerifyCase& c) { cases.push_back(c); };
  for (int i = 1; i <= 5; ++i) {
    const VegasDump dump = static_cast<VegasDump>(i);
    // Masks of every kind, planes left out, and lengths of the dump that differ from the default.
    VerifyCase c = {.shape = {.heads_kv = 2, .head_dim = 64}, .q_lens = {5, 4, 3, 0}, .dump = dump};
    c.lengths = {300, 2, 129, 70};
    c.dump_rows = {1, 2, 3, 3};
    c.dump_len = {1000, 1, -5, 9};
    c.window_left = 40;
    c.sinks = true;
    add(c);
    // Keys in several chunks.
    c = {.shape = {.heads_kv = 1, .head_dim = 128, .page_size = 64},
         .group = 1,
         .lengths = {2600, 31},
         .q_lens = {4, 1},
         .dump = dump,
         .batch_invariant = i % 2 == 0};
    c.num_splits = c.batch_invariant ? 0 : 3;
    add(c);
    c = {.shape = {.heads_kv = 2, .head_dim = 64, .page_size = 1},
         .group = 2,
         .lengths = {700, 90},
         .q_lens = {2, 6},
         .dump = dump,
         .softcap = 5,
         .bad_pages = true};
    add(c);
  }
  // Nothing cached at all.
  add({.lengths = {0, 0}, .q_lens = {1, 2}, .dump = VEGAS_DUMP_KV_HEAD});
  // More rows than one tile, of one head.
  VerifyCase c = {.shape = {.heads_kv = 1}, .group = 1, .lengths = {200, 40}, .q_lens = {40, 33}, .causal = false};
  c.window_left = 60, c.window_right = 3;
  add(c);
  // Many rows over several chunks, in pages larger than a tile of keys.
  c = {.shape = {.q_dtype = VEGAS_FLOAT16, .page_size = 256}, .group = 8, .lengths = {1500, 77}, .q_lens = {20, 20}};
  c.dump = VEGAS_DUMP_TOKEN_WEIGHT;
  add(c);
  c.q_lens = {12, 3}, c.num_splits = 4, c.dump = VEGAS_DUMP_TOKEN, c.window_left = 900, c.sinks = true;
  add(c);
  c.shape.page_size = 16, c.shape.head_dim = 64, c.num_splits = 0, c.batch_invariant = true, c.lengths = {2900, 2100};
  add(c);
  // Padded head dims, also of fp8.
  add({.shape = {.head_dim = 96, .page_size = 48}, .group = 5, .dump = VEGAS_DUMP_KV_HEAD});
  add({.shape = {.q_dtype = VEGAS_FLOAT16, .fp8 = true, .head_dim = 80, .descale = true}, .dump = VEGAS_DUMP_ROWS});
  add({.shape = {.head_dim = 192, .heads_first = true}, .dump = VEGAS_DUMP_TOKEN_WEIGHT, .num_splits = 2});
  // Prompts: the last row alone, over everything.
  c = {.shape = {}, .group = 1, .lengths = {150, 60}, .q_lens = {150, 60}, .dump_rows = {2, 0}, .dump_len = {150, 0}};
  add(c);
  // The shapes of Qwen3-8B and gpt-oss: many heads, a window with sinks.
  c = {.shape = {.heads_kv = 8}, .lengths = {600, 97}, .q_lens = {7, 7}, .dump = VEGAS_DUMP_TOKEN_WEIGHT};
  add(c);
  c.shape.head_dim = 64, c.group = 8, c.dump = VEGAS_DUMP_TOKEN, c.window_left = 127, c.sinks = true;
  add(c);
  // A bound far beyond all lengths, for which CTAs add up dumps in pairs.
  c.bound = 1 << 17;
  add(c);
  c.lengths = {1900, 333}, c.group = 4, c.dump = VEGAS_DUMP_TOKEN_WEIGHT, c.batch_invariant = true;
  add(c);
  c.shape.head_dim = 128, c.batch_invariant = false, c.window_left = -1, c.bad_pages = true;
  add(c);
  // Small heads in fp8, whose tiles are large, with scores on both sides of what the short way to cap them serves.
  c = {.shape = {.fp8 = true, .heads_kv = 8, .head_dim = 64, .descale = true}, .group = 8, .lengths = {700, 130}};
  c.q_lens = {8, 3}, c.dump = VEGAS_DUMP_TOKEN_WEIGHT, c.softcap = 2, c.bound = 1 << 17;
  add(c);
  c.dump = VEGAS_DUMP_KV_HEAD, c.group = 4, c.batch_invariant = true, c.bad_pages = true;
  add(c);
  for (const VerifyCase& one : cases) {
    session.run(describe(one), [&](Random& random) { check(one, session.device, random); });
  }
}

}  // namespace native
