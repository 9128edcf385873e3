// The plan of csrc/common/split_plan.cuh on the host: every thread of the CTA is a thread, warp shuffles and barriers
// are barriers. Whatever the lengths, a plan must cover every key once and fit the workspace of its bounds.
#include <stdint.h>
#include <stdio.h>

#include <barrier>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define __host__
#define __device__
#define __forceinline__ inline
#define __shared__ static
struct float2 {
  float x, y;
};
struct Index {
  unsigned x;
};
static thread_local Index threadIdx;
static Index blockDim;

constexpr int kThreads = 64;  // of the CTA; any number of warps will do
static std::barrier barrier(kThreads);
static void __syncthreads() { barrier.arrive_and_wait(); }

// All warps shuffle at the same time, so that one barrier serves them.
static uint64_t __shfl_up_sync(unsigned, uint64_t value, int step) {
  static uint64_t values[kThreads];
  values[threadIdx.x] = value;
  __syncthreads();
  const bool inside = static_cast<int>(threadIdx.x % 32) >= step;
  const uint64_t result = inside ? values[threadIdx.x - step] : value;
  __syncthreads();
  return result;
}

#include "common/split_plan.cuh"

using namespace vegas_ops::portable;

static int cases = 0;

// What is wrong with the plan of these requests, or NULL.
static const char* fault(const std::vector<RequestWork>& requests, SplitRule rule, const PlanBounds& bounds) {
  PlanWorkspace w;
  const size_t bytes = lay_out(bounds, rule, nullptr, &w);
  if (bytes > workspace_for_all_rules(bounds)) return "the workspace for all rules is too small";
  std::vector<char> memory(bytes);
  lay_out(bounds, rule, memory.data(), &w);
  const int batch = static_cast<int>(requests.size());
  blockDim.x = kThreads;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      threadIdx.x = i;
      make_plan([&](int b) { return requests[b]; }, batch, rule, w);
    });
  }
  for (std::thread& thread : threads) thread.join();

  int64_t units = 0, slots = 0;
  for (int b = 0; b < batch; ++b) {
    const auto [keys, row_tiles] = requests[b];
    const PlannedRequest& planned = w.requests[b];
    if (row_tiles == 0) {
      if (planned.chunks != 0) return "a request without rows has chunks";
      continue;
    }
    const int64_t covered = int64_t{planned.chunks} * planned.chunk_keys;
    if (planned.chunks < 1) return "a request with rows has no chunk";
    if (covered < keys) return "keys are left out";
    if (planned.chunks > 1 && covered - planned.chunk_keys >= keys) return "a chunk is empty";
    if (planned.chunk_keys % kChunkUnit) return "a chunk is no multiple of a CTA's step";
    if (rule.mode == SplitMode::kForced && planned.chunks > rule.num_splits) return "more chunks than asked for";
    if (rule.mode == SplitMode::kInvariant) {
      const int alone = chunk_keys(rule, keys, 0);
      if (planned.chunk_keys != alone) return "a chunk depends on other requests";
    }
    if (planned.unit_begin != units) return "units do not follow each other";
    if (planned.chunks > 1 && planned.slot_begin != slots) return "partial results do not follow each other";
    for (int chunk = 0; chunk < planned.chunks; ++chunk) {
      for (int tile = 0; tile < row_tiles; ++tile, ++units) {
        if (units >= bounds.units(rule)) return "more units than the grid has";
        const PlannedUnit& unit = w.units[units];
        if (unit.request != b || unit.row_tile != tile || unit.chunk != chunk) return "a unit is not the next one";
      }
    }
    if (planned.chunks > 1) slots += int64_t{planned.chunks} * row_tiles;
  }
  if (*w.num_units != units) return "the number of units is wrong";
  if (slots > bounds.split_units(rule)) return "more partial results than the workspace holds";
  return nullptr;
}

static bool check(std::mt19937& random, int batch, int most_keys, int row_tiles, int heads) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  std::vector<RequestWork> requests(batch);
  const int kind = draw(0, 3);  // lengths: any, all the longest, few long ones, just above the smallest chunk
  for (RequestWork& request : requests) {
    request.row_tiles = kind == 1 ? row_tiles : draw(0, row_tiles);
    request.keys = kind == 1 || (kind == 2 && draw(0, 7) == 0) ? most_keys
                   : kind == 2                                 ? draw(0, 9)
                                                               : draw(0, most_keys);
    if (kind == 3) request.keys = most_keys < kMinChunk + 1 ? most_keys : kMinChunk + 1;
  }
  const PlanBounds bounds = {batch, row_tiles, 16, heads, 8, most_keys, 0};
  for (SplitRule rule : {split_rule(0, 0), split_rule(0, 1), split_rule(1, 0), split_rule(5, 1), split_rule(1000, 0)}) {
    ++cases;
    if (const char* text = fault(requests, rule, bounds)) {
      printf("%s: batch %d, keys up to %d (kind %d), %d row tiles, %d heads, rule %d with %d splits\n", text, batch,
             most_keys, kind, row_tiles, heads, static_cast<int>(rule.mode), rule.num_splits);
      return false;
    }
  }
  return true;
}

int main(int argc, char** argv) {
  std::mt19937 random(argc > 1 ? std::stoul(argv[1]) : 1);
  bool right = true;
  for (int most_keys : {0, 1, 64, 257, 1025, 9000, 131072, 1 << 20}) {
    for (int batch : {1, 2, 63, 65, 300}) {
      const int heads = 1 << std::uniform_int_distribution<int>(0, 4)(random);
      right = right && check(random, batch, most_keys, std::uniform_int_distribution<int>(1, 3)(random), heads);
    }
  }
  if (right) printf("%d plans, none wrong\n", cases);
  return !right;
}
