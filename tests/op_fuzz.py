"""Random calls of the ops, and random sequences of them over the same buffers, against the oracles.

A case follows from its seed alone. Its inputs and its oracle are computed on the CPU; the op runs where
it is told to, always twice: over outputs full of a sentinel and full of NaN, on a GPU on two streams at a
time. Then lengths, counts and rows change in place, on a GPU under a captured graph, and it runs again.

Workspaces outlive a case: what a call leaves in one is what the calls of all later cases find, of whatever
shape, with refused calls and discarded captures in between.

Processes that share a GPU take turns on it, and each wait for it costs a turn. So inputs go there in one
transfer, results come back in one, and nothing else waits.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Protocol

import torch
from op_cases import SENTINEL, SENTINEL_INDEX, SelectCase, SparseCase, VerifyCase, int32, send, twin
from op_checks import (
    assert_same_bits,
    assert_selection,
    assert_sums,
    bound_sparse,
    bound_verify,
    sums_of_head,
)
from op_draws import (
    DUMPS,
    HALF,
    Draw,
    RandomDraw,
    ranged,
    select_arguments,
    sparse_arguments,
    verify_arguments,
)
from torch import Tensor

import vegas_ops
from vegas_ops import reference

CPU = torch.device("cpu")
Outputs = dict[str, Tensor]
Workspaces = dict[str, Tensor]

VERIFY, SELECT, SPARSE = "flash_attn_with_logit_dump", "topk_aggregate_logits", "sparse_paged_decode"
LONG = "verification within wide bounds"

# What bounds the cases below.
BOUNDS: dict[str, dict[str, Any]] = {
    VERIFY: {
        "max_q_len": 33, "max_seqlen_k": 1024, "num_heads_q": 24, "num_heads_kv": 3, "head_dim": 256,
    },
    LONG: {
        "op": VERIFY, "max_q_len": 9, "max_seqlen_k": 2**16 + 300, "num_heads_q": 64, "num_heads_kv": 16,
        "head_dim": 128,
    },
    SELECT: {
        "max_q_len": 33, "max_seqlen_k": 3200, "max_k": 3200, "layers": 3, "num_heads_q": 9,
        "num_heads_kv": 9, "head_dim": 256,
    },
    SPARSE: {
        "max_q_len": 1, "max_seqlen_k": 2048, "max_k": 700, "num_heads_q": 24, "num_heads_kv": 3,
        "head_dim": 256,
    },
}  # fmt: skip


class Surroundings:
    """What cases of one process share: streams, and a workspace of each op for each stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else []
        self.workspaces = [self._workspaces() for _ in self.streams]

    def _workspaces(self) -> Workspaces:
        return {
            name: vegas_ops.make_workspace(**{"op": name, "max_batch": 4, "device": self.device, **bounds})
            for name, bounds in BOUNDS.items()
        }


class Subject(Protocol):
    """A call, or a sequence of them, over inputs that stay where they are."""

    def outputs(self, kind: int) -> Outputs:
        """On the device, full of SENTINEL (0) or of NaN (1)."""

    def run(self, outputs: Outputs, workspaces: Workspaces) -> None: ...

    def vary(self, draw: Draw) -> None:
        """Other lengths, in place."""

    def check(self, got: Outputs, again: Outputs) -> None:
        """Against the oracle; on the CPU, `got` of kind 0 and `again` of kind 1."""


def filled(kind: int, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    value = (SENTINEL, math.nan)[kind] if dtype.is_floating_point else (SENTINEL_INDEX, 0)[kind]
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def put(target: Tensor | None, values: list[int]) -> None:
    if target is not None:
        target.copy_(send(int32(values), target.device).view(target.shape))


def for_device(arguments: dict[str, Any], device: torch.device, draw: Draw) -> dict[str, Any]:
    if device.type == "cuda" and arguments["dtype"] == torch.float32:
        arguments["dtype"] = draw.choice(HALF)
    return arguments


class AttentionSubject:
    """An attention op, whose calls are made of a paged case and of its twin on the device."""

    op: str
    workspace: str  # which it takes of BOUNDS
    twin: Any
    kwargs: dict[str, Any]  # made once: a graph must not copy from the host

    def outputs(self, kind: int) -> Outputs:
        return self.twin.outputs((SENTINEL, math.nan)[kind])

    def run(self, outputs: Outputs, workspaces: Workspaces) -> None:
        op = getattr(vegas_ops, self.op)
        op(*self.twin.args, **self.kwargs, **outputs, workspace=workspaces.get(self.workspace))


def within_long(case: VerifyCase) -> bool:
    """Whether the workspace LONG serves it."""
    bounds = BOUNDS[LONG]
    within = case.heads_q <= bounds["num_heads_q"] and case.heads_kv <= bounds["num_heads_kv"]
    return within and case.head_dim <= bounds["head_dim"] and max([*case.q_lens, 0]) <= bounds["max_q_len"]


class VerifySubject(AttentionSubject):
    op = VERIFY

    def __init__(self, draw: Draw, device: torch.device, **fixed: Any) -> None:
        self.device = device
        self.case = case = VerifyCase(**{**for_device(verify_arguments(draw), device, draw), **fixed})
        self.twin = twin(case, device, call=case.kwargs)
        self.longest = (list(case.lengths), list(case.q_lens))
        self.kwargs = self.twin.call
        long = "max_seqlen_k" in case.options or (within_long(case) and draw.maybe())
        self.workspace = LONG if long else VERIFY

    def vary(self, draw: Draw) -> None:
        case = self.case
        lengths, q_lens = self.longest
        case.lengths = [draw.integer(0, n) if draw.maybe() else n for n in lengths]
        case.q_lens = [draw.integer(0, n) if draw.maybe() else n for n in q_lens]
        case.cu = [sum(case.q_lens[:b]) for b in range(case.batch + 1)]
        if case.dump_rows is not None:
            case.dump_rows = [draw.integer(0, 3) for _ in lengths]
            put(self.kwargs["dump_rows"], case.dump_rows)
        if case.dump_len is not None:
            case.dump_len = [draw.integer(-2, 410) for _ in lengths]
            put(self.kwargs["dump_len"], case.dump_len)
        put(case.seqused_k, case.lengths)
        put(self.twin.seqused_k, case.lengths)
        put(self.kwargs["cu_seqlens_q"], case.cu)

    def check(self, got: Outputs, again: Outputs) -> None:
        bound_verify(self.case).check(got, again)


class LongSubject(VerifySubject):
    """Bounds so wide that on Hopper the CTAs of a team exchange their heads' parts of a summed dump."""

    def __init__(self, draw: Draw, device: torch.device) -> None:
        batch = draw.choice((3, 4))
        heads_kv = draw.choice((11, 12, 16) if batch == 3 else (8, 9, 16))
        bound = 2**21 // (batch * heads_kv) + draw.integer(1, 300)  # parts of 8 MB
        lengths = [ranged(draw, (0, 3), (1, 70), (70, 400)) for _ in range(batch)]
        options: dict[str, Any] = {"max_seqlen_k": bound}
        options.update(draw.choice(({}, {}, {"batch_invariant": True}, {"num_splits": 3})))
        if draw.maybe():
            options["window_size"] = (draw.integer(0, 300), 0)
        super().__init__(
            draw, device, heads_kv=heads_kv, heads_q=heads_kv * draw.choice((1, 1, 2, 4)), descale="none",
            head_dim=draw.choice((64, 64, 128)), page_size=draw.choice((16, 64)), lengths=lengths,
            q_lens=[draw.integer(0, 3) for _ in lengths], dump=draw.choice(("token", "token_weight")),
            dump_rows=None, dump_len=None, logits_dtype=torch.float32, options=options,
            wider=bound - max([*lengths, 1]),
        )  # fmt: skip


class SparseSubject(AttentionSubject):
    op = workspace = SPARSE

    def __init__(self, draw: Draw, device: torch.device) -> None:
        self.device = device
        self.case = SparseCase(**for_device(sparse_arguments(draw), device, draw))
        self.twin = twin(self.case, device, call=self.case.kwargs)
        self.lengths, self.counts = list(self.case.lengths), self.case.topk_length.clone()
        self.kwargs = self.twin.call

    def vary(self, draw: Draw) -> None:
        case = self.case
        case.lengths = [draw.integer(0, n) if draw.maybe() else n for n in self.lengths]
        for one in (case, self.twin):
            put(one.seqused_k, case.lengths)
        if case.tail_starts is not None:
            case.tail_starts = [draw.integer(-1, n + 1) for n in case.lengths]
            put(self.kwargs["tail_start"], case.tail_starts)
        counts = [draw.integer(-1, n) if draw.maybe() else n for n in self.counts.flatten().tolist()]
        put(case.topk_length, counts)
        put(self.twin.topk_length, counts)

    def check(self, got: Outputs, again: Outputs) -> None:
        bound_sparse(self.case).check(got, again)


class SelectSubject:
    """Selection, and the sums alone."""

    op = workspace = SELECT

    def __init__(self, draw: Draw, device: torch.device) -> None:
        self.device = device
        self.case = SelectCase(CPU, **select_arguments(draw))
        self.twin = twin(self.case, device)

    def outputs(self, kind: int) -> Outputs:
        c = self.case.arguments
        lead = (() if c["layers"] is None else (c["layers"],)) + (c["batch"],)
        lists = (*lead, c["heads"]) if c["per_kv_head"] else lead
        return {
            "indices": filled(kind, (*lists, c["max_k"]), torch.int32, self.device),
            "topk_length": filled(kind, lists, torch.int32, self.device),
            "sums": filled(kind, (*lead, c["width"]), torch.float32, self.device),
        }

    def run(self, outputs: Outputs, workspaces: Workspaces) -> None:
        one = self.twin
        vegas_ops.aggregate_logits(one.logits, **one.dump_kwargs, out=outputs["sums"])
        vegas_ops.topk_aggregate_logits(
            one.logits, **one.dump_kwargs, **one.kwargs, indices=outputs["indices"],
            topk_length=outputs["topk_length"], workspace=workspaces.get(self.op),
        )  # fmt: skip

    def vary(self, draw: Draw) -> None:
        c = self.case.arguments
        lengths = [draw.integer(-1, max(n, 0)) if draw.maybe() else n for n in c["seqlens"]]
        ks = [draw.integer(-1, c["width"] + 3) for _ in lengths]
        bits = [draw.integer(0, 3) for _ in lengths]
        for one in (self.case, self.twin):
            put(one.dump_kwargs["seqlens"], lengths)
            put(one.dump_kwargs["dump_rows"], bits)
            if isinstance(one.kwargs["k"], Tensor):
                put(one.kwargs["k"], ks)

    def check(self, got: Outputs, again: Outputs) -> None:
        case = self.case
        assert_sums(got["sums"], again["sums"], case.error, case.logits, **case.dump_kwargs)
        for name in ("indices", "topk_length"):
            assert_same_bits(got[name], again[name], f"{name} of two calls")
        assert_selection(
            case, got["indices"], got["topk_length"], got["sums"],
            lambda head: sums_of_head(self.twin, head).to(CPU),
        )  # fmt: skip


class RoundSubject(VerifySubject):
    """Verify, select from its dump, and draft from that selection: every call writes what the next reads."""

    def __init__(self, draw: Draw, device: torch.device) -> None:
        dump = draw.choice(DUMPS[1:5])
        super().__init__(draw, device, dump=dump, dump_len=None, logits_dtype=None)
        case = self.case
        case.q_lens = list(case.q_lens)
        self.mode = "weight" if dump in ("kv_head", "rows") else "logit"
        self.pool = draw.choice(((0, 0), (6, 0), (1, 2)))
        self.forced = {"num_sink": draw.choice((0, 2)), "num_recent": draw.choice((0, 3))}
        self.max_k = draw.integer(0, 90)
        self.k = [draw.integer(0, self.max_k) for _ in case.lengths]
        self.draft_q = case.random(case.batch, case.heads_q, case.head_dim).to(case.dtype)
        self.draft_q_there = send(self.draft_q, device)
        self.candidates = send(int32(self._candidates()), device)
        self.k_there = send(int32(self.k), device)

    def _candidates(self) -> list[int]:
        return [min(n - rows + 1, n) for n, rows in zip(self.case.lengths, self.case.q_lens, strict=True)]

    def outputs(self, kind: int) -> Outputs:
        case, device = self.case, self.device
        return {
            **super().outputs(kind),
            "sums": filled(kind, (case.batch, case.max_seqlen_k + case.wider), torch.float32, device),
            "indices": filled(kind, (case.batch, self.max_k), torch.int32, device),
            "topk_length": filled(kind, (case.batch,), torch.int32, device),
            "draft out": filled(kind, self.draft_q.shape, case.dtype, device),
            "draft lse": filled(kind, (case.heads_q, case.batch), torch.float32, device),
        }

    def _dump(self, outputs: Outputs, on: Any, candidates: Tensor, cu_seqlens_q: Tensor) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "dump": on.dump, "mode": self.mode, "seqlens": candidates, "cu_seqlens_q": cu_seqlens_q,
        }  # fmt: skip
        if on.dump == "kv_head":
            kwargs["guide_lse"] = outputs["guide_lse"]
        if on.dump == "rows":
            kwargs.update(lse=outputs["lse"], sinks=on.sinks)
        return kwargs

    def run(self, outputs: Outputs, workspaces: Workspaces) -> None:
        one = self.twin
        verified = {name: outputs[name] for name in ("out", "lse", "logits", "guide_lse") if name in outputs}
        super().run(verified, workspaces)
        kwargs = self._dump(outputs, one, self.candidates, self.kwargs["cu_seqlens_q"])
        kwargs["dump_rows"] = self.kwargs["dump_rows"]
        vegas_ops.aggregate_logits(outputs["logits"], **kwargs, out=outputs["sums"])
        vegas_ops.topk_aggregate_logits(
            outputs["logits"], **kwargs, k=self.k_there, max_k=self.max_k, pool=self.pool, **self.forced,
            block_table=one.block_table, page_size=one.page_size, indices=outputs["indices"],
            topk_length=outputs["topk_length"], workspace=workspaces.get(SELECT),
        )  # fmt: skip
        vegas_ops.sparse_paged_decode(
            self.draft_q_there, one.k_cache, one.v_cache, outputs["indices"], outputs["topk_length"],
            tail_start=self.candidates, seqused_k=one.seqused_k, block_table=one.block_table,
            sinks=one.sinks, k_descale=one.k_descale, v_descale=one.v_descale, softcap=one.softcap,
            softmax_scale=one.scale, out=outputs["draft out"], lse=outputs["draft lse"],
            workspace=workspaces.get(SPARSE),
        )  # fmt: skip

    def vary(self, draw: Draw) -> None:
        super().vary(draw)
        self.k = [draw.integer(-1, self.max_k + 9) for _ in self.k]
        put(self.k_there, self.k)
        put(self.candidates, self._candidates())

    def check(self, got: Outputs, again: Outputs) -> None:
        case = self.case
        super().check(got, again)
        candidates = int32(self._candidates())
        kwargs = self._dump(got, case, candidates, int32(case.cu))
        kwargs["dump_rows"] = None if case.dump_rows is None else int32(case.dump_rows)
        # The exponent of a weight is rounded to fp32, so its weight is off in proportion to it.
        norms = [kwargs[name] for name in ("lse", "guide_lse") if name in kwargs]
        exponents = torch.cat([t[t.isfinite() & (t != SENTINEL)].float() for t in (got["logits"], *norms)])
        largest = max([0.0, *exponents.abs().tolist()])
        error = 2e-6 + 2.0**-21 * largest if self.mode == "weight" else 0.0
        assert_sums(got["sums"], again["sums"], error, got["logits"], **kwargs)
        for name in ("indices", "topk_length"):
            assert_same_bits(got[name], again[name], f"{name} of two calls")
        want = reference.topk_aggregate_logits(
            got["sums"], dump="token", seqlens=candidates, k=int32(self.k), max_k=self.max_k, pool=self.pool,
            **self.forced, block_table=case.block_table, page_size=case.page_size,
        )  # fmt: skip
        assert_same_bits(got["topk_length"], want[1], "topk_length")
        assert_same_bits(got["indices"], want[0], "indices")
        draft = copy.copy(case)
        draft.__class__ = SparseCase  # of the same cache
        draft.q, draft.indices, draft.topk_length = self.draft_q, got["indices"], got["topk_length"]
        draft.tail_starts, draft.logical, draft.per_head, draft.give_lengths = (
            candidates.tolist(),
            False,
            False,
            True,
        )
        draft.options = {"softcap": case.softcap, "softmax_scale": case.scale}
        bound_sparse(draft).check(
            {"out": got["draft out"], "lse": got["draft lse"]},
            {"out": again["draft out"], "lse": again["draft lse"]},
        )


class SequenceSubject:
    """Calls of several others one after the other, with nothing between them."""

    def __init__(self, draw: Draw, device: torch.device) -> None:
        kinds = (LongSubject, LongSubject, VerifySubject, SparseSubject, SelectSubject, RoundSubject)
        self.members: list[Subject] = [draw.choice(kinds)(draw, device) for _ in range(draw.integer(2, 4))]

    def outputs(self, kind: int) -> Outputs:
        return {
            f"{i} {name}": tensor
            for i, member in enumerate(self.members)
            for name, tensor in member.outputs(kind).items()
        }

    def _of(self, i: int, outputs: Outputs) -> Outputs:
        start = f"{i} "
        return {name.removeprefix(start): t for name, t in outputs.items() if name.startswith(start)}

    def run(self, outputs: Outputs, workspaces: Workspaces) -> None:
        for i, member in enumerate(self.members):
            member.run(self._of(i, outputs), workspaces)

    def vary(self, draw: Draw) -> None:
        for member in self.members:
            member.vary(draw)

    def check(self, got: Outputs, again: Outputs) -> None:
        for i, member in enumerate(self.members):
            member.check(self._of(i, got), self._of(i, again))


SUBJECTS: dict[str, Any] = {
    "verify": VerifySubject, "long": LongSubject, "sparse": SparseSubject, "select": SelectSubject,
    "round": RoundSubject, "sequence": SequenceSubject,
}  # fmt: skip
SHARES = {
    "verify": 4, "long": 1, "sparse": 4, "select": 4, "round": 4, "sequence": 1, "invalid": 2,
}  # fmt: skip
KINDS = [kind for kind, share in SHARES.items() for _ in range(share)]


def fetch(outputs: Outputs) -> Outputs:
    """On the CPU, once `wait` has returned."""
    return {
        name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
        for name, t in outputs.items()
    }


def wait() -> None:
    """For the current stream, without keeping a core busy."""
    reached = torch.cuda.Event(blocking=True)
    reached.record()
    reached.synchronize()


def refill(outputs: Outputs, kind: int) -> None:
    for tensor in outputs.values():
        value = (SENTINEL, math.nan)[kind] if tensor.is_floating_point() else (SENTINEL_INDEX, 0)[kind]
        tensor.fill_(value)


def check_on_two_streams(subject: Subject, around: Surroundings, draw: Draw) -> None:
    outputs = [subject.outputs(kind) for kind in (0, 1)]
    given = draw.choice((True, True, True, False))
    start = torch.cuda.current_stream()
    for kind, stream in enumerate(around.streams):
        stream.wait_stream(start)
        with torch.cuda.stream(stream):
            subject.run(outputs[kind], around.workspaces[kind] if given else {})
    for stream in around.streams:
        start.wait_stream(stream)
    fetched = [fetch(one) for one in outputs]
    wait()
    subject.check(*fetched)


def capture(subject: Subject, outputs: Outputs, workspaces: Workspaces) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        subject.run(outputs, workspaces)
    finally:
        graph.capture_end()
    return graph


def check_replays(subject: Subject, around: Surroundings, draw: Draw, replays: int) -> None:
    """Captured at one set of lengths, replayed at others."""
    stream, outputs = around.streams[0], subject.outputs(0)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if draw.maybe():
            capture(subject, outputs, around.workspaces[0])  # and never replayed
        graph = capture(subject, outputs, around.workspaces[0])
        for _ in range(replays):
            subject.vary(draw)
            fetched = []
            for kind in (0, 1):
                refill(outputs, kind)
                graph.replay()
                fetched.append(fetch(outputs))
            wait()
            subject.check(*fetched)
    torch.cuda.current_stream().wait_stream(stream)


def check_on_the_cpu(subject: Subject, draw: Draw, variations: int) -> None:
    """With different numbers of threads, over buffers that stay."""
    outputs = [subject.outputs(kind) for kind in (0, 1)]
    for variation in range(variations + 1):
        if variation:
            subject.vary(draw)
        for kind, one in enumerate(outputs):
            refill(one, kind)
            torch.set_num_threads(1 + 2 * kind)
            subject.run(one, {})
        torch.set_num_threads(1)
        subject.check(*outputs)


@torch.inference_mode()
def fuzz_case(seed: int, around: Surroundings) -> tuple[str, int]:
    """Raises AssertionError, or another error of the op, if something is wrong; else the kind of the case
    and how many comparisons with an oracle it made."""
    from op_faults import check_refusal

    draw = RandomDraw(seed)
    kind = draw.choice(KINDS)
    if kind == "invalid":
        check_refusal(draw, around.device, around.workspaces)
        return kind, 1
    subject: Subject = SUBJECTS[kind](draw, around.device)
    members = len(subject.members) if isinstance(subject, SequenceSubject) else 1
    variations = 2 if draw.choice((True, False, False)) else 0
    if around.device.type == "cpu":
        check_on_the_cpu(subject, draw, variations)
    else:
        check_on_two_streams(subject, around, draw)
        if variations:
            check_replays(subject, around, draw, variations)
    return kind, members * (1 + variations)
