"""Which devices are there."""

from __future__ import annotations

import torch

from vegas_ops.arguments import check_kind


def present(device: torch.device | str | int) -> torch.device:
    """The device, or ValueError for a GPU that torch does not have."""
    check_kind("device", device, (torch.device, str, int), "a torch.device or the name of one")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):  # of a bool
        raise ValueError(f"`device` must be cpu, cuda or cuda:N, got {device!r}") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        kind = "CUDA" if torch.version.cuda else "CPU-only"
        gpus = f"{torch.cuda.device_count()} GPUs, torch is a {kind} build"
        raise ValueError(f"`device` must be present, got {str(device)!r} ({gpus})")
    return found
