"""Which gamma and ratio decode fastest: the paper's three steps, measured on one's own prompts.

1. At a middling gamma, the smallest ratio at which acceptance saturates.
2. At that ratio, the gamma with the highest throughput.
3. At that gamma, the ratio with the highest throughput.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from vegas_ops.arguments import check_callable, check_integer, check_kind, check_number
from vegas_ops.speculative.loop import SpeculativeDecoder
from vegas_ops.speculative.policies import POLICIES, VEGAS
from vegas_ops.speculative.request import Request
from vegas_ops.speculative.round import no_garbage_collection
from vegas_ops.speculative.sampling import SamplingParams
from vegas_ops.speculative.selection import Policy, budget

GAMMAS = (2, 3, 4, 5, 6, 7, 8, 10)
RATIOS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15)
FIRST_GAMMA = 6
MAX_GAMMA = 1024  # far beyond what pays anywhere
REPEATS = 3  # runs of a setting
MIN_TOKENS = 256
SATURATED = 0.02  # acceptance within this of the best counts as the best


@dataclass(frozen=True)
class Trial:
    """One setting, measured. step: 1 to 3, 0 for plain decoding; acceptance: accepted drafts of all;
    tokens_per_second: the median of the repeats, between `slowest` and `fastest`."""

    step: int
    gamma: int
    ratio: float
    acceptance: float
    tokens_per_iteration: float
    tokens_per_second: float
    slowest: float
    fastest: float


@dataclass(frozen=True)
class Tuning:
    """The fastest setting of a policy; gamma 0 where plain decoding was faster than all.

    context: tokens of the longest prompt; batch: prompts decoded together; trials: in the order in
    which they ran, plain decoding first.
    """

    policy: str
    gamma: int
    ratio: float
    min_tokens: int
    context: int
    batch: int
    trials: tuple[Trial, ...]

    def save(self, path: str | Path) -> None:
        check_kind("path", path, (str, Path), "a path")
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Tuning:
        """Reads what `save` wrote; ValueError, naming the file, for anything else."""
        check_kind("path", path, (str, Path), "a path")
        try:
            values = _fields_of(Tuning, json.loads(Path(path).read_text(encoding="utf-8")))
            if not isinstance(values["trials"], list):
                raise ValueError(f"`trials` must be a list, got {values['trials']!r}")
            trials = tuple(Trial(**_fields_of(Trial, trial)) for trial in values.pop("trials"))
            tuning = Tuning(**values, trials=trials)
            Request([0], policy=POLICIES[tuning.policy], gamma=tuning.gamma, ratio=tuning.ratio)
        except OSError as error:
            raise ValueError(f"`tuned` must be a readable file: {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"`tuned` must be what `vegas-ops tune` wrote: {path}: {error}") from None
        return tuning


def _fields_of(record: type, values: Any) -> dict[str, Any]:
    """What a JSON object says of a record's fields, all there and of their types; else ValueError."""
    name = record.__name__.lower()
    if not isinstance(values, dict):
        raise ValueError(f"a {name} must be an object, got {values!r:.80}")
    for field in fields(record):
        if field.name not in values:
            raise ValueError(f"a {name} must have `{field.name}`")
        value, kind = values[field.name], field.type
        kinds = {"int": (int,), "float": (int, float), "str": (str,)}.get(str(kind), (object,))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind != "bool"):
            raise ValueError(f"`{field.name}` must be {kind}, got {value!r:.80}")
    return {field.name: values[field.name] for field in fields(record)}


class Decoded(NamedTuple):
    """Requests that were decoded together, and the speed while all of them ran: tokens emitted from
    each one's first token to the last step in which none ended, over the seconds until they were read. (To
    end takes the host time: pages are given back one by one. Where the first step ends one, it counts.)
    steps: the same of every step, by the host's clock; iterations: in all of them."""

    requests: list[Request]
    tokens: int
    seconds: float
    steps: Sequence[tuple[int, float]] = ()
    iterations: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def decode_together(
    decoder: SpeculativeDecoder, prompts: Sequence[Request], new_tokens: int, **options: Any
) -> Decoded:
    """Continues held prompts (`SpeculativeDecoder.hold_prompt`) as one batch, to their ends.
    options: of the requests. ValueError where the model's logits fail, or the cache holds too few of
    them at a time."""
    requests = [
        decoder.add(Request(p.prompt, max_new_tokens=new_tokens, share_prefix_with=p, **options))
        for p in prompts
    ]
    decoder.step()
    # Not when the device has done what goes ahead of the first iteration: that is a part of it.
    start = time.perf_counter()
    steps: list[tuple[int, float]] = []
    last, iterations = start, 0
    with no_garbage_collection():
        while not any(request.finished for request in requests):
            if decoder.waiting:
                for request in requests:
                    decoder.abort(request)
                raise ValueError(
                    f"`prompts` must all run at a time, got {len(requests)}, too many for the cache"
                )
            new = sum(len(tokens) for _, tokens in decoder.step())
            now = time.perf_counter()
            if not steps or not any(request.finished for request in requests):
                steps.append((new, now - last))
                last, iterations = now, max(request.statistics.iterations for request in requests)
    seconds = last - start
    decoder.run()
    for request in requests:
        if request.finish_reason == "error":
            raise ValueError(f"decoding failed: {request.error}")
    return Decoded(requests, sum(tokens for tokens, _ in steps), seconds, steps, iterations)


def check_settings(gammas: Sequence[int], ratios: Sequence[float], new_tokens: int, repeats: int) -> None:
    """ValueError or TypeError, naming the argument, for what `tune` would refuse whatever the model."""
    for name, values in (("gammas", gammas), ("ratios", ratios)):
        check_kind(name, values, Sequence, "a list")
    for gamma in gammas:
        check_integer("gammas", gamma)
    for ratio in ratios:
        check_number("ratios", ratio)
    for name, values, ok in (
        ("gammas", gammas, all(1 <= g < MAX_GAMMA for g in gammas)),
        ("ratios", ratios, all(0 < r <= 1 for r in ratios)),
    ):
        if not values or not ok:
            span = f"[1, {MAX_GAMMA})" if name == "gammas" else "(0, 1]"
            raise ValueError(f"`{name}` must hold at least one, all in {span}, got {list(values)}")
    check_integer("new_tokens", new_tokens, 2)
    check_integer("repeats", repeats, 1)


def same_budgets(ratios: Sequence[float], keys: int, min_tokens: int = MIN_TOKENS) -> list[float]:
    """The ratios, ascending, at which drafts read `min_tokens` tokens in contexts up to `keys`, whichever
    of them it is. `tune` tries the last alone."""
    return sorted({r for r in ratios if budget(r, min_tokens, keys, keys) <= min_tokens})


def tune(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Request],
    policy: Policy = VEGAS,
    *,
    gammas: Sequence[int] = GAMMAS,
    ratios: Sequence[float] = RATIOS,
    new_tokens: int = 64,
    repeats: int = REPEATS,
    min_tokens: int = MIN_TOKENS,
    sampling: SamplingParams | None = None,
    on_trial: Callable[[Trial, int], None] | None = None,
) -> Tuning:
    """Measures and chooses. prompts: held by the decoder, decoded together; new_tokens: of each, at
    every setting. Ratios whose budget is `min_tokens` throughout are one setting, and the largest of
    them stands for all (`same_budgets`). on_trial(trial, total) after every trial; total: trials in
    all, at most.

    A setting's speed is the median of `repeats` runs; one before them warms up and captures graphs. A
    setting that comes up twice is measured once.
    """
    check_settings(gammas, ratios, new_tokens, repeats)
    check_integer("min_tokens", min_tokens, 0)
    check_kind("decoder", decoder, SpeculativeDecoder, "a SpeculativeDecoder")
    check_kind("policy", policy, Policy, "a Policy, such as POLICIES['vegas']")
    check_kind("sampling", sampling, (SamplingParams, type(None)), "SamplingParams or None")
    check_callable("on_trial", on_trial)
    check_kind("prompts", prompts, Sequence, "a list of requests")
    for prompt in prompts:
        check_kind("prompts", prompt, Request, "requests that `hold_prompt` gave")
    if not prompts:
        raise ValueError("`prompts` must hold at least one, got none")
    room = decoder.max_position - max(len(prompt.prompt) for prompt in prompts)
    if new_tokens > room:
        raise ValueError(f"`new_tokens` must be at most {room}, what the context leaves, got {new_tokens}")
    keys = max(len(prompt.prompt) for prompt in prompts) + new_tokens
    # Measured apart, equal lists would differ by noise, which would choose among them.
    skipped = same_budgets(ratios, keys, min_tokens)[:-1]
    gammas, ratios = sorted(set(gammas)), sorted(set(ratios).difference(skipped))
    first_gamma = min(gammas, key=lambda g: abs(g - FIRST_GAMMA))
    total = 1 + len(ratios) + len(gammas) + len(ratios)
    trials: list[Trial] = []

    def measure(step: int, gamma: int, ratio: float) -> Trial:
        known = next((t for t in trials if (t.gamma, t.ratio) == (gamma, ratio)), None)
        if known is None:
            options = {
                "policy": policy, "gamma": gamma, "ratio": ratio, "min_tokens": min_tokens,
                "sampling": sampling or SamplingParams(),
            }  # fmt: skip
            decode_together(decoder, prompts, new_tokens, **options)
            runs = [decode_together(decoder, prompts, new_tokens, **options) for _ in range(repeats)]
            speeds = [decoded.tokens_per_second for decoded in runs]
            s = [request.statistics for decoded in runs for request in decoded.requests]
            drafted = sum(x.drafted for x in s)
            known = Trial(
                step, gamma, ratio,
                acceptance=sum(x.accepted for x in s) / drafted if drafted else 0.0,
                tokens_per_iteration=sum(x.tokens for x in s) / sum(x.iterations for x in s),
                tokens_per_second=median(speeds), slowest=min(speeds), fastest=max(speeds),
            )  # fmt: skip
        else:
            known = Trial(**{**asdict(known), "step": step})
        trials.append(known)
        if on_trial is not None:
            on_trial(known, total)
        return known

    plain = measure(0, 0, 1.0)
    by_ratio = [measure(1, first_gamma, ratio) for ratio in ratios]
    saturated = max(trial.acceptance for trial in by_ratio) - SATURATED
    ratio = next(trial.ratio for trial in by_ratio if trial.acceptance >= saturated)
    gamma = max((measure(2, g, ratio) for g in gammas), key=_speed).gamma
    best = max((measure(3, gamma, r) for r in ratios), key=_speed)
    return Tuning(
        policy.name,
        best.gamma if best.tokens_per_second > plain.tokens_per_second else 0,
        best.ratio,
        min_tokens,
        max(len(prompt.prompt) for prompt in prompts),
        len(prompts),
        tuple(trials),
    )


def _speed(trial: Trial) -> float:
    return trial.tokens_per_second
