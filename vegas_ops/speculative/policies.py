"""Which cached tokens the next drafts attend to.

A policy names the dump that the verification shall write for it, and turns that dump into one
`Selection` per request. Everything newer than the candidates is always attended on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from vegas_ops import ops
from vegas_ops.ops import Dump
from vegas_ops.speculative.kv_cache import Workspaces
from vegas_ops.speculative.sampling import SELECT, uniform

NUM_SINKS = 4  # StreamingLLM's first tokens

Score = Literal["logit", "weight", "group", "group-stale"]
RowMode = Literal["collect-2", "collect-all", "last"]
SCORES: tuple[Score, ...] = get_args(Score)
ROWS: tuple[RowMode, ...] = get_args(RowMode)


class Selection(NamedTuple):
    """What one request drafts with until its next verification; survives a preemption.

    indices: (layers, width) or (layers, num_heads_kv, width) int32 token indices, ascending, -1
    padded; length: their number, without the last dimension; budget: the host's bound on it;
    tail_start: first token of the tail; guide_lse: (layers, 2, num_heads_kv), the next hint.
    """

    indices: Tensor
    length: Tensor
    budget: int
    tail_start: int
    guide_lse: Tensor | None = None


@dataclass
class Verified:
    """What a verification left for a group of requests with one policy; layers lead.

    logits: the dump; lse: (layers, num_heads_q, total_q); guide_lse and hint: (layers, batch, 2,
    num_heads_kv) or None; rows: query rows of each request; num_candidates: `candidates` on the
    host; seqused_k: keys, on the host; seeds and rounds: (batch,) int64, for random policies;
    sinks: (layers, num_heads_q) or None. Layers with a window are not among the layers.
    """

    dump: Dump
    logits: Tensor | None
    lse: Tensor
    guide_lse: Tensor | None
    hint: Tensor | None
    cu_seqlens_q: Tensor
    rows: Sequence[int]
    candidates: Tensor
    num_candidates: Sequence[int]
    seqused_k: Sequence[int]
    dump_rows: Tensor | None
    seeds: Tensor
    rounds: Tensor
    num_heads_kv: int
    sinks: Tensor | None
    workspaces: Workspaces

    @property
    def layers(self) -> int:
        return self.lse.shape[0]


def budget(ratio: float, min_tokens: int, seqused_k: int, candidates: int) -> int:
    """k = min(max(ceil(ratio * seqused_k), min_tokens), candidates)."""
    # 0.07 * 100 is 7.000000000000001 in floating point: not 8 tokens.
    return min(max(math.ceil(ratio * seqused_k - 1e-9), min_tokens), candidates)


class Policy:
    """Base of all policies: drafts with nothing but the tail. Policies compare equal by value."""

    name = "none"
    chooses_per_step = False  # the draft context then calls `choose` in every layer and step
    last_row_only = False

    def dump(self, has_hint: bool) -> Dump:
        """The dump that the next verification shall write; has_hint: one before it left its
        guide_lse."""
        return "none"

    def look_ahead_window(self, gamma: int) -> int:
        """Candidates before a candidate whose scores count for it."""
        return 0

    def select(self, verified: Verified, budgets: Sequence[int], window: int) -> list[Selection]:
        """One selection per request; budgets: its number of tokens per layer (and KV head)."""
        raise NotImplementedError

    def choose(
        self,
        logits: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        candidates: Tensor,
        k: Tensor,
        max_k: int,
    ) -> Any:
        """(indices, length) of one draft step in one layer, from its own "rows" dump."""
        raise NotImplementedError


def _no_list(verified: Verified, tail_start: int, sinks: int = 0) -> Selection:
    """The first `sinks` tokens and a tail, the same in every layer."""
    device = verified.lse.device
    indices = torch.arange(sinks, dtype=torch.int32, device=device).repeat(verified.layers, 1)
    length = torch.full((verified.layers,), sinks, dtype=torch.int32, device=device)
    return Selection(indices, length, sinks, tail_start)


@dataclass(frozen=True)
class Full(Policy):
    """Drafts with everything: every draft is accepted up to rounding."""

    name = "full"

    def select(self, verified: Verified, budgets: Sequence[int], window: int) -> list[Selection]:
        return [_no_list(verified, 0) for _ in budgets]


@dataclass(frozen=True)
class Streaming(Policy):
    """Four sinks and the most recent tokens (StreamingLLM; MagicDec's drafting)."""

    name = "streaming"

    def select(self, verified: Verified, budgets: Sequence[int], window: int) -> list[Selection]:
        selections = []
        for k, n in zip(budgets, verified.num_candidates, strict=True):
            sinks = min(NUM_SINKS, k)
            selections.append(_no_list(verified, max(n - (k - sinks), sinks), sinks))
        return selections


@dataclass(frozen=True)
class Random(Policy):
    """k candidates at random, anew for every layer and verification: the floor."""

    name = "random"

    def select(self, verified: Verified, budgets: Sequence[int], window: int) -> list[Selection]:
        device = verified.lse.device
        token = torch.arange(max(verified.num_candidates), device=device)
        # Layers far apart: a token's number must not depend on its neighbours in the batch.
        layer = torch.arange(verified.layers, device=device)[:, None, None] << 32
        scores = uniform(verified.seeds[:, None], verified.rounds[:, None], layer + token, SELECT)
        return _top(verified, scores.float().contiguous(), budgets)


@dataclass(frozen=True)
class TopkOracle(Policy):
    """The best k of each draft's own attention weights, found by full attention: the ceiling."""

    name = "topk-oracle"
    chooses_per_step = True

    def select(self, verified: Verified, budgets: Sequence[int], window: int) -> list[Selection]:
        empty = [_no_list(verified, n) for n in verified.num_candidates]
        return [s._replace(budget=k) for s, k in zip(empty, budgets, strict=True)]

    def choose(
        self,
        logits: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        candidates: Tensor,
        k: Tensor,
        max_k: int,
    ) -> Any:
        rows = torch.arange(candidates.shape[0] + 1, dtype=torch.int32, device=logits.device)
        return ops.topk_aggregate_logits(
            logits, dump="rows", seqlens=candidates, k=k, mode="weight", lse=lse, cu_seqlens_q=rows,
            sinks=sinks, max_k=max_k,
        )  # fmt: skip


@dataclass(frozen=True)
class Vegas(Policy):
    """Ranks candidates by what the verification's own queries saw (the paper, and its kin).

    score: "logit", the sum of logits over heads (the paper's Eq. 2); "weight", that of softmax
    weights (the authors' release); "group", softmax weights of each group's mean query;
    "group-stale", the same with the normaliser of the previous verification.
    rows: which query rows count: "collect-2" (first and last), "collect-all", "last".
    look_ahead: a score also counts for the next look_ahead * gamma positions, because what a
    copying head reads moves on with the text.
    per_kv_head: a list for each KV head instead of one per layer.
    """

    score: Score = "logit"
    rows: RowMode = "collect-2"
    look_ahead: int = 0
    per_kv_head: bool = False

    def __post_init__(self) -> None:
        for name, known in (("score", SCORES), ("rows", ROWS)):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.look_ahead < 0:
            raise ValueError(f"`look_ahead` must be >= 0, got {self.look_ahead}")

    @property
    def name(self) -> str:  # type: ignore[override]
        if self == VEGAS:
            return "vegas"
        if self == VEGAS_LOOKAHEAD:
            return "vegas-lookahead"
        parts = [f"vegas-{self.score}", self.rows]
        parts += [f"ahead-{self.look_ahead}"] * (self.look_ahead > 0) + ["kv"] * self.per_kv_head
        return "-".join(parts)

    @property
    def last_row_only(self) -> bool:  # type: ignore[override]
        return self.rows == "last"

    def look_ahead_window(self, gamma: int) -> int:
        return self.look_ahead * gamma

    def dump(self, has_hint: bool) -> Dump:
        if self.rows == "collect-all":
            return "all"
        if self.score == "weight":
            return "rows"
        if self.score == "logit" and not self.per_kv_head:
            return "token"
        if self.score == "group-stale" and not self.per_kv_head and has_hint:
            return "token_weight"
        return "kv_head"

    @property
    def _in_torch(self) -> bool:
        """Whether the scores have no direct form in the select op (ablations)."""
        grouped = self.score.startswith("group") or self.per_kv_head
        return grouped if self.rows == "collect-all" else self.score == "weight" and grouped

    def select(self, verified: Verified, budgets: Sequence[int], window: int) -> list[Selection]:
        pool = (window, 0)
        if self._in_torch:
            width = max(verified.num_candidates)
            scores = [self._scores(verified, i, width) for i in range(len(budgets))]
            selections = _top(verified, torch.stack([s for s, _ in scores], 1), budgets, pool)
            return [s._replace(guide_lse=g) for s, (_, g) in zip(selections, scores, strict=True)]
        guide_lse = verified.guide_lse
        normaliser = guide_lse
        if self.score == "group-stale" and verified.hint is not None:
            normaliser = verified.hint
        selections = _top(
            verified, verified.logits, budgets, pool, dump=verified.dump,
            mode="logit" if self.score == "logit" else "weight",
            lse=verified.lse if verified.dump in ("rows", "all") else None,
            sinks=verified.sinks if self.score == "weight" else None,
            guide_lse=normaliser if verified.dump == "kv_head" else None,
            dump_rows=verified.dump_rows, per_kv_head=self.per_kv_head,
        )  # fmt: skip
        if guide_lse is None:
            return selections
        return [s._replace(guide_lse=guide_lse[:, i]) for i, s in enumerate(selections)]

    def _scores(self, v: Verified, i: int, width: int) -> tuple[Tensor, Tensor | None]:
        """Request i's scores, (layers[, num_heads_kv], width), as the formula says; guide_lse."""
        assert v.logits is not None
        begin = sum(v.rows[:i])
        rows = list(range(begin, begin + v.rows[i]))
        n, keys = v.num_candidates[i], v.seqused_k[i]
        if v.dump == "rows":
            rows = [rows[0], rows[-1]] if self.rows == "collect-2" else rows[-1:]
            logits = v.logits[:, i, :, -len(rows) :, :n].transpose(1, 2).float()
        else:
            logits = v.logits[:, rows, :, :keys].float()  # (layers, rows, num_heads_q, keys)
        guide_lse = None
        if self.score.startswith("group"):
            logits = self._by_kv_head(v, logits).mean(-2)
            lse = logits.logsumexp(-1)  # (layers, rows, num_heads_kv)
            guide_lse = lse[:, [0, -1]]
            if self.score == "group-stale" and v.hint is not None:
                lse = v.hint[:, i, [0] + [1] * (len(rows) - 1)]
            scores = (logits - lse[..., None]).exp().sum(1)
        else:
            if self.score == "weight":
                lse = v.lse[:, :, rows].transpose(1, 2)
                if v.sinks is not None:
                    lse = torch.logaddexp(lse, v.sinks[:, None])
                logits = (logits - lse[..., None]).exp()
            scores = self._by_kv_head(v, logits).sum((1, 3))
        if not self.per_kv_head:
            scores = scores.sum(1)
        return pad(scores[..., :n], (0, width - n)), guide_lse

    @staticmethod
    def _by_kv_head(v: Verified, logits: Tensor) -> Tensor:
        """(layers, rows, num_heads_q, keys) -> (layers, rows, num_heads_kv, group, keys)."""
        return logits.unflatten(2, (v.num_heads_kv, -1))


def _top(
    verified: Verified,
    logits: Tensor | None,
    budgets: Sequence[int],
    pool: tuple[int, int] = (0, 0),
    *,
    dump: Dump = "token",
    **score: Any,
) -> list[Selection]:
    """The select op over all layers at once. Scores (layers, batch, num_heads_kv, width) of a
    "token" dump are folded into the batch."""
    assert logits is not None
    device, max_k = logits.device, max(budgets)
    seqlens = verified.candidates
    k = torch.tensor(budgets, dtype=torch.int32).to(device, non_blocking=True)
    heads = logits.shape[2] if dump == "token" and logits.dim() == 4 else 0
    if heads:
        logits = logits.flatten(1, 2)
        seqlens, k = seqlens.repeat_interleave(heads), k.repeat_interleave(heads)
    elif dump != "token" or score:
        score["cu_seqlens_q"] = verified.cu_seqlens_q
    lists = logits.shape[-2] if dump == "kv_head" else 1
    workspace = verified.workspaces.get(
        "topk_aggregate_logits", max_batch=seqlens.shape[0], max_q_len=1, max_k=max_k,
        max_seqlen_k=logits.shape[-1], layers=verified.layers, num_heads_q=lists,
        num_heads_kv=lists, head_dim=1,
    )  # fmt: skip
    indices, length = ops.topk_aggregate_logits(
        logits, dump=dump, seqlens=seqlens, k=k, max_k=max_k, pool=pool, workspace=workspace, **score
    )
    if heads:
        indices, length = (x.unflatten(1, (-1, heads)) for x in (indices, length))
    return [
        Selection(indices[:, i, ..., :b], length[:, i], b, n)
        for i, (b, n) in enumerate(zip(budgets, verified.num_candidates, strict=True))
    ]


VEGAS = Vegas()
VEGAS_LOOKAHEAD = Vegas(score="group-stale", look_ahead=1)
POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (VEGAS, VEGAS_LOOKAHEAD, Streaming(), Random(), TopkOracle(), Full())
}
