// topk_aggregate_logits and aggregate_logits against sums and a sort in double precision. Scores are such that fp32
// orders them alike: exact sums of multiples of 1/4, or weights whose logits differ by far more than rounding.
#include <limits.h>
#include <math.h>

#include <algorithm>
#include <numeric>

#include "support.h"

namespace native {
namespace {

struct SelectCase {
  VegasDump dump = VEGAS_DUMP_TOKEN;
  VegasDtype dtype = VEGAS_FLOAT32;
  VegasMode mode = VEGAS_MODE_LOGIT;
  int layers = 1;
  int heads = 1;  // of the dump
  std::vector<int32_t> seqlens = {700, 0, 33, 129};
  int spare = 3;                        // columns of the dump beyond the longest
  std::vector<int32_t> q_lens = {};     // none: no cu_seqlens_q
  std::vector<int32_t> dump_rows = {};  // none: NULL
  std::vector<int32_t> k = {100, 5, 40, 7};
  bool same_k = false;  // k[0] for every request, as a number
  int max_k = 100;
  bool all_equal = false;
  bool specials = false;  // infinities and NaN among the logits
  bool sinks = false;
  int pool_before = 0;
  int pool_after = 0;
  int num_sink = 0;
  int num_recent = 0;
  bool count_forced = true;
  bool per_kv_head = false;
  int page_size = 0;  // of slots; 0: token indices

  int batch() const { return static_cast<int>(seqlens.size()); }
  int width() const { return *std::max_element(seqlens.begin(), seqlens.end()) + spare; }
  int total_q() const { return std::accumulate(q_lens.begin(), q_lens.end(), 0); }
  int budget(int b) const { return std::min(std::max(k[same_k ? 0 : b], 0), seqlens[b]); }
  bool single() const { return dump == VEGAS_DUMP_TOKEN || dump == VEGAS_DUMP_TOKEN_WEIGHT; }
  bool raw() const { return dump == VEGAS_DUMP_ROWS || dump == VEGAS_DUMP_ALL; }
  bool weights() const { return mode == VEGAS_MODE_WEIGHT && !single(); }
  int lists() const { return per_kv_head ? heads : 1; }
};

std::string describe(const SelectCase& c) {
  const char* names[] = {"none", "token", "token_weight", "kv_head", "rows", "all"};
  std::string text = std::string("select ") + names[c.dump] + (c.dtype == VEGAS_BFLOAT16 ? " bf16" : "");
  const auto add = [&](const char* name, int value) { text += std::string(" ") + name + std::to_string(value); };
  if (c.weights()) text += " weights";
  add("candidates ", c.width() - c.spare);
  add("k ", c.max_k);
  if (c.layers > 1) add("layers ", c.layers);
  if (c.pool_before || c.pool_after) add("pool ", c.pool_before), text += "/" + std::to_string(c.pool_after);
  if (c.num_sink || c.num_recent) text += c.count_forced ? " forced" : " forced on top";
  if (c.per_kv_head) text += " list per head";
  if (c.page_size) add("slots of pages of ", c.page_size);
  if (c.all_equal) text += " all equal";
  if (c.specials) text += " infinities and NaN";
  return text;
}

// Vectors of `width` logits: the outer dimensions of a dump, without layers.
std::vector<int> outer(const SelectCase& c) {
  switch (c.dump) {
    case VEGAS_DUMP_KV_HEAD:
      return {c.batch(), 2, c.heads};
    case VEGAS_DUMP_ROWS:
      return {c.batch(), c.heads, 2};
    case VEGAS_DUMP_ALL:
      return {c.total_q(), c.heads};
    default:
      return {c.batch()};
  }
}

// A plane that counts: where its logits begin, and the natural log of what its weights are divided by.
struct Plane {
  size_t vector;
  double norm;
};

class Scores {
 public:
  Scores(const SelectCase& c, VegasDevice device, Random& random)
      : vectors_(vectors(c)),
        logits(device, c.dtype, draw(c, random)),
        norms(device, VEGAS_FLOAT32,
              normal(random, size_t(c.layers) * c.heads * (c.raw() ? c.total_q() : 2 * c.batch()))),
        sinks(device, VEGAS_FLOAT32, normal(random, size_t(c.layers) * c.heads)),
        c_(c) {}

  // The sum over counted rows of one head, or of all (head -1).
  std::vector<double> sum(int layer, int b, int head) const {
    const int n = c_.seqlens[b];
    const std::vector<Plane> counted = planes(layer, b, head);
    std::vector<double> sums(n, counted.empty() ? -INFINITY : 0.0);
    for (int i = 0; i < n; ++i) {
      bool selectable = true;
      for (const Plane& plane : counted) {
        const double value = logits.values[plane.vector * c_.width() + i];
        selectable = selectable && value != -INFINITY;
        sums[i] += c_.weights() ? exp(value - plane.norm) : value;
      }
      if (!selectable) sums[i] = -INFINITY;
    }
    return sums;
  }

 private:
  static size_t vectors(const SelectCase& c) {
    size_t count = 1;
    for (int dim : outer(c)) count *= dim;
    return count;
  }

  static std::vector<double> draw(const SelectCase& c, Random& random) {
    const size_t width = c.width(), count = c.layers * vectors(c);
    std::vector<double> values(count * width, NAN);
    std::uniform_int_distribution<int> quarters(-64, 64), odds(0, 99);
    std::vector<double> ladder(width);
    for (size_t i = 0; i < width; ++i) {
      // Neighbouring bf16 numbers from 1 on.
      ladder[i] = c.dtype == VEGAS_BFLOAT16 ? decode(0x3f80 + static_cast<uint32_t>(i), c.dtype) : 0.01 * i;
    }
    std::shuffle(ladder.begin(), ladder.end(), random);
    for (size_t vector = 0; vector < count; ++vector) {
      for (size_t i = 0; i < width; ++i) {
        double& value = values[vector * width + i];
        value = c.all_equal ? 1.25 : c.weights() ? ladder[i] : 0.25 * quarters(random);
        const int odd = odds(random);
        if (c.specials && odd < 4) value = odd == 0 ? -INFINITY : odd == 1 && !c.weights() ? INFINITY : NAN;
      }
    }
    return values;
  }

  std::vector<Plane> planes(int layer, int b, int only_head) const {
    int bits = c_.dump_rows.empty() ? 3 : c_.dump_rows[b];
    int first = 0, last = 1;
    if (!c_.q_lens.empty()) {
      first = std::accumulate(c_.q_lens.begin(), c_.q_lens.begin() + b, 0);
      last = first + c_.q_lens[b] - 1;
      if (last < first) bits = 0;
      if (last == first && bits == 3) bits = VEGAS_FIRST_ROW;
    }
    std::vector<Plane> result;
    if (bits == 0) return result;
    const size_t base = layer * vectors_;
    if (c_.single()) return {{base + b, 0}};
    for (int head = 0; head < c_.heads; ++head) {
      if (only_head >= 0 && head != only_head) continue;
      if (c_.dump == VEGAS_DUMP_ALL) {
        for (int row = first; row <= last; ++row) {
          result.push_back({base + size_t(row) * c_.heads + head, row_norm(layer, head, row)});
        }
        continue;
      }
      for (int plane = 0; plane < 2; ++plane) {
        if (!(bits >> plane & 1)) continue;
        if (c_.dump == VEGAS_DUMP_KV_HEAD) {
          const size_t at = (size_t(b) * 2 + plane) * c_.heads + head;
          result.push_back({base + at, norms.values[layer * vectors_ + at]});
        } else {
          const double norm = c_.weights() ? row_norm(layer, head, plane ? last : first) : 0;
          result.push_back({base + (size_t(b) * c_.heads + head) * 2 + plane, norm});
        }
      }
    }
    return result;
  }

  double row_norm(int layer, int head, int row) const {
    const double lse = norms.values[(size_t(layer) * c_.heads + head) * c_.total_q() + row];
    return c_.sinks ? log(exp(lse) + exp(sinks.values[layer * c_.heads + head])) : lse;
  }

  size_t vectors_;  // of a layer

 public:
  Floats logits;
  Floats norms;  // lse (layers, heads, total_q), or guide_lse (layers, batch, 2, heads)
  Floats sinks;

 private:
  const SelectCase& c_;
};

std::vector<double> pooled(const std::vector<double>& scores, int before, int after) {
  std::vector<double> result(scores.size(), -INFINITY);
  const int n = static_cast<int>(scores.size());
  for (int i = 0; i < n; ++i) {
    if (std::isnan(scores[i]) || scores[i] == -INFINITY) continue;
    for (int j = std::max(i - before, 0); j <= std::min(int64_t{i} + after, int64_t{n} - 1); ++j) {
      if (scores[j] > result[i]) result[i] = scores[j];
    }
  }
  return result;
}

std::vector<int32_t> choose(const SelectCase& c, int b, const std::vector<double>& scores) {
  const int n = c.seqlens[b], k = c.budget(b);
  const auto forced = [&](int i) { return i < c.num_sink || i >= n - c.num_recent; };
  std::vector<int32_t> chosen, others;
  for (int i = 0; i < n; ++i) {
    if (forced(i)) {
      chosen.push_back(i);
    } else if (scores[i] != -INFINITY) {
      others.push_back(i);
    }
  }
  chosen.resize(std::min<size_t>(chosen.size(), c.count_forced ? std::min(k, c.max_k) : c.max_k));
  std::stable_sort(others.begin(), others.end(), [&](int i, int j) { return scores[i] > scores[j]; });
  const size_t asked = c.count_forced ? k - chosen.size() : k;
  others.resize(std::min({others.size(), asked, c.max_k - chosen.size()}));
  chosen.insert(chosen.end(), others.begin(), others.end());
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

void check(const SelectCase& c, VegasDevice device, Random& random) {
  const Scores scores(c, device, random);
  std::vector<int32_t> cu = {0};
  for (int rows : c.q_lens) cu.push_back(cu.back() + rows);
  const Ints cu_seqlens_q(device, cu), seqlens(device, c.seqlens), k(device, c.k), dump_rows(device, c.dump_rows);
  const int max_pages = c.page_size ? (c.width() - c.spare + c.page_size - 1) / c.page_size : 0;
  std::vector<int32_t> pages(size_t(c.batch()) * max_pages);
  for (int b = 0; b < c.batch(); ++b) {
    for (int column = 0; column < max_pages; ++column) {
      const bool used = column * c.page_size < c.seqlens[b];
      pages[b * max_pages + column] = !used ? INT_MAX : column % 7 == 3 ? -1 : column * 3 + b;
    }
  }
  const Ints block_table(device, pages);
  const size_t lists = size_t(c.layers) * c.batch() * c.lists(), width = c.width();
  const Output indices(device, 4, lists * c.max_k), topk_length(device, 4, lists);
  const Output sums(device, 4, size_t(c.layers) * c.batch() * width);
  VegasBounds bounds = {};
  bounds.max_batch = c.batch();
  bounds.max_q_len = 1;
  bounds.max_seqlen_k = c.width();
  bounds.max_k = c.max_k;
  bounds.layers = c.layers;
  bounds.num_heads_q = bounds.num_heads_kv = c.heads;
  bounds.head_dim = 64;
  Memory workspace(device, vegas_workspace_bytes(VEGAS_OP_SELECT, &bounds, device));
  workspace.fill(0);

  VegasSelectParams p = {};
  p.logits = scores.logits.memory.at();
  const std::vector<int> dims = outer(c);
  int64_t stride = c.width();
  for (size_t i = dims.size() + 1; i-- > 0;) {
    p.logits_stride[i] = stride;
    if (i > 0) stride *= dims[i - 1];
  }
  p.logits_dtype = c.dtype;
  p.dump = c.dump;
  p.mode = c.mode;
  p.layers = c.layers;
  p.batch = c.batch();
  p.num_heads = c.heads;
  p.total_q = c.raw() ? c.total_q() : 0;
  p.max_seqlen_k = c.width();
  p.seqlens = seqlens.data();
  p.lse = c.weights() && c.raw() ? scores.norms.floats() : nullptr;
  p.guide_lse = c.weights() && !c.raw() ? scores.norms.floats() : nullptr;
  p.cu_seqlens_q = c.q_lens.empty() ? nullptr : cu_seqlens_q.data();
  p.dump_rows = c.dump_rows.empty() ? nullptr : dump_rows.data();
  p.sinks = c.sinks ? scores.sinks.floats() : nullptr;
  p.sinks_stride_layer = c.heads;
  p.k = c.k[0];
  p.k_per_request = c.same_k ? nullptr : k.data();
  p.pool_before = c.pool_before;
  p.pool_after = c.pool_after;
  p.num_sink = c.num_sink;
  p.num_recent = c.num_recent;
  p.count_forced = c.count_forced;
  p.per_kv_head = c.per_kv_head;
  p.block_table = c.page_size ? block_table.data() : nullptr;
  p.block_table_stride = max_pages;
  p.max_pages = max_pages;
  p.page_size = c.page_size;
  p.max_k = c.max_k;
  p.sums_stride_layer = c.batch() * width;
  p.sums_stride_batch = width;
  p.workspace = workspace.at();
  p.workspace_bytes = workspace.bytes();
  for (bool fresh : {false, true}) {
    const auto of = [&](const Output& output) { return fresh ? output.fresh() : output.poisoned(); };
    p.indices = static_cast<int32_t*>(of(indices));
    p.topk_length = static_cast<int32_t*>(of(topk_length));
    require_ok(vegas_topk_aggregate_logits(&p, device, nullptr), device);
    p.sums = static_cast<float*>(of(sums));
    require_ok(vegas_aggregate_logits(&p, device, nullptr), device);
    p.sums = nullptr;
  }

  std::vector<int32_t> want_indices, want_length;
  Expected want_sums(size_t(c.layers) * c.batch() * width);
  for (int layer = 0; layer < c.layers; ++layer) {
    for (int b = 0; b < c.batch(); ++b) {
      const std::vector<double> all = scores.sum(layer, b, -1);
      for (int i = 0; i < c.seqlens[b]; ++i) {
        const double error = c.weights() && std::isfinite(all[i]) ? ldexp(all[i], -16) : 0;
        want_sums.set((size_t(layer) * c.batch() + b) * width + i, all[i], error);
      }
      for (int list = 0; list < c.lists(); ++list) {
        const std::vector<double> own = c.per_kv_head ? scores.sum(layer, b, list) : all;
        std::vector<int32_t> chosen = choose(c, b, pooled(own, c.pool_before, c.pool_after));
        want_length.push_back(static_cast<int32_t>(chosen.size()));
        for (int32_t& token : chosen) {
          if (c.page_size == 0) continue;
          const int32_t page = pages[b * max_pages + token / c.page_size];
          token = page < 0 ? -1 : page * c.page_size + token % c.page_size;
        }
        chosen.resize(c.max_k, -1);
        want_indices.insert(want_indices.end(), chosen.begin(), chosen.end());
      }
    }
  }
  topk_length.compare("topk_length", want_length);
  indices.compare("indices", want_indices);
  sums.compare("sums", VEGAS_FLOAT32, want_sums);
}

}  // namespace

void run_select(Session& session) {
  std::vector<SelectCase> cases;
  const auto add = [&](const SelectCase& c) { cases.push_back(c); };
  add({.specials = true});
  add({.dump = VEGAS_DUMP_TOKEN_WEIGHT, .mode = VEGAS_MODE_WEIGHT, .layers = 2, .spare = 0, .page_size = 16});
  add({.k = {0}, .same_k = true, .max_k = 4});
  add({.k = {1000}, .same_k = true, .max_k = 0});
  add({.k = {90}, .same_k = true, .max_k = 64, .all_equal = true});
  add({.specials = true, .pool_before = 6});
  add({.specials = true, .pool_before = 3, .pool_after = 40, .page_size = 48});
  add({.seqlens = {2900, 40}, .k = {300, 9}, .max_k = 300, .pool_before = 1200, .pool_after = 300});
  add({.specials = true, .num_sink = 4, .num_recent = 8});
  add({.layers = 2, .max_k = 64, .num_sink = 4, .num_recent = 70, .count_forced = false});
  // Long lists are shared by several CTAs.
  SelectCase c = {.layers = 2, .seqlens = {9000, 6000, 10}, .k = {700, 5999, 3}, .max_k = 6000, .page_size = 1};
  c.specials = true;
  add(c);
  c.pool_before = 5, c.layers = 1, c.num_sink = 3;
  add(c);
  c = {.seqlens = {9001, 4500}, .spare = 0, .k = {1000, 5}, .max_k = 1000, .all_equal = true};
  add(c);
  for (VegasDtype dtype : {VEGAS_FLOAT32, VEGAS_BFLOAT16}) {
    c = {.dump = VEGAS_DUMP_KV_HEAD, .dtype = dtype, .heads = 3, .seqlens = {500, 0, 33, 129}, .spare = 1};
    c.specials = true;
    add(c);
    c.dump_rows = {1, 3, 2, 0}, c.q_lens = {4, 2, 1, 3}, c.mode = VEGAS_MODE_WEIGHT, c.layers = 2;
    add(c);
    c.per_kv_head = true, c.pool_before = 4, c.page_size = 16;
    add(c);
    c.mode = VEGAS_MODE_LOGIT, c.num_recent = 5;
    add(c);
    c = {.dump = VEGAS_DUMP_ROWS, .dtype = dtype, .heads = 4, .seqlens = {500, 0, 33, 129}, .q_lens = {3, 2, 1, 0}};
    add(c);
    c.mode = VEGAS_MODE_WEIGHT, c.sinks = true, c.layers = 2, c.dump_rows = {3, 1, 3, 3};
    add(c);
    c.dump = VEGAS_DUMP_ALL, c.specials = true;
    add(c);
    c.mode = VEGAS_MODE_LOGIT, c.spare = 4, c.pool_after = 2;
    add(c);
  }
  for (const SelectCase& one : cases) {
    session.run(describe(one), [&](Random& random) { check(one, session.device, random); });
  }
}

}  // namespace native
