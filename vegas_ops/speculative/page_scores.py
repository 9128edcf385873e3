"""The highest score that a page's keys could have, by their channelwise bounds, in one launch on a GPU.

`Quest` asks for it in every layer of every draft step. Torch's operators gather the bounds, widen them and
multiply them in launches of their own; they say what this kernel computes, and are the tests' oracle.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from vegas_ops import jit
from vegas_ops.jit import gdc_launch_dependents, gdc_wait
from vegas_ops.speculative.kv_cache import PagedKVCache

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None

_BLOCK = 64  # pages


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
    cache: PagedKVCache, layer: int, block_table: Tensor, q: Tensor, tail_start: Tensor, size: int
) -> Tensor:
    """(batch, num_heads_kv, pages) fp32: the sum over a group's heads of what a key of each page of `size`
    tokens could score at most, by what `PagedKVCache.bound_keys` noted. Undefined for pages that begin at
    tail_start, (batch,) int32, or behind. q: (batch, num_heads_q, head_dim)."""
    if not available(q.device):
        return page_scores_by_torch(cache, layer, block_table, q, tail_start, size)
    bounds, step = cache.bounds_of(layer, size)
    batch, heads, dim = q.shape[0], bounds.shape[2], bounds.shape[3]
    pages = block_table.shape[1] * cache.page_size // size
    scores = torch.empty((batch, heads, pages), device=q.device)
    _page_scores_kernel[(triton.cdiv(pages, _BLOCK), batch * heads)](
        q, bounds, block_table, tail_start, scores, q.stride(0), q.stride(1), block_table.stride(0), pages,
        cache.unused_slot,
        HEADS=heads, GROUP=q.shape[1] // heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), SIZE=size,
        PAGE_SIZE=cache.page_size, STEP=step, BLOCK=_BLOCK, **jit.launch_options(q.device),
    )  # fmt: skip
    return scores


if triton is not None:

    @triton.jit
    def _page_scores_kernel(
        q, bounds, block_table, tail_start, scores, q_row, q_head, table_row, pages, unused_slot,
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
        known = (page < pages) & (page < tl.load(tail_start + request) // SIZE)
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
