"""flash_attn_with_logit_dump against the read ceiling, FlashAttention-3 and torch.

Bytes are those of the K and V that any kernel has to read; q, out, the dump and page tables are left out.
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
from peers import (
    FlashAttention3,
    bmm_softmax_bmm,
    contiguous,
    dense_attention,
    dense_sdpa,
    sdpa_cudnn,
)
from torch import Tensor

import vegas_ops

QWEN3_8B, QWEN3_30B_A3B, GPT_OSS_20B = (32, 8, 128), (32, 4, 128), (64, 8, 64)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DUMP_BUFFER_BYTES = 4e9


@dataclass(frozen=True)
class Case:
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    batch: int
    context: int
    rows: int
    page_size: int = 16
    dump: str = "token_weight"
    dtype: str = "bf16"
    max_seqlen_k: int | None = None  # the bound, where it is not the context

    @property
    def kv_bytes(self) -> int:
        tokens = self.batch * self.context
        return 2 * tokens * self.num_heads_kv * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def bound(self) -> int:
        return self.max_seqlen_k or self.context


def size_class(size: float) -> str:
    if size >= 0.5e9:
        return "0.5 GB and more"
    return "0.1 to 0.5 GB" if size >= 0.1e9 else "under 0.1 GB"


def _regime(case: Case) -> str:
    rows = "1 row" if case.rows == 1 else "2 to 8 rows" if case.rows <= 8 else "over 8 rows"
    pages = "" if case.page_size == 16 else f", pages of {case.page_size}"
    heads = f"{case.num_heads_q}/{case.num_heads_kv}/{case.head_dim}"
    return f"{heads} {case.dtype}{pages}, {size_class(case.kv_bytes)}, {rows}"


class _Problem:
    """Inputs and outputs of one case, and its launches with any dump."""

    def __init__(self, case: Case, bench: Bench) -> None:
        self.case, device = case, bench.device
        dtype = DTYPES[case.dtype]
        pages = case.context // case.page_size
        shape = (case.batch * pages, case.page_size, case.num_heads_kv, case.head_dim)
        self.caches = bench.pool.slices(shape, dtype, case.kv_bytes)
        used = torch.randperm(case.batch * pages, device=device).to(torch.int32).view(case.batch, pages)
        # Entries that only the bound covers are never read; -1 shows it.
        self.block_table = used.new_full((case.batch, math.ceil(case.bound / case.page_size)), -1)
        self.block_table[:, :pages] = used
        self.q = torch.randn(
            case.batch * case.rows, case.num_heads_q, case.head_dim, dtype=dtype, device=device
        )
        self.seqused_k = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.rows
        self.hint = torch.full((case.batch, 2, case.num_heads_kv), math.log(case.context), device=device)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(case.num_heads_q, self.q.shape[0], device=device)
        self.guide_lse = torch.empty_like(self.hint)
        self.workspace = vegas_ops.make_workspace(
            "flash_attn_with_logit_dump",
            max_batch=case.batch,
            max_q_len=case.rows,
            max_seqlen_k=case.bound,
            num_heads_q=case.num_heads_q,
            num_heads_kv=case.num_heads_kv,
            head_dim=case.head_dim,
            device=device,
        )

    def _dumps(self, dump: str) -> list[Tensor | None]:
        """Dumps of a few launches, so that they too reach memory rather than one warm buffer."""
        case = self.case
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token": ((case.batch, case.bound), torch.float32),
            "token_weight": ((case.batch, case.bound), torch.float32),
            "kv_head": ((case.batch, 2, case.num_heads_kv, case.bound), torch.bfloat16),
            "rows": ((case.batch, case.num_heads_q, 2, case.bound), torch.bfloat16),
            "all": ((case.batch * case.rows, case.num_heads_q, case.bound), torch.bfloat16),
        }
        if dump == "none":
            return [None]
        shape, dtype = shapes[dump]
        affordable = max(1, int(DUMP_BUFFER_BYTES // (math.prod(shape) * dtype.itemsize)))
        count = min(len(self.caches), affordable)
        return [torch.empty(shape, dtype=dtype, device=self.q.device) for _ in range(count)]

    def launches(self, dump: str, bound: int | None = None) -> list[Launch]:
        case = self.case
        bound = bound or case.bound
        table = self.block_table[:, : math.ceil(bound / case.page_size)].contiguous()
        dumps = self._dumps(dump)
        guide = self.guide_lse if dump in ("token_weight", "kv_head") else None

        def launch(index: int, keys: Tensor, values: Tensor) -> None:
            vegas_ops.flash_attn_with_logit_dump(
                self.q, keys, values, table, self.seqused_k, cu_seqlens_q=self.cu_seqlens_q,
                max_seqlen_q=case.rows, max_seqlen_k=bound, dump=dump,  # type: ignore[arg-type]
                guide_lse_hint=self.hint if dump == "token_weight" else None, out=self.out, lse=self.lse,
                logits=dumps[index % len(dumps)], guide_lse=guide, workspace=self.workspace,
            )  # fmt: skip

        return [functools.partial(launch, index, *cache) for index, cache in enumerate(self.caches)]

    def reference(self) -> tuple[Tensor, Tensor]:
        """The last request's output, ours and computed in fp32."""
        case = self.case
        pages = self.block_table[-1, : case.context // case.page_size].long()
        keys, values = (cache[pages].flatten(0, 1) for cache in self.caches[0])
        return self.out[-case.rows :], dense_attention(self.q[-case.rows :], keys, values)

    def ours(self) -> Contender:
        return Contender(self.launches(self.case.dump), lambda: self.out)


def _with_peers(case: Case, fa3: FlashAttention3 | None, bench: Bench) -> Setup:
    problem = _Problem(case, bench)
    peers: dict[str, Callable[[], Contender]] = {}
    if not bench.is_cuda:

        @functools.cache
        def dense() -> list[tuple[Tensor, Tensor]]:
            return [
                (contiguous(keys, problem.block_table), contiguous(values, problem.block_table))
                for keys, values in problem.caches
            ]

        peers["torch SDPA"] = lambda: dense_sdpa(problem.q, dense(), case.rows)
        peers["torch bmm"] = lambda: bmm_softmax_bmm(problem.q, dense(), case.rows)
    else:
        if fa3 is not None:
            peers["FlashAttention-3"] = lambda: fa3.attend(
                problem.q, problem.caches, problem.block_table, problem.seqused_k, case.rows
            )
        if case.rows == 1:
            peers["torch cuDNN"] = lambda: sdpa_cudnn(problem.q, problem.caches, case.batch)
    return Setup(problem.ours(), peers, reference=problem.reference)


def _against_dumps(case: Case, others: Sequence[str], bench: Bench) -> Setup:
    problem = _Problem(case, bench)
    variants = {f"dump {dump}": problem.launches(dump) for dump in others}
    return Setup(problem.ours(), variants=variants, reference=problem.reference)


def _against_bound(case: Case, bench: Bench) -> Setup:
    problem = _Problem(case, bench)
    variants = {f"max_seqlen_k {case.context}": problem.launches(case.dump, case.context)}
    return Setup(problem.ours(), variants=variants, reference=problem.reference)


def _cell(case: Case, build: Callable[[Bench], Setup]) -> Cell:
    heads = f"{case.num_heads_q}/{case.num_heads_kv}/{case.head_dim}"
    panel = f"{heads} {case.dtype}, {case.rows} row{'s' if case.rows > 1 else ''}"
    return Cell("verify", asdict(case), case.kv_bytes, _regime(case), panel, build)


def _peer_cell(case: Case, fa3: FlashAttention3 | None) -> Cell:
    return _cell(case, functools.partial(_with_peers, case, fa3))


def _dump_cell(case: Case, *others: str) -> Cell:
    return _cell(case, functools.partial(_against_dumps, case, others))


def _cuda_cells(fa3: FlashAttention3 | None, quick: bool) -> Iterator[Cell]:
    """Most telling first: a short budget cuts off the end."""
    base = Case(*QWEN3_8B, batch=16, context=32768, rows=8)
    first = [(16, 32768), (1, 131072), (64, 8192), (1, 8192)]
    for batch, context in [(16, 32768), (1, 32768)] if quick else first:
        for rows in (1, 8):
            yield _peer_cell(replace(base, batch=batch, context=context, rows=rows), fa3)
    yield _dump_cell(base, "none")
    bound = replace(base, batch=4, context=8192, max_seqlen_k=131072)
    yield _cell(bound, functools.partial(_against_bound, bound))
    if quick:
        return
    for case in (replace(base, batch=1), replace(base, batch=64, context=8192, rows=5)):
        yield _dump_cell(case, "none")
    yield _dump_cell(replace(base, dump="token"), "none")
    bound = replace(bound, batch=1)
    yield _cell(bound, functools.partial(_against_bound, bound))
    sizes = [(batch, context) for context in (32768, 8192, 131072) for batch in (1, 4, 16, 64)]
    for batch, context in sizes:
        for rows in (1, 8):
            if (batch, context) not in first:
                yield _peer_cell(replace(base, batch=batch, context=context, rows=rows), fa3)
    for heads in (GPT_OSS_20B, QWEN3_30B_A3B):
        for batch, context in ((16, 32768), (1, 32768), (64, 8192)):
            for rows in (1, 8):
                yield _peer_cell(Case(*heads, batch=batch, context=context, rows=rows), fa3)
    for dump in ("kv_head", "rows"):
        yield _dump_cell(replace(base, dump=dump), "none")
    yield _dump_cell(Case(*GPT_OSS_20B, batch=16, context=32768, rows=8), "none")
    for page_size in (1, 256):
        for batch, context in ((16, 32768), (1, 32768)):
            for rows in (1, 8):
                case = replace(base, batch=batch, context=context, rows=rows, page_size=page_size)
                yield _peer_cell(case, fa3)
    for batch, context in sizes:
        for rows in (5, 17):
            yield _peer_cell(replace(base, batch=batch, context=context, rows=rows), fa3)
    shown = {(16, 32768), (1, 32768), (64, 8192)}
    for heads in (GPT_OSS_20B, QWEN3_30B_A3B):
        for batch, context in sizes:
            for rows in (1, 5, 8, 17):
                if (batch, context) not in shown or rows in (5, 17):
                    yield _peer_cell(Case(*heads, batch=batch, context=context, rows=rows), fa3)


def _cpu_cells(quick: bool) -> Iterator[Cell]:
    base = Case(*QWEN3_8B, batch=1, context=32768, rows=1)
    small = Case(8, 2, 64, batch=1, context=32768, rows=1, dtype="fp32")
    for rows in (1, 7):
        yield _peer_cell(replace(base, rows=rows), None)
        yield _peer_cell(replace(small, rows=rows), None)
    yield _dump_cell(replace(base, rows=7), "none")
    if quick:
        return
    yield _dump_cell(replace(small, rows=7), "none")
    for rows in (1, 7, 10):
        yield _peer_cell(replace(small, context=16384, rows=rows), None)
    yield _peer_cell(replace(small, rows=10), None)
    for batch, rows in ((4, 1), (4, 7)):
        yield _peer_cell(replace(base, batch=batch, context=8192, rows=rows), None)
    for rows in (1, 7):
        yield _peer_cell(Case(*GPT_OSS_20B, batch=1, context=32768, rows=rows), None)
    for dump in ("token", "kv_head", "rows"):
        yield _dump_cell(replace(base, rows=7, dump=dump), "none")
    bound = replace(base, context=8192, rows=7, max_seqlen_k=131072)
    yield _cell(bound, functools.partial(_against_bound, bound))
    for page_size in (1, 256):
        yield _peer_cell(replace(base, page_size=page_size), None)
    yield _peer_cell(replace(base, context=131072), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see --help. Returns 1 if a cell failed."""
    arguments = harness.parse_arguments("verify", __doc__, argv)
    bench = Bench(arguments)
    fa3 = FlashAttention3.find() if bench.is_cuda else None
    versions = {"torch": str(torch.__version__)}
    if fa3 is not None:
        versions["FlashAttention-3"] = fa3.version
    cells = list(_cuda_cells(fa3, bench.quick) if bench.is_cuda else _cpu_cells(bench.quick))
    return harness.run("verify", arguments, bench, cells, versions)


if __name__ == "__main__":
    sys.exit(main())
