"""Pictures: which positions the layers selected and which drafts were accepted; a tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vegas_ops.speculative.tuning import Tuning

_BINS = 240


def selection_histogram(selections: Sequence[torch.Tensor], context: int, bins: int) -> torch.Tensor:
    """(layers, bins) fp32: the share of each bin's tokens that a layer selected, mean over rounds.

    selections: per round (layers, width) or (layers, num_heads_kv, width) token indices, -1 padded.
    """
    first = selections[0]
    layers = first.shape[0]
    counts = torch.zeros(layers, bins)
    for selection in selections:
        indices = selection.cpu().reshape(layers, -1).long()
        bin_of = (indices * bins // context).clamp(max=bins - 1)
        valid = (indices >= 0).float()
        counts.scatter_add_(1, bin_of.clamp(min=0), valid)
    lists = first[0].numel() // first.shape[-1] if first.shape[-1] else 1
    edges = torch.arange(bins + 1) * context
    per_bin = (-(-edges[1:] // bins) + (-edges[:-1] // bins)).clamp(min=1)
    return counts / (len(selections) * lists * per_bin)


def acceptance_by_position(drafted_at: Sequence[int], accepted_at: Sequence[int]) -> list[float]:
    """Share of the drafts at each position that were accepted, given that those before them were."""
    reached = [drafted_at[0], *accepted_at] if drafted_at else []
    return [
        accepted / min(before, drafted) if min(before, drafted) else 0.0
        for drafted, before, accepted in zip(drafted_at, reached, accepted_at, strict=False)
    ]


def plot_run(
    path: Path,
    *,
    title: str,
    selections: Sequence[torch.Tensor],
    context: int,
    drafted_at: Sequence[int],
    accepted_at: Sequence[int],
) -> None:
    """Writes the PNG. Raises ValueError where the folder cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4), width_ratios=(3, 1), layout="constrained")
    figure.suptitle(title)
    usable = [s for s in selections if s.shape[-1]]
    if usable:
        share = selection_histogram(usable, context, min(_BINS, context)).numpy()
        layers = share.shape[0]
        image = left.imshow(
            100 * share,
            aspect="auto",
            interpolation="nearest",
            cmap="magma",
            extent=(0, context, layers - 0.5, -0.5),
            vmin=0,
        )
        figure.colorbar(image, ax=left, label="tokens selected, %", pad=0.01)
        left.set_yticks(range(0, layers, max(layers // 12, 1)))
    else:
        left.text(0.5, 0.5, "nothing was selected", ha="center", transform=left.transAxes)
    left.set(xlabel="position in the context, tokens", ylabel="layer")
    left.set_title(f"what drafts read, {len(selections)} rounds")

    accepted = acceptance_by_position(drafted_at, accepted_at)
    positions = list(range(1, len(accepted) + 1))
    right.bar(positions, [100 * a for a in accepted], color="tab:orange")
    right.set(xlabel="draft position", ylabel="accepted, %", ylim=(0, 100), xticks=positions)
    right.set_title("accepted, if all before it were")
    _save(figure, path)


def plot_tuning(path: Path, tuning: Tuning) -> None:
    """Writes the three steps of a tuning as a PNG. Raises ValueError where it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    plain = tuning.trials[0].tokens_per_second
    figure.suptitle(f"{tuning.policy}: {tuning.batch} x {tuning.context:,} tokens")
    for step, panel in enumerate(panels, 1):
        trials = [trial for trial in tuning.trials if trial.step == step]
        x = [trial.gamma if step == 2 else trial.ratio for trial in trials]
        if step == 1:
            y = [100 * trial.acceptance for trial in trials]
            panel.set(ylabel="drafts accepted, %", title=f"acceptance, γ = {trials[0].gamma}")
        else:
            y = [trial.tokens_per_second for trial in trials]
            fixed = f"ratio {trials[0].ratio:g}" if step == 2 else f"γ = {trials[0].gamma}"
            panel.axhline(plain, color="gray", linestyle="--", label="plain decoding")
            panel.set(ylabel="tokens/s", title=f"throughput, {fixed}")
            panel.legend()
            panel.fill_between(x, [t.slowest for t in trials], [t.fastest for t in trials], alpha=0.25)
        panel.plot(x, y, marker="o", color="tab:orange")
        panel.set_ylim(bottom=0)
        panel.set_xlabel("γ, drafts per verification" if step == 2 else "ratio, share of the context")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ValueError(f"`plot` must be a file that can be written, got {path}: {error}") from None
    finally:
        plt.close(figure)
