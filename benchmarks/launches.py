"""What an iteration launches, and where its time goes on a GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vegas_ops.speculative import Request, SpeculativeDecoder
from vegas_ops.speculative.round import Round

_REPLAYS = 10
_PROFILED = 3  # replays of a phase under the profiler
_PHASED = 3  # steps until the phases that run in one graph are captured one by one


def short(name: str) -> str:
    """A kernel's name without return type, namespaces' arguments and templates."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name.split("(")[0].split("<")[0]


def phases(
    decoder: SpeculativeDecoder, batch: int, gamma: int
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Microseconds of each captured phase, replayed one after the other, as the batch is now, and where
    they go (`account`)."""
    rounds = [r for r in decoder._rounds.values() if r.shape.steps == gamma and r.shape.batch >= batch]
    found: dict[str, float] = {}
    accounts: dict[str, dict[str, Any]] = {}
    for (phase, modes), graph in rounds[-1]._graphs.items() if rounds else ():
        # Two phases would move the requests on; a first selection's graph is not the loop's.
        if phase in ("advance", "turn") or any(mode.first for mode in modes):
            continue
        times = []
        for _ in range(_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end))
        found[phase] = round(sorted(times)[_REPLAYS // 2], 1)
        accounts[phase] = account(graph)
    return found, accounts


def account(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """Where a replay's time goes (`account_of`)."""
    graph.replay()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(_PROFILED):
            graph.replay()
            torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, short(event.name))
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return account_of(spans, _PROFILED)


def account_of(spans: Sequence[tuple[float, float, str]], replays: int) -> dict[str, Any]:
    """Of replays of the same launches: (begin, end, name) in microseconds, in the order of begins. kernels:
    launches and microseconds of a replay by name, each moment counted for the kernel that began first of
    those that run in it, since one may wait while the one before ends; idle_us: when none runs."""
    counts: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    idle, reached = 0.0, 0.0
    for i, (start, end, name) in enumerate(spans):
        if i % max(len(spans) // replays, 1) == 0:
            reached = start
        idle += max(start - reached, 0.0)
        reached = max(reached, start)
        counts[name] += 1
        micros[name] += max(end - reached, 0.0)
        reached = max(reached, end)
    kernels = {name: [counts[name] / replays, round(t / replays, 1)] for name, t in micros.most_common()}
    return {"kernels": kernels, "idle_us": round(idle / replays, 1)}


def iteration(
    decoder: SpeculativeDecoder, held: Sequence[Request], steps: int = 4, **options: Any
) -> dict[str, Any]:
    """Launches of one iteration by kernel (count, microseconds in all), the phases' replays, where their
    time goes, and the host's time: that of a step but for its wait for the device."""
    waits: list[float] = []
    # Four steps before it counts, timed ones, profiled ones, and some of which each phase is a graph; all
    # requests should live that long.
    most = (options.get("gamma", 0) + 1) * decoder.read_every  # tokens of a step
    room = decoder.max_position - max(len(prompt.prompt) for prompt in held)
    steps = max(min(steps, (room // most - 4 - _PHASED) // 2), 1)
    room = min((4 + 2 * steps + _PHASED) * most + 8, room)
    requests = [
        decoder.add(Request(p.prompt, max_new_tokens=room, share_prefix_with=p, **options)) for p in held
    ]

    def done() -> int:
        return max(request.statistics.iterations for request in requests)

    for _ in range(4):
        decoder.step()
    reads = {name: getattr(Round, name) for name in ("read", "read_log")}
    for name, read in reads.items():
        setattr(Round, name, _timed(read, waits))
    try:
        torch.cuda.synchronize()
        before, start = done(), time.perf_counter()
        for _ in range(steps):
            decoder.step()
        whole, iterations = time.perf_counter() - start, max(done() - before, 1)
        torch.cuda.synchronize()
    finally:
        for name, read in reads.items():
            setattr(Round, name, read)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    before = done()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(steps):
            decoder.step()
        torch.cuda.synchronize()
    profiled = max(done() - before, 1)
    decoder._unread.settle()
    decoder.profile = True
    for _ in range(_PHASED):
        decoder.step()
    decoder.profile = False
    replayed, accounts = phases(decoder, len(held), options.get("gamma", 0))
    for request in requests:
        decoder.abort(request)
    counts: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counts[short(event.name)] += 1
            micros[short(event.name)] += event.time_range.elapsed_us()
    return {
        "launches": round(sum(counts.values()) / profiled, 1),
        "kernels": {
            name: [round(counts[name] / profiled, 2), round(total / profiled, 1)]
            for name, total in micros.most_common()
        },
        "phases_us": replayed,
        "accounts": accounts,
        "host_us": round(1e6 * (whole - sum(waits)) / iterations, 1),
        "wait_us": round(1e6 * sum(waits) / iterations, 1),
    }


def _timed(read: Callable[..., Any], waits: list[float]) -> Callable[..., Any]:
    """`read`, which notes how long it took."""

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = read(*arguments)
        waits.append(time.perf_counter() - start)
        return result

    return timed
