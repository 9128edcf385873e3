#!/usr/bin/env python
"""Thousands of short requests through one decoder: they join, leave, are aborted and preempted, in a cache
that runs out of pages.

Checked: every text is the one that plain decoding of the request alone gives, an aborted one a part of it;
all pages come back; neither tensors, objects nor memory grow from the first quarter to the end.

The model is a random one of two layers, or with --model one of a folder (`demo`: the packaged one), which
continues pieces of Python's library; in fp32 on the CPU. On a GPU it is in bf16, where rounding follows the
batch: a text may leave the expected one at a tie, where its two best logits are closer than --gap. There a
round of a new shape is captured, which takes as long as many replays: hence one policy, one gamma, and fewer
requests at a time.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.append(str(ROOT))  # a build in place, unless the package is installed

import torch  # noqa: E402
from rich.progress import track  # noqa: E402
from tiny_model import TinyModel, new_cache  # noqa: E402
from torch import Tensor  # noqa: E402

from vegas_ops.models import ModelFolderError, Qwen3Model, Tokenizer  # noqa: E402
from vegas_ops.session import DEMO_MODEL  # noqa: E402
from vegas_ops.speculative import POLICIES, Request, SamplingParams, SpeculativeDecoder  # noqa: E402

KINDS = 48  # different texts
WARM_REQUESTS = 4000  # after a quarter of these, a GPU has met all shapes of a round
MOST_MEMORY = 48 << 20  # by which the process may grow: what allocators keep back


class Text:
    """What is asked, and what must come out."""

    def __init__(
        self,
        model: Any,
        rng: random.Random,
        source: Sequence[int],
        policies: Sequence[str],
        gammas: Sequence[int],
    ) -> None:
        length = rng.choice((1, 5, 17, 40, 90))
        start = rng.randrange(len(source) - length)
        prompt = list(source[start : start + length])
        policy = POLICIES[rng.choice(policies)]
        self.options: dict[str, Any] = {
            "prompt": prompt, "max_new_tokens": rng.choice((1, 4, 9, 24)), "gamma": rng.choice(gammas),
            "policy": policy, "ratio": 0.3, "min_tokens": 4,
        }  # fmt: skip
        plain = Request(**{**self.options, "gamma": 0})
        SpeculativeDecoder(model, new_cache(model), graphs=False).generate([plain])
        self.output = plain.output
        if rng.random() < 0.3 and len(self.output) > 2:  # ends where a stop first occurs
            stop = self.output[len(self.output) // 2]
            self.options["stop_token_ids"] = (stop,)
            self.output = self.output[: self.output.index(stop) + 1]

    def request(self, rng: random.Random) -> Request:
        return Request(**self.options, sampling=SamplingParams(seed=rng.randrange(2**32)))


def top_two_gap(model: Any, tokens: list[int]) -> float:
    """Between the target's two best logits after `tokens`, with dense attention in fp64."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys, values = (t.double().repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * model.softmax_scale
        causal = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        weights = scores.masked_fill(~causal, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)

    ids = torch.tensor(tokens, device=model.device)
    hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), attend)
    best = model.compute_logits(hidden[-1:])[0].topk(2).values
    return float(best[0] - best[1])


class Soak:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rng = random.Random(options.seed)
        on_gpu = options.device == "cuda"
        self.model: Any
        if options.model:
            folder = DEMO_MODEL if options.model == "demo" else Path(options.model)
            dtype = torch.bfloat16 if on_gpu else torch.float32
            self.model = Qwen3Model.from_pretrained(folder, dtype, options.device, batch_invariant=True)
            source = Tokenizer(folder).encode(Path(argparse.__file__).read_text())
        else:
            shape: dict[str, Any] = (
                {"head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"} if on_gpu else {}
            )
            self.model = TinyModel(max_position=256, **shape)
            source = [self.rng.randrange(self.model.vocab_size) for _ in range(10_000)]
        self.gap = options.gap if on_gpu else 0.0
        policies = options.policies or (("vegas",) if on_gpu else sorted(POLICIES))
        gammas = (4,) if on_gpu else (0, 1, 3, 6)
        self.texts = [Text(self.model, self.rng, source, policies, gammas) for _ in range(KINDS)]
        # Room for some six of up to eighteen requests at a time.
        self.decoder = SpeculativeDecoder(self.model, new_cache(self.model, num_tokens=640, page_size=8))
        self.decoder.fixed_shapes = on_gpu or options.padded
        self.at_a_time = (1, 4, 8) if on_gpu else (1, 6, 18)
        self.pages = self.decoder.cache.num_free_pages
        self.open: list[tuple[Request, Text]] = []
        self.ends: Counter[str] = Counter()
        self.ties = self.preempted = self.steps = 0

    def add(self) -> None:
        text = self.rng.choice(self.texts)
        self.open.append((self.decoder.add(text.request(self.rng)), text))

    def step(self) -> None:
        decoder, rng = self.decoder, self.rng
        if self.open and rng.random() < 0.2:
            decoder.abort(rng.choice(self.open)[0])
        if decoder.running and rng.random() < 0.2:
            decoder.preempt(rng.choice(decoder.running))
            self.preempted += 1
        decoder.step()
        self.steps += 1
        for request, text in [pair for pair in self.open if pair[0].finished]:
            self.open.remove((request, text))
            self.close(request, text)

    def close(self, request: Request, text: Text) -> None:
        assert request.finish_reason is not None and request.sequence is None, (
            "a finished request holds pages"
        )
        self.ends[request.finish_reason] += 1
        want = text.output if request.finish_reason != "abort" else text.output[: len(request.output)]
        got = request.output
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), len(want))
            gap = top_two_gap(self.model, request.prompt + want[:at]) if at < len(want) else math.inf
            assert gap < self.gap, (
                f"text differs at token {at}, where the best two logits are {gap:.3f} apart: {got} instead "
                f"of {want} ({request.finish_reason}, {request.error}, {text.options})"
            )
            self.ties += 1
        assert request.finish_reason != "error", request.error

    def run(self, count: int) -> None:
        """`count` requests, some at a time, until all have ended."""
        added = 0
        while added < count or self.open:
            while added < count and len(self.open) < self.rng.choice(self.at_a_time):
                self.add()
                added += 1
            self.step()
        assert self.decoder.cache.num_free_pages == self.pages, "pages were not returned"
        assert not self.decoder.running and not self.decoder.waiting

    def levels(self, compared: bool) -> dict[str, int]:
        # Of the shapes met last a bounded number is known and keeps its buffers, more or fewer of them.
        if compared:
            self.decoder._rounds.clear()
            self.decoder._misses.clear()
        self.decoder._ahead = None
        gc.collect()
        tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        levels = {"objects": len(gc.get_objects()), "tensors": len(tensors), "process": resident}
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
            levels["device"] = torch.cuda.memory_allocated()
        return levels


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--model", help="a model folder, or `demo` for the packaged model")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=sorted(POLICIES),
        metavar="POLICY",
        help="default: all, on a GPU vegas",
    )
    parser.add_argument("--seed", type=int, help="drawn and printed if absent")
    parser.add_argument("--padded", action="store_true", help="batches padded as for graphs, also on the CPU")
    parser.add_argument("--gap", type=float, default=0.1, help="of logits that count as a tie on a GPU")
    options = parser.parse_args()
    if options.requests < 8:
        parser.error(f"`--requests` must be at least 8, got {options.requests}")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32)
    model = options.model or "a random model"
    print(f"{options.requests} requests of {model} on {options.device}, --seed {options.seed}", flush=True)

    try:
        soak, parts = Soak(options), 8
    except ModelFolderError as error:
        parser.error(str(error))
    levels, seconds = [], []
    for part in track(range(parts), description="", transient=True, disable=not sys.stdout.isatty()):
        start = time.process_time()  # which other programs do not lengthen
        soak.run(options.requests * (part + 1) // parts - options.requests * part // parts)
        seconds.append(time.process_time() - start)
        levels.append(soak.levels(compared=part in (parts // 4 - 1, parts - 1)))
        done = sum(soak.ends.values())
        print(
            f"{done} requests, {soak.steps} steps, {seconds[-1]:.1f} s of CPU time: {levels[-1]}", flush=True
        )
    early, late = levels[parts // 4 - 1], levels[-1]
    for name, before in early.items():
        print(f"{name}: {before:,} after a quarter, {late[name]:,} at the end")
    ends = ", ".join(f"{n} {reason}" for reason, n in sorted(soak.ends.items()))
    print(
        f"{sum(soak.ends.values())} requests ended ({ends}) in {soak.steps} steps, {soak.preempted} "
        f"preempted by hand; {soak.ties} texts left the expected one at a tie; all {soak.pages} pages free; "
        f"{seconds[1]:.1f} s of CPU time for the second eighth, {seconds[-1]:.1f} s for the last"
    )
    if options.device == "cuda" and options.requests < WARM_REQUESTS:
        print("too few requests to tell growth from kernels and graphs that are still being made")
        return 0
    assert late["process"] - early["process"] < MOST_MEMORY, "the process grew"
    assert late["tensors"] <= early["tensors"] * 1.02 + 50, "tensors are kept"
    assert late["objects"] <= early["objects"] * 1.02 + 2000, "objects are kept"
    assert late.get("device", 0) <= early.get("device", 0) * 1.02 + (1 << 20), "memory of the device is kept"
    return 0


if __name__ == "__main__":
    sys.exit(main())
