"""The loop: identical to plain decoding, whatever the policy, the batch, the order of events."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_model import TinyModel, new_cache
from toy_speculation import p_value

from vegas_ops.models import Qwen3Model, Tokenizer
from vegas_ops.session import DEMO_MODEL
from vegas_ops.speculative import (
    POLICIES,
    VEGAS,
    VEGAS_LOOKAHEAD,
    Full,
    OutOfPages,
    Request,
    SamplingParams,
    SpeculativeDecoder,
    Streaming,
    TopkOracle,
    Vegas,
)
from vegas_ops.speculative.attention import PrefillContext
from vegas_ops.speculative.sampling import SamplingBatch, probabilities

POLICY_SAMPLE = [
    *POLICIES.values(),
    Vegas("weight"),
    Vegas("weight", "last", 1, per_kv_head=True),
    Vegas("group", "collect-all", 2),
    Vegas("logit", "collect-all"),
    Vegas("group-stale", "last", 1, per_kv_head=True),
]
SMALL = {"ratio": 0.4, "min_tokens": 3}  # of texts of some dozens of tokens


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = prompts(1, 6, 33, 90)


def decoder_of(model, **options) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, new_cache(model, **options), prefill_chunk=16)


def decode(model, requests: list[Request], **options) -> list[list[int]]:
    return decoder_of(model, **options).generate(requests)


@pytest.fixture(scope="module")
def plain(model) -> list[list[int]]:
    return [decode(model, [Request(p, gamma=0, max_new_tokens=40)])[0] for p in PROMPTS]


def test_plain_decoding_is_what_the_model_says(model, plain):
    """Step by step, with torch's attention over the whole text instead of any cache."""

    def full_attention(layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    for prompt, output in zip(PROMPTS, plain, strict=True):
        text = list(prompt)
        for _ in range(40):
            ids, positions = torch.tensor(text), torch.arange(len(text))
            hidden = model.forward(ids, positions, full_attention)
            text.append(int(model.compute_logits(hidden[-1:])[0].argmax()))
        assert text[len(prompt) :] == output


@pytest.mark.parametrize("gamma", [1, 3, 6, 9])
@pytest.mark.parametrize("policy", POLICY_SAMPLE, ids=lambda p: p.name)
def test_greedy_output_is_that_of_plain_decoding(model, plain, policy, gamma):
    options = {"gamma": gamma, "policy": policy, "max_new_tokens": 40, **SMALL}
    options["sampling"] = SamplingParams(seed=4)  # of the random policy
    batch = [Request(p, **options) for p in PROMPTS]
    assert decode(model, batch) == plain
    alone = [Request(p, **options) for p in PROMPTS]
    for request, output in zip(alone, plain, strict=True):
        assert decode(model, [request]) == [output]
    for a, b in zip(batch, alone, strict=True):
        assert a.statistics.accepted == b.statistics.accepted
    if gamma > 1 and policy.name != "random":
        accepted = sum(r.statistics.accepted for r in batch)
        assert accepted > 0
        assert policy == Full() or accepted < sum(r.statistics.drafted for r in batch)


def test_a_mixed_batch_with_requests_joining_and_leaving(model, plain):
    decoder = decoder_of(model, page_size=7)
    requests = [
        Request(PROMPTS[i % 4], policy=policy, gamma=gamma, max_new_tokens=40, ratio=ratio,
                min_tokens=min_tokens)
        for i, (policy, gamma, ratio, min_tokens) in enumerate(
            zip(POLICY_SAMPLE + POLICY_SAMPLE[::-1], [3, 0, 6, 1, 9, 2, 5] * 4,
                [0.1, 0.5, 0.9] * 9, [1, 20, 256] * 9, strict=False)
        )
    ]  # fmt: skip
    leavers = [Request(p, max_new_tokens=100, **SMALL) for p in prompts(9, 40, seed=3)]
    queue = list(requests)
    queue[3:3], queue[9:9] = leavers[:1], leavers[1:]
    for request in queue:
        decoder.add(request)
        decoder.step()
        if len(leavers[1].output) > 3:
            decoder.abort(leavers[1])
    decoder.abort(leavers[0])
    decoder.run()
    for i, request in enumerate(requests):
        assert request.output == plain[i % 4], (i, request.policy.name)
    assert [r.finish_reason for r in leavers] == ["abort", "abort"]
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]


def test_sampled_output_does_not_depend_on_the_batch(model):
    sampling = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=s)
        for t, k, p, m, s in [(1.0, 0, 1.0, 0.0, 1), (0.7, 20, 0.9, 0.0, 2), (1.3, 0, 0.95, 0.05, 3),
                              (0.0, 0, 1.0, 0.0, 4)]
    ]  # fmt: skip

    def requests() -> list[Request]:
        return [
            Request(p, s, gamma=g, policy=policy, max_new_tokens=30, **SMALL)
            for p, s, g, policy in zip(
                PROMPTS, sampling, (3, 6, 2, 4), (VEGAS, VEGAS_LOOKAHEAD, VEGAS, Streaming()),
                strict=True,
            )
        ]  # fmt: skip

    together = decode(model, requests())
    assert together == [decode(model, [request])[0] for request in requests()]
    assert together[::-1] == decode(model, requests()[::-1])
    assert len({tuple(t) for t in together}) == 4


def test_the_first_two_sampled_tokens_follow_the_target():
    check_first_two_tokens(TinyModel(temperature=2.0), 4000)


def check_first_two_tokens(model: TinyModel, draws: int) -> None:
    """The whole loop, thousands of seeds on one prompt, against the exact distribution."""
    prompt = PROMPTS[1]
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    decoder = decoder_of(model, num_tokens=16 * draws)
    requests = [
        decoder.add(
            Request(prompt, dataclasses.replace(sampling, seed=seed), max_new_tokens=4, gamma=2,
                    ratio=0.1, min_tokens=1)
        )
        for seed in range(draws)
    ]  # fmt: skip
    decoder.run()
    accepted = sum(r.statistics.accepted for r in requests)
    assert 0.2 < accepted / sum(r.statistics.drafted for r in requests) < 0.9

    def distribution(text: list[int]) -> torch.Tensor:
        rows: list[torch.Tensor] = []

        def keep(history, logits):
            rows.append(logits)
            return logits

        decode(model, [Request(text, gamma=0, max_new_tokens=1, logits_processor=keep)])
        return probabilities(rows[0][None].cpu(), SamplingBatch([sampling], "cpu"))[0]

    first = torch.tensor([r.output[1] for r in requests])
    given = torch.tensor([r.output[0] for r in requests])
    p0 = distribution(prompt)
    assert p_value(torch.bincount(given, minlength=64), p0 * draws) > 1e-4
    joint = torch.stack([distribution([*prompt, t]) for t in range(64)]) * p0[:, None]
    counts = torch.bincount(given * 64 + first, minlength=64 * 64)
    assert p_value(counts, joint.flatten() * draws) > 1e-4


@pytest.fixture(scope="module")
def real_model():
    return Qwen3Model.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def test_greedy_identity_on_a_trained_model(real_model):
    """Text of three lengths; every policy and gamma in one batch, some of them alone."""
    text = Tokenizer(DEMO_MODEL).encode((Path(__file__).parents[1] / "LICENSE").read_text())
    decoder = SpeculativeDecoder(real_model, new_cache(real_model, 40_000, max_length=4096))
    options = {"max_new_tokens": 24, "ratio": 0.1, "min_tokens": 64}
    bases = [decoder.add(Request(text[:n], gamma=0, **options)) for n in (130, 701, 1500)]
    decoder.step()
    requests = [
        decoder.add(Request(base.prompt, policy=p, gamma=g, share_prefix_with=base, **options))
        for p in POLICY_SAMPLE
        for g in (1, 3, 6, 9)
        for base in bases
    ]
    decoder.run()
    for i, request in enumerate(requests):
        assert request.output == bases[i % 3].output, (request.policy.name, request.gamma)
    for policy in (VEGAS, VEGAS_LOOKAHEAD):
        alone = Request(bases[2].prompt, policy=policy, gamma=6, **options)
        cache = new_cache(real_model, 2048)
        assert SpeculativeDecoder(real_model, cache).generate([alone]) == [bases[2].output]
        assert alone.statistics.tokens_per_iteration > 2


# Stopping


def test_exactly_max_new_tokens_and_never_beyond_the_context(plain):
    model = TinyModel(max_position=100)
    reference = decode(model, [Request(PROMPTS[3], gamma=0, max_new_tokens=99)])[0]
    assert len(reference) == 10
    for gamma in (1, 5, 9, 40):
        for n in (0, 1, 2, 7, 10, 99):
            request = Request(PROMPTS[3], gamma=gamma, max_new_tokens=n, **SMALL)
            assert decode(model, [request]) == [reference[:n]]
            assert request.finish_reason == ("length" if n <= 10 else "context")


def test_stop_sequences_end_inside_a_block(model, plain):
    stop = plain[2][4:7]
    request = Request(PROMPTS[2], policy=Full(), gamma=9, max_new_tokens=40, stop_sequences=[[1, 2, 3], stop])
    assert decode(model, [request]) == [plain[2][:7]]
    assert request.finish_reason == "stop"


def test_streaming_yields_what_generate_returns(model, plain):
    decoder = decoder_of(model)
    other = decoder.add(Request(PROMPTS[1], max_new_tokens=40, **SMALL))
    assert list(decoder.stream(Request(PROMPTS[2], max_new_tokens=40, **SMALL))) == plain[2]
    decoder.run()
    assert other.output == plain[1]


def test_streams_of_one_decoder_take_turns(model, plain):
    decoder = decoder_of(model)
    first, second = (decoder.stream(Request(PROMPTS[i], max_new_tokens=40, **SMALL)) for i in (1, 2))
    assert list(zip(first, second, strict=True)) == list(zip(plain[1], plain[2], strict=True))


def test_the_cache_holds_what_was_committed(model):
    decoder = decoder_of(model)
    request = decoder.add(Request(PROMPTS[2], gamma=5, max_new_tokens=30, **SMALL))
    while not request.finished:
        decoder.step()
        if not request.finished:
            assert request.sequence is not None
            assert request.sequence.length == len(request.tokens) - 1
            assert len(request.sequence.pages) == -(-request.sequence.length // 16)


# Pages


def test_too_few_pages_make_requests_wait_not_differ(model, plain):
    requests = [Request(p, gamma=6, max_new_tokens=40, **SMALL) for p in PROMPTS]
    decoder = decoder_of(model, num_tokens=208, page_size=4)
    preempted = []
    original = decoder.preempt
    decoder.preempt = lambda request: (preempted.append(request), original(request))  # type: ignore[method-assign,assignment]
    assert decoder.generate(requests) == plain
    assert preempted


@pytest.mark.parametrize("num_tokens", range(176, 260, 12))
def test_pages_kept_for_rounds_that_go_ahead_are_given_up_first(model, plain, num_tokens):
    requests = [Request(p, gamma=6, max_new_tokens=40, **SMALL) for p in PROMPTS]
    decoder = decoder_of(model, num_tokens=num_tokens, page_size=4)
    decoder.fixed_shapes = True
    assert decoder.generate(requests) == plain
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]


@pytest.mark.parametrize(("num_tokens", "steps"), [(164, 4), (176, 6), (192, 8)])
def test_more_drafts_than_pages_were_kept_for(model, plain, num_tokens, steps):
    """The only way in which a round that goes ahead can lack pages: its requests draft more from now on."""
    decoder = decoder_of(model, num_tokens=num_tokens, page_size=4)
    decoder.fixed_shapes = True
    requests = [decoder.add(Request(p, gamma=6, max_new_tokens=40, **SMALL)) for p in PROMPTS]
    for request in requests:
        request.draft_limit = 1
    for _ in range(steps):
        decoder.step()
    assert decoder._ahead is not None
    for request in requests:
        request.draft_limit = 6
    decoder.run()
    assert [request.output for request in requests] == plain
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]


def test_a_request_that_cannot_fit_ends_with_an_error(model, plain):
    requests = [Request(p, max_new_tokens=40, **SMALL) for p in (PROMPTS[3], PROMPTS[0])]
    outputs = decode(model, requests, num_tokens=64)
    assert requests[0].finish_reason == "error" and "cache is too small" in requests[0].error
    assert outputs == [[], plain[0]]
    grows = Request(PROMPTS[2], max_new_tokens=40, **SMALL)
    output = decode(model, [grows], num_tokens=48)[0]
    assert grows.finish_reason == "error" and output == plain[2][: len(output)] != []


def test_prompt_pages_are_shared(model, plain):
    decoder = decoder_of(model)
    first = decoder.add(Request(PROMPTS[3], max_new_tokens=40, **SMALL))
    others = [
        decoder.add(Request(PROMPTS[3], policy=p, max_new_tokens=40, share_prefix_with=first, **SMALL))
        for p in POLICY_SAMPLE
    ]
    differs = decoder.add(Request([*PROMPTS[3][:40], 1, 2], share_prefix_with=first, **SMALL))
    decoder.step()
    assert all(r.sequence.pages[:5] == first.sequence.pages[:5] for r in others)
    assert differs.sequence.pages[:2] == first.sequence.pages[:2]
    assert differs.sequence.pages[2] != first.sequence.pages[2]
    decoder.run()
    assert [r.output for r in (first, *others)] == [plain[3]] * (1 + len(others))
    assert differs.output == decode(model, [Request(differs.prompt, gamma=0)])[0]
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]


@pytest.mark.parametrize("cache", [{}, {"dtype": torch.float8_e4m3fn, "k_scale": 0.5}], ids=str)
def test_prompts_by_torch_and_by_the_op_agree(model, cache):
    def hidden(by_torch: bool) -> torch.Tensor:
        decoder = decoder_of(model, **cache)
        request = Request(PROMPTS[3])
        request.sequence = decoder.cache.new_sequence()
        chunks = []
        for begin in range(0, 90, 40):
            n = min(40, 90 - begin)
            decoder.cache.reserve(request.sequence, begin + n)
            context = PrefillContext(model, decoder.cache, request, n)
            context.by_torch = by_torch
            ids = torch.tensor(PROMPTS[3][begin : begin + n])
            chunks.append(model.forward(ids, context.positions, context))
            request.sequence.length += n
        return torch.cat(chunks)

    assert torch.allclose(hidden(True), hidden(False), atol=2e-4)


def test_fp8_cache_is_still_lossless(model):
    options = {"dtype": torch.float8_e4m3fn}
    reference = decode(model, [Request(PROMPTS[2], gamma=0, max_new_tokens=30)], **options)
    request = Request(PROMPTS[2], gamma=4, max_new_tokens=30, **SMALL)
    assert decode(model, [request], **options) == reference


def test_a_held_prompt_serves_many_requests(model, plain):
    decoder = decoder_of(model, page_size=4)
    held = decoder.hold_prompt(PROMPTS[3])
    assert decoder.running == [] and held.sequence.length == 89
    for policy in POLICY_SAMPLE[:3]:
        request = Request(PROMPTS[3], policy=policy, share_prefix_with=held, max_new_tokens=40)
        assert decoder.generate([request]) == [plain[3]]
    decoder.abort(held)
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]


def test_a_cache_may_be_shorter_than_the_context(model, plain):
    request = Request(PROMPTS[2], gamma=6, max_new_tokens=40, **SMALL)
    assert decode(model, [request], max_length=50) == [plain[2][:17]]
    assert request.finish_reason == "context"
    with pytest.raises(ValueError, match="`prompt` must be shorter than the context of 33"):
        decode(model, [Request(PROMPTS[2])], max_length=33)


# Forced text


@pytest.mark.parametrize("policy", [VEGAS, VEGAS_LOOKAHEAD, TopkOracle(), Full()], ids=str)
def test_following_the_own_text_is_decoding_it(model, plain, policy):
    free = Request(PROMPTS[2], policy=policy, gamma=4, max_new_tokens=40, **SMALL)
    forced = Request(PROMPTS[2], policy=policy, gamma=4, forced_tokens=plain[2], **SMALL)
    assert decode(model, [free, forced]) == [plain[2]] * 2
    assert free.statistics.accepted == forced.statistics.accepted
    assert free.statistics.accepted_at == forced.statistics.accepted_at


def test_a_forced_text_is_committed_and_rewrites_the_cache(model):
    text = prompts(60, seed=9)[0]
    decoder = decoder_of(model)
    request = decoder.add(Request(PROMPTS[2], policy=Full(), gamma=4, forced_tokens=text, max_iterations=5))
    while request.statistics.iterations < 4:
        decoder.step()
    # Dense drafts are accepted, whatever the text says: it moves on by gamma + 1 each time.
    assert request.output == text[: 1 + 4 * 5]
    k, _ = decoder.cache.gather(1, request.sequence, request.sequence.length, model.dtype)
    fresh = decoder.add(Request(request.tokens, max_new_tokens=9, gamma=0))
    decoder.step()
    expected, _ = decoder.cache.gather(1, fresh.sequence, len(k), model.dtype)
    assert torch.allclose(k, expected, atol=1e-4)
    decoder.run()
    assert request.finish_reason == "iterations" and request.output == text[:26]


# Statistics and errors


def test_no_graph_is_kept_for_weights_that_want_gradients(plain):
    model = TinyModel()
    for weight in (*model.qkv, *model.out, model.head):
        weight.requires_grad_()
    decoder = decoder_of(model)
    sampled = Request(PROMPTS[1], SamplingParams(temperature=1.0), **SMALL)
    request = Request(PROMPTS[2], max_new_tokens=40, share_prefix_with=decoder.hold_prompt(PROMPTS[2]))
    assert decoder.generate([request, sampled])[0] == plain[2]
    assert not decoder.cache.k.requires_grad


def test_statistics_add_up(model):
    requests = [
        Request(p, gamma=g, max_new_tokens=40, **SMALL) for p, g in zip(PROMPTS, (0, 2, 5, 9), strict=True)
    ]
    decoder = decoder_of(model)
    decoder.generate(requests)
    for request in requests:
        s = request.statistics
        assert s.tokens == 39 and s.tokens == s.iterations + s.accepted
        assert (s.drafted, s.accepted) == (sum(s.drafted_at), sum(s.accepted_at))
        assert len(s.drafted_at) == len(s.accepted_at) == request.gamma
        assert s.accepted_at == sorted(s.accepted_at, reverse=True)
        assert s.tokens_per_iteration == 39 / s.iterations
        assert s.verify_seconds > 0 and (s.draft_seconds > 0) == (request.gamma > 0)
    plain = requests[0].statistics
    per_token = decoder.cache.bytes_per_token
    assert per_token == 2 * 2 * 2 * 16 * 4
    assert plain.verify_bytes == sum(range(2, 41)) * per_token and plain.draft_bytes == 0


def test_draft_bytes_count_the_list_and_the_tail(model):
    decoder = decoder_of(model)
    request = decoder.add(Request(PROMPTS[3], gamma=3, ratio=0.0, min_tokens=10))
    decoder.step()
    assert request.statistics.iterations == 0
    decoder.step()
    # 10 listed and a tail of 1, 2, 3 tokens; then 4 rows over 90 + 4 keys.
    assert request.statistics.draft_bytes == (11 + 12 + 13) * decoder.cache.bytes_per_token
    assert request.statistics.verify_bytes == 94 * decoder.cache.bytes_per_token


def test_pages_of_another_cache_are_not_shared(model, plain):
    elsewhere = decoder_of(model).hold_prompt(PROMPTS[3])
    decoder = decoder_of(model)
    with pytest.raises(ValueError, match="`share_prefix_with` must run in the same cache"):
        decoder.add(Request(PROMPTS[3], share_prefix_with=elsewhere))
    with pytest.raises(ValueError, match="`source` must be a sequence of this cache"):
        decoder.cache.share_prefix(elsewhere.sequence, 9)


def test_the_output_survives_changes_of_the_prompt(model, plain):
    text = list(PROMPTS[2])
    request = Request(text, max_new_tokens=40, **SMALL)
    text += decode(model, [request])[0]
    assert request.output == plain[2]


def test_an_interrupted_prompt_starts_anew(model, plain):
    decoder = decoder_of(model)
    request = decoder.add(Request(PROMPTS[3], max_new_tokens=40, **SMALL))
    other = Request(PROMPTS[2], max_new_tokens=40, **SMALL)

    def interrupt(request, done, total):
        if 32 <= done < 64:
            raise KeyboardInterrupt

    decoder.on_prompt = interrupt
    with pytest.raises(KeyboardInterrupt):
        decoder.step()
    assert decoder.running == [] and decoder.cache.num_free_pages == decoder.cache.k.shape[1]
    decoder.on_prompt = None
    decoder.run()
    assert request.output == plain[3]
    unwanted = decoder.add(Request(PROMPTS[3], **SMALL))
    decoder.on_prompt = lambda r, *_: decoder.abort(r) if r is unwanted else None
    assert decoder.generate([other]) == [plain[2]] and unwanted.finish_reason == "abort"
    assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]


@pytest.mark.parametrize("budget", [(0.0, 0), (0.0, 1), (1.0, 0)], ids=str)
def test_budgets_of_nothing_and_of_everything(model, plain, budget):
    ratio, min_tokens = budget
    requests = [
        Request(p, policy=policy, gamma=3, ratio=ratio, min_tokens=min_tokens, max_new_tokens=40)
        for policy in POLICY_SAMPLE
        for p in PROMPTS
    ]
    assert decode(model, requests, num_tokens=40_000) == plain * len(POLICY_SAMPLE)


def test_bad_requests_name_the_argument(model):
    for options in ({"gamma": -1}, {"max_new_tokens": -1}, {"ratio": 1.5}, {"min_tokens": -2}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must"):
            Request([1], **options)
    with pytest.raises(ValueError, match="`prompt` must hold at least one token, got none"):
        Request([])
    for prompt in ("hello", [1, "2"], [1.5], 3):
        with pytest.raises(TypeError, match=r"`prompt` must hold token ids, .* got "):
            Request(prompt)
    for name, values in (
        ("stop_token_ids", (5, "a", ["x"])),
        ("stop_sequences", (["return"], [5])),
        ("sampling", ({"temperature": 1.0}, None)),
        ("logits_processor", ("x",)),
    ):
        for value in values:
            with pytest.raises(TypeError, match=f"`{name}` must .*, got "):
                Request([1], **{name: value})
    with pytest.raises(TypeError, match=r"`request` must be a Request, got \[1, 2\]"):
        decoder_of(model).generate([[1, 2]])
    with pytest.raises(ValueError, match="`cache` must have the model's layers"):
        SpeculativeDecoder(model, new_cache(TinyModel(head_dim=32)))
    with pytest.raises(ValueError, match=r"`cache` must be .* or fp8"):
        decoder_of(model, dtype=torch.bfloat16)
    with pytest.raises(OutOfPages):
        decoder_of(model, num_tokens=64).hold_prompt([1] * 70)
    decoder = decoder_of(model)
    with pytest.raises(ValueError, match="`prompt` must be shorter than the context of 512"):
        decoder.add(Request([1] * 512))
    request = decoder.add(Request([1]))
    with pytest.raises(ValueError, match="`request` must be new"):
        decoder.add(request)
    with pytest.raises(ValueError, match="`request` must be running"):
        decoder.preempt(request)
    for options, message in (
        ({"prompt": [1, 64]}, "`prompt` must hold token ids below 64, got 64"),
        ({"prompt": [-1]}, "`prompt` must hold token ids below 64, got -1"),
        ({"prompt": [1], "forced_tokens": [5, 99]}, "`forced_tokens` must hold token ids below 64, got 99"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.add(Request(**options))
    with pytest.raises(TypeError, match=r"`policy` must be a Policy, .*got 'vegas'"):
        Request([1], policy="vegas")
    decoder.abort(request)
    decoder.abort(request)
    assert (request.finish_reason, decoder.waiting, decoder.running) == ("abort", [], [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_policy_runs_on_a_gpu(temperature):
    """bf16 rounds differently for other row counts, so outputs are compared by their agreement."""
    model = TinyModel(head_dim=64, dtype=torch.bfloat16, device="cuda", max_position=2048)
    sampling = SamplingParams(temperature=temperature, top_p=0.9, seed=2)
    options = {"max_new_tokens": 40, "sampling": sampling, "ratio": 0.2, "min_tokens": 16}
    texts = prompts(1, 100, 700)
    plain = decode(model, [Request(p, gamma=0, **options) for p in texts])
    requests = [
        Request(p, policy=policy, gamma=gamma, **options)
        for policy in POLICY_SAMPLE
        for gamma in (1, 5)
        for p in texts
    ]
    outputs = decode(model, requests, num_tokens=60_000)
    assert all(len(output) == 40 and min(output) >= 0 for output in outputs)
    for request in requests:
        if request.policy == Full():
            assert request.statistics.accepted > 0.8 * request.statistics.drafted
    if temperature == 0:
        agreed = [
            next((j for j, (a, b) in enumerate(zip(o, plain[i % 3], strict=True)) if a != b), 40)
            for i, o in enumerate(outputs)
        ]
        assert sum(agreed) / len(agreed) > 5
