// Facts about this build, and the choice of CPU kernels.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "common/backends.h"

namespace vegas_ops {

#if defined(__x86_64__)
namespace v4 {
extern const CpuKernels kernels;
}
namespace v3 {
extern const CpuKernels kernels;
}
#endif
namespace baseline {
extern const CpuKernels kernels;
}

namespace {

const CpuKernels& choose() {
#if defined(__x86_64__)
  // The levels of the x86-64 psABI that the kernel files are compiled for, by the features that compilers of all
  // versions can ask for.
  bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                __builtin_cpu_supports("bmi2");
  bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq");
  const char* wanted = std::getenv("VEGAS_OPS_ISA");
  if (wanted && !std::strcmp(wanted, baseline::kernels.isa)) return baseline::kernels;
  if (wanted && !std::strcmp(wanted, v3::kernels.isa)) has_v4 = false;
  if (has_v4) return v4::kernels;
  if (has_v3) return v3::kernels;
#endif
  return baseline::kernels;
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace vegas_ops

const char* vegas_version(void) { return VEGAS_VERSION; }
const char* vegas_cpu_isa(void) { return vegas_ops::cpu_kernels().isa; }

const char* vegas_cuda_architectures(void) {
#ifdef VEGAS_WITH_CUDA
  return VEGAS_CUDA_ARCHITECTURES;
#else
  return "";
#endif
}

const char* vegas_kernel_name(VegasOp op, VegasDevice device) {
  if (device == VEGAS_CPU) return vegas_cpu_isa();
#ifdef VEGAS_WITH_HOPPER
  if (op != VEGAS_OP_SPARSE && vegas_ops::on_hopper()) return "hopper";
#endif
  (void)op;
#ifdef VEGAS_WITH_CUDA
  return "portable";
#else
  return nullptr;
#endif
}

size_t vegas_workspace_bytes(VegasOp op, const VegasBounds* bounds, VegasDevice device) {
  size_t most = 0;
#ifdef VEGAS_WITH_CUDA
  if (device == VEGAS_CUDA && op == VEGAS_OP_SELECT) return vegas_ops::select_portable_workspace(*bounds);
  // Fewer KV heads have more query heads each, which may fill their tiles worse.
  VegasBounds calls = *bounds;
  calls.num_heads_kv = std::min(calls.num_heads_kv, calls.num_heads_q);
  for (; device == VEGAS_CUDA && calls.num_heads_kv > 0; --calls.num_heads_kv) {
    const size_t bytes =
        op == VEGAS_OP_VERIFY ? vegas_ops::verify_cuda_workspace(calls) : vegas_ops::sparse_portable_workspace(calls);
    most = std::max(most, bytes);
  }
#else
  (void)op, (void)bounds, (void)device;
#endif
  return most;
}
