"""What the benchmarks write down: the header, JSON lines, tables with ratios, and a plot."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "CMakeLists.txt",
    "csrc",
    "vegas_ops/jit.py",
    "vegas_ops/models/fused.py",
    "vegas_ops/models/wide.py",
    "vegas_ops/ops.py",
    "vegas_ops/speculative/bookkeeping.py",
    "vegas_ops/speculative/page_scores.py",
    "vegas_ops/speculative/sampling_kernels.py",
)

Record = dict[str, Any]


def sources_hash(root: Path = ROOT) -> str:
    """First 16 hex digits of the sha256 over the sources of the kernels and of their bindings.

    Files that are not committed yet count as well. Equal to: git ls-files -co --exclude-standard SOURCES |
    LC_ALL=C sort | xargs -d '\\n' cat | sha256sum | cut -c1-16. Without git the same paths are walked,
    leaving out what a build puts there.
    """
    paths: list[str] = []
    if (root / ".git").exists() and shutil.which("git"):
        listing = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-zco", "--exclude-standard", *SOURCES],
            capture_output=True,
            text=True,
        )
        paths = [path for path in listing.stdout.split("\0") if path and (root / path).is_file()]
    if not paths:
        for source in SOURCES:
            base = root / source
            files = [base] if base.is_file() else [file for file in base.rglob("*") if file.is_file()]
            paths += [
                file.relative_to(root).as_posix()
                for file in files
                if file.suffix not in (".so", ".pyc") and "__pycache__" not in file.parts
            ]
    digest = hashlib.sha256()
    for path in sorted(paths, key=os.fsencode):
        digest.update((root / path).read_bytes())
    return digest.hexdigest()[:16]


def cpu_name() -> str:
    """The processor's name, for headers and folder names."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def slug(name: str) -> str:
    """A folder name: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _driver() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else None


def environment(device: torch.device) -> Record:
    """What is measured, and on what."""
    import vegas_ops

    cuda = device.type == "cuda"
    record: Record = {
        "sources": sources_hash(),
        "vegas_ops": vegas_ops.__version__,
        "gpu": device_name(device) if cuda else None,
        "cpu": cpu_name(),
        "driver": _driver() if cuda else None,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if not cuda:
        record["threads"] = torch.get_num_threads()
        record["cores"] = os.cpu_count()
        record["load_average"] = os.getloadavg()[0]
    return record


def header(device: torch.device, ceiling_gbs: float, ceiling_method: str, peers: dict[str, str]) -> Record:
    """The first line of a result file: the environment, and the read ceiling met there."""
    ceiling = {"read_ceiling_gbs": round(ceiling_gbs, 1), "read_ceiling_method": ceiling_method}
    return {**environment(device), **ceiling, "peers": peers}


class ResultFile:
    """JSON lines, each written out at once, so that a run cut short keeps what it measured."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


_SIZES = ("num_heads_q", "num_heads_kv", "head_dim", "batch", "context")


def _heads_text(case: Record) -> str:
    return f"{case['num_heads_q']}/{case['num_heads_kv']}/{case['head_dim']}" if "num_heads_q" in case else ""


def _options_text(case: Record, left_out: Iterable[str] = ()) -> str:
    shown = {key: value for key, value in case.items() if key not in (*_SIZES, *left_out)}
    return " ".join(f"{key} {value}" for key, value in shown.items() if value is not None)


def _case_text(case: Record, left_out: Iterable[str] = ()) -> str:
    context = case["context"]
    length = f"{context // 1024}K" if context >= 1024 and context % 1024 == 0 else str(context)
    return f"{_heads_text(case)} {case['batch']} x {length} {_options_text(case, left_out)}".strip()


def _common(cells: list[Record]) -> list[str]:
    """Options that all cells share; a table names them once."""
    first = cells[0]["case"]
    return [
        key for key in first if key != "rows" and all(cell["case"].get(key) == first[key] for cell in cells)
    ]


def _ratio(value: float) -> str:
    style = "green" if value >= 1.0 else "red"
    return f"[{style}]{value:.2f}x[/{style}]"


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _plain_read(cell: Record) -> float:
    """Microseconds of a plain read of as many bytes; at the read ceiling where none was timed."""
    return float(cell["read_us"] if "read_us" in cell else cell["floor_us"])


def _print_cells(console: Console, head: Record, cells: list[Record]) -> None:
    names = list(dict.fromkeys(name for cell in cells for name in cell["peers"]))
    # On a CPU that others use too, the fastest sample of each says more than the median.
    on_cpu = head["gpu"] is None
    common = _common(cells)
    shared = _options_text({key: cells[0]["case"][key] for key in common})
    ceiling = f"read ceiling {head['read_ceiling_gbs']:,.0f} GB/s"
    table = Table(title=f"{head['gpu'] or head['cpu']}, {ceiling}; all cells: {shared}")
    table.add_column("case")
    for column in ("ours us", "read us", "read / ours", "ceiling / ours"):
        table.add_column(column, justify="right")
    for name in names:
        table.add_column(f"{name} us", justify="right")
        table.add_column("ours is", justify="right")
        if on_cpu:
            table.add_column("fastest", justify="right")
    for cell in cells:
        row = [
            _case_text(cell["case"], common),
            _microseconds(cell["us"]),
            _microseconds(_plain_read(cell)),
            f"{_plain_read(cell) / cell['us']:.2f}",
            f"{cell['floor_us'] / cell['us']:.2f}",
        ]
        for name in names:
            peer = cell["peers"].get(name)
            if peer:
                row += [_microseconds(peer), _ratio(peer / cell["us"])]
            else:
                row += ["", ""]
            if on_cpu:
                row.append(_ratio(cell["peers_min"][name] / cell["us_min"]) if peer else "")
        table.add_row(*row)
    console.print(table)


def _spread(ratios: list[float]) -> str:
    """Geometric mean, the worst and the best."""
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def _print_regimes(console: Console, cells: list[Record]) -> None:
    names = list(dict.fromkeys(name for cell in cells for name in cell["peers"]))
    title = "by regime: geometric mean (worst to best) of the time named over ours"
    table = Table(title=title)
    table.add_column("regime")
    for column in ("cells", "plain read", "best peer", *names):
        table.add_column(column, justify="right")

    def add(label: str, group: list[Record]) -> None:
        reads = [_plain_read(cell) / cell["us"] for cell in group]
        best = [min(cell["peers"].values()) / cell["us"] for cell in group if cell["peers"]]
        each = [
            _spread([cell["peers"][name] / cell["us"] for cell in group if name in cell["peers"]])
            for name in names
        ]
        table.add_row(label, str(len(group)), _spread(reads), _spread(best), *each)

    for regime in sorted({cell["regime"] for cell in cells}):
        group = [cell for cell in cells if cell["regime"] == regime]
        add(regime, group)
        shapes = dict.fromkeys(_heads_text(cell["case"]) for cell in group)
        for shape in shapes if len(shapes) > 1 else ():
            add(f"  {shape}", [cell for cell in group if _heads_text(cell["case"]) == shape])
    console.print(table)


def _print_pairs(console: Console, pairs: list[Record]) -> None:
    table = Table(title="interleaved pairs: median of the variant's time over that of the case")
    for column in ("case", "us", "variant", "us", "ratio", "95 % interval", "pairs"):
        table.add_column(column)
    common = _common(pairs)
    for cell in pairs:
        for name, pair in cell["variants"].items():
            ratio, interval = f"{pair['ratio']:.3f}", f"{pair['low']:.3f} to {pair['high']:.3f}"
            times = _microseconds(cell["us"]), name, _microseconds(pair["us"])
            table.add_row(_case_text(cell["case"], common), *times, ratio, interval, str(pair["pairs"]))
    console.print(table)


def _measured(cells: list[Record]) -> list[Record]:
    return [cell for cell in cells if "us" in cell and "variants" not in cell]


def print_tables(head: Record, cells: list[Record]) -> None:
    """Every measured cell, a line per regime, and what failed or was left out."""
    console = Console() if Console().is_terminal else Console(width=200)
    if measured := _measured(cells):
        _print_cells(console, head, measured)
        _print_regimes(console, measured)
    if pairs := [cell for cell in cells if "variants" in cell]:
        _print_pairs(console, pairs)
    failures: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for failure in cell.get("peer_errors", {}).items():
            failures.setdefault(failure, []).append(_case_text(cell["case"]))
    for (name, error), where in failures.items():
        console.print(f"peer {name} failed in {len(where)} cells, first {where[0]}: {error}", markup=False)
    for cell in cells:
        if "error" in cell:
            console.print(f"FAILED {cell['op']} {_case_text(cell['case'])}: {cell['error']}", markup=False)
    for reason in dict.fromkeys(cell["skipped"] for cell in cells if "skipped" in cell):
        count = sum(cell.get("skipped") == reason for cell in cells)
        console.print(f"not measured: {count} cells, {reason}", markup=False)


def plot(head: Record, cells: list[Record], path: Path) -> None:
    """Effective bandwidth over bytes read, one panel per regime family, the read ceiling drawn in."""
    measured = _measured(cells)
    if not measured:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(cell["panel"] for cell in measured))
    names = list(dict.fromkeys(name for cell in measured for name in cell["peers"]))
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(5.2 * columns, 4.0 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        group = [cell for cell in measured if cell["panel"] == panel]
        ceiling = head["read_ceiling_gbs"]
        axis.axhline(ceiling, color="black", linewidth=1, linestyle="--", label="read ceiling")
        read = [cell for cell in group if "read_us" in cell]
        plain = [(cell["bytes"], cell["bytes"] / cell["read_us"] / 1e3) for cell in read]
        if plain:
            axis.plot(*zip(*sorted(plain), strict=True), color="0.6", linewidth=1, label="plain read")
        for index, name in enumerate(names):
            points = [
                (cell["bytes"], cell["bytes"] / cell["peers"][name] / 1e3)
                for cell in group
                if name in cell["peers"]
            ]
            if points:
                axis.scatter(*zip(*points, strict=True), s=18, marker="s", color=f"C{index + 1}", label=name)
        ours = [(cell["bytes"], cell["bytes"] / cell["us"] / 1e3) for cell in group]
        axis.scatter(*zip(*ours, strict=True), s=26, color="C0", label="vegas_ops", zorder=3)
        axis.set(xscale="log", yscale="log", title=panel, xlabel="bytes read per launch", ylabel="GB/s")
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(f"{cells[0]['op']}: {head['gpu'] or head['cpu']}, {head['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    for result in sys.argv[1:]:
        lines = Path(result).read_text(encoding="utf-8").splitlines()
        first, *measured_cells = (json.loads(line) for line in lines)
        print_tables(first, measured_cells)
