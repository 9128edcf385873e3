// vegas_ops._C: facts about the build, without torch.
#include <pybind11/pybind11.h>

#include "vegas_ops/api.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build facts of libvegas.so";
  m.def("version", [] { return vegas_version(); });
  m.def("cpu_isa", [] { return vegas_cpu_isa(); }, "Instruction set of the CPU kernels on this machine.");
  m.def("cuda_architectures", [] { return vegas_cuda_architectures(); }, "\"\" for a build without CUDA.");
  m.def(
      "workspace_bytes",
      [](int op, int max_batch, int max_q_len, int max_seqlen_k, int max_k, int layers, int num_heads_q,
         int num_heads_kv, int head_dim, bool cuda) {
        VegasBounds bounds{max_batch, max_q_len, max_seqlen_k, max_k, layers, num_heads_q, num_heads_kv, head_dim};
        return vegas_workspace_bytes(static_cast<VegasOp>(op), &bounds, cuda ? VEGAS_CUDA : VEGAS_CPU);
      },
      "Bytes that torch.ops.vegas_ops.new_workspace allocates.");
  m.def("kernel_name", [](int op, bool cuda) -> pybind11::object {
    const char* name = vegas_kernel_name(static_cast<VegasOp>(op), cuda ? VEGAS_CUDA : VEGAS_CPU);
    return name ? pybind11::object(pybind11::str(name)) : pybind11::none();
  });
}
