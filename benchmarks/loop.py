"""A batch of long texts continued greedily, plainly and with drafts: tokens per second, acceptance, identity.

Every request continues the texts at another place. All runs share the prompts' pages; what is timed is
decoding alone, from the first token of all on to the end of the first output, after a short run of the
same kind. No token ends an output early.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from report import ROOT, ResultFile, device_name, environment, slug
from rich.console import Console
from rich.table import Table

from vegas_ops.demo import print_identity, standard_library_text
from vegas_ops.session import DEMO_MODEL, DTYPES, PAGE_SIZE, Session, read_text
from vegas_ops.speculative import POLICIES, Request
from vegas_ops.speculative.tuning import Decoded, decode_together, now


def cut_prompts(ids: Sequence[int], batch: int, context: int) -> list[list[int]]:
    """The `context` tokens before each of `batch` places, evenly spread; a short text is repeated."""
    ends = [len(ids) * (i + 1) // batch for i in range(batch)]
    repeated = list(ids) * (1 + -(-context // len(ids)))
    return [repeated[: len(repeated) - len(ids) + end][-context:] for end in ends]


def measure(decoded: Decoded) -> dict[str, Any]:
    requests = decoded.requests
    tokens = sum(request.statistics.tokens for request in requests)
    iterations = sum(request.statistics.iterations for request in requests)
    read = sum(request.statistics.draft_bytes + request.statistics.verify_bytes for request in requests)
    return {
        "us": round(1e6 / decoded.tokens_per_second, 2),
        "tokens_per_second": round(decoded.tokens_per_second, 1),
        "tokens_per_verification": round(tokens / iterations, 3),
        "drafted": sum(request.statistics.drafted for request in requests),
        "accepted": sum(request.statistics.accepted for request in requests),
        "bytes": round(read / tokens),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vegas-ops bench loop", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="Hugging Face folder of a Qwen3 model")
    parser.add_argument(
        "--texts", type=Path, help="folder of .txt files (default: Python's own library sources)"
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
        "--batch-invariant", action="store_true", help="linear layers that do not depend on the batch (GPU)"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--context", type=int, default=24_576, help="tokens of every prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="of every request (default: %(default)s)")
    parser.add_argument("--policies", nargs="+", default=["vegas", "vegas-lookahead"])
    parser.add_argument("--gamma", type=int, default=6, help="drafts a round (default: %(default)s)")
    parser.add_argument(
        "--ratio", type=float, default=0.07, help="of the cache drafts read (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--record",
        action="store_true",
        help="write loop.jsonl, the record that is kept, not loop-quick.jsonl",
    )
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.policies if name not in POLICIES]
    if unknown:
        parser.error(f"--policies must be of {', '.join(POLICIES)}, got {', '.join(unknown)}")
    for name, value, least in (
        *(("--batch", batch, 1) for batch in arguments.batch),
        ("--context", arguments.context, 1),
        ("--new-tokens", arguments.new_tokens, 2),
        ("--gamma", arguments.gamma, 1),
    ):
        if value < least:
            parser.error(f"{name} must be at least {least}, got {value}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu: this torch sees no GPU")
    console = Console(highlight=False)
    session = Session(
        arguments.model,
        device=arguments.device,
        dtype=DTYPES[arguments.dtype] if arguments.dtype else None,
        batch_invariant=arguments.batch_invariant,
    )
    texts = sorted(arguments.texts.glob("*.txt")) if arguments.texts else []
    if arguments.texts and not texts:
        parser.error(f"--texts must be a folder that holds .txt files, got {arguments.texts}")
    text = "\n\n".join(read_text(path) for path in texts) if texts else standard_library_text()
    ids = session.tokenizer.encode(text)
    room = session.model.max_position - arguments.new_tokens
    if arguments.context > room:
        parser.error(f"--context must be at most {room}, so that the output fits, got {arguments.context}")
    device = session.model.device
    name = "loop.jsonl" if arguments.record else "loop-quick.jsonl"
    results = ResultFile(arguments.out / slug(device_name(device)) / name)
    results.write({**environment(device), "model": arguments.model.name, "peers": {}})
    unexplained = 0
    for batch in arguments.batch:
        unexplained += run_batch(
            session, cut_prompts(ids, batch, arguments.context), arguments, results, console
        )
    results.close()
    console.print(f"results: {results.path}", soft_wrap=True)
    return int(unexplained > 0)


def run_batch(
    session: Session,
    prompts: list[list[int]],
    arguments: argparse.Namespace,
    results: ResultFile,
    console: Console,
) -> int:
    """One batch size; returns how many outputs differ from plain decoding's by more than rounding."""
    batch, new_tokens, gamma = len(prompts), arguments.new_tokens, arguments.gamma
    decoder = session.decoder(
        batch * (arguments.context + new_tokens + gamma + 2 * PAGE_SIZE) + new_tokens + gamma + PAGE_SIZE
    )
    start = now(decoder)
    held = [decoder.hold_prompt(prompt) for prompt in prompts]
    console.print(f"{batch} x {arguments.context} tokens: prompts read in {now(decoder) - start:.1f} s")
    table = Table("decoding", "tokens/s", "speed-up", "tokens/round", "accepted", "KV/token", "as plain")
    table.box, table.pad_edge = None, False
    plain: list[Request] = []
    plain_us, unexplained = 0.0, 0
    decode_together(decoder, held, new_tokens, gamma=0)  # what comes first is slow
    for name, drafts in (("plain", 0), *((name, gamma) for name in arguments.policies)):
        options: dict[str, Any] = {"gamma": drafts, "ratio": arguments.ratio}
        if drafts:
            options["policy"] = POLICIES[name]
        decode_together(decoder, held, min(new_tokens, 3 * gamma + 4), **options)  # captures graphs, too
        decoded = decode_together(decoder, held, new_tokens, **options)
        requests, record = decoded.requests, measure(decoded)
        if not drafts:
            plain, plain_us = requests, record["us"]
        different = [pair for pair in zip(plain, requests, strict=True) if pair[0].output != pair[1].output]
        faults = sum(not print_identity(session, decoder, *pair, console) for pair in different)
        unexplained += faults
        same = f"{batch - len(different)} of {batch}" + (
            f", {faults} by more than rounding" if faults else ""
        )
        drafted = f"{record['accepted']}/{record['drafted']}" if drafts else ""
        table.add_row(
            name, f"{record['tokens_per_second']:.1f}", f"{plain_us / record['us']:.2f}x",
            f"{record['tokens_per_verification']:.2f}", drafted, f"{record['bytes'] / 1e6:.2f} MB", same,
        )  # fmt: skip
        case = {
            "batch": batch,
            "context": arguments.context,
            "policy": name,
            "gamma": drafts,
            "ratio": arguments.ratio if drafts else None,
            "new_tokens": new_tokens,
            "dtype": str(session.model.dtype).removeprefix("torch."),
            "batch_invariant": arguments.batch_invariant,
        }
        identity = {"identical": batch - len(different), "unexplained": faults}
        results.write({"op": "loop", "case": case, **record, **identity})
    console.print(table)
    return unexplained


if __name__ == "__main__":
    raise SystemExit(main())
