"""Comparison of the ops with the oracles, within error bounds derived from the inputs.

A logit may be off by 2^-16 of scale * sum |q||k|; an output by twice what the same computation in
torch at the same dtype is off by; everything else follows from these two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from op_cases import SENTINEL, SENTINEL_INDEX, SelectCase, SparseCase, VerifyCase
from torch import Tensor

import vegas_ops
from vegas_ops import reference

LOGIT_ERROR = 2.0**-16


def assert_between(actual: Tensor, low: Tensor, high: Tensor, name: str) -> None:
    """low <= actual <= high, the bounds rounded to actual's dtype; NaN where the bounds are NaN."""
    assert actual.shape == low.shape, f"{name}: shape {tuple(actual.shape)}"
    value = actual.double()
    low, high = (bound.to(actual.dtype).double() for bound in (low, high))
    right = ((low <= value) & (value <= high)) | (low.isnan() & value.isnan())
    if not bool(right.all()):
        wrong = (~right).nonzero()
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{name}: {len(wrong)} of {actual.numel()} wrong, first at {at}: "
            f"{value[at].item()!r} is not in [{low[at].item()!r}, {high[at].item()!r}]"
        )


def assert_same_bits(a: Tensor, b: Tensor, name: str) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype, name
    different = (a != b) & ~(a.isnan() & b.isnan())
    assert not bool(different.any()), f"{name}: {int(different.sum())} of {a.numel()} differ"


def rounded_guide(query: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    """Guide rows in float64, and what one rounding the other way would change in each element."""
    grouped = query.double().reshape(heads_kv, -1, query.shape[-1])
    slack = grouped.abs().mean(1) * 2.0**-22  # of a mean taken in fp32, in any order
    mean = grouped.mean(1)
    low, high = ((mean + s).to(query.dtype).double() for s in (-slack, slack))
    return reference._guide_row(query, heads_kv).double(), high - low


def per_head(keys: Tensor, heads_q: int) -> Tensor:
    """(length, heads_kv, head_dim) -> (heads_q, length, head_dim)."""
    return keys.repeat_interleave(heads_q // keys.shape[1], dim=1).transpose(0, 1)


def torch_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    dtype: torch.dtype,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention as torch computes it at `dtype`: fp32 scores, weights rounded before they meet V.

    q (rows, heads, head_dim), keys and values (heads, length, head_dim), mask (rows, length).
    """
    scores = torch.einsum("rhd,htd->hrt", q.float(), keys.float()) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.float()[:, None, None] - top)
    out = torch.einsum("hrt,htd->hrd", weights.to(dtype).float(), values.float()) / total
    return out.transpose(0, 1).nan_to_num(0.0).to(dtype)


def lse_error(lse: Tensor, worst_logit_error: Tensor) -> Tensor:
    """A log-sum-exp is off by no more than its worst logit, and by its own rounding."""
    error = worst_logit_error + 2.0**-20 * (1 + lse.abs())
    return torch.where(torch.isneginf(lse), 0.0, error)


def output_rounding(envelope: Tensor, values: Tensor) -> Tensor | float:
    """What rounding fp32 sums once may do: few outputs say little about torch's worst error."""
    if values.numel() == 0:
        return 0.0
    return (2.0**-22 + 2.0**-24 * envelope) * values.abs().max()


def outputs_without_alias(result: Any) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in zip(("out", "lse", "logits", "guide_lse"), result, strict=False)
        if tensor is not None
    }


@dataclass
class Bounds:
    """What an op's outputs may hold: [low, high] where it writes, nothing elsewhere, nor beyond the last
    column of these."""

    written: dict[str, Tensor]
    low: dict[str, Tensor]
    high: dict[str, Tensor]

    def check(self, got: dict[str, Tensor], again: dict[str, Tensor]) -> None:
        """`got` was full of SENTINEL before the call, `again` full of NaN."""
        for name, written in self.written.items():
            mine, other = (outputs[name].to(written.device) for outputs in (got, again))
            width = written.shape[-1]
            beyond = bool((mine[..., width:] == SENTINEL).all() & other[..., width:].isnan().all())
            mine, other = mine[..., :width], other[..., :width]
            alone = bool((written | ((mine == SENTINEL) & other.isnan())).all())
            assert beyond and alone, f"{name}: written where it must not be"
            assert_same_bits(mine, other.where(written, SENTINEL), f"{name} of two calls")
            assert_between(mine, self.low[name], self.high[name], name)


def bound_verify(case: VerifyCase) -> Bounds:
    expected = case.outputs(SENTINEL, torch.float64, width=max([*case.lengths, 0]))
    reference.flash_attn_with_logit_dump(*case.args, **case.kwargs, **expected)
    low = {name: tensor.clone() for name, tensor in expected.items()}
    high = {name: tensor.clone() for name, tensor in expected.items()}
    for b in range(case.batch):
        if case.q_lens[b] > 0:
            _widen_request(case, b, low, high)
    return Bounds({name: want != SENTINEL for name, want in expected.items()}, low, high)


def check_verify(case: VerifyCase) -> dict[str, Tensor]:
    """Run the op three ways and compare; returns its outputs over a sentinel."""
    got = case.outputs(SENTINEL)
    vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs, **got)
    again = case.outputs(math.nan)
    vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs, **again)
    fresh = outputs_without_alias(vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs))
    bounds = bound_verify(case)
    bounds.check(got, again)
    # Logits of another dtype than the op's own may come from other kernels, which round otherwise.
    same_kernels = "logits" not in got or fresh["logits"].dtype == got["logits"].dtype
    for name, written in bounds.written.items():
        own, given = (outputs[name][..., : written.shape[-1]] for outputs in (fresh, got))
        if same_kernels:
            assert_same_bits(own[written], given[written], f"{name} allocated and given")
        else:
            allocated = own.where(written, SENTINEL)
            assert_between(allocated, bounds.low[name], bounds.high[name], f"{name} allocated")
    return got


def _widen_request(case: VerifyCase, b: int, low: dict[str, Tensor], high: dict[str, Tensor]) -> None:
    start, end, length = case.cu[b], case.cu[b + 1], case.lengths[b]
    if length == 0:
        return
    q = case.q[start:end]
    keys, values, exists = case.loaded(b)
    mask = case.visible(b, exists)
    dtype = case.dtype

    def widen(name: str, at: Any, error: Tensor) -> None:
        low[name][at] -= error
        high[name][at] += error

    # Products of magnitudes, per query head: (rows, heads, length).
    grouped = q.double().abs().reshape(len(q), case.heads_kv, -1, case.head_dim)
    envelope = case.scale * torch.einsum("rkgd,tkd->rkgt", grouped, keys.abs()).reshape(*q.shape[:2], length)
    error = LOGIT_ERROR * envelope

    by_torch = torch_attention(
        q, per_head(keys.float(), case.heads_q), per_head(values.float(), case.heads_q), mask, dtype,
        case.scale, case.softcap, case.sinks,
    )  # fmt: skip
    worst = (by_torch.double() - low["out"][start:end]).abs().nan_to_num(0.0).max()
    seen_values = values[mask.any(0)]
    seen_envelope = torch.where(mask[:, None], envelope, 0.0).max()
    floor = output_rounding(seen_envelope, seen_values)
    widen("out", slice(start, end), 2 * worst + floor)

    seen_error = torch.where(mask[:, None], error, 0.0).amax(-1)  # (rows, heads)
    lse = low["lse"][:, start:end].clone()
    widen("lse", (slice(None), slice(start, end)), lse_error(lse, seen_error.T))

    if case.dump == "none":
        return
    bits = 3 if case.dump_rows is None else case.dump_rows[b]
    planes = {p: row for p, row in ((0, 0), (1, len(q) - 1)) if bits >> p & 1}
    if not planes:
        return
    n = length - len(q) + 1 if case.dump_len is None else case.dump_len[b]
    n = min(max(n, 0), length)
    if case.dump == "all":
        widen("logits", (slice(start, end), slice(None), slice(n)), error[..., :n])
        return
    if case.dump == "rows":
        for plane, row in planes.items():
            widen("logits", (b, slice(None), plane, slice(n)), error[row, :, :n])
        return
    if case.dump == "token":
        rows = sorted(set(planes.values()))
        widen("logits", (b, slice(n)), error[rows].sum((0, 1))[:n])
        return

    guides, guide_errors = {}, {}
    for plane, row in planes.items():
        guide, flip = rounded_guide(q[row], case.heads_kv)
        magnitude = torch.einsum("hd,thd->ht", guide.abs(), keys.abs())
        flipped = torch.einsum("hd,thd->ht", flip, keys.abs())
        guide_errors[plane] = case.scale * (LOGIT_ERROR * magnitude + flipped)
        guides[plane] = reference._logits(guide, keys, case.scale, case.softcap)
        seen = torch.where(mask[row], guide_errors[plane], 0.0).amax(-1)
        for target in (0, 1):
            if target == plane or target not in planes:
                lse = low["guide_lse"][b, target].clone()
                widen("guide_lse", (b, target), lse_error(lse, seen))
    if case.dump == "kv_head":
        for plane in planes:
            widen("logits", (b, plane, slice(None), slice(n)), guide_errors[plane][:, :n])
        return
    if len(q) == 1 and len(planes) == 2:
        del planes[0]
    for target, sign in ((low, -1.0), (high, 1.0)):
        total = torch.zeros(length, dtype=torch.float64, device=case.device)
        for plane in planes:
            hint = case.hint[b, plane].double()[:, None]
            slack = guide_errors[plane] + 2.0**-21 * (guides[plane].abs() + hint.abs())
            total += torch.exp(guides[plane] + sign * slack - hint).sum(0)
        total *= 1 + sign * 2.0**-19
        # Saturation ends at or just below the largest finite number.
        largest = torch.finfo(torch.float32).max
        total = total.clamp(max=largest * (1 - 2.0**-10) if sign < 0 else largest)
        unmasked = ~torch.isneginf(target["logits"][b, :n])
        target["logits"][b, :n][unmasked] = total[:n][unmasked]


def bound_sparse(case: SparseCase) -> Bounds:
    want = case.outputs(math.nan, torch.float64)
    reference.sparse_paged_decode(*case.args, **case.kwargs, **want)
    assert not any(bool(tensor.isnan().any()) for tensor in want.values())
    slack = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    group = case.heads_q // case.heads_kv
    scale = case.options.get("softmax_scale") or case.head_dim**-0.5
    for b in range(case.batch):
        for head in range(case.heads_kv):
            heads = slice(head * group, (head + 1) * group)
            if head == 0 or case.per_head:
                slots = torch.tensor(case.attended(b, head), dtype=torch.int64, device=case.device)
                all_keys, all_values = (
                    reference._load(
                        cache, slots, reference._descale_of(descale, b, case.heads_kv), torch.float64
                    )
                    for cache, descale in (
                        (case.k_cache, case.k_descale), (case.v_cache, case.v_descale),
                    )
                )  # fmt: skip
            if len(slots) == 0:
                continue
            keys, values = all_keys[:, head], all_values[:, head]
            # One draft row over chosen keys.
            q = case.q[b, heads]
            k_heads, v_heads = (t[None].expand(group, -1, -1) for t in (keys, values))
            mask = torch.ones(1, len(keys), dtype=torch.bool, device=case.device)
            by_torch = torch_attention(
                q[None], k_heads, v_heads, mask, case.dtype, scale, case.options.get("softcap", 0.0),
                None if case.sinks is None else case.sinks[heads],
            )[0]  # fmt: skip
            worst = (by_torch.double() - want["out"][b, heads]).abs().max()
            envelope = scale * torch.einsum("hd,td->ht", q.double().abs(), keys.abs()).amax(-1)
            slack["out"][b, heads] = 2 * worst + output_rounding(envelope.max(), values)
            slack["lse"][heads, b] = lse_error(want["lse"][heads, b], LOGIT_ERROR * envelope)
    return Bounds(
        {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in want.items()},
        {name: want[name] - slack[name] for name in want},
        {name: want[name] + slack[name] for name in want},
    )


def check_sparse(case: SparseCase) -> dict[str, Tensor]:
    got, again = case.outputs(SENTINEL), case.outputs(math.nan)
    vegas_ops.sparse_paged_decode(*case.args, **case.kwargs, **got)
    vegas_ops.sparse_paged_decode(*case.args, **case.kwargs, **again)
    fresh = dict(zip(("out", "lse"), vegas_ops.sparse_paged_decode(*case.args, **case.kwargs), strict=True))
    bound_sparse(case).check(got, again)
    for name in ("out", "lse"):
        assert_same_bits(got[name], fresh[name], f"{name} allocated and given")
    return got


def select(logits: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Run twice over outputs full of a sentinel, and once without outputs; all must agree."""
    fresh = vegas_ops.topk_aggregate_logits(logits, **kwargs)
    for fill in (SENTINEL_INDEX, 0):
        given_outputs = {
            "indices": torch.full_like(fresh[0], fill),
            "topk_length": torch.full_like(fresh[1], fill),
        }
        vegas_ops.topk_aggregate_logits(logits, **kwargs, **given_outputs)
        assert_same_bits(given_outputs["indices"], fresh[0], "indices of two calls")
        assert_same_bits(given_outputs["topk_length"], fresh[1], "topk_length of two calls")
    return fresh


def check_select(logits: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The op's set must be the oracle's, exactly: for scores whose sums are exact."""
    got = select(logits, **kwargs)
    kwargs.pop("workspace", None)
    want = reference.topk_aggregate_logits(logits, **kwargs)
    assert_same_bits(got[1], want[1], "topk_length")
    assert_same_bits(got[0], want[0], "indices")
    return got


def assert_sums(got: Tensor, again: Tensor, error: float, logits: Tensor, **kwargs: Any) -> None:
    """Sums of aggregate_logits within a relative error, 0 for exact ones; `got` was full of SENTINEL
    before the call, `again` full of NaN."""
    width, batch = logits.shape[-1], kwargs["seqlens"].shape[0]
    want, _ = reference.aggregate_logits(
        logits, **kwargs, out=torch.full(got.shape, SENTINEL, dtype=torch.float64, device=got.device)
    )
    for b in range(batch):
        n = min(max(int(kwargs["seqlens"][b]), 0), width)
        assert bool((got[..., b, n:] == SENTINEL).all()), "sums: written beyond seqlens"
        assert bool(again[..., b, n:].isnan().all()), "sums: written beyond seqlens"
        mine, right = got[..., b, :n], want[..., b, :n]
        assert_same_bits(mine, again[..., b, :n], "sums of two calls")
        # An unselectable candidate may show its NaN or its -inf where it has both.
        dead = right.isnan() | torch.isneginf(right)
        assert_same_bits(mine.isnan() | torch.isneginf(mine), dead, "unselectable")
        # Within the error of the largest number, one may be finite and the other not.
        most = torch.finfo(torch.float32).max * (1 - error) if error else math.inf
        alive = (mine[~dead].double().clamp(max=most), right[~dead].float().double().clamp(max=most))
        torch.testing.assert_close(*alive, rtol=error, atol=1e-37 if error else 0.0)


def check_aggregate(logits: Tensor, error: float, **kwargs: Any) -> Tensor:
    """Compare sums within a relative error, 0 for exact ones."""
    own, count = vegas_ops.aggregate_logits(logits, **kwargs)
    got, again = torch.full_like(own, SENTINEL), torch.full_like(own, math.nan)
    for out in (got, again):
        vegas_ops.aggregate_logits(logits, **kwargs, out=out)
    assert_sums(got, again, error, logits, **kwargs)
    assert count == {"kv_head": logits.shape[-2], "all": logits.shape[-2]}.get(
        kwargs["dump"], logits.shape[-3] if kwargs["dump"] == "rows" else 1
    )
    for b, n in enumerate(kwargs["seqlens"].clamp(0, logits.shape[-1]).tolist()):
        assert_same_bits(own[..., b, :n], got[..., b, :n], "sums allocated and given")
    return own


def assert_selection(
    case: SelectCase, indices: Tensor, counts: Tensor, sums: Tensor, sums_of_head: Callable[[int], Tensor]
) -> None:
    """The best of the oracle's sums where they are exact, else of the op's own, which have been compared:
    rounding is the op's affair."""
    if not case.weighted:
        want = reference.topk_aggregate_logits(case.logits, **case.dump_kwargs, **case.kwargs)
        assert_same_bits(counts, want[1], "topk_length")
        assert_same_bits(indices, want[0], "indices")
        return
    choice = {"dump": "token", "seqlens": case.dump_kwargs["seqlens"], **case.kwargs, "per_kv_head": False}
    if not case.arguments["per_kv_head"]:
        want = reference.topk_aggregate_logits(sums, **choice)
        assert_same_bits(counts, want[1], "topk_length")
        assert_same_bits(indices, want[0], "indices")
        return
    for head in range(case.arguments["heads"]):
        want = reference.topk_aggregate_logits(sums_of_head(head), **choice)
        assert_same_bits(counts[..., head], want[1], f"topk_length of head {head}")
        assert_same_bits(indices[..., head, :], want[0], f"indices of head {head}")


def sums_of_head(case: SelectCase, head: int) -> Tensor:
    """What the op sums for one list per KV head."""
    logits, kwargs = case.of_head(head)
    return vegas_ops.aggregate_logits(logits, **kwargs)[0]


def check_select_case(case: SelectCase) -> None:
    sums = check_aggregate(case.logits, case.error, **case.dump_kwargs)
    indices, counts = select(case.logits, **case.dump_kwargs, **case.kwargs)
    assert_selection(case, indices, counts, sums, lambda head: sums_of_head(case, head))
    if case.arguments["per_kv_head"]:
        for head in range(case.arguments["heads"]):
            logits, kwargs = case.of_head(head)
            own = select(logits, **kwargs, **case.kwargs)
            assert_same_bits(indices[..., head, :], own[0][..., 0, :], f"indices of head {head} alone")
