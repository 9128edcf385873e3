"""`vegas-ops tune`: the fastest gamma and ratio for a model, a machine and one's own prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vegas_ops.demo import DEMO_CONTEXT, standard_library_text
from vegas_ops.plots import plot_tuning
from vegas_ops.session import PAGE_SIZE, Session, read_text
from vegas_ops.speculative import Policy, SamplingParams
from vegas_ops.speculative.tuning import MIN_TOKENS, Trial, Tuning, check_settings, same_budgets, tune

STEPS = ("plain decoding", "1: accepted by ratio", "2: speed by γ", "3: speed by ratio")


@dataclass(frozen=True)
class TuneOptions:
    model: Path
    prompts: list[Path]  # none: the standard library
    context: int | None  # tokens of each prompt at most: its last ones
    new_tokens: int
    repeats: int
    gammas: list[int]
    ratios: list[float]
    policy: Policy
    sampling: SamplingParams
    device: str
    dtype: torch.dtype | None
    batch_invariant: bool
    out: Path
    plot: Path


def run_tune(options: TuneOptions, console: Console) -> int:
    """Measures, shows a table, writes the choice and a plot."""
    # Before minutes of work rather than behind them.
    check_settings(options.gammas, options.ratios, options.new_tokens, options.repeats)
    for name, path, suffix in (("out", options.out, ".json"), ("plot", options.plot, ".png")):
        if path.suffix.lower() != suffix or not path.absolute().parent.is_dir():
            raise ValueError(f"`{name}` must be a {suffix} file in an existing folder, got {str(path)!r}")
    session = Session(
        options.model, device=options.device, dtype=options.dtype, batch_invariant=options.batch_invariant
    )
    texts = [read_text(path) for path in options.prompts] or [standard_library_text()]
    context = session.context(options.context, DEMO_CONTEXT, options.new_tokens)
    prompts = [session.encode(text, options.new_tokens, keep=context) for text in texts]
    longest = max(map(len, prompts))
    most = max(options.gammas) + options.new_tokens + 4 * PAGE_SIZE
    decoder = session.decoder(sum(len(ids) + most for ids in prompts))
    console.print(
        f"[bold]{options.model.name}[/] · {options.policy.name} · "
        f"{len(prompts)} x {longest:,} tokens · {session.model.device.type}",
        highlight=False,
        soft_wrap=True,
    )
    same = same_budgets(options.ratios, longest + options.new_tokens)
    if len(same) > 1:
        console.print(
            f"ratios {', '.join(f'{ratio:g}' for ratio in same)}: all the same {min(MIN_TOKENS, longest)} "
            f"tokens at this context, tried as {same[-1]:g}",
            highlight=False,
            soft_wrap=True,
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading the prompts", total=None)
        held = [decoder.hold_prompt(ids) for ids in prompts]

        def on_trial(trial: Trial, total: int) -> None:
            progress.update(task, description=STEPS[trial.step], total=total, advance=1)

        tuning = tune(
            decoder,
            held,
            options.policy,
            gammas=options.gammas,
            ratios=options.ratios,
            new_tokens=options.new_tokens,
            repeats=options.repeats,
            sampling=options.sampling,
            on_trial=on_trial,
        )
    console.print(_table(tuning, options.repeats))
    plain, best = tuning.trials[0], max(tuning.trials, key=lambda trial: trial.tokens_per_second)
    if tuning.gamma:
        drafting = [t for t in tuning.trials if t.gamma and (t.gamma, t.ratio) != (best.gamma, best.ratio)]
        close = {(t.gamma, t.ratio) for t in drafting if t.fastest >= best.slowest}
        console.print(
            f"fastest: [bold]γ = {tuning.gamma}, ratio {tuning.ratio:g}[/], "
            f"{best.tokens_per_second / plain.tokens_per_second:.2f}x plain decoding"
            + (f"; as fast within the range of the runs: {len(close)} more" if close else ""),
            highlight=False,
        )
    else:
        console.print("fastest: [bold]plain decoding[/] (γ = 0)", highlight=False)
    tuning.save(options.out)
    plot_tuning(options.plot, tuning)
    console.print(f"setting: {options.out}\npicture: {options.plot}", highlight=False, soft_wrap=True)
    return 0


def _table(tuning: Tuning, repeats: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("step", no_wrap=True)
    for name in ("γ", "ratio", "accepted", "per round", "tokens/s", "±", "speed-up"):
        table.add_column(name, justify="right")
    plain = tuning.trials[0].tokens_per_second
    for trial in tuning.trials:
        half_range = 50 * (trial.fastest - trial.slowest) / trial.tokens_per_second
        drafts = (str(trial.gamma), f"{trial.ratio:g}", f"{100 * trial.acceptance:.1f} %")
        table.add_row(
            STEPS[trial.step],
            *(drafts if trial.gamma else ("", "", "")),
            f"{trial.tokens_per_iteration:.2f}",
            f"{trial.tokens_per_second:.1f}",
            f"{half_range:.0f} %" if repeats > 1 else "one run",
            f"{trial.tokens_per_second / plain:.2f}x",
            style="bold" if trial.step == 3 and trial.ratio == tuning.ratio else "",
        )
    return table
