"""The three ops of verification-guided self-speculative decoding, and what they share.

Each wrapper allocates the outputs it is not given and calls a registered torch op
(``torch.ops.vegas_ops.*``) that mutates them and returns nothing. With outputs and workspace given,
nothing is allocated. No call reads device values on the host, so all are safe under CUDA-graph capture.

Conventions: integer tensors are int32 on the first argument's device. ``k_cache`` and ``v_cache``
are views ``(num_pages, page_size, num_heads_kv, head_dim)`` with any page, token and head strides
(last dimension contiguous, rows 16-byte aligned). Query head ``h`` uses KV head ``h // group`` with
``group = num_heads_q // num_heads_kv``. Table entries at or beyond ``ceil(length / page_size)`` and
cache slots at or beyond a length are never touched. A page id or index that is negative or outside the
cache within the counted range is skipped as if masked. A row that sees no key yields out 0 and lse -inf.
NaN in visible data propagates. Bad arguments raise an error that names the argument: ``ValueError``,
or ``TypeError`` and ``RuntimeError`` for what has another type. Outputs must not share memory with
inputs or with one another. ``VEGAS_OPS_CHECK=1`` makes wrong values of lengths, pages and lists errors
too, on a GPU by waiting for it in every call (docs/untrusted.md).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vegas_ops.arguments import call, check_integer, check_integers, check_number, check_tensors, lookup
from vegas_ops.devices import present

__all__ = [
    "AttentionWithDump",
    "aggregate_logits",
    "build_scheduler_metadata",
    "flash_attn_with_logit_dump",
    "make_workspace",
    "sparse_paged_decode",
    "topk_aggregate_logits",
]

Dump = Literal["none", "token", "token_weight", "kv_head", "rows", "all"]
Mode = Literal["logit", "weight"]
OpName = Literal["flash_attn_with_logit_dump", "topk_aggregate_logits", "sparse_paged_decode"]

# Values of the enums in csrc/include/vegas_ops/params.h.
_DUMPS = {"none": 0, "token": 1, "token_weight": 2, "kv_head": 3, "rows": 4, "all": 5}
_MODES = {"logit": 0, "weight": 1}
_OPS = {"flash_attn_with_logit_dump": 0, "topk_aggregate_logits": 1, "sparse_paged_decode": 2}
# Dimensions of a dump without layers.
_DUMP_NDIM = {"token": 2, "token_weight": 2, "kv_head": 4, "rows": 4, "all": 3}


def _load_library() -> None:
    library = Path(__file__).with_name("libvegas_torch.so")
    if not library.is_file():
        raise ImportError(
            f"vegas_ops: {library.parent} has no {library.name}: sources that were not built. Build them, "
            "with `pip install --editable .` in the folder above (torch installed before); where vegas_ops "
            "is installed already, start Python in another folder"
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            f"vegas_ops: its library does not load beside torch {torch.__version__} "
            f"(it needs torch 2.10 or newer): {error}"
        ) from error


_load_library()


class AttentionWithDump(NamedTuple):
    """What :func:`flash_attn_with_logit_dump` returns; ``None`` for what the dump does not have."""

    out: Tensor
    lse: Tensor
    logits: Tensor | None
    guide_lse: Tensor | None


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    check_number("softmax_scale", softmax_scale)
    return float(softmax_scale)


def _pair(name: str, value: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"`{name}` must be two integers, got {value!r}")
    for part in value:
        check_integer(name, part)
    return value[0], value[1]


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    left, right = _pair("window_size", window_size)
    if left < -1 or right < -1:
        raise ValueError(f"`window_size` must hold -1 or lengths, got {window_size}")
    return left, right


def _check_vector(name: str, value: Tensor) -> None:
    if value.dim() != 1:
        raise ValueError(f"`{name}` must have shape (batch,), got {tuple(value.shape)}")


def _check_dims(q: Tensor, k_cache: Tensor) -> None:
    if q.dim() != 3 or k_cache.dim() != 4:
        raise ValueError(
            "`q` must have 3 dimensions and `k_cache` 4, "
            f"got shapes {tuple(q.shape)} and {tuple(k_cache.shape)}"
        )


def _layers_of(logits: Tensor, dump: Dump) -> tuple[int, ...]:
    """The layers dimension of a dump, if it has one."""
    dims = lookup(_DUMP_NDIM, dump, "dump")
    lead = logits.dim() - dims
    if lead not in (0, 1):
        raise ValueError(
            f"`logits` must have {dims} dimensions for this dump ({dims + 1} with layers), got {logits.dim()}"
        )
    return tuple(logits.shape[:lead])


def _workspace_for(op: OpName, like: Tensor, *bounds: int) -> Tensor | None:
    """A zeroed workspace for one call, or None where the device's kernels need none."""
    return torch.ops.vegas_ops.new_workspace(like, _OPS[op], *bounds) if like.is_cuda else None


def make_workspace(
    op: OpName,
    *,
    max_batch: int,
    max_q_len: int,
    max_seqlen_k: int,
    max_k: int = 0,
    layers: int = 1,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    device: torch.device | str,
) -> Tensor:
    """A workspace for every call of ``op`` within the bounds.

    Zeroed once; every call leaves it reusable. Calls on concurrent streams must not share one, nor
    calls of different ops: where its words are not zero, results are wrong and verification on Hopper
    waits for ever (``VEGAS_OPS_CHECK=1`` refuses it).

    Returns:
        uint8 tensor on ``device``; empty where the device's kernels need none (the CPU).
    """
    return call(
        torch.ops.vegas_ops.new_workspace,
        torch.empty(0, device=present(device)), lookup(_OPS, op, "op"), max_batch, max_q_len, max_seqlen_k,
        max_k, layers, num_heads_q, num_heads_kv, head_dim,
    )  # fmt: skip


def build_scheduler_metadata(
    op: OpName,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    page_size: int,
    out: Tensor | None = None,
) -> Tensor:
    """Work list of one iteration, shared by all layers, for kernels that want one.

    The kernels of this release build theirs on the fly, so the result is empty; engines that call
    this once per iteration keep working when a kernel starts to want it.

    Returns:
        ``out``, or an empty int32 tensor on ``seqused_k``'s device.
    """
    lookup(_OPS, op, "op")
    check_tensors(cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k)
    check_integers(
        0, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv, head_dim=head_dim, page_size=page_size,
    )  # fmt: skip
    if out is None:
        return seqused_k.new_empty(0)
    check_tensors(out=out)
    return out


def flash_attn_with_logit_dump(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dump: Dump = "token",
    guide_lse_hint: Tensor | None = None,
    dump_rows: Tensor | None = None,
    dump_len: Tensor | None = None,
    batch_invariant: bool = False,
    num_splits: int = 0,
    scheduler_metadata: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    logits: Tensor | None = None,
    guide_lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> AttentionWithDump:
    """Verify: attention of new rows over the whole paged cache, which also dumps its logits.

    The caller has appended the new rows' K and V to the cache. Query row ``r`` of a request sits at
    position ``p = seqused_k - q_len + r`` and sees keys ``[0, p]`` when causal (aligned to the bottom right).

    A *guide row* is the mean of a group's query rows, taken in fp32 and rounded to q's dtype: one per
    KV head and dumped row. It ranks keys for its whole group and is never part of the output.

    Args:
        q: (total_q, num_heads_q, head_dim), bf16 | fp16, on the CPU also fp32. Rows at or beyond
            ``cu_seqlens_q[-1]`` are neither read nor written.
        k_cache: (num_pages, page_size, num_heads_kv, head_dim), q's dtype or float8_e4m3fn.
        v_cache: like ``k_cache``, with strides of its own.
        block_table: (batch, max_pages) int32 page ids.
        seqused_k: (batch,) int32 keys of each request, the new rows included.
        cu_seqlens_q: (batch + 1,) int32 first row of each request; requests without rows are fine.
        max_seqlen_q: bound on the rows of a request.
        max_seqlen_k: bound on ``seqused_k``; cost follows the actual lengths.
        softmax_scale: default head_dim ** -0.5.
        causal: rows do not see keys behind them.
        window_size: (left, right): keys in [p - left, p + right], inclusive; -1 is unbounded.
        softcap: c > 0 turns a scaled logit l into c * tanh(l / c), before masking.
        sinks: (num_heads_q,) fp32 logits that enter each head's softmax denominator, without a value.
        k_descale: fp32 factor of an fp8 K cache: (1,), (num_heads_kv,) or (batch, num_heads_kv).
        v_descale: the same for V.
        dump: what to dump, and the shape of ``logits``:
            "none"; "token": (batch, max_seqlen_k) fp32, logits summed over query heads and dumped
            rows (the paper's score); "token_weight": (batch, max_seqlen_k) fp32, sum over KV heads
            and dumped rows of exp(guide logit - guide_lse_hint), clamped to finite; "kv_head":
            (batch, 2, num_heads_kv, max_seqlen_k) bf16, guide logits of the first and last row;
            "rows": (batch, num_heads_q, 2, max_seqlen_k) bf16, logits of the first and last row;
            "all": (total_q, num_heads_q, max_seqlen_k) bf16, every row. Logits are scaled and
            softcapped, sinks excluded. Masked positions hold -inf ("token" and "token_weight":
            masked for any dumped row). Positions at or beyond ``dump_len`` are not written.
        guide_lse_hint: (batch, 2, num_heads_kv) fp32, required for "token_weight": ``guide_lse`` of the
            request's previous verification.
        dump_rows: (batch,) int32 bits: 1 first row, 2 last row, 0 leaves the request's logits
            untouched; default 3. A one-row request fills every asked plane; sums take the row once.
        dump_len: (batch,) int32 candidates to dump; default ``seqused_k - q_len + 1``.
        batch_invariant: a request's result does not depend on the rest of the batch, bit for bit.
        num_splits: splits of the key range; 0 chooses. On CUDA, more than 16 act as 16.
        scheduler_metadata: from :func:`build_scheduler_metadata`; unused by this release's kernels.
        out: (total_q, num_heads_q, head_dim), q's dtype.
        lse: (num_heads_q, total_q) fp32, contiguous.
        logits: see ``dump``; its last dimension may be wider than ``max_seqlen_k``; fp32 is accepted
            for every dump.
        guide_lse: (batch, 2, num_heads_kv) fp32, contiguous.
        workspace: from :func:`make_workspace`; allocated when absent and needed.

    Returns:
        ``(out, lse, logits, guide_lse)``. lse is the natural logarithm of the softmax denominator,
        sink excluded. ``logits`` is None for "none"; ``guide_lse`` is the guide rows' lse, None but
        for "token_weight" and "kv_head"; a plane that was not dumped repeats the other.

    Raises:
        ValueError: naming the argument. On the CPU also for lengths that do not fit the table.

    Source: Vegas (arXiv 2602.07223), section on verification-guided selection, Eq. 2 ("token").
    """
    check_tensors(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
    )  # fmt: skip
    dump_code = lookup(_DUMPS, dump, "dump")
    _check_dims(q, k_cache)
    if dump == "token_weight" and guide_lse_hint is None:
        raise ValueError('`guide_lse_hint` must be given for dump="token_weight", got None')
    _check_vector("seqused_k", seqused_k)
    check_integers(0, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    left, right = _window(window_size)
    total_q, num_heads_q, head_dim = q.shape
    num_heads_kv = k_cache.shape[2]
    batch = seqused_k.shape[0]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if lse is None:
        lse = q.new_empty((num_heads_q, total_q), dtype=torch.float32)
    if dump == "none":
        logits = None
    elif logits is None:
        shape: tuple[int, ...]
        dtype = torch.bfloat16
        if dump == "kv_head":
            shape = (batch, 2, num_heads_kv, max_seqlen_k)
        elif dump == "rows":
            shape = (batch, num_heads_q, 2, max_seqlen_k)
        elif dump == "all":
            shape = (total_q, num_heads_q, max_seqlen_k)
        else:
            shape, dtype = (batch, max_seqlen_k), torch.float32
        logits = q.new_empty(shape, dtype=dtype)
    if dump not in ("token_weight", "kv_head"):
        guide_lse = None
    elif guide_lse is None:
        guide_lse = q.new_empty((batch, 2, num_heads_kv), dtype=torch.float32)
    if workspace is None:
        workspace = _workspace_for(
            "flash_attn_with_logit_dump", q, batch, max_seqlen_q, max_seqlen_k, 0, 1, num_heads_q,
            num_heads_kv, head_dim,
        )  # fmt: skip
    call(
        torch.ops.vegas_ops.flash_attn_with_logit_dump,
        q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, max_seqlen_q, max_seqlen_k,
        _scale(softmax_scale, head_dim), causal, left, right, softcap, sinks, k_descale, v_descale,
        dump_code, guide_lse_hint, dump_rows, dump_len, batch_invariant, num_splits, out, lse, logits,
        guide_lse, workspace,
    )  # fmt: skip
    return AttentionWithDump(out, lse, logits, guide_lse)


def topk_aggregate_logits(
    logits: Tensor,
    *,
    dump: Dump,
    seqlens: Tensor,
    k: int | Tensor,
    max_k: int,
    mode: Mode = "logit",
    lse: Tensor | None = None,
    guide_lse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    dump_rows: Tensor | None = None,
    sinks: Tensor | None = None,
    pool: tuple[int, int] = (0, 0),
    num_sink: int = 0,
    num_recent: int = 0,
    count_forced: bool = True,
    per_kv_head: bool = False,
    block_table: Tensor | None = None,
    page_size: int | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select: the k best candidates of each request, from a dump of its verification.

    Exact for every k and length; ties go to the smaller index; -inf and NaN are never selected
    (``topk_length`` may be below k), +inf comes first, -0 equals +0. The result is the same bit for
    bit across runs, batch positions and thread counts.

    Args:
        logits: a dump of the kind named, fp32, or bf16 for "kv_head", "rows" and "all". It may lead
            with a layers dimension; ``seqlens``, ``k`` and ``block_table`` stay per request.
        dump: "token", "token_weight", "kv_head", "rows" or "all".
        seqlens: (batch,) int32 candidates; clamped to [0, logits.shape[-1]].
        k: int, or (batch,) int32; clamped to [0, seqlens].
        max_k: width of the output.
        mode: "logit" sums logits over heads and counted rows. "weight": "kv_head" dumps rank by
            the sum of exp(l - guide_lse), "rows" and "all" by that of exp(l) / (exp(lse) + exp(sink));
            "token" and "token_weight" are taken as they are.
        lse: (num_heads_q, total_q) fp32, for "rows" and "all" in weight mode; leads with layers if
            logits does.
        guide_lse: (batch, 2, num_heads_kv) fp32, for "kv_head" in weight mode; likewise.
        cu_seqlens_q: (batch + 1,) int32, as given to the verification; required for "all" and for
            "rows" in weight mode. With it, a one-row request counts its row once.
        dump_rows: (batch,) int32, as given to the verification; default 3. 0: no scores.
        sinks: (num_heads_q,) or (layers, num_heads_q) fp32, for "rows" and "all" in weight mode.
        pool: (before, after): a candidate's score becomes the maximum over [i - before, i + after],
            after the sum; a candidate whose own score is -inf or NaN stays out and enters no
            neighbour's maximum. Look-ahead by gamma is (gamma, 0).
        num_sink: the first candidates, always selected, even at -inf or NaN.
        num_recent: the last candidates, likewise.
        count_forced: forced tokens count towards k; otherwise they come on top of it.
        per_kv_head: one list per KV head ("kv_head" dumps only).
        block_table: (batch, max_pages) int32: emit physical slots, ``page * page_size + offset``;
            a negative page yields slot -1. Without it, token indices.
        page_size: tokens per page, with ``block_table``.
        indices: int32 output, contiguous.
        topk_length: int32 output, contiguous.
        workspace: from :func:`make_workspace`; allocated when absent and needed.

    Returns:
        ``indices`` ([layers,] batch, [num_heads_kv,] max_k) int32, ascending in token order, -1
        padded, and ``topk_length`` without the last dimension. If there are more forced tokens than
        k (or ``max_k``), the smallest indices win; beyond ``max_k`` the best are kept, forced first.

    Raises:
        ValueError: naming the argument.

    Source: Vegas (arXiv 2602.07223), Eq. 2 and top-k selection; weights as in the authors' release.
    """
    check_tensors(logits=logits, seqlens=seqlens)
    _check_vector("seqlens", seqlens)
    layers = _layers_of(logits, dump)
    dump_code, mode_code = _DUMPS[dump], lookup(_MODES, mode, "mode")
    before, after = _pair("pool", pool)
    k_value, k_per_request = (0, k) if isinstance(k, Tensor) else (k, None)
    if block_table is not None and page_size is None:
        raise ValueError("`page_size` must be given with `block_table`, got None")
    check_integer("max_k", max_k, 0)
    shape = (*layers, seqlens.shape[0])
    if per_kv_head:
        if dump != "kv_head":
            raise ValueError(f'`per_kv_head` must go with dump="kv_head", got {dump!r}')
        shape = (*shape, logits.shape[-2])
    if indices is None:
        indices = seqlens.new_empty((*shape, max_k), dtype=torch.int32)
    if topk_length is None:
        topk_length = seqlens.new_empty(shape, dtype=torch.int32)
    if workspace is None:
        heads = logits.shape[-2] if dump == "kv_head" else 1
        workspace = _workspace_for(
            "topk_aggregate_logits", logits, seqlens.shape[0], 1, logits.shape[-1], max_k,
            layers[0] if layers else 1, heads, heads, 1,
        )  # fmt: skip
    call(
        torch.ops.vegas_ops.topk_aggregate_logits,
        logits, dump_code, seqlens, k_value, k_per_request, mode_code, lse, guide_lse, cu_seqlens_q,
        dump_rows, sinks, before, after, num_sink, num_recent, count_forced, per_kv_head,
        block_table, page_size or 0, max_k, indices, topk_length, workspace,
    )  # fmt: skip
    return indices, topk_length


def aggregate_logits(
    logits: Tensor,
    *,
    dump: Dump,
    seqlens: Tensor,
    mode: Mode = "logit",
    lse: Tensor | None = None,
    guide_lse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    dump_rows: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, int]:
    """The first half of :func:`topk_aggregate_logits`: scores summed over heads and counted rows.

    An engine with tensor parallelism puts an all-reduce behind it and selects from the result as a
    "token" dump. Arguments as there.

    Returns:
        ``sums`` ([layers,] batch, max_seqlen_k) fp32 (``out`` if given), and the number of heads
        summed. Unselectable candidates (-inf in any counted plane or head) hold -inf, NaN stays NaN;
        positions at or beyond ``seqlens`` are not written.
    """
    check_tensors(logits=logits, seqlens=seqlens)
    _check_vector("seqlens", seqlens)
    layers = _layers_of(logits, dump)
    mode_code = lookup(_MODES, mode, "mode")
    heads = {"kv_head": -2, "rows": -3, "all": -2}.get(dump)
    if out is None:
        shape = (*layers, seqlens.shape[0], logits.shape[-1])
        out = logits.new_empty(shape, dtype=torch.float32)
    call(
        torch.ops.vegas_ops.aggregate_logits,
        logits, _DUMPS[dump], seqlens, mode_code, lse, guide_lse, cu_seqlens_q, dump_rows, sinks, out,
    )  # fmt: skip
    return out, 1 if heads is None else logits.shape[heads]


def sparse_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor,
    *,
    tail_start: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    indices_are_slots: bool = True,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    batch_invariant: bool = False,
    num_splits: int = 0,
    scheduler_metadata: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draft: attention of one row per request over listed tokens and everything newer.

    Args:
        q: (batch, num_heads_q, head_dim), bf16 | fp16, on the CPU also fp32.
        k_cache: (num_pages, page_size, num_heads_kv, head_dim), q's dtype or float8_e4m3fn.
        v_cache: like ``k_cache``.
        indices: (batch, max_k) or (batch, num_heads_kv, max_k) int32: slots
            (``page * page_size + offset``), or token indices with ``block_table``. Must lie below
            ``tail_start``; -1 and what lies outside the cache is skipped; duplicates count twice.
        topk_length: (batch,) or (batch, num_heads_kv) int32 entries used; clamped to [0, max_k].
        tail_start: (batch,) int32: every token in [tail_start, seqused_k) is attended as well; needs
            ``seqused_k`` and ``block_table``. None: the listed tokens only.
        seqused_k: (batch,) int32 keys; 0 means an empty row, whose indices are not read.
        block_table: (batch, max_pages) int32 page ids.
        indices_are_slots: False: token indices.
        softmax_scale: default head_dim ** -0.5.
        softcap: as in :func:`flash_attn_with_logit_dump`.
        sinks: (num_heads_q,) fp32, likewise.
        window_size: clips token positions around p = seqused_k - 1, inclusive; with slots only where
            max_k is 0 (a window layer drafts with an empty list and a clipped tail).
        k_descale: as in :func:`flash_attn_with_logit_dump`.
        v_descale: likewise.
        batch_invariant: a request's result does not depend on the rest of the batch, bit for bit.
        num_splits: splits of the list; 0 chooses. On CUDA, more than 16 act as 16.
        scheduler_metadata: from :func:`build_scheduler_metadata`; unused by this release's kernels.
        out: (batch, num_heads_q, head_dim), q's dtype.
        lse: (num_heads_q, batch) fp32, contiguous.
        workspace: from :func:`make_workspace`; allocated when absent and needed.

    Returns:
        ``(out, lse)``; lse as in :func:`flash_attn_with_logit_dump`.

    Raises:
        ValueError: naming the argument.

    Source: Vegas (arXiv 2602.07223), sparse drafting.
    """
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, indices=indices, topk_length=topk_length)
    _check_dims(q, k_cache)
    if indices.dim() not in (2, 3):
        raise ValueError(
            f"`indices` must have shape (batch, max_k) or (batch, num_heads_kv, max_k), "
            f"got {tuple(indices.shape)}"
        )
    if block_table is not None:
        check_tensors(block_table=block_table)
        if block_table.dim() != 2:
            raise ValueError(f"`block_table` must have 2 dimensions, got {block_table.dim()}")
    left, right = _window(window_size)
    batch, num_heads_q, head_dim = q.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if lse is None:
        lse = q.new_empty((num_heads_q, batch), dtype=torch.float32)
    if workspace is None:
        table_tokens = 0 if block_table is None else block_table.shape[-1] * k_cache.shape[1]
        workspace = _workspace_for(
            "sparse_paged_decode", q, batch, 1, table_tokens, indices.shape[-1], 1, num_heads_q,
            k_cache.shape[2], head_dim,
        )  # fmt: skip
    call(
        torch.ops.vegas_ops.sparse_paged_decode,
        q, k_cache, v_cache, indices, topk_length, tail_start, seqused_k, block_table,
        indices_are_slots, _scale(softmax_scale, head_dim), softcap, sinks, left, right, k_descale,
        v_descale, batch_invariant, num_splits, out, lse, workspace,
    )  # fmt: skip
    return out, lse


def _register_fake(name: str) -> None:
    """The ops mutate what they are given and return nothing. A single meta tensor brings a call here, too."""
    arguments = getattr(torch.ops.vegas_ops, name).default._schema.arguments

    def fake(*args: Any, **kwargs: Any) -> None:
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        tensors = [(key, value) for key, value in given.items() if isinstance(value, Tensor)]
        (first, like), *others = tensors
        for key, value in others:
            if value.device != like.device:
                raise ValueError(f"`{key}` must be on {like.device} as `{first}` is, got {value.device}")

    torch.library.register_fake(f"vegas_ops::{name}", fake)


for _name in (
    "flash_attn_with_logit_dump",
    "topk_aggregate_logits",
    "aggregate_logits",
    "sparse_paged_decode",
):
    _register_fake(_name)


@torch.library.register_fake("vegas_ops::new_workspace")
def _(like: Tensor, *arguments: int) -> Tensor:
    from vegas_ops import _C

    size = _C.workspace_bytes(*(int(x) for x in arguments), like.device.type == "cuda")
    return like.new_empty(size, dtype=torch.uint8)
