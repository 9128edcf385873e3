"""The tuner's three steps, on a machine whose speeds are given."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from test_loop import PROMPTS, decoder_of
from tiny_model import TinyModel

from vegas_ops.speculative import (
    POLICIES,
    VEGAS_LOOKAHEAD,
    Request,
    SamplingParams,
    Trial,
    Tuning,
    Vegas,
    tune,
    tuning,
)


class Machine:
    """Stands in for `decode_together`: acceptance saturates at ratio 0.05, a draft costs what its
    ratio reads, and `draft_cost` on top; a verification costs 1."""

    def __init__(self, draft_cost: float = 0.05) -> None:
        self.draft_cost, self.calls = draft_cost, []

    def __call__(self, decoder, prompts, new_tokens, **options):
        self.calls.append((options, new_tokens))
        gamma, ratio = options["gamma"], options["ratio"]
        accepted = {0.02: 0.5, 0.03: 0.7, 0.05: 0.79}.get(ratio, 0.8)
        per_round = 1 + sum(accepted**i for i in range(1, gamma + 1))
        requests = []
        for _ in prompts:
            request = Request([1], **options)
            s = request.statistics
            s.iterations, s.tokens = 1000, round(1000 * per_round)
            s.drafted, s.accepted = 1000 * gamma, round(1000 * gamma * accepted)
            requests.append(request)
        seconds = 1000 * (1 + gamma * (self.draft_cost + ratio))
        return tuning.Decoded(requests, sum(r.statistics.tokens for r in requests), seconds)


def run(monkeypatch, machine: Machine, **options) -> Tuning:
    monkeypatch.setattr(tuning, "decode_together", machine)
    # No floor: the prompts are short.
    return tune(decoder_of(TinyModel()), [Request(p) for p in PROMPTS], **{"min_tokens": 0, **options})


def test_the_three_steps(monkeypatch):
    machine = Machine()
    seen: list[tuple[Trial, int]] = []
    best = run(monkeypatch, machine, on_trial=lambda *arguments: seen.append(arguments))
    trials = {step: [t for t in best.trials if t.step == step] for step in range(4)}
    assert [t.ratio for t in trials[1]] == list(tuning.RATIOS)
    assert {t.gamma for t in trials[1]} == {tuning.FIRST_GAMMA}
    # 0.79 is within 0.02 of the best acceptance, 0.70 is not.
    assert {t.ratio for t in trials[2]} == {0.05}
    assert [t.gamma for t in trials[2]] == list(tuning.GAMMAS)
    fastest = max(trials[2], key=lambda t: t.tokens_per_second)
    assert {t.gamma for t in trials[3]} == {fastest.gamma} == {best.gamma}
    assert best.ratio == max(trials[3], key=lambda t: t.tokens_per_second).ratio
    speed = max(t.tokens_per_second for t in trials[3])
    assert speed == max(t.tokens_per_second for t in best.trials) > trials[0][0].tokens_per_second
    assert [trial for trial, _ in seen] == list(best.trials)
    assert {total for _, total in seen} == {len(best.trials)}
    # Each setting once, though steps share some: warmed up, then measured three times.
    settings = [(options["gamma"], options["ratio"]) for options, _ in machine.calls]
    assert len(settings) == 4 * len(set(settings)) == 4 * len({(t.gamma, t.ratio) for t in best.trials})


def test_plain_decoding_wins_where_drafts_cost_too_much(monkeypatch):
    best = run(monkeypatch, Machine(draft_cost=1.0))
    assert best.gamma == 0 and best.trials[0].gamma == 0


def test_ratios_that_read_the_same_tokens_are_one_setting(monkeypatch):
    """The longest prompt has 90 tokens, and 10 more come: 0.02 to 0.07 list 7 tokens at most."""

    class Jittery(Machine):
        """Each setting below the floor would have another speed."""

        def __call__(self, *arguments, **options):
            decoded = super().__call__(*arguments, **options)
            return decoded._replace(seconds=decoded.seconds / (10 if options["ratio"] == 0.02 else 1))

    assert tuning.same_budgets(tuning.RATIOS, 100, 7) == [0.02, 0.03, 0.05, 0.07]
    assert tuning.same_budgets(tuning.RATIOS, 101, 7) == [0.02, 0.03, 0.05]
    assert tuning.same_budgets(tuning.RATIOS, 100, 1) == []
    seen: list[tuple[Trial, int]] = []
    best = run(
        monkeypatch, Jittery(), new_tokens=10, min_tokens=7,
        on_trial=lambda *arguments: seen.append(arguments),
    )  # fmt: skip
    for step in (1, 3):
        assert [t.ratio for t in best.trials if t.step == step] == [0.07, 0.1, 0.15]
    assert best.ratio == 0.07 and {total for _, total in seen} == {len(best.trials)}
    assert run(monkeypatch, Jittery(), new_tokens=10, min_tokens=1).ratio == 0.02


def test_one_lucky_run_chooses_nothing(monkeypatch):
    """Each setting's second measured run takes a tenth of the time: the median does not see it."""

    class Noisy(Machine):
        def __call__(self, *arguments, **options):
            decoded = super().__call__(*arguments, **options)
            lucky = len(self.calls) % 4 == 3 and options["gamma"] == 2
            return decoded._replace(seconds=decoded.seconds / 10) if lucky else decoded

    best, quiet = run(monkeypatch, Noisy()), run(monkeypatch, Machine())
    assert (best.gamma, best.ratio) == (quiet.gamma, quiet.ratio) and best.gamma != 2
    for trial in best.trials:
        assert trial.slowest == trial.tokens_per_second
        assert trial.fastest == pytest.approx(trial.slowest * (10 if trial.gamma == 2 else 1))
    once = run(monkeypatch, Noisy(), repeats=2)
    assert all(t.slowest <= t.tokens_per_second <= t.fastest for t in once.trials)


def test_options_reach_every_request(monkeypatch):
    machine = Machine()
    sampling = SamplingParams(temperature=0.6, seed=0)
    best = run(
        monkeypatch, machine, policy=VEGAS_LOOKAHEAD, gammas=[4], ratios=[0.1], new_tokens=9,
        min_tokens=32, sampling=sampling,
    )  # fmt: skip
    for options, _ in machine.calls:
        assert (options["policy"], options["min_tokens"], options["sampling"]) == (
            VEGAS_LOOKAHEAD, 32, sampling
        )  # fmt: skip
    assert [t.step for t in best.trials] == [0, 1, 2, 3] and max(n for _, n in machine.calls) == 9
    assert (best.policy, best.context, best.batch, best.min_tokens) == ("vegas-lookahead", 90, 4, 32)


def test_speed_is_that_of_the_whole_batch(monkeypatch):
    """The clock stops before the step in which the first request ends; all are decoded to their ends."""
    clock = itertools.count()
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    decoder = decoder_of(TinyModel())
    held = [decoder.hold_prompt(p) for p in PROMPTS[1:]]
    decoded = tuning.decode_together(decoder, held, 20, gamma=3, ratio=0.5, min_tokens=3)
    assert [len(request.output) for request in decoded.requests] == [20] * 3
    assert decoded.seconds == len(decoded.steps) == decoded.iterations
    ends = [request.statistics.iterations for request in decoded.requests]
    assert decoded.iterations == min(ends) - 1 < max(ends) - 1
    assert 3 * decoded.iterations < decoded.tokens < 3 * 19
    assert decoded.tokens_per_second == decoded.tokens / decoded.seconds


def test_on_a_real_decoder(tmp_path):
    decoder = decoder_of(TinyModel(), num_tokens=8192)
    held = [decoder.hold_prompt(p) for p in PROMPTS[1:]]
    best = tune(decoder, held, gammas=[2, 4], ratios=[0.2, 0.6], new_tokens=12, min_tokens=3)
    assert all(t.tokens_per_second > 0 for t in best.trials)
    assert all(1 <= t.tokens_per_iteration <= t.gamma + 1 for t in best.trials)
    assert decoder.running == decoder.waiting == []
    best.save(tmp_path / "tuned.json")
    assert Tuning.load(tmp_path / "tuned.json") == best
    with pytest.raises(ValueError, match="`tuned` must be a readable file"):
        Tuning.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("options", "name"),
    [({"gammas": [0]}, "gammas"), ({"ratios": []}, "ratios"), ({"ratios": [1.5]}, "ratios"),
     ({"new_tokens": 1}, "new_tokens"), ({"new_tokens": 10**6}, "new_tokens"), ({"repeats": 0}, "repeats"),
     ({"gammas": [3, 10**9]}, "gammas")],
)  # fmt: skip
def test_mistakes_name_the_argument(options, name):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        tune(decoder_of(TinyModel()), [Request([1])], **options)


def test_a_tuning_of_any_variant_is_read_back(tmp_path):
    decoder = decoder_of(TinyModel(), num_tokens=8192)
    held = [decoder.hold_prompt(PROMPTS[1])]
    policy = Vegas("weight", "last", look_ahead=2, refresh=3)
    best = tune(decoder, held, policy, gammas=[2], ratios=[0.5], new_tokens=8, min_tokens=3)
    best.save(tmp_path / "tuned.json")
    assert Tuning.load(tmp_path / "tuned.json") == best and POLICIES[best.policy] == policy


def test_a_batch_that_does_not_fit_is_not_timed():
    """Requests that wait for pages would be timed as if they ran."""
    decoder = decoder_of(TinyModel(), num_tokens=len(PROMPTS[1]) + 64)
    held = decoder.hold_prompt(PROMPTS[1])
    with pytest.raises(ValueError, match="must all run at a time, got 8"):
        tuning.decode_together(decoder, [held] * 8, 40, gamma=2)
    assert not decoder.waiting and not decoder.running
    assert len(tuning.decode_together(decoder, [held], 20, gamma=2).requests[0].output) == 20
