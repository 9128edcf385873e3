#!/usr/bin/env python
"""Random calls and sequences of calls of the three ops against their oracles, until time or cases run out.

A case follows from its seed: what fails is printed with the command that repeats it. Valid calls run twice
bit for bit, on a GPU on two streams and, a third of them, under a captured graph whose lengths change between
replays; on the CPU with one thread and with three. One case in ten makes a valid call wrong in one
argument: it must be refused by name, with all outputs as they were. The calls of a process share workspaces.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STUCK = 120  # seconds without a word from a process, after which its case counts as hanging
MOST_FAILURES = 20
MOST_PROCESSES = 48
EVERY = 10  # seconds between two lines of progress where the output is no terminal


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--seconds", type=positive, help="stop after this time (default 60, unless --cases is given)"
    )
    parser.add_argument("--cases", type=positive, help="stop after this many cases")
    parser.add_argument("--seed", type=int, help="of all cases; drawn and printed if absent")
    parser.add_argument(
        "--processes",
        type=positive,
        help=f"default: one per core, {MOST_PROCESSES} at most; they take turns on all GPUs",
    )
    parser.add_argument("--case", type=int, metavar="SEED", help="run this one case here, with its traceback")
    return parser.parse_args()


def load(device: str, worker: int = 0) -> Any:
    """The cases of the tests, and what those of one process share."""
    sys.path.insert(0, str(ROOT / "tests"))
    sys.path.append(str(ROOT))  # a build in place, unless the package is installed
    import op_fuzz
    import torch

    torch.set_num_threads(1)  # oracles take the time, and are computed on the CPU
    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a call with nothing to do
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("fuzz: --device cuda needs a GPU, and torch sees none")
    if device == "cuda":
        torch.cuda.set_device(worker % torch.cuda.device_count())
    around = op_fuzz.Surroundings(torch.device(device))
    return lambda seed: op_fuzz.fuzz_case(seed, around)


def seed_of(base: int, index: int) -> int:
    return random.Random(f"{base}:{index}").getrandbits(48)


def work(worker: int, step: int, options: argparse.Namespace, current: Any, stop: Any, results: Any) -> None:
    run = load(options.device, worker)
    results.put(("ready", worker, None, 0))
    index = worker
    while not stop.is_set() and (options.cases is None or index < options.cases):
        seed = current[worker] = seed_of(options.seed, index)
        try:
            kind, compared = run(seed)
            results.put(("passed", worker, kind, compared))
        except Exception:
            before = f"(the case of its process after {index // step} others)\n"
            results.put(("failed", worker, (seed, before + traceback.format_exc()), 0))
            if options.device == "cuda":
                import torch

                try:
                    torch.cuda.synchronize()
                except RuntimeError:  # the GPU is lost to this process
                    break
        index += step
    results.put(("done", worker, None, 0))


class Run:
    """All processes, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.count = options.processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        # torch is imported once, in a process that never touches a GPU.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self.current = context.Array("q", [-1] * self.count)
        self.stop, self.results = context.Event(), context.Queue()
        self.kinds: Counter[str] = Counter()
        self.compared = 0
        self.failures: list[tuple[int, str]] = []
        self.started: float | None = None
        self.processes = [
            context.Process(target=work, args=(i, self.count, options, self.current, self.stop, self.results))
            for i in range(self.count)
        ]

    def cases(self) -> int:
        return sum(self.kinds.values()) + len(self.failures)

    def seconds(self) -> float:
        return time.monotonic() - self.started if self.started else 0.0

    def rate(self) -> float:
        return self.cases() / max(self.seconds(), 1e-9)

    def follow(self, show: Any) -> None:
        for process in self.processes:
            process.start()
        heard = dict.fromkeys(range(self.count), time.monotonic())
        while heard:
            try:
                what, worker, value, compared = self.results.get(timeout=1)
                self._note(what, worker, value, compared, heard)
            except queue.Empty:
                self._look_after(heard)
            late = self.options.seconds and self.seconds() > self.options.seconds
            if late or len(self.failures) >= MOST_FAILURES:
                self.stop.set()
            show(self)
        for process in self.processes:
            process.join(5)

    def _note(self, what: str, worker: int, value: Any, compared: int, heard: dict[int, float]) -> None:
        if worker in heard:
            heard[worker] = time.monotonic()
        if what == "ready" and self.started is None:
            self.started = time.monotonic()
        elif what == "passed":
            self.kinds[value] += 1
            self.compared += compared
        elif what == "failed":
            self.failures.append(value)
        elif what == "done":
            heard.pop(worker, None)

    def _look_after(self, heard: dict[int, float]) -> None:
        now = time.monotonic()
        for worker, since in list(heard.items()):
            process, seed = self.processes[worker], self.current[worker]
            if not process.is_alive():
                self.failures.append((seed, f"the process ended with exit code {process.exitcode}"))
            elif now - since > STUCK:
                self.failures.append((seed, f"no end after {STUCK} s"))
                process.kill()
            else:
                continue
            del heard[worker]


def main() -> int:
    options = arguments()
    if options.case is not None:
        kind, compared = load(options.device)(options.case)
        print(f"case {options.case} passed: {kind}, {compared} comparisons")
        return 0
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32)
    if options.cases is None and options.seconds is None:
        options.seconds = 60

    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(width=110)
    console.print(f"fuzzing on {options.device}, --seed {options.seed}")
    run = Run(options)
    columns = (
        TextColumn("{task.completed} cases, {task.fields[rate]:.0f} a second, {task.fields[failed]} failed"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    shown = 0

    def show(r: Run) -> None:
        nonlocal shown
        failed = len(r.failures)
        progress.update(task, completed=r.cases(), rate=r.rate(), failed=failed)
        if not console.is_terminal and r.seconds() >= shown + EVERY:
            shown = int(r.seconds())
            print(f"{shown} s: {r.cases()} cases, {r.rate():.0f} a second, {failed} failed", flush=True)

    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=options.cases, rate=0.0, failed=0)
        run.follow(show)
    for seed, text in run.failures:
        console.print(f"[red]failed[/]: python tools/fuzz.py --device {options.device} --case {seed}")
        console.print(escape(text))
    if run.failures:
        console.print(
            "A case that passes alone follows from what others left in a workspace: repeat the run with "
            f"--seed {options.seed} --processes {run.count}",
            soft_wrap=True,
        )
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(run.kinds.items()))
    console.print(
        f"{run.cases()} cases ({kinds}), {run.compared} comparisons with oracles, "
        f"{len(run.failures)} failed, {run.seconds():.0f} s, {run.rate():.0f} cases/s with {run.count} "
        f"processes, seed {options.seed}",
        soft_wrap=True,
    )
    return 1 if run.failures or not run.kinds else 0


if __name__ == "__main__":
    sys.exit(main())
