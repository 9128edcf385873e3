"""Random arguments of the ops' cases, for hypothesis and for the fuzzer alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from op_cases import LAYOUTS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

DUMPS = ("none", "token", "token_weight", "kv_head", "rows", "all")
HALF = (torch.bfloat16, torch.float16)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_SIZES = (1, 2, 7, 16, 53, 64, 256)
SPLITS = (0, 0, 1, 2, 3, 7)


class Draw(Protocol):
    def integer(self, low: int, high: int) -> int: ...

    def choice(self, values: Sequence[T]) -> T: ...

    def maybe(self) -> bool: ...


class RandomDraw:
    """Draws from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def choice(self, values: Sequence[T]) -> T:
        return self.random.choice(values)

    def maybe(self) -> bool:
        return self.random.random() < 0.5


def drawn(arguments: Callable[[Draw], dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    """The same arguments as hypothesis draws and shrinks them."""
    from hypothesis import strategies as st

    class HypothesisDraw:
        def __init__(self, draw: st.DrawFn) -> None:
            self.draw = draw

        def integer(self, low: int, high: int) -> int:
            return self.draw(st.integers(low, high))

        def choice(self, values: Sequence[T]) -> T:
            return self.draw(st.sampled_from(values))

        def maybe(self) -> bool:
            return self.draw(st.booleans())

    return st.composite(lambda draw: arguments(HypothesisDraw(draw)))()


def ranged(draw: Draw, *ranges: tuple[int, int]) -> int:
    """A number from one of the ranges, each as likely as the others."""
    return draw.integer(*draw.choice(ranges))


def settings(draw: Draw) -> dict[str, Any]:
    """What both attention ops take beside their tensors."""
    options: dict[str, Any] = {
        "softcap": draw.choice((0.0, 0.0, 1.0, 30.0)),
        "batch_invariant": draw.maybe(),
        "num_splits": draw.choice(SPLITS),
    }
    if draw.maybe():
        options["softmax_scale"] = draw.choice((0.05, 0.3))
    return options


def cache_arguments(draw: Draw) -> dict[str, Any]:
    group = draw.choice(GROUPS)
    heads_kv = draw.integer(1, 3 if group < 8 else 1)
    fp8 = draw.maybe()
    return {
        "seed": draw.integer(0, 2**31),
        "dtype": draw.choice((torch.float32, *HALF)),
        "fp8": fp8,
        "descale": draw.choice(("none", "one", "head", "request")) if fp8 else "none",
        "heads_q": group * heads_kv,
        "heads_kv": heads_kv,
        "head_dim": draw.choice(HEAD_DIMS),
        "page_size": draw.choice(PAGE_SIZES),
        "layout": draw.choice(LAYOUTS),
        "strided": draw.maybe(),
        "with_sinks": draw.maybe(),
    }


def verify_arguments(draw: Draw) -> dict[str, Any]:
    """Of a VerifyCase."""
    batch = draw.integer(1, 4)
    options = settings(draw)
    options["causal"] = draw.choice((True, True, False))
    bounds = ((-1, -1), (0, 80))
    if draw.maybe():
        options["window_size"] = (ranged(draw, *bounds), ranged(draw, *bounds))
    dump = draw.choice(DUMPS)
    summed = dump in ("token", "token_weight")
    return {
        **cache_arguments(draw),
        "lengths": [ranged(draw, (0, 3), (1, 70), (70, 400)) for _ in range(batch)],
        "q_lens": [ranged(draw, (0, 2), (1, 9), (17, 33)) for _ in range(batch)],
        "extra_rows": draw.integer(0, 2),
        "dump": dump,
        "dump_rows": [draw.integer(0, 3) for _ in range(batch)] if draw.maybe() else None,
        "dump_len": [draw.integer(-2, 410) for _ in range(batch)] if draw.maybe() else None,
        "logits_dtype": torch.float32 if summed else draw.choice((None, torch.float32)),
        "wider": draw.choice((0, 5)),
        "hint_kind": draw.choice(("near", "near", "far")),
        "spare_columns": draw.integer(0, 2),
        "options": options,
    }


def sparse_arguments(draw: Draw) -> dict[str, Any]:
    """Of a SparseCase."""
    batch = draw.integer(0, 4)
    lengths = [ranged(draw, (0, 2), (1, 70), (70, 600)) for _ in range(batch)]
    tails = None
    if draw.maybe():
        tails = [draw.integer(-1, n + 1) if draw.maybe() else max(n - 4, 0) for n in lengths]
    logical = draw.maybe()
    repeats = draw.maybe()
    counts = [draw.integer(0, n + 5 if repeats else n) for n in lengths]
    options = settings(draw)
    spare_k = draw.integer(0, 3)
    if draw.maybe() and (logical or tails is not None):
        options["window_size"] = (draw.integer(-1, 40), draw.integer(-1, 2))
        if not logical:
            counts, spare_k = [0] * batch, 0
    return {
        **cache_arguments(draw),
        "lengths": lengths,
        "counts": counts,
        "tail_starts": tails,
        "logical": logical,
        "per_head": draw.maybe(),
        "holes": draw.choice((0, 0, 1, 5)),
        "repeats": repeats,
        "spare_k": spare_k,
        "give_lengths": draw.maybe(),
        "options": options,
    }


def select_arguments(draw: Draw) -> dict[str, Any]:
    """Of a SelectCase."""
    batch = draw.integer(0, 4)
    width = ranged(draw, (1, 40), (41, 700), (3000, 3000))
    dump = draw.choice(DUMPS[1:])
    mode = draw.choice(("logit", "weight"))
    needs_rows = dump == "all" or (dump == "rows" and mode == "weight")
    ks = ((-1, 8), (0, width + 3))
    return {
        "seed": draw.integer(0, 2**31),
        "dump": dump,
        "mode": mode,
        "batch": batch,
        "width": width,
        "layers": draw.choice((None, 1, 3)),
        "heads": draw.integer(1, 9),
        "q_lens": [draw.choice((0, 1, 1, 2, 5)) for _ in range(batch)],
        "with_rows": needs_rows or draw.maybe(),
        "seqlens": [ranged(draw, (-1, width + 2), (width, width)) for _ in range(batch)],
        "k": ranged(draw, *ks) if draw.maybe() else [ranged(draw, *ks) for _ in range(batch)],
        "dump_rows": [draw.integer(0, 3) for _ in range(batch)] if draw.maybe() else None,
        "fp32": draw.maybe(),
        "spread": draw.choice((1, 3, 100)),
        "specials": draw.choice((0.0, 0.0, 0.02, 0.5)),
        "with_sinks": draw.maybe(),
        "pool": draw.choice(((0, 0), (0, 0), (1, 0), (6, 0), (0, 3), (2, 2), (900, 900))),
        "num_sink": draw.choice((0, 0, 1, 4, 50)),
        "num_recent": draw.choice((0, 0, 1, 7, 50)),
        "count_forced": draw.maybe(),
        "per_kv_head": dump == "kv_head" and draw.maybe(),
        "page_size": draw.choice((None, 1, 7, 16, 64)),
        "max_k": ranged(draw, (0, 10), (0, width + 60)),
    }
