"""Pictures of what `loop.py` recorded: throughput, acceptance by draft position, time by phase, tuning."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vegas_ops.plots import acceptance_by_position

Record = dict[str, Any]


def draw(path: Path) -> list[Path]:
    """Writes one PNG a batch size, `loop-bN.png`, beside the records; returns their paths. Nothing
    without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    _, *cells = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    pictures = []
    for batch in dict.fromkeys(cell["case"]["batch"] for cell in cells):
        picture = path.with_name(f"{path.stem}-b{batch}.png")
        _draw_batch(picture, [cell for cell in cells if cell["case"]["batch"] == batch])
        pictures.append(picture)
    return pictures


def _draw_batch(path: Path, cells: Sequence[Record]) -> None:
    import matplotlib.pyplot as plt

    case = cells[0]["case"]
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    acceptance = case.get("acceptance", "measured")
    figure.suptitle(f"{case['batch']} x {case['context']:,} tokens, acceptance {acceptance}")
    _throughput(axes[0][0], cells)
    _acceptance(axes[0][1], cells)
    _phases(axes[1][0], cells)
    _sweep(axes[1][1], cells)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _name(cell: Record) -> str:
    case = cell["case"]
    return case["policy"] if not case["gamma"] else f"{case['policy']}\nγ {case['gamma']}, {case['ratio']:g}"


def _throughput(axis: Any, cells: Sequence[Record]) -> None:
    errors = [cell.get("tokens_per_second_interval") or 0.0 for cell in cells]
    bars = axis.bar(range(len(cells)), [c["tokens_per_second"] for c in cells], yerr=errors, capsize=3)
    axis.bar_label(bars, [f"{cell['speed_up']:.2f}x" for cell in cells], fontsize=8)
    axis.set_xticks(range(len(cells)), [_name(cell) for cell in cells], fontsize=7)
    axis.set(title="throughput, 95 % interval over iterations", ylabel="tokens/s")


def _acceptance(axis: Any, cells: Sequence[Record]) -> None:
    for cell in cells:
        if cell["case"]["gamma"]:
            rates = acceptance_by_position(cell["drafted_at"], cell["accepted_at"])
            axis.plot(range(1, len(rates) + 1), rates, marker="o", label=cell["case"]["policy"])
    axis.set(title="accepted, given those before", xlabel="draft position", ylabel="share", ylim=(0, 1.02))
    if axis.lines:
        axis.legend(fontsize=7)
    else:
        axis.set_visible(False)


def _phases(axis: Any, cells: Sequence[Record]) -> None:
    shown = [cell for cell in cells if cell.get("phases_us")]
    bottom = [0.0] * len(shown)
    for phase in ("draft", "verify", "select"):
        heights = [cell["phases_us"].get(phase, 0.0) / 1e3 for cell in shown]
        axis.bar(range(len(shown)), heights, bottom=bottom, label=phase)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axis.set_xticks(range(len(shown)), [_name(cell) for cell in shown], fontsize=7)
    axis.set(title="an iteration's phases", ylabel="ms")
    if shown:
        axis.legend(fontsize=7)
    else:
        axis.set_visible(False)


def _sweep(axis: Any, cells: Sequence[Record]) -> None:
    """Every trial of a tuning: speed by gamma (solid) at one ratio, by ratio (dots) at one gamma."""
    for cell in cells:
        trials = cell.get("trials") or []
        gammas = sorted((t["gamma"], t["tokens_per_second"]) for t in trials if t["step"] == 2)
        if not gammas:
            continue
        (line,) = axis.plot(*zip(*gammas, strict=True), marker="o", label=cell["case"]["policy"])
        for trial in trials:
            if trial["step"] == 3:
                axis.plot(trial["gamma"], trial["tokens_per_second"], ".", color=line.get_color())
                axis.annotate(f"{trial['ratio']:g}", (trial["gamma"], trial["tokens_per_second"]), fontsize=6)
    axis.set(title="tuning: by γ; dots: other ratios at the best γ", xlabel="γ", ylabel="tokens/s")
    if axis.lines:
        axis.legend(fontsize=7)
    else:
        axis.set_visible(False)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(*draw(Path(name)), sep="\n")
