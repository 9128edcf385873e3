"""One iteration on the device: the tensors of a batch, and the three phases that run on them.

    draft    gamma forwards of one row per request, sampling included
    verify   one forward of [pending, drafts], and which drafts stay
    select   the lists of the next drafts

Where the host can, it lets the device advance to the next round and draft (or, in plain decoding,
verify) ahead, before it reads what this one gave.

The phases depend on a round's shape alone, never on what its tensors hold: lengths, budgets, tables
and random streams are on the device. So the same code runs eagerly or, on a GPU, is captured in CUDA
graphs and replayed with other requests of the same shape. Nothing in a phase waits for the device.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vegas_ops.speculative import ahead, bookkeeping, sampling_kernels
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
from vegas_ops.speculative.selection import Selection, plans_tensors
from vegas_ops.speculative.shapes import Mode, RoundShape

Phase = Literal["draft", "verify", "select", "advance", "turn"]
MAX_STOPS = 8  # token ids that the device ends a request at; the host knows all of them


class Line(NamedTuple):
    """What the host says of a row, in the order in which it is uploaded. The first fields have int32
    copies; those of the next selection wait for `advance`."""

    lengths: int = 0
    budgets: int = 0
    listed: int = 0
    tails: int = 0
    keys: int = 0
    num_drafts: int = 0
    q_lens: int = 0
    seeds: int = 0
    gammas: int = 0
    limits: int = 0
    pending: int = 0
    next_listed: int = 0
    next_tails: int = 0


_NO_TOKEN = -2  # no result holds it
INT32_FIELDS = 5  # of a line, from its first one on
FIELDS = {name: i for i, name in enumerate(Line._fields)}


class Rows(NamedTuple):
    """The packed rows of a verification, (rows,) int64: owner and offset as in `selection.Verified`;
    positions, slots and tokens of the model's forward. last (batch,): each request's last row."""

    owner: Tensor
    offset: Tensor
    positions: Tensor
    slots: Tensor
    tokens: Tensor
    last: Tensor


class Round:
    """The tensors of an iteration, (batch,) int64 unless said otherwise; unused rows are empty.

    lengths: tokens committed before the round, the pending one among them: they number the random
    streams and are the candidates of the selection; num_drafts; q_lens: rows of the verification;
    seeds; gammas; limits: lengths at which requests end. int32: candidates (the lengths), budgets of
    the next selection, listed_k and tail_start of the current one, seqused_k of the verification.
    block_table (batch, pages) int32; table (batch, width): the pending token (or the last ones of a
    prompt) and its drafts. ratios, least_tokens and stops (batch, MAX_STOPS): what the device plans with
    in `turns` iterations that the host does not read one by one, log (turns, batch, steps + 3) their
    results.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        shape: RoundShape,
        batch_invariant: bool = False,
        turns: int = 1,
    ) -> None:
        self.model, self.cache, self.shape, device = model, cache, shape, cache.device
        self.wanted = shape  # by its requests, for which this one may be too large
        self.batch_invariant, self.turns = batch_invariant, turns
        batch, steps = shape.batch, shape.steps
        width, pinned = max(steps + 1, *(g.max_rows for g in shape.groups)), device.type == "cuda"
        fields = (len(Line._fields), batch)
        self._host = torch.zeros(fields, dtype=torch.int64, pin_memory=pinned)
        self.values = torch.zeros(fields, dtype=torch.int64, device=device)
        rows = dict(zip(Line._fields, self.values, strict=True))
        self.lengths, self.num_drafts, self.q_lens = rows["lengths"], rows["num_drafts"], rows["q_lens"]
        self._listed, self._tails, self._keys = rows["listed"], rows["tails"], rows["keys"]
        self.seeds, self._gammas, self._limits = rows["seeds"], rows["gammas"], rows["limits"]
        self._pending, self._budgets = rows["pending"], rows["budgets"]
        self._next_listed, self._next_tails = rows["next_listed"], rows["next_tails"]
        self.int32 = torch.zeros((INT32_FIELDS, batch), dtype=torch.int32, device=device)
        self.candidates, self.budgets, self.listed_k, self.tail_start, self.seqused_k = self.int32
        self._host_table = torch.zeros((batch, width), dtype=torch.int64, pin_memory=pinned)
        self.table = torch.zeros((batch, width), dtype=torch.int64, device=device)
        pages = -(-shape.max_keys // cache.page_size)
        self.block_table = torch.full((batch, pages), -1, dtype=torch.int32, device=device)
        self._no_pages = CacheSequence(cache)
        self._tables: list[tuple[CacheSequence, int, int]] = []  # what lies in block_table
        self.sampling = SamplingBatch([SamplingParams(temperature=float(not shape.greedy))] * batch, device)
        self.sampling.filtered = shape.filtered
        sampled_steps = 0 if shape.greedy else steps
        self.draft_probs = torch.zeros((batch, sampled_steps, model.vocab_size), device=device)
        # Accepted drafts, whether the target failed, and the tokens: all that the host reads.
        self.result = torch.zeros((batch, steps + 3), dtype=torch.int64, device=device)
        self.num_accepted = self.result[:, 0]
        self._read = torch.zeros_like(self.result, device="cpu", pin_memory=pinned)
        self._event = torch.cuda.Event() if pinned else None
        self._log_events = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self._copies = torch.cuda.Stream(device) if pinned else None
        self.ratios = torch.zeros(batch, dtype=torch.float64, device=device)
        self.least_tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.stops = torch.full((batch, MAX_STOPS), _NO_TOKEN, dtype=torch.int64, device=device)
        self._rules: list[tuple[float, int, tuple[int, ...]]] = []
        self.log = self.result.new_zeros((turns, *self.result.shape))
        self.turn_of = torch.zeros(batch, dtype=torch.int64, device=device)
        self._logged = 0  # where the next result goes in the log: what is in turn_of
        self._read_log = torch.zeros_like(self.log, device="cpu", pin_memory=pinned)
        self.kernels = bookkeeping.available(device)
        rows_in_all = sum(g.rows for g in shape.groups)
        owner, offset, positions, slots, tokens = torch.zeros(
            (5, rows_in_all), dtype=torch.int64, device=device
        )
        last = torch.zeros(batch, dtype=torch.int64, device=device)
        self.rows = Rows(owner, offset, positions, slots, tokens, last)
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

    def load(
        self,
        groups: Sequence[Sequence[Request]],
        modes: Sequence[Mode],
        num_drafts: dict[Request, int],
        limits: dict[Request, int],
        last: Round | None = None,
    ) -> bool:
        """Puts requests into the rows of their groups; num_drafts: of this round; limits: lengths at
        which they end. last: a round that has gone ahead; returns whether for these requests."""
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
        done = ahead.sources(self, last, rows, num_drafts)
        self._move(rows)
        self.drafts = [0 if request is None else num_drafts[request] for request in rows]
        lines, table = [], [[0] * self.table.shape[1] for _ in rows]
        for group, mode in zip(self.groups, modes, strict=True):
            for i in range(group.batch.start, group.batch.stop):
                request, line = rows[i], Line()
                if request is not None:
                    known, keys = len(request.tokens), len(request.tokens) + self.drafts[i]
                    q_len, k = request.first_rows(mode.first and mode.selects), request.budget(keys)
                    now = (0, 0) if request.selection is None else request.selection[2:4]
                    following = group.policy.plan(k, known, mode.first) if mode.selects else now
                    line = Line(
                        lengths=known, budgets=k, listed=now[0], tails=now[1], keys=keys,
                        num_drafts=self.drafts[i], q_lens=q_len + self.drafts[i], seeds=request.seed,
                        gammas=request.most_drafts, limits=limits[request], pending=request.tokens[-1],
                        next_listed=following[0], next_tails=following[1],
                    )  # fmt: skip
                    table[i][:q_len] = request.tokens[-q_len:]
                lines.append(line)
        self._host.copy_(torch.tensor(lines, dtype=torch.int64).t())
        self.values.copy_(self._host, non_blocking=True)
        if done is not None and last is self:
            self.table[:, 0] = self._pending  # of rows that are new: drafts are there
        else:
            self._host_table.copy_(torch.tensor(table, dtype=torch.int64))
            self.table.copy_(self._host_table, non_blocking=True)
            if done is not None and last is not None:
                ahead.take_over(self, last, done)
        self.load_tables([request for request in rows if request is not None])
        parameters = [SamplingParams() if request is None else request.sampling for request in rows]
        if not self.shape.greedy and parameters != self._parameters:
            self.sampling.load(parameters)
            self._parameters = parameters
        self._load_rules(rows)
        self.processed = [i for i, request in enumerate(rows) if request and request.logits_processor]
        return done is not None

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

    def load_tables(self, requests: Sequence[Request]) -> None:
        """Uploads the pages of those requests that have rows."""
        present = set(requests)
        sequences = [
            _sequence(request) if request is not None and request in present else self._no_pages
            for request in self.requests
        ]
        tables = [(sequence, sequence.cuts, len(sequence.pages)) for sequence in sequences]
        if tables == self._tables:
            return
        width = self.block_table.shape[1]
        if [table[:2] for table in tables] != [table[:2] for table in self._tables]:
            torch.stack([sequence.table[:width] for sequence in sequences], out=self.block_table)
        else:  # one upload for the pages that came
            new = [
                (row * width + place, now[0].pages[place])
                for row, (now, before) in enumerate(zip(tables, self._tables, strict=True))
                for place in range(before[2], min(now[2], width))
            ]
            if new:
                places, pages = to_device(list(zip(*new, strict=True)), torch.int32, self.cache.device)
                self.block_table.view(-1)[places] = pages
        self._tables = tables

    def _load_rules(self, rows: Sequence[Request | None]) -> None:
        """What the device goes by while the host does not read. Rules that a subclass has are the host's."""
        stops = [
            tuple(request.stop_token_ids)[:MAX_STOPS]
            if request is not None and type(request).stops is Request.stops
            else ()
            for request in rows
        ]
        rules = [
            (0.0, 0, ()) if request is None else (request.ratio, request.min_tokens, ids)
            for request, ids in zip(rows, stops, strict=True)
        ]
        if rules == self._rules:
            return
        device, self._rules = self.cache.device, rules
        ids = [[*rule[2], *[_NO_TOKEN] * (MAX_STOPS - len(rule[2]))] for rule in rules]
        self.ratios.copy_(to_device([rule[0] for rule in rules], torch.float64, device))
        self.least_tokens.copy_(to_device([rule[1] for rule in rules], torch.int64, device))
        self.stops.copy_(to_device(ids, torch.int64, device))

    def hand_out(self) -> None:
        """Gives every request the selection that `select` left in its row."""
        for i, request in enumerate(self.requests):
            if request is not None:
                self.hand_out_to(i, self.drafts[i])

    def hand_out_to(self, i: int, drafts: int) -> None:
        """Row i's selection to its request, whose verification had so many drafts."""
        request = self.requests[i]
        pairs = zip(self.groups, self.modes, strict=True)
        group, mode = next(pair for pair in pairs if i < pair[0].batch.stop)
        if request is None or (not self.second_pass and request.forced_tokens is not None):
            return
        row = i - group.batch.start
        if mode.selects:
            known = len(request.tokens)
            plan = group.policy.plan(request.budget(known + drafts), known, mode.first)
            request.selection = group.selection(row, *plan)
        elif request.selection is not None:
            # Of this row's buffers: where it came from may be overwritten by then.
            old = request.selection
            kept = group.selection(row, old.budget, old.tail_start)
            request.selection = kept._replace(age=old.age + 1)
        else:
            return
        self._given[i] = request.selection

    def run(self, phase: Phase, pool: Any) -> None:
        """Runs a phase; with a memory pool for graphs: eagerly at first, which warms it up, captured
        at its second time, then replayed."""
        key = (phase, self.modes if phase in ("verify", "select", "turn") else ())
        if pool is None or not self._runs[key]:
            getattr(self, phase)()
        else:
            if key not in self._graphs:
                graph = torch.cuda.CUDAGraph()
                with no_garbage_collection(), torch.cuda.graph(graph, pool=pool):
                    getattr(self, phase)()
                self._graphs[key] = graph
            self._graphs[key].replay()
        self._runs[key] += 1
        if phase in ("advance", "turn"):
            self._logged = (self._logged + 1) % self.turns

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
        return [_tokens(line) for line in self._read.tolist()]

    def log_from(self, begin: int) -> None:
        """Results go to the log from here on."""
        if self._logged != begin:
            self.turn_of.fill_(begin)
            self._logged = begin

    def fetch_log(self, begin: int, turns: int) -> None:
        """Starts to copy a part of the log to the host; two may be on their way, from 0 and from later on."""
        span = slice(begin, begin + turns)
        if self._copies is None:
            self._read_log[span].copy_(self.log[span])
            return
        # Beside what the device does next. This part of the log is written anew when it has been read.
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            self._read_log[span].copy_(self.log[span], non_blocking=True)
            self._log_events[begin > 0].record()

    def read_log(self, begin: int, turns: int) -> list[list[tuple[int, list[int]]]]:
        """The same as `read`, of every iteration in a part of the log."""
        if self._event is not None:
            self._log_events[begin > 0].synchronize()
        return [[_tokens(line) for line in lines] for lines in self._read_log[begin : begin + turns].tolist()]

    def empty_row(self, i: int) -> None:
        """Makes row i an unused one for the iterations that are not launched yet."""
        self.values[:, i] = 0

    # The device's side

    @torch.no_grad()
    def draft(self) -> None:
        """Fills table[:, 1:] and, for sampling, draft_probs."""
        tokens: Tensor | None = None
        if self.kernels:
            placed = bookkeeping.place_draft_rows(self, FIELDS, INT32_FIELDS)
            positions, slots, self.draft_keys, tokens = placed
        else:
            step = torch.arange(self.shape.steps, device=self.cache.device)[:, None]
            inactive = step >= self.num_drafts
            positions, slots = self._place_draft_rows(step, inactive)
        for i in range(self.shape.steps):
            self.step = i
            context = DraftContext(self, self.groups, slots[i])
            ids = self.table[:, i] if tokens is None else tokens[i]
            hidden = self.model.forward(ids, positions[i], context)
            places = [(row, row, i) for row in self.processed if i < self.drafts[row]]
            logits = self._process(self._logits(hidden), places)
            if tokens is not None:
                choose = bookkeeping.choose if self.shape.greedy else sampling_kernels.draft
                choose(self, logits, tokens[i + 1], i, FIELDS)
                continue
            token = self._draw_draft(logits, i)
            # A prompt's last tokens stay.
            column = self.table[:, i + 1]
            torch.where(inactive[i], column, token, out=column)

    def _place_draft_rows(self, step: Tensor, inactive: Tensor) -> tuple[Tensor, Tensor]:
        """positions and slots (steps, batch) of the draft steps; sets their keys."""
        self.int32.copy_(self.values[:INT32_FIELDS])
        positions = (self.lengths - 1 + step).masked_fill_(inactive, 0)
        self.draft_keys = (positions + 1).masked_fill_(inactive, 0).int()
        owner = torch.arange(self.shape.batch, device=self.cache.device)
        slots = self.cache.slots(self.block_table, owner, positions)
        return positions, slots.masked_fill_(inactive, self.cache.unused_slot)

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
        if self.kernels:
            for group in self.groups:
                bookkeeping.place_verify_rows(self, group, FIELDS, INT32_FIELDS)
        else:
            self.rows = self._place_verify_rows()
        for group, mode in zip(self.groups, self.modes, strict=True):
            group.prepare(*mode)
        rows = self.rows
        context = VerifyContext(self, self.groups, rows.slots)
        logits = self._logits(self.model.forward(rows.tokens, rows.positions, context))
        if self.processed:
            end = rows.last.tolist()
            places = [
                (end[i] - self.drafts[i] + j, i, j) for i in self.processed for j in range(self.drafts[i] + 1)
            ]
            logits = self._process(logits, places)
        if self.kernels:
            accept = bookkeeping.accept if self.shape.greedy else sampling_kernels.accept
            accept(self, logits, FIELDS)
            return
        accepted = self._accept(logits, rows.last)
        result = [accepted.num_accepted[:, None], accepted.failed[:, None], accepted.tokens]
        self.result.copy_(torch.cat(result, 1))

    def _place_verify_rows(self) -> Rows:
        self.int32.copy_(self.values[:INT32_FIELDS])
        owners, offsets, ends = [], [], []
        for group in self.groups:
            q_lens = self.q_lens[group.batch]
            ends.append(q_lens.cumsum(0))
            row = torch.arange(group.rows, device=q_lens.device)
            owners.append(torch.searchsorted(ends[-1], row, right=True))
            held = owners[-1].clamp(max=group.size - 1)
            offsets.append((row - (ends[-1] - q_lens)[held]).masked_fill(owners[-1] == group.size, 0))
            group.cu_seqlens_q[1:] = ends[-1]
        owner, offset = torch.cat(owners), torch.cat(offsets)
        pairs = list(zip(self.groups, owners, strict=True))
        request = torch.cat([x.clamp(max=group.size - 1) + group.batch.start for group, x in pairs])
        unused = torch.cat([x == group.size for group, x in pairs])
        positions = ((self._keys - self.q_lens)[request] + offset).masked_fill_(unused, 0)
        slots = self.cache.slots(self.block_table, request, positions)
        # Prompts' rows that are computed once more are in the cache, maybe in shared pages.
        unused = unused | (offset < (self.q_lens - self.num_drafts)[request] - 1)
        slots.masked_fill_(unused, self.cache.unused_slot)
        last = torch.cat([x + (group.span.start - 1) for group, x in zip(self.groups, ends, strict=True)])
        return Rows(owner, offset, positions, slots, self.table[request, offset], last)

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

    def _logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) fp32, contiguous, as the kernels take it."""
        return self.model.compute_logits(hidden).float().contiguous()

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
    def advance(self) -> None:
        """To the round that follows if no request joins, as `load` would but for the lists that its selection
        will make: lengths, pending tokens, the selection just made, drafts, verification and budgets."""
        if self.kernels:
            bookkeeping.advance(self, FIELDS)
        else:
            self._advance()

    def _advance(self) -> None:
        row = torch.arange(self.shape.batch, device=self.cache.device)
        self.log[self.turn_of % self.turns, row] = self.result
        self.turn_of += 1
        emitted = self.result[:, 2:]
        stopped = (emitted[:, :, None] == self.stops[:, None]).any(2).any(1) | (self.result[:, 1] != 0)
        self._limits.masked_fill_(stopped, 0)
        unused = self.q_lens == 0
        self.lengths += (self.num_accepted + 1).masked_fill_(unused, 0)
        token = self.result[:, 2:].gather(1, self.num_accepted[:, None])
        self.table[:, :1] = token.clamp_(min=0)  # -1 where the target failed
        alive = ~unused & (self.lengths < self._limits)
        # An ended request's row is from now on an unused one.
        self.lengths *= alive
        if self.shape.steps:
            left = (self._limits - self.lengths - 1).clamp_(min=0)
            self.num_drafts.copy_(torch.minimum(self._gammas, left) * alive)
            self._listed.copy_(self._next_listed * alive)
            self._tails.copy_(self._next_tails * alive)
        self.q_lens.copy_((self.num_drafts + 1) * alive)
        self._keys.copy_((self.lengths + self.num_drafts) * alive)
        share = torch.ceil(self.ratios * self._keys - 1e-9).long()
        k = torch.minimum(torch.maximum(share, self.least_tokens), self.lengths)
        self._budgets.copy_(k)

    @torch.no_grad()
    def turn(self) -> None:
        """From the drafts to where the next begin; in plain decoding, from a verification to the next. The
        host does not come in between, so the lists that the next selection makes are planned here."""
        if self.shape.steps:
            self.verify()
            self.select()
        self.advance()
        for group, mode in zip(self.groups, self.modes, strict=True):
            if mode.selects and plans_tensors(group.policy):
                rows = group.batch
                plan = group.policy.plan(self._budgets[rows], self.lengths[rows], False)
                for row, planned in zip((self._next_listed, self._next_tails), plan, strict=True):
                    row[rows] = planned

    @torch.no_grad()
    def select(self) -> None:
        """Fills the groups' lists."""
        for group, mode in zip(self.groups, self.modes, strict=True):
            if mode.selects:
                group.select()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For captures, since a collection might destroy another decoder's graphs, which no capture survives,
    and for what is timed: the first one after a model was loaded takes tens of milliseconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tokens(line: list[int]) -> tuple[int, list[int]]:
    """(accepted drafts, emitted tokens) of a row of `result`."""
    return line[0], line[2 : 3 + line[0] - line[1]]


def _sequence(request: Request) -> Any:
    assert request.sequence is not None, "a request without pages cannot run"
    return request.sequence
