"""The policies that Vegas is compared with, against their definitions written out."""

from __future__ import annotations

import pytest
import torch
from test_policies import Recorder
from tiny_model import new_cache

from vegas_ops.speculative import (
    Pillar,
    Policy,
    Quest,
    Request,
    SnapKV,
    SpecExtend,
    SpeculativeDecoder,
)
from vegas_ops.speculative.selection import budget

LAYERS, HEADS, KV_HEADS, GAMMA, RATIO = 2, 6, 2, 3, 0.3
PROMPT = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(1)).tolist()


def start(policy: Policy, page_size: int = 16) -> tuple[Recorder, SpeculativeDecoder, Request]:
    model = Recorder(num_layers=LAYERS, num_heads_q=HEADS, num_heads_kv=KV_HEADS, seed=3)
    decoder = SpeculativeDecoder(model, new_cache(model, page_size=page_size), prefill_chunk=7)
    request = decoder.add(Request(PROMPT, gamma=GAMMA, policy=policy, ratio=RATIO, min_tokens=3))
    return model, decoder, request


def weights(model: Recorder, layer: int, position: int) -> torch.Tensor:
    """Softmax weights (num_heads_kv, group, keys) of the row at `position`, fp64."""
    k = torch.stack([model.k[layer, p] for p in range(position + 1)]).double()
    q = model.q[layer, position].double().view(KV_HEADS, HEADS // KV_HEADS, -1)
    return (torch.einsum("hgd,thd->hgt", q, k) * model.softmax_scale).softmax(-1)


def summed(model: Recorder, layer: int, positions: list[int]) -> torch.Tensor:
    """(num_heads_kv, keys): weights summed over rows and the group."""
    keys = positions[-1] + 1
    total = torch.zeros(KV_HEADS, keys, dtype=torch.float64)
    for position in positions:
        total[:, : position + 1] += weights(model, layer, position).sum(1)
    return total


def assert_best(chosen: list[int], scores: torch.Tensor, count: int) -> None:
    """The `count` best, ascending; rounding decides between equals only."""
    assert chosen == sorted(set(chosen)) and len(chosen) == count
    rest = sorted(set(range(len(scores))) - set(chosen))
    if chosen and rest:
        assert scores[chosen].min() >= scores[rest].max() - 1e-4 * scores.abs().max()


def test_snapkv_chooses_once_by_the_last_rows_of_the_prompt():
    policy = SnapKV(window=8, kernel=3)
    model, decoder, request = start(policy)
    decoder.step()
    selection, older = request.selection, 90 - 8
    k = budget(RATIO, 3, 90, 90) - 8
    assert (selection.budget, selection.tail_start) == (k, older)
    for layer in range(LAYERS):
        scores = summed(model, layer, list(range(82, 90)))
        padded = torch.nn.functional.pad(scores, (1, 1))
        pooled = (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3
        for head in range(KV_HEADS):
            assert_best(selection.indices[layer, head].tolist(), pooled[head, :older], k)
    before = selection.indices.clone()
    for _ in range(4):
        decoder.step()
    assert torch.equal(request.selection.indices, before)
    assert (request.selection.tail_start, request.selection.age) == (older, 4)


def test_short_prompts_are_snapkv_s_window():
    _, decoder, request = start(SnapKV())
    decoder.abort(request)
    request = decoder.add(Request(PROMPT[:9], gamma=GAMMA, policy=SnapKV(), min_tokens=3))
    decoder.step()
    assert (request.selection.budget, request.selection.tail_start) == (0, 0)


@pytest.mark.parametrize("page_size", [16, 5])
def test_quest_chooses_pages_by_the_true_bound(page_size, monkeypatch):
    policy = Quest(page=4)
    model, decoder, request = start(policy, page_size)
    calls = []
    choose = Quest.choose

    def record(self, step, layer, q):
        chosen = choose(self, step, layer, q)
        selection = request.selection
        assert int(step.tail_start) == selection.tail_start
        calls.append((layer, q.clone(), *(x.clone() for x in chosen), selection.tail_start, selection.budget))
        return chosen

    monkeypatch.setattr(Quest, "choose", record)
    for _ in range(6):
        decoder.step()
    assert len(calls) == 5 * GAMMA * LAYERS
    for layer, q, indices, length, tail_start, listed in calls:
        assert tail_start % 4 == 0
        pages = [range(p, p + 4) for p in range(0, tail_start, 4)]
        q = q.double().view(KV_HEADS, HEADS // KV_HEADS, 1, -1)
        for head in range(KV_HEADS):
            keys = [torch.stack([model.k[layer, p][head] for p in page]).double() for page in pages]
            low, high = (torch.stack([f(k, 0) for k in keys]) for f in (torch.amin, torch.amax))
            scores = torch.maximum(q[head] * low, q[head] * high).sum((0, 2))
            tokens = indices[0, head, : length[0, head]].tolist()
            chosen = [t // 4 for t in tokens[::4]]
            assert tokens == [t for page in chosen for t in pages[page]]
            assert_best(chosen, scores, len(chosen))
            assert len(tokens) == listed


def test_quest_lists_whole_pages():
    assert Quest(page=4).plan(10, 22, True) == (12, 20)
    assert Quest(page=4).plan(99, 22, False) == (20, 20)
    assert Quest(page=4).plan(3, 3, True) == (0, 0)


def test_specextend_follows_the_last_accepted_token_s_last_layer():
    policy = SpecExtend(chunk=4, refresh=2)
    model, decoder, request = start(policy)
    decoder.step()
    k = budget(RATIO, 3, 90, 90) // 4
    assert (request.selection.budget, request.selection.tail_start) == (0, (90 // 4 - k) * 4)
    for _ in range(3):
        decoder.step()  # not yet
        assert request.selection.age == 1
        known, drafts = len(request.tokens), request.num_drafts(512)
        decoder.step()
        accepted = len(request.tokens) - known - 1
        selection = request.selection
        k = budget(RATIO, 3, known + drafts, known) // 4
        assert (selection.budget, selection.tail_start) == (4 * k, known // 4 * 4)
        scores = weights(model, LAYERS - 1, known - 1 + accepted).mean((0, 1))
        chunks = scores[: known // 4 * 4].view(-1, 4).mean(1)
        for layer in range(LAYERS):
            tokens = selection.indices[layer].tolist()
            assert tokens == [4 * c + i for c in (t // 4 for t in tokens[::4]) for i in range(4)]
            assert_best([t // 4 for t in tokens[::4]], chunks, k)


def test_pillar_counts_recents_in_its_budget():
    model, decoder, request = start(Pillar())
    decoder.step()
    assert (request.selection.budget, request.selection.tail_start) == (0, 0)
    decoder.step()
    assert request.statistics.accepted == request.statistics.drafted == GAMMA, "the first round is full"
    for _ in range(3):
        known, drafts = len(request.tokens), request.num_drafts(512)
        decoder.step()
        accepted = len(request.tokens) - known - 1
        selection = request.selection
        assert selection.tail_start == known
        k = budget(RATIO, 3, known + drafts, known) - accepted - 1
        for layer in range(LAYERS):
            scores = summed(model, layer, list(range(known - 1, known + drafts)))[:, :known]
            for head in range(KV_HEADS):
                assert int(selection.length[layer, head]) == k
                assert_best(selection.indices[layer, head, :k].tolist(), scores[head], k)


@pytest.mark.parametrize("policy", [SnapKV(), Quest(), SpecExtend(), Pillar()], ids=lambda p: p.name)
def test_bytes_of_a_draft_follow_the_plan(policy):
    _, decoder, request = start(policy)
    decoder.step()
    listed, tail = request.selection.budget, request.selection.tail_start
    keys = [90 + 1 + j for j in range(GAMMA)]
    scanned = sum(n // 16 for n in keys) if policy.name == "quest" else 0
    decoder.step()
    tokens = sum(listed + n - tail for n in keys) + scanned
    assert request.statistics.draft_bytes == tokens * decoder.cache.bytes_per_token
