"""Faults that users of neighbouring libraries reported in speculative loops and samplers.

The number in a test's name is that of the report; each docstring says what went wrong there.
"""

from __future__ import annotations

import math

import pytest
import torch
from tiny_model import TinyModel, new_cache
from toy_speculation import Toy, first_two_tokens, joint_p_value, p_value, processed

import vegas_ops
from vegas_ops.speculative import (
    VEGAS,
    Full,
    RepetitionPenalty,
    Request,
    SamplingParams,
    SpeculativeDecoder,
    Streaming,
    Vegas,
    accept_greedy,
    accept_sampled,
)
from vegas_ops.speculative.acceptance import Accepted
from vegas_ops.speculative.sampling import ACCEPT, DRAFT, EMIT, draw, uniform

DRAWS = 100_000
PLAIN = SamplingParams(temperature=1.0)
SMALL = {"ratio": 0.4, "min_tokens": 3}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode(model, *requests: Request, **cache) -> list[list[int]]:
    return SpeculativeDecoder(model, new_cache(model, **cache), prefill_chunk=16).generate(requests)


def plain(model, prompt: list[int], n: int, **options) -> list[int]:
    return decode(model, Request(prompt, gamma=0, max_new_tokens=n, **options))[0]


class ModelWithout(TinyModel):
    """Gives NaN logits at the listed positions."""

    def __init__(self, *positions: int, value: float = math.nan) -> None:
        super().__init__()
        self.bad, self.value = set(positions), value

    def forward(self, token_ids, positions, attend):
        self.rows = [p in self.bad for p in positions.tolist()]
        return super().forward(token_ids, positions, attend)

    def compute_logits(self, hidden):
        logits = super().compute_logits(hidden)
        logits[torch.tensor(self.rows)] = self.value
        return logits


def test_case_003_padding_rows_share_a_slot(model):
    """Padded rows wrote NaN into a slot that real rows read. Here requests of any length share a
    cache with hardly a page to spare, all of it NaN beforehand; nobody sees another's slots."""
    prompts = [prompt_of(n, n) for n in (1, 2, 30, 17)]
    cache = new_cache(model, num_tokens=16 * 10)
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    requests = [Request(p, gamma=4, max_new_tokens=12, **SMALL) for p in prompts]
    outputs = SpeculativeDecoder(model, cache).generate(requests)
    assert outputs == [plain(model, p, 12) for p in prompts]


def test_case_047_metadata_has_one_size():
    """Scheduler metadata had another size at capture than at planning."""
    shapes = set()
    for batch, length in ((1, 1), (2, 4096), (4, 16), (8, 100_000)):
        lengths = torch.full((batch,), length, dtype=torch.int32)
        metadata = vegas_ops.build_scheduler_metadata(
            "flash_attn_with_logit_dump",
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32),
            seqused_k=lengths,
            max_seqlen_q=1,
            max_seqlen_k=131_072,
            num_heads_q=8,
            num_heads_kv=2,
            head_dim=64,
            page_size=16,
        )
        shapes.add((metadata.shape, metadata.dtype))
    assert len(shapes) == 1


def test_case_069_the_reported_q_is_the_sampled_q():
    """Drafts came from top-k, acceptance used the raw softmax."""
    toy = Toy.random(noise=0.7)
    drafting = SamplingParams(temperature=1.0, top_k=16)
    right = first_two_tokens(toy, PLAIN, DRAWS, draft_params=drafting)
    assert joint_p_value(right, toy, PLAIN) > 1e-4
    wrong = first_two_tokens(
        toy,
        PLAIN,
        DRAWS,
        draft_params=drafting,
        reported=lambda logits: processed(logits, PLAIN),
    )
    assert joint_p_value(wrong, toy, PLAIN) < 1e-4


def test_case_070_draft_and_recovery_use_different_noise():
    """One stream picked the draft and its replacement: a bias that needs many draws to show."""
    toy = Toy.random(noise=0.5)
    p, q = processed(toy.target, PLAIN), processed(toy.draft, PLAIN)
    assert 0.1 < float((p - q).abs().sum(-1).mean() / 2) < 0.4
    right = first_two_tokens(toy, PLAIN, DRAWS)
    assert joint_p_value(right, toy, PLAIN) > 1e-4
    wrong = first_two_tokens(toy, PLAIN, DRAWS, emit_stream=DRAFT)
    assert joint_p_value(wrong, toy, PLAIN) < 1e-4
    assert len({DRAFT, ACCEPT, EMIT}) == 3


def test_case_072_greedy_drafts_have_a_one_hot_q():
    """Argmax drafts were judged as if they had been sampled."""
    toy = Toy.random()
    greedy = SamplingParams()
    right = first_two_tokens(toy, PLAIN, DRAWS, draft_params=greedy)
    assert joint_p_value(right, toy, PLAIN) > 1e-4
    wrong = first_two_tokens(
        toy, PLAIN, DRAWS, draft_params=greedy, reported=lambda logits: processed(logits, PLAIN)
    )
    assert joint_p_value(wrong, toy, PLAIN) < 1e-4


@pytest.mark.parametrize(("vocab", "draws"), [(64, 100_000), (128_000, 500)])
def test_case_075_every_position_has_its_own_uniform(vocab, draws):
    """One uniform served acceptance and replacement: they were correlated. Four drafts, every
    position of the output, given that it was reached."""
    generator = torch.Generator().manual_seed(1)
    likely = torch.randperm(vocab, generator=generator)[:32]
    base = torch.full((vocab,), -12.0)
    logits = torch.stack([base, base])
    logits[0, likely] = torch.randn(32, generator=generator)
    logits[1, likely] = logits[0, likely] + torch.randn(32, generator=generator)
    p, q = logits.softmax(-1)

    def emit(accept_stream: int) -> list[torch.Tensor]:
        columns: list[list[torch.Tensor]] = [[], [], [], [], []]
        for part in torch.arange(draws).split(max(1, min(draws, 20_000_000 // vocab))):
            seeds, rounds, n = part[:, None], torch.tensor(1), len(part)
            index = torch.arange(4)
            u_draft = uniform(seeds, rounds, index, DRAFT)
            drafts = torch.stack([draw(q.expand(n, -1), u_draft[:, j]) for j in range(4)], 1)
            result = accept_sampled(
                drafts,
                torch.full((n,), 4),
                q.expand(n, 4, -1),
                p.expand(n, 5, -1),
                uniform(seeds, rounds, index, accept_stream),
                uniform(part, rounds, 0, EMIT),
            )
            for j, column in enumerate(result.tokens.T):
                columns[j].append(column[column >= 0])
        return [torch.cat(column) for column in columns]

    for column in emit(ACCEPT):
        assert len(column) > 50
        assert p_value(torch.bincount(column, minlength=vocab), p * len(column)) > 1e-4
    if vocab == 64:
        first = emit(EMIT)[0]
        assert p_value(torch.bincount(first, minlength=vocab), p * len(first)) < 1e-4


def test_case_077_each_draft_is_judged_by_the_row_before_it():
    """Acceptance looked at a shifted slice of the target's rows."""
    target = torch.nn.functional.one_hot(torch.tensor([[10, 11, 12]]), 20).float()
    two = torch.tensor([2])
    u = torch.full((1, 2), 0.5, dtype=torch.float64)
    for drafts, expected in (
        ([[11, 12]], [10, -1, -1]),
        ([[10, 11]], [10, 11, 12]),
        ([[10, 12]], [10, 11, -1]),
    ):
        ids = torch.tensor(drafts)
        q = torch.nn.functional.one_hot(ids, 20).float()
        assert accept_greedy(ids, two, target).tokens.tolist() == [expected]
        assert accept_sampled(ids, two, q, target, u, u[:, 0]).tokens.tolist() == [expected]


def test_case_078_control_equality_with_a_target_sample_is_lossless():
    """Not a fault: a target sample is emitted always, the draft only decides whether to go on. The
    statistic must not reject it."""

    def equality(drafts, num_drafts, draft_probs, target_probs, u_accept, u_emit):
        batch, gamma = drafts.shape
        u = torch.rand(batch, gamma + 1, dtype=torch.float64, generator=generator)
        samples = draw(target_probs.flatten(0, 1), u.flatten()).view(batch, gamma + 1)
        count = (samples[:, :-1] == drafts).long().cumprod(1).sum(1)
        column = torch.arange(gamma + 1)
        tokens = samples.masked_fill(column > count[:, None], -1)
        return Accepted(count, tokens, torch.zeros(batch, dtype=torch.bool))

    generator = torch.Generator().manual_seed(0)
    toy = Toy.random()
    tokens = first_two_tokens(toy, PLAIN, DRAWS, accept=equality)
    assert joint_p_value(tokens, toy, PLAIN) > 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_079_penalties_count_the_drafts_before_each_position(model, temperature):
    """Penalties forgot the drafts in between, or leaked into the model's own logits."""
    sampling = SamplingParams(temperature=temperature, seed=1)
    prompt = [3] * 12
    penalty = RepetitionPenalty(5.0)
    expected = plain(model, prompt, 30, sampling=sampling, logits_processor=penalty)
    assert expected != plain(model, prompt, 30, sampling=sampling)
    dense = {"policy": Full(), "gamma": 5, "max_new_tokens": 30, "sampling": sampling}
    request = Request(prompt, logits_processor=penalty, **dense)
    other = Request(prompt, **dense)
    output, without = decode(model, request, other)
    # Dense drafts see what the target sees: all are accepted if both rows are penalised alike.
    assert request.statistics.accepted == request.statistics.drafted
    assert without == decode(model, Request(prompt, **dense))[0]
    if temperature == 0:
        assert output == expected

    logits = torch.tensor([2.0, -1.0, 0.5])
    assert penalty(torch.tensor([0, 1, 0]), logits).tolist() == pytest.approx([0.4, -5.0, 0.5])
    assert logits.tolist() == [2.0, -1.0, 0.5]


def test_case_079_four_repeated_drafts_are_penalised_one_by_one():
    """A model that repeats one token for ever: the draft repeats it, the penalty must not."""

    class Parrot(TinyModel):
        def compute_logits(self, hidden):
            logits = torch.linspace(1.0, 0.9, 64).repeat(len(hidden), 1)
            logits[:, 7] = 4.0
            return logits

    model, penalty = Parrot(), RepetitionPenalty(5.0)
    expected = plain(model, [1], 12, logits_processor=penalty)
    assert expected[:3] == [7, 0, 2]
    drafts = torch.tensor([[7, 7, 7, 7]])
    request = Request([1], gamma=4, max_new_tokens=12, logits_processor=penalty, **SMALL)
    assert decode(model, request)[0] == expected
    rows = torch.stack(
        [
            penalty(torch.tensor([1, *drafts[0, :j]]), model.compute_logits(torch.zeros(1, 32))[0])
            for j in range(5)
        ]
    )
    result = accept_greedy(drafts, torch.tensor([4]), rows[None])
    assert result.tokens.tolist() == [[7, 0, -1, -1, -1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_case_080_a_nan_row_ends_its_request_alone(model, temperature, value):
    """NaN logits gave an id beyond the vocabulary, a plausible token, or a request without end."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    broken = ModelWithout(25, value=value)
    long, short = prompt_of(20), prompt_of(3, 1)
    options = {"policy": Full(), "gamma": 4, "sampling": sampling}
    sick = Request(long, max_new_tokens=40, **options)
    healthy = Request(short, max_new_tokens=20, **options)
    outputs = decode(broken, sick, healthy)
    assert sick.finish_reason == "error" and "NaN" in sick.error
    # Positions 20 .. 25 were emitted; the row at position 25 has no distribution.
    reference = Request(long, max_new_tokens=6, **options)
    assert outputs[0] == decode(model, reference)[0]
    assert healthy.finish_reason == "length"
    assert outputs[1] == decode(model, Request(short, max_new_tokens=20, **options))[0]
    at_once = Request(prompt_of(26), **options)
    assert decode(broken, at_once) == [[]] and at_once.finish_reason == "error"


def test_case_080_nan_in_a_draft_row_alone_is_harmless(model):
    """The target decides; a draft without a distribution is only a bad draft."""

    class SickDrafts(TinyModel):
        def compute_logits(self, hidden):
            logits = super().compute_logits(hidden)
            return logits * math.nan if len(hidden) == 1 and self.drafting else logits

        def forward(self, token_ids, positions, attend):
            self.drafting = "Draft" in type(attend).__name__
            return super().forward(token_ids, positions, attend)

    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, seed=8)
        request = Request(prompt_of(9), sampling, max_new_tokens=20, **SMALL)
        output = decode(SickDrafts(), request)[0]
        assert request.finish_reason == "length" and len(output) == 20
        assert all(0 <= token < 64 for token in output)
        if temperature == 0:
            assert output == plain(model, prompt_of(9), 20)


def within(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """The same values, amid memory that holds `value` before the first and after the last."""
    size = tensor.numel()
    whole = torch.full((3 * size,), value).to(tensor.dtype)
    return whole[size : 2 * size].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("around", (0.0, 1.0, 7.0, -1.0, 1e9))
def test_case_082_nothing_is_read_before_the_first_request(around):
    """A prefix array was read at -1 for request 0. Ragged rows are indexed from their own start: a first
    request without drafts gets its own row, whatever lies in the padding and before it in memory."""
    logits = torch.zeros(3, 4, 8)
    logits[0, 0, 5] = logits[1, 0, 6] = logits[1, 1, 2] = logits[2, 0, 1] = 1.0
    logits[0, 1:] = math.nan
    drafts = within(torch.tensor([[999, 999, 999], [6, 999, 999], [3, 3, 3]]), around)
    num_drafts = within(torch.tensor([0, 1, 3]), around)
    result = accept_greedy(drafts, num_drafts, within(logits, around))
    expected = [[5, -1, -1, -1], [6, 2, -1, -1], [1, -1, -1, -1]]
    assert result.tokens.tolist() == expected and result.num_accepted.tolist() == [0, 1, 0]
    assert not result.failed.any()
    # The same drafts and rows, sampled: distributions of one token each.
    target = within(logits.nan_to_num(0.0), around)
    draft = torch.zeros(3, 3, 8)
    draft[1, 0, 6] = draft[2, :, 3] = 1.0
    drafts[drafts == 999] = 0  # an index of both distributions
    u_accept, u_emit = torch.full((3, 3), 0.5), torch.full((3,), 0.5)
    result = accept_sampled(
        drafts, num_drafts, within(draft, around), target, within(u_accept, around), within(u_emit, around)
    )
    assert result.tokens.tolist() == expected and result.num_accepted.tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_083_rows_stay_with_their_requests(model, temperature):
    """Draft rows were grouped in another order than the batch: tokens leaked between requests."""
    policies = [VEGAS, Vegas("weight"), VEGAS, Streaming()]

    def requests() -> list[Request]:
        return [
            Request(
                prompt_of(10 + i, i),
                SamplingParams(temperature=temperature, seed=i),
                gamma=gamma,
                policy=policy,
                max_new_tokens=20,
                **SMALL,
            )
            for i, (gamma, policy) in enumerate(zip((0, 1, 3, 2), policies, strict=True))
        ]

    solo = [decode(model, request)[0] for request in requests()]
    for order in ([2, 0, 3, 1], [3, 1, 0, 2], [0, 1, 2, 3]):
        batch = requests()
        outputs = decode(model, *(batch[i] for i in order))
        assert outputs == [solo[i] for i in order]


def test_case_084_seeded_and_unseeded_requests_mix(model):
    """Unseeded rows were never written: their output was token 0."""
    model = TinyModel(temperature=0.1)

    def batch() -> list[Request]:
        return [
            Request(prompt_of(8), SamplingParams(temperature=0.1, seed=seed), max_new_tokens=25)
            for seed in (None, 7, None)
        ]

    spread = SamplingParams(temperature=3.0)
    first, second = decode(model, *batch()), decode(model, *batch())
    assert first[1] == second[1]
    greedy = plain(model, prompt_of(8), 25)
    # At this temperature the target is all but greedy, so a sane row begins as greedy text does (further on
    # two tokens may be nearly tied).
    assert all(len(o) == 25 and o[:4] == greedy[:4] for o in (*first, *second))
    free = [Request(prompt_of(8), spread, max_new_tokens=25) for _ in range(3)]
    assert len({tuple(o) for o in decode(TinyModel(), *free)}) == 3


@pytest.mark.parametrize("policy", [VEGAS, Vegas("group-stale", look_ahead=1)], ids=lambda p: p.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_086_preemption_does_not_change_the_output(model, policy, temperature):
    """After a preemption drafts were made at another boundary with other random numbers."""
    sampling = SamplingParams(temperature=temperature, seed=11)

    def request() -> Request:
        return Request(prompt_of(20), sampling, policy=policy, gamma=4, max_new_tokens=40, **SMALL)

    undisturbed = request()
    expected = decode(model, undisturbed)[0]
    for every in (1, 3):
        disturbed = request()
        decoder = SpeculativeDecoder(model, new_cache(model), prefill_chunk=8)
        decoder.add(disturbed)
        steps = 0
        while not disturbed.finished:
            decoder.step()
            steps += 1
            if steps % every == 0 and not disturbed.finished:
                decoder.preempt(disturbed)
                assert decoder.cache.num_free_pages == decoder.cache.k.shape[1]
        assert disturbed.output == expected
        before, after = undisturbed.statistics, disturbed.statistics
        assert before.accepted_at == after.accepted_at and before.iterations == after.iterations


def test_case_088_rejection_rolls_back_to_what_was_committed(model):
    """Rejected drafts cleared the whole cache."""
    prompt = prompt_of(10)
    expected = plain(model, prompt, 12)

    class Contrary(TinyModel):
        """Drafts are always wrong."""

        def forward(self, token_ids, positions, attend):
            self.drafting = "Draft" in type(attend).__name__
            return super().forward(token_ids, positions, attend)

        def compute_logits(self, hidden):
            logits = super().compute_logits(hidden)
            return -logits if self.drafting else logits

    model = Contrary()
    decoder = SpeculativeDecoder(model, new_cache(model))
    request = decoder.add(Request(prompt, gamma=4, max_new_tokens=12, **SMALL))
    for n in range(1, 12):
        decoder.step()
        assert len(request.output) == n and request.sequence.length == 10 + n - 1
    decoder.step()
    assert request.output == expected and request.statistics.accepted == 0


def test_case_089_positions_are_wound_back(model):
    """Positions were not wound back after a rejection. One-token prompt, drafts often wrong."""
    for seed in range(5):
        model = TinyModel(seed=seed)
        request = Request([seed], gamma=5, max_new_tokens=64, ratio=0.1, min_tokens=2)
        assert decode(model, request)[0] == plain(model, [seed], 64)
        assert 0 < request.statistics.accepted < request.statistics.drafted


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_case_091_drafts_are_clipped_at_the_end_of_the_context(left):
    """Drafts ran past the limit; placeholders of -1 flowed into gathers."""
    model = TinyModel(max_position=64)
    prompt = prompt_of(64 - left)
    expected = plain(model, prompt, 100)
    seen: list[int] = []
    original = model.forward

    def watched(token_ids, positions, attend):
        assert int(token_ids.min()) >= 0 and int(positions.max()) < 64
        seen.extend(positions.tolist())
        return original(token_ids, positions, attend)

    model.forward = watched  # type: ignore[method-assign]
    request = Request(prompt, gamma=6, max_new_tokens=100, **SMALL)
    assert decode(model, request) == [expected] and len(expected) == left
    assert request.finish_reason == "context" and max(seen) <= 63
    with pytest.raises(ValueError, match="`prompt` must be shorter"):
        decode(model, Request(prompt_of(64), gamma=6))


def test_case_092_a_stop_inside_an_accepted_block_ends_the_output(model):
    """Only the last committed token was tested for EOS."""
    prompt = prompt_of(15)
    text = plain(model, prompt, 12)
    position = next(i for i in range(3, 12) if text[i] not in text[:i])
    eos = text[position]
    for gamma in (0, 4, 9):
        request = Request(prompt, policy=Full(), gamma=gamma, max_new_tokens=12, stop_token_ids={eos})
        assert decode(model, request) == [text[: position + 1]]
        assert request.finish_reason == "stop"


@pytest.mark.parametrize("n", range(1, 9))
def test_case_094_the_budget_is_charged_by_token(model, n):
    """The budget was charged per block: output too short, usage too high."""
    prompt = prompt_of(15)
    request = Request(prompt, policy=Full(), gamma=4, max_new_tokens=n)
    assert decode(model, request) == [plain(model, prompt, n)]
    assert len(request.output) == n and request.statistics.tokens == n - 1


@pytest.mark.parametrize("gamma", [0, 2, 5, 9])
def test_case_095_an_earlier_stop_beats_the_length_cap(gamma):
    """A block that held a stop and crossed the cap was cut at the cap, with the wrong reason."""

    class Script(TinyModel):
        def forward(self, token_ids, positions, attend):
            self.positions = positions
            return super().forward(token_ids, positions, attend)

        def compute_logits(self, hidden):
            words = torch.tensor([10, 11, 9, 20, 21, 22, 23, 24])[self.positions - 5]
            return torch.nn.functional.one_hot(words, 64).float()

    options = {"gamma": gamma, "policy": Full(), "stop_token_ids": (9,)}
    request = Request(prompt_of(6), max_new_tokens=5, **options)
    assert decode(Script(), request) == [[10, 11, 9]]
    assert request.finish_reason == "stop"
    short = Request(prompt_of(6), max_new_tokens=2, **options)
    assert decode(Script(), short) == [[10, 11]] and short.finish_reason == "length"
    edge = Request(prompt_of(6), max_new_tokens=3, **options)
    assert decode(Script(), edge) == [[10, 11, 9]] and edge.finish_reason == "stop"
