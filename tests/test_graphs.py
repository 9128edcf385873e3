"""Rounds of a fixed shape: padded batches, finished requests, residents; CUDA graphs where there is a GPU.

On the CPU the same code runs on the same padded shapes, only without capture.
"""

from __future__ import annotations

import pytest
import torch
from test_loop import POLICY_SAMPLE, PROMPTS, SMALL, check_first_two_tokens, decoder_of, prompts
from tiny_model import TinyModel

from vegas_ops.models import Qwen3Config, Qwen3Model
from vegas_ops.speculative import (
    POLICIES,
    VEGAS,
    VEGAS_LOOKAHEAD,
    Full,
    PagedKVCache,
    Request,
    SamplingParams,
    SpeculativeDecoder,
    Streaming,
    Vegas,
    ahead,
    loop,
    unread,
)
from vegas_ops.speculative.loop import MAX_ROUNDS, bucket
from vegas_ops.speculative.round import Round
from vegas_ops.speculative.shapes import RARE
from vegas_ops.speculative.unread import Unread


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="module")
def plain(model) -> list[list[int]]:
    return decoder_of(model).generate([Request(p, gamma=0, max_new_tokens=40) for p in PROMPTS])


def fixed(model, **options) -> SpeculativeDecoder:
    decoder = decoder_of(model, **options)
    decoder.fixed_shapes = True
    return decoder


def test_buckets_hold_their_batch():
    assert [bucket(n) for n in (1, 2, 3, 5, 9, 16, 17, 40)] == [1, 2, 4, 8, 16, 16, 32, 48]


@pytest.mark.parametrize("gamma", [1, 6])
@pytest.mark.parametrize("policy", POLICY_SAMPLE, ids=lambda p: p.name)
def test_padded_rounds_decode_what_tight_ones_do(model, plain, policy, gamma):
    """Three texts in a bucket of four; the shortest output ends first, and its row goes on empty."""
    lengths = (3, 40, 17)
    options = {"gamma": gamma, "policy": policy, "sampling": SamplingParams(seed=4), **SMALL}

    def requests():
        return [Request(p, max_new_tokens=n, **options) for p, n in zip(PROMPTS, lengths, strict=False)]

    tight, padded = requests(), requests()
    decoder_of(model).generate(tight)
    decoder = fixed(model)
    decoder.generate(padded)
    for a, b, n, output in zip(tight, padded, lengths, plain, strict=False):
        assert a.output == b.output == output[:n]
        assert a.statistics.accepted_at == b.statistics.accepted_at
        assert a.statistics.drafted_at == b.statistics.drafted_at
    assert {shape.batch for shape in decoder._rounds} <= {1, 2, 4, 8}


def sampled_requests() -> list[Request]:
    return [
        Request(p, SamplingParams(temperature=t, top_p=top_p, seed=i), gamma=g, policy=policy,
                max_new_tokens=n, **SMALL)
        for i, (p, t, top_p, g, policy, n) in enumerate(
            zip(PROMPTS * 2, (1.0, 0.7, 0.0, 1.3) * 2, (1.0, 0.9) * 4, (3, 6, 2, 0, 1, 4, 5, 3),
                (VEGAS, VEGAS_LOOKAHEAD, Streaming(), VEGAS) * 2, (30, 5, 12, 30, 22, 1, 7, 30), strict=True)
        )
    ]  # fmt: skip


def test_sampled_output_is_the_same_in_padded_rounds(model):
    tight = decoder_of(model).generate(sampled_requests())
    assert fixed(model).generate(sampled_requests()) == tight


def test_requests_keep_their_selections_when_rows_change(model, plain):
    """Requests join, leave and are preempted, so that rows and rounds serve others in between."""
    decoder = fixed(model)
    policies = (VEGAS, VEGAS_LOOKAHEAD, POLICIES["snapkv"], POLICIES["specextend"], POLICIES["quest"])
    queue = [
        Request(PROMPTS[i % 4], policy=policies[i % 5], gamma=2 + i % 3, max_new_tokens=40, **SMALL)
        for i in range(20)
    ]
    leaver = Request(PROMPTS[0], max_new_tokens=100, **SMALL)
    for i, request in enumerate([*queue[:5], leaver, *queue[5:]]):
        decoder.add(request)
        decoder.step()
        if i == 9:
            decoder.abort(leaver)
        if i % 6 == 5 and len(decoder.running) > 2:
            decoder.preempt(decoder.running[i % 3])
    decoder.run()
    alone = [Request(q.prompt, policy=q.policy, gamma=q.gamma, max_new_tokens=40, **SMALL) for q in queue]
    for i, (request, other) in enumerate(zip(queue, alone, strict=True)):
        decoder_of(model).generate([other])
        assert request.output == other.output == plain[i % 4]
        # Quest knows tokens by their pages and starts anew after a preemption.
        if request.policy.name != "quest":
            assert request.statistics.accepted_at == other.statistics.accepted_at, request.policy.name
    assert len(decoder._rounds) <= MAX_ROUNDS


def test_an_old_selection_does_not_lie_where_others_put_theirs(model):
    """It is made in a round of one, drafted with in another round, and still wanted later."""
    decoder, policy = fixed(model), Vegas(refresh=50)
    first, second = (Request(p, policy=policy, gamma=2, max_new_tokens=60, **SMALL) for p in PROMPTS[:2])
    decoder.add(first)
    decoder.step()
    decoder.step()
    decoder.add(second)
    decoder.step()
    decoder.step()
    decoder.preempt(first)
    decoder.waiting.remove(first)  # as if there were no pages for it
    known = [x.clone() for x in first.selection[:2]]
    assert first.selection.age > 1
    decoder.step()
    assert not second.finished and second.selection.age > 0
    for before, now in zip(known, first.selection[:2], strict=True):
        assert torch.equal(before, now)


def test_one_round_serves_iterations_of_a_shape(model):
    decoder = fixed(model)
    decoder.generate([Request(p, gamma=4, max_new_tokens=30, **SMALL) for p in PROMPTS])
    sizes = sorted(shape.batch for shape in decoder._rounds)
    assert sizes == sorted(set(sizes)), "one round for each bucket"


@pytest.mark.parametrize("gamma", [0, 3])
def test_rounds_go_ahead_while_the_batch_stays(model, plain, monkeypatch, gamma):
    """Pages change hands at every step, requests join and end; what was computed ahead still holds."""
    monkeypatch.setattr(Unread, "turns", lambda *_: 0)  # each iteration planned by the host
    went: list[bool] = []
    load = Round.load

    def record(self, *arguments):
        went.append(load(self, *arguments))
        return went[-1]

    monkeypatch.setattr(Round, "load", record)
    decoder = fixed(model, page_size=2)
    requests = [
        Request(PROMPTS[i % 4], gamma=gamma, max_new_tokens=n, stop_token_ids=stops, **SMALL)
        for i, (n, stops) in enumerate(zip((40, 31, 40, 40, 9, 40, 40), ((), (), plain[2][5:6], ()) * 2,
                                           strict=False))
    ]  # fmt: skip
    for request in requests[:5]:
        decoder.add(request)
    for request in [None] * 8 + requests[5:]:
        if request is not None:
            decoder.add(request)
        decoder.step()
        decoder.step()
    decoder.preempt(decoder.running[0])
    decoder.run()
    for i, request in enumerate(requests):
        end = plain[2].index(plain[2][5]) + 1 if request.stop_token_ids else request.max_new_tokens
        assert request.output == plain[i % 4][:end]
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]
    assert sum(went) > len(went) / 2, "most iterations follow one of the same batch"


@pytest.mark.parametrize("gamma", [0, 6])
def test_texts_outgrow_the_bound_of_a_round(model, plain, monkeypatch, gamma):
    """One token at a time up to powers of 2, with what was computed ahead beyond them."""
    monkeypatch.setattr(loop, "MIN_KEYS", 1)
    decoder = fixed(model, page_size=2)
    requests = [Request(p, gamma=gamma, policy=Full(), max_new_tokens=40, **SMALL) for p in PROMPTS]
    assert decoder.generate(requests) == plain
    assert {shape.max_keys for shape in decoder._rounds} == {128, 256}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("turns", [1, 3])
def test_what_went_ahead_moves_to_another_round(model, monkeypatch, gamma, temperature, turns):
    """Texts outgrow bounds, and a batch shrinks; nothing is drafted or plainly verified twice."""
    monkeypatch.setattr(loop, "MIN_KEYS", 1)
    monkeypatch.setattr(loop, "RARE", 0)
    monkeypatch.setattr(unread, "RARE", 0)
    phases: list[str] = []
    run, moved = Round.run, []
    monkeypatch.setattr(Round, "run", lambda r, phase, pool: (phases.append(phase), run(r, phase, pool)))
    take_over = ahead.take_over
    monkeypatch.setattr(ahead, "take_over", lambda *a: (moved.append(a), take_over(*a)))

    def requests():
        return [
            Request(p, SamplingParams(temperature, top_p=0.9, seed=i), gamma=gamma, max_new_tokens=n, **SMALL)
            for i, (p, n) in enumerate(zip(PROMPTS, (60, 15, 60, 60), strict=True))
        ]

    decoder = SpeculativeDecoder(model, decoder_of(model, page_size=2).cache, read_every=turns)
    decoder.fixed_shapes = True
    outputs = decoder.generate(requests())
    assert moved and len(decoder._rounds) > 1
    # All that ran was used, but for what went ahead of the last verification.
    ran, used = ("draft", "verify") if gamma else ("verify", "advance")
    assert phases.count(ran) <= phases.count(used) + phases.count("turn") + 1
    assert outputs == decoder_of(model).generate(requests())


def test_too_few_pages_to_go_ahead(model, plain):
    decoder = fixed(model, num_tokens=200, page_size=4)
    requests = [Request(p, gamma=g, max_new_tokens=40, **SMALL) for p in PROMPTS for g in (0, 6)]
    assert decoder.generate(requests) == [output for output in plain for _ in range(2)]


def test_a_rare_shape_is_served_by_a_larger_one(model):
    """What is left of a batch runs in its round for a while, then gets one of its own."""
    decoder = fixed(model)
    requests = [Request(PROMPTS[2], gamma=3, max_new_tokens=n, policy=Full(), **SMALL) for n in (8, 8, 8, 8)]
    survivor = Request(PROMPTS[1], gamma=3, max_new_tokens=400, policy=Full(), **SMALL)
    decoder.generate([*requests, survivor][1:])
    assert [shape.batch for shape in decoder._rounds if shape.steps] == [4, 1]
    sizes = [r.shape.batch for r in decoder._rounds.values()]
    assert sizes and decoder._misses[next(s for s in decoder._rounds if s.batch == 1)] > RARE
    brief = fixed(model)
    survivor = Request(PROMPTS[1], gamma=3, max_new_tokens=60, policy=Full(), **SMALL)
    brief.generate([*requests_like(requests)[1:], survivor])
    assert {shape.batch for shape in brief._rounds} == {4}


def requests_like(requests: list[Request]) -> list[Request]:
    return [
        Request(q.prompt, gamma=q.gamma, max_new_tokens=q.max_new_tokens, policy=q.policy, **SMALL)
        for q in requests
    ]


def test_unused_rows_leave_the_cache_alone(model):
    decoder = fixed(model)
    held = decoder.hold_prompt(PROMPTS[3])
    before = decoder.cache.gather(1, held.sequence, 80, model.dtype)[0].clone()
    policies = [POLICIES["snapkv"], VEGAS, Full()]
    decoder.generate([Request(PROMPTS[3], policy=p, share_prefix_with=held, **SMALL) for p in policies])
    assert torch.equal(decoder.cache.gather(1, held.sequence, 80, model.dtype)[0], before)


# CUDA graphs

GPU_MODEL = {"head_dim": 64, "dtype": torch.bfloat16, "device": "cuda", "max_position": 4096}


def gpu_outputs(graphs: bool, requests: list[Request], profile: bool = False) -> SpeculativeDecoder:
    model = TinyModel(**GPU_MODEL)
    decoder = decoder_of(model, num_tokens=80_000)
    decoder = SpeculativeDecoder(model, decoder.cache, graphs=graphs, profile=profile)
    decoder.fixed_shapes = True
    queue = list(requests)
    while queue or decoder.running or decoder.waiting:  # one joins at every other step
        if queue:
            decoder.add(queue.pop(0))
        decoder.step()
        decoder.step()
    return decoder


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("policy", [*POLICIES.values(), None], ids=lambda p: p.name if p else "plain")
def test_graphs_decode_what_the_eager_loop_does(cuda, policy, temperature):
    """Bit for bit: the captured kernels are those of the eager loop, on the same padded shapes."""
    sampling = SamplingParams(temperature=temperature, top_p=0.9 if temperature else 1.0, seed=7)
    texts = prompts(1, 100, 1500, seed=1)

    def requests():
        return [
            Request(text, sampling, policy=policy or VEGAS, gamma=gamma if policy else 0, ratio=0.2,
                    min_tokens=16, max_new_tokens=40)
            for text in texts for gamma in (5, 3)
        ]  # fmt: skip

    eager, graphed = requests(), requests()
    gpu_outputs(False, eager)
    decoder = gpu_outputs(True, graphed)
    assert any(r._graphs for r in decoder._rounds.values())
    for a, b in zip(eager, graphed, strict=True):
        assert a.output == b.output
        assert a.statistics.accepted_at == b.statistics.accepted_at


def test_sampled_tokens_follow_the_target_through_graphs(cuda):
    check_first_two_tokens(TinyModel(temperature=2.0, **GPU_MODEL), 1500)


def test_an_iteration_waits_once(cuda):
    """No synchronisation but the read of the result: torch raises at any other."""
    model = TinyModel(**GPU_MODEL)
    decoder = SpeculativeDecoder(model, decoder_of(model, num_tokens=20_000).cache)
    for text in prompts(100, 300, 500, seed=2):
        decoder.add(Request(text, gamma=4, ratio=0.2, min_tokens=16, max_new_tokens=200))
    for _ in range(4):
        decoder.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert any(r._graphs for r in decoder._rounds.values())


def test_statistics_of_profiled_graphs(cuda):
    requests = [Request(p, gamma=4, ratio=0.2, min_tokens=16) for p in prompts(300, 500)]
    gpu_outputs(True, requests, profile=True)
    for request in requests:
        s = request.statistics
        assert min(s.draft_seconds, s.verify_seconds, s.select_seconds) > 0


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda p: p.name)
def test_batch_invariant_output_is_plain_decodings(cuda, policy):
    """To the bit, also where another kernel than plain decoding's writes what the policy ranks by."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper's kernel divides keys alike for any number of rows")
    config = Qwen3Config(
        vocab_size=300, hidden_size=256, intermediate_size=384, num_layers=2, num_heads_q=4, num_heads_kv=2,
        head_dim=64, max_position=4096,
    )  # fmt: skip
    model = Qwen3Model.random(config, dtype=torch.bfloat16, device="cuda", batch_invariant=True)
    assert model.batch_invariant
    outputs = []
    for gamma in (0, 5):
        cache = PagedKVCache(
            num_layers=2, num_pages=200, page_size=64, num_heads_kv=2, head_dim=64, dtype=torch.bfloat16,
            device="cuda",
        )  # fmt: skip
        decoder = SpeculativeDecoder(model, cache, batch_invariant=True)
        batch = [
            Request(text, gamma=gamma, policy=policy, ratio=0.2, min_tokens=16, max_new_tokens=n)
            for text, n in zip(prompts(90, 700, 1500, seed=1), (200, 60, 120), strict=True)
        ]
        outputs.append(decoder.generate(batch))
    assert outputs[0] == outputs[1]
