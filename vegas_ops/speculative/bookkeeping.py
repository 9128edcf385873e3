"""What a round does beside the model's forwards, as one kernel each on a GPU.

Rows, positions, slots, acceptance and the step to the next round are some eighty operators of torch on a
few integers; for a small model they take as long as its layers. The operators in `round.py` and
`acceptance.py` say what these kernels compute and are what runs everywhere else, and the tests' oracle.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vegas_ops import jit

if TYPE_CHECKING:
    from vegas_ops.speculative.attention import Group
    from vegas_ops.speculative.round import Round

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None

_BLOCK = 128


def available(device: torch.device) -> bool:
    return jit.works(device)


if triton is not None:

    @triton.jit
    def _draft_rows_kernel(
        values, int32, block_table, positions, keys, slots, batch, steps, pages, page_size, unused_slot,
        LENGTHS: tl.constexpr, DRAFTS: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        copied = i < COPIED * batch
        tl.store(int32 + i, tl.load(values + i, mask=copied, other=0).to(tl.int32), mask=copied)
        inside = i < steps * batch
        step, row = i // batch, i % batch
        active = inside & (step < tl.load(values + DRAFTS * batch + row, mask=inside, other=0))
        length = tl.load(values + LENGTHS * batch + row, mask=active, other=1)
        position = length - 1 + tl.where(active, step, 0)
        page = tl.load(block_table + row * pages + position // page_size, mask=active, other=0)
        slot = page.to(tl.int64) * page_size + position % page_size
        tl.store(positions + i, tl.where(active, position, 0), mask=inside)
        tl.store(keys + i, tl.where(active, position + 1, 0).to(tl.int32), mask=inside)
        tl.store(slots + i, tl.where(active, slot, unused_slot), mask=inside)

    @triton.jit
    def _verify_rows_kernel(
        values, int32, block_table, table, owners, offsets, positions, slots, tokens, cu_seqlens, last,
        batch, begin, size, rows, row_begin, pages, width, page_size, unused_slot,
        KEYS: tl.constexpr, DRAFTS: tl.constexpr, Q_LENS: tl.constexpr, COPIED: tl.constexpr,
        MEMBERS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        member = tl.arange(0, MEMBERS)
        known = member < size
        q_len = tl.load(values + Q_LENS * batch + begin + member, mask=known, other=0)
        ends = tl.cumsum(q_len, 0)
        if tl.program_id(0) == 0:
            for field in tl.static_range(COPIED):
                place = field * batch + begin + member
                tl.store(int32 + place, tl.load(values + place, mask=known, other=0).to(tl.int32), mask=known)
            tl.store(cu_seqlens + member, (ends - q_len).to(tl.int32), mask=known)
            tl.store(cu_seqlens + size + member, tl.sum(q_len, 0).to(tl.int32), mask=member == 0)
            tl.store(last + begin + member, ends + row_begin - 1, mask=known)
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = row < rows
        owner = tl.sum((known[None, :] & (ends[None, :] <= row[:, None])).to(tl.int32), 1)
        used = inside & (owner < size)
        held = tl.minimum(owner, size - 1)
        before = tl.where(member[None, :] < held[:, None], q_len[None, :], 0)
        offset = tl.where(used, row - tl.sum(before, 1), 0)
        request = begin + held
        own_rows = tl.load(values + Q_LENS * batch + request, mask=used, other=0)
        position = tl.load(values + KEYS * batch + request, mask=used, other=0) - own_rows + offset
        page = tl.load(block_table + request * pages + position // page_size, mask=used, other=0)
        slot = page.to(tl.int64) * page_size + position % page_size
        # A prompt's rows that are computed once more are in the cache, maybe in shared pages.
        drafts = tl.load(values + DRAFTS * batch + request, mask=used, other=0)
        writes = used & (offset >= own_rows - drafts - 1)
        out = row_begin + row
        tl.store(owners + out, owner.to(tl.int64), mask=inside)
        tl.store(offsets + out, offset, mask=inside)
        tl.store(positions + out, tl.where(used, position, 0), mask=inside)
        tl.store(slots + out, tl.where(writes, slot, unused_slot), mask=inside)
        token = tl.load(table + request * width + offset, mask=inside, other=0)
        tl.store(tokens + out, token, mask=inside)

    @triton.jit
    def _accept_kernel(
        values, table, top, choice, last, result, batch, steps, width,
        DRAFTS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """`accept_greedy` for one request, over the verification's packed rows."""
        request = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        drafts = tl.load(values + DRAFTS * batch + request)
        end = tl.load(last + request)
        row = tl.maximum(end - tl.maximum(drafts - column, 0), 0)
        draft = tl.load(table + request * width + 1 + column, mask=column < steps, other=-1)
        fine = tl.abs(tl.load(top + row)) < float("inf")
        good = (column < drafts) & fine & (draft == tl.load(choice + row))
        count = tl.min(tl.where(good, COLUMNS, column), 0)
        row = tl.maximum(end - tl.maximum(drafts - count, 0), 0)
        failed = ~(tl.abs(tl.load(top + row)) < float("inf"))
        emitted = tl.where(failed, -1, tl.load(choice + row))
        line = result + request * (steps + 3)
        tl.store(line, count.to(tl.int64))
        tl.store(line + 1, failed.to(tl.int64))
        token = tl.where(column < count, draft, tl.where(column == count, emitted, -1))
        tl.store(line + 2 + column, token, mask=column <= steps)

    @triton.jit
    def _advance_kernel(
        values, table, result, batch, width, STEPS: tl.constexpr, BLOCK: tl.constexpr,
        LENGTHS: tl.constexpr, LISTED: tl.constexpr, TAILS: tl.constexpr, KEYS: tl.constexpr,
        DRAFTS: tl.constexpr, Q_LENS: tl.constexpr, GAMMAS: tl.constexpr, LIMITS: tl.constexpr,
        NEXT_LISTED: tl.constexpr, NEXT_TAILS: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < batch
        q_len = tl.load(values + Q_LENS * batch + i, mask=inside, other=0)
        accepted = tl.load(result + i * (STEPS + 3), mask=inside, other=0)
        length = tl.load(values + LENGTHS * batch + i, mask=inside, other=0)
        length += tl.where(q_len == 0, 0, accepted + 1)
        tl.store(values + LENGTHS * batch + i, length, mask=inside)
        token = tl.load(result + i * (STEPS + 3) + 2 + accepted, mask=inside, other=0)
        tl.store(table + i * width, tl.maximum(token, 0), mask=inside)
        limit = tl.load(values + LIMITS * batch + i, mask=inside, other=0)
        if STEPS:
            gamma = tl.load(values + GAMMAS * batch + i, mask=inside, other=0)
            drafts = tl.minimum(gamma, tl.maximum(limit - length - 1, 0))
            tl.store(values + DRAFTS * batch + i, drafts, mask=inside)
            listed = tl.load(values + NEXT_LISTED * batch + i, mask=inside, other=0)
            tl.store(values + LISTED * batch + i, listed, mask=inside)
            tails = tl.load(values + NEXT_TAILS * batch + i, mask=inside, other=0)
            tl.store(values + TAILS * batch + i, tails, mask=inside)
        else:
            q_len = tl.where(length >= limit, 0, q_len)
            tl.store(values + Q_LENS * batch + i, q_len, mask=inside)
            tl.store(values + KEYS * batch + i, length * q_len, mask=inside)


def place_draft_rows(round: Round, fields: dict[str, int], copied: int) -> tuple[Tensor, Tensor, Tensor]:
    """positions and slots (steps, batch) int64 and keys (steps, batch) int32 of the draft steps; int32
    copies of the first fields."""
    batch, steps, device, cache = round.shape.batch, round.shape.steps, round.cache.device, round.cache
    positions, slots = torch.empty((2, steps, batch), dtype=torch.int64, device=device)
    keys = torch.empty((steps, batch), dtype=torch.int32, device=device)
    _draft_rows_kernel[(triton.cdiv(max(steps, copied) * batch, _BLOCK),)](
        round.values, round.int32, round.block_table, positions, keys, slots, batch, steps,
        round.block_table.shape[1], cache.page_size, cache.unused_slot,
        LENGTHS=fields["lengths"], DRAFTS=fields["num_drafts"], COPIED=copied, BLOCK=_BLOCK,
    )  # fmt: skip
    return positions, slots, keys


def place_verify_rows(round: Round, group: Group, fields: dict[str, int], copied: int) -> None:
    """Fills what the round and a group know of the rows of a verification (`Round.rows`)."""
    batch, members, rows = round.shape.batch, triton.next_power_of_2(group.size), round.rows
    block = max(16, min(_BLOCK, 8192 // members))
    _verify_rows_kernel[(triton.cdiv(group.rows, block),)](
        round.values, round.int32, round.block_table, round.table, rows.owner, rows.offset, rows.positions,
        rows.slots, rows.tokens, group.cu_seqlens_q, rows.last, batch, group.batch.start, group.size,
        group.rows, group.span.start, round.block_table.shape[1], round.table.shape[1],
        round.cache.page_size, round.cache.unused_slot,
        KEYS=fields["keys"], DRAFTS=fields["num_drafts"], Q_LENS=fields["q_lens"], COPIED=copied,
        MEMBERS=members, BLOCK=block,
    )  # fmt: skip


def accept(round: Round, logits: Tensor, fields: dict[str, int]) -> None:
    """Greedy acceptance of the packed rows' logits into `round.result`."""
    top, choice = logits.max(-1)
    _accept_kernel[(len(round.table),)](
        round.values, round.table, top, choice, round.rows.last, round.result, len(round.table),
        round.shape.steps, round.table.shape[1],
        DRAFTS=fields["num_drafts"], COLUMNS=triton.next_power_of_2(round.shape.steps + 1),
    )  # fmt: skip


def advance(round: Round, fields: dict[str, int]) -> None:
    """`Round.advance`."""
    batch = round.shape.batch
    _advance_kernel[(triton.cdiv(batch, _BLOCK),)](
        round.values, round.table, round.result, batch, round.table.shape[1],
        STEPS=round.shape.steps, BLOCK=_BLOCK, LENGTHS=fields["lengths"], LISTED=fields["listed"],
        TAILS=fields["tails"], KEYS=fields["keys"], DRAFTS=fields["num_drafts"], Q_LENS=fields["q_lens"],
        GAMMAS=fields["gammas"], LIMITS=fields["limits"], NEXT_LISTED=fields["next_listed"],
        NEXT_TAILS=fields["next_tails"],
    )  # fmt: skip
