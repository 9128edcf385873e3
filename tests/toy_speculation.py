"""Speculative sampling on known distributions, and the statistics that judge it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.stats import chi2
from torch import Tensor

from vegas_ops.speculative.acceptance import accept_sampled
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

VOCAB = 64


@dataclass
class Toy:
    """A target and a draft whose next token depends on the last one: logits (VOCAB + 1, VOCAB),
    row VOCAB for the empty context."""

    target: Tensor
    draft: Tensor

    @staticmethod
    def random(seed: int = 0, *, noise: float = 1.0) -> Toy:
        generator = torch.Generator().manual_seed(seed)
        target = 1.5 * torch.randn(VOCAB + 1, VOCAB, generator=generator)
        return Toy(target, target + noise * torch.randn(VOCAB + 1, VOCAB, generator=generator))


Processed = Callable[[Tensor], Tensor]


def processed(logits: Tensor, params: SamplingParams) -> Tensor:
    return probabilities(logits, SamplingBatch([params] * len(logits), logits.device))


def first_two_tokens(
    toy: Toy,
    params: SamplingParams,
    draws: int,
    *,
    draft_params: SamplingParams | None = None,
    reported: Processed | None = None,
    draft_stream: int = DRAFT,
    accept_stream: int = ACCEPT,
    emit_stream: int = EMIT,
    accept: Callable[..., object] = accept_sampled,
) -> Tensor:
    """(draws, 2): the first two tokens of `draws` texts, as the loop would emit them.

    Two drafts, then one more round where none was accepted. `reported` maps draft logits to the
    distribution that acceptance is told; default: the one that is sampled.
    """
    p = processed(toy.target, params)
    q = processed(toy.draft, draft_params or params)
    told = q if reported is None else reported(toy.draft)
    seeds = torch.arange(draws)

    def a_round(context: Tensor, seeds: Tensor, number: int, gamma: int) -> Tensor:
        rounds = torch.full_like(seeds, number)
        drafts: list[Tensor] = []
        rows = [context]
        for i in range(gamma):
            drafts.append(draw(q[rows[-1]], uniform(seeds, rounds, i, draft_stream)))
            rows.append(drafts[-1])
        column = torch.arange(gamma)
        seeds, rounds = seeds[:, None], rounds[:, None]
        u = uniform(seeds, rounds, torch.arange(gamma + 1), emit_stream)
        result = accept(
            torch.stack(drafts, 1),
            torch.full((len(context),), gamma),
            torch.stack([told[row] for row in rows[:-1]], 1),
            torch.stack([p[row] for row in rows], 1),
            uniform(seeds, rounds, column, accept_stream),
            u[:, 0],
        )
        return result.tokens  # type: ignore[attr-defined]

    tokens = a_round(torch.full((draws,), VOCAB), seeds, 1, 2)[:, :2]
    short = tokens[:, 1] < 0
    tokens[short, 1] = a_round(tokens[short, 0], seeds[short], 2, 1)[:, 0]
    return tokens


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Pearson's chi-square; the rarest cells are pooled, in groups of 5 expected and more."""
    if counts[expected == 0].sum() > 0:
        return 0.0  # what cannot happen did
    order = expected.argsort()
    order = order[expected[order] > 0]
    cells = [(0.0, 0.0)]
    for count, e in zip(counts[order].tolist(), expected[order].tolist(), strict=True):
        if cells[-1][1] >= 5:
            cells.append((0.0, 0.0))
        cells[-1] = (cells[-1][0] + count, cells[-1][1] + e)
    if len(cells) > 1 and cells[-1][1] < 5:
        (count, e), (last_count, last_e) = cells[-2:]
        cells[-2:] = [(count + last_count, e + last_e)]
    statistic = sum((count - e) ** 2 / e for count, e in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def exact(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The processed distribution of one row, token by token as the definition says, in fp64."""
    p = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(p)), key=lambda t: (-float(logits[t]), t))
    kept = order[:top_k] if top_k else order
    mass = sum(float(p[t]) for t in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if nucleus and reached >= top_p:
            break
        nucleus.append(token)
        reached += float(p[token]) / mass
    best = float(p[nucleus[0]])
    final = [t for t in nucleus if float(p[t]) >= min_p * best]
    out = torch.zeros_like(p)
    out[final] = p[final] / p[final].sum()
    return out


def joint_p_value(tokens: Tensor, toy: Toy, params: SamplingParams) -> float:
    """How well the first two tokens fit the target's joint distribution."""
    rows = [exact(row, params.temperature, params.top_k, params.top_p, params.min_p) for row in toy.target]
    p = torch.stack(rows)
    joint = (p[VOCAB][:, None] * p[:VOCAB]).flatten()
    counts = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB * VOCAB)
    return p_value(counts, joint * len(tokens))
