"""Acceptance and sampling: exact distributions, filters, random streams, rows without one."""

from __future__ import annotations

import math

import pytest
import torch
from toy_speculation import (
    VOCAB,
    Toy,
    exact,
    first_two_tokens,
    joint_p_value,
    p_value,
    processed,
)

from vegas_ops.speculative import SamplingParams, accept_greedy, accept_sampled
from vegas_ops.speculative.sampling import (
    ACCEPT,
    DRAFT,
    EMIT,
    SamplingBatch,
    draw,
    probabilities,
    uniform,
)

DRAWS = 100_000
PLAIN = SamplingParams(temperature=1.0)
FILTERED = [
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.95, min_p=0.02),
]


@pytest.mark.parametrize("params", [PLAIN, *FILTERED], ids=["plain", "top-p", "all-filters"])
def test_emitted_tokens_follow_the_target(params):
    toy = Toy.random()
    tokens = first_two_tokens(toy, params, DRAWS)
    assert joint_p_value(tokens, toy, params) > 1e-4


@pytest.mark.parametrize("params", [PLAIN, FILTERED[0]], ids=["plain", "top-p"])
def test_the_statistic_rejects_a_wrong_rule(params):
    """Drafts that are kept with min(1, p/q), and replaced by the target instead of the residual."""

    def wrong(drafts, num_drafts, draft_probs, target_probs, u_accept, u_emit):
        result = accept_sampled(drafts, num_drafts, draft_probs, target_probs, u_accept, u_emit)
        row = result.num_accepted
        p = target_probs[torch.arange(len(row)), row]
        result.tokens[torch.arange(len(row)), row] = draw(p, u_emit)
        return result

    toy = Toy.random()
    tokens = first_two_tokens(toy, params, DRAWS, accept=wrong)
    assert joint_p_value(tokens, toy, params) < 1e-4


def test_the_statistic_rejects_a_raw_softmax_for_the_processed_q():
    toy = Toy.random()
    tokens = first_two_tokens(toy, FILTERED[0], DRAWS, reported=lambda logits: logits.softmax(-1))
    assert joint_p_value(tokens, toy, FILTERED[0]) < 1e-4


def test_the_statistic_rejects_a_draft_distribution_that_was_not_sampled():
    toy = Toy.random()
    tokens = first_two_tokens(
        toy,
        PLAIN,
        DRAWS,
        draft_params=SamplingParams(temperature=0.7),
        reported=lambda logits: processed(logits, PLAIN),
    )
    assert joint_p_value(tokens, toy, PLAIN) < 1e-4


def test_drafts_may_use_other_filters_than_the_target():
    toy = Toy.random()
    tokens = first_two_tokens(toy, PLAIN, DRAWS, draft_params=SamplingParams(temperature=0.5, top_k=8))
    assert joint_p_value(tokens, toy, PLAIN) > 1e-4


def test_the_statistic_itself():
    expected = torch.tensor([1.0, 50.0, 3.0, 2.0, 44.0])
    assert p_value(torch.tensor([1, 49, 3, 2, 45]), expected) > 0.5
    assert p_value(torch.tensor([9, 45, 6, 5, 35]), expected) < 1e-3
    assert p_value(torch.tensor([1, 50, 49]), torch.tensor([0.0, 50.0, 50.0])) == 0.0


# The rule


def test_greedy_keeps_the_matching_prefix():
    logits = torch.full((4, 4, 10), -1.0)
    for row, tokens in enumerate([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [5, 0, 0, 0]]):
        for j, token in enumerate(tokens):
            logits[row, j, token] = 1.0
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [1, 2, 3], [9, 9, 9]])
    result = accept_greedy(drafts, torch.tensor([3, 3, 2, 0]), logits)
    assert result.num_accepted.tolist() == [3, 1, 2, 0]
    assert result.tokens.tolist() == [[1, 2, 3, 4], [1, 2, -1, -1], [1, 2, 3, -1], [5, -1, -1, -1]]
    assert not result.failed.any()


def test_no_drafts_at_all_samples_the_target():
    p = torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]])
    none = torch.zeros(2, 0, dtype=torch.long)
    u = torch.full((2, 0), 0.5, dtype=torch.float64)
    result = accept_sampled(none, torch.zeros(2), torch.zeros(2, 0, 3), p, u, torch.rand(2))
    assert result.tokens.tolist() == [[1], [2]]
    assert accept_greedy(none, torch.zeros(2), p).tokens.tolist() == [[1], [2]]


def test_equal_distributions_always_accept():
    probs = torch.rand(500, 3, 16).softmax(-1)
    drafts = torch.stack([draw(probs[:, j], torch.rand(500).double()) for j in range(2)], 1)
    u = torch.rand(500, 2, dtype=torch.float64)
    result = accept_sampled(drafts, torch.full((500,), 2), probs[:, :2], probs, u, u[:, 0])
    assert (result.num_accepted == 2).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_distribution_fails_only_where_it_is_reached(bad, temperature):
    logits = torch.zeros(3, 3, 8)
    logits[:, :, 3] = 50.0
    logits[0, 1] = bad  # reached: the first draft is accepted
    logits[1, 2] = bad  # not reached: the first draft is rejected
    drafts = torch.tensor([[3, 3], [1, 3], [3, 3]])
    two = torch.tensor([2, 2, 2])
    if temperature == 0:
        result = accept_greedy(drafts, two, logits)
    else:
        target = processed(logits.flatten(0, 1), PLAIN).view(logits.shape)
        q = torch.nn.functional.one_hot(drafts, 8).float()
        u = torch.full((3, 2), 0.5, dtype=torch.float64)
        result = accept_sampled(drafts, two, q, target, u, u[:, 0])
    assert result.failed.tolist() == [True, False, False]
    assert result.tokens.tolist() == [[3, -1, -1], [3, -1, -1], [3, 3, 3]]


# Filters


@pytest.mark.parametrize("seed", range(20))
def test_filters_match_their_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    rand = lambda: float(torch.rand((), generator=generator))  # noqa: E731
    logits = 2 * torch.randn(VOCAB, generator=generator)
    if seed % 3 == 0:
        logits = logits.round()  # ties: the smaller token id wins
    params = SamplingParams(
        temperature=0.2 + 2 * rand(),
        top_k=[0, 1, 5, 64, 100][seed % 5],
        top_p=1.0 if seed % 4 == 0 else 0.05 + 0.9 * rand(),
        min_p=0.0 if seed % 2 else 0.2 * rand(),
    )
    expected = exact(logits, params.temperature, params.top_k, params.top_p, params.min_p)
    assert torch.allclose(processed(logits[None], params)[0].double(), expected, atol=1e-6)


def test_filters_of_a_mixed_batch_are_per_row():
    logits = torch.randn(5, VOCAB)
    params = [SamplingParams(), PLAIN, *FILTERED, SamplingParams(temperature=1.0, top_k=1)]
    batch = probabilities(logits, SamplingBatch(params, "cpu"))
    for row, p in enumerate(params):
        assert torch.equal(batch[row], processed(logits[row : row + 1], p)[0])
    assert batch[0].tolist() == torch.nn.functional.one_hot(logits[0].argmax(), VOCAB).tolist()


def test_a_tiny_temperature_is_greedy_not_nan():
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4]])
    assert processed(logits, SamplingParams(temperature=1e-30)).tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("min_p", 2)],
)
def test_bad_parameters_name_themselves(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        SamplingParams(**{name: value})


# Drawing


def test_draw_never_gives_an_impossible_token():
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(5, -1)
    u = torch.tensor([0.0, 0.3 - 1e-9, 0.3 + 1e-6, 1 - 2**-53, 0.999999], dtype=torch.float64)
    assert draw(probs, u).tolist() == [1, 1, 3, 3, 3]


def test_uniform_numbers_depend_on_every_part_of_their_key():
    seeds, rounds = torch.tensor([1, 1, 2]), torch.tensor([5, 6, 5])
    numbers = [
        uniform(seeds, rounds, index, stream) for index in range(4) for stream in (DRAFT, ACCEPT, EMIT)
    ]
    flat = torch.stack(numbers).flatten()
    assert len(flat.unique()) == len(flat)
    assert torch.equal(uniform(seeds[2:], rounds[2:], 3, EMIT), numbers[-1][2:])


@pytest.mark.parametrize("vary", ["seeds", "rounds", "index"])
def test_uniform_numbers_are_uniform_and_uncorrelated(vary):
    many = torch.arange(200_000)
    key = {"seeds": torch.tensor(7), "rounds": torch.tensor(3), "index": torch.tensor(0)}
    key[vary] = many
    u = uniform(key["seeds"], key["rounds"], key["index"], DRAFT)
    v = uniform(key["seeds"], key["rounds"], key["index"], ACCEPT)
    assert u.min() >= 0 and u.max() < 1
    cells = (u * 32).long() * 32 + (v * 32).long()
    expected = torch.full((1024,), len(many) / 1024)
    assert p_value(torch.bincount(cells, minlength=1024), expected) > 1e-4
    lagged = (u[:-1] * 32).long() * 32 + (u[1:] * 32).long()
    assert p_value(torch.bincount(lagged, minlength=1024), expected) > 1e-4
