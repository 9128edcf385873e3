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
constexpr int most_cluster_bits(int num_sms) { return num_sms >= kFullClusters ? kMostClusterBits : 3; }

// Places of the longest list. Where groups of 4 places may begin off 16 bytes, it has up to three more than scores.
int64_t most_places(const VegasSelectParams& p) {
  const bool summed = p.dump > VEGAS_DUMP_TOKEN_WEIGHT;  // into aligned rows
  const bool aligned = summed || (reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.logits_stride[0] % 4 == 0 &&
                                  p.logits_stride[1] % 4 == 0);
  return int64_t{p.max_seqlen_k} + (aligned && p.pool_after % 4 == 0 ? 0 : 3);
}

// As many CTAs per list as it takes to read it in a few turns, and more where multiprocessors are idle.
Shape shape_for(int64_t lists, const VegasSelectParams& p, int num_sms) {
  const int row = row_places(p.pool_before + p.pool_after);
  const int64_t rows = (most_places(p) + row - 1) / row;
  int bits = 0;
  const auto share = [&] { return (rows + (int64_t{1} << bits) - 1) >> bits; };
  const auto ctas = [&] { return lists << bits; };
  // Large clusters do not pack well: for little work, no more than half of the multiprocessors have to take them.
  const auto idle = [&] { return bits < 2 || share() > 6 * kWarps ? num_sms : num_sms / 2; };
  while (bits < most_cluster_bits(num_sms) &&
         (share() > kFewTurns * kWarps || (share() > kWarps && 2 * ctas() <= idle()))) {
    ++bits;
  }
  // Nor do two of their CTAs on every multiprocessor: rather one, and all at once, than a few after the others.
  if (bits > 1 && 16 * ctas() > 15 * 2 * num_sms && ctas() <= 2 * num_sms && 2 * share() <= kMostTurns * kWarps) --bits;
  return {bits, static_cast<int>((share() + kWarps - 1) / kWarps)};
}

using Kernel = void (*)(VegasSelectParams, Wave, Shape);
constexpr Kernel kKernels[kMaxReach + 1] = {select_kernel<0>, select_kernel<1>, select_kernel<2>,
                                            select_kernel<3>, select_kernel<4>, select_kernel<5>,
                                            select_kernel<6>, select_kernel<7>, select_kernel<8>};

cudaError_t launch(const VegasSelectParams& p, const Wave& wave, cudaStream_t stream) {
  int num_sms;
  cudaError_t error = num_multiprocessors(&num_sms);
  if (error != cudaSuccess) return error;
  const Shape shape = shape_for(wave.lists, p, num_sms);
  const Kernel kernel = kKernels[p.pool_before + p.pool_after];
  // The same for every call, since threads of the host share it.
  constexpr int kMostBytes = shared_bytes({kMostClusterBits, kMostTurns});
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  const int cluster = 1 << shape.cluster_bits;
  const LaunchGrid grid = {static_cast<unsigned>(wave.lists * cluster), kThreads, shared_bytes(shape), cluster};
  return launch_dependent(kernel, grid, stream, p, wave, shape);
}

}  // namespace
}  // namespace selection::hopper

bool select_hopper_takes(const VegasSelectParams& p) {
  using namespace selection::hopper;
  int num_sms;
  if (num_multiprocessors(&num_sms) != cudaSuccess) return false;
  const int64_t reach = int64_t{p.pool_before} + p.pool_after;
  return reach <= kMaxReach && most_places(p) <= int64_t{kMostTurns * kWarps * row_places(kMaxReach)}
                                                     << most_cluster_bits(num_sms);
}

int select_hopper(const VegasSelectParams& p, void* stream) {
  return selection::select_in_waves(p, selection::hopper::launch, true, stream);
}

}  // namespace vegas_ops
