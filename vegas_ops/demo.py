"""`vegas-ops demo`: plain decoding against Vegas, on a real model and a real long text."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vegas_ops.plots import plot_run
from vegas_ops.session import PAGE_SIZE, Run, Session, common_prefix, printable, read_text
from vegas_ops.speculative import Full, Policy, Request, SamplingParams, SpeculativeDecoder

# Sources that every Python from 3.10 on has; the last one is cut off where the model goes on.
DEMO_CONTEXT = 24_576  # tokens
BUSY = 0.25  # of the cores
STANDARD_LIBRARY = ("tarfile", "statistics")


@dataclass(frozen=True)
class DemoOptions:
    model: Path
    prompt: Path | None  # None: the standard library
    context: int | None  # tokens of the prompt at most: its last ones
    max_new_tokens: int
    gamma: int
    ratio: float
    policy: Policy
    device: str
    dtype: torch.dtype | None
    batch_invariant: bool
    plot: Path


def standard_library_text(names: tuple[str, ...] = STANDARD_LIBRARY) -> str:
    """Sources of standard-library modules, one after the other, the last one's second half cut off."""
    sources = []
    for name in names:
        source = _source(importlib.util.find_spec(name), name)
        if source:
            sources.append(f"# {name}.py\n{source}\n")
    if not sources:
        raise ValueError("`prompt` must be given: this Python has no standard-library sources")
    last = sources[-1].splitlines(keepends=True)
    sources[-1] = "".join(last[: len(last) // 2])
    return "".join(sources)


def _source(spec: ModuleSpec | None, name: str) -> str | None:
    loader = spec.loader if spec else None
    get_source = getattr(loader, "get_source", None)
    return get_source(name) if get_source else None


def run_demo(options: DemoOptions, console: Console) -> int:
    """Runs both and prints the comparison; 0, or 1 where fp32 outputs differ by more than rounding."""
    # Before minutes of work rather than behind them.
    for name, value, least in (("gamma", options.gamma, 1), ("max_new_tokens", options.max_new_tokens, 2)):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, so that drafts can be seen, got {value}")
    if options.plot.suffix.lower() != ".png" or not options.plot.absolute().parent.is_dir():
        raise ValueError(f"`plot` must be a .png file in an existing folder, got {str(options.plot)!r}")
    session = Session(
        options.model,
        device=options.device,
        dtype=options.dtype,
        batch_invariant=options.batch_invariant,
    )
    source = str(options.prompt or "Python's standard library")
    text = read_text(options.prompt) if options.prompt else standard_library_text()
    context = session.context(options.context, DEMO_CONTEXT, options.max_new_tokens)
    ids = session.encode(text, options.max_new_tokens, keep=context)
    model = session.model
    dtype = str(model.dtype).removeprefix("torch.")
    console.print(
        f"[bold]{options.model.name}[/] · {source} · {len(ids):,} tokens · {model.device.type} · "
        f"{dtype} · {torch.get_num_threads()} threads",
        highlight=False,
        soft_wrap=True,
    )
    if model.device.type == "cpu" and _others() > BUSY:
        spinning = "" if "OMP_WAIT_POLICY" in os.environ else ", or set OMP_WAIT_POLICY=passive"
        console.print(
            "Other programs use the cores, and OpenMP's threads wait for each other: all takes many times as "
            f"long, and speeds cannot be compared. Stop them{spinning}.",
            style="yellow",
        )
    # Both start from the pages of one and the same prompt.
    room = options.max_new_tokens + min(options.gamma, options.max_new_tokens)
    decoder = session.decoder(len(ids) + 2 * room + 4 * PAGE_SIZE)
    prompt = _read_prompt(session, decoder, ids, console)
    runs = []
    for name, gamma in (
        ("plain decoding", 0),
        (f"{options.policy.name}, γ = {options.gamma}", options.gamma),
    ):
        console.rule(name)
        request = Request(
            ids,
            SamplingParams(),
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=model.config.eos_token_ids,
            gamma=gamma,
            policy=options.policy,
            ratio=options.ratio,
            share_prefix_with=prompt,
        )
        runs.append(session.run(decoder, request, lambda piece: _print_text(console, piece)))
        console.print()
    plain, vegas = runs
    # On a GPU phases overlap the host, and its clock does not see them.
    _print_comparison(plain, vegas, options.policy.name, model.device.type == "cpu", console)
    ok = not print_identity(session, decoder, [(plain.request, vegas.request)], options.gamma, console)
    plot_run(
        options.plot,
        title=(
            f"{options.policy.name} on {options.model.name}, {len(ids):,} tokens: "
            f"{_ratio(plain, vegas):.2f}x plain decoding"
        ),
        selections=vegas.selections,
        context=len(vegas.request.tokens),
        drafted_at=vegas.request.statistics.drafted_at,
        accepted_at=vegas.request.statistics.accepted_at,
    )
    console.print(f"picture: {options.plot}", highlight=False, soft_wrap=True)
    return 0 if ok or model.dtype != torch.float32 else 1


def _others(seconds: float = 0.2) -> float:
    """Share of the cores that is in use while this program sleeps; 0 where Linux does not say."""

    def read() -> tuple[int, int]:
        user, nice, system, idle, waiting, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        return idle + waiting, user + nice + system + idle + waiting

    try:
        idle, total = read()
        time.sleep(seconds)
        idle, total = (b - a for a, b in zip((idle, total), read(), strict=True))
    except (OSError, ValueError):
        return 0.0
    return 1 - idle / total if total else 0.0


def _read_prompt(session: Session, decoder: SpeculativeDecoder, ids: list[int], console: Console) -> Request:
    columns = (
        TextColumn("reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(ids))

        def on_prompt(request: Request, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        decoder.on_prompt = on_prompt
        prompt = decoder.hold_prompt(ids)
        decoder.on_prompt = None
    return prompt


def _print_text(console: Console, piece: str) -> None:
    console.print(printable(piece), end="", markup=False, highlight=False, soft_wrap=True, style="dim")


def _ratio(plain: Run, vegas: Run) -> float:
    return vegas.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0


def _print_comparison(plain: Run, vegas: Run, name: str, timed: bool, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column(name, justify="right", style="bold")
    p, v = plain.request.statistics, vegas.request.statistics
    table.add_row(
        "tokens/s",
        f"{plain.tokens_per_second:.1f}",
        f"{vegas.tokens_per_second:.1f}  ({_ratio(plain, vegas):.2f}x)",
    )
    table.add_row("tokens per verification", f"{p.tokens_per_iteration:.2f}", f"{v.tokens_per_iteration:.2f}")
    table.add_row("drafts accepted", "", f"{v.accepted}/{v.drafted}  ({_percent(v.accepted, v.drafted)})")
    table.add_row(
        "KV cache read per token",
        f"{plain.bytes_per_token / 1e6:.1f} MB",
        f"{vegas.bytes_per_token / 1e6:.1f} MB  ({_percent(vegas.bytes_per_token, plain.bytes_per_token)})",
    )
    phases = (
        ("time in drafts", v.draft_seconds),
        ("time in verification", v.verify_seconds),
        ("time in selection", v.select_seconds),
    )
    for label, seconds in phases if timed else ():
        table.add_row(label, "", f"{seconds:.2f} s  ({_percent(seconds, vegas.seconds)})")
    console.rule()
    console.print(table)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def print_identity(
    session: Session,
    decoder: SpeculativeDecoder,
    pairs: Sequence[tuple[Request, Request]],
    gamma: int,
    console: Console,
) -> int:
    """Says of each pair of outputs, plain decoding's first, whether they are the same, and if not, where they
    part and whether rounding explains it: in the target's logits the two tokens must lie no further apart
    than the most that `moves_of_margins` finds in these texts. Returns how many it does not explain."""
    for plain, other in pairs:
        if plain.output == other.output:
            same = len(plain.output)
            console.print(f"output: [bold green]identical[/], all {same} tokens", highlight=False)
    different = [pair for pair in pairs if pair[0].output != pair[1].output]
    partings = []
    for plain, other in different:
        same = common_prefix(plain.output, other.output)
        if same < min(len(plain.output), len(other.output)):
            partings.append((plain, same, other.output[same]))
            continue
        where = f"from token {same + 1} on, where one output ends"
        console.print(f"output: [bold yellow]differs[/] {where}", highlight=False)
    unexplained = len(different) - len(partings)
    moves = moves_of_margins(decoder, partings, gamma) if partings else []
    most, places = max((m for _, m, _ in moves), default=0.0), sum(n for _, _, n in moves)
    for (plain, same, token), (gap, _, looked) in zip(partings, moves, strict=True):
        explained = looked > 0 and gap <= most
        unexplained += not explained
        first, second = (repr(printable(session.tokenizer.decode([i]))) for i in (plain.output[same], token))
        console.print(f"output: [bold yellow]differs[/] from token {same + 1} on", highlight=False)
        console.print(
            f"  {first} and {second} are {gap:.2e} apart in the target's logits; computed by decoding and by "
            f"verification, that differs by up to {most:.2e} at {places} places of these texts: "
            + ("a tie that rounding decides" if explained else "more than rounding explains"),
            markup=False,
            highlight=False,
        )
    return unexplained


def moves_of_margins(
    decoder: SpeculativeDecoder, partings: Sequence[tuple[Request, int, int]], gamma: int
) -> list[tuple[float, float, int]]:
    """How far apart decoding and verification compute margins, the difference of two tokens' logits.

    Both go through the text of each plain request, with a cache of their own: verification with `gamma`
    drafts that attend to everything. Margins are those of the text's next token to the best other token, and
    at the place given to the token given.

    Returns:
        For each (plain request, place in its output, token): the margin there as decoding computes it,
        infinite where it did not get there, the most by which a margin moves, and at how many places it was
        looked at.
    """
    decoded: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in partings]
    verified: list[dict[int, torch.Tensor]] = [{} for _ in partings]

    def passed(i: int, history: torch.Tensor) -> int | None:
        """How many of the output's tokens `history` holds, if it is the text."""
        plain = partings[i][0]
        output = history[len(plain.prompt) :].tolist()
        n = len(output)
        return n if n < len(plain.output) and output == plain.output[:n] else None

    def look(i: int, history: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        n = passed(i, history)
        if n is not None:
            plain, place, token = partings[i]
            others = logits.index_fill(0, torch.tensor(plain.output[n], device=logits.device), -torch.inf)
            best = others.argmax() if n != place else torch.tensor(token, device=logits.device)
            decoded[i][n] = best, (logits[plain.output[n]] - logits[best]).float()
        return logits

    def look_again(i: int, history: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        n = passed(i, history)
        if n in decoded[i]:  # a draft's at first, then the verification's
            verified[i][n] = (logits[partings[i][0].output[n]] - logits[decoded[i][n][0]]).float()
        return logits

    for drafts, processor in ((0, look), (max(gamma, 1), look_again)):
        requests = [
            Request(
                plain.prompt,
                SamplingParams(),
                max_new_tokens=len(plain.output),
                gamma=drafts,
                policy=Full(),
                logits_processor=partial(processor, i),
                forced_tokens=plain.output,
                share_prefix_with=plain.share_prefix_with,
            )
            for i, (plain, _, _) in enumerate(partings)
        ]
        decoder.generate(requests)
    result = []
    for (_, place, _), one, other in zip(partings, decoded, verified, strict=True):
        moves = [(one[n][1] - margin).abs() for n, margin in other.items()]
        most = torch.stack(moves).max().item() if moves else 0.0
        gap = abs(one[place][1].item()) if place in one else float("inf")
        result.append((gap, most, len(moves)))
    return result
