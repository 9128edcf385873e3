"""Sampling: filters, counter-based random numbers, and drawing from a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vegas_ops.arguments import check_integer, check_number

# Streams of random numbers; each decision of a round has its own, so none is used twice.
DRAFT, ACCEPT, EMIT, SELECT = range(4)

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""processor(history, logits) -> logits: history (t,) int64 holds every token before the position
that `logits`, (vocab_size,) fp32, predict. It must not change either in place."""


@dataclass(frozen=True)
class SamplingParams:
    """Filters apply in the order temperature, top-k, top-p, min-p.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off; the token that crosses stays.
    min_p: relative to the likeliest token; 0 is off. seed: None draws one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            check_number(name, getattr(self, name))
        check_integer("top_k", self.top_k, 0)
        if self.seed is not None:
            check_integer("seed", self.seed)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"`temperature` must be finite and >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"`min_p` must be in [0, 1], got {self.min_p}")


class SamplingBatch:
    """The parameters of `n` rows as tensors, for `probabilities` and `draw`."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str) -> None:
        self.greedy = all(p.temperature == 0 for p in params)
        sampled = [p for p in params if p.temperature > 0]
        self.filtered = any(p.top_k or p.top_p < 1 or p.min_p for p in sampled)
        n, fp32 = len(params), torch.float32
        self.temperature, self.top_p, self.min_p = torch.zeros((3, n, 1), dtype=fp32, device=device)
        self.top_k = torch.zeros((n, 1), dtype=torch.int64, device=device)
        self.load(params)

    def load(self, params: Sequence[SamplingParams]) -> None:
        """Puts other parameters into the same tensors; `greedy` and `filtered` must still hold."""
        for name in ("temperature", "top_p", "min_p", "top_k"):
            values: Tensor = getattr(self, name)
            values.copy_(torch.tensor([[getattr(p, name)] for p in params], dtype=values.dtype))

    def rows(self, index: Tensor) -> SamplingBatch:
        """The parameters of the rows `index`, repeated or left out as it says."""
        other = object.__new__(SamplingBatch)
        other.greedy, other.filtered = self.greedy, self.filtered
        for name in ("temperature", "top_p", "min_p", "top_k"):
            setattr(other, name, getattr(self, name)[index])
        return other


def probabilities(logits: Tensor, params: SamplingBatch) -> Tensor:
    """The distribution that a token is drawn from, (n, vocab_size) fp32; one-hot where greedy.

    Rows without a distribution (NaN, +inf, or nothing but -inf in the logits) are all NaN.
    """
    logits = logits.float()
    greedy = params.temperature == 0
    top = logits.amax(-1, keepdim=True)
    x = (logits - top) / params.temperature.masked_fill(greedy, 1.0)
    if params.filtered:
        x, order = x.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(x.shape[-1], device=x.device)
        x = x.masked_fill((rank >= params.top_k) & (params.top_k > 0), -math.inf)
        p = x.softmax(-1)
        drop = (p.cumsum(-1) - p >= params.top_p) & (params.top_p < 1)
        drop |= p < params.min_p * p[..., :1]
        x = torch.empty_like(x).scatter_(-1, order, x.masked_fill(drop & (rank > 0), -math.inf))
    p = x.softmax(-1)
    hot = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy, hot, p).masked_fill(~top.isfinite(), math.nan)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens (n,) int64 by inversion: probs (n, vocab_size) need not sum to 1, u (n,) in [0, 1).

    Never a token of probability 0, never out of range; rows with NaN give an arbitrary valid id.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    total = cdf[..., -1:]
    # Strictly below the total: then some token's interval contains it.
    target = torch.minimum(u[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target, right=True)[..., 0]
    return token.clamp_(max=probs.shape[-1] - 1)


def uniform(seeds: Tensor, rounds: Tensor, index: Tensor | int, stream: int) -> Tensor:
    """Uniform numbers in [0, 1), fp64: a pure function of (seed, round, index, stream).

    The round is the number of tokens committed before it, so neither the batch a request is in nor
    a preemption changes its numbers, and no number serves two rounds: the drafts of one round steer
    the selection of the next, which may therefore not be drafted with the same numbers.
    """
    h = _mix(seeds)
    h = _mix(h ^ _mix(rounds + 0x632BE5AB))
    h = _mix(h ^ _mix(rounds * 0 + index * 4 + stream + 0x1F123BB5))
    return _shift(h, 11).double() * 2.0**-53


def signed64(x: int) -> int:
    """Any integer as the int64 with the same lowest 64 bits."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on int64."""
    x = x + signed64(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * signed64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * signed64(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of the tokens in the history by `penalty`."""

    def __init__(self, penalty: float) -> None:
        check_number("penalty", penalty)
        if not 0 < penalty < math.inf:
            raise ValueError(f"`penalty` must be finite and > 0, got {penalty}")
        self.penalty = penalty

    def __call__(self, history: Tensor, logits: Tensor) -> Tensor:
        seen = logits[history]
        seen = torch.where(seen > 0, seen / self.penalty, seen * self.penalty)
        return logits.scatter(0, history, seen)
