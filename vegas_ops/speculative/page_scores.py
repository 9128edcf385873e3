"""Quest's pages on a GPU, a launch each: the bounds of their keys, what a key of them could score at most,
and the tokens of those chosen.

`Quest` asks for the last two in every layer of every draft step. Torch's operators, some ten launches in
place of one, say what the kernels compute, and are the tests' oracle.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from vegas_ops import jit
from vegas_ops.jit import gdc_launch_dependents, gdc_wait
from vegas_ops.speculative.kv_cache import PagedKVCache
from vegas_ops.speculative.selection import in_chunks

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None

_BLOCK = 64  # pages
_TOKENS = 1024  # of a list that a program writes


def available(device: torch.device) -> bool:
    return jit.works(device)


def page_scores_by_torch(
    cache: PagedKVCache, layer: int, block_table: Tensor, q: Tensor, tail_start: Tensor, size: int
) -> Tensor:
    """`page_scores`; of pages beyond the tail's start, too."""
    bounds = cache.key_bounds(layer, block_table, size)  # (batch, pages, 2, heads, d)
    q = q.float().unflatten(1, (bounds.shape[3], -1))
    # max(q min, q max) is min(q, 0) min + max(q, 0) max, so the group's heads can be summed first.
    signs = torch.stack([q.clamp(max=0).sum(2), q.clamp(min=0).sum(2)], 1)
    return torch.einsum("bnshd,bshd->bhn", bounds.float(), signs).contiguous()


def page_scores(
    cache: PagedKVCache, layer: int, block_table: Tensor, q: Tensor, tail_start: Tensor, k: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What to choose pages of `size` tokens by, for each request's KV heads in turn: scores (lists, pages)
    fp32, the sum over a group's heads of what a key of each page could score at most, by what was noted of
    it; and, (lists,) int32, the pages before tail_start and those to choose with a budget of k tokens. Scores
    of other pages are undefined. q: (batch, num_heads_q, head_dim); tail_start, k: (batch,) int32."""
    heads = cache.k.shape[3]
    if not available(q.device):
        scores = page_scores_by_torch(cache, layer, block_table, q, tail_start, size)
        counts, budgets = ((x // size).repeat_interleave(heads) for x in (tail_start, k))
        return scores.flatten(0, 1), counts, budgets
    _, all_bounds, step = cache.keys_and_bounds(size)
    bounds = all_bounds[layer]
    batch, dim = q.shape[0], bounds.shape[3]
    pages = block_table.shape[1] * cache.page_size // size
    scores = torch.empty((batch * heads, pages), device=q.device)
    counts, budgets = torch.empty((2, batch * heads), dtype=torch.int32, device=q.device)
    # At least one program a list, which also notes its counts.
    _page_scores_kernel[(max(triton.cdiv(pages, _BLOCK), 1), batch * heads)](
        q, bounds, block_table, tail_start, k, scores, counts, budgets, q.stride(0), q.stride(1),
        block_table.stride(0), pages, cache.unused_slot,
        HEADS=heads, GROUP=q.shape[1] // heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), SIZE=size,
        PAGE_SIZE=cache.page_size, STEP=step, BLOCK=_BLOCK, **jit.launch_options(q.device),
    )  # fmt: skip
    return scores, counts, budgets


def page_tokens(pages: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Lists of pages, (lists, n) int32 and -1 padded, with their lengths, as lists of the tokens in them."""
    if not available(pages.device):
        return in_chunks(pages, length, size)
    lists, n = pages.shape
    tokens, lengths = pages.new_empty((lists, n * size)), torch.empty_like(length)
    _page_tokens_kernel[(triton.cdiv(n * size, _TOKENS), lists)](
        pages, length, tokens, lengths, n, SIZE=size, BLOCK=_TOKENS, **jit.launch_options(pages.device)
    )
    return tokens, lengths


def note_bounds(cache: PagedKVCache, block_table: Tensor, ends: Tensor, count: int, size: int) -> None:
    """Notes channelwise minimum and maximum of the keys of each request's last `count` whole pages of `size`
    tokens before ends, (batch,) int32 (`PagedKVCache.bound_keys`)."""
    if not available(cache.device) or cache.fp8:
        last = ends.long()[:, None] // size
        cache.bound_keys(block_table, last - 1 - torch.arange(count, device=cache.device), size)
        return
    keys, bounds, step = cache.keys_and_bounds(size)
    layers, _, page_size, heads, dim = keys.shape
    _bounds_kernel[(block_table.shape[0] * count, layers)](
        keys, bounds, block_table, ends, count, keys.stride(0), bounds.stride(0), block_table.stride(0),
        cache.unused_slot, HEADS=heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), SIZE=size,
        BLOCK_S=triton.next_power_of_2(size), PAGE_SIZE=page_size, STEP=step,
        **jit.launch_options(cache.device),
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _page_scores_kernel(
        q, bounds, block_table, tail_start, k, scores, counts, budgets, q_row, q_head, table_row, pages,
        unused_slot,
        HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """Some pages of one request for one KV head."""
        row = tl.program_id(1).to(tl.int64)
        request, head = row // HEADS, row % HEADS
        page, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        channel = d < DIM
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        low, high = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
        for member in tl.static_range(GROUP):
            place = request * q_row + (head * GROUP + member) * q_head
            x = tl.load(q + place + d, mask=channel, other=0.0).to(tl.float32)
            low += tl.minimum(x, 0.0)
            high += tl.maximum(x, 0.0)
        count = tl.load(tail_start + request) // SIZE
        if tl.program_id(0) == 0:
            tl.store(counts + row, count)
            tl.store(budgets + row, tl.load(k + request) // SIZE)
        known = (page < pages) & (page < count)
        position = page * SIZE
        entry = tl.load(block_table + request * table_row + position // PAGE_SIZE, mask=known, other=-1)
        slot = entry.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        home = tl.where(entry < 0, unused_slot, slot) // STEP
        place = (home[:, None] * (2 * HEADS) + head) * DIM + d[None, :]
        inside = known[:, None] & channel[None, :]
        least = tl.load(bounds + place, mask=inside, other=0.0).to(tl.float32)
        most = tl.load(bounds + place + HEADS * DIM, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(least * low[None, :] + most * high[None, :], 1)
        tl.store(scores + row * pages + page, score, mask=known)

    @triton.jit
    def _page_tokens_kernel(
        pages, length, tokens, lengths, n, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """Some tokens of one list."""
        row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n * SIZE
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        page = tl.load(pages + row * n + i // SIZE, mask=inside, other=-1)
        tl.store(tokens + row * n * SIZE + i, tl.where(page < 0, -1, page * SIZE + i % SIZE), mask=inside)
        if tl.program_id(0) == 0:
            tl.store(lengths + row, tl.load(length + row) * SIZE)

    @triton.jit
    def _bounds_kernel(
        keys, bounds, block_table, ends, count, keys_layer, bounds_layer, table_row, unused_slot,
        HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr,
        BLOCK_S: tl.constexpr, PAGE_SIZE: tl.constexpr, STEP: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """One page of one request in one layer."""
        request, layer = tl.program_id(0) // count, tl.program_id(1).to(tl.int64)
        token, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        page = tl.load(ends + request) // SIZE - 1 - tl.program_id(0) % count
        if page >= 0:
            position = page * SIZE + token
            entries = block_table + request.to(tl.int64) * table_row
            entry = tl.load(entries + position // PAGE_SIZE, mask=token < SIZE, other=-1).to(tl.int64)
            slot = tl.where(entry < 0, unused_slot, entry * PAGE_SIZE + position % PAGE_SIZE)
            first = tl.load(entries + page * SIZE // PAGE_SIZE).to(tl.int64)
            begin = tl.where(first < 0, unused_slot, first * PAGE_SIZE + page * SIZE % PAGE_SIZE)
            place = bounds + layer * bounds_layer + begin // STEP * (2 * HEADS * DIM) + d
            inside, channel = (token < SIZE)[:, None] & (d < DIM)[None, :], d < DIM
            for head in tl.static_range(HEADS):
                at = keys + layer * keys_layer + (slot[:, None] * HEADS + head) * DIM + d[None, :]
                x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                least = tl.min(tl.where(inside, x, float("inf")), 0)
                most = tl.max(tl.where(inside, x, float("-inf")), 0)
                tl.store(place + head * DIM, least.to(bounds.dtype.element_ty), mask=channel)
                tl.store(place + (HEADS + head) * DIM, most.to(bounds.dtype.element_ty), mask=channel)
