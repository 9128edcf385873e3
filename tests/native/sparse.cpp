// sparse_paged_decode against attention in double precision.
#include <limits.h>
#include <math.h>

#include <algorithm>
#include <numeric>

#include "attention.h"

namespace native {
namespace {

struct SparseCase {
  CacheShape shape;
  int group = 4;
  std::vector<int32_t> lengths = {333, 0, 45, 90};
  std::vector<int32_t> counts = {150, 5, 45, 0};  // listed tokens
  std::vector<int32_t> tail_start = {};           // none: no tail
  bool slots = true;
  bool per_head = false;     // a list, and a length, of its own for each KV head
  bool holes = false;        // listed entries that must be skipped
  bool with_lengths = true;  // seqused_k, which only a tail and a window need
  int window_left = -1;
  double softcap = 0;
  bool sinks = false;
  bool batch_invariant = false;
  int num_splits = 0;

  int batch() const { return static_cast<int>(lengths.size()); }
  int heads_q() const { return group * shape.heads_kv; }
  int lists() const { return per_head ? shape.heads_kv : 1; }
  int max_k() const { return *std::max_element(counts.begin(), counts.end()); }
};

std::string describe(const SparseCase& c) {
  std::string text = std::string("sparse ") + (c.slots ? "slots" : "logical");
  const auto add = [&](const char* name, int value) { text += std::string(" ") + name + std::to_string(value); };
  text += c.shape.q_dtype == VEGAS_FLOAT16 ? " fp16" : " bf16";
  if (c.shape.fp8) text += "/fp8";
  add("d", c.shape.head_dim);
  add("heads ", c.heads_q());
  text += "/" + std::to_string(c.shape.heads_kv);
  add("k ", c.max_k());
  add("page ", c.shape.page_size);
  if (!c.tail_start.empty()) text += " tail";
  if (c.per_head) text += " list per head";
  if (c.holes) text += " holes";
  if (c.window_left >= 0) add("window ", c.window_left);
  if (c.softcap > 0) text += " softcap";
  if (c.sinks) text += " sinks";
  if (c.batch_invariant) text += " invariant";
  if (c.num_splits) add("splits ", c.num_splits);
  return text;
}

struct Lists {
  std::vector<int32_t> indices;  // (batch, lists, max_k)
  std::vector<int32_t> lengths;  // (batch, lists)
};

Lists draw_lists(const SparseCase& c, const PagedCache& cache, Random& random) {
  Lists lists;
  for (int b = 0; b < c.batch(); ++b) {
    const int below = c.tail_start.empty() ? c.lengths[b] : std::min(c.tail_start[b], c.lengths[b]);
    for (int list = 0; list < c.lists(); ++list) {
      std::vector<int32_t> tokens(below);
      std::iota(tokens.begin(), tokens.end(), 0);
      std::shuffle(tokens.begin(), tokens.end(), random);
      const int count = std::max(std::min(c.counts[b], below) - 3 * list, 0);
      tokens.resize(count);
      for (int32_t& token : tokens) {
        if (c.slots) token = static_cast<int32_t>(cache.slot_of(b, token));
      }
      // Beyond the cache, or the request; -1 where the caller must not list such a token.
      const int beyond = c.slots ? static_cast<int>(cache.num_slots()) : c.tail_start.empty() ? c.lengths[b] : -1;
      const int holes[] = {-1, -9, INT_MAX, beyond};
      for (int i = 0; c.holes && i < 4 && 2 * i < count; ++i) tokens[2 * i] = holes[i];
      lists.lengths.push_back(count);
      for (int i = count; i < c.max_k(); ++i) tokens.push_back(i % 2 ? -1 : INT_MAX);
      lists.indices.insert(lists.indices.end(), tokens.begin(), tokens.end());
    }
  }
  return lists;
}

// Slots that a KV head of a request attends to.
std::vector<int64_t> attended(const SparseCase& c, const PagedCache& cache, const Lists& lists, int b, int kv_head) {
  std::vector<int64_t> slots;
  const int length = c.lengths[b];
  if (length == 0 && c.with_lengths) return slots;
  const int list = b * c.lists() + (c.per_head ? kv_head : 0);
  const auto visit = [&](int64_t position) {
    if (position >= length || (c.window_left >= 0 && position < length - 1 - c.window_left)) return;
    const int64_t slot = cache.slot_of(b, position);
    if (slot >= 0) slots.push_back(slot);
  };
  for (int i = 0; i < lists.lengths[list]; ++i) {
    const int64_t index = lists.indices[size_t(list) * c.max_k() + i];
    if (!c.slots) {
      visit(index);
    } else if (index >= 0 && index < cache.num_slots()) {
      slots.push_back(index);
    }
  }
  for (int position = c.tail_start.empty() ? length : c.tail_start[b]; position < length; ++position) visit(position);
  return slots;
}

void check(const SparseCase& c, VegasDevice device, Random& random) {
  const PagedCache cache(device, random, c.shape, c.lengths, false);
  const int heads_q = c.heads_q(), heads_kv = c.shape.heads_kv, head_dim = c.shape.head_dim, max_k = c.max_k();
  const size_t elements = size_t(c.batch()) * heads_q * head_dim;
  const Floats q(device, c.shape.q_dtype, normal(random, elements));
  const Floats sinks(device, VEGAS_FLOAT32, normal(random, heads_q));
  const Lists lists = draw_lists(c, cache, random);
  const Ints indices(device, lists.indices), topk_length(device, lists.lengths);
  const Ints lengths(device, c.lengths), tail_start(device, c.tail_start);
  const Output out(device, size_of(c.shape.q_dtype), elements);
  const Output lse(device, 4, size_t(heads_q) * c.batch());

  VegasSparseParams p = {};
  p.cache = cache.view();
  const bool tail = !c.tail_start.empty();
  VegasBounds bounds = {};
  bounds.max_batch = c.batch();
  bounds.max_q_len = 1;
  bounds.max_seqlen_k = p.cache.max_pages * p.cache.page_size;
  bounds.max_k = max_k;
  bounds.num_heads_q = heads_q;
  bounds.num_heads_kv = heads_kv;
  bounds.head_dim = head_dim;
  Memory workspace(device, vegas_workspace_bytes(VEGAS_OP_SPARSE, &bounds, device));
  workspace.fill(0);
  if (c.slots && !tail) {
    p.cache.block_table = nullptr;
    p.cache.max_pages = 0;
  }
  p.q = q.memory.at();
  p.q_stride_row = int64_t{heads_q} * head_dim;
  p.q_stride_head = head_dim;
  p.q_dtype = c.shape.q_dtype;
  p.indices = indices.data();
  p.indices_stride_batch = int64_t{c.lists()} * max_k;
  p.indices_stride_head = c.per_head ? max_k : 0;
  p.topk_length = topk_length.data();
  p.topk_length_stride_batch = c.lists();
  p.topk_length_stride_head = c.per_head ? 1 : 0;
  p.tail_start = tail ? tail_start.data() : nullptr;
  p.seqused_k = c.with_lengths ? lengths.data() : nullptr;
  p.batch = c.batch();
  p.num_heads_q = heads_q;
  p.max_k = max_k;
  p.indices_are_slots = c.slots;
  p.softmax_scale = static_cast<float>(1 / sqrt(head_dim));
  p.softcap = static_cast<float>(c.softcap);
  p.sinks = c.sinks ? sinks.floats() : nullptr;
  p.window_left = c.window_left;
  p.window_right = -1;
  p.batch_invariant = c.batch_invariant;
  p.num_splits = c.num_splits;
  p.out_stride_row = int64_t{heads_q} * head_dim;
  p.out_stride_head = head_dim;
  p.workspace = workspace.at();
  p.workspace_bytes = workspace.bytes();
  for (bool fresh : {false, true}) {
    p.out = fresh ? out.fresh() : out.poisoned();
    p.lse = static_cast<float*>(fresh ? lse.fresh() : lse.poisoned());
    require_ok(vegas_sparse_paged_decode(&p, device, nullptr), device);
  }

  Expected want_out(elements), want_lse(size_t(heads_q) * c.batch());
  for (int b = 0; b < c.batch(); ++b) {
    for (int head = 0; head < heads_q; ++head) {
      const int kv_head = head / c.group;
      const double* query = q.values.data() + (size_t(b) * heads_q + head) * head_dim;
      const double scale = cache.k_descale(b, kv_head) / sqrt(head_dim);
      std::vector<Logit> logits;
      std::vector<const double*> values;
      for (int64_t slot : attended(c, cache, lists, b, kv_head)) {
        logits.push_back(logit(query, cache.k(slot, kv_head), head_dim, scale, c.softcap));
        values.push_back(cache.v(slot, kv_head));
      }
      const double* sink = c.sinks ? &sinks.values[head] : nullptr;
      const AttentionRow row = attend(logits, values, cache.v_descale(b, kv_head), sink, head_dim, c.shape.q_dtype);
      for (int d = 0; d < head_dim; ++d) {
        want_out.set((size_t(b) * heads_q + head) * head_dim + d, row.out[d], row.error[d]);
      }
      want_lse.set(size_t(head) * c.batch() + b, row.lse.value, row.lse.error);
    }
  }
  out.compare("out", c.shape.q_dtype, want_out);
  lse.compare("lse", VEGAS_FLOAT32, want_lse);
}

// A case for every kernel that is instantiated.
std::vector<SparseCase> instances() {
  const int page_sizes[] = {16, 1, 48, 64}, groups[] = {1, 4, 5, 8};
  std::vector<SparseCase> cases;
  for (const CacheShape& shape : instantiated_shapes()) {
    const int n = static_cast<int>(cases.size());
    SparseCase c;
    c.shape = shape;
    c.shape.heads_kv = 1 + n % 3;
    c.shape.page_size = page_sizes[n % 4];
    c.shape.heads_first = n % 2 == 1;
    c.group = groups[(n + n / 4) % 4];
    c.slots = n % 5 < 3;
    c.holes = n % 2 == 0;
    c.per_head = n % 3 == 2;
    if (n % 3 != 1) c.tail_start = {300, 0, 45, 80};
    cases.push_back(c);
  }
  return cases;
}

}  // namespace

void run_sparse(Session& session) {
  std::vector<SparseCase> cases = instances();
  const auto add = [&](const SparseCase& c) { cases.push_back(c); };
  // Lists and tails of several chunks.
  SparseCase c = {.shape = {.heads_kv = 2, .page_size = 64}, .lengths = {2600, 700}, .counts = {2100, 300}};
  c.tail_start = {2200, 640};
  add(c);
  c.per_head = true, c.slots = false, c.batch_invariant = true, c.shape.page_size = 1;
  add(c);
  c.per_head = false, c.batch_invariant = false, c.num_splits = 5, c.sinks = true, c.softcap = 5, c.group = 8;
  add(c);
  // More requests than CTAs, so that a CTA attends several: whole ones, and parts at either end.
  c = {.shape = {.head_dim = 64}, .group = 3};
  c.lengths.clear(), c.counts.clear();
  for (int b = 0; b < 600; ++b) {
    c.lengths.push_back(b % 17 == 0 ? 0 : b * 7 % 23 + (b % 400 == 3 ? 700 : 0));
    c.counts.push_back(std::max(c.lengths[b] - b % 3, 0));
    c.tail_start.push_back(std::max(c.lengths[b] - b % 5, 0));
  }
  add(c);
  // Slots alone, without table and lengths; more query heads than one tile holds.
  c = {.shape = {.head_dim = 64}, .group = 20, .lengths = {400, 30}, .counts = {400, 9}, .with_lengths = false};
  add(c);
  // A window layer drafts with a tail alone.
  c = {.shape = {.heads_kv = 8, .head_dim = 64}, .group = 8, .lengths = {500, 60, 0}, .counts = {0, 0, 0}};
  c.tail_start = {0, 0, 0}, c.window_left = 127, c.sinks = true;
  add(c);
  c.counts = {90, 20, 0}, c.tail_start = {450, 40, 0}, c.slots = false, c.holes = true;
  add(c);
  // Padded head dims.
  add({.shape = {.head_dim = 96, .page_size = 48}, .slots = false, .holes = true});
  add({.shape = {.q_dtype = VEGAS_FLOAT16, .fp8 = true, .head_dim = 208, .descale = true}, .num_splits = 3});
  for (const SparseCase& one : cases) {
    session.run(describe(one), [&](Random& random) { check(one, session.device, random); });
  }
}

}  // namespace native
