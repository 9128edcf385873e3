"""One iteration on the device: the tensors of a batch, and the three phases that run on them.

    draft    gamma forwards of one row per request, sampling included
    verify   one forward of [pending, drafts], and which drafts stay
    select   the lists of the next drafts

The phases depend on a round's shape alone, never on what its tensors hold: lengths, budgets, tables
and random streams are on the device. So the same code runs eagerly or, on a GPU, is captured in CUDA
graphs and replayed with other requests of the same shape. Nothing in a phase waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vegas_ops.speculative.acceptance import Accepted, accept_greedy, accept_sampled
from vegas_ops.speculative.attention import DraftContext, Group, VerifyContext
from vegas_ops.speculative.kv_cache import CacheSequence, PagedKVCache, to_device
from vegas_ops.speculative.model import Model
from vegas_ops.speculative.request import Request
from vegas_ops.speculative.sampling import (
    ACCEPT,
    DRAFT,
    EMIT,
    SamplingBatch,
    SamplingParams,
    draw,
    probabilities,
    uniform,
)
from vegas_ops.speculative.selection import Policy, Selection

Phase = Literal["draft", "verify", "select"]


class Mode(NamedTuple):
    """How a group goes through a verification: its requests had no selection yet; it selects."""

    first: bool
    selects: bool


@dataclass(frozen=True)
class GroupShape:
    """size: requests; rows: of a verification; max_rows: of one request; max_k: width of the lists."""

    policy: Policy
    window: int
    size: int
    rows: int
    max_rows: int
    max_k: int


@dataclass(frozen=True)
class RoundShape:
    """All that a round's code depends on. steps: drafts; max_keys: bound on cached tokens."""

    groups: tuple[GroupShape, ...]
    steps: int
    max_keys: int
    greedy: bool
    filtered: bool

    @property
    def batch(self) -> int:
        return sum(group.size for group in self.groups)

    def serves(self, other: RoundShape) -> bool:
        """Whether a round of this shape can run what the other asks for, on more rows."""

        def fits(a: GroupShape, b: GroupShape) -> bool:
            alike = (a.policy, a.window, a.max_rows) == (b.policy, b.window, b.max_rows)
            return alike and a.size >= b.size and a.max_k >= b.max_k

        alike = (self.steps, self.greedy, self.filtered) == (other.steps, other.greedy, other.filtered)
        return (
            alike
            and self.max_keys >= other.max_keys
            and len(self.groups) == len(other.groups)
            and all(map(fits, self.groups, other.groups))
        )


class Round:
    """The tensors of an iteration, (batch,) int64 unless said otherwise; unused rows are empty.

    lengths: tokens committed before the round, the pending one among them: they number the random
    streams and are the candidates of the selection; num_drafts; q_lens: rows of the verification;
    seeds; budgets: tokens that the next selection may list; listed_k and tail_start int32: of the
    current one; seqused_k int32: keys of the verification; block_table (batch, pages) int32; table
    (batch, width): the pending token (or the last ones of a prompt) and its drafts.
    """

    _FIELDS = ("lengths", "num_drafts", "q_lens", "seeds", "budgets", "listed", "tails", "keys")

    def __init__(self, model: Model, cache: PagedKVCache, shape: RoundShape) -> None:
        self.model, self.cache, self.shape, device = model, cache, shape, cache.device
        batch, steps = shape.batch, shape.steps
        fields, width = len(self._FIELDS), max(steps + 1, *(group.max_rows for group in shape.groups))
        pinned = device.type == "cuda"
        self._host = torch.zeros((batch, fields + width), dtype=torch.int64, pin_memory=pinned)
        self._values = torch.zeros((batch, fields + width), dtype=torch.int64, device=device)
        (self.lengths, self.num_drafts, self.q_lens, self.seeds, self.budgets, self._listed, self._tails,
         self._keys) = self._values[:, :fields].unbind(1)  # fmt: skip
        self.table = self._values[:, fields:]
        pages = -(-shape.max_keys // cache.page_size)
        self.block_table = torch.full((batch, pages), -1, dtype=torch.int32, device=device)
        self._no_pages = CacheSequence(cache)
        self.tail_start, self.listed_k, self.seqused_k = torch.zeros(
            (3, batch), dtype=torch.int32, device=device
        )
        self.sampling = SamplingBatch([SamplingParams(temperature=float(not shape.greedy))] * batch, device)
        self.sampling.filtered = shape.filtered
        sampled_steps = 0 if shape.greedy else steps
        self.draft_probs = torch.zeros((batch, sampled_steps, model.vocab_size), device=device)
        # Accepted drafts, whether the target failed, and the tokens: all that the host reads.
        self.result = torch.zeros((batch, steps + 3), dtype=torch.int64, device=device)
        self.num_accepted = self.result[:, 0]
        self._read = torch.zeros_like(self.result, device="cpu", pin_memory=pinned)
        self._event = torch.cuda.Event() if pinned else None
        self.groups: list[Group] = []
        begin = row = 0
        for g in shape.groups:
            self.groups.append(
                Group(self, begin, g.size, row, g.rows, g.policy, g.max_k, g.window, g.max_rows)
            )
            begin, row = begin + g.size, row + g.rows
        self.step = 0
        self.second_pass = False  # over a forced text: selections are made now
        self.modes: tuple[Mode, ...] = ()
        self.requests: list[Request | None] = [None] * batch
        self._given: list[Selection | None] = [None] * batch  # what lies in the groups' buffers
        self._parameters: list[SamplingParams] = []
        self._graphs: dict[tuple[Phase, tuple[Mode, ...]], torch.cuda.CUDAGraph] = {}
        self._runs: Counter[tuple[Phase, tuple[Mode, ...]]] = Counter()

    # The host's side

    def load(self, groups: Sequence[Sequence[Request]], modes: Sequence[Mode], num_drafts: dict[Request, int]
             ) -> None:  # fmt: skip
        """Puts requests into the rows of their groups; num_drafts: of this round."""
        self.modes = tuple(modes)
        rows: list[Request | None] = [None] * self.shape.batch
        kept = {request: i for i, request in enumerate(self.requests) if request is not None}
        for group, members in zip(self.groups, groups, strict=True):
            # Who has a row keeps it, with what lies in its buffers.
            span = range(group.batch.start, group.batch.stop)
            places = {member: kept[member] for member in members if kept.get(member, -1) in span}
            free = iter(sorted(set(span) - set(places.values())))
            for member in members:
                rows[places[member] if member in places else next(free)] = member
        self._move(rows)
        self.drafts = [0 if request is None else num_drafts[request] for request in rows]
        lines, width = [], self._host.shape[1]
        modes_of = [mode for mode, group in zip(modes, self.groups, strict=True) for _ in range(group.size)]
        for request, drafts, mode in zip(rows, self.drafts, modes_of, strict=True):
            line = [0] * width
            if request is not None:
                known, q_len = len(request.tokens), request.first_rows(mode.first and mode.selects)
                selection = request.selection
                listed, tail = (0, 0) if selection is None else (selection.budget, selection.tail_start)
                line[: len(self._FIELDS)] = (
                    known, drafts, q_len + drafts, request.seed, request.budget(known + drafts), listed, tail,
                    known + drafts,
                )  # fmt: skip
                line[len(self._FIELDS) : len(self._FIELDS) + q_len] = request.tokens[-q_len:]
            lines.append(line)
        self._host.copy_(torch.tensor(lines, dtype=torch.int64))
        self._values.copy_(self._host, non_blocking=True)
        tables = [
            (self._no_pages if request is None else _sequence(request)).table[: self.block_table.shape[1]]
            for request in rows
        ]
        torch.stack(tables, out=self.block_table)
        parameters = [SamplingParams() if request is None else request.sampling for request in rows]
        if not self.shape.greedy and parameters != self._parameters:
            self.sampling.load(parameters)
            self._parameters = parameters
        self.processed = [i for i, request in enumerate(rows) if request and request.logits_processor]

    def _move(self, rows: list[Request | None]) -> None:
        """Changes the rows' owners; selections follow them."""
        leaving = [i for i, (a, b) in enumerate(zip(self.requests, rows, strict=True)) if a is not b]
        for i in leaving:
            self.release(i)
        self.requests = rows
        for group in self.groups:
            for row, i in enumerate(range(group.batch.start, group.batch.stop)):
                request = rows[i]
                if request is None or request.selection is None or request.selection is self._given[i]:
                    continue
                group.adopt(row, request.selection)
                self._given[i] = None

    def release(self, i: int) -> None:
        """Gives row i's request a selection of its own, before the row serves another."""
        request, given = self.requests[i], self._given[i]
        if request is not None and given is not None and request.selection is given:
            guide = None if given.guide_lse is None else given.guide_lse.clone()
            request.selection = given._replace(
                indices=given.indices.clone(), length=given.length.clone(), guide_lse=guide
            )
        self.requests[i], self._given[i] = None, None

    def hand_out(self) -> None:
        """Gives every request the selection that `select` left in its row."""
        for group, mode in zip(self.groups, self.modes, strict=True):
            for row, i in enumerate(range(group.batch.start, group.batch.stop)):
                request = self.requests[i]
                if request is None:
                    continue
                if not self.second_pass and request.forced_tokens is not None:
                    continue
                if mode.selects:
                    known = len(request.tokens)
                    k = request.budget(known + self.drafts[i])
                    listed, tail = group.policy.plan(k, known, mode.first)
                    request.selection = group.selection(row, listed, tail)
                elif request.selection is not None:
                    request.selection = request.selection._replace(age=request.selection.age + 1)
                else:
                    continue
                self._given[i] = request.selection

    def run(self, phase: Phase, pool: Any) -> None:
        """Runs a phase; with a memory pool for graphs: eagerly at first, which warms it up, captured
        at its second time, then replayed."""
        key = (phase, () if phase == "draft" else self.modes)
        if pool is None or not self._runs[key]:
            getattr(self, phase)()
        else:
            if key not in self._graphs:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    getattr(self, phase)()
                self._graphs[key] = graph
            self._graphs[key].replay()
        self._runs[key] += 1

    def fetch(self) -> None:
        """Starts to copy the result to the host."""
        self._read.copy_(self.result, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self) -> list[tuple[int, list[int]]]:
        """(accepted drafts, emitted tokens) of every row: the only wait of an iteration. A failed
        request emits its accepted drafts alone."""
        if self._event is not None:
            self._event.synchronize()
        return [(line[0], line[2 : 3 + line[0] - line[1]]) for line in self._read.tolist()]

    # The device's side

    @torch.no_grad()
    def draft(self) -> None:
        """Fills table[:, 1:] and, for sampling, draft_probs."""
        batch, device = self.shape.batch, self.cache.device
        step = torch.arange(self.shape.steps, device=device)[:, None]
        active = step < self.num_drafts
        positions = (self.lengths - 1 + step).masked_fill(~active, 0)
        self.draft_keys = (positions + 1).masked_fill(~active, 0).int()
        self.tail_start.copy_(self._tails)
        self.listed_k.copy_(self._listed)
        owner = torch.arange(batch, device=device)
        slots = self.cache.slots(self.block_table, owner, positions)
        slots = slots.masked_fill(~active, self.cache.unused_slot)
        for i in range(self.shape.steps):
            self.step = i
            context = DraftContext(self, self.groups, slots[i])
            hidden = self.model.forward(self.table[:, i], positions[i], context.attend)
            places = [(row, row, i) for row in self.processed if i < self.drafts[row]]
            logits = self._process(self.model.compute_logits(hidden), places)
            token = self._draw_draft(logits, i)
            # A prompt's last tokens stay.
            self.table[:, i + 1] = torch.where(active[i], token, self.table[:, i + 1])

    def _draw_draft(self, logits: Tensor, step: int) -> Tensor:
        if self.shape.greedy:
            return logits.argmax(-1)
        q = probabilities(logits, self.sampling)
        # A row without a distribution drafts token 0, and says so: the target decides.
        certain = torch.zeros_like(q)
        certain[:, 0] = 1.0
        q = torch.where(q.isnan().any(-1, keepdim=True), certain, q)
        self.draft_probs[:, step] = q
        return draw(q, uniform(self.seeds, self.lengths, step, DRAFT))

    @torch.no_grad()
    def verify(self) -> None:
        """Full attention over [pending, drafts] of every request; fills result."""
        self.seqused_k.copy_(self._keys)
        owners, offsets, ends = [], [], []
        for group, mode in zip(self.groups, self.modes, strict=True):
            group.prepare(*mode)
            assert group.verified is not None
            owners.append((group.verified.owner + group.batch.start, group.verified.owner < group.size))
            offsets.append(group.verified.offset)
            ends.append(group.row_ends)
        used = torch.cat([known for _, known in owners])
        owner = torch.cat([owner for owner, _ in owners]).clamp(max=self.shape.batch - 1)
        offset = torch.cat(offsets).masked_fill(~used, 0)
        positions = (self.seqused_k - self.q_lens)[owner] + offset
        positions = positions.masked_fill(~used, 0)
        slots = self.cache.slots(self.block_table, owner, positions)
        # Prompts' rows that are computed once more are in the cache, maybe in pages that others share.
        writes = used & (offset >= (self.q_lens - self.num_drafts)[owner] - 1)
        slots = slots.masked_fill(~writes, self.cache.unused_slot)
        context = VerifyContext(self, self.groups, slots)
        hidden = self.model.forward(self.table[owner, offset], positions, context.attend)
        logits = self.model.compute_logits(hidden)
        last = torch.cat(ends) - 1
        if self.processed:
            end = last.tolist()
            places = [
                (end[i] - self.drafts[i] + j, i, j) for i in self.processed for j in range(self.drafts[i] + 1)
            ]
            logits = self._process(logits, places)
        accepted = self._accept(logits, last)
        result = [accepted.num_accepted[:, None], accepted.failed[:, None], accepted.tokens]
        self.result.copy_(torch.cat(result, 1))

    def _accept(self, logits: Tensor, last: Tensor) -> Accepted:
        column = torch.arange(self.shape.steps + 1, device=logits.device)
        # Ragged to rectangular: a request with fewer drafts repeats its last row.
        back = (self.num_drafts[:, None] - column).clamp(min=0)
        logits = logits[(last[:, None] - back).clamp(min=0)]
        drafts = self.table[:, 1 : self.shape.steps + 1]
        if self.shape.greedy:
            return accept_greedy(drafts, self.num_drafts, logits)
        owner = torch.arange(self.shape.batch, device=logits.device)
        params = self.sampling.rows(owner.repeat_interleave(logits.shape[1]))
        target = probabilities(logits.flatten(0, 1), params).view(logits.shape)
        seeds, rounds = self.seeds[:, None], self.lengths[:, None]
        u_accept = uniform(seeds, rounds, column[None, :-1], ACCEPT)
        u_emit = uniform(seeds, rounds, column[None], EMIT)
        return accept_sampled(drafts, self.num_drafts, self.draft_probs, target, u_accept, u_emit[:, 0])

    def _process(self, logits: Tensor, places: Sequence[tuple[int, int, int]]) -> Tensor:
        """Applies the requests' processors: logits row `row` predicts what follows draft `step` of
        the request in row i, for (row, i, step) of places."""
        for row, i, step in places:
            request = self.requests[i]
            assert request is not None and request.logits_processor is not None
            committed = to_device(request.tokens, torch.int64, logits.device)
            history = torch.cat([committed, self.table[i, 1 : step + 1]])
            logits[row] = request.logits_processor(history, logits[row].clone())
        return logits

    @torch.no_grad()
    def select(self) -> None:
        """Fills the groups' lists."""
        for group, mode in zip(self.groups, self.modes, strict=True):
            if mode.selects:
                group.select()


def _sequence(request: Request) -> Any:
    assert request.sequence is not None, "a request without pages cannot run"
    return request.sequence
