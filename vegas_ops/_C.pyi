"""Build facts of libvegas.so."""

def version() -> str: ...
def cpu_isa() -> str:
    """Instruction set of the CPU kernels on this machine."""

def cuda_architectures() -> str:
    """Empty for a build without CUDA."""

def workspace_bytes(
    op: int,
    max_batch: int,
    max_q_len: int,
    max_seqlen_k: int,
    max_k: int,
    layers: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    cuda: bool,
) -> int:
    """Bytes that `torch.ops.vegas_ops.new_workspace` allocates."""

def kernel_name(op: int, cuda: bool) -> str | None:
    """Name of the kernel that serves op 0 (verify), 1 (select) or 2 (sparse); None if there is none."""
