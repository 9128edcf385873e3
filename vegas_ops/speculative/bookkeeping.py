"""What a round does beside the model's forwards, as one kernel each on a GPU.

Rows, positions, slots, acceptance and the step to the next round are some eighty operators of torch on a
few integers; for a small model they take as long as its layers. The operators in `round.py` and
`acceptance.py` say what these kernels compute and are what runs everywhere else, and the tests' oracle.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vegas_ops import jit
from vegas_ops.jit import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from vegas_ops.speculative.attention import Group
    from vegas_ops.speculative.round import Round

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU
    triton = None

_BLOCK = 128
_PART = 8192  # logits of a row that a program looks at, where there are several of them


def available(device: torch.device) -> bool:
    return jit.works(device)


if triton is not None:

    @triton.jit
    def _draft_rows_kernel(
        values, int32, block_table, table, positions, keys, slots, tokens, batch, steps, pages, width,
        page_size, unused_slot, LENGTHS: tl.constexpr, DRAFTS: tl.constexpr, COPIED: tl.constexpr,
        BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        copied = i < COPIED * batch
        tl.store(int32 + i, tl.load(values + i, mask=copied, other=0).to(tl.int32), mask=copied)
        pending = i < batch
        tl.store(tokens + i, tl.load(table + i * width, mask=pending, other=0), mask=pending)
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
        MEMBERS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
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
    def best_of(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
        """The best logit, the first token that has it, and whether any logit is NaN."""
        i = tl.arange(0, BLOCK)
        best, place = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
        odd = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, VOCAB, BLOCK):
            x = tl.load(row + start + i, mask=start + i < VOCAB, other=float("-inf"))
            odd |= (x != x).to(tl.int32)
            place = tl.where(x > best, start + i, place)
            best = tl.where(x > best, x, best)
        top = tl.max(best, 0)
        return top, tl.min(tl.where(best == top, place, VOCAB - 1), 0), tl.max(odd, 0) > 0

    @triton.jit
    def _parts_kernel(
        logits, best, place, VOCAB: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """`best_of` a part of a row: (rows, parts); the place's complement where the part has a NaN."""
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        row, part, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
        top, token = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32) + part * PART
        odd = tl.zeros((BLOCK,), tl.int32)
        for start in tl.static_range(0, PART, BLOCK):
            at = part * PART + start + i
            x = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
            odd |= (x != x).to(tl.int32)
            token = tl.where(x > top, at, token)
            top = tl.where(x > top, x, top)
        most = tl.max(top, 0)
        first = tl.min(tl.where(top == most, token, VOCAB - 1), 0)
        out = row * tl.num_programs(1) + part
        tl.store(best + out, most)
        tl.store(place + out, tl.where(tl.max(odd, 0) > 0, -1 - first, first))

    @triton.jit
    def _best_of_row(
        logits, best, place, row, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """`best_of` a row, from its logits or from its parts."""
        if PARTS == 1:
            return best_of(logits + row * VOCAB, VOCAB, BLOCK)
        else:
            part = tl.arange(0, COLUMNS)
            of_parts = tl.load(best + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
            token = tl.load(place + row * PARTS + part, mask=part < PARTS, other=VOCAB - 1)
            top = tl.max(of_parts, 0)
            odd = tl.max((token < 0).to(tl.int32), 0) > 0
            token = tl.where(token < 0, -1 - token, token)
            return top, tl.min(tl.where(of_parts == top, token, VOCAB - 1), 0), odd

    @triton.jit
    def _best_kernel(
        logits, best, place, top, choice, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
        COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        most, token, odd = _best_of_row(logits, best, place, row, VOCAB, BLOCK, PARTS, COLUMNS)
        tl.store(top + row, tl.where(odd, float("nan"), most))
        tl.store(choice + row, token.to(tl.int64))

    @triton.jit
    def _choose_kernel(
        logits, best, place, values, table, tokens, batch, width, step,
        DRAFTS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
        COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """The likeliest token of one request's row."""
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        _most, token, _odd = _best_of_row(logits, best, place, row, VOCAB, BLOCK, PARTS, COLUMNS)
        token = token.to(tl.int64)
        tl.store(tokens + row, token)
        active = step < tl.load(values + DRAFTS * batch + row)
        # A prompt's last tokens stay.
        tl.store(table + row * width + step + 1, token, mask=active)

    @triton.jit
    def _accept_kernel(
        values, table, top, choice, last, result, batch, steps, width,
        DRAFTS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        """`accept_greedy` for one request, over the verification's packed rows."""
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
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
        values, table, result, ratios, least_tokens, stops, log, turn, batch, width,
        STEPS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr, STOPS: tl.constexpr,
        BLOCK: tl.constexpr, LENGTHS: tl.constexpr, LISTED: tl.constexpr, TAILS: tl.constexpr,
        KEYS: tl.constexpr, DRAFTS: tl.constexpr, Q_LENS: tl.constexpr, GAMMAS: tl.constexpr,
        LIMITS: tl.constexpr, BUDGETS: tl.constexpr, NEXT_LISTED: tl.constexpr, NEXT_TAILS: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):  # fmt: skip
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < batch
        q_len = tl.load(values + Q_LENS * batch + i, mask=inside, other=0)
        accepted = tl.load(result + i * (STEPS + 3), mask=inside, other=0)
        length = tl.load(values + LENGTHS * batch + i, mask=inside, other=0)
        length += tl.where(q_len == 0, 0, accepted + 1)
        token = tl.load(result + i * (STEPS + 3) + 2 + accepted, mask=inside, other=0)
        tl.store(table + i * width, tl.maximum(token, 0), mask=inside)
        limit = tl.load(values + LIMITS * batch + i, mask=inside, other=0)
        column = tl.arange(0, COLUMNS)[None, :]
        there = inside[:, None] & (column < STEPS + 3)
        line = tl.load(result + i[:, None] * (STEPS + 3) + column, mask=there, other=-1)
        now = tl.load(turn + i, mask=inside, other=0)
        place = (now % TURNS) * batch + i
        tl.store(log + place[:, None] * (STEPS + 3) + column, line, mask=there)
        tl.store(turn + i, now + 1, mask=inside)
        ended = tl.load(result + i * (STEPS + 3) + 1, mask=inside, other=0) != 0
        for stop in tl.static_range(STOPS):
            end = tl.load(stops + i * STOPS + stop, mask=inside, other=-2)
            hit = (line == end[:, None]) & (column >= 2)
            ended = ended | (tl.max(hit.to(tl.int32), 1) > 0)
        limit = tl.where(ended, 0, limit)
        tl.store(values + LIMITS * batch + i, limit, mask=inside)
        alive = ((q_len > 0) & (length < limit)).to(tl.int64)
        # An ended request's row is from now on an unused one.
        length *= alive
        tl.store(values + LENGTHS * batch + i, length, mask=inside)
        drafts = tl.zeros((BLOCK,), tl.int64)
        if STEPS:
            gamma = tl.load(values + GAMMAS * batch + i, mask=inside, other=0)
            drafts = tl.minimum(gamma, tl.maximum(limit - length - 1, 0)) * alive
            tl.store(values + DRAFTS * batch + i, drafts, mask=inside)
            listed = tl.load(values + NEXT_LISTED * batch + i, mask=inside, other=0)
            tails = tl.load(values + NEXT_TAILS * batch + i, mask=inside, other=0)
            tl.store(values + LISTED * batch + i, listed * alive, mask=inside)
            tl.store(values + TAILS * batch + i, tails * alive, mask=inside)
        keys = (length + drafts) * alive
        tl.store(values + Q_LENS * batch + i, (drafts + 1) * alive, mask=inside)
        tl.store(values + KEYS * batch + i, keys, mask=inside)
        ratio = tl.load(ratios + i, mask=inside, other=0.0)
        k = tl.ceil(ratio * keys.to(tl.float64) - 1e-9).to(tl.int64)
        k = tl.minimum(tl.maximum(k, tl.load(least_tokens + i, mask=inside, other=0)), length)
        tl.store(values + BUDGETS * batch + i, k, mask=inside)


def place_draft_rows(
    round: Round, fields: dict[str, int], copied: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """positions and slots (steps, batch) int64 and keys (steps, batch) int32 of the draft steps; tokens
    (steps + 1, batch) int64, of which the first are filled; int32 copies of the first fields."""
    batch, steps, device, cache = round.shape.batch, round.shape.steps, round.cache.device, round.cache
    positions, slots = torch.empty((2, steps, batch), dtype=torch.int64, device=device)
    keys = torch.empty((steps, batch), dtype=torch.int32, device=device)
    tokens = torch.empty((steps + 1, batch), dtype=torch.int64, device=device)
    _draft_rows_kernel[(triton.cdiv(max(steps, copied) * batch, _BLOCK),)](
        round.values, round.int32, round.block_table, round.table, positions, keys, slots, tokens, batch,
        steps, round.block_table.shape[1], round.table.shape[1], cache.page_size, cache.unused_slot,
        LENGTHS=fields["lengths"], DRAFTS=fields["num_drafts"], COPIED=copied, BLOCK=_BLOCK,
        **jit.launch_options(device),
    )  # fmt: skip
    return positions, slots, keys, tokens


def choose(round: Round, logits: Tensor, tokens: Tensor, step: int, fields: dict[str, int]) -> None:
    """A greedy draft step: the likeliest of logits (batch, vocab_size) fp32 into tokens, (batch,) int64,
    and into the table of the requests that draft it; the first of equals, never NaN."""
    parts, options = _parts(logits)
    batch = len(logits)
    _choose_kernel[(batch,)](
        logits, *parts, round.values, round.table, tokens, batch, round.table.shape[1], step,
        DRAFTS=fields["num_drafts"], **options,
    )  # fmt: skip


def _parts(logits: Tensor) -> tuple[tuple[Tensor | None, Tensor | None], dict[str, Any]]:
    """The best of the rows' parts, or nothing where a program looks at a whole row of so few logits, and the
    options of a kernel that finds the rows' best."""
    (rows, vocab), options = logits.shape, jit.launch_options(logits.device)
    parts = triton.cdiv(vocab, _PART)
    options |= {"VOCAB": vocab, "PARTS": parts, "COLUMNS": triton.next_power_of_2(parts)}
    if parts == 1:
        return (None, None), {"BLOCK": triton.next_power_of_2(vocab), "num_warps": 16, **options}
    best = torch.empty((rows, parts), device=logits.device)
    place = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _parts_kernel[(rows, parts)](
        logits, best, place, VOCAB=vocab, PART=_PART, BLOCK=min(_PART, 2048), num_warps=4,
        **jit.launch_options(logits.device),
    )  # fmt: skip
    return (best, place), {"BLOCK": _PART, "num_warps": 1, **options}


def place_verify_rows(round: Round, group: Group, fields: dict[str, int], copied: int) -> None:
    """Fills what the round and a group know of the rows of a verification (`Round.rows`)."""
    batch, members, rows = round.shape.batch, triton.next_power_of_2(group.size), round.rows
    # Each program compares its rows with all members: many small ones take a third of the time.
    block = max(16, min(_BLOCK, 1024 // members))
    _verify_rows_kernel[(triton.cdiv(group.rows, block),)](
        round.values, round.int32, round.block_table, round.table, rows.owner, rows.offset, rows.positions,
        rows.slots, rows.tokens, group.cu_seqlens_q, rows.last, batch, group.batch.start, group.size,
        group.rows, group.span.start, round.block_table.shape[1], round.table.shape[1],
        round.cache.page_size, round.cache.unused_slot,
        KEYS=fields["keys"], DRAFTS=fields["num_drafts"], Q_LENS=fields["q_lens"], COPIED=copied,
        MEMBERS=members, BLOCK=block, **jit.launch_options(round.cache.device),
    )  # fmt: skip


def accept(round: Round, logits: Tensor, fields: dict[str, int]) -> None:
    """Greedy acceptance of the packed rows' logits, (rows, vocab_size) fp32, into `round.result`."""
    rows, device = len(logits), logits.device
    top = torch.empty(rows, device=device)
    choice = torch.empty(rows, dtype=torch.int64, device=device)
    parts, options = _parts(logits)
    _best_kernel[(rows,)](logits, *parts, top, choice, **options)
    _accept_kernel[(len(round.table),)](
        round.values, round.table, top, choice, round.rows.last, round.result, len(round.table),
        round.shape.steps, round.table.shape[1],
        DRAFTS=fields["num_drafts"], COLUMNS=triton.next_power_of_2(round.shape.steps + 1),
        **jit.launch_options(logits.device),
    )  # fmt: skip


def advance(round: Round, fields: dict[str, int]) -> None:
    """`Round._advance`."""
    batch, block = round.shape.batch, 16
    _advance_kernel[(triton.cdiv(batch, block),)](
        round.values, round.table, round.result, round.ratios, round.least_tokens, round.stops, round.log,
        round.turn_of, batch, round.table.shape[1],
        STEPS=round.shape.steps, COLUMNS=triton.next_power_of_2(round.shape.steps + 3), TURNS=round.turns,
        STOPS=round.stops.shape[1], BLOCK=block, LENGTHS=fields["lengths"], LISTED=fields["listed"],
        TAILS=fields["tails"], KEYS=fields["keys"], DRAFTS=fields["num_drafts"], Q_LENS=fields["q_lens"],
        GAMMAS=fields["gammas"], LIMITS=fields["limits"], BUDGETS=fields["budgets"],
        NEXT_LISTED=fields["next_listed"], NEXT_TAILS=fields["next_tails"],
        **jit.launch_options(round.cache.device),
    )  # fmt: skip
