"""The policies that the paper is compared with, and the two ends of the scale.

Each takes its budget from the request (`ratio`, `min_tokens`), as all policies do, so that they can
be compared at equal budgets; their own parameters are the fields, with their authors' defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from vegas_ops import ops
from vegas_ops.arguments import check_integer
from vegas_ops.ops import Dump
from vegas_ops.speculative.page_scores import note_bounds, page_scores, page_tokens
from vegas_ops.speculative.sampling import SELECT, uniform
from vegas_ops.speculative.selection import (
    Count,
    DraftStep,
    Lists,
    Policy,
    Verified,
    first_tokens,
    in_chunks,
    known_weights,
    least,
    most,
    no_tokens,
    row_sums,
    top,
)


@dataclass(frozen=True)
class Full(Policy):
    """Drafts with everything: every draft is accepted up to rounding."""

    name = "full"

    def plan(self, k: Count, candidates: Count, first: bool) -> tuple[Count, Count]:
        return 0, 0

    def select(self, v: Verified) -> Lists:
        return no_tokens(v)


@dataclass(frozen=True)
class Streaming(Policy):
    """The first tokens and the most recent ones (StreamingLLM; MagicDec's drafting)."""

    sinks: int = 4

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, 0)

    name = "streaming"

    def plan(self, k: Count, candidates: Count, first: bool) -> tuple[Count, Count]:
        sinks = least(self.sinks, k)
        return sinks, most(candidates - (k - sinks), sinks)

    def select(self, v: Verified) -> Lists:
        return first_tokens(v, v.k.clamp(max=self.sinks), self.sinks)


@dataclass(frozen=True)
class Random(Policy):
    """k candidates at random, anew for every layer and verification: the floor."""

    name = "random"

    def select(self, v: Verified) -> Lists:
        token = torch.arange(v.width, device=v.device)
        # Layers far apart: a token's number must not depend on its neighbours in the batch.
        layer = torch.arange(v.layers, device=v.device)[:, None, None] << 32
        scores = uniform(v.seeds[:, None], v.rounds[:, None], layer + token, SELECT)
        return top(v, scores.float().contiguous())


@dataclass(frozen=True)
class TopkOracle(Policy):
    """The best k of each draft's own attention weights, found by full attention: the ceiling."""

    name = "topk-oracle"
    chooses_per_step = True

    def scanned(self, keys: int) -> int:
        return keys

    def select(self, v: Verified) -> Lists:
        return no_tokens(v)

    def choose(self, step: DraftStep, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        logits, lse = step.dump(layer, q)
        rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        return ops.topk_aggregate_logits(
            logits, dump="rows", seqlens=step.tail_start, k=step.k, mode="weight", lse=lse,
            cu_seqlens_q=rows, sinks=step.sinks(layer), max_k=step.max_k,
        )  # fmt: skip


@dataclass(frozen=True)
class SnapKV(Policy):
    """What the prompt's last `window` rows attended to, for each KV head, chosen once (MagicDec's
    SnapKV): their softmax weights, summed over rows and the group, averaged over `kernel`
    positions. The budget counts the window itself, which stays; what comes later is tail."""

    window: int = 32
    kernel: int = 5

    name = "snapkv"
    refresh = 0
    per_kv_head = True
    first_differs = True

    def __post_init__(self) -> None:
        check_integer("window", self.window, 1)
        check_integer("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"`kernel` must be odd, got {self.kernel}")

    @property
    def prompt_rows(self) -> int:  # type: ignore[override]
        return self.window

    def dump(self, first: bool) -> Dump:
        return "all"

    def plan(self, k: Count, candidates: Count, first: bool) -> tuple[Count, Count]:
        return most(k - self.window, 0), most(candidates - self.window, 0)

    def select(self, v: Verified) -> Lists:
        sums = [row_sums(v, known_weights(v, layer).sum(2)) for layer in range(v.layers)]
        pooled = [avg_pool1d(s, self.kernel, 1, self.kernel // 2) for s in sums]
        older = replace(v, candidates=(v.candidates - self.window).clamp(min=0))
        return top(older, torch.stack(pooled), (v.k - self.window).clamp(min=0))


@dataclass(frozen=True)
class Quest(Policy):
    """The pages of `page` tokens, for each KV head, whose keys could score highest with the draft's
    own query, anew in every step: sum over channels of max(q min, q max), with each page's
    channelwise bounds, summed over the group. The last, incomplete page is tail."""

    page: int = 16

    name = "quest"
    per_kv_head = True
    first_differs = True
    chooses_per_step = True
    follows_pages = True

    def __post_init__(self) -> None:
        check_integer("page", self.page, 1)

    def scanned(self, keys: int) -> int:
        return keys // self.page  # a page's bounds are as large as one token's K and V

    def plan(self, k: Count, candidates: Count, first: bool) -> tuple[Count, Count]:
        pages = candidates // self.page
        return least(-(-k // self.page), pages) * self.page, pages * self.page

    def select(self, v: Verified) -> Lists:
        """Brings the bounds up to date: of the whole text at first, then of pages that filled up."""
        count = v.width // self.page if v.first else -(-v.max_rows // self.page) + 1
        note_bounds(v.cache, v.block_table, v.candidates, count, self.page)
        return no_tokens(v, per_kv_head=True)

    def choose(self, step: DraftStep, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        scores, pages, k = page_scores(
            step.cache, layer, step.block_table, q, step.tail_start, step.k, self.page
        )
        max_k = max(step.max_k // self.page, 1)
        workspace = step.cache.workspaces.get(
            "topk_aggregate_logits", max_batch=scores.shape[0], max_q_len=1, max_k=max_k,
            max_seqlen_k=scores.shape[1], layers=1, num_heads_q=1, num_heads_kv=1, head_dim=1,
        )  # fmt: skip
        chosen = ops.topk_aggregate_logits(
            scores, dump="token", seqlens=pages, k=k, max_k=max_k, workspace=workspace
        )
        indices, length = page_tokens(*chosen, self.page)
        return indices.unflatten(0, (q.shape[0], -1)), length.unflatten(0, (q.shape[0], -1))


@dataclass(frozen=True)
class SpecExtend(Policy):
    """Chunks of tokens by the last accepted token's attention in the last layer, one list for all
    layers: softmax weights, mean over heads and chunk, refreshed every few verifications. Begins
    with the most recent chunks; the newest, incomplete chunk is tail."""

    chunk: int = 32
    refresh: int = 4

    name = "specextend"
    first_differs = True
    last_layer_only = True

    def __post_init__(self) -> None:
        check_integer("chunk", self.chunk, 1)
        check_integer("refresh", self.refresh, 0)

    def dump(self, first: bool) -> Dump:
        return "none" if first else "all"

    def plan(self, k: Count, candidates: Count, first: bool) -> tuple[Count, Count]:
        chunks = candidates // self.chunk
        kept = least(most(k // self.chunk, 1), chunks)
        return (0, (chunks - kept) * self.chunk) if first else (kept * self.chunk, chunks * self.chunk)

    def select(self, v: Verified) -> Lists:
        if v.first:
            return no_tokens(v)
        assert v.logits is not None
        rows = (v.row_of(0) + v.num_accepted).clamp(max=v.owner.shape[0] - 1)
        lse = v.denominators(-1)[:, rows].t()  # (batch, num_heads_q)
        weights = (v.logits[-1, rows].float() - lse[..., None]).exp().mean(1)
        weights = pad(weights, (0, -weights.shape[1] % self.chunk))
        chunks = v.candidates // self.chunk
        indices, length = ops.topk_aggregate_logits(
            weights.unflatten(1, (-1, self.chunk)).mean(2), dump="token", seqlens=chunks,
            k=(v.k // self.chunk).clamp(min=1), max_k=max(v.max_k // self.chunk, 1),
        )  # fmt: skip
        indices, length = in_chunks(indices, length, self.chunk)
        return Lists(indices.expand(v.layers, *indices.shape), length.expand(v.layers, *length.shape))


@dataclass(frozen=True)
class Pillar(Policy):
    """SparseSpec's PillarAttn: softmax weights of all rows of the verification, summed over them and
    the group, for each KV head. The budget counts the accepted tokens and the one after them; the
    first round drafts with everything. (Its authors: ratio 0.05, at least 128 tokens, gamma 8.)"""

    name = "pillar"
    per_kv_head = True
    first_differs = True

    def dump(self, first: bool) -> Dump:
        return "none" if first else "all"

    def plan(self, k: Count, candidates: Count, first: bool) -> tuple[Count, Count]:
        return (0, 0) if first else (k, candidates)

    def select(self, v: Verified) -> Lists:
        if v.first:
            return no_tokens(v, per_kv_head=True)
        sums = [row_sums(v, known_weights(v, layer).sum(2)) for layer in range(v.layers)]
        return top(v, torch.stack(sums), (v.k - v.num_accepted - 1).clamp(min=0).int())
