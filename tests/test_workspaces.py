"""One workspace for calls of any shape within its bounds: what one leaves there, the next must not mind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from op_cases import SENTINEL, SparseCase, VerifyCase, case_dtype
from op_checks import assert_same_bits

import vegas_ops
from vegas_ops import flash_attn_with_logit_dump as verify

# Of keys: dumps are so wide that on Hopper CTAs exchange their heads' parts through the workspace.
BOUND = 70_000
CHECKED = os.environ.get("VEGAS_OPS_CHECK") == "1"  # which refuses captures


@pytest.mark.parametrize("rows", (1, 9, 20, 33))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_smaller_heads_are_served(device: torch.device, head_dim: int, rows: int) -> None:
    workspace = vegas_ops.make_workspace(
        "flash_attn_with_logit_dump", max_batch=1, max_q_len=33, max_seqlen_k=3000, num_heads_q=16,
        num_heads_kv=2, head_dim=256, device=device,
    )  # fmt: skip
    case = VerifyCase(
        seed=rows, device=device, dtype=torch.bfloat16, heads_q=16, head_dim=head_dim, lengths=(3000,),
        q_lens=(rows,), dump="token",
    )  # fmt: skip
    for options in ({}, {"batch_invariant": True}, {"num_splits": 16}):
        expected = verify(*case.args, **case.kwargs, **options)
        got = verify(*case.args, **case.kwargs, **options, workspace=workspace)
        assert_same_bits(got.out, expected.out, "out")


def test_calls_follow_each_other(device: torch.device) -> None:
    workspace = vegas_ops.make_workspace(
        "flash_attn_with_logit_dump", max_batch=4, max_q_len=8, max_seqlen_k=2000, num_heads_q=8,
        num_heads_kv=2, head_dim=128, device=device,
    )  # fmt: skip
    for seed, lengths in enumerate(((2000, 5), (17, 1999), (1, 1))):
        case = VerifyCase(
            seed=seed, device=device, dtype=torch.bfloat16, heads_q=8, head_dim=128,
            lengths=lengths, q_lens=(8, 1)[: len(lengths)], dump="token",
        )  # fmt: skip
        expected = verify(*case.args, **case.kwargs, **case.outputs(SENTINEL))
        got = verify(*case.args, **case.kwargs, **case.outputs(SENTINEL), workspace=workspace)
        assert_same_bits(got.out, expected.out, "out")
        assert got.logits is not None and expected.logits is not None
        assert_same_bits(got.logits, expected.logits, "logits")


def calls(device: torch.device) -> list[VerifyCase]:
    """Long enough that the exchange goes round several times, and short; every way to share the work."""
    long = (26000, 18000, 70, 900) if device.type == "cuda" else (900, 500, 70, 900)
    cases = []
    for n, (heads_kv, head_dim, rows, options) in enumerate(
        (
            (8, 64, 3, {}), (16, 128, 1, {}), (8, 128, 8, {"window_size": (700, 0)}), (3, 64, 9, {}),
            (8, 64, 2, {"batch_invariant": True}), (16, 64, 4, {"num_splits": 5}), (1, 128, 5, {}),
        )
    ):  # fmt: skip
        for lengths, bound in ((long, BOUND), ((40, 7, 0, 133), 133)):
            dump = ("token", "token_weight", "kv_head")[n % 3] if bound == BOUND else "token_weight"
            cases.append(
                VerifyCase(
                    seed=n, device=device, dtype=case_dtype(device), fp8=n % 4 == 1, heads_q=2 * heads_kv,
                    heads_kv=heads_kv, head_dim=head_dim, page_size=64, lengths=lengths,
                    q_lens=(rows, 1, rows, 0), dump=dump, wider=bound - max(lengths),
                    options={"max_seqlen_k": bound, **options},
                )
            )  # fmt: skip
    return cases


def test_calls_of_any_shape_take_turns(device: torch.device) -> None:
    """With calls that are refused and captures that are thrown away among them."""
    workspace = vegas_ops.make_workspace(
        "flash_attn_with_logit_dump", max_batch=4, max_q_len=9, max_seqlen_k=BOUND, num_heads_q=32,
        num_heads_kv=16, head_dim=128, device=device,
    )  # fmt: skip
    cases = calls(device)
    outputs = [case.outputs(SENTINEL) for case in cases]
    for case, alone in zip(cases, outputs, strict=True):
        verify(*case.args, **case.kwargs, **alone)
    order = random.Random(3)
    for turn in range(6 * len(cases)):
        i = order.randrange(len(cases))
        case, again = cases[i], cases[i].outputs(SENTINEL)
        call = {**case.kwargs, **again, "workspace": workspace}
        if turn % 3 == 1:
            with pytest.raises(ValueError, match="`seqused_k` must"):
                verify(*case.args[:4], case.seqused_k.long(), **call)
        if turn % 5 == 2 and device.type == "cuda" and not CHECKED:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                verify(*case.args, **call)
        verify(*case.args, **call)
        for name, tensor in again.items():
            assert_same_bits(tensor, outputs[i][name], f"{name} of call {turn}, case {i}")


def test_every_call_leaves_zeros(cuda: torch.device) -> None:
    """Where CTAs await each other's words, VEGAS_OPS_CHECK=1 refuses a workspace without them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "turns and cuda",
    ]
    environment = {**os.environ, "VEGAS_OPS_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("op", ("flash_attn_with_logit_dump", "sparse_paged_decode"))
@pytest.mark.parametrize("bytes_given", (0, 16, 1024))
def test_too_small_a_workspace_is_refused(cuda: torch.device, op: str, bytes_given: int) -> None:
    common: dict[str, Any] = {"device": cuda, "dtype": torch.bfloat16, "head_dim": 128}
    case: VerifyCase | SparseCase = VerifyCase(lengths=(2000,), q_lens=(8,), dump="token", **common)
    if op == "sparse_paged_decode":
        case = SparseCase(lengths=(2000,), tail_starts=(100,), **common)
    outputs = case.outputs(SENTINEL)
    workspace = torch.zeros(bytes_given, dtype=torch.uint8, device=cuda)
    call = {**case.kwargs, "num_splits": 4, **outputs, "workspace": workspace}
    with pytest.raises(ValueError, match="`workspace` must have at least"):
        getattr(vegas_ops, op)(*case.args, **call)
    for name, tensor in outputs.items():
        assert bool((tensor == SENTINEL).all()), f"{name} was written"


@pytest.mark.parametrize("dump", ("none", "token", "token_weight", "kv_head"))
@pytest.mark.parametrize(("heads", "heads_kv", "head_dim"), [(32, 8, 64), (6, 3, 128), (8, 1, 96)])
@pytest.mark.parametrize("options", ({}, {"batch_invariant": True}, {"num_splits": 3}))
def test_a_loose_bound_changes_no_bit(
    device: torch.device, heads: int, heads_kv: int, head_dim: int, dump: str, options: dict[str, Any]
) -> None:
    """Calls that can be large have kernels of their own, whatever the lengths turn out to be."""
    bound = 200_000
    lengths, q_lens = (3000, 63, 0, 190, 700), (4, 1, 2, 0, 7)
    case = VerifyCase(
        seed=5, device=device, dtype=case_dtype(device), heads_q=heads, heads_kv=heads_kv, head_dim=head_dim,
        lengths=lengths, q_lens=q_lens, dump=dump, with_sinks=True, options=options,
    )  # fmt: skip
    tight = case.outputs(SENTINEL)
    loose = case.outputs(SENTINEL, width=bound)
    verify(*case.args, **case.kwargs, **tight)
    verify(*case.args, **{**case.kwargs, "max_seqlen_k": bound}, **loose)
    for name, expected in tight.items():
        got = loose[name]
        if name == "logits":
            assert bool((got[..., max(lengths) :] == SENTINEL).all())
            got = got[..., : max(lengths)].contiguous()
        assert_same_bits(got, expected, name)
