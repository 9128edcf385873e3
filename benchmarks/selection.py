"""topk_aggregate_logits (select) against the read ceiling, torch.topk and FlashInfer's top_k.

Bytes are those of the dump that any kernel has to read. This script is not called select.py because, first
on the path of every script beside it, that name would hide Python's own module.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import harness
import torch
from harness import Bench, Cell, Contender, Launch, Setup
from peers import FlashInfer, Peers
from torch import Tensor
from torch.nn import functional

import vegas_ops

PAGE_SIZE = 16
LOOK_AHEAD = (6, 0)


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    k: int
    dump: str = "token_weight"
    pool: tuple[int, int] = (0, 0)
    data: str = "normal"  # "normal" | "narrow" | "equal" | "heavy-tailed"
    num_heads_kv: int = 1  # of a kv_head dump, ranked by weight
    layers: int = 1
    dtype: str = "fp32"

    @property
    def dump_bytes(self) -> int:
        planes = 2 * self.num_heads_kv * 2 if self.dump == "kv_head" else 4
        return self.layers * self.batch * self.context * planes


def _regime(case: Case) -> str:
    rows = case.batch * case.layers
    amount = "1 list" if rows == 1 else "2 to 16 lists" if rows <= 16 else "over 16 lists"
    pooled = ", pooled" if case.pool != (0, 0) else ""
    data = "" if case.data == "normal" else f", {case.data}"
    return f"{case.dump}{pooled}{data}, {amount}"


def _values(data: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    normal = torch.randn(*shape, device=device)
    if data == "narrow":
        normal = 1.0 + 1e-5 * normal
    elif data == "equal":
        normal.fill_(0.25)
    elif data == "heavy-tailed":
        normal = normal.mul_(4.0).exp_()
    return normal.to(dtype)


class _Problem:
    def __init__(self, case: Case, bench: Bench) -> None:
        self.case, device = case, bench.device
        cold = harness.CUDA_COLD_BYTES if bench.is_cuda else harness.CPU_COLD_BYTES
        if case.dump_bytes > cold * 4:
            raise harness.DoesNotFit(f"a dump of {case.dump_bytes / 1e9:.1f} GB is too large here")
        count = max(4, min(harness.MAX_LAUNCHES, math.ceil(cold / case.dump_bytes)))
        lead = (case.layers,) if case.layers > 1 else ()
        shape = (*lead, case.batch, case.context)
        dtype = torch.float32
        self.guide_lse: Tensor | None = None
        if case.dump == "kv_head":
            shape, dtype = (*lead, case.batch, 2, case.num_heads_kv, case.context), torch.bfloat16
            self.guide_lse = torch.full(shape[:-1], math.log(case.context) + 0.5, device=device)
        self.dumps = [_values(case.data, shape, dtype, device) for _ in range(count)]
        pages = case.context // PAGE_SIZE
        shuffled = torch.randperm(case.batch * pages, device=device).to(torch.int32)
        self.block_table = shuffled.view(case.batch, pages)
        self.seqlens = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
        self.indices = torch.empty(*lead, case.batch, case.k, dtype=torch.int32, device=device)
        self.topk_length = torch.empty(*lead, case.batch, dtype=torch.int32, device=device)
        heads = case.num_heads_kv if case.dump == "kv_head" else 1
        self.workspace = vegas_ops.make_workspace(
            "topk_aggregate_logits",
            max_batch=case.batch,
            max_q_len=1,
            max_seqlen_k=case.context,
            max_k=case.k,
            layers=case.layers,
            num_heads_q=heads,
            num_heads_kv=heads,
            head_dim=1,
            device=device,
        )

    def _select(self, dump: Tensor, slots: bool) -> tuple[Tensor, Tensor]:
        case = self.case
        return vegas_ops.topk_aggregate_logits(
            dump, dump=case.dump, seqlens=self.seqlens, k=case.k, max_k=case.k,  # type: ignore[arg-type]
            mode="weight" if case.dump == "kv_head" else "logit", guide_lse=self.guide_lse, pool=case.pool,
            block_table=self.block_table if slots else None, page_size=PAGE_SIZE if slots else None,
            indices=self.indices, topk_length=self.topk_length, workspace=self.workspace,
        )  # fmt: skip

    def scores(self, dump: Tensor) -> Tensor:
        """What is ranked, by torch: (lists, context)."""
        if self.guide_lse is not None:
            dump = (dump.float() - self.guide_lse[..., None]).exp().sum((-3, -2))
        dump = dump.flatten(0, -2)
        before, after = self.case.pool
        if before or after:
            padded = functional.pad(dump, (before, after), value=float("-inf"))
            dump = functional.max_pool1d(padded[:, None], before + after + 1, 1)[:, 0]
        return dump

    def ours(self) -> Contender:
        launches: list[Launch] = [functools.partial(self._select, dump, True) for dump in self.dumps]

        def result() -> Tensor:
            """Scores of what is selected, largest first: equal scores may be chosen differently elsewhere."""
            indices, length = self._select(self.dumps[0], False)
            if not bool((length == self.case.k).all()):
                raise harness.Disagrees(f"fewer than k selected: {int(length.min())} of {self.case.k}")
            chosen = self.scores(self.dumps[0]).gather(1, indices.flatten(0, -2).long())
            return chosen.sort(dim=1, descending=True).values

        return Contender(launches, result)

    @functools.cached_property
    def ready(self) -> list[Tensor]:
        return [self.scores(dump) for dump in self.dumps]

    def topk_only(self) -> Contender:
        """torch.topk of scores that are already there: neither pooling, nor sums, nor order, nor slots."""
        ready, k = self.ready, self.case.k
        return Contender(
            [functools.partial(torch.topk, scores, k, dim=1, sorted=False) for scores in ready],
            lambda: ready[0].topk(k, dim=1).values,
        )

    def flashinfer(self, flashinfer: FlashInfer) -> dict[str, Callable[[], Contender]]:
        """FlashInfer's top-k, of scores that are already there, neither in order nor with forced tokens."""
        ready, k, layers = self.ready, self.case.k, self.case.layers
        table, lengths = self._table(), self.seqlens.repeat(layers)
        return {
            "FlashInfer": lambda: flashinfer.top_k(ready, k),
            "FlashInfer, deterministic": lambda: flashinfer.top_k(ready, k, deterministic=True),
            "FlashInfer, slots": lambda: flashinfer.top_k_slots(ready, k, table, lengths, PAGE_SIZE),
        }

    def _table(self) -> Tensor:
        return self.block_table.repeat(self.case.layers, 1) if self.case.layers > 1 else self.block_table

    def _to_slots(self, tokens: Tensor) -> Tensor:
        table = self._table()
        return table.gather(1, tokens // PAGE_SIZE) * PAGE_SIZE + (tokens % PAGE_SIZE).to(torch.int32)

    def same_output(self) -> Contender:
        """All that ours does, in torch: scores, topk, ascending order, slots."""
        k = self.case.k

        def launch(dump: Tensor) -> None:
            tokens = self.scores(dump).topk(k, dim=1, sorted=False).indices
            self._to_slots(tokens.sort(dim=1).values)

        return Contender([functools.partial(launch, dump) for dump in self.dumps])

    def kth_value(self) -> Contender:
        """The k-th value as a threshold, then a scan: ascending without a sort, though not exact at ties."""
        case = self.case
        tokens = torch.arange(case.context, device=self.seqlens.device).expand(case.batch * case.layers, -1)

        def launch(dump: Tensor) -> None:
            scores = self.scores(dump)
            threshold = scores.kthvalue(case.context - case.k + 1, dim=1, keepdim=True).values
            chosen = scores >= threshold
            # What is not chosen, and ties beyond k, go to a spare last place.
            place = torch.where(chosen, chosen.cumsum(1) - 1, case.k).clamp_(max=case.k)
            picked = tokens.new_empty(tokens.shape[0], case.k + 1).scatter_(1, place, tokens)
            self._to_slots(picked[:, : case.k])

        return Contender([functools.partial(launch, dump) for dump in self.dumps])


def _build(case: Case, found: Peers, bench: Bench) -> Setup:
    problem = _Problem(case, bench)
    peers: dict[str, Callable[[], Contender]] = {
        "torch.topk": problem.topk_only,
        "torch, same output": problem.same_output,
    }
    if case.data != "equal":
        peers["torch.kthvalue, scan"] = problem.kth_value
    if found.flashinfer is not None:
        peers.update(problem.flashinfer(found.flashinfer))
    # Sums of weights are rounded differently, so the selected sets may differ at the k-th place.
    return Setup(problem.ours(), peers, tolerance=1e-4 if case.dump == "kv_head" else 0.0)


def _cell(case: Case, found: Peers) -> Cell:
    panel = case.dump + (", pooled" if case.pool != (0, 0) else "")
    fields = {**asdict(case), "mode": "weight" if case.dump == "kv_head" else "logit"}
    build = functools.partial(_build, case, found)
    return Cell("select", fields, case.dump_bytes, _regime(case), panel, build)


def _five_percent(batch: int, context: int) -> Case:
    return Case(batch, context, context // 20)


def _cuda_cases(quick: bool) -> Iterator[Case]:
    """Most telling first: a short budget cuts off the end."""
    for batch, context in ((1, 32768), (16, 32768)):
        yield _five_percent(batch, context)
        yield replace(_five_percent(batch, context), pool=LOOK_AHEAD)
    yield replace(_five_percent(16, 32768), dump="kv_head", num_heads_kv=8, dtype="bf16")
    if quick:
        return
    sizes = [(batch, context) for context in (131072, 32768, 8192) for batch in (1, 4, 16, 64)]
    for batch, context in (*sizes, (256, 32768)):
        if (batch, context) not in ((1, 32768), (16, 32768)):
            yield _five_percent(batch, context)
    for batch, context in ((1, 131072), (64, 8192), (64, 32768), (256, 32768)):
        yield replace(_five_percent(batch, context), pool=LOOK_AHEAD)
    for data in ("equal", "narrow", "heavy-tailed"):
        for batch, context in ((1, 131072), (16, 32768), (64, 8192)):
            yield replace(_five_percent(batch, context), data=data)
    for batch, context in ((1, 32768), (64, 8192), (1, 131072), (64, 32768)):
        yield replace(_five_percent(batch, context), dump="kv_head", num_heads_kv=8, dtype="bf16")
    for k in (16, 2048, 16384):
        for batch, context in ((1, 131072), (16, 32768), (1, 32768), (64, 32768), (1, 8192)):
            if k <= context:
                yield Case(batch, context, k)
    for batch, context in ((1, 32768), (4, 8192)):
        yield replace(_five_percent(batch, context), layers=36)
        yield replace(_five_percent(batch, context), layers=36, pool=LOOK_AHEAD)


def _cpu_cases(quick: bool) -> Iterator[Case]:
    yield _five_percent(1, 131072)
    yield _five_percent(1, 32768)
    yield replace(_five_percent(1, 131072), pool=LOOK_AHEAD)
    if quick:
        return
    for batch, context in ((8, 32768), (8, 131072), (1, 8192), (8, 8192)):
        yield _five_percent(batch, context)
    for data in ("equal", "narrow", "heavy-tailed"):
        yield replace(_five_percent(1, 131072), data=data)
    for k in (16, 2048, 16384):
        yield Case(1, 131072, k)
    yield replace(_five_percent(8, 32768), pool=LOOK_AHEAD)
    yield replace(_five_percent(1, 32768), dump="kv_head", num_heads_kv=8, dtype="bf16")
    yield replace(_five_percent(1, 131072), dump="kv_head", num_heads_kv=8, dtype="bf16")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see --help. Returns 1 if a cell failed."""
    arguments = harness.parse_arguments("selection", __doc__, argv)
    bench = Bench(arguments)
    cases = _cuda_cases(bench.quick) if bench.is_cuda else _cpu_cases(bench.quick)
    found = Peers(flashinfer=FlashInfer.find() if bench.is_cuda else None)
    cells = [_cell(case, found) for case in cases]
    return harness.run("select", arguments, bench, cells, found.versions())


if __name__ == "__main__":
    sys.exit(main())
