// One round of self-speculation through the C interface alone: verify, select, draft, on raw pointers of the CPU.
// Every result is compared with what the formula says.
//
//   cc -std=c11 -O2 -I csrc/include examples/c/round.c vegas_ops/libvegas.so -lm -Wl,-rpath,"$PWD/vegas_ops" -o round
//   ./round
//
// On a GPU the same calls take device pointers, bf16 or fp16, VEGAS_CUDA, a cudaStream_t, and a zeroed workspace of
// vegas_workspace_bytes() bytes.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "vegas_ops/api.h"

enum {
  NUM_HEADS_Q = 8,
  NUM_HEADS_KV = 2,
  GROUP = NUM_HEADS_Q / NUM_HEADS_KV,
  HEAD_DIM = 64,
  PAGE_SIZE = 16,
  NUM_PAGES = 40,
  KEYS = 500,                              // tokens in the cache, the new rows included
  ROWS = 4,                                // the pending token and three drafts
  CANDIDATES = KEYS - ROWS + 1,            // what the next drafts choose from
  K = 64,                                  // tokens that they choose
  PAGES = (KEYS + PAGE_SIZE) / PAGE_SIZE,  // with room for one more token
};

// One page holds K and V of a token side by side, as some engines lay them out: the strides say so.
// Rows of q, K and V must be aligned to 16 bytes.
static _Alignas(16) float cache[NUM_PAGES][PAGE_SIZE][2][NUM_HEADS_KV][HEAD_DIM];
static int32_t block_table[PAGES];

static float uniform(void) {  // in [-1, 1)
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)((int32_t)(state >> 32) * (1.0 / 2147483648.0));
}

static void check(int status) {
  if (status == VEGAS_OK) return;
  fprintf(stderr, "status %d: %s\n", status, vegas_last_error());
  exit(1);
}

static void expect(const char* what, double error, double bound) {
  printf("%-40s error %.1e\n", what, error);
  if (!(error <= bound)) exit(1);
}

static const float* at(int position, int v, int kv_head) {
  return cache[block_table[position / PAGE_SIZE]][position % PAGE_SIZE][v][kv_head];
}

static double logit(const float* q, int position, int kv_head) {
  const float* k = at(position, 0, kv_head);
  double sum = 0;
  for (int d = 0; d < HEAD_DIM; ++d) sum += (double)q[d] * k[d];
  return sum / sqrt(HEAD_DIM);
}

// The largest difference from softmax(q k^T) v over the listed positions.
static double attention_error(const float* q, const float* out, int kv_head, const int* positions, int n) {
  double sum = 0, expected[HEAD_DIM] = {0}, error = 0;
  for (int i = 0; i < n; ++i) {
    const double weight = exp(logit(q, positions[i], kv_head));
    const float* v = at(positions[i], 1, kv_head);
    sum += weight;
    for (int d = 0; d < HEAD_DIM; ++d) expected[d] += weight * v[d];
  }
  for (int d = 0; d < HEAD_DIM; ++d) error = fmax(error, fabs(expected[d] / sum - out[d]));
  return error;
}

int main(void) {
  static _Alignas(16) float q[ROWS][NUM_HEADS_Q][HEAD_DIM], out[ROWS][NUM_HEADS_Q][HEAD_DIM], lse[NUM_HEADS_Q][ROWS];
  static float scores[KEYS];
  static int positions[KEYS + 1];
  for (size_t i = 0; i < sizeof cache / sizeof(float); ++i) (&cache[0][0][0][0][0])[i] = uniform();
  for (size_t i = 0; i < sizeof q / sizeof(float); ++i) (&q[0][0][0])[i] = uniform();
  for (int i = 0; i < PAGES; ++i) block_table[i] = (7 * i + 3) % NUM_PAGES;  // any order
  for (int i = 0; i <= KEYS; ++i) positions[i] = i;

  const VegasCacheView k = {
      .data = cache[0][0][0],
      .stride_page = sizeof cache[0] / sizeof(float),
      .stride_token = sizeof cache[0][0] / sizeof(float),
      .stride_head = HEAD_DIM,
  };
  VegasCacheView v = k;
  v.data = cache[0][0][1];
  const VegasPagedCache paged = {
      .k = k,
      .v = v,
      .dtype = VEGAS_FLOAT32,
      .num_pages = NUM_PAGES,
      .page_size = PAGE_SIZE,
      .num_heads_kv = NUM_HEADS_KV,
      .head_dim = HEAD_DIM,
      .block_table = block_table,
      .block_table_stride = PAGES,
      .max_pages = PAGES,
  };

  // Verify: full attention of the new rows, and a score for every candidate.
  const int32_t seqused_k = KEYS, candidates = CANDIDATES, cu_seqlens_q[2] = {0, ROWS};
  const VegasVerifyParams verify = {
      .cache = paged,
      .q = q,
      .q_stride_row = NUM_HEADS_Q * HEAD_DIM,
      .q_stride_head = HEAD_DIM,
      .q_dtype = VEGAS_FLOAT32,
      .seqused_k = &seqused_k,
      .cu_seqlens_q = cu_seqlens_q,
      .batch = 1,
      .total_q = ROWS,
      .num_heads_q = NUM_HEADS_Q,
      .max_seqlen_q = ROWS,
      .max_seqlen_k = KEYS,
      .softmax_scale = 1.0f / sqrtf(HEAD_DIM),
      .causal = 1,
      .window_left = -1,
      .window_right = -1,
      .dump = VEGAS_DUMP_TOKEN,
      .out = out,
      .out_stride_row = NUM_HEADS_Q * HEAD_DIM,
      .out_stride_head = HEAD_DIM,
      .lse = &lse[0][0],
      .logits = scores,
      .logits_stride = {KEYS},
      .logits_dtype = VEGAS_FLOAT32,
  };
  check(vegas_flash_attn_with_logit_dump(&verify, VEGAS_CPU, NULL));
  double error = 0;
  for (int row = 0; row < ROWS; ++row) {
    for (int h = 0; h < NUM_HEADS_Q; ++h) {
      error = fmax(error, attention_error(q[row][h], out[row][h], h / GROUP, positions, CANDIDATES + row));
    }
  }
  expect("verify: attention of 4 rows", error, 1e-5);
  error = 0;
  for (int i = 0; i < CANDIDATES; ++i) {
    double sum = 0;  // over heads, first and last row
    for (int h = 0; h < NUM_HEADS_Q; ++h) sum += logit(q[0][h], i, h / GROUP) + logit(q[ROWS - 1][h], i, h / GROUP);
    error = fmax(error, fabs(sum - scores[i]));
  }
  expect("verify: scores of the candidates", error, 1e-4);

  // Select: the K best candidates, as slots of the cache.
  int32_t slots[K], length;
  const VegasSelectParams select = {
      .logits = scores,
      .logits_stride = {KEYS, KEYS},
      .logits_dtype = VEGAS_FLOAT32,
      .dump = VEGAS_DUMP_TOKEN,
      .mode = VEGAS_MODE_LOGIT,
      .layers = 1,
      .batch = 1,
      .num_heads = 1,
      .max_seqlen_k = KEYS,
      .seqlens = &candidates,
      .k = K,
      .count_forced = 1,
      .block_table = block_table,
      .block_table_stride = PAGES,
      .max_pages = PAGES,
      .page_size = PAGE_SIZE,
      .max_k = K,
      .indices = slots,
      .topk_length = &length,
  };
  check(vegas_topk_aggregate_logits(&select, VEGAS_CPU, NULL));
  static int chosen[KEYS + 1];
  static char is_chosen[CANDIDATES];
  float worst = INFINITY, best_left_out = -INFINITY;
  for (int i = 0; i < length; ++i) {
    int page = 0;
    while (block_table[page] != slots[i] / PAGE_SIZE) ++page;
    chosen[i] = page * PAGE_SIZE + slots[i] % PAGE_SIZE;
    is_chosen[chosen[i]] = 1;
    worst = fminf(worst, scores[chosen[i]]);
  }
  for (int i = 0; i < CANDIDATES; ++i) {
    if (!is_chosen[i]) best_left_out = fmaxf(best_left_out, scores[i]);
  }
  printf("select: %d slots, worst %.3f, best left out %.3f\n", length, worst, best_left_out);
  if (length != K || worst < best_left_out) return 1;

  // Draft: had all three drafts been accepted, the next token is at position KEYS. It attends to the chosen slots
  // and to everything from the candidates' end on, itself included.
  const int32_t next_seqused_k = KEYS + 1;
  static _Alignas(16) float next_q[NUM_HEADS_Q][HEAD_DIM], next_out[NUM_HEADS_Q][HEAD_DIM], next_lse[NUM_HEADS_Q];
  for (size_t i = 0; i < sizeof next_q / sizeof(float); ++i) (&next_q[0][0])[i] = uniform();
  const VegasSparseParams sparse = {
      .cache = paged,
      .q = next_q,
      .q_stride_row = NUM_HEADS_Q * HEAD_DIM,
      .q_stride_head = HEAD_DIM,
      .q_dtype = VEGAS_FLOAT32,
      .indices = slots,
      .indices_stride_batch = K,
      .topk_length = &length,
      .topk_length_stride_batch = 1,
      .tail_start = &candidates,
      .seqused_k = &next_seqused_k,
      .batch = 1,
      .num_heads_q = NUM_HEADS_Q,
      .max_k = K,
      .indices_are_slots = 1,
      .softmax_scale = 1.0f / sqrtf(HEAD_DIM),
      .window_left = -1,
      .window_right = -1,
      .out = next_out,
      .out_stride_row = NUM_HEADS_Q * HEAD_DIM,
      .out_stride_head = HEAD_DIM,
      .lse = next_lse,
  };
  check(vegas_sparse_paged_decode(&sparse, VEGAS_CPU, NULL));
  int n = length;
  for (int position = CANDIDATES; position <= KEYS; ++position) chosen[n++] = position;
  error = 0;
  for (int h = 0; h < NUM_HEADS_Q; ++h) {
    error = fmax(error, attention_error(next_q[h], next_out[h], h / GROUP, chosen, n));
  }
  expect("draft: attention over the selection", error, 1e-5);

  // What cannot be served is named, and touches nothing.
  VegasVerifyParams wrong = verify;
  wrong.softmax_scale = NAN;
  if (vegas_flash_attn_with_logit_dump(&wrong, VEGAS_CPU, NULL) != VEGAS_INVALID_ARGUMENT) return 1;
  printf("refused: %s\n", vegas_last_error());
  printf("vegas_ops %s, %s\n", vegas_version(), vegas_cpu_isa());
  return 0;
}
