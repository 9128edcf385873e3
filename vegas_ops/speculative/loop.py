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

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from vegas_ops.arguments import check_callable, check_integer, check_kind, check_number
from vegas_ops.speculative.adaptive import best_gamma, update_rate
from vegas_ops.speculative.attention import PrefillContext
from vegas_ops.speculative.kv_cache import OutOfPages, PagedKVCache, to_device
from vegas_ops.speculative.model import Model, check_model, layer_attention, selecting_layers
from vegas_ops.speculative.request import FinishReason, Request
from vegas_ops.speculative.round import Round
from vegas_ops.speculative.selection import Policy
from vegas_ops.speculative.shapes import RARE, GroupShape, Mode, RoundShape
from vegas_ops.speculative.unread import Unread

MAX_ROUNDS = 32  # shapes whose buffers and graphs are kept
MIN_KEYS = 1024  # the least bound on keys
MAX_MISSES = 1024  # shapes without a round whose iterations are counted
ADAPT_EVERY = 8  # iterations

OnPrompt = Callable[[Request, int, int], None]


class SpeculativeDecoder:
    """Decodes a changing batch of requests with one model and one paged cache.

    Requests may join (`add`) and leave (`abort`, `preempt`) between steps. They may differ in
    everything: length, sampling, gamma, budget, policy. Each gets the output that it would get
    alone. When pages run out, the latest arrival waits and is computed anew; its output does not
    change (on a GPU up to rounding: another kernel serves its prompt).

    cache: of the model's shape, in its dtype or fp8. prefill_chunk: tokens per forward of a prompt.
    on_prompt(request, done, total): progress. profile: wait for the device at every clock reading.
    graphs: on a GPU, capture the phases of a batch's shape at their second run and replay them; the
    model's forward must then not wait for the device. Batches whose requests have a
    `logits_processor` or a forced text run eagerly. batch_invariant: the attention of a verification
    has the same bits whatever else is in the batch; with a model whose other layers are like that,
    greedy output on a GPU is plain decoding's to the bit, too.
    read_every: on a GPU, iterations of a block, where the batch allows blocks: the device goes through one
    alone while the host reads the tokens of the block before; a `step` gives a block's. Ends, too, are found
    by the device (lengths, and up to `MAX_STOPS` stop tokens; a request with more, or with stop sequences, is
    computed in vain until the host reads). Blocks take fixed shapes, and policies that select at every
    verification or never again.
    draft_cost: the time of a draft step over that of a verification; rounds then make as many drafts, up
    to each request's gamma, as pay by the acceptance so far. None: always gamma.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        *,
        prefill_chunk: int = 512,
        on_prompt: OnPrompt | None = None,
        profile: bool = False,
        graphs: bool = True,
        batch_invariant: bool = False,
        read_every: int = 1,
        draft_cost: float | None = None,
    ) -> None:
        check_model(model)
        check_kind("cache", cache, PagedKVCache, "a PagedKVCache")
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
        check_integer("prefill_chunk", prefill_chunk, 1)
        check_integer("read_every", read_every, 1)
        check_callable("on_prompt", on_prompt)
        if draft_cost is not None:
            check_number("draft_cost", draft_cost)
            if not 0 < draft_cost < math.inf:
                raise ValueError(f"`draft_cost` must be finite and > 0, got {draft_cost}")
        self.draft_cost = draft_cost
        self._gamma = 0  # of all, where it adapts
        self._since = 0  # iterations since it was chosen
        self.model, self.cache, self.read_every = model, cache, read_every
        self.max_position = min(model.max_position, cache.max_length)
        self.prefill_chunk, self.on_prompt, self.profile = prefill_chunk, on_prompt, profile
        self.batch_invariant = batch_invariant
        self.on_gpu = cache.device.type == "cuda"
        self.fixed_shapes = graphs and self.on_gpu  # batches padded to shapes that many iterations share
        self._graph_memory = self._pool = None
        if self.fixed_shapes:  # held here, for a pool without graphs is gone, and all of them may be evicted
            with torch.cuda.device(cache.device):
                self._graph_memory = torch.cuda.MemPool()
            self._pool = self._graph_memory.id
        self._rounds: dict[RoundShape, Round] = {}
        self._misses: Counter[RoundShape] = Counter()
        self._ahead: Round | None = None  # drafts, or plainly verifies, while the host reads
        self._pages_ahead = False  # there are pages for that
        self._windows = [layer.window for layer in layer_attention(model)]
        self._layer_bytes = cache.bytes_per_token // model.num_layers
        self._selects = bool(selecting_layers(model))
        self._unread = Unread(self)
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # in order of arrival

    # Requests

    def add(self, request: Request) -> Request:
        """Queues a request; it joins at the next step."""
        check_kind("request", request, Request, "a Request")
        if request.finished or request in self.waiting or request in self.running:
            raise ValueError("`request` must be new, got one that was already added")
        if len(request.prompt) >= self.max_position:
            raise ValueError(
                f"`prompt` must be shorter than the context of {self.max_position} (the model's, or what "
                f"the cache holds), got {len(request.prompt)} tokens"
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
            self._finish(request, request.end(self.max_position))
        return request

    def abort(self, request: Request) -> None:
        """Ends a request now; its pages are free at once."""
        check_kind("request", request, Request, "a Request")
        self._unread.settle()
        if not request.finished:
            self._finish(request, "abort")

    def preempt(self, request: Request) -> None:
        """Gives a running request's pages back; it is computed anew when there is room.

        Its selection stays, as token indices, so its drafts go on as if nothing had happened.
        """
        if request not in self.running:
            raise ValueError("`request` must be running, got one that is not")
        self._unread.settle()
        if request.finished:  # as was to be read
            return
        self.running.remove(request)
        self._release(request)
        self._ahead = None  # it wrote into the pages given back
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
        """One iteration of every running request, or up to `read_every`; the tokens that each emitted."""
        with torch.cuda.device(self.cache.device) if self.on_gpu else nullcontext():
            if self._unread.flight is not None:
                return self._unread.step()
            late = self._unread.take_late()
            self._admit()
            self._adapt()
            requests = self._reserve()
            turns = self._unread.turns(requests) if self._pages_ahead else 0
            if turns:
                self._unread.launch(requests, turns)
                return late + self._unread.step()
            self._since += 1
            return late + self._iterate(requests) if requests else late

    def run(self) -> None:
        """Steps until every request has finished."""
        while self.waiting or self.running:
            self.step()

    def stream(self, request: Request) -> Iterator[int]:
        """Adds a request and yields its tokens as they are accepted."""
        self.add(request)
        given = len(request.prompt)
        while not request.finished or given < len(request.tokens):
            if given == len(request.tokens):  # else another's step or an `abort` gave some
                self.step()
            new = request.tokens[given:]
            given += len(new)
            yield from new

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Outputs of all requests, in their order."""
        check_kind("requests", requests, Sequence, "a list of Requests")
        for request in requests:
            self.add(request)
        self.run()
        return [request.output for request in requests]

    # One iteration

    def _adapt(self) -> None:
        """Chooses how many drafts the next rounds make."""
        drafting = [q for q in self.running if q.gamma and q.forced_tokens is None] if self.draft_cost else []
        if not drafting:
            return
        if self._gamma == 0 or self._since >= ADAPT_EVERY:
            self._gamma, self._since = best_gamma(drafting, self.draft_cost or 0.0, self._gamma), 0
        for request in drafting:
            request.draft_limit = self._gamma

    def _iterate(self, requests: list[Request]) -> list[tuple[Request, list[int]]]:
        drafts = {request: request.num_drafts(self.max_position) for request in requests}
        reads = {request: self._reads(request, n) for request, n in drafts.items()}
        start = self._now()
        r, pool, ahead = self._load(requests, drafts)
        if r.shape.steps and not ahead:
            r.run("draft", pool)
        drafted = self._now()
        if r.shape.steps or not ahead:
            r.run("verify", pool)
        r.fetch()
        verified = self._now()
        if any(mode.selects for mode in r.modes):
            r.run("select", pool)
        r.hand_out()
        selected = self._now()
        fixed = self._rounds.get(r.shape) is r
        if fixed and self._pages_ahead and not any(mode.first for mode in r.modes):
            r.run("advance", pool)
            r.run("draft" if r.shape.steps else "verify", pool)
            self._ahead = r
        launched = self._now()
        lines = {q: line for q, line in zip(r.requests, r.read(), strict=True) if q is not None}
        read = self._now()
        following = [request for request in requests if request.forced_tokens and request.gamma]
        if following:
            self._follow_text(r, following, {q: lines[q][0] for q in following}, drafts)
        followed = self._now()
        # The host ran ahead of the forwards that the read waited for: each of them gets as much.
        waited = (read - launched) / (r.shape.steps + 1)
        draft, verify = drafted - start + r.shape.steps * waited, verified - drafted + waited
        if r.shape.steps:
            draft += launched - selected
        else:
            verify += launched - selected
        self._share_time(drafts, draft, verify + followed - read, selected - verified)
        emitted = [(q, self._commit(q, drafts[q], reads[q], *lines[q])) for q in requests]
        for request in requests:
            self._roll_back(request)
        return emitted

    def _load(
        self,
        requests: list[Request],
        drafts: dict[Request, int],
        *,
        second_pass: bool = False,
        turns: int = 1,
    ) -> tuple[Round, Any, bool]:
        """The requests in the rows of a round, the memory pool of its graphs, if it has any, and
        whether it has gone ahead."""
        kinds: dict[_Kind, list[Request]] = {}
        for request in requests:
            kinds.setdefault(self._kind(request, second_pass), []).append(request)
        plain = not any(q.logits_processor or q.forced_tokens is not None for q in requests)
        fixed = self.fixed_shapes and plain
        shape = self._shape(kinds, drafts, fixed, turns)
        r = self._fixed_round(shape) if fixed else self._new_round(shape)
        limits = {request: request.max_length(self.max_position) for request in requests}
        modes = [Mode(kind.first, kind.selects) for kind in kinds]
        ahead = r.load(list(kinds.values()), modes, drafts, limits, self._ahead if fixed else None)
        self._ahead, r.second_pass = None, second_pass
        return r, self._pool if fixed else None, ahead

    def _kind(self, request: Request, second_pass: bool) -> _Kind:
        if request.gamma == 0 or not self._selects:
            return _Kind(_PLAIN, 0, False, False, False)
        policy, selection = request.policy, request.selection
        postponed = request.forced_tokens is not None and not second_pass
        return _Kind(
            policy,
            policy.look_ahead_window(request.gamma),
            policy.first_differs and selection is None,
            not postponed and policy.selects(None if selection is None else selection.age),
            postponed,
        )

    def _new_round(self, shape: RoundShape) -> Round:
        return Round(self.model, self.cache, shape, self.batch_invariant, self._unread.log_turns)

    def _fixed_round(self, shape: RoundShape) -> Round:
        """The round of this shape; as long as the shape is rare, a larger one where there is one:
        a new shape runs eagerly and is captured, which takes as long as many replays."""
        wanted = shape
        if shape not in self._rounds:
            if len(self._misses) >= MAX_MISSES:
                self._misses.clear()
            self._misses[shape] += 1
            larger = [known for known in self._rounds if known.serves(shape)]
            if larger and self._misses[shape] <= RARE:
                shape = min(larger, key=lambda known: known.batch)
        r = self._rounds.pop(shape, None) or self._new_round(shape)
        self._rounds[shape] = r
        r.wanted = wanted
        if len(self._rounds) > MAX_ROUNDS:
            del self._rounds[next(iter(self._rounds))]  # the one that has not run for longest
        return r

    def _shape(
        self, kinds: dict[_Kind, list[Request]], drafts: dict[Request, int], fixed: bool, turns: int
    ) -> RoundShape:
        """The smallest shape that serves these requests, or a fixed one that also serves what follows
        `turns` iterations."""
        requests = [request for members in kinds.values() for request in members]
        # Nothing is ever drafted for a model without layers to select for.
        most_drafts = {q: q.most_drafts if self._selects else 0 for q in requests} if fixed else drafts
        max_keys = max(len(request.tokens) + drafts[request] for request in requests)
        if fixed:  # drafts made ahead included
            max_keys += turns * (1 + max(most_drafts.values()))
            max_keys = min(max(1 << (max_keys - 1).bit_length(), MIN_KEYS), self.max_position)
        groups = []
        for kind, members in kinds.items():
            q_lens = [
                request.first_rows(kind.first and kind.selects) + drafts[request] for request in members
            ]
            size, rows, max_rows = len(members), sum(q_lens), max(q_lens)
            if fixed:
                size = bucket(size)
                max_rows = max(*q_lens, *(most_drafts[request] + 1 for request in members))
                rows = size * max_rows
                lists = [
                    kind.policy.plan(request.budget(max_keys, max_keys), max_keys, False)[0]
                    for request in members
                ]
            else:
                lists = [0 if q.selection is None else q.selection.budget for q in members]
                lists += [
                    kind.policy.plan(q.budget(len(q.tokens) + drafts[q]), len(q.tokens), kind.first)[0]
                    for q in members
                ]
            groups.append(GroupShape(kind.policy, kind.window, size, rows, max_rows, max(lists)))
        sampled = [request.sampling for request in requests if request.sampling.temperature > 0]
        return RoundShape(
            tuple(groups),
            max(most_drafts[request] for request in requests),
            max_keys,
            greedy=not sampled,
            filtered=any(p.top_k or p.top_p < 1 or p.min_p for p in sampled),
        )

    def _follow_text(
        self, r: Round, following: list[Request], counts: dict[Request, int], drafts: dict[Request, int]
    ) -> None:
        """Verifies once more, with the forced text in the place of the accepted drafts, and selects."""
        second, _, _ = self._load(following, drafts, second_pass=True)
        row_of = {request: i for i, request in enumerate(r.requests)}
        for i, request in enumerate(second.requests):
            assert request is not None
            done = len(request.tokens) - len(request.prompt)
            text = list((request.forced_tokens or ())[done : done + counts[request]])
            n = drafts[request]
            second.table[i, 1 : 1 + n] = r.table[row_of[request], 1 : 1 + n]
            second.table[i, 1 : 1 + len(text)] = to_device(text, torch.int64, self.cache.device)
        second.run("verify", None)
        given = [counts[request] for request in second.requests if request is not None]
        second.num_accepted.copy_(to_device(given, torch.int64, self.cache.device))
        second.run("select", None)
        second.hand_out()

    def _share_time(self, drafts: dict[Request, int], draft: float, verify: float, select: float) -> None:
        """Charges each request by its rows of every phase; the prompt's last row is the prompt's."""
        drafted = max(sum(drafts.values()), 1)
        rows = len(drafts) + sum(drafts.values())
        selecting = max(sum(request.gamma > 0 for request in drafts), 1)
        for request, g in drafts.items():
            statistics = request.statistics
            verify_share = verify * (g + 1) / rows
            select_share = select / selecting if request.gamma else 0.0
            if len(request.tokens) == len(request.prompt):
                statistics.prompt_seconds += verify_share + select_share
                continue
            statistics.draft_seconds += draft * g / drafted
            statistics.verify_seconds += verify_share
            statistics.select_seconds += select_share

    def _reads(self, request: Request, drafts: int) -> tuple[int, int]:
        """Cached tokens that drafting and verification read, summed over layers."""
        keys = len(request.tokens) + drafts
        verified = (keys if w is None else min(keys, w + drafts) for w in self._windows)
        return request.draft_reads(drafts, self._windows), sum(verified)

    def _commit(
        self, request: Request, drafts: int, reads: tuple[int, int], count: int, emitted: list[int]
    ) -> list[int]:
        """Appends what a request emitted, up to its end."""
        prompt_pass, failed = len(request.tokens) == len(request.prompt), len(emitted) <= count
        if request.forced_tokens is not None and not failed:
            done = len(request.tokens) - len(request.prompt)
            emitted = list(request.forced_tokens[done : done + count + 1])
        reason: FinishReason | None = "error" if failed else None
        new = emitted
        # A subclass of Request may stop by rules of its own.
        own = type(request).stops is not Request.stops
        if not (own or request.stop_token_ids or request.stop_sequences):
            request.tokens += emitted
        else:
            for i, token in enumerate(emitted, 1):
                request.tokens.append(token)
                if request.stops():
                    reason, new = "stop", emitted[:i]
                    break
        if reason is None and len(request.tokens) >= request.max_length(self.max_position):
            reason = request.end(self.max_position)
        statistics = request.statistics
        if not prompt_pass:
            statistics.count(drafts, count, len(new))
            request.draft_rate = update_rate(request.draft_rate, drafts, count)
            statistics.draft_bytes += reads[0] * self._layer_bytes
            statistics.verify_bytes += reads[1] * self._layer_bytes
        if reason is None and statistics.iterations == request.max_iterations:
            reason = "iterations"
        if reason is not None:
            message = "the target's logits hold NaN or infinity" if reason == "error" else None
            self._finish(request, reason, message)
        return new

    # Pages

    def _roll_back(self, request: Request) -> None:
        """Gives back the pages beyond a running request's text and, where one goes ahead, its next rounds."""
        if request.sequence is not None:
            kept = None
            if self._ahead:
                has = len(request.sequence.pages) * self.cache.page_size
                kept = min(self._wanted_ahead(request), has)
            self.cache.truncate(request.sequence, len(request.tokens) - 1, kept)

    def _wanted_ahead(self, request: Request) -> int:
        """Tokens that a request needs pages for in the next round and the one behind it."""
        most = len(request.tokens) + request.num_drafts(self.max_position) + 1 + request.most_drafts
        return min(most, request.max_length(self.max_position))

    def _admit(self) -> None:
        """Computes the prompts of waiting requests, as long as there are pages."""
        while self.waiting:
            request = self.waiting[0]
            limit = request.max_length(self.max_position)
            source, shared = request.share_prefix_with, 0
            if source is not None and source.sequence is not None:
                known = min(source.sequence.length, len(request.tokens) - 1)
                ours, theirs = request.tokens[:known], source.tokens[:known]
                shared = known
                if ours != theirs:
                    shared = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
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
            self.model.forward(chunk, context.positions, context)
            sequence.length += n
            if self.on_prompt is not None:
                self.on_prompt(request, sequence.length, end)
        request.statistics.prompt_seconds += self._now() - start

    def _reserve(self) -> list[Request]:
        """The running requests, each with pages for its round, and for the next if there are enough."""
        for request in list(self.running):
            while request in self.running:
                assert request.sequence is not None
                drafts = request.num_drafts(self.max_position)
                try:
                    self.cache.reserve(request.sequence, len(request.tokens) + drafts)
                    break
                except OutOfPages as error:
                    if self._ahead:
                        # Cheaper to compute again than a request that is preempted.
                        self._ahead = None
                        for other in self.running:
                            self._roll_back(other)
                        return self._reserve()
                    if len(self.running) == 1:
                        self._finish(request, "error", f"the cache is too small: {error}")
                    else:
                        self.preempt(self.running[-1])
        self._pages_ahead = self.fixed_shapes and not self.profile
        for request in self.running if self._pages_ahead else ():
            assert request.sequence is not None
            try:
                self.cache.reserve(request.sequence, self._wanted_ahead(request))
            except OutOfPages:
                self._pages_ahead = False
        return list(self.running)

    def _release(self, request: Request) -> None:
        if request.sequence is not None:
            self.cache.free(request.sequence)
            request.sequence = None
            if request.policy.follows_pages:
                request.selection = None

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish_reason, request.error = reason, error
        self._release(request)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def _now(self) -> float:
        if self.profile and self.on_gpu:
            torch.cuda.synchronize(self.cache.device)
        return time.perf_counter()


class _Kind(NamedTuple):
    """What requests have in common that go through the ops together."""

    policy: Policy
    window: int
    first: bool
    selects: bool
    postponed: bool  # selects in a second pass


_PLAIN = Policy()


def bucket(n: int) -> int:
    """Rows that a batch of n requests occupies in a captured graph."""
    return 1 << (n - 1).bit_length() if n <= 16 else -(-n // 16) * 16
