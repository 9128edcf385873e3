"""Reported faults that only a GPU can show: devices, streams, graphs, residency. By number."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from case_rules import on_side_stream
from op_cases import SENTINEL, SENTINEL_INDEX, VerifyCase, int32
from op_checks import assert_same_bits, check_select, check_verify
from torch import Tensor

import vegas_ops

# A hanging kernel does not return to the interpreter: the watchdog must be a thread.
pytestmark = pytest.mark.timeout(300, method="thread")

BF16 = torch.bfloat16


class Round:
    """Verify, select and draft over static tensors, whose lengths may be rewritten in place."""

    def __init__(self, device: torch.device, seed: int, capacity: int, batch: int) -> None:
        rows, max_k = 3, 64
        self.case = VerifyCase(
            seed=seed, device=device, dtype=BF16, lengths=(capacity,) * batch,
            q_lens=(rows,) * batch, dump="kv_head", heads_q=8,
        )  # fmt: skip
        sizes: dict[str, Any] = {
            "max_batch": batch, "max_q_len": rows, "max_seqlen_k": capacity, "max_k": max_k,
            "num_heads_q": 8, "num_heads_kv": 2, "head_dim": 64, "device": device,
        }  # fmt: skip
        self.workspaces = [
            vegas_ops.make_workspace("flash_attn_with_logit_dump", **sizes),
            vegas_ops.make_workspace("topk_aggregate_logits", **sizes),
            vegas_ops.make_workspace("sparse_paged_decode", **sizes),
        ]
        self.kwargs = self.case.kwargs  # made once: a graph must not copy from the host
        self.candidates = self.case.seqused_k - rows + 1
        self.k = int32([max_k] * batch, device)
        self.draft_q = self.case.q[:batch].contiguous()
        self.outputs = self.case.outputs(SENTINEL)
        self.indices = torch.zeros((batch, max_k), dtype=torch.int32, device=device)
        self.counts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.draft_out = torch.zeros_like(self.draft_q)
        self.draft_lse = torch.zeros((8, batch), device=device)

    def set_lengths(self, lengths: list[int], k: list[int]) -> None:
        device = self.case.device
        self.case.seqused_k.copy_(int32(lengths, device))
        self.candidates.copy_(self.case.seqused_k - self.case.q_lens[0] + 1)
        self.k.copy_(int32(k, device))

    def poison(self) -> None:
        for tensor in (*self.outputs.values(), self.draft_out, self.draft_lse):
            tensor.fill_(SENTINEL)
        self.indices.fill_(SENTINEL_INDEX)
        self.counts.fill_(SENTINEL_INDEX)

    def run(self) -> None:
        for op in ("flash_attn_with_logit_dump", "topk_aggregate_logits", "sparse_paged_decode"):
            self.run_op(op)

    def run_op(self, op: str) -> None:
        case = self.case
        if op == "flash_attn_with_logit_dump":
            vegas_ops.flash_attn_with_logit_dump(
                *case.args, **self.kwargs, **self.outputs, workspace=self.workspaces[0]
            )
        elif op == "topk_aggregate_logits":
            vegas_ops.topk_aggregate_logits(
                self.outputs["logits"], dump="kv_head", mode="weight", guide_lse=self.outputs["guide_lse"],
                seqlens=self.candidates, k=self.k, max_k=self.indices.shape[1], pool=(2, 0),
                block_table=case.block_table, page_size=case.page_size, indices=self.indices,
                topk_length=self.counts, workspace=self.workspaces[1],
            )  # fmt: skip
        else:
            vegas_ops.sparse_paged_decode(
                self.draft_q, case.k_cache, case.v_cache, self.indices, self.counts,
                tail_start=self.candidates, seqused_k=case.seqused_k, block_table=case.block_table,
                out=self.draft_out, lse=self.draft_lse,
                workspace=self.workspaces[2],
            )  # fmt: skip

    def results(self) -> dict[str, Tensor]:
        named = {
            **self.outputs, "indices": self.indices, "topk_length": self.counts,
            "draft out": self.draft_out, "draft lse": self.draft_lse,
        }  # fmt: skip
        return {name: tensor.clone() for name, tensor in named.items()}

    def eager(self) -> dict[str, Tensor]:
        self.poison()
        self.run()
        return self.results()


def assert_same_results(got: dict[str, Tensor], want: dict[str, Tensor], when: str) -> None:
    for name, tensor in got.items():
        assert_same_bits(tensor, want[name], f"{name} {when}")


def test_case_042_tensors_on_the_second_gpu(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    second = torch.device("cuda:1")
    with torch.cuda.device(0):
        check_verify(VerifyCase(device=second, dtype=BF16, lengths=(40, 9), q_lens=(3, 1)))
        logits = torch.randn((2, 500), device=second)
        check_select(logits, dump="token", seqlens=int32((500, 30), second), k=50, max_k=64)
        on_second = Round(second, seed=1, capacity=300, batch=2)
        want = Round(torch.device("cuda:0"), seed=1, capacity=300, batch=2).eager()
        got = {name: tensor.to("cuda:0") for name, tensor in on_second.eager().items()}
        assert_same_results(got, want, "on the second GPU")
        assert torch.cuda.current_device() == 0
        case = VerifyCase(device=second, dtype=BF16, lengths=(40,), q_lens=(1,))
        with pytest.raises(ValueError, match="`block_table`"):
            vegas_ops.flash_attn_with_logit_dump(
                *case.args[:3], case.block_table.to("cuda:0"), case.seqused_k, **case.kwargs
            )
        assert torch.cuda.current_device() == 0


def test_case_044_two_streams(cuda: torch.device) -> None:
    """Interleaved calls on two streams without any synchronisation, a workspace each."""
    rounds = [Round(cuda, seed=seed, capacity=2000, batch=3) for seed in (1, 2)]
    want = [one.eager() for one in rounds]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    mismatches = [torch.zeros((), dtype=torch.int64, device=cuda) for _ in rounds]
    for _ in range(200):
        for i, (one, stream) in enumerate(zip(rounds, streams, strict=True)):
            with torch.cuda.stream(stream):
                one.poison()
                one.run()
                for name, tensor in one.results().items():
                    # Both hold the same sentinel where nothing is written, and no NaN.
                    mismatches[i] += (tensor != want[i][name]).sum()
    torch.cuda.synchronize()
    assert [int(count) for count in mismatches] == [0, 0]
    # Workspaces that the wrappers allocate are not shared either.
    cases = [
        VerifyCase(seed=seed, device=cuda, dtype=BF16, lengths=(1500, 9), q_lens=(3, 1)) for seed in (3, 4)
    ]
    plain = [vegas_ops.flash_attn_with_logit_dump(*c.args, **c.kwargs).out for c in cases]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                result = vegas_ops.flash_attn_with_logit_dump(*cases[i].args, **cases[i].kwargs)
                results[i].append(result.out)
    torch.cuda.synchronize()
    for i in (0, 1):
        for out in results[i]:
            assert_same_bits(out, plain[i], f"out of stream {i}")


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def test_case_046_replay_at_other_lengths(cuda: torch.device) -> None:
    one = Round(cuda, seed=1, capacity=4096, batch=2)
    one.set_lengths([16, 16], [8, 8])
    graph = captured(one.run)
    replays = (
        ([16, 4096], [8, 64]), ([1, 1], [1, 1]), ([4096, 16], [64, 0]), ([0, 0], [64, 64]),
        ([0, 3000], [5, 64]), ([16, 16], [8, 8]),
    )  # fmt: skip
    for lengths, k in replays:
        one.set_lengths(lengths, k)
        want = one.eager()
        for _ in range(2):
            one.poison()
            graph.replay()
            assert_same_results(one.results(), want, f"replayed at {lengths}")
    # New pages under the same graph.
    order = torch.randperm(one.case.k_cache.shape[0], generator=torch.Generator().manual_seed(0)).to(cuda)
    one.set_lengths([4000, 2500], [64, 64])
    before = one.eager()
    inverse = torch.argsort(order)
    one.case.k_cache.copy_(one.case.k_cache[order].clone())
    one.case.v_cache.copy_(one.case.v_cache[order].clone())
    pages = one.case.block_table.clamp(0, len(order) - 1).long()
    one.case.block_table.copy_(inverse[pages])
    one.poison()
    graph.replay()
    after = one.results()
    for name in ("out", "lse", "draft out", "guide_lse"):
        assert_same_bits(after[name], before[name], f"{name} after moving the pages")


def test_case_047_metadata_has_one_size(cuda: torch.device) -> None:
    """Graphs of several batch sizes, replayed in random order, with automatic splits."""
    rounds, graphs, wants = {}, {}, {}
    sizes = set()
    for batch in (1, 2, 4, 8):
        one = Round(cuda, seed=batch, capacity=1024, batch=batch)
        lengths = [1024 - 100 * b for b in range(batch)]
        one.set_lengths(lengths, [64] * batch)
        rounds[batch], wants[batch] = one, one.eager()
        graphs[batch] = captured(one.run)
        for length in (1, 1024):
            metadata = vegas_ops.build_scheduler_metadata(
                "flash_attn_with_logit_dump", cu_seqlens_q=one.kwargs["cu_seqlens_q"],
                seqused_k=torch.full_like(one.case.seqused_k, length), max_seqlen_q=3,
                max_seqlen_k=1024, num_heads_q=8, num_heads_kv=2, head_dim=64, page_size=16,
            )  # fmt: skip
            sizes.add((batch, tuple(metadata.shape)))
    assert len(sizes) == 4, "the size of the metadata follows the lengths"
    generator = random.Random(0)
    used = torch.cuda.memory_allocated()
    for _ in range(20):
        batch = generator.choice((1, 2, 4, 8))
        rounds[batch].poison()
        graphs[batch].replay()
        assert_same_results(rounds[batch].results(), wants[batch], f"of batch {batch}")
    assert torch.cuda.memory_allocated() <= used


def test_case_058_busy_gpu(cuda: torch.device) -> None:
    """Selection ends while another stream keeps the multiprocessors busy."""
    logits = torch.randn((64, 100000), device=cuda)
    kwargs: dict[str, Any] = {
        "dump": "token", "seqlens": int32([100000] * 64, cuda), "k": 1024, "max_k": 1024,
    }  # fmt: skip
    want, _ = vegas_ops.topk_aggregate_logits(logits, **kwargs)
    busy = torch.cuda.Stream()
    matrix = torch.randn((8192, 8192), device=cuda, dtype=BF16)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(1000):
            torch.mm(matrix, matrix)
    results: list[Tensor] = []
    for _ in range(20):
        on_side_stream(cuda, lambda: results.append(vegas_ops.topk_aggregate_logits(logits, **kwargs)[0]))
    torch.cuda.synchronize()
    for indices in results:
        assert_same_bits(indices, want, "indices")


@pytest.fixture
def few_multiprocessors(cuda: torch.device) -> Iterator[torch.cuda.ExternalStream]:
    """A stream whose kernels run on eight multiprocessors or so, and do not know it."""
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "cuGreenCtxStreamCreate"):
        pytest.skip("needs a driver for CUDA 12.5 or newer")

    def call(name: str, *arguments: object) -> None:
        error = getattr(driver, name)(*arguments)
        if error:
            pytest.skip(f"{name}: error {error} of the driver")

    torch.zeros(1, device=cuda)  # torch's own context
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
    everything, few, rest = (ctypes.create_string_buffer(1024) for _ in range(3))
    call("cuDeviceGetDevResource", device, everything, 1)  # 1: multiprocessors
    groups = ctypes.c_uint(1)
    call("cuDevSmResourceSplitByCount", few, ctypes.byref(groups), everything, rest, 0, 8)
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevResourceGenerateDesc", ctypes.byref(description), few, 1)
    call("cuGreenCtxCreate", ctypes.byref(context), description, device, 1)
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, 1, 0)  # 1: beside the default stream
    yield torch.cuda.ExternalStream(stream.value)
    torch.cuda.synchronize()
    call("cuStreamDestroy_v2", stream)
    call("cuGreenCtxDestroy", context)


@pytest.mark.parametrize("k", (64, 1024))
@pytest.mark.parametrize("lists", (1, 64))
def test_case_058_few_multiprocessors(
    cuda: torch.device, few_multiprocessors: torch.cuda.ExternalStream, lists: int, k: int
) -> None:
    """Selection ends, with the same bits, where far fewer CTAs run at a time than the device has room for."""
    logits = torch.randn((lists, 100000), device=cuda)
    kwargs: dict[str, Any] = {
        "dump": "token", "seqlens": int32([100000] * lists, cuda), "k": k, "max_k": k,
    }  # fmt: skip
    want, _ = vegas_ops.topk_aggregate_logits(logits, **kwargs)
    torch.cuda.synchronize()
    with torch.cuda.stream(few_multiprocessors):
        got, _ = vegas_ops.topk_aggregate_logits(logits, **kwargs)
    few_multiprocessors.synchronize()
    assert_same_bits(got, want, "indices")


def test_case_058_a_round_on_few_multiprocessors(
    cuda: torch.device, few_multiprocessors: torch.cuda.ExternalStream
) -> None:
    """Verification and drafts wait for CTAs as well."""
    one = Round(cuda, seed=5, capacity=20000, batch=4)
    one.set_lengths([20000, 900, 15000, 7], [64, 64, 9, 0])
    want = one.eager()
    torch.cuda.synchronize()
    with torch.cuda.stream(few_multiprocessors):
        got = one.eager()
    few_multiprocessors.synchronize()
    assert_same_results(got, want, "on few multiprocessors")


def test_case_045_failed_launches_are_errors_of_their_call(cuda: torch.device) -> None:
    """On a stream whose capture was spoilt nothing can be launched: each op says so, and what is called next
    on another stream finds nothing of it."""
    driver = ctypes.CDLL("libcuda.so.1")
    one = Round(cuda, seed=6, capacity=300, batch=2)
    one.set_lengths([300, 200], [64, 30])
    want = one.eager()
    torch.cuda.synchronize()
    side, graph = torch.cuda.Stream(), ctypes.c_void_p()
    handle = ctypes.c_void_p(side.cuda_stream)
    for op in ("flash_attn_with_logit_dump", "topk_aggregate_logits", "sparse_paged_decode"):
        assert driver.cuStreamBeginCapture_v2(handle, 2) == 0  # 2: of this stream alone
        assert driver.cuStreamSynchronize(handle) != 0  # spoils it
        with torch.cuda.stream(side), pytest.raises(RuntimeError, match=f"{op}: launch failed"):
            one.run_op(op)
        assert driver.cuStreamEndCapture(handle, ctypes.byref(graph)) != 0
        assert_same_results(one.eager(), want, f"after {op} failed")
