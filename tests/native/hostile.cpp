// Lengths, pages, lists and rows that make no sense, in tensors that are allocations of their own: a call may refuse
// them or make the best of them, and must not leave its tensors. A sanitizer sees whether it does; without one, a fault
// of the device or of the process does.
#include <limits.h>

#include "attention.h"

namespace native {
namespace {

constexpr int kBatch = 3, kPages = 7, kColumns = 4, kPageSize = 16, kHeadsQ = 4, kHeadsKv = 2, kRows = 6, kWidth = 60;

// Any values at all, extremes and near misses among them.
std::vector<int32_t> anything(Random& random, size_t count) {
  const int32_t likely[] = {INT_MIN, INT_MIN + 1, -kPageSize,   -1,     0,   1,    kPages,
                            kRows,   kWidth,      kWidth + 1,   65,     112, 4096, 1 << 20,
                            1 << 30, INT_MAX - 1, INT_MAX - 64, INT_MAX};
  std::vector<int32_t> values(count);
  for (int32_t& value : values) {
    const uint32_t draw = random();
    value = draw % 4 == 0 ? static_cast<int32_t>(random()) : likely[draw / 4 % (sizeof likely / sizeof *likely)];
  }
  return values;
}

// The same, or now and then what is right, so that a call gets further.
std::vector<int32_t> mostly(Random& random, std::vector<int32_t> right) {
  const std::vector<int32_t> wrong = anything(random, right.size());
  for (size_t i = 0; i < right.size(); ++i) {
    if (random() % 3 == 0) right[i] = wrong[i];
  }
  return right;
}

void require_survival(int status, VegasDevice device) {
  if (device == VEGAS_CPU && status == VEGAS_INVALID_ARGUMENT) return;
  require_ok(status, device);
}

Memory room(VegasDevice device, size_t bytes) {
  Memory memory(device, bytes);
  memory.fill(0);
  return memory;
}

// A cache, queries and outputs that serve both attention ops.
struct Attention {
  Attention(VegasDevice device, Random& random, int head_dim)
      : keys(device, VEGAS_BFLOAT16, normal(random, size_t{kPages} * kPageSize * kHeadsKv * head_dim)),
        values(device, VEGAS_BFLOAT16, normal(random, size_t{kPages} * kPageSize * kHeadsKv * head_dim)),
        q(device, VEGAS_BFLOAT16, normal(random, size_t{kRows} * kHeadsQ * head_dim)),
        table(device, mostly(random, {0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4})),
        seqused_k(device, mostly(random, {64, 33, 17})),
        out(room(device, size_t{kRows} * kHeadsQ * head_dim * 2)),
        lse(room(device, size_t{kRows} * kHeadsQ * 4)) {
    cache.k = {keys.memory.at(), kPageSize * kHeadsKv * head_dim, kHeadsKv * head_dim, head_dim, nullptr, 0, 0};
    cache.v = cache.k;
    cache.v.data = values.memory.at();
    cache.dtype = VEGAS_BFLOAT16;
    cache.num_pages = kPages;
    cache.page_size = kPageSize;
    cache.num_heads_kv = kHeadsKv;
    cache.head_dim = head_dim;
    cache.block_table = table.data();
    cache.block_table_stride = kColumns;
    cache.max_pages = kColumns;
  }

  Floats keys, values, q;
  Ints table, seqused_k;
  Memory out, lse;
  VegasPagedCache cache = {};
};

template <class Params>
void set_common(Params& p, const Attention& a) {
  const int head_dim = a.cache.head_dim;
  p.cache = a.cache;
  p.q = a.q.memory.at();
  p.q_stride_row = p.out_stride_row = kHeadsQ * head_dim;
  p.q_stride_head = p.out_stride_head = head_dim;
  p.q_dtype = VEGAS_BFLOAT16;
  p.seqused_k = a.seqused_k.data();
  p.batch = kBatch;
  p.num_heads_q = kHeadsQ;
  p.softmax_scale = 0.1f;
  p.window_left = p.window_right = -1;
  p.out = a.out.at();
  p.lse = static_cast<float*>(a.lse.at());
}

Memory workspace(VegasOp op, VegasDevice device, int head_dim) {
  const VegasBounds bounds = {kBatch, kRows, kWidth + 4, kWidth, 1, kHeadsQ, kHeadsKv, head_dim};
  return room(device, vegas_workspace_bytes(op, &bounds, device));
}

void verify(VegasDevice device, Random& random, int number) {
  const int head_dim = number % 2 ? 64 : 128;
  const Attention a(device, random, head_dim);
  const Ints cu(device, mostly(random, {0, 3, 4, 6}));
  const Ints dump_rows(device, anything(random, kBatch)), dump_len(device, anything(random, kBatch));
  const Memory logits = room(device, size_t{kRows} * kHeadsQ * 2 * kWidth * 4);
  const Memory guides = room(device, kBatch * 2 * kHeadsKv * 4), hint = room(device, kBatch * 2 * kHeadsKv * 4);
  const Memory scratch = workspace(VEGAS_OP_VERIFY, device, head_dim);
  VegasVerifyParams p = {};
  set_common(p, a);
  p.cu_seqlens_q = cu.data();
  p.total_q = kRows;
  p.max_seqlen_q = number % 3 ? kRows : 2;
  p.max_seqlen_k = kWidth;
  p.causal = number % 4 != 3;
  if (number % 4 == 2) p.window_left = 9;
  p.dump = static_cast<VegasDump>(number % 6);
  p.guide_lse_hint = static_cast<float*>(hint.at());
  p.dump_rows = dump_rows.data();
  p.dump_len = dump_len.data();
  p.num_splits = number % 5 == 4 ? 3 : 0;
  p.batch_invariant = number % 7 == 5;
  p.logits = logits.at();
  p.logits_dtype = VEGAS_FLOAT32;
  const int64_t lead[6][3] = {{}, {1}, {1}, {2 * kHeadsKv, kHeadsKv, 1}, {2 * kHeadsQ, 2, 1}, {kHeadsQ, 1}};
  for (int i = 0; i < 3; ++i) p.logits_stride[i] = lead[p.dump][i] * kWidth;
  p.guide_lse = static_cast<float*>(guides.at());
  p.workspace = scratch.at();
  p.workspace_bytes = scratch.bytes();
  require_survival(vegas_flash_attn_with_logit_dump(&p, device, nullptr), device);
}

void sparse(VegasDevice device, Random& random, int number) {
  const int head_dim = number % 2 ? 64 : 128, lists = number % 3 ? 1 : kHeadsKv;
  const Attention a(device, random, head_dim);
  const Ints indices(device, anything(random, kBatch * lists * kWidth)),
      counts(device, anything(random, kBatch * lists));
  const Ints tails(device, mostly(random, {60, 30, 17}));
  const Memory scratch = workspace(VEGAS_OP_SPARSE, device, head_dim);
  VegasSparseParams p = {};
  set_common(p, a);
  p.indices = indices.data();
  p.indices_stride_batch = lists * kWidth;
  p.indices_stride_head = lists > 1 ? kWidth : 0;
  p.topk_length = counts.data();
  p.topk_length_stride_batch = lists;
  p.topk_length_stride_head = lists > 1;
  p.tail_start = number % 4 ? tails.data() : nullptr;
  p.indices_are_slots = number % 2;
  if (!p.indices_are_slots && number % 3 == 1) p.window_left = 20;
  p.max_k = kWidth;
  p.num_splits = number % 5 == 4 ? 3 : 0;
  p.workspace = scratch.at();
  p.workspace_bytes = scratch.bytes();
  require_survival(vegas_sparse_paged_decode(&p, device, nullptr), device);
}

void select(VegasDevice device, Random& random, int number) {
  const VegasDump dump = static_cast<VegasDump>(1 + number % 5);
  const bool summed = dump == VEGAS_DUMP_TOKEN || dump == VEGAS_DUMP_TOKEN_WEIGHT;
  const int heads = summed ? 1 : dump == VEGAS_DUMP_KV_HEAD ? kHeadsKv : kHeadsQ;
  const int planes = summed ? kBatch : dump == VEGAS_DUMP_ALL ? kRows * heads : kBatch * 2 * heads;
  const Floats logits(device, VEGAS_FLOAT32, normal(random, size_t(planes) * kWidth));
  const Floats norms(device, VEGAS_FLOAT32, normal(random, size_t(heads) * kRows * 2));
  const Ints seqlens(device, anything(random, kBatch)), ks(device, anything(random, kBatch));
  const Ints cu(device, mostly(random, {0, 3, 4, 6})), dump_rows(device, anything(random, kBatch));
  const Ints table(device, anything(random, kBatch * 2));
  const Memory indices = room(device, kBatch * kHeadsKv * 9 * 4), counts = room(device, kBatch * kHeadsKv * 4);
  const VegasBounds bounds = {kBatch, 1, kWidth, 9, 1, heads, heads, 1};
  const Memory scratch = room(device, vegas_workspace_bytes(VEGAS_OP_SELECT, &bounds, device));
  VegasSelectParams p = {};
  p.logits = logits.memory.at();
  const int64_t lead[6][3] = {{}, {1}, {1}, {2 * kHeadsKv, kHeadsKv, 1}, {2 * kHeadsQ, 2, 1}, {kHeadsQ, 1}};
  for (int i = 0; i < 3; ++i) p.logits_stride[i + 1] = lead[dump][i] * kWidth;
  p.logits_dtype = VEGAS_FLOAT32;
  p.dump = dump;
  p.mode = number % 2 ? VEGAS_MODE_WEIGHT : VEGAS_MODE_LOGIT;
  p.layers = 1;
  p.batch = kBatch;
  p.num_heads = heads;
  p.total_q = kRows;
  p.max_seqlen_k = kWidth;
  p.seqlens = seqlens.data();
  p.lse = p.guide_lse = norms.floats();
  p.cu_seqlens_q = cu.data();
  p.dump_rows = dump_rows.data();
  p.k_per_request = ks.data();
  p.pool_before = number % 3;
  p.pool_after = number % 4 == 3 ? INT_MAX : 0;
  p.num_sink = number % 2 ? 2 : INT_MAX;
  p.num_recent = number % 5 == 4 ? INT_MAX : 3;
  p.count_forced = number % 3 != 1;
  p.per_kv_head = dump == VEGAS_DUMP_KV_HEAD && number % 2;
  p.block_table = table.data();
  p.block_table_stride = p.max_pages = 2;
  p.page_size = kPageSize;
  p.max_k = 9;
  p.indices = static_cast<int32_t*>(indices.at());
  p.topk_length = static_cast<int32_t*>(counts.at());
  p.workspace = scratch.at();
  p.workspace_bytes = scratch.bytes();
  require_survival(vegas_topk_aggregate_logits(&p, device, nullptr), device);
}

}  // namespace

void run_hostile(Session& session) {
  using Case = void (*)(VegasDevice, Random&, int);
  const std::pair<const char*, Case> ops[] = {{"verify", verify}, {"sparse", sparse}, {"select", select}};
  for (const auto& [name, run] : ops) {
    for (int number = 0; number < 24; ++number) {
      session.run("hostile " + std::string(name) + " " + std::to_string(number),
                  [&, run = run](Random& random) { run(session.device, random, number); });
    }
  }
}

}  // namespace native
