"""Whether Triton can compile for a GPU here: it needs a driver that it knows and a C compiler."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import logging
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None
try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without programmatic dependent launch
    gdc_launch_dependents = gdc_wait = None


def works(device: torch.device) -> bool:
    """Compiles and runs a kernel of one store, once a device; says why where that fails."""
    if triton is None or device.type != "cuda":
        return False
    return _works(torch.cuda.current_device() if device.index is None else device.index)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Of a kernel with a constant `DEPENDENT`: from sm_90 on its launch may begin while the one before it
    ends (programmatic dependent launch). Such a kernel waits (`gdc_wait`) before it touches what another
    may have written or may still read, and every launch of it waits, so that the next one's wait is for
    all that came before."""
    if device.type != "cuda" or gdc_wait is None:
        return {"DEPENDENT": False}
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"DEPENDENT": True, "launch_pdl": True} if _from_sm90(index) else {"DEPENDENT": False}


@cache
def _from_sm90(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


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
