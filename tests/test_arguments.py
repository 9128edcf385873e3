"""Bad arguments of the three ops: an error that names the argument, and outputs left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import SENTINEL, SENTINEL_INDEX, VerifyCase, int32
from torch import Tensor

import vegas_ops
from vegas_ops import _C

BF16, F16 = torch.bfloat16, torch.float16
Call = dict[str, Any]
Change = Callable[[Call], Any]


def refused(op: Callable[..., Any], call: Call, name: str) -> None:
    outputs = ("out", "lse", "logits", "guide_lse", "indices", "topk_length")
    if op is vegas_ops.sparse_paged_decode:
        outputs = ("out", "lse")
    if op is vegas_ops.topk_aggregate_logits:
        outputs = ("indices", "topk_length")
    before = {o: call[o].clone() for o in outputs if isinstance(call.get(o), Tensor)}
    with pytest.raises((ValueError, TypeError), match=f"`{name}`"):
        op(**call)
    for output, value in before.items():
        assert torch.equal(call[output], value), f"{output} was written"


def with_stride(t: Tensor) -> Tensor:
    """Same values, last dimension not contiguous."""
    return torch.stack([t, t], -1)[..., 0]


def base_verify(device: torch.device) -> Call:
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(40, 9), q_lens=(3, 1), dump="token_weight",
        with_sinks=True, spare_columns=0,
    )  # fmt: skip
    names = ("q", "k_cache", "v_cache", "block_table", "seqused_k")
    return {
        **dict(zip(names, case.args, strict=True)),
        **case.kwargs,
        "k_descale": torch.ones(2, device=device),
        "dump_rows": int32((3, 3), device),
        "dump_len": int32((5, 5), device),
        **case.outputs(SENTINEL),
    }


# (argument named by the error, what makes the call bad).
VERIFY: list[tuple[str, Change]] = [
    ("q", lambda c: c.update(q=c["q"].int())),
    ("q", lambda c: c.update(q=c["q"].double())),
    ("q", lambda c: c.update(q=c["q"][0])),
    ("q", lambda c: c.update(q=with_stride(c["q"]))),
    ("k_cache", lambda c: c.update(k_cache=c["k_cache"].to(F16))),
    ("k_cache", lambda c: c.update(k_cache=c["k_cache"].float())),
    ("k_cache", lambda c: c.update(k_cache=c["k_cache"][0])),
    ("k_cache", lambda c: c.update(k_cache=c["k_cache"][..., :48])),
    ("k_cache", lambda c: c.update(k_cache=with_stride(c["k_cache"]))),
    ("k_cache", lambda c: c.update(k_cache=c["k_cache"].new_zeros(6, 16, 2, 68)[..., :64])),
    ("k_cache", lambda c: c.update(k_cache=c["k_cache"].new_zeros(6, 16, 2, 72)[..., 4:68])),
    ("v_cache", lambda c: c.update(v_cache=c["v_cache"].to(F16))),
    ("v_cache", lambda c: c.update(v_cache=c["v_cache"][:, :8])),
    ("v_cache", lambda c: c.update(v_cache=c["v_cache"][:-1])),
    ("v_cache", lambda c: c.update(v_cache=c["v_cache"][..., 0])),
    ("v_cache", lambda c: c.update(v_cache=with_stride(c["v_cache"]))),
    ("block_table", lambda c: c.update(block_table=c["block_table"].long())),
    ("block_table", lambda c: c.update(block_table=c["block_table"][0])),
    ("block_table", lambda c: c.update(block_table=c["block_table"][:1])),
    ("block_table", lambda c: c.update(block_table=with_stride(c["block_table"]))),
    ("seqused_k", lambda c: c.update(seqused_k=c["seqused_k"].long())),
    ("seqused_k", lambda c: c.update(seqused_k=c["seqused_k"][None])),
    ("cu_seqlens_q", lambda c: c.update(cu_seqlens_q=c["cu_seqlens_q"].long())),
    ("cu_seqlens_q", lambda c: c.update(cu_seqlens_q=c["cu_seqlens_q"][:2])),
    ("max_seqlen_q", lambda c: c.update(max_seqlen_q=-1)),
    ("max_seqlen_k", lambda c: c.update(max_seqlen_k=-1)),
    ("max_seqlen_k", lambda c: c.update(max_seqlen_k=2**31)),
    ("softmax_scale", lambda c: c.update(softmax_scale=torch.tensor(0.1))),
    ("softmax_scale", lambda c: c.update(softmax_scale=float("nan"))),
    ("max_seqlen_q", lambda c: c.update(max_seqlen_q=None)),
    ("max_seqlen_k", lambda c: c.update(max_seqlen_k=torch.tensor(40))),
    ("softmax_scale", lambda c: c.update(softmax_scale="0.1")),
    ("window_size", lambda c: c.update(window_size=(-2, 0))),
    ("window_size", lambda c: c.update(window_size=128)),
    ("window_size", lambda c: c.update(window_size=(1, 2, 3))),
    ("softcap", lambda c: c.update(softcap=-1.0)),
    ("softcap", lambda c: c.update(softcap=float("nan"))),
    ("sinks", lambda c: c.update(sinks=c["sinks"].to(BF16))),
    ("sinks", lambda c: c.update(sinks=c["sinks"][:2])),
    ("k_descale", lambda c: c.update(k_descale=torch.ones(3, device=c["q"].device))),
    ("k_descale", lambda c: c.update(k_descale=c["k_descale"].double())),
    ("v_descale", lambda c: c.update(v_descale=torch.ones((3, 2), device=c["q"].device))),
    ("v_descale", lambda c: c.update(v_descale=torch.ones((), device=c["q"].device))),
    ("dump", lambda c: c.update(dump="tokens")),
    ("guide_lse_hint", lambda c: c.update(guide_lse_hint=None)),
    ("guide_lse_hint", lambda c: c.update(guide_lse_hint=c["guide_lse_hint"][:, :1])),
    ("guide_lse_hint", lambda c: c.update(guide_lse_hint=c["guide_lse_hint"].to(BF16))),
    ("dump_rows", lambda c: c.update(dump_rows=c["dump_rows"].long())),
    ("dump_rows", lambda c: c.update(dump_rows=c["dump_rows"][:1])),
    ("dump_len", lambda c: c.update(dump_len=c["dump_len"].long())),
    ("dump_len", lambda c: c.update(dump_len=c["dump_len"][:1])),
    ("num_splits", lambda c: c.update(num_splits=-1)),
    ("out", lambda c: c.update(out=c["out"].float())),
    ("out", lambda c: c.update(out=c["out"][:, :3])),
    ("out", lambda c: c.update(out=with_stride(c["out"]))),
    ("lse", lambda c: c.update(lse=c["lse"].T)),
    ("lse", lambda c: c.update(lse=c["lse"].to(BF16))),
    ("logits", lambda c: c.update(logits=c["logits"].to(BF16))),
    ("logits", lambda c: c.update(logits=c["logits"][:, :39])),
    ("logits", lambda c: c.update(logits=c["logits"][:1])),
    ("logits", lambda c: c.update(logits=with_stride(c["logits"]))),
    ("guide_lse", lambda c: c.update(guide_lse=c["guide_lse"][..., :1])),
    ("guide_lse", lambda c: c.update(guide_lse=c["guide_lse"].to(BF16))),
    ("q", lambda c: c.update(q=c["q"][:, :3].contiguous(), out=None, lse=None, sinks=None)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VERIFY)))
def test_verify_refuses(device: torch.device, number: int) -> None:
    name, change = VERIFY[number]
    call = base_verify(device)
    vegas_ops.flash_attn_with_logit_dump(**call)
    for output in ("out", "lse", "logits", "guide_lse"):
        call[output].fill_(SENTINEL)
    change(call)
    refused(vegas_ops.flash_attn_with_logit_dump, call, name)


# Integer tensors on the CPU are host data and are checked.
VERIFY_LENGTHS: list[tuple[str, Change]] = [
    ("seqused_k", lambda c: c.update(seqused_k=int32((49, 9)), max_seqlen_k=49, logits=None)),
    ("seqused_k", lambda c: c.update(seqused_k=int32((41, 9)))),
    ("seqused_k", lambda c: c.update(seqused_k=int32((40, -1)))),
    ("cu_seqlens_q", lambda c: c.update(cu_seqlens_q=int32((0, 3, 2)))),
    ("cu_seqlens_q", lambda c: c.update(cu_seqlens_q=int32((-1, 2, 3)))),
    ("cu_seqlens_q", lambda c: c.update(cu_seqlens_q=int32((0, 3, 5)))),
    ("(max_seqlen_q|cu_seqlens_q)", lambda c: c.update(max_seqlen_q=2)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VERIFY_LENGTHS)))
def test_verify_refuses_lengths_on_the_cpu(number: int) -> None:
    name, change = VERIFY_LENGTHS[number]
    call = base_verify(torch.device("cpu"))
    change(call)
    if name == "seqused_k":
        name = "(seqused_k|max_seqlen_k)"
    refused(vegas_ops.flash_attn_with_logit_dump, call, name)


def base_sparse(device: torch.device) -> Call:
    case = VerifyCase(device=device, dtype=BF16, lengths=(40, 9), q_lens=(1, 1), with_sinks=True)
    lse = torch.full((case.heads_q, 2), SENTINEL, device=device)
    return {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "indices": int32((0, 1, 2, 3), device).reshape(2, 2),
        "topk_length": int32((2, 2), device),
        "tail_start": int32((38, 8), device),
        "seqused_k": case.seqused_k,
        "block_table": case.block_table,
        "indices_are_slots": False,
        "sinks": case.sinks,
        "out": torch.full_like(case.q, SENTINEL),
        "lse": lse,
    }


SPARSE: list[tuple[str, Change]] = [
    ("q", lambda c: c.update(q=c["q"].int())),
    ("q", lambda c: c.update(q=c["q"][0])),
    ("q", lambda c: c.update(q=with_stride(c["q"]))),
    ("k_cache", lambda c: c.update(k_cache=c["k_cache"].to(F16))),
    ("k_cache", lambda c: c.update(k_cache=c["k_cache"][0])),
    ("v_cache", lambda c: c.update(v_cache=c["v_cache"][:, :, :1])),
    ("indices", lambda c: c.update(indices=c["indices"].long())),
    ("indices", lambda c: c.update(indices=c["indices"][:1])),
    ("indices", lambda c: c.update(indices=c["indices"][0, 0])),
    ("indices", lambda c: c.update(indices=with_stride(c["indices"]))),
    ("indices", lambda c: c.update(indices=c["indices"][:, None].expand(2, 3, 2).contiguous())),
    ("topk_length", lambda c: c.update(topk_length=c["topk_length"].long())),
    ("topk_length", lambda c: c.update(topk_length=c["topk_length"][:, None])),
    ("tail_start", lambda c: c.update(tail_start=c["tail_start"].long())),
    ("tail_start", lambda c: c.update(tail_start=c["tail_start"][:1])),
    ("seqused_k", lambda c: c.update(seqused_k=None)),
    ("seqused_k", lambda c: c.update(seqused_k=c["seqused_k"].long())),
    ("block_table", lambda c: c.update(block_table=None)),
    ("block_table", lambda c: c.update(block_table=None, tail_start=None)),
    ("block_table", lambda c: c.update(block_table=c["block_table"].long())),
    ("block_table", lambda c: c.update(block_table=c["block_table"][0])),
    ("window_size", lambda c: c.update(window_size=(3, 0), indices_are_slots=True)),
    ("window_size", lambda c: c.update(window_size=(3, -5))),
    ("softmax_scale", lambda c: c.update(softmax_scale=torch.tensor(0.1))),
    ("softcap", lambda c: c.update(softcap=-2.0)),
    ("sinks", lambda c: c.update(sinks=c["sinks"][:1])),
    ("k_descale", lambda c: c.update(k_descale=torch.ones(3, device=c["q"].device))),
    ("num_splits", lambda c: c.update(num_splits=-3)),
    ("out", lambda c: c.update(out=c["out"].float())),
    ("out", lambda c: c.update(out=c["out"][:1])),
    ("lse", lambda c: c.update(lse=c["lse"].T)),
    ("lse", lambda c: c.update(lse=c["lse"].double())),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SPARSE)))
def test_sparse_refuses(device: torch.device, number: int) -> None:
    name, change = SPARSE[number]
    call = base_sparse(device)
    vegas_ops.sparse_paged_decode(**call)
    call["out"].fill_(SENTINEL)
    call["lse"].fill_(SENTINEL)
    change(call)
    refused(vegas_ops.sparse_paged_decode, call, name)


@pytest.mark.parametrize("length", (-1, 65, 2**31 - 1))
def test_sparse_refuses_lengths_on_the_cpu(length: int) -> None:
    call = base_sparse(torch.device("cpu"))
    call["seqused_k"] = int32((length, 9))
    call["block_table"] = call["block_table"][:, :4].contiguous()
    refused(vegas_ops.sparse_paged_decode, call, "seqused_k")


def base_select(device: torch.device) -> Call:
    return {
        "logits": torch.randn(2, 2, 3, 50).to(BF16).to(device),
        "dump": "kv_head",
        "seqlens": int32((50, 20), device),
        "k": int32((4, 4), device),
        "max_k": 6,
        "mode": "weight",
        "guide_lse": torch.zeros((2, 2, 3), device=device),
        "cu_seqlens_q": int32((0, 2, 3), device),
        "dump_rows": int32((3, 3), device),
        "block_table": torch.arange(8, dtype=torch.int32, device=device).reshape(2, 4),
        "page_size": 16,
        "indices": torch.full((2, 6), SENTINEL_INDEX, dtype=torch.int32, device=device),
        "topk_length": torch.full((2,), SENTINEL_INDEX, dtype=torch.int32, device=device),
    }


def as_rows(c: Call) -> None:
    """Turn the call into one over a "rows" dump, whose weights need lse and cu_seqlens_q."""
    c.update(
        logits=c["logits"].transpose(1, 2).contiguous(), dump="rows", guide_lse=None,
        lse=torch.zeros((3, 3), device=c["logits"].device),
    )  # fmt: skip


SELECT: list[tuple[str, Change]] = [
    ("logits", lambda c: c.update(logits=c["logits"].to(F16))),
    ("logits", lambda c: c.update(logits=c["logits"][0, 0])),
    ("logits", lambda c: c.update(logits=c["logits"][0, 0, 0, 0])),
    ("logits", lambda c: c.update(logits=c["logits"][0, 0, 0], per_kv_head=True)),
    ("logits", lambda c: c.update(logits=c["logits"][:1])),
    ("logits", lambda c: c.update(logits=c["logits"][:, :1])),
    ("logits", lambda c: c.update(logits=with_stride(c["logits"]))),
    ("logits", lambda c: c.update(logits=c["logits"][:, 0, 0], dump="token", guide_lse=None)),
    ("dump", lambda c: c.update(dump="none")),
    ("dump", lambda c: c.update(dump="heads")),
    ("mode", lambda c: c.update(mode="weights")),
    ("seqlens", lambda c: c.update(seqlens=c["seqlens"].long())),
    ("seqlens", lambda c: c.update(seqlens=c["seqlens"][None])),
    ("k", lambda c: c.update(k=c["k"].long())),
    ("k", lambda c: c.update(k=c["k"][:1])),
    ("max_k", lambda c: c.update(max_k=-1)),
    ("guide_lse", lambda c: c.update(guide_lse=None)),
    ("guide_lse", lambda c: c.update(guide_lse=c["guide_lse"][..., :2])),
    ("guide_lse", lambda c: c.update(guide_lse=c["guide_lse"].double())),
    ("lse", lambda c: (as_rows(c), c.update(lse=None))),
    ("lse", lambda c: (as_rows(c), c.update(lse=c["lse"][:2]))),
    ("lse", lambda c: (as_rows(c), c.update(lse=c["lse"][0, 0]))),
    ("cu_seqlens_q", lambda c: (as_rows(c), c.update(cu_seqlens_q=None))),
    ("sinks", lambda c: (as_rows(c), c.update(sinks=torch.zeros(2, device=c["lse"].device)))),
    ("cu_seqlens_q", lambda c: c.update(cu_seqlens_q=c["cu_seqlens_q"][:2])),
    ("cu_seqlens_q", lambda c: c.update(cu_seqlens_q=c["cu_seqlens_q"].long())),
    ("dump_rows", lambda c: c.update(dump_rows=c["dump_rows"][:1])),
    ("pool", lambda c: c.update(pool=(-1, 0))),
    ("pool", lambda c: c.update(pool=6)),
    ("pool", lambda c: c.update(pool=(0, -1))),
    ("num_sink", lambda c: c.update(num_sink=-1)),
    ("num_recent", lambda c: c.update(num_recent=-1)),
    ("per_kv_head", lambda c: (as_rows(c), c.update(per_kv_head=True))),
    ("block_table", lambda c: c.update(block_table=c["block_table"].long())),
    ("block_table", lambda c: c.update(block_table=c["block_table"][:1])),
    ("page_size", lambda c: c.update(page_size=None)),
    ("page_size", lambda c: c.update(page_size=0)),
    ("page_size", lambda c: c.update(page_size=-16)),
    ("indices", lambda c: c.update(indices=c["indices"].long())),
    ("indices", lambda c: c.update(indices=c["indices"][:, :5])),
    ("indices", lambda c: c.update(indices=c["indices"][:1])),
    ("indices", lambda c: c.update(indices=with_stride(c["indices"]))),
    ("topk_length", lambda c: c.update(topk_length=c["topk_length"].long())),
    ("topk_length", lambda c: c.update(topk_length=c["topk_length"][:1])),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SELECT)))
def test_select_refuses(device: torch.device, number: int) -> None:
    name, change = SELECT[number]
    call = base_select(device)
    vegas_ops.topk_aggregate_logits(**call)
    call["indices"].fill_(SENTINEL_INDEX)
    call["topk_length"].fill_(SENTINEL_INDEX)
    change(call)
    refused(vegas_ops.topk_aggregate_logits, call, name)


@pytest.mark.parametrize(
    ("name", "change"),
    (
        ("out", {"out": torch.zeros(2, 49)}),
        ("out", {"out": torch.zeros(2, 50, dtype=torch.float64)}),
        ("seqlens", {"seqlens": torch.tensor([50, 20])}),
        ("mode", {"mode": "mean"}),
        ("logits", {"logits": torch.tensor(1.0)}),
        ("dump", {"dump": "none"}),
    ),
)
def test_aggregate_refuses(name: str, change: dict[str, Any]) -> None:
    call = base_select(torch.device("cpu"))
    kept = ("logits", "dump", "seqlens", "mode", "guide_lse", "cu_seqlens_q", "dump_rows")
    call = {argument: call[argument] for argument in kept}
    refused(vegas_ops.aggregate_logits, {**call, **change}, name)


def test_tensors_on_another_device(cuda: torch.device) -> None:
    """A mixture of devices is an error, for every tensor argument of every op."""
    bases = (
        (vegas_ops.flash_attn_with_logit_dump, base_verify(cuda)),
        (vegas_ops.sparse_paged_decode, base_sparse(cuda)),
        (vegas_ops.topk_aggregate_logits, base_select(cuda)),
    )
    for op, call in bases:
        for name, value in call.items():
            if isinstance(value, Tensor):
                moved = {**call, name: value.cpu()}
                with pytest.raises((ValueError, TypeError), match="`"):
                    op(**moved)


def test_missing_tensor_is_named() -> None:
    call = base_verify(torch.device("cpu"))
    call["block_table"] = None
    refused(vegas_ops.flash_attn_with_logit_dump, call, "block_table")
    call = base_select(torch.device("cpu"))
    call["seqlens"] = [50, 20]
    refused(vegas_ops.topk_aggregate_logits, call, "seqlens")


@pytest.mark.parametrize(
    "arguments",
    (
        {"op": "attention"},
        {"max_batch": -1},
        {"max_seqlen_k": -1},
        {"num_heads_q": 0},
    ),
)
def test_workspace_refuses(device: torch.device, arguments: dict[str, Any]) -> None:
    call: dict[str, Any] = {
        "op": "sparse_paged_decode", "max_batch": 2, "max_q_len": 1, "max_seqlen_k": 100,
        "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 64, "device": device,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=f"`{next(iter(arguments))}`"):
        vegas_ops.make_workspace(**{**call, **arguments})


ON_META = [
    (op, base, name)
    for op, base in (
        (vegas_ops.flash_attn_with_logit_dump, base_verify),
        (vegas_ops.sparse_paged_decode, base_sparse),
        (vegas_ops.topk_aggregate_logits, base_select),
    )
    for name, value in base(torch.device("cpu")).items()
    if isinstance(value, Tensor)
    and name not in ("out", "lse", "logits", "guide_lse", "indices", "topk_length")  # what may be written
]


@pytest.mark.parametrize(("op", "base", "name"), ON_META, ids=[f"{op.__name__}-{n}" for op, _, n in ON_META])
def test_one_meta_tensor_is_refused(op: Callable[..., Any], base: Callable[..., Call], name: str) -> None:
    """PyTorch takes such a call for one that wants no results."""
    call = base(torch.device("cpu"))
    call[name] = call[name].to("meta")
    # The first tensor sets the device; `k` is the op's `k_per_request` where it is a tensor.
    refused(op, call, {"q": "k_cache", "k": "k_per_request"}.get(name, name))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU needs no workspace")
@pytest.mark.parametrize("op", range(3), ids=("verify", "select", "sparse"))
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_on_a_gpu_a_workspace_serves_every_call_within_its_bounds(op: int, data: st.DataObject) -> None:
    """What smaller bounds need, a call's own among them, larger ones have."""
    most = (80, 40, 200_000, 9_000, 4, 64, 16, 256)  # in the order of `make_workspace`
    bounds = [data.draw(st.integers(1, value)) for value in most]
    call = [data.draw(st.integers(1, value)) for value in bounds]
    assert _C.workspace_bytes(op, *bounds, True) >= _C.workspace_bytes(op, *call, True)


def halves(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two views that take turns in one buffer and share nothing."""
    both = torch.full((*like.shape[:-2], 2 * like.shape[-2], like.shape[-1]), SENTINEL).to(like)
    return both[..., : like.shape[-2], :], both[..., like.shape[-2] :, :]


def floats_of(t: Tensor, *shape: int) -> Tensor:
    """The beginning of a tensor's memory under another name."""
    return t.view(-1).view(torch.float32)[: math.prod(shape)].view(shape)


# (output named by the error, what makes it share memory).
OVERLAPS: list[tuple[str, str, Change]] = [
    ("verify", "out", lambda c: c.update(out=c["q"])),
    ("verify", "out", lambda c: c.update(out=c["k_cache"].view(-1)[: c["q"].numel()].view(c["q"].shape))),
    ("verify", "out", lambda c: c.update(out=c["out"][:1].expand_as(c["out"]))),
    ("verify", "lse", lambda c: c.update(lse=c["logits"].view(-1)[:16].view(4, 4))),
    ("verify", "logits", lambda c: c.update(logits=c["logits"][:1].expand(2, -1))),
    ("verify", "logits", lambda c: c.update(logits=floats_of(c["k_cache"], 2, 40))),
    ("verify", "guide_lse", lambda c: c.update(guide_lse=c["guide_lse_hint"])),
    ("sparse", "out", lambda c: c.update(out=c["q"])),
    ("sparse", "out", lambda c: c.update(out=c["v_cache"].view(-1)[: c["q"].numel()].view(c["q"].shape))),
    ("sparse", "out", lambda c: c.update(lse=floats_of(c["out"], *c["lse"].shape))),
    ("select", "indices", lambda c: c.update(block_table=c["indices"][:, :4])),
    ("select", "indices", lambda c: c.update(topk_length=c["indices"].view(-1)[3:5])),
    ("select", "topk_length", lambda c: c.update(topk_length=c["seqlens"])),
    ("select", "topk_length", lambda c: c.update(topk_length=c["k"])),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OVERLAPS)))
def test_outputs_that_share_memory(device: torch.device, number: int) -> None:
    """With an input, with one another or with themselves: refused, whatever the device."""
    kind, name, change = OVERLAPS[number]
    op, base = {
        "verify": (vegas_ops.flash_attn_with_logit_dump, base_verify),
        "sparse": (vegas_ops.sparse_paged_decode, base_sparse),
        "select": (vegas_ops.topk_aggregate_logits, base_select),
    }[kind]
    call = base(device)
    change(call)
    refused(op, call, name)


def test_sums_that_share_memory(device: torch.device) -> None:
    logits = torch.randn(2, 2, 3, 50, device=device)
    call = {"logits": logits, "dump": "kv_head", "seqlens": int32((50, 20), device)}
    for out in (logits[:, 0, 0], logits[0, 0, :1].expand(2, -1)):
        refused(vegas_ops.aggregate_logits, {**call, "out": out}, "out")


def test_views_that_take_turns_share_nothing(device: torch.device) -> None:
    """Output and query may be parts of one wider buffer, as those of fused projections are."""
    call = base_verify(device)
    want = vegas_ops.flash_attn_with_logit_dump(**call)
    q, out = halves(call["q"])
    q.copy_(call["q"])
    got = vegas_ops.flash_attn_with_logit_dump(**{**call, "q": q, "out": out})
    assert torch.equal(got.out, want.out) and torch.equal(q, call["q"])


def test_table_without_columns_on_the_cpu() -> None:
    """Such a table has no memory behind it; a length beyond it is refused all the same."""
    call = base_verify(torch.device("cpu"))
    call["block_table"] = call["block_table"][:, :0]
    refused(vegas_ops.flash_attn_with_logit_dump, call, "seqused_k")
    call = base_sparse(torch.device("cpu"))
    call["block_table"] = call["block_table"][:, :0]
    refused(vegas_ops.sparse_paged_decode, call, "seqused_k")
    call = base_select(torch.device("cpu"))
    call["block_table"] = call["block_table"][:, :0]
    refused(vegas_ops.topk_aggregate_logits, call, "seqlens")
