"""A batch of long texts continued plainly and with drafts: tokens per second, acceptance, identity.

Every request continues the texts at another place. All runs share the prompts' pages; what is timed is
decoding alone, from the first token of all on to the last step in which no output ends, after a run of
the same kind and length. No token ends an output early. With --random-weights a large model's shape is
timed: its outputs mean nothing and its acceptance is replayed from the paper's figures.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import launches
import loop_figures
import torch
from loop_workload import (
    PAPER_GAMMA,
    PAPER_TOKENS,
    SHAPES,
    RandomSession,
    ReplayedModel,
    cut_prompts,
    hold_random,
    jsonl_prompts,
    read_ceiling,
    weight_bytes,
)
from report import ROOT, ResultFile, device_name, environment, slug
from rich.console import Console
from rich.table import Table

from vegas_ops.demo import print_identity, standard_library_text
from vegas_ops.session import DEMO_MODEL, DTYPES, PAGE_SIZE, Session, read_text
from vegas_ops.speculative import POLICIES, Request, SamplingParams, SpeculativeDecoder
from vegas_ops.speculative.model import layer_attention
from vegas_ops.speculative.tuning import GAMMAS, RATIOS, REPEATS, Decoded, decode_together, tune

_BLOCKS = 8  # of iterations, for the interval of a throughput


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean (normal approximation); None for fewer than three values."""
    if len(values) < 3:
        return None
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def measure(decoded: Decoded) -> dict[str, Any]:
    """Throughput, its interval over blocks of iterations; tokens an iteration: of those timed, and of each
    request's all (per verification), with its interval over requests."""
    requests = decoded.requests
    s = [request.statistics for request in requests]
    tokens, iterations = sum(x.tokens for x in s), sum(x.iterations for x in s)
    size = max(1, len(decoded.steps) // _BLOCKS)
    blocks = [decoded.steps[i : i + size] for i in range(0, len(decoded.steps) - size + 1, size)]
    rates = [sum(t for t, _ in block) / sum(seconds for _, seconds in block) for block in blocks]
    positions = range(max(len(x.drafted_at) for x in s))

    def at(lists: list[list[int]], i: int) -> int:
        return sum(counts[i] for counts in lists if i < len(counts))

    return {
        "us": round(1e6 / decoded.tokens_per_second, 2),
        "tokens_per_second": round(decoded.tokens_per_second, 1),
        "tokens_per_second_interval": interval(rates),
        "iteration_us": round(1e6 * decoded.seconds / decoded.iterations, 1),
        "tokens_per_iteration": round(decoded.tokens / decoded.iterations / len(requests), 3),
        "tokens_per_verification": round(tokens / iterations, 3),
        "tokens_per_verification_interval": interval([x.tokens_per_iteration for x in s]),
        "drafted": sum(x.drafted for x in s),
        "accepted": sum(x.accepted for x in s),
        "drafted_at": [at([x.drafted_at for x in s], i) for i in positions],
        "accepted_at": [at([x.accepted_at for x in s], i) for i in positions],
        "bytes": round(sum(x.draft_bytes + x.verify_bytes for x in s) / tokens),
    }


@dataclass(frozen=True)
class Bound:
    """What an iteration has to read, at the ceiling. weights, keys, windows: bytes of a forward's matrices,
    of the batch's cached tokens in layers that see all of them, and in those with a window."""

    weights: int
    keys: float
    windows: float
    gbs: float

    @property
    def plain_us(self) -> float:
        return (self.weights + self.keys + self.windows) / self.gbs / 1e3

    def draft_us(self, share: float) -> float:
        """One draft step that reads `share` of the cache."""
        return (self.weights + share * self.keys + self.windows) / self.gbs / 1e3

    def speed_up(self, tokens: float, gamma: int, share: float) -> float:
        return tokens * self.plain_us / (self.plain_us + gamma * self.draft_us(share))


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vegas-ops bench loop", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="Hugging Face folder of a Qwen3 model")
    parser.add_argument(
        "--texts", type=Path, help="folder of .txt files (default: Python's own library sources)"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="prompts, one JSON object a line")
    parser.add_argument(
        "--random-weights", choices=tuple(SHAPES), help="a shape instead of a model, acceptance replayed"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="default: float32 on the CPU, else the model's"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="layers and attention that do not depend on the batch (GPU)",
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument(
        "--context", type=int, default=24_576, help="tokens of every prompt, at most: whole pages and one"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="of every request (default: %(default)s)")
    parser.add_argument("--policies", nargs="+", default=["vegas", "vegas-lookahead"])
    parser.add_argument("--gamma", type=int, default=6, help="drafts a round (default: %(default)s)")
    parser.add_argument(
        "--ratio", type=float, default=0.07, help="of the cache drafts read (default: %(default)s)"
    )
    parser.add_argument(
        "--read-every",
        type=int,
        default=1,
        metavar="N",
        help="iterations that the host reads at a time (GPU)",
    )
    parser.add_argument(
        "--draft-cost", type=float, metavar="X",
        help="drafts by acceptance, up to --gamma: a draft step's time over a verification's",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--tune", action="store_true", help="each policy at its own fastest gamma and ratio, found first"
    )
    parser.add_argument("--gammas", nargs="+", type=int, default=list(GAMMAS), help="tried by --tune")
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS), help="tried by --tune")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of a setting of --tune")
    parser.add_argument(
        "--ceiling", type=float, metavar="GB/S", help="read ceiling, as a run before measured it"
    )
    parser.add_argument("--launches", action="store_true", help="list the launches of an iteration (GPU)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--record",
        action="store_true",
        help="write loop.jsonl, the record that is kept, not loop-quick.jsonl",
    )
    arguments = parser.parse_args(argv)
    for name in arguments.policies:
        try:
            POLICIES[name]
        except ValueError as error:
            parser.error(str(error))
    for name, value, least in (
        *(("--batch", batch, 1) for batch in arguments.batch),
        *(("--gammas", gamma, 1) for gamma in arguments.gammas),
        ("--context", arguments.context, 1),
        ("--new-tokens", arguments.new_tokens, 2),
        ("--gamma", arguments.gamma, 1),
        ("--repeats", arguments.repeats, 1),
        ("--read-every", arguments.read_every, 1),
    ):
        if value < least:
            parser.error(f"{name} must be at least {least}, got {value}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu: this torch sees no GPU")
    if arguments.launches and arguments.device == "cpu":
        parser.error("--launches must go with --device cuda")
    if arguments.random_weights and (arguments.texts or arguments.prompts):
        parser.error("--random-weights must go without --texts and --prompts: it reads no text")
    if arguments.texts and not list(arguments.texts.glob("*.txt")):
        parser.error(f"--texts must be a folder that holds .txt files, got {arguments.texts}")
    if arguments.prompts and not arguments.prompts.is_file():
        parser.error(f"--prompts must be a file, got {arguments.prompts}")
    if not arguments.random_weights and not arguments.model.is_dir():
        parser.error(f"--model must be a folder, got {arguments.model}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    console = Console(highlight=False)
    ceiling, method = arguments.ceiling, "given"
    if ceiling is None:
        ceiling, method = read_ceiling(torch.device(arguments.device))
    session: Any
    if arguments.random_weights:
        room = arguments.context + arguments.new_tokens + 64
        session = RandomSession(arguments.random_weights, room, torch.device(arguments.device))
    else:
        session = Session(
            arguments.model,
            device=arguments.device,
            dtype=DTYPES[arguments.dtype] if arguments.dtype else None,
            batch_invariant=arguments.batch_invariant,
        )
    room = session.model.max_position - arguments.new_tokens
    if arguments.context > room:
        raise SystemExit(
            f"--context must be at most {room}, so that the output fits, got {arguments.context}"
        )
    device = session.model.device
    name = f"loop-{arguments.random_weights}" if arguments.random_weights else "loop"
    name += ".jsonl" if arguments.record else "-quick.jsonl"
    results = ResultFile(arguments.out / slug(device_name(device)) / name)
    results.write({
        **environment(device), "read_ceiling_gbs": round(ceiling, 1), "read_ceiling_method": method,
        "model": arguments.random_weights or arguments.model.name, "peers": {},
    })  # fmt: skip
    unexplained = 0
    for batch in arguments.batch:
        unexplained += run_batch(session, batch, arguments, ceiling, results, console)
    results.close()
    console.print(f"results: {results.path}", soft_wrap=True)
    for path in loop_figures.draw(results.path):
        console.print(f"picture: {path}", soft_wrap=True)
    return int(unexplained > 0)


def now(decoder: SpeculativeDecoder) -> float:
    """Seconds, when the device has done all it was given."""
    if decoder.on_gpu:
        torch.cuda.synchronize(decoder.cache.device)
    return time.perf_counter()


def hold_prompts(
    session: Any, batch: int, arguments: argparse.Namespace, gamma: int, console: Console
) -> tuple[SpeculativeDecoder, list[Request]]:
    """A decoder with room for the batch, and its prompts in the cache."""
    unread = (arguments.read_every + 1) * (gamma + 1)
    spare = batch * (arguments.new_tokens + unread + 3 * PAGE_SIZE) + arguments.new_tokens + 4 * PAGE_SIZE
    decoder = session.decoder(batch * (arguments.context + PAGE_SIZE) + spare, arguments.read_every)
    decoder.draft_cost = arguments.draft_cost
    start = now(decoder)
    # All pages but the pending token's are whole, so that requests share them and compute none anew.
    context = arguments.context - (arguments.context - 1) % PAGE_SIZE
    if arguments.random_weights:
        held = [hold_random(decoder, context, seed) for seed in range(batch)]
    else:
        if arguments.prompts:
            known = jsonl_prompts(arguments.prompts, session.tokenizer, context)
            prompts = [known[i % len(known)] for i in range(batch)]
        else:
            paths = sorted(arguments.texts.glob("*.txt")) if arguments.texts else []
            texts = [read_text(path) for path in paths]
            text = "\n\n".join(texts) if texts else standard_library_text()
            prompts = cut_prompts(session.tokenizer.encode(text), batch, context)
        held = [decoder.hold_prompt(prompt) for prompt in prompts]
    longest = max(len(prompt.prompt) for prompt in held)
    console.print(f"{batch} x {longest} tokens: prompts read in {now(decoder) - start:.1f} s")
    return decoder, held


def run_batch(
    session: Any,
    batch: int,
    arguments: argparse.Namespace,
    ceiling: float,
    results: ResultFile,
    console: Console,
) -> int:
    """One batch size; returns how many greedy outputs differ from plain decoding's by more than rounding."""
    model, new_tokens = session.model, arguments.new_tokens
    most = max([arguments.gamma, *(arguments.gammas if arguments.tune else ())])
    decoder, held = hold_prompts(session, batch, arguments, most, console)
    keys = sum(len(prompt.prompt) + new_tokens / 2 for prompt in held)
    layer_bytes = decoder.cache.bytes_per_token // model.num_layers
    windows = [layer.window for layer in layer_attention(model) if layer.window is not None]
    bound = Bound(
        weight_bytes(model),
        keys * layer_bytes * (model.num_layers - len(windows)),
        sum(min(window * batch, keys) for window in windows) * layer_bytes,
        ceiling,
    )
    sampling = SamplingParams(arguments.temperature, top_p=arguments.top_p, seed=0)
    greedy = arguments.temperature == 0
    table = Table(
        "decoding", "γ", "ratio", "tokens/s", "speed-up", "of bound", "tokens/round", "KV/token", "as plain",
        box=None, pad_edge=False,
    )  # fmt: skip
    plain: list[Request] = []
    plain_us, unexplained = 0.0, 0
    for name in ("plain", *arguments.policies):
        if isinstance(model, ReplayedModel):
            model.replay(PAPER_TOKENS.get(name, PAPER_TOKENS["vegas"]), PAPER_GAMMA)
        gamma, ratio = (0 if name == "plain" else arguments.gamma), arguments.ratio
        trials: list[dict[str, Any]] = []
        if arguments.tune and gamma:
            tuning = tune(
                decoder, held, POLICIES[name], gammas=arguments.gammas, ratios=arguments.ratios,
                new_tokens=min(new_tokens, 64), repeats=arguments.repeats, sampling=sampling,
            )  # fmt: skip
            trials = [asdict(trial) for trial in tuning.trials]
            best = max(tuning.trials[1:], key=lambda trial: trial.tokens_per_second)
            gamma, ratio = best.gamma, best.ratio
        options: dict[str, Any] = {"gamma": gamma, "ratio": ratio, "sampling": sampling}
        if gamma:
            options["policy"] = POLICIES[name]
        # As long as what is timed: texts that outgrow a power of 2 take other graphs, captured then.
        decode_together(decoder, held, new_tokens, **options)
        decoded = decode_together(decoder, held, new_tokens, **options)
        requests, record = decoded.requests, measure(decoded)
        if not gamma:
            plain, plain_us = requests, record["us"]
        different = [pair for pair in zip(plain, requests, strict=True) if pair[0].output != pair[1].output]
        faults = print_identity(session, decoder, different, gamma, console) if greedy else 0
        unexplained += faults
        share = min(1.0, max(ratio, 256 * batch / keys))
        tokens = record["tokens_per_verification"]
        reached = plain_us / record["us"]
        # Of the iterations that were timed: those after the first output's end are others.
        limit = bound.speed_up(record["tokens_per_iteration"], gamma, share) if gamma else 1.0
        record |= {
            "floor_us": round(bound.plain_us, 1),
            "speed_up": round(reached, 3),
            "bound": round(limit, 3),
            "of_bound": round(reached / limit if gamma else bound.plain_us / record["iteration_us"], 3),
            "draft_floor_us": round(bound.draft_us(share), 1) if gamma else None,
        }
        if arguments.launches:
            record |= launches.iteration(decoder, held, **options)
        same = f"{batch - len(different)} of {batch}" if greedy else ""
        table.add_row(
            name, f"{gamma}" if gamma else "", f"{ratio:g}" if gamma else "",
            f"{record['tokens_per_second']:.0f}", f"{reached:.2f}x", f"{record['of_bound']:.2f}",
            f"{tokens:.2f}", f"{record['bytes'] / 1e6:.2f} MB",
            same + (f", {faults} by more than rounding" if faults else ""),
        )  # fmt: skip
        case = {
            "batch": batch,
            "context": max(len(prompt.prompt) for prompt in held),
            "policy": name,
            "gamma": gamma,
            "ratio": ratio if gamma else None,
            "new_tokens": new_tokens,
            "temperature": arguments.temperature,
            "dtype": str(model.dtype).removeprefix("torch."),
            "batch_invariant": arguments.batch_invariant,
            "read_every": arguments.read_every,
            "draft_cost": arguments.draft_cost,
            "acceptance": "replayed" if isinstance(model, ReplayedModel) else "measured",
        }
        if isinstance(model, ReplayedModel) and model.shape.experts:
            case["layers"] = "attention and its projections, no experts"
        identity = {"identical": batch - len(different), "unexplained": faults} if greedy else {}
        tuned = {"trials": trials} if trials else {}
        results.write({"op": "loop", "case": case, **record, **identity, **tuned})
    console.print(table)
    return unexplained


if __name__ == "__main__":
    raise SystemExit(main())
