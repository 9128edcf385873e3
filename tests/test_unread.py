"""Iterations that the host does not read one by one: the same tokens, and the device's own bookkeeping."""

from __future__ import annotations

import random

import pytest
import torch
from test_graphs import GPU_MODEL, sampled_requests
from test_loop import PROMPTS, SMALL, decoder_of, prompts
from tiny_model import TinyModel

from vegas_ops.speculative import POLICIES, VEGAS, Request, SamplingParams, SpeculativeDecoder, Vegas
from vegas_ops.speculative.round import FIELDS, MAX_STOPS, Round
from vegas_ops.speculative.selection import Policy, plans_tensors
from vegas_ops.speculative.unread import Unread


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def unread(model, turns: int, **options) -> SpeculativeDecoder:
    cache = decoder_of(model, **options).cache
    decoder = SpeculativeDecoder(model, cache, read_every=turns)
    decoder.fixed_shapes = True
    return decoder


def ended_in_turn(model) -> tuple[list[int], list[int]]:
    """A text's plain continuation, and a token that ends it within one block of iterations."""
    output = decoder_of(model).generate([Request(PROMPTS[2], gamma=0, max_new_tokens=40)])[0]
    return output, output[9:10]


class LateStop(Request):
    """Stops at its tokens from the 20th on only."""

    def stops(self) -> bool:
        return len(self.output) >= 20 and super().stops()


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("turns", [1, 4])
def test_rules_of_a_subclass_are_the_hosts(model, turns, gamma):
    output = decoder_of(model).generate([Request(PROMPTS[0], gamma=0, max_new_tokens=40)])[0]
    stop = output[5:6]
    expected = output[:30]
    if stop[0] in output[19:30]:
        expected = output[: output.index(stop[0], 19) + 1]

    def requests():
        late = LateStop(PROMPTS[0], gamma=gamma, max_new_tokens=30, stop_token_ids=stop, **SMALL)
        return [Request(PROMPTS[1], gamma=gamma, max_new_tokens=30, **SMALL), late]

    outputs = unread(model, turns).generate(requests())
    assert outputs[1] == expected
    assert outputs == decoder_of(model).generate(requests())


@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("turns", [1, 5])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda p: p.name)
def test_unread_iterations_decode_the_same(model, policy, turns, gamma):
    """Ends by length and by stop tokens, at different times; drafts are accepted alike, iteration by
    iteration, so the device's budgets, tails and lists are the host's."""
    output, stop = ended_in_turn(model)
    ends = ((3, ()), (40, ()), (40, stop), (23, ()))

    def requests():
        return [
            Request(p, gamma=gamma, policy=policy, max_new_tokens=n, stop_token_ids=stops,
                    sampling=SamplingParams(seed=4), **SMALL)
            for p, (n, stops) in zip(PROMPTS, ends, strict=True)
        ]  # fmt: skip

    read, alone = requests(), requests()
    decoder_of(model).generate(read)
    decoder = unread(model, turns, page_size=2)
    decoder.generate(alone)
    for a, b in zip(read, alone, strict=True):
        assert a.output == b.output
        assert a.finish_reason == b.finish_reason
        for name in ("iterations", "drafted_at", "accepted_at", "draft_bytes", "verify_bytes"):
            assert getattr(a.statistics, name) == getattr(b.statistics, name), name
    assert alone[2].output == output[: output.index(stop[0]) + 1]
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]


def test_the_device_plans_as_the_host_does(model, monkeypatch):
    """What a turn leaves is, line by line, what the host would upload for the next round; `advance` alone,
    which the host follows, leaves the next lists to it."""
    checked = 0
    load, run = Round.load, Round.run
    phases: list[str] = []

    def note(self, phase, pool):
        phases.append(phase)
        run(self, phase, pool)

    def compare(self, groups, modes, num_drafts, limits, ahead=False):
        nonlocal checked
        planned, before = self.values.clone(), list(self.requests)
        went = load(self, groups, modes, num_drafts, limits, ahead)
        same = [i for i, request in enumerate(self.requests) if request and request is before[i]]
        if went and same:
            turned = max(i for i, phase in enumerate(phases) if phase in ("advance", "turn"))
            checked += phases[turned] == "turn"
            left = ("pending",) if phases[turned] == "turn" else ("pending", "next_listed", "next_tails")
            for name, i in FIELDS.items():
                if name not in left:
                    assert torch.equal(planned[i, same], self.values[i, same]), name
        return went

    monkeypatch.setattr(Round, "load", compare)
    monkeypatch.setattr(Round, "run", note)
    # A block at a time: what another number of drafts, or a request that joins, brings about.
    monkeypatch.setattr(Unread, "_next_turns", lambda self, block: 0)
    for name in ("vegas", "streaming", "quest", "pillar"):
        decoder = unread(model, 3)
        texts = [Request(p, gamma=4, policy=POLICIES[name], max_new_tokens=70, **SMALL) for p in PROMPTS]
        decoder.generate(texts)
    assert checked > 8


@pytest.mark.parametrize("turns", [1, 4])
def test_sampled_unread_iterations(model, turns):
    assert unread(model, turns).generate(sampled_requests()) == decoder_of(model).generate(sampled_requests())


def test_the_host_reads_seldom_and_a_block_behind(model, monkeypatch):
    events: list[object] = []
    read_log, run = Round.read_log, Round.run

    def count(self, begin, turns):
        events.append(("read", turns))
        return read_log(self, begin, turns)

    def note(self, phase, pool):
        events.append(phase)
        run(self, phase, pool)

    monkeypatch.setattr(Round, "read_log", count)
    monkeypatch.setattr(Round, "run", note)
    decoder = unread(model, 8)
    decoder.generate([Request(PROMPTS[0], gamma=0, max_new_tokens=30)])
    reads = [event for event in events if isinstance(event, tuple)]
    # Blocks of 8, and of what is left at the end: 30 tokens in all.
    assert reads == [("read", 8), ("read", 8), ("read", 8), ("read", 6)]
    first = events.index(("read", 8))
    assert events[:first].count("turn") == 16, "the second block was launched before the first was read"


def test_a_stream_has_what_an_abort_read(model):
    decoder = unread(model, 30)
    leaver = decoder.add(Request(PROMPTS[0], gamma=0, max_new_tokens=1000))
    request = Request(PROMPTS[2], gamma=0, max_new_tokens=50)
    streamed = []
    for token in decoder.stream(request):
        streamed.append(token)
        if len(streamed) == 2:
            decoder.abort(leaver)
    assert streamed == request.output and len(streamed) == 50


def test_requests_join_and_leave_between_unread_iterations(model):
    decoder = unread(model, 3)
    queue = [Request(PROMPTS[i % 4], gamma=2 + i % 3, max_new_tokens=30, **SMALL) for i in range(8)]
    leaver = Request(PROMPTS[0], max_new_tokens=100, **SMALL)
    for i, request in enumerate([*queue[:3], leaver, *queue[3:]]):
        decoder.add(request)
        decoder.step()
        if i == 5:
            decoder.abort(leaver)
        if i == 6:
            decoder.preempt(decoder.running[0])
    decoder.run()
    for request in queue:
        other = Request(request.prompt, gamma=0, max_new_tokens=30)
        assert decoder_of(model).generate([other]) == [request.output]


def test_pages_of_ended_requests_serve_others(model):
    """Ends that the host alone sees, while the device has gone on; pages are few and change hands at once."""
    plain = decoder_of(model).generate([Request(p, gamma=0, max_new_tokens=60) for p in PROMPTS])

    def requests() -> list[Request]:
        return [
            Request(PROMPTS[i % 4], gamma=i % 5, max_new_tokens=60, **SMALL,
                    stop_sequences=[plain[i % 4][5 * i % 40 : 5 * i % 40 + 2]])
            for i in range(14)
        ]  # fmt: skip

    expected = decoder_of(model).generate(requests())
    decoder, batch = unread(model, 4, num_tokens=420, page_size=2), requests()
    for i, request in enumerate(batch):
        decoder.add(request)
        if i % 3 == 2:
            decoder.step()
    decoder.run()
    assert [request.output for request in batch] == expected
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]


def test_tokens_read_between_steps_are_not_lost(model):
    decoder = unread(model, 4)
    first, second = (decoder.add(Request(p, gamma=2, max_new_tokens=80, **SMALL)) for p in PROMPTS[:2])
    given: dict[Request, list[int]] = {first: [], second: []}

    def step() -> None:
        for request, tokens in decoder.step():
            given[request] += tokens

    for _ in range(3):
        step()
    assert decoder._unread.flight is not None
    decoder.preempt(second)
    assert decoder._unread.flight is None
    while decoder.running or decoder.waiting:
        step()
    for request, prompt in ((first, PROMPTS[0]), (second, PROMPTS[1])):
        assert given[request] == request.output
        assert [request.output] == decoder_of(model).generate([Request(prompt, gamma=0, max_new_tokens=80)])


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(model, seed):
    """Requests that join, leave, are preempted and end in every way, with few pages and adapting drafts."""
    rng = random.Random(seed)
    cache = decoder_of(model, num_tokens=rng.choice([260, 900]), page_size=rng.choice([1, 4])).cache
    cost = rng.choice([None, 0.2, 1.0])
    decoder = SpeculativeDecoder(model, cache, read_every=rng.choice([1, 2, 3, 8]), draft_cost=cost)
    decoder.fixed_shapes = True
    policies = [*POLICIES.values(), Vegas(refresh=3)]
    plain = decoder_of(model).generate([Request(p, gamma=0, max_new_tokens=60) for p in PROMPTS])
    queue, expected = [], {}
    for _ in range(8):
        i, n, at = rng.randrange(4), rng.randint(1, 60), rng.randrange(58)
        options = {
            "gamma": rng.randint(0, 7), "policy": rng.choice(policies), "max_new_tokens": n,
            "stop_sequences": [plain[i][at : at + 2]] if rng.random() < 0.4 else (), **SMALL,
        }  # fmt: skip
        queue.append(Request(PROMPTS[i], **options))
        alone = Request(PROMPTS[i], **{**options, "gamma": 0})
        expected[queue[-1]] = decoder_of(model).generate([alone])[0]
    given: dict[Request, list[int]] = {request: [] for request in queue}
    while queue or decoder.running or decoder.waiting:
        if queue and rng.random() < 0.5:
            decoder.add(queue.pop(0))
        chance = rng.random()
        if chance < 0.05 and len(decoder.running) > 1:
            decoder.preempt(rng.choice(decoder.running))
        elif chance < 0.08 and decoder.running:
            decoder.abort(rng.choice(decoder.running))
        for request, tokens in decoder.step():
            given[request] += tokens
    for request, tokens in decoder.step():  # nothing runs: what an abort was the last to read
        given[request] += tokens
    for request, output in expected.items():
        assert given[request] == request.output
        whole = request.finish_reason not in ("abort", "error")
        assert request.output == (output if whole else output[: len(request.output)])
        assert request.error is None or "too small" in request.error
    assert decoder.step() == []
    assert cache.num_free_pages == cache.k.shape[1]


@pytest.mark.parametrize("kind", ["sequence", "many stops", "processor", "refresh", "pages"])
def test_what_the_device_cannot_do_alone(model, kind):
    """More stops than it holds, stop sequences, processors, seldom selections, too few pages."""
    output, _ = ended_in_turn(model)
    options = {
        "sequence": {"stop_sequences": [output[7:9]]},
        "many stops": {"stop_token_ids": [*range(40, 40 + 2 * MAX_STOPS), output[9]]},
        "processor": {"logits_processor": lambda history, logits: logits.roll(1)},
        "refresh": {"policy": Vegas(refresh=3)},
        "pages": {},
    }[kind]

    def requests():
        return [Request(PROMPTS[2], gamma=3, max_new_tokens=40, **SMALL, **options) for _ in range(2)]

    read = decoder_of(model).generate(requests())
    size = {"num_tokens": 230, "page_size": 4} if kind == "pages" else {}
    assert unread(model, 6, **size).generate(requests()) == read


def test_policies_that_plan_with_numbers_alone():
    class Capped(Policy):
        def plan(self, k, candidates, first):
            return min(k, 7), candidates

    assert not plans_tensors(Capped())
    assert all(map(plans_tensors, POLICIES.values()))
    for policy in POLICIES.values():
        for k, candidates in ((0, 0), (1, 1), (5, 100), (40, 41), (256, 300)):
            now = policy.plan(torch.tensor([k, 3]), torch.tensor([candidates, 9]), False)
            planned = [x[0].item() if isinstance(x, torch.Tensor) else x for x in now]
            assert planned == list(policy.plan(k, candidates, False)), policy.name


def test_read_every_is_checked(model):
    with pytest.raises(ValueError, match="`read_every` must be at least 1, got 0"):
        SpeculativeDecoder(model, decoder_of(model).cache, read_every=0)


# CUDA graphs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("gamma", [0, 4])
def test_unread_graphs(cuda, monkeypatch, gamma, temperature):
    """Whole iterations as graphs give what single ones give; torch raises where the host waits."""
    model = TinyModel(**GPU_MODEL)
    sampling = SamplingParams(temperature=temperature, seed=3)

    def requests():
        return [
            Request(text, sampling, policy=VEGAS, gamma=gamma, ratio=0.2, min_tokens=16, max_new_tokens=n)
            for text, n in zip(prompts(100, 700, 1500, seed=1), (150, 40, 90), strict=True)
        ]

    outputs = []
    for turns in (0, 1, 6):  # 0: each iteration planned by the host
        if turns == 0:
            monkeypatch.setattr(Unread, "turns", lambda *_: 0)
        else:
            monkeypatch.undo()
        cache = decoder_of(model, num_tokens=20_000).cache
        decoder = SpeculativeDecoder(model, cache, read_every=max(turns, 1))
        batch = [decoder.add(request) for request in requests()]
        for _ in range(4):
            decoder.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoder.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        decoder.run()
        outputs.append([request.output for request in batch])
        alone = any(phase == "turn" for r in decoder._rounds.values() for phase, _ in r._graphs)
        assert alone == (turns > 0)
    assert outputs[0] == outputs[1] == outputs[2]
