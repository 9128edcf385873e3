"""VEGAS_OPS_CHECK=1: what the ops would clamp, skip or mask is an error that names the argument.

The library reads the variable once, so all but the first test run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from op_cases import SENTINEL, SENTINEL_INDEX, SparseCase, VerifyCase, int32
from torch import Tensor

import vegas_ops

CHECKED = os.environ.get("VEGAS_OPS_CHECK") == "1"
under_the_check = pytest.mark.skipif(not CHECKED, reason="runs under VEGAS_OPS_CHECK=1, below")

BF16 = torch.bfloat16
Call = dict[str, Any]
Change = Callable[[Call], Any]


@pytest.mark.skipif(CHECKED, reason="is what starts the others")
def test_all_under_the_check(device: torch.device) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", device.type, __file__]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "VEGAS_OPS_CHECK": "1"}, timeout=300
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


def verify_call(device: torch.device) -> Call:
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(40, 0, 17), q_lens=(3, 0, 1), dump="kv_head",
        dump_rows=(3, 3, 2), dump_len=(38, -9, 17), extra_rows=1, spare_columns=1,
    )  # fmt: skip
    names = ("q", "k_cache", "v_cache", "block_table", "seqused_k")
    return {**dict(zip(names, case.args, strict=True)), **case.kwargs, **case.outputs(SENTINEL)}


def sparse_call(device: torch.device, logical: bool) -> Call:
    case = SparseCase(
        device=device, dtype=BF16, lengths=(40, 0, 17), counts=(9, 0, 3), tail_starts=(30, 0, 17),
        logical=logical, spare_columns=1,
    )  # fmt: skip
    names = ("q", "k_cache", "v_cache", "indices", "topk_length")
    return {**dict(zip(names, case.args, strict=True)), **case.kwargs, **case.outputs(SENTINEL)}


def select_call(device: torch.device) -> Call:
    return {
        "logits": torch.randn(3, 50, device=device),
        "dump": "token",
        "seqlens": int32((50, 0, 20), device),
        "k": int32((4, 9, 30), device),
        "max_k": 25,
        "cu_seqlens_q": int32((0, 3, 3, 5), device),
        "dump_rows": int32((3, 0, 2), device),
        "block_table": int32((7, 3, 2, 0, -1, -1, -1, -1, 1, 9, -1, -1), device).reshape(3, 4),
        "page_size": 16,
        "indices": torch.full((3, 25), SENTINEL_INDEX, dtype=torch.int32, device=device),
        "topk_length": torch.full((3,), SENTINEL_INDEX, dtype=torch.int32, device=device),
    }


def put(name: str, at: Any, value: int) -> Change:
    def change(call: Call) -> None:
        call[name] = call[name].clone()
        call[name][at] = value

    return change


def refused(op: Callable[..., Any], call: Call, change: Change, text: str) -> None:
    change(call)
    before = {
        name: value.clone()
        for name, value in call.items()
        if name in ("out", "lse", "logits", "guide_lse", "indices", "topk_length")
        and isinstance(value, Tensor)
    }
    with pytest.raises(ValueError, match=text):
        op(**call)
    for name, value in before.items():
        torch.testing.assert_close(call[name], value, rtol=0, atol=0, equal_nan=True)


VERIFY: list[tuple[str, Change]] = [
    ("`cu_seqlens_q` .* got 2", put("cu_seqlens_q", 2, 2)),
    ("`cu_seqlens_q` .* got -1", put("cu_seqlens_q", 0, -1)),
    ("`cu_seqlens_q` .* got 6", put("cu_seqlens_q", 3, 6)),
    ("`(max_seqlen_q|cu_seqlens_q)` .* request 0", lambda c: c.update(max_seqlen_q=2)),
    ("`seqused_k` .* got 65 for request 2", put("seqused_k", 2, 65)),
    ("`seqused_k` .* got -1 for request 2", put("seqused_k", 2, -1)),
    ("`seqused_k` .* got 40 for request 0", lambda c: c.update(max_seqlen_k=39)),
    ("`block_table` .* got -1 in column 1 of request 2", put("block_table", (2, 1), -1)),
    ("`block_table` .* got 2147483647 in column 0 of request 0", put("block_table", (0, 0), 2**31 - 1)),
    ("`block_table` .* got 7 in column 2 of request 0", put("block_table", (0, 2), 7)),
    ("`dump_rows` .* got 4 for request 2", put("dump_rows", 2, 4)),
    ("`dump_len` .* got 18 for request 2", put("dump_len", 2, 18)),
    ("`dump_len` .* got -1 for request 0", put("dump_len", 0, -1)),
]
SPARSE: list[tuple[bool, str, Change]] = [
    (False, "`seqused_k` .* got 70 for request 0", put("seqused_k", 0, 70)),
    (False, "`seqused_k` .* got -3 for request 2", put("seqused_k", 2, -3)),
    (False, "`topk_length` .* got 13 for request 0", put("topk_length", 0, 13)),
    (False, "`topk_length` .* got -1 for request 2", put("topk_length", 2, -1)),
    (False, "`tail_start` .* got -1 for request 0", put("tail_start", 0, -1)),
    (False, "`tail_start` .* got 18 for request 2", put("tail_start", 2, 18)),
    (False, "`block_table` .* got -1 in column 2 of request 0", put("block_table", (0, 2), -1)),
    (False, "`indices` .* got -1 in column 3 of request 0", put("indices", (0, 3), -1)),
    (False, "`indices` .* got 112 in column 3 of request 0", put("indices", (0, 3), 112)),
    (True, "`indices` .* got 30 in column 8 of request 0", put("indices", (0, 8), 30)),
    (True, "`indices` .* got -5 in column 0 of request 2", put("indices", (2, 0), -5)),
    (True, "`block_table` .* got -1 in column 0 of request 2", put("block_table", (2, 0), -1)),
]
SELECT: list[tuple[str, Change]] = [
    ("`seqlens` .* got 51 for request 0", put("seqlens", 0, 51)),
    ("`seqlens` .* got -1 for request 2", put("seqlens", 2, -1)),
    (
        "`seqlens` .* got 50.* request 0",
        lambda c: c.update(block_table=c["block_table"][:, :3].contiguous()),
    ),
    ("`cu_seqlens_q` .* got (2 for|3 before 2)", put("cu_seqlens_q", 2, 2)),
    ("`dump_rows` .* got 7 for request 0", put("dump_rows", 0, 7)),
    ("`k` .* got -1 for request 1", put("k", 1, -1)),
    ("`k` .* got 26 for request 0", put("k", 0, 26)),
    ("`k` .* got -2 for request 0", lambda c: c.update(k=-2)),
    ("`block_table` .* got -1 in column 1 of request 2", put("block_table", (2, 1), -1)),
]


CASES: list[tuple[Any, Callable[[torch.device], Call], str, Change]] = [
    *((vegas_ops.flash_attn_with_logit_dump, verify_call, *rest) for rest in VERIFY),
    *(
        (vegas_ops.sparse_paged_decode, partial(sparse_call, logical=logical), *rest)
        for logical, *rest in SPARSE
    ),
    *((vegas_ops.topk_aggregate_logits, select_call, *rest) for rest in SELECT),
]


@under_the_check
@pytest.mark.parametrize("number", range(len(CASES)))
def test_error_names_what_is_wrong(device: torch.device, number: int) -> None:
    op, call, text, change = CASES[number]
    op(**call(device))
    refused(op, call(device), change, text)


@under_the_check
def test_sums_name_what_is_wrong(device: torch.device) -> None:
    logits = torch.randn(2, 50, device=device)
    out = torch.full_like(logits, SENTINEL)
    for length in (-1, 51):
        call = {"logits": logits, "dump": "token", "seqlens": int32((50, length), device), "out": out}
        refused(vegas_ops.aggregate_logits, call, lambda c: None, f"`seqlens` .* got {length} for request 1")
        assert bool((out == SENTINEL).all())


@under_the_check
def test_pages_that_nothing_reads_may_be_gone(device: torch.device) -> None:
    """Tables of engines with sliding windows hold no pages to the left of them."""
    call = verify_call(device)
    call.update(window_size=(5, 0))
    call["block_table"][0, 0] = -1
    vegas_ops.flash_attn_with_logit_dump(**call)
    call["block_table"][0, 1] = -1  # token 31 is not seen by row 0 at 37
    vegas_ops.flash_attn_with_logit_dump(**call)
    refused(
        vegas_ops.flash_attn_with_logit_dump, call, lambda c: c.update(window_size=(6, 0)),
        "`block_table` .* got -1 in column 1 of request 0",
    )  # fmt: skip
    # What a request without keys carries says nothing.
    draft = sparse_call(device, logical=False)
    draft["indices"][1], draft["topk_length"][1], draft["tail_start"][1] = -7, 99, 50
    vegas_ops.sparse_paged_decode(**draft)


@under_the_check
def test_workspace_that_is_not_zero_is_refused(device: torch.device) -> None:
    workspace = vegas_ops.make_workspace(
        "flash_attn_with_logit_dump", max_batch=3, max_q_len=3, max_seqlen_k=64, num_heads_q=4,
        num_heads_kv=2, head_dim=64, device=device,
    )  # fmt: skip
    if device.type == "cpu" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("no words are exchanged there")
    call = verify_call(device)
    vegas_ops.flash_attn_with_logit_dump(**call, workspace=workspace)
    workspace[12] = 5
    with pytest.raises(ValueError, match=r"`workspace` must hold zeros .* got 0x5 in word 3"):
        vegas_ops.flash_attn_with_logit_dump(**call, workspace=workspace)


@under_the_check
def test_capture_is_refused(device: torch.device) -> None:
    """The check waits for the device; a call under capture says so, and the next call works."""
    if device.type == "cpu":
        pytest.skip("graphs are captured on a GPU")
    call = verify_call(device)
    vegas_ops.flash_attn_with_logit_dump(**call)
    torch.cuda.synchronize()
    refusal = pytest.raises(RuntimeError, match="VEGAS_OPS_CHECK=1 waits for the device")
    with refusal, torch.cuda.graph(torch.cuda.CUDAGraph()):
        vegas_ops.flash_attn_with_logit_dump(**call)
    vegas_ops.flash_attn_with_logit_dump(**call)
    torch.cuda.synchronize()
