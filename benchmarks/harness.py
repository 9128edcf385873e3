"""Shared by the benchmark scripts: arguments, memory to read from, timing, and the run over the cells."""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import hashlib
import importlib.util
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

# The scripts run from a built tree as well as beside an installed package.
if importlib.util.find_spec("vegas_ops") is None:
    sys.path.insert(0, str(report.ROOT))

Launch = Callable[[], object]

CUDA_POOL_BYTES = 34.5e9  # 64 requests of 128K tokens fit, 8 KV heads of 128 in bf16
CPU_POOL_BYTES = 0.6e9
# Touched between two uses of a slice: several times the last-level cache, so that no slice is still in it.
CUDA_COLD_BYTES = 600e6
CPU_COLD_BYTES = 256e6
MAX_LAUNCHES = 64
MIN_ROUNDS = 7
MIN_PAIRS = 31


@dataclass
class Contender:
    """Equal launches on different slices of memory; `result` reads what the first of them wrote."""

    launches: list[Launch]
    result: Callable[[], Tensor] | None = None


@dataclass
class Setup:
    """All that one cell needs, allocated.

    `peers` are built one by one, so that one that fails takes nothing else with it. `reference` returns what
    the first launch wrote and what it should have written; peers with a result are compared with ours too.
    `variants` are further launches of ours with another option each, timed in pairs with it.
    """

    ours: Contender
    peers: dict[str, Callable[[], Contender]] = field(default_factory=dict)
    variants: dict[str, list[Launch]] = field(default_factory=dict)
    reference: Callable[[], tuple[Tensor, Tensor]] | None = None
    tolerance: float = 0.02


@dataclass(frozen=True)
class Cell:
    """One line of the results; `build` allocates, `bytes` is what any kernel for it has to read."""

    op: str
    case: dict[str, Any]
    bytes: int
    regime: str
    panel: str
    build: Callable[[Bench], Setup]


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch, a sample per round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def fastest(self) -> float:
        return min(self.samples)


class Pool:
    """K and V memory of random values that the launches of a cell cut slices from, once per dtype."""

    def __init__(self, device: torch.device, size_bytes: float) -> None:
        if device.type == "cuda":
            size_bytes = min(size_bytes, 0.5 * torch.cuda.mem_get_info(device)[0])
        self.device = device
        self.bytes_each = int(size_bytes / 2) >> 20 << 20
        self._pools: dict[torch.dtype, Tensor] = {}

    def _count(self, dtype: torch.dtype) -> int:
        """Elements each of K and V; of fp8, which is compared with bf16, as many as of bf16."""
        return self.bytes_each // max(2, dtype.itemsize)

    def _of(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        count = self._count(dtype)
        if dtype not in self._pools:
            if dtype.itemsize > 1:
                self._pools.clear()
            memory = torch.empty(2 * count, dtype=dtype, device=self.device)
            for half in (memory[:count], memory[count:]):
                block = half[: 1 << 24]
                block.copy_(torch.randn(block.numel(), device=self.device))
                for start in range(block.numel(), count, block.numel()):
                    part = half[start : start + block.numel()]
                    part.copy_(block[: part.numel()])
            self._pools[dtype] = memory
        return self._pools[dtype][:count], self._pools[dtype][count:]

    def slices(
        self, shape: Sequence[int], dtype: torch.dtype, touched_bytes: int
    ) -> list[tuple[Tensor, Tensor]]:
        """K and V views of `shape`, so many that reading `touched_bytes` of each leaves the next one cold."""
        count = math.prod(shape)
        fitting = self._count(dtype) // count
        if fitting == 0:
            raise DoesNotFit(f"K and V of {2 * count * dtype.itemsize / 1e9:.1f} GB do not fit the pool")
        cold = CUDA_COLD_BYTES if self.device.type == "cuda" else CPU_COLD_BYTES
        wanted = max(4, math.ceil(cold / touched_bytes))
        keys, values = self._of(dtype)
        parts = [slice(i * count, (i + 1) * count) for i in range(min(fitting, wanted, MAX_LAUNCHES))]
        return [(keys[part].view(*shape), values[part].view(*shape)) for part in parts]

    def bytes_view(self) -> Tensor:
        """All of it as bytes, for plain reads."""
        if not self._pools:
            self._of(torch.bfloat16)
        return next(iter(self._pools.values())).view(torch.uint8)


class DoesNotFit(Exception):
    """The cell needs more memory than the pool has."""


class PlainRead:
    """The read kernel of read_ceiling.cu, compiled with nvcc when the benchmark runs."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._read = library.vegas_read_all
        self._sink = torch.zeros(4, dtype=torch.int32, device=device)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.shapes = [(multiprocessors * blocks, loads) for blocks in (2, 4, 8, 32) for loads in (4, 8)]

    @staticmethod
    def compile(device: torch.device) -> PlainRead | None:
        """None where nvcc is missing or fails."""
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            return None
        source = Path(__file__).with_name("read_ceiling.cu")
        major, minor = torch.cuda.get_device_capability(device)
        name = hashlib.sha256(source.read_bytes() + bytes([major, minor])).hexdigest()[:12]
        folder = Path(tempfile.mkdtemp(prefix="vegas-read-"))
        library = folder / f"{name}.so"
        target = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
        options = ["-O3", "-std=c++17", target, "-shared", "-Xcompiler=-fPIC", "-o", str(library)]
        if subprocess.run([nvcc, *options, str(source)], capture_output=True).returncode != 0:
            return None
        return PlainRead(ctypes.CDLL(str(library)), device)

    def __call__(self, memory: Tensor, shape: tuple[int, int]) -> None:
        blocks, loads = shape
        status = self._read(
            ctypes.c_void_p(memory.data_ptr()),
            ctypes.c_size_t(memory.numel() * memory.element_size()),
            ctypes.c_void_p(self._sink.data_ptr()),
            blocks,
            loads,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if status != 0:
            raise RuntimeError(f"the plain read failed with CUDA error {status}")


def _captured(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _cuda_sampler(launches: Sequence[Launch]) -> Callable[[], float]:
    graph = _captured(launches)

    def sample() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(launches)

    return sample


def _cpu_sampler(launches: Sequence[Launch], clock: Callable[[], float]) -> Callable[[], float]:
    def timed(repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            launches[state["next"] % len(launches)]()
            state["next"] += 1
        return (clock() - start) * 1e6

    state = {"next": 0}
    timed(1)
    once = min(timed(1) for _ in range(2))
    # Short calls are timed in groups, long enough for the clock.
    repeats = max(1, min(256, math.ceil(3000 / max(once, 1.0))))
    return lambda: timed(repeats) / repeats


def time_interleaved(
    device: torch.device,
    contenders: dict[str, Sequence[Launch]],
    seconds: float,
    rounds_at_least: int = MIN_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Rounds over all contenders in turn, so that all meet the same machine; and the errors of the failed.

    On CUDA a sample is the replay of a graph of all launches, by events, over their number; on the CPU one
    call (several, if short) by the clock given. Each contender is warmed up before; the order of every other
    round is reversed.
    """
    samplers: dict[str, Callable[[], float]] = {}
    errors: dict[str, str] = {}
    for name, launches in contenders.items():
        try:
            cuda = device.type == "cuda"
            samplers[name] = _cuda_sampler(launches) if cuda else _cpu_sampler(launches, clock)
        except Exception as error:
            errors[name] = describe(error)
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    start = time.perf_counter()
    done = 0
    while done < rounds_at_least or (done < 60 and time.perf_counter() - start < seconds):
        order = list(samplers) if done % 2 == 0 else list(reversed(samplers))
        for name in order:
            samples[name].append(samplers[name]())
        done += 1
    return {name: Timing(tuple(values)) for name, values in samples.items()}, errors


def median_ratio(numerator: Timing, denominator: Timing) -> dict[str, float | int]:
    """Median of the rounds' ratios with its distribution-free 95 % interval (binomial order statistics)."""
    ratios = sorted(a / b for a, b in zip(numerator.samples, denominator.samples, strict=True))
    count = len(ratios)
    half = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))
    return {"ratio": statistics.median(ratios), "low": ratios[low], "high": ratios[high], "pairs": count}


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


class Bench:
    """One run of a script: its device, memory, read ceiling and budget."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.quick: bool = arguments.quick
        self.seconds: float = arguments.seconds
        self.started = time.monotonic()
        self.clock = time.thread_time if arguments.cpu_time else time.perf_counter
        self.pool = Pool(self.device, arguments.pool_gb * 1e9)
        self.plain_read = PlainRead.compile(self.device) if self.is_cuda else None
        self._read_shapes: dict[int, tuple[int, int]] = {}  # bytes: grid
        self.ceiling_gbs, self.ceiling_method = self._measure_ceiling()

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def out_of_time(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    def _measure_ceiling(self) -> tuple[float, str]:
        """GB/s of the fastest plain read of a buffer that dwarfs every cache, and how it was read."""
        if not self.is_cuda:
            buffer = torch.ones(int(0.125e9 if self.quick else 0.25e9), dtype=torch.float32)
            total = functools.partial(torch.sum, buffer)
            timings, _ = time_interleaved(self.device, {"sum": [total]}, 1.0, clock=self.clock)
            threads = torch.get_num_threads()
            method = f"torch.sum over {buffer.nbytes / 1e9:.1f} GB, {threads} threads, fastest"
            return buffer.nbytes / timings["sum"].fastest / 1e3, method
        memory = self.pool.bytes_view()
        contenders: dict[str, Sequence[Launch]] = {}
        if self.plain_read is not None:
            read = self.plain_read
            for shape in read.shapes:
                contenders[f"{shape}"] = [functools.partial(read, memory, shape)]
            timings, errors = time_interleaved(self.device, contenders, 0.5)
            if timings:
                fastest = min(timings, key=lambda name: timings[name].median)
                method = f"16-byte loads over {memory.nbytes / 1e9:.1f} GB, (blocks, in flight) {fastest}"
                return memory.nbytes / timings[fastest].median / 1e3, method
            self.plain_read = None
            print(f"the plain read failed: {errors}")
        floats = memory.view(torch.bfloat16)
        total = functools.partial(torch.sum, floats, dtype=torch.float32)
        timings, _ = time_interleaved(self.device, {"sum": [total]}, 0.5)
        return memory.nbytes / timings["sum"].median / 1e3, f"torch.sum over {memory.nbytes / 1e9:.1f} GB"

    def plain_reads(self, size: int, launches: int) -> list[Launch] | None:
        """Plain reads of as many bytes, each elsewhere: what a small problem could reach at best."""
        memory = self.pool.bytes_view() if self.plain_read else None
        size = size // 16 * 16
        if memory is None or self.plain_read is None or size == 0 or memory.numel() < size:
            return None
        read = self.plain_read
        parts = [memory[i * size : (i + 1) * size] for i in range(min(launches, memory.numel() // size))]

        def reads(shape: tuple[int, int]) -> list[Launch]:
            return [functools.partial(read, part, shape) for part in parts]

        if size not in self._read_shapes:
            # Which grid reads fastest depends on the size: below a wave of blocks, one tile each.
            timings, _ = time_interleaved(
                self.device, {f"{i}": reads(s) for i, s in enumerate(read.shapes)}, 0.0
            )
            if not timings:
                return None
            self._read_shapes[size] = read.shapes[int(min(timings, key=lambda name: timings[name].median))]
        return reads(self._read_shapes[size])

    def measure(self, cell: Cell) -> report.Record:
        """The cell's record: times, or why there are none."""
        record: report.Record = {
            "op": cell.op,
            "case": cell.case,
            "regime": cell.regime,
            "panel": cell.panel,
            "bytes": cell.bytes,
            "floor_us": cell.bytes / self.ceiling_gbs / 1e3,
        }
        try:
            record.update(self._timed(cell, cell.build(self)))
        except DoesNotFit as reason:
            record["skipped"] = str(reason)
        except Exception as error:
            record["error"] = describe(error)
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
        return record

    def _timed(self, cell: Cell, setup: Setup) -> report.Record:
        setup.ours.launches[0]()
        if setup.reference is not None:
            _compare("the reference", *setup.reference(), setup.tolerance)
        contenders: dict[str, Sequence[Launch]] = {"ours": setup.ours.launches}
        peer_errors: dict[str, str] = {}
        for name, build in setup.peers.items():
            try:
                peer = build()
                peer.launches[0]()
                if peer.result is not None and setup.ours.result is not None:
                    _compare(name, setup.ours.result(), peer.result(), setup.tolerance)
            except Disagrees:
                raise
            except Exception as error:
                peer_errors[name] = describe(error)
                continue
            contenders[name] = peer.launches
        contenders.update(setup.variants)
        reads = None if setup.variants else self.plain_reads(cell.bytes, len(setup.ours.launches))
        if reads is not None:
            contenders["plain read"] = reads
        seconds = (0.1 if self.is_cuda else 1.5) * len(contenders) / (3 if self.quick else 1)
        rounds = MIN_PAIRS if setup.variants else (5 if self.quick else MIN_ROUNDS)
        timings, errors = time_interleaved(self.device, contenders, seconds, rounds, self.clock)
        if "ours" in errors:
            raise RuntimeError(errors["ours"])
        peer_errors.update({name: error for name, error in errors.items() if name in setup.peers})
        ours = timings["ours"]
        record: report.Record = {"us": ours.median, "us_min": ours.fastest, "us_max": max(ours.samples)}
        if "plain read" in timings:
            record["read_us"] = timings["plain read"].median
        record["peers"] = {name: timings[name].median for name in setup.peers if name in timings}
        record["peers_min"] = {name: timings[name].fastest for name in setup.peers if name in timings}
        if peer_errors:
            record["peer_errors"] = peer_errors
        if setup.variants:
            if missing := {name: error for name, error in errors.items() if name in setup.variants}:
                raise RuntimeError("; ".join(f"{name}: {error}" for name, error in missing.items()))
            record["variants"] = {
                name: {"us": timings[name].median, **median_ratio(timings[name], ours)}
                for name in setup.variants
            }
        record["launches"] = len(setup.ours.launches)
        record["rounds"] = len(ours.samples)
        return record


class Disagrees(Exception):
    """A result is not what another computation says: nothing to time."""


def _compare(name: str, ours: Tensor, other: Tensor, tolerance: float) -> None:
    ours, other = ours.double(), other.double()
    error = ((ours - other).norm() / other.norm().clamp(min=1e-30)).item()
    if not error <= tolerance:
        raise Disagrees(f"ours and {name} differ: relative error {error:.2g}, allowed {tolerance:.2g}")


def parse_arguments(
    script: str,
    documentation: str | None,
    argv: Sequence[str] | None,
    groups: Sequence[str] = (),
    quick_groups: Sequence[str] = (),
) -> argparse.Namespace:
    """The arguments that all scripts share, and the choice among groups of cells where a script has some.

    None takes the command line's.
    """
    description = (documentation or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"benchmarks/{script}.py", description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda when there is one")
    parser.add_argument("--quick", action="store_true", help="a few cells, small memory")
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the record that is kept, not *-quick.jsonl",
    )
    parser.add_argument(
        "--seconds", type=float, help="budget, default 240 (30); what it leaves out is listed"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=report.ROOT / "benchmarks" / "results",
        help="results go to OUT/<device name>/ (default: %(default)s)",
    )
    parser.add_argument("--pool-gb", type=float, help="memory for K and V (default: CUDA 34.5, CPU 0.6)")
    if groups:
        parser.add_argument(
            "--cells",
            nargs="+",
            choices=groups,
            metavar="GROUP",
            help=f"groups of cells, measured in the order given: {', '.join(groups)} "
            f"(default: all in this order; with --quick {', '.join(quick_groups)})",
        )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="the thread's CPU time instead of the wall clock, for one thread on a machine that others use",
    )
    arguments = parser.parse_args(argv)
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device` must be cpu: this torch sees no GPU")
    if arguments.seconds is not None and arguments.seconds < 0:
        parser.error(f"`--seconds` must be 0 or more, got {arguments.seconds}")
    if arguments.pool_gb is not None and arguments.pool_gb <= 0:
        parser.error(f"`--pool-gb` must be above 0, got {arguments.pool_gb}")
    if arguments.cpu_time and (arguments.device != "cpu" or torch.get_num_threads() != 1):
        parser.error(
            "`--cpu-time` must go with --device cpu and OMP_NUM_THREADS=1, "
            f"got {arguments.device} and {torch.get_num_threads()} threads"
        )
    if arguments.record and arguments.quick:
        parser.error("`--record` must go without --quick: a record holds what its device can measure")
    if groups and arguments.cells is None:
        arguments.cells = quick_groups if arguments.quick else groups
    if arguments.seconds is None:
        arguments.seconds = 30.0 if arguments.quick else 240.0
    if arguments.pool_gb is None:
        full = CUDA_POOL_BYTES if arguments.device == "cuda" else CPU_POOL_BYTES
        arguments.pool_gb = (min(full, 2.5e9) if arguments.quick else full) / 1e9
    return arguments


def _progress(cells: Sequence[Cell]) -> Iterator[Cell]:
    from rich.progress import track

    yield from track(cells, description="measuring")


def run(
    script: str,
    arguments: argparse.Namespace,
    bench: Bench,
    cells: Sequence[Cell],
    peers: dict[str, str],
) -> int:
    """Measures the cells in their order until the budget is spent; writes, prints and plots.

    Returns 1 if a cell of ours failed, else 0.
    """
    head = report.header(bench.device, bench.ceiling_gbs, bench.ceiling_method, peers)
    head["quick"] = bench.quick
    if not bench.is_cuda:
        head["clock"] = "CPU time" if arguments.cpu_time else "wall clock"
    folder = arguments.out / report.slug(report.device_name(bench.device))
    name = script if arguments.record else f"{script}-quick"
    results = report.ResultFile(folder / f"{name}.jsonl")
    results.write(head)
    records: list[report.Record] = []
    # What is imported by now stays; each cell's collection then takes no time over it.
    gc.freeze()
    for cell in _progress(cells):
        if bench.out_of_time():
            record: report.Record = {
                "op": cell.op,
                "case": cell.case,
                "skipped": f"the budget of {bench.seconds:.0f} s was spent",
            }
        else:
            record = bench.measure(cell)
        results.write(record)
        records.append(record)
    results.close()
    report.print_tables(head, records)
    report.plot(head, records, folder / f"{name}.png")
    print(f"wrote {results.path}")
    return int(any("error" in record for record in records))
