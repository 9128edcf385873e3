"""A request: what is asked, how far it has come, and what it cost."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Literal

from vegas_ops.arguments import check_callable, check_integer, check_kind, check_number
from vegas_ops.speculative.kv_cache import CacheSequence
from vegas_ops.speculative.policies import VEGAS
from vegas_ops.speculative.sampling import LogitsProcessor, SamplingParams, signed64
from vegas_ops.speculative.selection import Policy, Selection, budget

FinishReason = Literal["stop", "length", "context", "iterations", "abort", "error"]


@dataclass
class Statistics:
    """Costs of one request after its first token.

    Bytes are K and V that attention read, in all layers, as budgeted (a selection may be shorter).
    Seconds are the request's share of its batches' time, by rows. Kernels on a GPU run behind the
    clock unless the decoder profiles.
    """

    iterations: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)  # by draft position
    accepted_at: list[int] = field(default_factory=list)
    tokens: int = 0  # emitted by the iterations
    draft_bytes: int = 0
    verify_bytes: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    select_seconds: float = 0.0
    prompt_seconds: float = 0.0

    @property
    def tokens_per_iteration(self) -> float:
        return self.tokens / self.iterations if self.iterations else 0.0

    def count(self, drafted: int, accepted: int, tokens: int) -> None:
        """One iteration."""
        self.iterations += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens
        for counts, n in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts += [0] * (drafted - len(counts))
            for i in range(n):
                counts[i] += 1


def _token_ids(name: str, tokens: Collection[int]) -> list[int]:
    try:
        return [index(t) for t in tokens]
    except TypeError:
        raise TypeError(
            f"`{name}` must hold token ids, such as Tokenizer.encode gives, got {tokens!r:.60}"
        ) from None


@dataclass(eq=False)
class Request:
    """One text to continue.

    prompt: token ids, at least one. max_new_tokens: delivered exactly, unless a stop or the end of
    the context comes first, the model's or that of a sequence in the cache. stop_token_ids: end the
    output, and are its last token (EOS among them). stop_sequences: the same for several tokens in a
    row.
    sampling: such as SamplingParams(temperature=0.7, top_p=0.95); greedy by default.
    gamma: drafts per verification; 0 is plain decoding through the same ops.
    policy, ratio, min_tokens: what drafts attend to; budget as in `selection.budget`.
    logits_processor: applied to draft and target rows alike, before the filters.
    forced_tokens: the text that is committed whatever was drafted and accepted, to measure
    acceptance on it. Drafts are made and verified as usual; with `a` of them accepted, `a + 1`
    tokens of this text are committed, and the next selection comes from a verification in which
    they stand in place of the accepted drafts. The output ends with the text.
    max_iterations: verifications after the first token; None is unbounded.
    share_prefix_with: a running request whose prompt pages are used as far as the prompts agree.

    finish_reason, once it has ended: "stop"; "length", at `max_new_tokens` (or the end of
    `forced_tokens`); "context", with fewer, since the context was full; "iterations"; "abort";
    "error", which `error` explains.
    """

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128
    stop_token_ids: Collection[int] = ()
    stop_sequences: Sequence[Sequence[int]] = ()
    gamma: int = 6
    policy: Policy = VEGAS
    ratio: float = 0.07
    min_tokens: int = 256
    logits_processor: LogitsProcessor | None = None
    forced_tokens: Sequence[int] | None = None
    max_iterations: int | None = None
    share_prefix_with: Request | None = None

    tokens: list[int] = field(init=False)  # the prompt and the output
    seed: int = field(init=False)
    sequence: CacheSequence | None = field(init=False, default=None)
    selection: Selection | None = field(init=False, default=None)
    statistics: Statistics = field(init=False, default_factory=Statistics)
    finish_reason: FinishReason | None = field(init=False, default=None)
    error: str | None = field(init=False, default=None)
    draft_rate: float = field(init=False, default=0.85)  # running acceptance (`adaptive`)
    draft_limit: int | None = field(init=False, default=None)  # set by a decoder that adapts

    def __post_init__(self) -> None:
        # A copy: `output` is what follows it, also if the caller goes on with the list.
        self.prompt = _token_ids("prompt", self.prompt)
        _token_ids("stop_token_ids", self.stop_token_ids)
        check_kind("stop_sequences", self.stop_sequences, Sequence, "a list of lists of token ids")
        for stop in self.stop_sequences:
            _token_ids("stop_sequences", stop)
        if self.forced_tokens is not None:
            _token_ids("forced_tokens", self.forced_tokens)
        check_kind("sampling", self.sampling, SamplingParams, "SamplingParams")
        check_callable("logits_processor", self.logits_processor)
        if self.share_prefix_with is not None:
            check_kind("share_prefix_with", self.share_prefix_with, Request, "a Request")
        if not self.prompt:
            raise ValueError("`prompt` must hold at least one token, got none")
        check_kind("policy", self.policy, Policy, "a Policy, such as POLICIES['vegas']")
        for name in ("gamma", "max_new_tokens", "min_tokens"):
            check_integer(name, getattr(self, name), 0)
        if self.max_iterations is not None:
            check_integer("max_iterations", self.max_iterations, 0)
        check_number("ratio", self.ratio)
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"`ratio` must be in [0, 1], got {self.ratio}")
        self.tokens = list(self.prompt)
        seed = self.sampling.seed
        self.seed = signed64(random.getrandbits(64) if seed is None else seed)

    @property
    def output(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def max_length(self, max_position: int) -> int:
        """Tokens, the prompt's included, at which the request ends."""
        new = self.max_new_tokens
        if self.forced_tokens is not None:
            new = min(new, len(self.forced_tokens))
        return min(len(self.prompt) + new, max_position)

    def end(self, max_position: int) -> FinishReason:
        """Why the request ends at `max_length`."""
        whole = self.max_length(len(self.prompt) + self.max_new_tokens)
        return "length" if whole <= max_position else "context"

    @property
    def most_drafts(self) -> int:
        """Drafts of a round far from the end."""
        return self.gamma if self.draft_limit is None else min(self.gamma, self.draft_limit)

    def num_drafts(self, max_position: int, most: int | None = None) -> int:
        """Drafts of the next round: none may be emitted beyond the end, and one more token
        follows the last. most: of a round far from the end, where that was decided before."""
        if self.selection is None:
            return 0
        most = self.most_drafts if most is None else most
        return max(min(most, self.max_length(max_position) - len(self.tokens) - 1), 0)

    def budget(self, keys: int, candidates: int | None = None) -> int:
        """Tokens that a selection from a verification over `keys` keys may list."""
        return budget(
            self.ratio, self.min_tokens, keys, len(self.tokens) if candidates is None else candidates
        )

    def first_rows(self, first: bool) -> int:
        """Rows of the next verification besides drafts; first: it makes the first selection."""
        return min(self.policy.prompt_rows, len(self.tokens)) if first else 1

    def draft_reads(self, drafts: int, windows: Sequence[int | None]) -> int:
        """Cached tokens that so many drafts read, summed over layers with these windows."""
        s = self.selection
        if s is None:
            return 0
        keys = [len(self.tokens) + j for j in range(drafts)]
        full = sum(self.policy.scanned(n) + s.budget + n - s.tail_start for n in keys)
        return sum(full if w is None else sum(min(w, n) for n in keys) for w in windows)

    def stops(self) -> bool:
        """Whether the output ends with a stop."""
        if self.tokens[-1] in self.stop_token_ids:
            return True
        new = len(self.tokens) - len(self.prompt)
        return any(0 < len(s) <= new and self.tokens[-len(s) :] == list(s) for s in self.stop_sequences)
