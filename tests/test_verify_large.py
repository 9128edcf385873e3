"""flash_attn_with_logit_dump where calls are so large that CTAs wait for each other, to keep step.

How long they wait differs from run to run; results must not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_checks import assert_same_bits
from torch import Tensor

import vegas_ops

PAGE_SIZE = 16
PAGES = 3000  # shared by all requests: a large call of a small cache
CONTEXT = 131_072
FIELDS = ("out", "lse", "logits", "guide_lse")
LENGTHS = {
    "long": (CONTEXT, 90_001, 0, CONTEXT, 65, 100_000),
    "short": (700, 3, 64, 2_000, 0, 129),
    "one": (0, 0, CONTEXT, 0, 0, 0),
    "even": (CONTEXT,) * 6,
    "mixed": (CONTEXT - 1, 65_000, 70_000, 40, CONTEXT, CONTEXT - 64),
}


class Large:
    """A call of six requests, or more of which the last ones are empty, whose lengths may change."""

    def __init__(
        self, device: torch.device, heads_q: int, head_dim: int, rows: int, dump: str, cache: str, batch: int
    ) -> None:
        generator = torch.Generator(device).manual_seed(heads_q + rows)
        heads_kv = 8

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        self.batch = batch
        self.q = normal(batch * rows, heads_q, head_dim)
        dtype = torch.float8_e4m3fn if cache == "fp8" else torch.bfloat16
        self.caches = [normal(PAGES, PAGE_SIZE, heads_kv, head_dim).to(dtype) for _ in range(2)]
        self.table = torch.randint(
            PAGES, (batch, CONTEXT // PAGE_SIZE), dtype=torch.int32, generator=generator, device=device
        )
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        hint = torch.full((batch, 2, heads_kv), 12.0, device=device) if dump == "token_weight" else None
        self.kwargs: dict[str, Any] = {
            "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=device) * rows,
            "max_seqlen_q": rows,
            "max_seqlen_k": CONTEXT,
            "dump": dump,
            "guide_lse_hint": hint,
        }
        bounds = {"num_heads_q": heads_q, "num_heads_kv": heads_kv, "head_dim": head_dim, "device": device}
        self.workspace = vegas_ops.make_workspace(
            "flash_attn_with_logit_dump", max_batch=batch, max_q_len=rows, max_seqlen_k=CONTEXT, **bounds
        )

    def set(self, kind: str) -> None:
        self.lengths.zero_()
        self.lengths[: len(LENGTHS[kind])] = torch.tensor(LENGTHS[kind], dtype=torch.int32)

    def __call__(self, **options: Any) -> vegas_ops.AttentionWithDump:
        return vegas_ops.flash_attn_with_logit_dump(
            self.q, *self.caches, self.table, self.lengths, workspace=self.workspace, **self.kwargs, **options
        )

    def seen(self, result: vegas_ops.AttentionWithDump) -> list[tuple[str, Tensor]]:
        """What the call has written: dumps are not beyond the lengths."""
        fields = [(name, getattr(result, name)) for name in FIELDS]
        written = []
        for name, value in fields:
            if value is None:
                continue
            if name == "logits":
                rows = self.kwargs["max_seqlen_q"]
                ends = (self.lengths - rows + 1).clamp(min=0)
                keys = torch.arange(value.shape[-1], device=value.device)
                beyond = keys >= ends.view(-1, *[1] * (value.dim() - 1))
                value = value.masked_fill(beyond, 0)
            written.append((name, value))
        return written


CALLS = [
    (16, 64, 3, "token_weight", "bf16", 6),
    (32, 128, 8, "token_weight", "bf16", 6),
    (32, 128, 17, "token", "bf16", 6),
    (32, 128, 1, "none", "bf16", 6),
    (64, 64, 12, "kv_head", "bf16", 6),
    (32, 128, 70, "token_weight", "bf16", 6),
    (32, 128, 40, "none", "bf16", 6),
    (16, 64, 3, "token", "fp8", 6),
    (16, 64, 3, "token_weight", "bf16", 40),
]


@pytest.mark.parametrize("arguments", CALLS, ids=str)
def test_large_calls(cuda: torch.device, arguments: tuple[Any, ...]) -> None:
    """The same bits in every run, and what other shares say, whose CTAs never wait."""
    call = Large(cuda, *arguments)
    for kind in LENGTHS:
        call.set(kind)
        first = call.seen(call())
        for _ in range(4):
            for (name, got), (_, expected) in zip(call.seen(call()), first, strict=True):
                assert_same_bits(got, expected, f"{name}, {kind}")
        apart = call.seen(call(num_splits=16))
        for (name, got), (_, expected) in zip(first, apart, strict=True):
            got, expected = got.float(), expected.float()
            tolerance: Tensor | float = 1e-4
            if name == "out":
                tolerance = expected.std(-1, keepdim=True) / 25
            elif name == "logits":
                tolerance = expected.abs() / 100 + (1e-7 if call.kwargs["dump"] == "token_weight" else 1e-2)
            close = (got == expected) | ((got - expected).abs() <= tolerance)
            assert bool(close.all()), f"{name}, {kind}: {int((~close).sum())} differ"


@pytest.mark.parametrize("arguments", CALLS[:3], ids=str)
def test_replays_with_other_lengths(cuda: torch.device, arguments: tuple[Any, ...]) -> None:
    """Steps are counted anew in every call, whether those of the last were or not."""
    call = Large(cuda, *arguments)
    expected = {}
    for kind in LENGTHS:
        call.set(kind)
        expected[kind] = call.seen(call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for _ in range(3)]
    for kind in (*LENGTHS, *reversed(LENGTHS)):
        call.set(kind)
        graph.replay()
        for result in results:
            for (name, got), (_, wanted) in zip(call.seen(result), expected[kind], strict=True):
                assert_same_bits(got, wanted, f"{name}, {kind}")


@pytest.mark.parametrize("dump", ("none", "token_weight"))
def test_batch_invariant_large_calls(cuda: torch.device, dump: str) -> None:
    """A request alone says the same, though other CTAs wait."""
    call = Large(cuda, 16, 64, 3, dump, "bf16", 6)
    call.set("long")
    together = call(batch_invariant=True)
    lengths = call.lengths.clone()
    for b in (0, 4, 5):
        call.lengths.zero_()
        call.lengths[b] = lengths[b]
        alone = call(batch_invariant=True)
        rows = slice(3 * b, 3 * b + 3)
        assert_same_bits(alone.out[rows], together.out[rows], f"out of request {b}")
        assert_same_bits(alone.lse[:, rows], together.lse[:, rows], f"lse of request {b}")
        if alone.logits is not None and together.logits is not None:
            end = int(lengths[b]) - 2
            assert_same_bits(alone.logits[b, :end], together.logits[b, :end], f"logits of request {b}")
