"""Policies: budgets, the dump each asks for, and the sets they select against the formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_model import TinyModel, new_cache

from vegas_ops.speculative import (
    POLICIES,
    VEGAS,
    VEGAS_LOOKAHEAD,
    Full,
    Pillar,
    Quest,
    Random,
    Request,
    SnapKV,
    SpecExtend,
    SpeculativeDecoder,
    Streaming,
    TopkOracle,
    Vegas,
)
from vegas_ops.speculative.policies import ROWS, SCORES
from vegas_ops.speculative.selection import budget

ABLATION = [
    Vegas(score, rows, ahead, per_kv_head)
    for score, rows, ahead, per_kv_head in itertools.product(SCORES, ROWS, (0, 1, 2), (False, True))
]


@pytest.mark.parametrize(
    ("seqused_k", "candidates", "expected"),
    [(107, 101, 101), (100_000, 99_994, 7000), (10_001, 9_995, 701), (3000, 2994, 256), (0, 0, 0)],
)
def test_the_budget_of_the_paper(seqused_k, candidates, expected):
    assert budget(0.07, 256, seqused_k, candidates) == expected


def test_the_dump_of_each_policy():
    """At the first verification of a request and later."""

    def dumps(policy):
        return policy.dump(True), policy.dump(False)

    assert dumps(VEGAS) == ("token", "token")
    assert dumps(VEGAS_LOOKAHEAD) == ("kv_head", "token_weight")
    assert dumps(Vegas("weight")) == ("rows", "rows")
    assert dumps(Vegas("group")) == ("kv_head", "kv_head")
    assert dumps(Vegas("group-stale", per_kv_head=True)) == ("kv_head", "kv_head")
    assert {d for p in ABLATION if p.rows == "collect-all" for d in dumps(p)} == {"all"}
    assert {d for p in (Streaming(), Random(), TopkOracle(), Full(), Quest()) for d in dumps(p)} == {"none"}
    assert dumps(SnapKV()) == ("all", "all")
    assert dumps(SpecExtend()) == dumps(Pillar()) == ("none", "all")
    assert set(POLICIES) == {
        "vegas", "vegas-lookahead", "streaming", "snapkv", "quest", "specextend", "pillar", "random",
        "topk-oracle", "full",
    }  # fmt: skip
    assert len({p.name for p in ABLATION}) == len(ABLATION)
    with pytest.raises(ValueError, match=r"`policy` must be one of vegas, .*, got 'best'"):
        POLICIES["best"]


@pytest.mark.parametrize(("name", "value"), [("score", "sum"), ("rows", "first"), ("look_ahead", -1)])
def test_bad_policies_name_the_argument(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must .*got {value!r}"):
        Vegas(**{name: value})


class Recorder(TinyModel):
    """Keeps q and k of every layer of the latest forwards, by position."""

    def forward(self, token_ids, positions, attend):
        self.q, self.k = getattr(self, "q", {}), getattr(self, "k", {})

        def record(layer, q, k, v):
            for row, position in enumerate(positions.tolist()):
                self.q[layer, position], self.k[layer, position] = q[row].clone(), k[row].clone()
            return attend(layer, q, k, v)

        return super().forward(token_ids, positions, record)


def formula(model, policy, layer, positions, candidates, keys, gamma, hint):
    """Scores (num_heads_kv or 1, candidates) in fp64, and the guides' lse."""
    k = torch.stack([model.k[layer, p] for p in range(keys)]).double()  # (keys, kv, d)
    rows = {"collect-2": positions[:1] + positions[-1:], "last": positions[-1:]}
    rows = rows.get(policy.rows, positions)
    if policy.rows == "collect-2" and len(positions) == 1:
        rows = positions
    group = model.num_heads_q // model.num_heads_kv
    total, guide_lse = 0, []
    for i, p in enumerate(rows):
        q = model.q[layer, p].double().view(model.num_heads_kv, group, -1)
        if policy.score.startswith("group"):
            q = q.mean(1, keepdim=True)
        logits = torch.einsum("hgd,thd->hgt", q, k) * model.softmax_scale
        logits[..., p + 1 :] = -torch.inf
        lse = logits.logsumexp(-1, keepdim=True)
        guide_lse.append(lse[:, 0, 0])
        if policy.score == "group-stale" and hint is not None:
            # The plane of the first row, then that of the last.
            first = i == 0 and policy.rows != "last" and len(positions) > 1
            plane = 0 if first or (len(positions) == 1 and policy.rows != "last") else 1
            lse = hint[layer, plane].double()[:, None, None]
        total = total + (logits if policy.score == "logit" else (logits - lse).exp()).sum(1)
    scores = total[:, :candidates]
    if not policy.per_kv_head:
        scores = scores.sum(0, keepdim=True)
    window = policy.look_ahead * gamma
    pooled = torch.stack([scores[:, max(0, i - window) : i + 1].amax(-1) for i in range(candidates)], -1)
    return pooled, guide_lse


@pytest.mark.parametrize("policy", ABLATION, ids=lambda p: p.name)
def test_selections_are_those_of_the_formula(policy):
    """Two rounds, so that a stale normaliser is stale: every layer's set is the best k."""
    model = Recorder(num_layers=2, num_heads_q=6, num_heads_kv=2, seed=3)
    decoder = SpeculativeDecoder(model, new_cache(model), prefill_chunk=7)
    prompt = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    request = decoder.add(Request(prompt, gamma=3, policy=policy, ratio=0.2, min_tokens=3))
    for _ in range(3):
        start, hint = len(request.tokens) - 1, None
        if request.selection is not None:
            hint = request.selection.guide_lse
        drafts = request.num_drafts(model.max_position)
        decoder.step()
        positions = list(range(start, start + drafts + 1))
        keys, candidates = positions[-1] + 1, start + 1
        selection = request.selection
        assert selection.tail_start == candidates
        k = budget(0.2, 3, keys, candidates)
        assert selection.budget == k
        for layer in range(model.num_layers):
            scores, _ = formula(model, policy, layer, positions, candidates, keys, 3, hint)
            lists = selection.indices[layer].view(-1, k).tolist()
            counts = selection.length[layer].view(-1).tolist()
            assert counts == [k] * len(scores) and len(lists) == len(scores)
            for chosen, score in zip(lists, scores, strict=True):
                assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < candidates
                rest = sorted(set(range(candidates)) - set(chosen))
                # Rounding decides between equals only.
                assert score[chosen].min() >= score[rest].max() - 1e-4 * score.abs().max()


def run(policy, steps=2, **options):
    model = TinyModel()
    decoder = SpeculativeDecoder(model, new_cache(model))
    request = decoder.add(Request(list(range(50)), policy=policy, gamma=2, **options))
    for _ in range(steps):
        decoder.step()
    return request


def test_streaming_keeps_sinks_and_recents():
    selection = run(Streaming(), steps=1, ratio=0.2, min_tokens=0).selection
    assert selection.indices.tolist() == [[0, 1, 2, 3]] * 2
    assert selection.tail_start == 50 - (10 - 4)
    selection = run(Streaming(), steps=1, min_tokens=2).selection  # k = 4: sinks alone
    assert (selection.tail_start, selection.budget) == (50, 4)
    selection = run(Streaming(), steps=1, min_tokens=999).selection
    assert (selection.tail_start, selection.budget) == (4, 4)


def test_random_is_reproducible_and_changes_every_round():
    options = {"ratio": 0.2, "min_tokens": 0}
    from vegas_ops.speculative import SamplingParams

    sampling = SamplingParams(seed=5)
    first = run(Random(), steps=1, sampling=sampling, **options)
    again = run(Random(), steps=1, sampling=sampling, **options)
    later = run(Random(), steps=2, sampling=sampling, **options)
    assert torch.equal(first.selection.indices, again.selection.indices)
    assert not torch.equal(first.selection.indices[0], first.selection.indices[1])
    assert not torch.equal(first.selection.indices, later.selection.indices[..., :10])


def test_full_drafts_are_all_accepted():
    statistics = run(Full(), steps=6).statistics
    assert statistics.accepted == statistics.drafted == 2 * statistics.iterations > 0


def test_the_oracle_with_everything_is_full():
    statistics = run(TopkOracle(), steps=6, ratio=1.0).statistics
    assert statistics.accepted == statistics.drafted > 0


def test_every_variant_is_known_by_its_name():
    for score, rows, ahead, per_kv_head, every in itertools.product(
        SCORES, ROWS, (0, 1, 12), (False, True), (1, 4)
    ):
        policy = Vegas(score, rows, ahead, per_kv_head, every)
        assert POLICIES[policy.name] == policy
    for name in ("vegas-", "vegas-logit", "vegas-logit-last-ahead-x", "vegas-logit-last-every-2-kv", "Vegas"):
        with pytest.raises(ValueError, match="`policy` must be one of vegas, "):
            POLICIES[name]
