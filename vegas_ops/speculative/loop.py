"""The loop of self-speculative decoding: draft, verify, accept, select.

    pending token                      verification: one full-attention pass over
    | draft 1 .. draft g               [pending, draft 1 .. draft g], g + 1 rows
    v v                                |
    x d d d d d   -- accept a -->      x d d y        y: the target's own token, now pending
                                       cache: rolled back to what was committed

Drafts attend to the selected tokens and everything newer; the verification rewrites their K and V
with exact ones, and its logits select the tokens of the next round. A prompt's last token is a
verification without drafts: it gives the first token and the first selection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vegas_ops.speculative.acceptance import Accepted, accept_greedy, accept_sampled
from vegas_ops.speculative.attention import (
    DraftContext,
    DraftGroup,
    PrefillContext,
    Rows,
    VerifyContext,
    VerifyGroup,
    to_device,
)
from vegas_ops.speculative.kv_cache import OutOfPages, PagedKVCache
from vegas_ops.speculative.model import Model, layer_attention
from vegas_ops.speculative.request import FinishReason, Request
from vegas_ops.speculative.sampling import (
    ACCEPT,
    DRAFT,
    EMIT,
    SamplingBatch,
    draw,
    probabilities,
    uniform,
)

OnPrompt = Callable[[Request, int, int], None]


class SpeculativeDecoder:
    """Decodes a changing batch of requests with one model and one paged cache.

    Requests may join (`add`) and leave (`abort`, `preempt`) between steps. They may differ in
    everything: length, sampling, gamma, budget, policy. Each gets the output that it would get
    alone. When pages run out, the latest arrival waits and is computed anew; its output does not
    change (on a GPU up to rounding: another kernel serves its prompt).

    cache: of the model's shape, in its dtype or fp8. prefill_chunk: tokens per forward of a prompt.
    on_prompt(request, done, total): progress. profile: wait for the device at every clock reading.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        *,
        prefill_chunk: int = 512,
        on_prompt: OnPrompt | None = None,
        profile: bool = False,
    ) -> None:
        shape = (model.num_layers, model.num_heads_kv, model.head_dim)
        if (cache.k.shape[0], *cache.k.shape[3:]) != shape:
            raise ValueError(
                f"`cache` must have the model's layers, KV heads and head dim {shape}, "
                f"got {(cache.k.shape[0], *cache.k.shape[3:])}"
            )
        if cache.k.dtype not in (model.dtype, torch.float8_e4m3fn):
            raise ValueError(f"`cache` must be {model.dtype} or fp8, got {cache.k.dtype}")
        if cache.device.type != model.device.type:
            raise ValueError(f"`cache` must be on {model.device} like the model, got {cache.device}")
        if prefill_chunk < 1:
            raise ValueError(f"`prefill_chunk` must be at least 1, got {prefill_chunk}")
        self.model, self.cache = model, cache
        self.max_position = min(model.max_position, cache.max_length)
        self.prefill_chunk, self.on_prompt, self.profile = prefill_chunk, on_prompt, profile
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # in order of arrival

    # Requests

    def add(self, request: Request) -> Request:
        """Queues a request; it joins at the next step."""
        if request.finished or request in self.waiting or request in self.running:
            raise ValueError("`request` must be new, got one that was already added")
        if len(request.prompt) >= self.max_position:
            raise ValueError(
                f"`prompt` must be shorter than the context of {self.max_position}, "
                f"got {len(request.prompt)} tokens"
            )
        for name, ids in (("prompt", request.prompt), ("forced_tokens", request.forced_tokens or ())):
            bad = next((token for token in ids if not 0 <= token < self.model.vocab_size), None)
            if bad is not None:
                raise ValueError(f"`{name}` must hold token ids below {self.model.vocab_size}, got {bad}")
        source = request.share_prefix_with
        if source is not None and source.sequence is not None and source.sequence.cache is not self.cache:
            raise ValueError("`share_prefix_with` must run in the same cache, got a request of another")
        self.waiting.append(request)
        if len(request.tokens) >= request.max_length(self.max_position):
            self._finish(request, "length")
        return request

    def abort(self, request: Request) -> None:
        """Ends a request now; its pages are free at once."""
        if not request.finished:
            self._finish(request, "abort")

    def preempt(self, request: Request) -> None:
        """Gives a running request's pages back; it is computed anew when there is room.

        Its selection stays, as token indices, so its drafts go on as if nothing had happened.
        """
        if request not in self.running:
            raise ValueError("`request` must be running, got one that is not")
        self.running.remove(request)
        self._release(request)
        self.waiting.insert(0, request)

    @torch.no_grad()
    def hold_prompt(self, prompt: Sequence[int]) -> Request:
        """Computes a prompt without continuing it: its pages stay for requests that
        `share_prefix_with` the result, until that is aborted."""
        request = Request(prompt, max_new_tokens=1, gamma=0)
        self.add(request)
        self._admit()
        if request.sequence is None:
            self.abort(request)
            raise OutOfPages("the cache has too few free pages for the prompt")
        self.running.remove(request)
        return request

    @torch.no_grad()
    def step(self) -> list[tuple[Request, list[int]]]:
        """One iteration of every running request; the tokens that each emitted."""
        self._admit()
        requests = self._reserve()
        return self._iterate(requests) if requests else []

    def run(self) -> None:
        """Steps until every request has finished."""
        while self.waiting or self.running:
            self.step()

    def stream(self, request: Request) -> Iterator[int]:
        """Adds a request and yields its tokens as they are accepted."""
        self.add(request)
        while not request.finished:
            for emitter, tokens in self.step():
                if emitter is request:
                    yield from tokens

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Outputs of all requests, in their order."""
        for request in requests:
            self.add(request)
        self.run()
        return [request.output for request in requests]

    # One iteration

    def _iterate(self, requests: list[Request]) -> list[tuple[Request, list[int]]]:
        windows = [layer.window for layer in layer_attention(self.model)]
        r = _Round(requests, self.model.vocab_size, self.max_position, windows, self.cache.device)
        clock = [self._now()]
        self._draft(r)
        clock.append(self._now())
        everyone = list(range(len(requests)))
        hidden, context = self._verify(r, everyone)
        accepted = r.accept(self.model.compute_logits(hidden), context.rows)
        clock.append(self._now())
        context.select()
        clock.append(self._now())
        counts, emitted = r.read(accepted)
        following = [i for i in everyone if requests[i].forced_tokens and requests[i].gamma]
        if following:
            r.follow_text(following, counts)
            self._verify(r, following, second_pass=True)[1].select()
        r.share_time(*(b - a for a, b in pairwise(clock)))
        return [(request, self._commit(r, i, counts[i], emitted[i])) for i, request in enumerate(requests)]

    def _draft(self, r: _Round) -> None:
        """Fills r.table[:, 1:] and, for sampling, r.draft_probs."""
        context: DraftContext | None = None
        for step in range(max(r.num_drafts)):
            active = [i for i, g in enumerate(r.num_drafts) if g > step]
            if context is not None and len(active) == len(context.rows.q_lens):
                context.advance()
            else:
                requests = [r.requests[i] for i in active]
                starts = [len(request.tokens) - 1 + step for request in requests]
                rows = Rows(self.cache, requests, starts, [1] * len(requests))
                context = DraftContext(
                    rows,
                    [
                        DraftGroup(self.model, rows, begin, requests[begin:end])
                        for begin, end in _runs([request.policy for request in requests])
                    ],
                )
                index = to_device(active, torch.int64, self.cache.device)
            hidden = self.model.forward(r.table[index, step], context.rows.positions, context.attend)
            logits = r.process(self.model.compute_logits(hidden), [(i, step) for i in active])
            r.table[index, step + 1] = r.draw_draft(logits, index, step)

    def _verify(
        self, r: _Round, members: list[int], *, second_pass: bool = False
    ) -> tuple[Tensor, VerifyContext]:
        """Hidden states of [pending, drafts] of the round's `members`. Requests with a forced text
        are selected for in a second pass, over the text that they follow."""
        requests = [r.requests[i] for i in members]
        starts = [len(request.tokens) - 1 for request in requests]
        rows = Rows(self.cache, requests, starts, [r.num_drafts[i] + 1 for i in members])
        index = to_device(members, torch.int64, self.cache.device)
        groups = []
        for begin, end in _runs([_kind(request) for request in requests]):
            selects = requests[begin].gamma > 0 and (second_pass or requests[begin].forced_tokens is None)
            mine = index[begin:end]
            group = VerifyGroup(
                self.model, rows, begin, requests[begin:end], selects, r.seeds[mine], r.rounds[mine]
            )
            groups.append(group)
        context = VerifyContext(rows, groups)
        token_ids = r.table[index[rows.owner], rows.offset]
        return self.model.forward(token_ids, rows.positions, context.attend), context

    def _commit(self, r: _Round, i: int, count: int, emitted: list[int]) -> list[int]:
        """Appends what request i emitted, up to its end, and rolls the cache back to it."""
        request, prompt_pass = r.requests[i], len(r.requests[i].tokens) == len(r.requests[i].prompt)
        failed = len(emitted) <= count
        if request.forced_tokens is not None and not failed:
            done = len(request.tokens) - len(request.prompt)
            emitted = list(request.forced_tokens[done : done + count + 1])
        reason: FinishReason | None = "error" if failed else None
        new: list[int] = []
        for token in emitted:
            request.tokens.append(token)
            new.append(token)
            if request.stops():
                reason = "stop"
                break
        if reason is None and len(request.tokens) >= request.max_length(self.max_position):
            reason = "length"
        assert request.sequence is not None
        self.cache.truncate(request.sequence, len(request.tokens) - 1)
        statistics = request.statistics
        if not prompt_pass:
            statistics.count(r.num_drafts[i], count, len(new))
            layer_bytes = self.cache.bytes_per_token // self.model.num_layers
            statistics.draft_bytes += r.draft_reads[i] * layer_bytes
            statistics.verify_bytes += r.verify_reads[i] * layer_bytes
        if reason is None and statistics.iterations == request.max_iterations:
            reason = "iterations"
        if reason is not None:
            message = "the target's logits hold NaN or infinity" if reason == "error" else None
            self._finish(request, reason, message)
        return new

    # Pages

    def _admit(self) -> None:
        """Computes the prompts of waiting requests, as long as there are pages."""
        while self.waiting:
            request = self.waiting[0]
            limit = request.max_length(self.max_position)
            source, shared = request.share_prefix_with, 0
            if source is not None and source.sequence is not None:
                known = min(source.sequence.length, len(request.tokens) - 1)
                pairs = zip(request.tokens[:known], source.tokens, strict=False)
                shared = next((i for i, (a, b) in enumerate(pairs) if a != b), known)
                sequence = self.cache.share_prefix(source.sequence, shared)
            else:
                sequence = self.cache.new_sequence()
            try:
                self.cache.reserve(sequence, min(len(request.tokens) + request.gamma, limit))
            except OutOfPages as error:
                self.cache.free(sequence)
                if self.running:
                    return
                self._finish(request, "error", f"the cache is too small: {error}")
                continue
            request.sequence = sequence
            try:
                self._prefill(request)
            except BaseException:
                self._release(request)  # half a prompt must not be continued
                raise
            if not request.finished:  # `on_prompt` may have aborted it
                self.waiting.remove(request)
                self.running.append(request)

    def _prefill(self, request: Request) -> None:
        """K and V of every token but the pending one."""
        start, sequence, end = self._now(), request.sequence, len(request.tokens) - 1
        assert sequence is not None
        while sequence.length < end and not request.finished:
            begin = sequence.length
            n = min(self.prefill_chunk, end - begin)
            context = PrefillContext(self.model, self.cache, request, n)
            chunk = to_device(request.tokens[begin : begin + n], torch.int64, self.cache.device)
            self.model.forward(chunk, context.rows.positions, context.attend)
            sequence.length += n
            if self.on_prompt is not None:
                self.on_prompt(request, sequence.length, end)
        request.statistics.prompt_seconds += self._now() - start

    def _reserve(self) -> list[Request]:
        """The running requests, alike ones side by side, each with pages for its round."""
        for request in list(self.running):
            while request in self.running:
                assert request.sequence is not None
                drafts = request.num_drafts(self.max_position)
                try:
                    self.cache.reserve(request.sequence, len(request.tokens) + drafts)
                    break
                except OutOfPages as error:
                    if len(self.running) == 1:
                        self._finish(request, "error", f"the cache is too small: {error}")
                    else:
                        self.preempt(self.running[-1])
        order: dict[object, int] = {}
        return sorted(self.running, key=lambda q: order.setdefault(_kind(q), len(order)))

    def _release(self, request: Request) -> None:
        if request.sequence is not None:
            self.cache.free(request.sequence)
            request.sequence = None

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish_reason, request.error = reason, error
        self._release(request)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def _now(self) -> float:
        if self.profile and self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
        return time.perf_counter()


class _Round:
    """The tensors of one iteration: row i belongs to requests[i].

    table: (batch, max_drafts + 1) int64, the pending token and its drafts; rounds: tokens committed
    before the round, which numbers the random streams.
    """

    def __init__(
        self,
        requests: list[Request],
        vocab_size: int,
        max_position: int,
        windows: Sequence[int | None],
        device: torch.device,
    ) -> None:
        self.requests = requests
        self.num_drafts = [request.num_drafts(max_position) for request in requests]
        # Cached tokens that attention reads, summed over layers.
        self.draft_reads, self.verify_reads = [], []
        for request, g in zip(requests, self.num_drafts, strict=True):
            keys = len(request.tokens) + g
            self.draft_reads.append(request.draft_reads(g, windows))
            self.verify_reads.append(sum(keys if w is None else min(keys, w + g) for w in windows))
        width = max(self.num_drafts)
        pending = [[request.tokens[-1]] + [0] * width for request in requests]
        self.table = to_device(pending, torch.int64, device)
        self.drafts = to_device(self.num_drafts, torch.int64, device)
        self.seeds = to_device([request.seed for request in requests], torch.int64, device)
        lengths = [len(request.tokens) for request in requests]
        self.rounds = to_device(lengths, torch.int64, device)
        self.sampling = SamplingBatch([request.sampling for request in requests], device)
        shape = (len(requests), 0 if self.sampling.greedy else width, vocab_size)
        self.draft_probs = torch.zeros(shape, device=device)

    def process(self, logits: Tensor, places: list[tuple[int, int]]) -> Tensor:
        """Applies the requests' processors; row n predicts what follows draft places[n][1] of
        request places[n][0]."""
        for row, (i, step) in enumerate(places):
            processor = self.requests[i].logits_processor
            if processor is not None:
                committed = to_device(self.requests[i].tokens, torch.int64, logits.device)
                history = torch.cat([committed, self.table[i, 1 : step + 1]])
                logits[row] = processor(history, logits[row].clone())
        return logits

    def draw_draft(self, logits: Tensor, index: Tensor, step: int) -> Tensor:
        if self.sampling.greedy:
            return logits.argmax(-1)
        q = probabilities(logits, self.sampling.rows(index))
        # A row without a distribution drafts token 0, and says so: the target decides.
        certain = torch.zeros_like(q)
        certain[:, 0] = 1.0
        q = torch.where(q.isnan().any(-1, keepdim=True), certain, q)
        self.draft_probs[index, step] = q
        return draw(q, uniform(self.seeds[index], self.rounds[index], step, DRAFT))

    def accept(self, logits: Tensor, rows: Rows) -> Accepted:
        places = [(i, j) for i, g in enumerate(self.num_drafts) for j in range(g + 1)]
        logits = self.process(logits, places)
        column = torch.arange(self.table.shape[1], device=logits.device)
        # Ragged to rectangular: a request with fewer drafts repeats its last row.
        last = torch.minimum(column, self.drafts[:, None])
        logits = logits[rows.cu_seqlens_q[:-1, None].long() + last]
        drafts = self.table[:, 1:]
        if self.sampling.greedy:
            return accept_greedy(drafts, self.drafts, logits)
        owner = torch.arange(len(self.requests), device=logits.device)
        params = self.sampling.rows(owner.repeat_interleave(logits.shape[1]))
        target = probabilities(logits.flatten(0, 1), params).view(logits.shape)
        seeds, rounds = self.seeds[:, None], self.rounds[:, None]
        u_accept = uniform(seeds, rounds, column[None, :-1], ACCEPT)
        u_emit = uniform(seeds, rounds, column[None], EMIT)
        return accept_sampled(drafts, self.drafts, self.draft_probs, target, u_accept, u_emit[:, 0])

    def read(self, accepted: Accepted) -> tuple[list[int], list[list[int]]]:
        """Accepted drafts and emitted tokens of every request: the only read of device values in
        an iteration. A failed request emits its accepted drafts alone."""
        table = torch.cat([accepted.num_accepted[:, None], accepted.failed[:, None], accepted.tokens], 1)
        lines = table.tolist()
        return [line[0] for line in lines], [line[2 : 3 + line[0] - line[1]] for line in lines]

    def share_time(self, draft: float, verify: float, select: float) -> None:
        """Charges each request by its rows of every phase; the prompt's last row is the prompt's."""
        drafts = max(sum(self.num_drafts), 1)
        rows = len(self.requests) + sum(self.num_drafts)
        selecting = max(sum(request.gamma > 0 for request in self.requests), 1)
        for request, g in zip(self.requests, self.num_drafts, strict=True):
            statistics = request.statistics
            verify_share = verify * (g + 1) / rows
            select_share = select / selecting if request.gamma else 0.0
            if len(request.tokens) == len(request.prompt):
                statistics.prompt_seconds += verify_share + select_share
                continue
            statistics.draft_seconds += draft * g / drafts
            statistics.verify_seconds += verify_share
            statistics.select_seconds += select_share

    def follow_text(self, members: list[int], counts: list[int]) -> None:
        """Puts the forced text in the place of the accepted drafts."""
        for i in members:
            request = self.requests[i]
            done = len(request.tokens) - len(request.prompt)
            text = (request.forced_tokens or ())[done : done + counts[i]]
            self.table[i, 1 : 1 + len(text)] = to_device(list(text), torch.int64, self.table.device)


def _kind(request: Request) -> object:
    """Requests of one kind share the calls of a verification and its selection."""
    if request.gamma == 0:
        return None
    has_hint = request.selection is not None and request.selection.guide_lse is not None
    window = request.policy.look_ahead_window(request.gamma)
    return request.policy, window, has_hint, request.forced_tokens is not None


def _runs(kinds: Sequence[object]) -> Iterator[tuple[int, int]]:
    """[begin, end) of each run of equal neighbours."""
    begin = 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[begin]:
            yield begin, i
            begin = i
