"""What a drafting policy is: from the dump of a verification to the tokens that drafts attend to.

A policy names the dump that the verification shall write for it, and turns that dump into one list
per request and layer. Everything newer than the candidates is always attended on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vegas_ops import ops
from vegas_ops.ops import Dump
from vegas_ops.speculative.kv_cache import PagedKVCache


class Selection(NamedTuple):
    """What one request drafts with until its next selection; survives a preemption.

    indices: (layers, width) or (layers, num_heads_kv, width) int32 token indices, ascending, -1
    padded; length: their number, without the last dimension; budget: the host's bound on it;
    tail_start: first token of the tail; guide_lse: (layers, 2, num_heads_kv), the next hint; age:
    verifications since. The tensors may be views of the round's buffers, which the next selection
    overwrites: clone what shall last longer.
    """

    indices: Tensor
    length: Tensor
    budget: int
    tail_start: int
    guide_lse: Tensor | None = None
    age: int = 0


class Lists(NamedTuple):
    """Selections of a group: indices (layers, batch[, num_heads_kv], width) int32, length without
    the last dimension, guide_lse (layers, batch, 2, num_heads_kv) for the next hint."""

    indices: Tensor
    length: Tensor
    guide_lse: Tensor | None = None


@dataclass
class Verified:
    """What a verification left for a group of requests with one policy; layers lead.

    Everything that differs between requests is on the device, so that a captured selection
    replays. logits: the dump (of the last layer alone where the policy says so); lse: (layers,
    num_heads_q, rows); guide_lse and hint: (layers, batch, 2, num_heads_kv) or None; owner and
    offset: (rows,) int64, which request and which of its rows, owner == batch for unused rows;
    candidates, seqused_k, k: (batch,) int32 (k: the budget); num_accepted, seeds and rounds:
    (batch,) int64; sinks: (layers, num_heads_q) or None. Layers with a window are not among the
    layers. lists: where the selection goes; what lies there is no longer needed. width: bound on
    seqused_k; max_k: width of the lists; max_rows: bound on a request's rows; first: the requests had
    no selection before.
    """

    dump: Dump
    logits: Tensor | None
    lse: Tensor
    guide_lse: Tensor | None
    hint: Tensor | None
    cu_seqlens_q: Tensor
    owner: Tensor
    offset: Tensor
    candidates: Tensor
    seqused_k: Tensor
    k: Tensor
    num_accepted: Tensor
    dump_rows: Tensor | None
    seeds: Tensor
    rounds: Tensor
    block_table: Tensor
    cache: PagedKVCache
    num_heads_kv: int
    sinks: Tensor | None
    lists: Lists
    width: int
    max_k: int
    max_rows: int
    window: int
    first: bool

    @property
    def layers(self) -> int:
        return self.lse.shape[0]

    @property
    def batch(self) -> int:
        return self.candidates.shape[0]

    @property
    def device(self) -> torch.device:
        return self.lse.device

    def denominators(self, layer: int) -> Tensor:
        """(num_heads_q, rows): logarithms of a layer's softmax denominators, sinks included."""
        lse = self.lse[layer]
        return lse if self.sinks is None else torch.logaddexp(lse, self.sinks[layer][:, None])

    def row_of(self, offset: int) -> Tensor:
        """(batch,) int64: each request's first row (offset 0) or last one (-1)."""
        ends = self.cu_seqlens_q.long()
        rows = ends[1:] - 1 if offset else ends[:-1]
        return rows.clamp(0, self.owner.shape[0] - 1)


class DraftStep(Protocol):
    """One draft step of a group, for policies that choose anew in every step."""

    cache: PagedKVCache

    @property
    def block_table(self) -> Tensor: ...

    @property
    def tail_start(self) -> Tensor:
        """(batch,) int32."""
        ...

    @property
    def k(self) -> Tensor:
        """(batch,) int32: tokens that each request's list may hold, at most max_k."""
        ...

    max_k: int

    def sinks(self, layer: int) -> Tensor | None:
        """(num_heads_q,) fp32, or None."""
        ...

    def dump(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Raw logits of `q` over everything cached, as a "rows" dump, and lse."""
        ...


Count = Any
"""int, or an integer tensor (batch,)."""


def least(a: Count, b: Count) -> Count:
    """The smaller one; of tensors, one by one."""
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def most(a: Count, b: Count) -> Count:
    """The larger one; of tensors, one by one."""
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


@cache
def plans_tensors(policy: Policy) -> bool:
    """Whether the policy's `plan` takes tensors."""
    try:
        policy.plan(torch.tensor([1, 2]), torch.tensor([3, 4]), False)
    except (RuntimeError, TypeError, ValueError):  # written for numbers alone
        return False
    return True


def budget(ratio: float, min_tokens: int, seqused_k: int, candidates: int) -> int:
    """k = min(max(ceil(ratio * seqused_k), min_tokens), candidates)."""
    # 0.07 * 100 is 7.000000000000001 in floating point: not 8 tokens.
    return min(max(math.ceil(ratio * seqused_k - 1e-9), min_tokens), candidates)


class Policy:
    """Base of all policies: drafts with nothing but the tail. Policies compare equal by value."""

    name = "none"
    refresh = 1  # selects at every n-th verification of a request; 0: at the first alone
    prompt_rows = 1  # last tokens of the prompt that the first verification computes
    per_kv_head = False  # a list for each KV head
    last_row_only = False
    last_layer_only = False  # only the last layer dumps
    first_differs = False  # a request's first selection is made otherwise than later ones
    keeps_guide = False  # ranks with the normaliser of the verification before
    chooses_per_step = False  # drafts call `choose` in every layer and step
    follows_pages = False  # knows tokens by their pages: a preempted request selects anew

    def dump(self, first: bool) -> Dump:
        """The dump that a verification shall write; first: the request has no selection yet."""
        return "none"

    def look_ahead_window(self, gamma: int) -> int:
        """Candidates before a candidate whose scores count for it."""
        return 0

    def plan(self, k: Count, candidates: Count, first: bool) -> tuple[Count, Count]:
        """(tokens listed at most, first token of the tail) of a selection with budget k: numbers, or
        tensors of them where the device goes on without the host (`least` and `most` take both)."""
        return k, candidates

    def selects(self, age: int | None) -> bool:
        """Whether the next verification selects; age: verifications since, None: never selected."""
        return age is None or (self.refresh > 0 and (age + 1) % self.refresh == 0)

    def scanned(self, keys: int) -> int:
        """Cached tokens whose bytes a draft step reads to choose from `keys` tokens."""
        return 0

    def select(self, verified: Verified) -> Lists:
        """One list per request (and KV head) and layer, at most `plan`'s tokens of it."""
        raise NotImplementedError

    def choose(self, step: DraftStep, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """(indices, length) of one draft step in one layer; q: (batch, num_heads_q, head_dim)."""
        raise NotImplementedError


def first_tokens(v: Verified, count: Tensor, most: int) -> Lists:
    """The first `count` tokens, (batch,) int32 and at most `most`, the same in every layer."""
    token = torch.arange(most, dtype=torch.int32, device=v.device)
    return Lists(token.expand(v.layers, v.batch, most), count.expand(v.layers, v.batch))


def top(
    v: Verified,
    logits: Tensor | None,
    k: Tensor | None = None,
    *,
    dump: Dump = "token",
    out: Lists | None = None,
    **score: Any,
) -> Lists:
    """The select op over all layers at once, with look-ahead by the group's window. Scores
    (layers, batch, num_heads_kv, width) of a "token" dump are folded into the batch; the others' lists may
    go to `out`."""
    assert logits is not None
    k = v.k if k is None else k
    seqlens = v.candidates
    heads = logits.shape[2] if dump == "token" and logits.dim() == 4 else 0
    if heads:
        logits = logits.flatten(1, 2)
        seqlens, k = seqlens.repeat_interleave(heads), k.repeat_interleave(heads)
    elif dump != "token" or score:
        score["cu_seqlens_q"] = v.cu_seqlens_q
    lists = logits.shape[-2] if dump == "kv_head" else 1
    workspace = v.cache.workspaces.get(
        "topk_aggregate_logits", max_batch=seqlens.shape[0], max_q_len=1, max_k=v.max_k,
        max_seqlen_k=logits.shape[-1], layers=v.layers, num_heads_q=lists, num_heads_kv=lists, head_dim=1,
    )  # fmt: skip
    indices, length = ops.topk_aggregate_logits(
        logits, dump=dump, seqlens=seqlens, k=k, max_k=v.max_k, pool=(v.window, 0), workspace=workspace,
        indices=None if out is None else out.indices,
        topk_length=None if out is None else out.length, **score,
    )  # fmt: skip
    if heads:
        indices, length = (x.unflatten(1, (-1, heads)) for x in (indices, length))
    return Lists(indices, length)


def no_tokens(v: Verified, per_kv_head: bool = False) -> Lists:
    """Empty lists: the tail is everything."""
    shape = (v.layers, v.batch, v.num_heads_kv) if per_kv_head else (v.layers, v.batch)
    length = torch.zeros(shape, dtype=torch.int32, device=v.device)
    return Lists(length[..., None][..., :0], length)


def in_chunks(indices: Tensor, length: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """A list of chunks as a list of the tokens in them, `chunk` each."""
    offset = torch.arange(chunk, dtype=torch.int32, device=indices.device)
    tokens = (indices[..., None] * chunk + offset).masked_fill(indices[..., None] < 0, -1)
    return tokens.flatten(-2), length * chunk


def known_logits(v: Verified, layer: int) -> Tensor:
    """One layer of an "all" dump by KV head, (rows, num_heads_kv, group, width) fp32, -inf where
    it was not written."""
    assert v.logits is not None
    keys = torch.cat([v.seqused_k, v.seqused_k.new_zeros(1)])[v.owner]
    seen = torch.arange(v.logits.shape[-1], device=v.device) < keys[:, None]
    logits = v.logits[layer].float().masked_fill(~seen[:, None], -torch.inf)
    return logits.unflatten(1, (v.num_heads_kv, -1))


def known_weights(v: Verified, layer: int) -> Tensor:
    """The same as softmax weights: exp(logits - lse)."""
    lse = v.denominators(layer).t().unflatten(1, (v.num_heads_kv, -1))
    return (known_logits(v, layer) - lse[..., None]).exp()


def row_sums(v: Verified, scores: Tensor) -> Tensor:
    """(rows, ...) -> (batch, ...): each request's rows summed, unused rows left out."""
    sums = scores.new_zeros((v.batch + 1, *scores.shape[1:]))
    return sums.index_add_(0, v.owner, scores)[:-1]
