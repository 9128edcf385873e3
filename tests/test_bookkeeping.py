"""The kernels around a round's forwards against the operators that they replace."""

from __future__ import annotations

import os

import pytest
import torch
from test_graphs import GPU_MODEL
from test_loop import PROMPTS, SMALL, decoder_of
from tiny_model import TinyModel

from vegas_ops.speculative import (
    POLICIES,
    VEGAS,
    VEGAS_LOOKAHEAD,
    Request,
    SamplingParams,
    Streaming,
    bookkeeping,
    round,
)

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"),
]


def requests() -> list[Request]:
    """Ragged rows, several groups, prompts' rows computed once more, plain and sampled requests."""
    policies = (VEGAS, VEGAS_LOOKAHEAD, POLICIES["snapkv"], Streaming(), POLICIES["pillar"], VEGAS, VEGAS)
    temperatures = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.8)
    return [
        Request(PROMPTS[i % 4], SamplingParams(temperature=t, seed=i), policy=policy,
                gamma=(3, 1, 4, 2, 0)[i % 5], max_new_tokens=(30, 4, 13, 22, 30, 1, 20)[i], **SMALL)
        for i, (policy, t) in enumerate(zip(policies, temperatures, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("alone", [True, False], ids=["one policy", "many"])
def test_rounds_with_and_without_kernels(monkeypatch, greedy, alone):
    model = TinyModel(**GPU_MODEL) if GPU else TinyModel()
    batches = []
    for kernels in (True, False):
        monkeypatch.setattr(bookkeeping, "available", lambda device, kernels=kernels: kernels)
        decoder, batch = decoder_of(model), requests()
        decoder.fixed_shapes = True
        if greedy:
            batch = batch[:-1]
        if alone:
            batch = [q for q in batch if q.policy == VEGAS]
        decoder.generate(batch)
        assert all(r.kernels == kernels for r in decoder._rounds.values())
        batches.append(batch)
    for a, b in zip(*batches, strict=True):
        assert a.output == b.output
        assert a.statistics.accepted_at == b.statistics.accepted_at
        assert a.statistics.drafted_at == b.statistics.drafted_at


@pytest.mark.parametrize("part", [bookkeeping._PART, 4], ids=["whole rows", "parts"])
@pytest.mark.parametrize("steps", [0, 1, 6])
def test_acceptance_of_logits_that_are_not_finite(monkeypatch, steps, part):
    """Every pattern of right drafts, NaN and infinity in any row, ragged numbers of drafts."""
    monkeypatch.setattr(bookkeeping, "_PART", part)
    generator = torch.Generator().manual_seed(steps)
    device, batch, vocab = "cuda" if GPU else "cpu", 8, 5
    for trial in range(20):
        num_drafts = torch.randint(0, steps + 1, (batch,), generator=generator)
        table = torch.randint(0, vocab, (batch, steps + 3), generator=generator)
        last = (num_drafts + 1).cumsum(0) - 1
        rows = int(last[-1]) + 1
        logits = torch.randn(rows, vocab, generator=generator)
        for i, end in enumerate(last.tolist()):
            first, n = end - int(num_drafts[i]), int(num_drafts[i])
            right = torch.rand(n, generator=generator) < 0.8
            logits[torch.arange(first, end)[right], table[i, 1 : n + 1][right]] = 9.0
        bad = torch.randint(0, rows, (3,), generator=generator)
        if trial % 2:
            logits[bad, trial % vocab] = torch.tensor([torch.nan, torch.inf, -torch.inf])[trial % 3]
        if trial % 5 == 4:
            logits[bad] = -torch.inf
        results = [
            _accept(
                logits.to(device), table.to(device), num_drafts.to(device), last.to(device), steps, kernels
            )
            for kernels in (True, False)
        ]
        assert torch.equal(*results)


@pytest.mark.parametrize("part", [1024, 64])
def test_a_draft_is_the_first_of_the_likeliest_tokens(monkeypatch, part):
    """Of rows looked at whole and in parts: equals, infinity, NaN, which is never chosen."""
    monkeypatch.setattr(bookkeeping, "_PART", part)
    device, vocab = "cuda" if GPU else "cpu", 1000
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(1))
    logits[0, [70, 500, 999]] = 9.0
    logits[1, 999] = 9.0
    logits[2, [3, 640]] = torch.tensor([torch.nan, 9.0])
    logits[3] = -torch.inf
    logits[4, [64, 65]] = torch.inf
    logits[5] = torch.nan
    expected = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax(1)
    ones = torch.ones(7, dtype=torch.int64)
    r = _Round(torch.zeros(7, 4, dtype=torch.int64).to(device), ones.to(device), ones.to(device), 3)
    tokens = torch.empty(7, dtype=torch.int64, device=device)
    bookkeeping.choose(r, logits.to(device), tokens, 0, round.FIELDS)  # type: ignore[arg-type]
    assert tokens.tolist() == r.table[:, 1].tolist()
    chosen = [0, 1, 2, 4, 6]  # of a row without a finite logit any token will do
    assert tokens[chosen].tolist() == expected[chosen].tolist()
    assert ((tokens >= 0) & (tokens < vocab)).all()


class _Round:
    """What acceptance reads of a round."""

    def __init__(self, table, num_drafts, last, steps):
        batch, device = len(table), table.device
        self.shape = round.RoundShape((), steps, 0, True, False)
        self.table, self.num_drafts = table, num_drafts
        self.values = torch.zeros(len(round.FIELDS), batch, dtype=torch.int64, device=device)
        self.values[round.FIELDS["num_drafts"]] = num_drafts
        empty = torch.empty(0, dtype=torch.int64, device=device)
        self.rows = round.Rows(empty, empty, empty, empty, empty, last)
        self.result = torch.zeros(batch, steps + 3, dtype=torch.int64, device=device)


def _accept(logits, table, num_drafts, last, steps, kernels) -> torch.Tensor:
    r = _Round(table, num_drafts, last, steps)
    if kernels:
        bookkeeping.accept(r, logits, round.FIELDS)  # type: ignore[arg-type]
        return r.result
    accepted = round.Round._accept(r, logits, last)  # type: ignore[arg-type]
    return torch.cat([accepted.num_accepted[:, None], accepted.failed[:, None], accepted.tokens], 1)
