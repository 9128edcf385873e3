"""Build facts of libvegas.so."""

def version() -> str: ...
def cpu_isa() -> str:
    """Instruction set of the CPU kernels on this machine."""

def cuda_architectures() -> str:
    """Empty for a build without CUDA."""

def workspace_bytes(op: int, *bounds_and_cuda: int) -> int:
    """Bytes that `torch.ops.vegas_ops.new_workspace` allocates for the bounds, in its order."""

def kernel_name(op: int, cuda: bool) -> str | None:
    """Name of the kernel that serves op 0 (verify), 1 (select) or 2 (sparse); None if there is none."""
