"""Which selection drafts best: accepted drafts per iteration, by policy, gamma, budget and kind of text.

forced: drafts are made and verified as usual, then the given continuation is committed, so that every
configuration sees the same natural text (a small model's own greedy text loops). free: the model's own
text, sampled.

All configurations of a text share its prompt's pages and run as one batch. Needs a model folder and a
folder of texts whose last tokens are the continuation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from report import environment

from vegas_ops.models import Qwen3Model, Tokenizer
from vegas_ops.speculative import (
    POLICIES,
    PagedKVCache,
    Policy,
    Request,
    SamplingParams,
    SpeculativeDecoder,
    Vegas,
)
from vegas_ops.speculative.policies import ROWS, SCORES

Record = dict[str, Any]


def ablation() -> list[Policy]:
    """Every combination of score, rows, look-ahead and sharing, beside the baselines."""
    grid = itertools.product(SCORES, ROWS, (0, 1, 2), (False, True))
    variants: list[Policy] = [Vegas(*combination) for combination in grid]
    return [*variants, *(POLICIES[name] for name in ("streaming", "random", "topk-oracle"))]


def decode(
    model: Qwen3Model,
    prompt: Sequence[int],
    forced: Sequence[int] | None,
    configurations: Iterable[tuple[Policy, int, float]],
    arguments: argparse.Namespace,
) -> Iterator[Record]:
    """Runs (policy, gamma, ratio) configurations on one prompt, which is computed once."""
    new = len(forced) if forced else arguments.new_tokens
    page_size, slack = 16, arguments.batch * (new + 64)
    cache = PagedKVCache(
        num_layers=model.num_layers,
        num_pages=(len(prompt) + slack) // page_size + 4 * arguments.batch,
        page_size=page_size,
        num_heads_kv=model.num_heads_kv,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=model.device,
        max_length=model.max_position,
    )
    decoder = SpeculativeDecoder(model, cache)
    held = decoder.hold_prompt(prompt)
    repeats = 1 if forced else arguments.repeats
    jobs = [(*c, repeat) for c in configurations for repeat in range(repeats)]
    for begin in range(0, len(jobs), arguments.batch):
        batch = jobs[begin : begin + arguments.batch]
        requests = [
            Request(
                prompt,
                SamplingParams(temperature=arguments.temperature, seed=1000 + repeat),
                max_new_tokens=new,
                gamma=gamma,
                policy=policy,
                ratio=ratio,
                min_tokens=arguments.min_tokens,
                forced_tokens=forced,
                max_iterations=arguments.iterations,
                share_prefix_with=held,
            )
            for policy, gamma, ratio, repeat in batch
        ]
        decoder.generate(requests)
        for (policy, gamma, ratio, repeat), request in zip(batch, requests, strict=True):
            s = request.statistics
            yield {
                "policy": policy.name,
                "gamma": gamma,
                "ratio": ratio,
                "repeat": repeat,
                "iterations": s.iterations,
                "accepted": s.accepted,
                "drafted": s.drafted,
                "accepted_at": s.accepted_at,
                "drafted_at": s.drafted_at,
            }
    decoder.abort(held)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval (Student's t over the values)."""
    from scipy.stats import t

    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, float(t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)


def by_configuration(records: Iterable[Record]) -> dict[tuple[str, int, float], dict[str, float]]:
    """{(policy, gamma, ratio): {text: accepted drafts per iteration}}; repeats of a text are pooled."""
    sums: dict[tuple[str, int, float], dict[str, list[int]]] = defaultdict(
        lambda: defaultdict(lambda: [0, 0])
    )
    for r in records:
        cell = sums[r["policy"], r["gamma"], r["ratio"]][r["text"]]
        cell[0] += r["accepted"]
        cell[1] += r["iterations"]
    return {key: {text: a / max(n, 1) for text, (a, n) in texts.items()} for key, texts in sums.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="vegas-ops bench acceptance", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of a Qwen3 model")
    parser.add_argument("--texts", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, the first with the versions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: float32 on the CPU, else bfloat16")
    parser.add_argument("--policies", nargs="*", help="names; default: the whole ablation")
    parser.add_argument("--gammas", nargs="*", type=int, default=[3, 6, 9])
    parser.add_argument("--ratios", nargs="*", type=float, default=[0.02, 0.05, 0.07, 0.10])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--free", action="store_true", help="the model's own text instead of the given one")
    parser.add_argument(
        "--continuation", type=int, default=300, help="last tokens of a text: its continuation"
    )
    parser.add_argument("--new-tokens", type=int, default=160, help="of a free run")
    parser.add_argument("--repeats", type=int, default=3, help="of a free run")
    parser.add_argument("--iterations", type=int, default=40, help="verifications per text and configuration")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--min-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no text after this time")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else default
    model = Qwen3Model.from_pretrained(arguments.model, dtype=dtype, device=device)
    tokenizer = Tokenizer(arguments.model)
    policies = ablation()
    if arguments.policies:
        known = {policy.name: policy for policy in [*policies, *POLICIES.values()]}
        policies = [known[name] for name in arguments.policies]
    configurations = list(itertools.product(policies, arguments.gammas, arguments.ratios))
    start, records = time.time(), []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), arguments.out.open("w") as out:
        out.write(json.dumps({**environment(device), "model": arguments.model.name}) + "\n")
        for path in sorted(arguments.texts.glob("*.txt"), key=lambda p: p.stat().st_size):
            if time.time() - start > arguments.seconds:
                print(f"out of time before {path.stem}", file=sys.stderr)
                continue
            ids = tokenizer.encode(path.read_text())
            prompt, forced = ids[: -arguments.continuation], ids[-arguments.continuation :]
            for record in decode(
                model, prompt, None if arguments.free else forced, configurations, arguments
            ):  # fmt: skip
                record |= {"text": path.stem, "kind": "free" if arguments.free else "forced"}
                record |= {"temperature": arguments.temperature, "context": len(prompt)}
                record |= {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
                records.append(record)
                out.write(json.dumps(record) + "\n")
            out.flush()
            print(f"{path.stem}: {len(prompt)} tokens, {time.time() - start:.0f} s", flush=True)
    for (name, gamma, ratio), texts in by_configuration(records).items():
        mean, half = interval(list(texts.values()))
        print(f"{name:40s} gamma {gamma} ratio {ratio:.2f}  {mean:5.2f} ± {half:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
