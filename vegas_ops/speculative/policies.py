"""The paper's policy and its kin: candidates ranked by what the verification's own queries saw."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from vegas_ops.arguments import check_integer, check_kind
from vegas_ops.ops import Dump
from vegas_ops.speculative.baselines import (
    Full,
    Pillar,
    Quest,
    Random,
    SnapKV,
    SpecExtend,
    Streaming,
    TopkOracle,
)
from vegas_ops.speculative.selection import (
    Lists,
    Policy,
    Verified,
    known_logits,
    known_weights,
    row_sums,
    top,
)

Score = Literal["logit", "weight", "group", "group-stale"]
RowMode = Literal["collect-2", "collect-all", "last"]
SCORES: tuple[Score, ...] = get_args(Score)
ROWS: tuple[RowMode, ...] = get_args(RowMode)


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
    refresh: select at every n-th verification; the tail grows meanwhile.
    """

    score: Score = "logit"
    rows: RowMode = "collect-2"
    look_ahead: int = 0
    per_kv_head: bool = False
    refresh: int = 1

    def __post_init__(self) -> None:
        for name, known in (("score", SCORES), ("rows", ROWS)):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        check_integer("look_ahead", self.look_ahead, 0)
        check_integer("refresh", self.refresh, 1)

    @property
    def name(self) -> str:  # type: ignore[override]
        if self == VEGAS:
            return "vegas"
        if self == VEGAS_LOOKAHEAD:
            return "vegas-lookahead"
        parts = [f"vegas-{self.score}", self.rows]
        parts += [f"ahead-{self.look_ahead}"] * (self.look_ahead > 0) + ["kv"] * self.per_kv_head
        return "-".join([*parts, *[f"every-{self.refresh}"] * (self.refresh > 1)])

    @property
    def last_row_only(self) -> bool:  # type: ignore[override]
        return self.rows == "last"

    @property
    def keeps_guide(self) -> bool:  # type: ignore[override]
        return self.score == "group-stale"

    @property
    def first_differs(self) -> bool:  # type: ignore[override]
        return self.keeps_guide

    def look_ahead_window(self, gamma: int) -> int:
        return self.look_ahead * gamma

    def dump(self, first: bool) -> Dump:
        if self.rows == "collect-all":
            return "all"
        if self.score == "weight":
            return "rows"
        if self.score == "logit" and not self.per_kv_head:
            return "token"
        if self.score == "group-stale" and not self.per_kv_head and not first:
            return "token_weight"
        return "kv_head"

    def select(self, v: Verified) -> Lists:
        grouped = self.score.startswith("group")
        # Scores without a direct form in the select op (ablations).
        if v.dump == "all" and (grouped or self.per_kv_head):
            layers = [self._sums(v, layer) for layer in range(v.layers)]
            scores = torch.stack([sums for sums, _ in layers])
            guides = [guide for _, guide in layers if guide is not None]
            lists = top(v, scores if self.per_kv_head else scores.sum(2))
            return lists._replace(guide_lse=torch.stack(guides) if guides else None)
        if v.dump == "rows" and self.per_kv_head:
            return top(v, torch.stack([self._weights_of_two_rows(v, layer) for layer in range(v.layers)]))
        lists = top(
            v, v.logits, dump=v.dump, out=v.lists,
            mode="logit" if self.score == "logit" else "weight",
            lse=v.lse if v.dump in ("rows", "all") else None,
            sinks=v.sinks if self.score == "weight" else None,
            guide_lse=(v.guide_lse if v.hint is None else v.hint) if v.dump == "kv_head" else None,
            dump_rows=v.dump_rows, per_kv_head=self.per_kv_head,
        )  # fmt: skip
        return lists._replace(guide_lse=v.guide_lse)

    def _sums(self, v: Verified, layer: int) -> tuple[Tensor, Tensor | None]:
        """Sums over all rows of one layer, (batch, num_heads_kv, width); its guides' lse."""
        first, last = v.row_of(0), v.row_of(-1)
        if self.score == "weight":
            return row_sums(v, known_weights(v, layer).sum(2)), None
        logits = known_logits(v, layer)
        if self.score == "logit":
            return row_sums(v, logits.sum(2)), None
        logits = logits.mean(2)
        lse = logits.logsumexp(-1)  # (rows, num_heads_kv)
        guide_lse = torch.stack([lse[first], lse[last]], 1)
        if v.hint is not None:
            owner = v.owner.clamp(max=v.batch - 1)
            lse = v.hint[layer, owner, (v.offset > 0).long()]
        return row_sums(v, (logits - lse[..., None]).exp()), guide_lse

    def _weights_of_two_rows(self, v: Verified, layer: int) -> Tensor:
        """Softmax weights of a "rows" dump by KV head, (batch, num_heads_kv, width)."""
        assert v.logits is not None
        planes = [(1, v.row_of(-1))] if self.last_row_only else [(0, v.row_of(0)), (1, v.row_of(-1))]
        weights = [
            (v.logits[layer, :, :, plane].float() - v.denominators(layer)[:, rows].t()[..., None]).exp()
            for plane, rows in planes
        ]
        return sum(weights[1:], weights[0]).unflatten(1, (v.num_heads_kv, -1)).sum(2)


VEGAS = Vegas()
VEGAS_LOOKAHEAD = Vegas(score="group-stale", look_ahead=1)


def _variant(name: str) -> Vegas | None:
    """The policy that calls itself so (`Vegas.name`), if there is one."""
    pattern = (
        rf"vegas-(?P<score>{'|'.join(sorted(SCORES, key=len, reverse=True))})-(?P<rows>{'|'.join(ROWS)})"
        r"(-ahead-(?P<ahead>\d{1,3}))?(?P<kv>-kv)?(-every-(?P<every>\d{1,3}))?"
    )
    match = re.fullmatch(pattern, name)
    if match is None:
        return None
    score, rows = cast(Score, match["score"]), cast(RowMode, match["rows"])
    return Vegas(
        score, rows, int(match["ahead"] or 0), match["kv"] is not None, max(int(match["every"] or 1), 1)
    )


class Policies(dict[str, Policy]):
    """Policies by name, variants of `Vegas` among them; an unknown name is told the known ones."""

    def __init__(self, policies: Iterable[Policy]) -> None:
        super().__init__({policy.name: policy for policy in policies})

    def __missing__(self, name: str) -> Policy:
        check_kind("policy", name, str, "the name of a policy")
        variant = _variant(name)
        if variant is not None:
            return variant
        raise ValueError(f"`policy` must be one of {', '.join(self)}, got {name!r}")


POLICIES = Policies(
    [
        VEGAS,
        VEGAS_LOOKAHEAD,
        Streaming(),
        SnapKV(),
        Quest(),
        SpecExtend(),
        Pillar(),
        TopkOracle(),
        Random(),
        Full(),
    ]
)
