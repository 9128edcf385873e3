"""Plain-PyTorch oracles of the ops, written like the formulas: slow, and easy to check by eye.

The functions take the arguments of their namesakes in `vegas_ops.ops` plus `compute_dtype`, run on
CPU and CUDA tensors alike, and share nothing with the kernels. What the contract says is never
read is never read here either: every key is looked up in its page, one request at a time. Outputs
that are not given are allocated with the op's shapes and dtypes and filled with NaN (-1 for
indices), so that positions which the op would leave alone can be told apart; give float64 outputs
to keep the full precision of `compute_dtype`. They read lengths on the host, so they synchronise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FIRST_ROW, _LAST_ROW = 1, 2
# Dimensions of a dump without a leading layers dimension.
_DUMP_NDIM = {"token": 2, "token_weight": 2, "kv_head": 4, "rows": 4, "all": 3}


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
    dump: str = "token",
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
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Attention of every query row over its request's cached keys, and the logits met on the way.

    Shapes, dtypes and meanings are those of `vegas_ops.flash_attn_with_logit_dump`. A row that sees
    no key has `out` 0 and `lse` -inf. `batch_invariant`, `num_splits`, `scheduler_metadata` and
    `workspace` change no result and are ignored.
    """
    total_q, num_heads_q, head_dim = q.shape
    num_heads_kv = k_cache.shape[2]
    batch = seqused_k.shape[0]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = _allocate(out, (total_q, num_heads_q, head_dim), q.dtype, q.device)
    lse = _allocate(lse, (num_heads_q, total_q), torch.float32, q.device)
    if dump == "none":
        logits = None
    else:
        shape = {
            "token": (batch, max_seqlen_k),
            "token_weight": (batch, max_seqlen_k),
            "kv_head": (batch, 2, num_heads_kv, max_seqlen_k),
            "rows": (batch, num_heads_q, 2, max_seqlen_k),
            "all": (total_q, num_heads_q, max_seqlen_k),
        }[dump]
        dtype = torch.float32 if dump in ("token", "token_weight") else torch.bfloat16
        logits = _allocate(logits, shape, dtype, q.device)
    if dump in ("token_weight", "kv_head"):
        guide_lse = _allocate(guide_lse, (batch, 2, num_heads_kv), torch.float32, q.device)
    else:
        guide_lse = None

    for b in range(batch):
        start, end, length = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]), int(seqused_k[b])
        q_len = end - start
        if q_len <= 0:
            continue
        positions = torch.arange(length, device=q.device)
        slots = _slots(positions, block_table[b], k_cache)
        keys = _load(k_cache, slots, _descale_of(k_descale, b, num_heads_kv), compute_dtype)
        values = _load(v_cache, slots, _descale_of(v_descale, b, num_heads_kv), compute_dtype)

        # Which keys each row sees, and what its softmax meets: (q_len, length), (q_len, heads, length).
        p = length - q_len + torch.arange(q_len, device=q.device)[:, None]
        in_window = _causal_window(positions, p, causal, window_size)
        visible = ((slots >= 0) & in_window).expand(q_len, length)
        row_logits = _logits(q[start:end].to(compute_dtype), keys, scale, softcap)

        # Rows one by one where a value is not finite: 0 times what a row does not see would be NaN.
        step = q_len if bool(values.isfinite().all()) else 1
        for first in range(0, q_len, step):
            sees = visible[first : first + step]
            keep = sees.any(0)
            hidden = ~sees[:, None, keep]
            scores = row_logits[first : first + step, :, keep].masked_fill(hidden, -math.inf)
            rows_out, rows_lse = _attend(scores, values[keep], sinks, hidden)
            rows = slice(start + first, start + first + step)
            out[rows], lse[:, rows] = rows_out.to(out.dtype), rows_lse.T.to(lse.dtype)

        bits = 3 if dump_rows is None else int(dump_rows[b])
        # Plane of the dump -> its query row.
        planes = {}
        if bits & _FIRST_ROW:
            planes[0] = 0
        if bits & _LAST_ROW:
            planes[1] = q_len - 1
        if logits is None or not planes:
            continue
        n = length - q_len + 1 if dump_len is None else int(dump_len[b])
        n = min(max(n, 0), length)

        if dump == "all":
            for row in range(q_len):
                scores = row_logits[row].masked_fill(~visible[row], -math.inf)
                logits[start + row, :, :n] = scores[:, :n].to(logits.dtype)
            continue

        if dump == "rows":
            for plane, row in planes.items():
                scores = row_logits[row].masked_fill(~visible[row], -math.inf)
                logits[b, :, plane, :n] = scores[:, :n].to(logits.dtype)
            continue

        guides = {}
        for plane, row in planes.items():
            guide = _guide_row(q[start + row], num_heads_kv).to(compute_dtype)
            scores = _logits(guide, keys, scale, softcap)
            guides[plane] = scores.masked_fill(~visible[row], -math.inf)
        if guide_lse is not None:
            for plane in (0, 1):
                # A plane that was not dumped repeats the other.
                source = guides[plane if plane in guides else 1 - plane]
                guide_lse[b, plane] = _logsumexp(source).to(guide_lse.dtype)

        if dump == "kv_head":
            for plane, scores in guides.items():
                logits[b, plane, :, :n] = scores[:, :n].to(logits.dtype)
            continue

        if q_len == 1 and len(planes) == 2:
            del planes[0]  # the two planes are one row, and sums take it once
        masked = torch.zeros(length, dtype=torch.bool, device=q.device)
        total = torch.zeros(length, dtype=compute_dtype, device=q.device)
        for plane, row in planes.items():
            masked |= ~visible[row]
            if dump == "token":
                total += row_logits[row].sum(0)
            else:
                if guide_lse_hint is None:
                    raise ValueError("`guide_lse_hint` must be given to weigh tokens, got None")
                hint = guide_lse_hint[b, plane].to(compute_dtype)
                total += torch.exp(guides[plane] - hint[:, None]).sum(0)
        if dump == "token_weight":
            total = total.clamp(max=torch.finfo(torch.float32).max)
        total = total.masked_fill(masked, -math.inf)
        logits[b, :n] = total[:n].to(logits.dtype)

    return out, lse, logits, guide_lse


def aggregate_logits(
    logits: Tensor,
    *,
    dump: str,
    seqlens: Tensor,
    mode: str = "logit",
    lse: Tensor | None = None,
    guide_lse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    dump_rows: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, int]:
    """One score per cached token: the sum of a dump over heads and dumped rows (paper, Eq. 2).

    Returns the sum, ([layers,] batch, max_seqlen_k) fp32, and how many heads were summed. A
    candidate that is -inf in any counted plane or head, and every candidate of a request without
    scores, gets -inf. Positions at or beyond `seqlens` are not written.
    """
    has_layers = logits.ndim == _DUMP_NDIM[dump] + 1
    dumps = logits if has_layers else logits[None]
    batch, width = seqlens.shape[0], logits.shape[-1]
    shape = (dumps.shape[0], batch, width) if has_layers else (batch, width)
    out = _allocate(out, shape, torch.float32, logits.device)
    sums = out if has_layers else out[None]
    for layer in range(dumps.shape[0]):
        for b in range(batch):
            n = min(max(int(seqlens[b]), 0), width)
            per_head = _scores(
                dumps, layer, b, n, dump, mode, lse, guide_lse, cu_seqlens_q, dump_rows, sinks,
                has_layers, compute_dtype,
            )  # fmt: skip
            sums[layer, b, :n] = _sum_scores(per_head, dim=0).to(out.dtype)
    num_heads = {"kv_head": 2, "rows": 1, "all": 1}.get(dump)
    return out, 1 if num_heads is None else dumps.shape[1 + num_heads]


def topk_aggregate_logits(
    logits: Tensor,
    *,
    dump: str,
    seqlens: Tensor,
    k: int | Tensor,
    mode: str = "logit",
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
    max_k: int,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    workspace: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The k best candidates of every request (and layer, and KV head), ascending, -1 padded.

    Candidates are ranked by their pooled score, ties by the smaller index; -inf and NaN are never
    chosen, except by force. Scores are summed in `compute_dtype`.
    """
    has_layers = logits.ndim == _DUMP_NDIM[dump] + 1
    dumps = logits if has_layers else logits[None]
    layers, batch, width = dumps.shape[0], seqlens.shape[0], logits.shape[-1]
    lead = (layers, batch) if has_layers else (batch,)
    if per_kv_head:
        if dump != "kv_head":
            raise ValueError(f"`per_kv_head` must go with dump='kv_head', got dump={dump!r}")
        lead = (*lead, dumps.shape[3])
    if indices is None:
        indices = torch.full((*lead, max_k), -1, dtype=torch.int32, device=logits.device)
    if topk_length is None:
        topk_length = torch.zeros(lead, dtype=torch.int32, device=logits.device)
    num_lists = dumps.shape[3] if per_kv_head else 1
    lists = indices.reshape(layers, batch, num_lists, max_k)
    counts = topk_length.reshape(layers, batch, num_lists)

    for layer in range(layers):
        for b in range(batch):
            n = min(max(int(seqlens[b]), 0), width)
            budget = min(max(int(k[b]) if isinstance(k, Tensor) else k, 0), n)
            per_head = _scores(
                dumps, layer, b, n, dump, mode, lse, guide_lse, cu_seqlens_q, dump_rows, sinks,
                has_layers, compute_dtype,
            )  # fmt: skip
            scores = per_head if per_kv_head else _sum_scores(per_head, dim=0)[None]
            for head in range(scores.shape[0]):
                chosen = _choose(_pool(scores[head], pool), budget, num_sink, num_recent, count_forced, max_k)
                if block_table is not None:
                    assert page_size is not None
                    pages = block_table[b, chosen // page_size].to(torch.int64)
                    chosen = torch.where(pages < 0, -1, pages * page_size + chosen % page_size)
                lists[layer, b, head] = -1
                lists[layer, b, head, : len(chosen)] = chosen.to(lists)
                counts[layer, b, head] = len(chosen)
    # Copies are made only where a given output is not contiguous.
    indices.copy_(lists.reshape(indices.shape))
    topk_length.copy_(counts.reshape(topk_length.shape))
    return indices, topk_length


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
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of one row per request over the listed tokens and the tail [tail_start, seqused_k).

    A listed token that is negative or outside the cache is skipped; one listed twice counts twice.
    A row without any key has `out` 0 and `lse` -inf.
    """
    batch, num_heads_q, head_dim = q.shape
    num_pages, page_size, num_heads_kv, _ = k_cache.shape
    group = num_heads_q // num_heads_kv
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = _allocate(out, (batch, num_heads_q, head_dim), q.dtype, q.device)
    lse = _allocate(lse, (num_heads_q, batch), torch.float32, q.device)

    # KV heads that share a list.
    sharing = 1 if indices.ndim == 3 or topk_length.ndim == 2 else num_heads_kv
    for b in range(batch):
        length = None if seqused_k is None else int(seqused_k[b])
        for head in range(0, num_heads_kv, sharing):
            heads_kv = slice(head, head + sharing)
            heads = slice(head * group, (head + sharing) * group)
            slots = torch.empty(0, dtype=torch.int64, device=q.device)
            if length != 0:
                row = indices[b, head] if indices.ndim == 3 else indices[b]
                count = int(topk_length[b, head] if topk_length.ndim == 2 else topk_length[b])
                listed = row[: max(count, 0)].to(torch.int64)
                if indices_are_slots:
                    slots = listed[(listed >= 0) & (listed < num_pages * page_size)]
                else:
                    assert block_table is not None
                    slots = _existing_slots(listed, block_table[b], k_cache, length, window_size)
                if tail_start is not None:
                    assert block_table is not None and length is not None
                    tail = torch.arange(min(max(int(tail_start[b]), 0), length), length, device=q.device)
                    tail = _existing_slots(tail, block_table[b], k_cache, length, window_size)
                    slots = torch.cat([slots, tail])
            keys = _load(k_cache, slots, _descale_of(k_descale, b, num_heads_kv), compute_dtype)
            values = _load(v_cache, slots, _descale_of(v_descale, b, num_heads_kv), compute_dtype)
            head_out, head_lse = _attend(
                _logits(q[b, heads].to(compute_dtype), keys[:, heads_kv], scale, softcap),
                values[:, heads_kv],
                None if sinks is None else sinks[heads],
            )
            out[b, heads] = head_out.to(out.dtype)
            lse[heads, b] = head_lse.to(lse.dtype)
    return out, lse


def _allocate(
    given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device) if given is None else given


# Looking keys up in their pages. A slot is page * page_size + offset; -1 stands for no slot.


def _slots(positions: Tensor, pages_of: Tensor, cache: Tensor) -> Tensor:
    """-1 where a position lies on no page of the cache; `pages_of` is one row of the block table."""
    page_size, columns = cache.shape[1], pages_of.shape[0]
    column = positions // page_size
    in_table = (positions >= 0) & (column < columns)
    # One more column, without a page, for what lies outside.
    pages = torch.cat([pages_of, pages_of.new_full((1,), -1)]).to(positions.dtype)
    page = pages[column.where(in_table, columns)]
    exists = (page >= 0) & (page < cache.shape[0])
    return (page * page_size + positions % page_size).where(exists, -1)


def _existing_slots(
    positions: Tensor,
    pages_of: Tensor,
    cache: Tensor,
    length: int | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Slots of the positions that a draft row at position length - 1 sees."""
    if length is not None:
        positions = positions[positions < length]
        positions = positions[_in_window(positions, length - 1, window_size)]
    slots = _slots(positions, pages_of, cache)
    return slots[slots >= 0]


def _load(cache: Tensor, slots: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows (len(slots), num_heads_kv, head_dim) of the cache, 0 where there is no slot."""
    if cache.shape[0] == 0:
        return torch.zeros(slots.shape[0], *cache.shape[2:], dtype=dtype, device=cache.device)
    absent = (slots < 0)[:, None, None]
    pages, offsets = slots.clamp(min=0) // cache.shape[1], slots.clamp(min=0) % cache.shape[1]
    if cache.element_size() == 1:  # indexing is not implemented for fp8: take the bytes
        loaded = cache.view(torch.uint8)[pages, offsets].view(cache.dtype)
    else:
        loaded = cache[pages, offsets]
    rows = loaded.to(torch.float32).to(dtype).masked_fill(absent, 0.0)
    return rows if descale is None else rows * descale.to(dtype)[None, :, None]


def _descale_of(descale: Tensor | None, b: int, num_heads_kv: int) -> Tensor | None:
    """One request's factors, (num_heads_kv,), from any of the three shapes of a descale."""
    if descale is None:
        return None
    return (descale[b] if descale.ndim == 2 else descale).expand(num_heads_kv)


# Attention.


def _causal_window(positions: Tensor, p: Tensor | int, causal: bool, window_size: tuple[int, int]) -> Tensor:
    mask = _in_window(positions, p, window_size)
    return mask & (positions <= p) if causal else mask


def _in_window(positions: Tensor, p: Tensor | int, window_size: tuple[int, int]) -> Tensor:
    """Keys in [p - left, p + right]; -1 is unbounded."""
    left, right = window_size
    mask = torch.ones_like(positions, dtype=torch.bool)
    if left >= 0:
        mask = mask & (positions >= p - left)
    if right >= 0:
        mask = mask & (positions <= p + right)
    return mask


def _logits(query: Tensor, keys: Tensor, scale: float, softcap: float) -> Tensor:
    """([rows,] heads, keys): scaled and softcapped products; query head h meets KV head h // group."""
    *rows, num_heads_q, head_dim = query.shape
    grouped = query.reshape(*rows, keys.shape[1], -1, head_dim)
    scores = torch.einsum("...hgd,thd->...hgt", grouped, keys)
    scores = scores.reshape(*rows, num_heads_q, keys.shape[0]) * scale
    return softcap * torch.tanh(scores / softcap) if softcap > 0 else scores


def _logsumexp(scores: Tensor) -> Tensor:
    if scores.shape[-1] == 0:
        return torch.full(scores.shape[:-1], -math.inf, dtype=scores.dtype, device=scores.device)
    return torch.logsumexp(scores, dim=-1)


def _attend(
    scores: Tensor, values: Tensor, sinks: Tensor | None, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax over keys: scores ([rows,] heads, keys), -inf where `hidden`; values (keys, num_heads_kv,
    head_dim)."""
    lse = _logsumexp(scores)
    # A sink takes weight and gives no value.
    norm = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype))
    weights = torch.exp(scores - norm[..., None])
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # of a row without keys, too
    *rows, num_heads_q, num_keys = scores.shape
    num_heads_kv, head_dim = values.shape[1:]
    grouped = weights.reshape(*rows, num_heads_kv, num_heads_q // num_heads_kv, num_keys)
    out = torch.einsum("...hgt,thd->...hgd", grouped, values)
    return out.reshape(*rows, num_heads_q, head_dim), lse


def _guide_row(query: Tensor, num_heads_kv: int) -> Tensor:
    """Mean of each group's query heads, (num_heads_kv, head_dim): in fp32, rounded once."""
    grouped = query.to(torch.float32).reshape(num_heads_kv, -1, query.shape[-1])
    total = grouped[:, 0].clone()
    for head in range(1, grouped.shape[1]):
        total += grouped[:, head]
    return (total / grouped.shape[1]).to(query.dtype)


# Selection.


def _scores(
    dumps: Tensor,
    layer: int,
    b: int,
    n: int,
    dump: str,
    mode: str,
    lse: Tensor | None,
    guide_lse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    dump_rows: Tensor | None,
    sinks: Tensor | None,
    has_layers: bool,
    dtype: torch.dtype,
) -> Tensor:
    """One request's scores per head, summed over its counted rows: (heads, n).

    -inf where any counted row of the head is -inf, and everywhere if the request has no scores.
    """
    bits = 3 if dump_rows is None else int(dump_rows[b]) & 3
    first = last = None
    if cu_seqlens_q is not None:
        first, last = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]) - 1
        if last < first:
            bits = 0
    planes = [plane for plane, bit in ((0, _FIRST_ROW), (1, _LAST_ROW)) if bits & bit]
    if first is not None and first == last:
        planes = planes[:1]  # one row: its planes are equal, and count once

    if dump in ("token", "token_weight"):
        rows = [dumps[layer, b, None, :n]] if planes else []
    elif dump == "kv_head":
        rows = [dumps[layer, b, plane, :, :n] for plane in planes]
    elif dump == "rows":
        rows = [dumps[layer, b, :, plane, :n] for plane in planes]
    else:
        if first is None or last is None:
            raise ValueError("`cu_seqlens_q` must be given for dump='all', got None")
        rows = [dumps[layer, row, :, :n] for row in range(first, last + 1)] if planes else []
    if not rows:
        heads = {"kv_head": 2, "rows": 1, "all": 1}.get(dump)
        count = 1 if heads is None else dumps.shape[1 + heads]
        return torch.full((count, n), -math.inf, dtype=dtype, device=dumps.device)
    stacked = torch.stack(rows).to(dtype)  # (rows, heads, n)
    unselectable = torch.isneginf(stacked).any(0)

    if mode == "weight" and dump == "kv_head":
        if guide_lse is None:
            raise ValueError("`guide_lse` must be given to weigh a 'kv_head' dump, got None")
        norm = (guide_lse[layer] if has_layers else guide_lse)[b, planes]
        stacked = torch.exp(stacked - norm.to(dtype)[:, :, None])
    elif mode == "weight" and dump in ("rows", "all"):
        if lse is None or first is None or last is None:
            raise ValueError(f"`lse` and `cu_seqlens_q` must be given to weigh a {dump!r} dump")
        counted = list(range(first, last + 1)) if dump == "all" else [(first, last)[p] for p in planes]
        norm = (lse[layer] if has_layers else lse)[:, counted].T.to(dtype)  # (rows, heads)
        if sinks is not None:
            norm = torch.logaddexp(norm, (sinks[layer] if sinks.ndim == 2 else sinks).to(dtype))
        stacked = torch.exp(stacked - norm[:, :, None])
    return stacked.sum(0).masked_fill(unselectable, -math.inf)


def _sum_scores(per_head: Tensor, dim: int) -> Tensor:
    unselectable = torch.isneginf(per_head).any(dim)
    return per_head.sum(dim).masked_fill(unselectable, -math.inf)


def _pool(scores: Tensor, pool: tuple[int, int]) -> Tensor:
    """Maximum over [i - before, i + after]; -inf and NaN stay out and lend nothing."""
    unselectable = torch.isneginf(scores) | torch.isnan(scores)
    own = scores.masked_fill(unselectable, -math.inf)
    pooled = own.clone()
    n = scores.shape[0]
    for shift in range(1, min(pool[0], n - 1) + 1):
        pooled[shift:] = torch.maximum(pooled[shift:], own[:-shift])
    for shift in range(1, min(pool[1], n - 1) + 1):
        pooled[:-shift] = torch.maximum(pooled[:-shift], own[shift:])
    return pooled.masked_fill(unselectable, -math.inf)


def _choose(scores: Tensor, k: int, num_sink: int, num_recent: int, count_forced: bool, max_k: int) -> Tensor:
    """Forced tokens, then the best of the others; ascending."""
    n = scores.shape[0]
    tokens = torch.arange(n, device=scores.device)
    is_forced = (tokens < num_sink) | (tokens >= n - num_recent)
    forced = tokens[is_forced][: min(k, max_k) if count_forced else max_k]
    # A stable sort keeps equal scores in the order of their index.
    order = torch.sort(scores, descending=True, stable=True).indices
    others = order[~is_forced[order] & ~torch.isneginf(scores[order])]
    room = min(k - len(forced) if count_forced else k, max_k - len(forced))
    return torch.sort(torch.cat([forced, others[:room]])).values
