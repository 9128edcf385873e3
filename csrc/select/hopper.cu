// topk_aggregate_logits on Hopper: one launch for a call whose scores are there, one more where planes are summed.
#include <atomic>

#include "common/backends.h"
#include "common/cuda_launch.h"
#include "common/status.h"
#include "select/hopper.cuh"
#include "select/hopper_resident.cuh"

namespace vegas_ops {
namespace selection::hopper {
namespace {

constexpr int kFullClusters = 100;  // multiprocessors of a GPU that schedules clusters of 16
constexpr int kMostClusterBits = 4;
constexpr int kMostWideCluster = 8;  // where threads have several groups
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

// Of a CTA.
int64_t slice_words(const VegasSelectParams& p, int cluster_bits) {
  return (longest_words(p) + (int64_t{1} << cluster_bits) - 1) >> cluster_bits;
}

Shape shape_for(int64_t lists, const VegasSelectParams& p, int num_sms) {
  int bits = 0;
  const auto share = [&] { return slice_words(p, bits); };
  const auto ctas = [&] { return lists << bits; };
  // Clusters of more than 2 do not pack well: an eighth of the multiprocessors takes none, and unless there is much
  // work, half of them shall not.
  const int packed = num_sms - num_sms / 8;
  const auto room = [&] { return bits < 1 ? num_sms : share() > 8 * kTurn ? packed : num_sms / 2; };
  const auto enough = [&] { return bits < 2 ? kTurn / 2 : kTurn; };
  while (bits < most_cluster_bits(num_sms) && (share() > kMostWords || (share() > enough() && 2 * ctas() <= room()))) {
    ++bits;
  }
  const bool whole = ctas() <= (bits < 2 ? num_sms : packed);  // a multiprocessor for every CTA
  const int warps = whole && share() > 4 * kTurn ? kWarps : kFewWarps;
  return {bits, static_cast<int>((share() + kRowWords * warps - 1) / (kRowWords * warps)), warps};
}

// Of any size, with as much shared memory as any call takes: the same for every call, since threads of the host share
// it.
template <class Kernel>
cudaError_t allow_clusters(Kernel kernel, int most_bytes) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return error;
}

// CTAs of a cluster that hold a list in their registers, threads of each, and groups of scores of each thread.
struct ResidentShape {
  int ctas;
  int threads;
  int rows;
};

using ResidentKernel = void (*)(VegasSelectParams, Wave, uint32_t);

ResidentKernel resident_kernel_for(int reach, int rows) {
  using namespace resident;
  constexpr ResidentKernel kKernels[3][kMostRows] = {
      {resident_kernel<kNone, 1>, resident_kernel<kNone, 2>, resident_kernel<kNone, 3>},
      {resident_kernel<kLookAhead, 1>, resident_kernel<kLookAhead, 2>, resident_kernel<kLookAhead, 3>},
      {resident_kernel<kAny, 1>, resident_kernel<kAny, 2>, resident_kernel<kAny, 3>}};
  return kKernels[reach == kNone ? 0 : reach == kLookAhead ? 1 : 2][rows - 1];
}

cudaError_t allow_resident(ResidentKernel kernel, int rows) {
  return allow_clusters(kernel, resident::shared_bytes(kMaxCluster, kThreads, rows));
}

// How many clusters run at once whose CTAs have a multiprocessor each. Asked once, for it is about the device's layout;
// other devices of the process are taken to be alike, which costs time if they are not.
int clusters_at_once(int ctas) {
  static std::atomic<int> known[kMaxCluster + 1];  // one more than the answer; 0 until it is there
  int count = known[ctas].load(std::memory_order_relaxed) - 1;
  if (count >= 0) return count;
  constexpr int kRows = resident::kMostRows;
  const ResidentKernel kernel = resident_kernel_for(resident::kAny, kRows);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = ctas;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = resident::shared_bytes(ctas, kThreads, kRows);
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (allow_resident(kernel, kRows) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // the call takes another kernel
    count = 0;
  }
  known[ctas].store(count + 1, std::memory_order_relaxed);
  return count;
}

// Whether clusters can hold the lists of a wave. Small CTAs have short steps, large clusters long exchanges; where
// lists are many, a multiprocessor has one CTA, and large clusters no more than half of them. Threads have several
// groups where that is what it takes and CTAs of the other kernel would have no fewer scores; clusters then are of any
// size of which as many run at once as there are lists.
bool find_resident_shape(const VegasSelectParams& p, const Wave& wave, int num_sms, ResidentShape* shape) {
  if (p.pool_after > 0 || p.pool_before > resident::kMostReach) return false;
  const auto aligned = [](const void* scores, int64_t stride, int64_t other_stride) {
    return reinterpret_cast<uintptr_t>(scores) % 32 == 0 && stride % 8 == 0 && other_stride % 8 == 0;
  };
  const bool whole_groups =
      wave.source ? aligned(wave.source, wave.stride, 0) : aligned(p.logits, p.logits_stride[0], p.logits_stride[1]);
  const int64_t places = int64_t{p.max_seqlen_k} + (whole_groups ? 0 : resident::kGroup - 1);
  for (int threads = 256, most_bits = 2; threads <= kThreads; threads *= 2, ++most_bits) {
    const int64_t most = int64_t{resident::kGroup} * threads;
    int bits = 0;
    while (most << bits < places && bits < most_bits) ++bits;
    const int64_t ctas = int64_t{wave.lists} << bits;
    if (most << bits >= places && bits <= most_cluster_bits(num_sms) && ctas <= (bits < 2 ? num_sms : num_sms / 2)) {
      *shape = {1 << bits, threads, 1};
      return true;
    }
  }
  const int64_t sliced = 32 * slice_words(p, shape_for(wave.lists, p, num_sms).cluster_bits);
  for (int rows = 2; rows <= resident::kMostRows; ++rows) {
    const int64_t most = int64_t{resident::kGroup} * rows * kThreads, ctas = (places + most - 1) / most;
    if (ctas <= kMostWideCluster && ctas * wave.lists <= num_sms && (places + ctas - 1) / ctas <= sliced &&
        wave.lists <= clusters_at_once(static_cast<int>(ctas))) {
      *shape = {static_cast<int>(ctas), kThreads, rows};
      return true;
    }
  }
  return false;
}

cudaError_t launch_resident(const VegasSelectParams& p, const Wave& wave, const ResidentShape& shape,
                            cudaStream_t stream) {
  const ResidentKernel kernel = resident_kernel_for(p.pool_before, shape.rows);
  const cudaError_t error = allow_resident(kernel, shape.rows);
  if (error != cudaSuccess) return error;
  const LaunchGrid grid = {static_cast<unsigned>(wave.lists * shape.ctas), shape.threads,
                           resident::shared_bytes(shape.ctas, shape.threads, shape.rows), shape.ctas};
  return launch_dependent(kernel, grid, stream, p, wave, static_cast<uint32_t>(shape.ctas));
}

cudaError_t launch(const VegasSelectParams& p, const Wave& wave, cudaStream_t stream) {
  int num_sms;
  cudaError_t error = num_multiprocessors(&num_sms);
  if (error != cudaSuccess) return error;
  ResidentShape resident_shape;
  if (find_resident_shape(p, wave, num_sms, &resident_shape)) return launch_resident(p, wave, resident_shape, stream);
  const Shape shape = shape_for(wave.lists, p, num_sms);
  void (*const kernel)(VegasSelectParams, Wave, Shape) =
      p.pool_before + p.pool_after > 0 ? select_kernel<true> : select_kernel<false>;
  constexpr int kTurns = kMostWords / (kRowWords * kWarps);
  constexpr int kMostBytes = shared_bytes({kMostClusterBits, kTurns, kWarps});
  static_assert(kMostBytes <= 227 * 1024 && shared_bytes({kMostClusterBits - 1, kTurns, kWarps}) <= kMostBytes,
                "a CTA's shared memory must hold the longest slice");
  error = allow_clusters(kernel, kMostBytes);
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
