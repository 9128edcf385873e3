"""The rules for every reported fault: outputs poisoned, twice in a row, and on a side stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from op_cases import SENTINEL, SparseCase, VerifyCase
from op_checks import check_sparse, check_verify
from torch import Tensor

import vegas_ops


def on_side_stream(device: torch.device, check: Callable[[], object]) -> None:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        check()
    side.synchronize()


def everywhere(device: torch.device, check: Callable[[], object]) -> None:
    """Run a check twice on the current stream, and once on a side stream where there is one."""
    check()
    check()
    if device.type == "cuda":
        on_side_stream(device, check)


def check_case(case: VerifyCase | SparseCase) -> dict[str, Tensor]:
    """Compare one call with its oracle (which runs it several times), and again on a side stream."""
    check = check_verify if isinstance(case, VerifyCase) else check_sparse
    got = check(case)  # type: ignore[operator]
    if case.device.type == "cuda":
        on_side_stream(case.device, lambda: check(case))  # type: ignore[operator]
    return got


def verify(case: VerifyCase) -> dict[str, Tensor]:
    """One call over poisoned outputs."""
    outputs = case.outputs(SENTINEL)
    vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs, **outputs)
    return outputs
