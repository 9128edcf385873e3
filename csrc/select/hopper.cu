// topk_aggregate_logits on Hopper: one launch for a call whose scores are there, one more where planes are summed.
#include "common/backends.h"
#include "common/cuda_launch.h"
#include "common/status.h"
#include "select/hopper.cuh"

namespace vegas_ops {
namespace selection::hopper {
namespace {

constexpr int kFullClusters = 100;  // multiprocessors of a GPU that schedules clusters of 16
constexpr int kMostClusterBits = 4;
constexpr int kFewWarps = kWarps / 2;
constexpr int kTurn = kRowWords * kFewWarps;  // words that these read at once
constexpr int most_cluster_bits(int num_sms) { return num_sms >= kFullClusters ? kMostClusterBits : 3; }

// Words of the longest list: one more where it may begin off 128 bytes.
int64_t longest_words(const VegasSelectParams& p) {
  const bool summed = p.dump > VEGAS_DUMP_TOKEN_WEIGHT;
  const bool aligned = !summed && reinterpret_cast<uintptr_t>(p.logits) % 128 == 0 && p.logits_stride[0] % 32 == 0 &&
                       p.logits_stride[1] % 32 == 0 && p.pool_after == 0;
  return (int64_t{p.max_seqlen_k} + 31) / 32 + !aligned;
}

Shape shape_for(int64_t lists, const VegasSelectParams& p, int num_sms) {
  const int64_t words = longest_words(p);
  int bits = 0;
  const auto share = [&] { return (words + (int64_t{1} << bits) - 1) >> bits; };
  const auto ctas = [&] { return lists << bits; };
  // Large clusters do not pack well: unless there is much work, no more than half of the multiprocessors take them.
  const auto idle = [&] { return bits < 2 || share() > 8 * kTurn ? num_sms : num_sms / 2; };
  const auto enough = [&] { return bits < 2 ? kTurn / 2 : kTurn; };
  while (bits < most_cluster_bits(num_sms) && (share() > kMostWords || (share() > enough() && 2 * ctas() <= idle()))) {
    ++bits;
  }
  const bool whole = ctas() <= (bits < 2 ? num_sms : num_sms / 2);  // a multiprocessor for every CTA
  const int warps = whole && share() > 4 * kTurn ? kWarps : kFewWarps;
  return {bits, static_cast<int>((share() + kRowWords * warps - 1) / (kRowWords * warps)), warps};
}

cudaError_t launch(const VegasSelectParams& p, const Wave& wave, cudaStream_t stream) {
  int num_sms;
  cudaError_t error = num_multiprocessors(&num_sms);
  if (error != cudaSuccess) return error;
  const Shape shape = shape_for(wave.lists, p, num_sms);
  void (*const kernel)(VegasSelectParams, Wave, Shape) =
      p.pool_before + p.pool_after > 0 ? select_kernel<true> : select_kernel<false>;
  // The same for every call, since threads of the host share it.
  constexpr int kMostBytes = shared_bytes({kMostClusterBits, kMostWords / (kRowWords * kWarps), kWarps});
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  const int cluster = 1 << shape.cluster_bits;
  const LaunchGrid grid = {static_cast<unsigned>(wave.lists * cluster), 32 * shape.warps, shared_bytes(shape), cluster};
  return launch_dependent(kernel, grid, stream, p, wave, shape);
}

}  // namespace
}  // namespace selection::hopper

bool select_hopper_takes(const VegasSelectParams& p) {
  using namespace selection::hopper;
  int num_sms;
  if (num_multiprocessors(&num_sms) != cudaSuccess) return false;
  const int64_t reach = int64_t{p.pool_before} + p.pool_after;
  return reach <= kMaxReach && longest_words(p) <= int64_t{kMostWords} << most_cluster_bits(num_sms);
}

int select_hopper(const VegasSelectParams& p, void* stream) {
  return selection::select_in_waves(p, selection::hopper::launch, true, stream);
}

}  // namespace vegas_ops
