"""Whether Triton can compile for a GPU here: it needs a driver that it knows and a C compiler."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import logging
from functools import cache

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None


def works(device: torch.device) -> bool:
    """Compiles and runs a kernel of one store, once a device; says why where that fails."""
    if triton is None or device.type != "cuda":
        return False
    return _works(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _works(index: int) -> bool:
    try:
        with torch.cuda.device(index):
            x = torch.zeros(1, dtype=torch.int32, device="cuda")
            _store_one[(1,)](x)
            return bool(x.item() == 1)
    except Exception as error:
        logging.getLogger(__name__).warning("kernels of torch instead of Triton's: %s", error)
        return False


if triton is not None:

    @triton.jit
    def _store_one(x):
        tl.store(x, 1)
