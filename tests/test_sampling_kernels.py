"""The kernels of sampled drafting and acceptance against the operators that they replace."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from test_bookkeeping import _Round

from vegas_ops.speculative import VEGAS, SamplingParams, round, sampling, sampling_kernels
from vegas_ops.speculative.sampling import SamplingBatch, probabilities
from vegas_ops.speculative.shapes import GroupShape

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"),
]
ROWS = 40 if GPU else 7
LARGE = 8193 if GPU else 130  # more than a thread block looks at together
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.02},
]


class _SampledRound(_Round):
    """What sampling reads of a round, besides."""

    def __init__(self, table, num_drafts, last, steps, vocab, params):
        super().__init__(table, num_drafts, last, steps)
        batch, device = len(table), table.device
        group = GroupShape(VEGAS, 0, batch, batch, 1, 1)
        self.shape = replace(self.shape, groups=(group,), greedy=False)
        self.sampling = SamplingBatch(params, device)
        self.seeds, self.lengths = (self.values[round.FIELDS[name]] for name in ("seeds", "lengths"))
        self.seeds.copy_(torch.arange(batch) * 0x9E3779B97F4A7C1 - (1 << 62))
        self.lengths.copy_(torch.arange(batch) * 1000 + 17)
        self.num_drafts = self.values[round.FIELDS["num_drafts"]]
        self.draft_probs = torch.full((batch, steps, vocab), math.nan, device=device)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    if not GPU:
        monkeypatch.setattr(sampling_kernels, "_BLOCK", 128)


def _parameters(batch: int, filtered: bool) -> list[SamplingParams]:
    temperatures = (0.6, 1.0, 0.0, 2.5, 1e-3)
    return [
        SamplingParams(temperatures[i % 5], **(FILTERS[i % len(FILTERS)] if filtered else {}), seed=i)
        for i in range(batch)
    ]


def _logits(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Some with many ties, some without a distribution."""
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    logits[1::4] = logits[1::4].round()
    logits[2::7] = -torch.inf
    logits[2::7, vocab // 2] = 1.0
    for row, bad in zip(range(3, rows, 11), (torch.nan, torch.inf, -torch.inf) * rows, strict=False):
        logits[row, 0 if math.isnan(bad) or bad > 0 else slice(None)] = bad
    return logits.to(DEVICE)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("vocab", [1, 30, LARGE])
def test_a_draft_has_the_distribution_and_the_token_of_the_operators(vocab, filtered):
    generator, batch, steps = torch.Generator().manual_seed(vocab), ROWS, 3
    table = torch.randint(0, vocab, (batch, steps + 1), generator=generator).to(DEVICE)
    num_drafts = torch.randint(0, steps + 1, (batch,), generator=generator).to(DEVICE)
    r = _SampledRound(table, num_drafts, num_drafts, steps, vocab, _parameters(batch, filtered))
    assert r.sampling.filtered == filtered
    for step in range(steps):
        logits = _logits(batch, vocab, generator)
        before, tokens = r.table.clone(), torch.full((batch,), -1, device=DEVICE)
        sampling_kernels.draft(r, logits, tokens, step, round.FIELDS)  # type: ignore[arg-type]
        wanted = round.Round._draw_draft(r_copy := _copy(r), logits, step)  # type: ignore[arg-type]
        torch.testing.assert_close(r.draft_probs[:, step], r_copy.draft_probs[:, step], rtol=1e-5, atol=1e-7)
        assert torch.equal(r.draft_probs[:, step] > 0, r_copy.draft_probs[:, step] > 0)
        assert torch.equal(tokens, wanted)
        drafted = step < num_drafts
        assert torch.equal(r.table[:, step + 1], torch.where(drafted, wanted, before[:, step + 1]))


def _copy(r: _SampledRound) -> _SampledRound:
    other = object.__new__(_SampledRound)
    other.__dict__ = {**r.__dict__, "draft_probs": torch.zeros_like(r.draft_probs)}
    return other


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("vocab", "steps"), [(1, 2), (7, 0), (30, 6), (LARGE, 2)])
def test_acceptance_is_that_of_the_operators(vocab, steps, filtered):
    generator, batch = torch.Generator().manual_seed(steps), ROWS
    num_drafts = torch.randint(0, steps + 1, (batch,), generator=generator)
    last = (num_drafts + 1).cumsum(0) - 1
    table = torch.randint(0, vocab, (batch, steps + 3), generator=generator)
    logits = _logits(int(last[-1]) + 1, vocab, generator)
    params = _parameters(batch, filtered)
    r = _SampledRound(table.to(DEVICE), num_drafts.to(DEVICE), last.to(DEVICE), steps, vocab, params)
    # Drafts near the target, so that some stay, and one in five the target's own distribution.
    for step in range(steps):
        row = (last - num_drafts + step).clamp(max=len(logits) - 1).to(DEVICE)
        near = logits[row] + 0.5 * (step % 2) * torch.randn(batch, vocab, generator=generator).to(DEVICE)
        near[::5] = logits[row][::5]
        r.table[:, step + 1] = round.Round._draw_draft(r, near, step)  # type: ignore[arg-type]
    sampling_kernels.accept(r, logits, round.FIELDS)  # type: ignore[arg-type]
    wanted = round.Round._accept(r, logits, last.to(DEVICE))  # type: ignore[arg-type]
    fields = torch.cat([wanted.num_accepted[:, None], wanted.failed[:, None], wanted.tokens], 1)
    assert torch.equal(r.result, fields)
    if steps == 6:
        assert 0 < wanted.num_accepted.sum() < num_drafts.sum()


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 6}])
def test_tokens_are_drawn_as_often_as_they_are_likely(params):
    vocab, draws = 9, 4000 if GPU else 100
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)).expand(draws, -1)
    p = probabilities(logits[:1], SamplingBatch([SamplingParams(**params)], "cpu"))[0].double()
    table = torch.zeros((draws, 2), dtype=torch.int64, device=DEVICE)
    one = torch.ones(draws, dtype=torch.int64, device=DEVICE)
    r = _SampledRound(table, one, one, 1, vocab, [SamplingParams(**params)] * draws)
    tokens = torch.empty(draws, dtype=torch.int64, device=DEVICE)
    sampling_kernels.draft(r, logits.contiguous().to(DEVICE), tokens, 0, round.FIELDS)  # type: ignore[arg-type]
    counts = torch.bincount(tokens.cpu(), minlength=vocab).double()
    assert counts[p == 0].sum() == 0
    expected = draws * p[p > 0]
    chi2 = ((counts[p > 0] - expected) ** 2 / expected).sum().item()
    assert chi2 < 40  # 8 degrees of freedom at most: p = 3e-6


def test_random_numbers_are_those_of_the_operators():
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def kernel(seeds, rounds, out, n: tl.constexpr, STREAM: tl.constexpr):
        i = tl.arange(0, n)
        seed, length = tl.load(seeds + i), tl.load(rounds + i)
        tl.store(out + i, sampling_kernels._uniform(seed, length, i.to(tl.int64), STREAM))

    generator, n = torch.Generator().manual_seed(0), 64
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator).to(DEVICE)
    rounds = torch.randint(0, 1 << 40, (n,), generator=generator).to(DEVICE)
    out = torch.empty(n, dtype=torch.float64, device=DEVICE)
    for stream in range(4):
        kernel[(1,)](seeds, rounds, out, n=n, STREAM=stream)
        index = torch.arange(n, device=DEVICE)
        assert torch.equal(out, sampling.uniform(seeds, rounds, index, stream))
