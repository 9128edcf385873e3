"""`vegas-ops demo`: plain decoding against Vegas, on a real model and a real long text."""

from __future__ import annotations

import importlib.util
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
    # Both start from the pages of one and the same prompt.
    decoder = session.decoder(len(ids) + 2 * (options.max_new_tokens + options.gamma) + 4 * PAGE_SIZE)
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
    ok = print_identity(session, decoder, plain.request, vegas.request, console)
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
    session: Session, decoder: SpeculativeDecoder, plain: Request, vegas: Request, console: Console
) -> bool:
    """Says whether the outputs are the same; if not, where they part and whether rounding explains it:
    the two tokens' logits, computed by decoding and by verification, must have moved towards each other
    by as much as they lie apart."""
    same = common_prefix(plain.output, vegas.output)
    if plain.output == vegas.output:
        console.print(f"output: [bold green]identical[/], all {same} tokens", highlight=False)
        return True
    console.print(f"output: [bold yellow]differs[/] from token {same + 1} on", highlight=False)
    if same == min(len(plain.output), len(vegas.output)):
        console.print("  one output ends there", highlight=False)
        return False
    tokens = [*plain.prompt, *plain.output[:same]]
    gamma = max(vegas.gamma, 1)
    # Among the rows of a verification, after 1 to gamma drafts: each place may round in its own way.
    found = _logits_after(decoder, tokens, range(min(gamma, len(tokens) - 1) + 1), gamma, plain)
    decoded, verified = found[0], [logits for logits in found[1:] if logits is not None]
    if decoded is None or not verified:
        return False
    pair = plain.output[same], vegas.output[same]
    gap, change = gap_and_change(decoded, verified, *pair)
    first, second = (repr(printable(session.tokenizer.decode([i]))) for i in pair)
    console.print(
        f"  {first} and {second} are {gap:.2e} apart in the target's logits; computed by decoding and by "
        f"verification, that differs by up to {change:.2e}: "
        + ("a tie that rounding decides" if gap <= change else "more than rounding explains"),
        markup=False,
        highlight=False,
    )
    return gap <= change


def gap_and_change(
    decoded: torch.Tensor, verified: Sequence[torch.Tensor], first: int, second: int
) -> tuple[float, float]:
    """How far apart two tokens' logits are where decoding computes them, (vocab_size,), and by how much
    the most of the verifications moves them against each other: up to twice what a single logit moves."""
    apart = decoded[first] - decoded[second]
    change = max(abs((logits[first] - logits[second] - apart).item()) for logits in verified)
    return abs(apart.item()), change


def _logits_after(
    decoder: SpeculativeDecoder, tokens: list[int], drafts: Sequence[int], gamma: int, plain: Request
) -> list[torch.Tensor | None]:
    """The target's logits after `tokens`, (vocab_size,), for each number of drafts at the end of them: none
    is plain decoding, others are a verification's rows (of drafts made with everything, so that all fit).
    None where greedy decoding did not pass through `tokens`.
    """
    found: list[torch.Tensor | None] = [None] * len(drafts)

    def catch(i: int, history: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if history.shape[0] == len(tokens) and history.tolist() == tokens:
            found[i] = logits.clone()  # a draft's first, then the verification's
        return logits

    requests = [
        Request(
            tokens[: len(tokens) - n - 1] if n else tokens,
            SamplingParams(),
            max_new_tokens=1 + n + gamma if n else 1,
            gamma=gamma if n else 0,
            policy=Full(),
            logits_processor=partial(catch, i),
            max_iterations=1,
            share_prefix_with=plain.share_prefix_with,
        )
        for i, n in enumerate(drafts)
    ]
    decoder.generate(requests)
    return found
