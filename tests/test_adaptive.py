"""The number of drafts by running acceptance."""

from __future__ import annotations

import itertools

import pytest
from test_loop import PROMPTS, SMALL, decoder_of
from tiny_model import TinyModel

from vegas_ops.speculative import Full, Request, SamplingParams, SpeculativeDecoder
from vegas_ops.speculative.adaptive import best_gamma, expected_tokens, update_rate
from vegas_ops.speculative.loop import ADAPT_EVERY


def test_running_acceptance():
    """Of 3 accepted drafts of 5, 4 were judged; drafts behind a wrong one say nothing."""
    assert update_rate(0.5, 5, 3) == pytest.approx(0.9**4 * 0.5 + (1 - 0.9**4) * 3 / 4)
    assert update_rate(0.5, 5, 5) == pytest.approx(0.9**5 * 0.5 + (1 - 0.9**5))
    assert update_rate(0.5, 0, 0) == 0.5
    rate = 0.85
    for _ in range(100):
        rate = update_rate(rate, 4, 0)
    assert rate < 1e-3


def test_expected_tokens():
    assert expected_tokens(1.0, 6) == 7
    assert expected_tokens(0.0, 6) == 1
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_the_best_number_of_drafts():
    def batch(*rates: float, gamma: int = 10) -> list[Request]:
        requests = [Request([1], gamma=gamma) for _ in rates]
        for request, rate in zip(requests, rates, strict=True):
            request.draft_rate = rate
        return requests

    assert best_gamma(batch(0.99), 0.1, 0) == 10
    assert best_gamma(batch(0.05), 0.5, 0) == 1
    middle = best_gamma(batch(0.8), 0.25, 0)
    brute = max(range(1, 11), key=lambda g: sum(0.8**i for i in range(g + 1)) / (1 + 0.25 * g))
    assert 1 < middle == brute < 10
    # One request that accepts most and one that accepts nothing share the steps.
    assert best_gamma(batch(0.05), 0.25, 0) < best_gamma(batch(0.05, 0.9), 0.25, 0) < 10
    # A little better is not enough to change.
    assert best_gamma(batch(0.8), 0.25, middle + 1) == middle + 1
    assert best_gamma(batch(0.05), 0.5, 10) == 1
    assert best_gamma(batch(0.9, gamma=3), 0.01, 8) == 3


@pytest.mark.parametrize("read_every", [1, 3])
@pytest.mark.parametrize("fixed", [False, True])
def test_rounds_adapt_and_the_output_stays(fixed, read_every):
    """Drafts that see nothing are soon few, drafts that see everything as many as allowed."""
    model = TinyModel()
    plain = decoder_of(model).generate([Request(PROMPTS[3], gamma=0, max_new_tokens=150)])[0]
    drafted = {}
    for policy, ratio in ((Full(), 1.0), ("none", 0.0)):
        decoder = SpeculativeDecoder(model, decoder_of(model).cache, draft_cost=0.3, read_every=read_every)
        decoder.fixed_shapes = fixed
        options = {"policy": policy} if policy != "none" else {**SMALL, "ratio": ratio, "min_tokens": 0}
        request = Request(PROMPTS[3], gamma=8, max_new_tokens=150, **options)
        assert decoder.generate([request]) == [plain]
        s = request.statistics
        drafted[policy if policy == "none" else "full"] = s.drafted / s.iterations
        assert s.iterations > 2 * ADAPT_EVERY
    assert drafted["full"] > 5.5 > 4 > drafted["none"]


@pytest.mark.parametrize("read_every", [1, 3])
def test_drafts_are_counted_as_they_were_made(monkeypatch, read_every):
    """A block in flight was launched with the number of drafts before the present one."""
    wanted = itertools.cycle([8, 2, 5])
    monkeypatch.setattr("vegas_ops.speculative.loop.best_gamma", lambda *_: next(wanted))
    model = TinyModel()
    plain = decoder_of(model).generate([Request(PROMPTS[3], gamma=0, max_new_tokens=250)])[0]
    decoder = SpeculativeDecoder(model, decoder_of(model).cache, draft_cost=0.3, read_every=read_every)
    decoder.fixed_shapes = True
    request = Request(PROMPTS[3], gamma=8, max_new_tokens=250, policy=Full())
    assert decoder.generate([request]) == [plain]
    s = request.statistics
    assert s.accepted == s.drafted and s.tokens == s.drafted + s.iterations
    assert len(s.drafted_at) == 8 and s.drafted_at == s.accepted_at


def test_sampled_requests_adapt_too():
    model = TinyModel()
    decoder = SpeculativeDecoder(model, decoder_of(model).cache, draft_cost=0.3)
    request = Request(
        PROMPTS[2], SamplingParams(temperature=1.0, seed=1), gamma=6, max_new_tokens=60, **SMALL
    )
    assert len(decoder.generate([request])[0]) == 60
    with pytest.raises(ValueError, match="`draft_cost` must be finite and > 0, got 0"):
        SpeculativeDecoder(model, decoder.cache, draft_cost=0.0)
