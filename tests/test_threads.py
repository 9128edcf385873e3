"""Threads of one process, on streams of their own: each gets what it gets alone, its errors included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import vegas_ops

HEADS_Q, HEADS_KV, HEAD_DIM, PAGE = 8, 2, 64, 16
ROWS, K = 4, 96


@dataclass
class Caller:
    """One thread's tensors. Its outputs and workspaces are its own, as concurrent streams demand."""

    device: torch.device
    seed: int
    stream: AbstractContextManager[object]

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        dtype = torch.bfloat16
        self.lengths = torch.tensor([1500, 333, 40 + self.seed], dtype=torch.int32)
        pages = [-(-int(n) // PAGE) for n in self.lengths]
        cache = torch.randn(2, sum(pages), PAGE, HEADS_KV, HEAD_DIM, generator=generator).to(dtype)
        self.k, self.v = cache.to(self.device)
        self.table = torch.full((3, max(pages)), -1, dtype=torch.int32)
        order = torch.randperm(sum(pages), generator=generator).int()
        for row, (n, part) in enumerate(zip(pages, order.split(pages), strict=True)):
            self.table[row, :n] = part
        self.table = self.table.to(self.device)
        self.q = torch.randn(3 * ROWS, HEADS_Q, HEAD_DIM, generator=generator).to(dtype).to(self.device)
        self.cu_seqlens_q = torch.arange(4, dtype=torch.int32, device=self.device) * ROWS
        self.lengths = self.lengths.to(self.device)
        bounds = {"max_batch": 3, "max_q_len": ROWS, "max_seqlen_k": 1500, "num_heads_q": HEADS_Q}
        bounds |= {"num_heads_kv": HEADS_KV, "head_dim": HEAD_DIM, "max_k": K}
        self.workspace = {
            op: vegas_ops.make_workspace(op, device=self.device, **bounds)
            for op in ("flash_attn_with_logit_dump", "topk_aggregate_logits", "sparse_paged_decode")
        }

    def round(self) -> list[Tensor]:
        """Verify, select and draft, as an engine calls them."""
        with self.stream:
            out, lse, logits, _ = vegas_ops.flash_attn_with_logit_dump(
                self.q, self.k, self.v, self.table, self.lengths, cu_seqlens_q=self.cu_seqlens_q,
                max_seqlen_q=ROWS, max_seqlen_k=1500, dump="token",
                workspace=self.workspace["flash_attn_with_logit_dump"],
            )  # fmt: skip
            candidates = self.lengths - ROWS + 1
            slots, length = vegas_ops.topk_aggregate_logits(
                logits, dump="token", seqlens=candidates, k=K, max_k=K, block_table=self.table,
                page_size=PAGE, workspace=self.workspace["topk_aggregate_logits"],
            )  # fmt: skip
            drafted, _ = vegas_ops.sparse_paged_decode(
                self.q[::ROWS], self.k, self.v, slots, length, tail_start=candidates, seqused_k=self.lengths,
                block_table=self.table, workspace=self.workspace["sparse_paged_decode"],
            )  # fmt: skip
            return [out, lse, slots, length, drafted]

    def mistake(self) -> str:
        """The message of a call that is refused, of this caller alone."""
        with pytest.raises(ValueError) as error:
            vegas_ops.topk_aggregate_logits(
                torch.zeros(1, 8, device=self.device), dump="token", k=1, max_k=1,
                seqlens=torch.zeros(self.seed + 2, dtype=torch.int32, device=self.device),
            )  # fmt: skip
        return str(error.value)


@pytest.fixture
def callers(device: torch.device) -> Iterator[list[Caller]]:
    def stream() -> AbstractContextManager[object]:
        if device.type == "cpu":
            return nullcontext()
        own = torch.cuda.Stream(device)
        own.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(own)

    yield [Caller(device, seed, stream()) for seed in range(2)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def at_once(tasks: list[Callable[[], object]]) -> None:
    """Runs each in a thread; the first error of one is that of the test."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], object]) -> None:
        try:
            start.wait()
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_on_two_streams(callers: list[Caller], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # inputs are there before other streams read them
    alone = [caller.round() for caller in callers]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert not torch.equal(alone[0][0], alone[1][0])
    together: dict[int, list[list[Tensor]]] = {0: [], 1: []}
    at_once([lambda c=c: together[c.seed].extend(c.round() for _ in range(50)) for c in callers])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for caller, expected in zip(callers, alone, strict=True):
        assert len(together[caller.seed]) == 50
        for results in together[caller.seed]:
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_errors_are_the_threads_own(callers: list[Caller]) -> None:
    expected = [caller.mistake() for caller in callers]
    assert expected[0] != expected[1]
    found: dict[int, set[str]] = {0: set(), 1: set()}
    at_once([lambda c=c: found[c.seed].update(c.mistake() for _ in range(200)) for c in callers])
    assert [found[caller.seed] for caller in callers] == [{message} for message in expected]
