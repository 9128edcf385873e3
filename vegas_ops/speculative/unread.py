"""Blocks of iterations that the device goes through alone, while the host reads the block before.

    device   | block 1        | block 2          | block 3 ...
    host     launch 1, 2      read 1, launch 3   read 2, launch 4 ...

What the host knows is a block behind: pages are reserved for both, nothing is given back before the last
one, and a row whose request the host alone could end is emptied before its pages can serve another block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vegas_ops.speculative.kv_cache import OutOfPages
from vegas_ops.speculative.request import Request
from vegas_ops.speculative.round import Round
from vegas_ops.speculative.selection import plans_tensors
from vegas_ops.speculative.shapes import RARE

if TYPE_CHECKING:
    from vegas_ops.speculative.loop import SpeculativeDecoder

Emitted = list[tuple[Request, list[int]]]


class Block(NamedTuple):
    """Iterations of `requests` that were launched: `turns` of them, whose results lie from `begin` on in the
    round's log. drafts: each request's number of them."""

    round: Round
    pool: Any
    requests: tuple[Request, ...]
    drafts: tuple[int, ...]
    turns: int
    begin: int


class Unread:
    """The blocks of a decoder: one in flight between its steps, or none."""

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        self.decoder = decoder
        self.flight: Block | None = None
        self._late: Emitted = []  # read between two steps
        self._read_at = 0.0

    @property
    def log_turns(self) -> int:
        """Iterations of a round's log."""
        return 2 * self.decoder.read_every

    def turns(self, requests: Sequence[Request], behind: int = 0) -> int:
        """Iterations of a next block, with pages for all of them; behind: of the block in flight."""
        decoder = self.decoder
        if not requests or any(q.logits_processor or q.forced_tokens is not None for q in requests):
            return 0
        drafts = [q.most_drafts if decoder._selects else 0 for q in requests]
        for request, n in zip(requests, drafts, strict=True):
            policy = request.policy
            if n and (request.selection is None or policy.refresh > 1 or not plans_tensors(policy)):
                return 0
        left = [q.max_length(decoder.max_position) - len(q.tokens) for q in requests]
        # No more than it seems to take: an iteration gives at least one token, and drafts more.
        rates = [max(q.statistics.tokens_per_iteration, 1.0) for q in requests]
        needed = max(math.ceil(n / rate) for n, rate in zip(left, rates, strict=True)) - behind
        turns = min(decoder.read_every, needed)
        if turns < 1:
            return 0
        for request, most, n in zip(requests, left, drafts, strict=True):
            assert request.sequence is not None
            try:
                new = min(most, (behind + turns) * (1 + n) + n)
                decoder.cache.reserve(request.sequence, len(request.tokens) + new)
            except OutOfPages:
                return 0
        return turns

    def launch(self, requests: Sequence[Request], turns: int) -> None:
        """The first block of a batch."""
        decoder = self.decoder
        drafts = {request: request.num_drafts(decoder.max_position) for request in requests}
        r, pool, ahead = decoder._load(list(requests), drafts, turns=2 * decoder.read_every)
        if not ahead:
            r.run("draft" if r.shape.steps else "verify", pool)
        self._read_at = time.perf_counter()
        self._launch(r, pool, tuple(requests), turns, 0)

    def _launch(self, r: Round, pool: Any, requests: tuple[Request, ...], turns: int, begin: int) -> None:
        r.log_from(begin)
        for turn in range(1, turns + 1):
            r.run("turn", pool)
            if turn == turns:
                r.fetch_log(begin, turns)
            r.run("draft" if r.shape.steps else "verify", pool)
        self.decoder._ahead = r
        self.decoder._since += turns
        drafts = tuple(request.most_drafts for request in requests)
        self.flight = Block(r, pool, requests, drafts, turns, begin)

    def step(self) -> Emitted:
        """Launches the next block if the batch goes on as it is, and reads the one in flight."""
        block, decoder = self.flight, self.decoder
        assert block is not None
        decoder._adapt()
        turns = self._next_turns(block)
        if turns:
            running = [request for request in block.requests if not request.finished]
            block.round.load_tables(running)
            self._launch(block.round, block.pool, block.requests, turns, decoder.read_every - block.begin)
        else:
            self.flight = None
        emitted = self.take_late() + self._land(block, last=not turns)
        if not any(request in decoder.running for request in block.requests):
            self.flight = decoder._ahead = None  # launched in vain
        return emitted

    def take_late(self) -> Emitted:
        """What was read between two steps."""
        late, self._late = self._late, []
        return late

    def _next_turns(self, block: Block) -> int:
        """Iterations of the block after the one in flight; 0: others join, the batch has halved or should
        have a round of its size, another number of drafts is wanted, or texts outgrow the round."""
        decoder, running = self.decoder, self.decoder.running
        known = set(block.requests)
        if decoder.waiting or not all(request in known for request in running):
            return 0
        if 2 * len(running) <= len(block.requests) and len(block.requests) > 1:
            return 0
        wanted = block.round.wanted
        if wanted != block.round.shape:
            decoder._misses[wanted] += block.turns
            if decoder._misses[wanted] > RARE:
                return 0
        if block.drafts != tuple(request.most_drafts for request in block.requests):
            return 0
        turns = self.turns(running, block.turns)
        most = block.round.shape.steps + 1
        keys = max((len(q.tokens) for q in running), default=0) + (block.turns + turns + 1) * most
        return turns if min(keys, decoder.max_position) <= block.round.shape.max_keys else 0

    def settle(self) -> None:
        """Reads what is in flight: before requests leave, or the host plans anew."""
        block, self.flight = self.flight, None
        if block is not None:
            self._late += self._land(block, last=True)

    def _land(self, block: Block, last: bool) -> Emitted:
        """Reads a block and commits its tokens; last: nothing is in flight behind it."""
        decoder, r = self.decoder, block.round
        log = r.read_log(block.begin, block.turns)
        now = time.perf_counter()
        forward, self._read_at = (now - self._read_at) / (block.turns * (r.shape.steps + 1)), now
        emitted: dict[Request, list[int]] = {q: [] for q in block.requests if not q.finished}
        row_of = {request: i for i, request in enumerate(r.requests) if request is not None}
        most = dict(zip(block.requests, block.drafts, strict=True))  # the decoder may want others by now
        for lines in log:
            running = [request for request in emitted if not request.finished]
            now_drafted = {q: q.num_drafts(decoder.max_position, most[q]) for q in running}
            decoder._share_time(now_drafted, r.shape.steps * forward, forward, 0.0)
            for request, n in now_drafted.items():
                reads = decoder._reads(request, n)
                r.hand_out_to(row_of[request], n)
                emitted[request] += decoder._commit(request, n, reads, *lines[row_of[request]])
        for request in emitted:
            if request.sequence is None:
                r.empty_row(row_of[request])
            elif last:
                decoder._roll_back(request)
            else:
                request.sequence.length = len(request.tokens) - 1
        return list(emitted.items())
