"""Ways to make any valid call of an op wrong; each must be refused by name, with outputs left alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from op_cases import SENTINEL
from op_draws import Draw
from torch import Tensor

import vegas_ops

Call = dict[str, Any]

OUTPUTS = {
    vegas_ops.flash_attn_with_logit_dump: ("out", "lse", "logits", "guide_lse"),
    vegas_ops.sparse_paged_decode: ("out", "lse"),
    vegas_ops.topk_aggregate_logits: ("indices", "topk_length"),
    vegas_ops.aggregate_logits: ("out",),
}
REQUIRED = {
    vegas_ops.flash_attn_with_logit_dump: (
        "q", "k_cache", "v_cache", "block_table", "seqused_k", "cu_seqlens_q",
    ),
    vegas_ops.sparse_paged_decode: ("q", "k_cache", "v_cache", "indices", "topk_length"),
    vegas_ops.topk_aggregate_logits: ("logits", "seqlens"),
    vegas_ops.aggregate_logits: ("logits", "seqlens"),
}  # fmt: skip
SELECTIONS = (vegas_ops.topk_aggregate_logits, vegas_ops.aggregate_logits)
SETTINGS: dict[Any, list[tuple[str, Any]]] = {
    vegas_ops.flash_attn_with_logit_dump: [
        ("max_seqlen_q", -1), ("max_seqlen_q", None), ("max_seqlen_k", -1), ("max_seqlen_k", 2**31),
        ("dump", "tokens"), ("dump", 3), ("dump", None),
    ],
    vegas_ops.sparse_paged_decode: [("indices_are_slots", "yes")],
    vegas_ops.topk_aggregate_logits: [
        ("max_k", -1), ("max_k", None), ("pool", (-1, 0)), ("pool", 3), ("num_sink", -1), ("num_recent", -1),
        ("mode", "mean"), ("mode", None), ("dump", "none"), ("dump", 2), ("k", "many"), ("k", None),
        ("k", 2**40),
    ],
    vegas_ops.aggregate_logits: [
        ("mode", "mean"), ("mode", None), ("dump", "none"), ("dump", None), ("dump", 2),
    ],
}  # fmt: skip
for _op in (vegas_ops.flash_attn_with_logit_dump, vegas_ops.sparse_paged_decode):
    SETTINGS[_op] += [
        ("softmax_scale", math.nan), ("softmax_scale", math.inf), ("softmax_scale", "1"), ("softcap", -1.0),
        ("softcap", math.nan), ("softcap", None), ("window_size", (-2, 0)), ("window_size", 5),
        ("window_size", (1, 2, 3)), ("num_splits", -1), ("num_splits", "2"),
    ]  # fmt: skip
# Whose first dimension another argument sets, so that one entry less is wrong for sure.
SIZED = (
    "block_table", "cu_seqlens_q", "guide_lse_hint", "dump_rows", "dump_len", "out", "lse", "logits",
    "guide_lse", "v_cache", "tail_start", "topk_length", "k",
)  # fmt: skip
CONTIGUOUS = (
    "cu_seqlens_q", "seqused_k", "dump_rows", "dump_len", "tail_start", "lse", "guide_lse", "guide_lse_hint",
    "seqlens", "k", "q", "k_cache", "v_cache", "block_table", "out",
)  # fmt: skip
INTEGERS = ("seqused_k", "cu_seqlens_q")


def random_call(
    draw: Draw, device: torch.device, workspaces: Sequence[dict[str, Tensor]] = ()
) -> tuple[Callable[..., Any], Call]:
    from op_fuzz import SelectSubject, SparseSubject, VerifySubject

    subject = draw.choice((VerifySubject, SparseSubject, SelectSubject))(draw, device)
    if isinstance(subject, SelectSubject):
        one = subject.twin
        outputs = subject.outputs(0)
        sums = outputs.pop("sums")
        if draw.maybe():
            return vegas_ops.aggregate_logits, {"logits": one.logits, **one.dump_kwargs, "out": sums}
        call = {"logits": one.logits, **one.dump_kwargs, **one.kwargs, **outputs}
        return vegas_ops.topk_aggregate_logits, _with_workspace(call, subject, draw, workspaces)
    names = ("q", "k_cache", "v_cache", "indices", "topk_length")
    op: Callable[..., Any] = vegas_ops.sparse_paged_decode
    if isinstance(subject, VerifySubject):
        names = ("q", "k_cache", "v_cache", "block_table", "seqused_k")
        op = vegas_ops.flash_attn_with_logit_dump
    call = {**dict(zip(names, subject.twin.args, strict=True)), **subject.kwargs, **subject.outputs(0)}
    return op, _with_workspace(call, subject, draw, workspaces)


def _with_workspace(call: Call, subject: Any, draw: Draw, workspaces: Sequence[dict[str, Tensor]]) -> Call:
    """What other calls use as well: what is refused must leave it reusable."""
    return {**call, "workspace": workspaces[0][subject.workspace]} if workspaces and draw.maybe() else call


def _another_dtype(op: Any, call: Call, draw: Draw, names: list[str]) -> str:
    name = draw.choice(names)
    tensor = call[name]
    call[name] = tensor.double() if tensor.is_floating_point() else tensor.long()
    return name


def _more_dimensions(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    name = draw.choice(names)
    if op is vegas_ops.topk_aggregate_logits and name in OUTPUTS[op]:
        return None  # may have any shape of as many entries
    call[name] = call[name][None, None]
    return name


def _one_less(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    name = draw.choice(names)
    if op in SELECTIONS and name == "logits":
        return None  # may be of as many layers as it likes
    if name not in SIZED or call[name].shape[0] == 0 or call[name].numel() == 0:
        return None
    call[name] = call[name][:-1]
    return name


def _another_device(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    name = draw.choice(names)
    if name == REQUIRED[op][0] or call[name].device.type == "cpu":
        return None
    call[name] = call[name].cpu()
    return name


def _strided(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    name = draw.choice(names)
    tensor = call[name]
    if name not in CONTIGUOUS or tensor.shape[-1] < 2 or tensor.numel() == 0:
        return None
    call[name] = torch.stack([tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor] * 2, -1)[
        ..., 0
    ]
    if tensor.element_size() == 1:
        return None  # of bytes, whose last stride cannot be kept
    return name


def _missing(op: Any, call: Call, draw: Draw, names: list[str]) -> str:
    name = draw.choice(REQUIRED[op])
    call[name] = None
    return name


def _no_tensor(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    name = draw.choice(names)
    if name == "k":
        return None  # may be a number
    call[name] = draw.choice((7, "tensor", {}))
    return name


def _bad_setting(op: Any, call: Call, draw: Draw, names: list[str]) -> str:
    name, value = draw.choice(SETTINGS[op])
    call[name] = value
    return name


def _bad_page_size(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    if call.get("page_size") is None:
        return None
    call["page_size"] = draw.choice((0, -16, None))
    return "page_size"


def _no_slots_in_a_window(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    if op is not vegas_ops.sparse_paged_decode or not call["indices_are_slots"] or call["q"].shape[0] == 0:
        return None
    if call["indices"].shape[-1] == 0:
        return None
    call["window_size"] = (3, 0)
    return "window_size"


def _overlap(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    if op is vegas_ops.topk_aggregate_logits:
        indices, counts = call["indices"], call["topk_length"]
        if indices.numel() == 0:
            return None
        both = indices.new_full((indices.numel() + counts.numel(),), -7)
        call["indices"] = both[: indices.numel()].view(indices.shape)
        at = indices.numel() - 1
        call["topk_length"] = both[at : at + counts.numel()].view(counts.shape)
        return "indices"
    if op is vegas_ops.aggregate_logits:
        out, logits = call["out"], call["logits"]
        if out.numel() == 0:
            return None
        if logits.dtype == torch.float32 and logits.shape == out.shape and draw.maybe():
            call["out"] = logits
        elif out.shape[0] > 1:
            call["out"] = out[:1].expand(out.shape)
        else:
            return None
        return "out"
    if call["q"].numel() == 0:
        return None
    way = draw.integer(0, 2)
    if way == 0:
        call["out"] = call["q"]
    elif way == 1 and call["q"].shape[0] > 1:
        call["out"] = call["out"][:1].expand(call["out"].shape)
    elif (
        way == 2
        and op is vegas_ops.flash_attn_with_logit_dump
        and call["dump"] in ("token_weight", "kv_head")
    ):
        call["lse"] = torch.full_like(call["lse"], SENTINEL)
        size = min(call["guide_lse"].numel(), call["lse"].numel())
        if size < call["guide_lse"].numel() or size == 0:
            return None
        call["guide_lse"] = call["lse"].view(-1)[:size].view(call["guide_lse"].shape)
        return "lse"
    else:
        return None
    return "out"


def _unaligned_workspace(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    workspace = call.get("workspace")
    if workspace is None or workspace.numel() < 2:
        return None
    call["workspace"] = workspace[1:]
    return "workspace"


def _bad_length(op: Any, call: Call, draw: Draw, names: list[str]) -> str | None:
    """Integers on the CPU are host data."""
    name = draw.choice(INTEGERS)
    tensor = call.get(name)
    if tensor is None or tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    if op in SELECTIONS and name == "cu_seqlens_q":
        return None  # tells the rows of some dumps alone
    if name == "seqused_k" and op is vegas_ops.sparse_paged_decode and call["block_table"] is None:
        return None
    changed = tensor.clone()
    at = draw.integer(0, len(tensor) - 1)
    changed[at] = draw.choice((-1, 1 << 29)) if name == "seqused_k" else -1
    call[name] = changed
    return name


FAULTS = (
    _another_dtype, _more_dimensions, _one_less, _another_device, _strided, _missing, _no_tensor,
    _bad_setting, _bad_setting, _bad_page_size, _no_slots_in_a_window, _overlap,
    _unaligned_workspace, _bad_length,
)  # fmt: skip


def check_refusal(draw: Draw, device: torch.device, workspaces: Sequence[dict[str, Tensor]] = ()) -> None:
    op, call = random_call(draw, device, workspaces)
    op(**call)
    name = None
    while name is None:
        wrong = dict(call)
        fault = draw.choice(FAULTS)
        tensors = [k for k, value in call.items() if isinstance(value, Tensor) and k != "workspace"]
        name = fault(op, wrong, draw, tensors)
    before = {
        output: wrong[output].clone() for output in OUTPUTS[op] if isinstance(wrong.get(output), Tensor)
    }
    what = f"{op.__name__}, {fault.__name__.strip('_')} of {name}"
    try:
        op(**wrong)
    except (ValueError, TypeError, RuntimeError) as error:
        named = f"`{name}`" in str(error) or f"'{name}'" in str(error) or f"`{name}" in str(error)
        assert named, f"{what}: the error does not name it: {error}"
    else:
        raise AssertionError(f"{what}: not refused")
    same = {
        output: ((wrong[output] == value) | (wrong[output].isnan() & value.isnan()))
        .all()
        .to("cpu", non_blocking=True)
        for output, value in before.items()
    }
    if device.type == "cuda":
        torch.cuda.synchronize()
    for output, untouched in same.items():
        assert bool(untouched), f"{what}: {output} was written"
