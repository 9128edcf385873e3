"""flash_attn_with_logit_dump against the read ceiling, FlashAttention-3, FlashInfer and torch.

Bytes are those of the K and V that any kernel has to read; q, out, the dump and page tables are left out.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import harness
import torch
from harness import Bench, Cell, Contender, Launch, Setup
from peers import (
    Peers,
    bmm_softmax_bmm,
    contiguous,
    dense_attention,
    dense_sdpa,
    sdpa_cudnn,
)
from torch import Tensor

import vegas_ops

QWEN3_8B, QWEN3_30B_A3B, GPT_OSS_20B = (32, 8, 128), (32, 4, 128), (64, 8, 64)
SHAPES = (QWEN3_8B, QWEN3_30B_A3B, GPT_OSS_20B)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn}
DUMP_BUFFER_BYTES = 4e9
ROWS = (8, 1, 17, 5)  # of the grid
K_DESCALE, V_DESCALE = 0.75, 1.5


@dataclass(frozen=True)
class Case:
    """A problem; what is None is left out of it. Two cases of one pair differ from `dump` on."""

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    batch: int
    context: int  # of the longest request
    rows: int
    page_size: int = 16
    dtype: str = "bf16"
    lengths: str | None = None  # a key of MIXES; all requests have the context's where None
    dump: str = "token_weight"
    cache_dtype: str | None = None  # where it is not the query's
    max_seqlen_k: int | None = None  # the bound, where it is not the context
    window: int | None = None  # keys that a row sees
    softcap: float | None = None
    sinks: bool | None = None
    batch_invariant: bool | None = None

    @property
    def bound(self) -> int:
        return self.max_seqlen_k or self.context

    @property
    def packed_rows(self) -> int:
        return self.rows * self.num_heads_q // self.num_heads_kv

    @property
    def seqlens(self) -> list[int]:
        return MIXES[self.lengths](self.batch, self.context) if self.lengths else [self.context] * self.batch

    @property
    def kv_dtype(self) -> torch.dtype:
        return DTYPES[self.cache_dtype or self.dtype]

    @property
    def kv_bytes(self) -> int:
        tokens = sum(
            length if self.window is None else min(length, self.window - 1 + self.rows)
            for length in self.seqlens
        )
        return 2 * tokens * self.num_heads_kv * self.head_dim * self.kv_dtype.itemsize


def _spread(batch: int, longest: int) -> list[int]:
    """Lengths drawn evenly from a 32nd of the longest up to it, the longest last."""
    shortest = max(1, longest // 32)
    drawn = torch.randint(shortest, longest + 1, (batch - 1,), generator=torch.Generator().manual_seed(7))
    return [*drawn.tolist(), longest]


MIXES: dict[str, Callable[[int, int], list[int]]] = {
    "one long": lambda batch, longest: [longest // 32] * (batch - 1) + [longest],
    "spread": _spread,
    "spread, a quarter empty": lambda batch, longest: [
        0 if i % 4 == 0 else length for i, length in enumerate(_spread(batch, longest))
    ],
}


def size_class(size: float) -> str:
    if size >= 0.5e9:
        return "0.5 GB and more"
    return "150 MB to 0.5 GB" if size >= 0.15e9 else "under 150 MB"


def _heads(case: Case) -> str:
    return f"{case.num_heads_q}/{case.num_heads_kv}/{case.head_dim}"


def _packed(case: Case) -> str:
    return "up to 64 packed rows" if case.packed_rows <= 64 else "over 64 packed rows"


def _regime(case: Case) -> str:
    notes = [_packed(case), size_class(case.kv_bytes)]
    if case.dtype != "bf16" or case.cache_dtype:
        notes.append(case.cache_dtype or case.dtype)
    if case.page_size != 16:
        notes.append(f"pages of {case.page_size}")
    if case.lengths:
        notes.append("mixed lengths")
    if case.window:
        notes.append("window")
    return ", ".join(notes)


class _Problem:
    """Inputs and outputs of one case, and launches of it and of cases that differ in its options."""

    def __init__(self, case: Case, bench: Bench) -> None:
        self.case, self._bench, device = case, bench, bench.device
        dtype = DTYPES[case.dtype]
        self._pages = [math.ceil(length / case.page_size) for length in case.seqlens]
        self.caches = self._slices(case)
        self._used = torch.randperm(sum(self._pages), device=device).to(torch.int32)
        self.block_table = self._table(case, -1)
        self.q = torch.randn(
            case.batch * case.rows, case.num_heads_q, case.head_dim, dtype=dtype, device=device
        )
        self.seqused_k = torch.tensor(case.seqlens, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.rows
        self.hint = torch.full((case.batch, 2, case.num_heads_kv), math.log(case.context), device=device)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(case.num_heads_q, self.q.shape[0], device=device)
        self.guide_lse = torch.empty_like(self.hint)

    def _slices(self, case: Case) -> list[tuple[Tensor, Tensor]]:
        shape = (sum(self._pages), case.page_size, case.num_heads_kv, case.head_dim)
        return self._bench.pool.slices(shape, case.kv_dtype, case.kv_bytes)

    def _table(self, case: Case, unused: int) -> Tensor:
        """Entries beyond a length, which are never read, show it by their value."""
        width = math.ceil(case.bound / case.page_size)
        table = torch.full((case.batch, width), unused, dtype=torch.int32, device=self._used.device)
        for row, used in zip(table, self._used.split(self._pages), strict=True):
            row[: used.shape[0]] = used
        return table

    @property
    def peer_table(self) -> Tensor:
        """The same pages without entries that other kernels might follow."""
        return self._table(self.case, 0)

    def _dumps(self, case: Case, launches: int) -> list[Tensor | None]:
        """Dumps of a few launches, so that they too reach memory rather than one warm buffer."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token": ((case.batch, case.bound), torch.float32),
            "token_weight": ((case.batch, case.bound), torch.float32),
            "kv_head": ((case.batch, 2, case.num_heads_kv, case.bound), torch.bfloat16),
            "rows": ((case.batch, case.num_heads_q, 2, case.bound), torch.bfloat16),
            "all": ((case.batch * case.rows, case.num_heads_q, case.bound), torch.bfloat16),
        }
        if case.dump == "none":
            return [None]
        shape, dtype = shapes[case.dump]
        affordable = max(1, int(DUMP_BUFFER_BYTES // (math.prod(shape) * dtype.itemsize)))
        count = min(launches, affordable)
        return [torch.empty(shape, dtype=dtype, device=self.q.device) for _ in range(count)]

    def launches(self, case: Case) -> list[Launch]:
        """Launches of this problem with the options of `case`, all into the same outputs."""
        device = self.q.device
        caches = self.caches if case.kv_dtype == self.case.kv_dtype else self._slices(case)
        table = self.block_table if case.bound == self.case.bound else self._table(case, -1)
        dumps = self._dumps(case, len(caches))
        descale = torch.ones(case.num_heads_kv, device=device) if case.cache_dtype else None
        workspace = vegas_ops.make_workspace(
            "flash_attn_with_logit_dump",
            max_batch=case.batch,
            max_q_len=case.rows,
            max_seqlen_k=case.bound,
            num_heads_q=case.num_heads_q,
            num_heads_kv=case.num_heads_kv,
            head_dim=case.head_dim,
            device=device,
        )
        launch = functools.partial(
            vegas_ops.flash_attn_with_logit_dump,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=case.rows,
            max_seqlen_k=case.bound,
            window_size=(-1, -1) if case.window is None else (case.window - 1, 0),
            softcap=case.softcap or 0.0,
            sinks=torch.zeros(case.num_heads_q, device=device) if case.sinks else None,
            k_descale=None if descale is None else descale * K_DESCALE,
            v_descale=None if descale is None else descale * V_DESCALE,
            dump=case.dump,  # type: ignore[arg-type]
            guide_lse_hint=self.hint if case.dump == "token_weight" else None,
            batch_invariant=bool(case.batch_invariant),
            out=self.out,
            lse=self.lse,
            guide_lse=self.guide_lse if case.dump in ("token_weight", "kv_head") else None,
            workspace=workspace,
        )
        return [
            functools.partial(launch, self.q, keys, values, table, self.seqused_k, logits=logits)
            for (keys, values), logits in zip(caches, itertools.cycle(dumps), strict=False)
        ]

    def reference(self) -> tuple[Tensor, Tensor]:
        """The last request's output, ours and computed in fp32."""
        case = self.case
        pages = self._used[len(self._used) - self._pages[-1] :].long()
        keys, values = (cache[pages].flatten(0, 1)[: case.seqlens[-1]].float() for cache in self.caches[0])
        if case.cache_dtype:
            keys, values = keys * K_DESCALE, values * V_DESCALE
        left = -1 if case.window is None else case.window - 1
        return self.out[-case.rows :], dense_attention(self.q[-case.rows :], keys, values, left)

    def ours(self) -> Contender:
        return Contender(self.launches(self.case), lambda: self.out)


def _with_peers(case: Case, peers: Peers, bench: Bench) -> Setup:
    problem = _Problem(case, bench)
    built: dict[str, Callable[[], Contender]] = {}
    if not bench.is_cuda:

        @functools.cache
        def dense() -> list[tuple[Tensor, Tensor]]:
            return [
                (contiguous(keys, problem.block_table), contiguous(values, problem.block_table))
                for keys, values in problem.caches
            ]

        built["torch SDPA"] = lambda: dense_sdpa(problem.q, dense(), case.rows)
        built["torch bmm"] = lambda: bmm_softmax_bmm(problem.q, dense(), case.rows)
    else:
        if peers.fa3 is not None:
            attend = peers.fa3.attend
            built["FlashAttention-3"] = lambda: attend(
                problem.q, problem.caches, problem.peer_table, problem.seqused_k, case.rows
            )
        if peers.flashinfer is not None:
            plan = peers.flashinfer.attend
            built["FlashInfer"] = lambda: plan(
                problem.q, problem.caches, problem.peer_table, case.seqlens, case.rows
            )
        if case.rows == 1 and case.lengths is None:
            built["torch cuDNN"] = lambda: sdpa_cudnn(problem.q, problem.caches, case.batch)
    return Setup(problem.ours(), built, reference=problem.reference)


def _alone(case: Case, bench: Bench) -> Setup:
    problem = _Problem(case, bench)
    return Setup(problem.ours(), reference=problem.reference)


def _paired(case: Case, others: dict[str, Case], bench: Bench) -> Setup:
    problem = _Problem(case, bench)
    variants = {name: problem.launches(other) for name, other in others.items()}
    return Setup(problem.ours(), variants=variants, reference=problem.reference)


def _cell(case: Case, build: Callable[[Bench], Setup], regime: str | None = None) -> Cell:
    panel = f"{_heads(case)} {case.dtype}, {_packed(case)}"
    return Cell("verify", asdict(case), case.kv_bytes, regime or _regime(case), panel, build)


def _peer_cell(case: Case, peers: Peers, note: str = "") -> Cell:
    return _cell(case, functools.partial(_with_peers, case, peers), _regime(case) + note)


def _lone_cell(case: Case) -> Cell:
    return _cell(case, functools.partial(_alone, case))


def _pair_cell(case: Case, others: dict[str, Case]) -> Cell:
    """The case against others, named after what each of them has."""
    return _cell(case, functools.partial(_paired, case, others), f"against {', '.join(others)}")


def _dump_cell(case: Case) -> Cell:
    """No dump, and each of them against it."""
    plain = replace(case, dump="none")
    dumps = ("token", "token_weight", "kv_head", "rows")
    return _pair_cell(plain, {f"dump {dump}": replace(plain, dump=dump) for dump in dumps})


def _feature_cell(case: Case) -> Cell:
    """Plain, and each feature against it; the window cuts off so little that the work stays the same."""
    softcap, window = 30.0, case.context - case.context // 512
    features = {
        "softcap": replace(case, softcap=softcap),
        "sinks": replace(case, sinks=True),
        "window": replace(case, window=window),
        "all three": replace(case, softcap=softcap, sinks=True, window=window),
    }
    return _pair_cell(case, features)


def _invariant_cell(case: Case) -> Cell:
    return _pair_cell(case, {"batch_invariant": replace(case, batch_invariant=True)})


def _fp8_cell(case: Case) -> Cell:
    """An fp8 cache, and the time of the unpacked one over it."""
    packed = replace(case, cache_dtype="fp8_e4m3")
    return _pair_cell(packed, {f"{case.dtype} cache": case})


def _bound_cell(case: Case, bound: int) -> Cell:
    return _pair_cell(case, {f"max_seqlen_k {bound}": replace(case, max_seqlen_k=bound)})


# Sizes of the grid as (batch, context), most telling first: a short budget cuts off the end.
_CORE_SIZES = ((16, 32768), (1, 32768), (4, 8192), (1, 8192))
_GRID_SIZES = (
    *_CORE_SIZES,
    *((64, 8192), (1, 131072), (16, 8192), (4, 32768), (4, 131072), (64, 32768), (16, 131072), (64, 131072)),
)


def _cuda_groups(peers: Peers) -> dict[str, Iterator[Cell]]:
    base = Case(*QWEN3_8B, batch=16, context=32768, rows=8)
    bases = [Case(*heads, batch=16, context=32768, rows=8) for heads in SHAPES]

    def grid(sizes: Sequence[tuple[int, int]], rows: Sequence[int]) -> Iterator[Cell]:
        for (batch, context), shape, count in itertools.product(sizes, bases, rows):
            # The sweep's other rows stay out of the grid's means.
            note = "" if count in ROWS else ", row sweep"
            yield _peer_cell(replace(shape, batch=batch, context=context, rows=count), peers, note)

    def dumps() -> Iterator[Cell]:
        for shape, count in itertools.product(bases, (8, 5)):
            yield _dump_cell(replace(shape, rows=count))
            # The smallest above 128 MB: 1 x 32K tokens of 4 KB, twice as many of 2 KB.
            small = 1 if shape.num_heads_kv * shape.head_dim == 1024 else 2
            yield _dump_cell(replace(shape, batch=small, rows=count))

    def fp8() -> Iterator[Cell]:
        # 2 GB, counted in bf16; 32 packed rows and 64.
        for shape in bases:
            batch = 16 if shape.num_heads_kv * shape.head_dim == 1024 else 32
            for packed in (8, 32, 64):
                rows = packed * shape.num_heads_kv // shape.num_heads_q
                yield _fp8_cell(replace(shape, batch=batch, rows=rows))

    def features() -> Iterator[Cell]:
        for shape in bases:
            yield _feature_cell(shape)
        yield _feature_cell(replace(base, batch=1))
        for shape in bases:
            yield _lone_cell(replace(shape, window=4096))

    def invariant() -> Iterator[Cell]:
        for shape, packed in itertools.product(bases, (8, 32, 64)):
            rows = packed * shape.num_heads_kv // shape.num_heads_q
            # 0.5 GB and 1 to 2 GB
            for batch in (4 if shape.num_heads_kv * shape.head_dim == 1024 else 8, 16):
                yield _invariant_cell(replace(shape, batch=batch, rows=rows))

    def mixed() -> Iterator[Cell]:
        yield _peer_cell(replace(base, batch=32, context=131072, lengths="one long"), peers)
        yield _peer_cell(replace(base, batch=64, lengths="spread"), peers)
        yield _lone_cell(replace(base, batch=64, lengths="spread, a quarter empty"))
        yield _peer_cell(replace(bases[2], batch=64, lengths="spread"), peers)

    def bound() -> Iterator[Cell]:
        for batch in (1, 4, 64):
            yield _bound_cell(replace(base, batch=batch, context=8192), 131072)

    def long() -> Iterator[Cell]:
        yield _peer_cell(replace(base, batch=1, context=1 << 20), peers)
        for head_dim in (192, 256):
            yield _peer_cell(Case(32, 8, head_dim, batch=16, context=32768, rows=8), peers)

    def pages() -> Iterator[Cell]:
        for page_size in (1, 256):
            for (batch, context), shape, rows in itertools.product(_CORE_SIZES, bases, (1, 8, 17)):
                case = replace(shape, batch=batch, context=context, rows=rows, page_size=page_size)
                yield _peer_cell(case, peers)

    sweep = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 17, 20, 24, 28, 32, 33)
    return {
        "core": grid(_CORE_SIZES, (8, 1, 17)),
        "dumps": dumps(),
        "fp8": fp8(),
        "invariant": invariant(),
        "features": features(),
        "mixed": mixed(),
        "bound": bound(),
        "long": long(),
        "grid": grid(_GRID_SIZES, ROWS),
        "rows": grid([(16, 32768)], sweep),
        "pages": pages(),
    }


def _cpu_groups(quick: bool) -> dict[str, Iterator[Cell]]:
    base = Case(*QWEN3_8B, batch=1, context=32768, rows=1)
    small = Case(8, 2, 64, batch=1, context=32768, rows=1, dtype="fp32")
    nothing = Peers()

    def core() -> Iterator[Cell]:
        for rows, case in itertools.product((1, 7), (base, small)):
            yield _peer_cell(replace(case, rows=rows), nothing)

    def grid() -> Iterator[Cell]:
        for context, rows in ((16384, 1), (16384, 7), (16384, 10), (32768, 10)):
            yield _peer_cell(replace(small, context=context, rows=rows), nothing)
        for rows in (1, 7):
            yield _peer_cell(replace(base, batch=4, context=8192, rows=rows), nothing)
        for rows in (1, 7):
            yield _peer_cell(Case(*GPT_OSS_20B, batch=1, context=32768, rows=rows), nothing)
        yield _peer_cell(replace(base, context=131072), nothing)

    def pairs(case: Case) -> dict[str, Iterator[Cell]]:
        mixed = (replace(case, batch=8, lengths=name) for name in MIXES)
        return {
            "dumps": (_dump_cell(each) for each in ([case] if quick else [case, replace(base, rows=7)])),
            "fp8": iter([_fp8_cell(case)]),
            "invariant": iter([_invariant_cell(case)]),
            "features": iter([_feature_cell(case), _lone_cell(replace(case, window=case.context // 8))]),
            "mixed": (_lone_cell(mix) for mix in mixed),
            "bound": iter([_bound_cell(case, 16 * case.context)]),
        }

    pages = (_peer_cell(replace(base, page_size=size), nothing) for size in (1, 256))
    sweep = (_peer_cell(replace(small, rows=rows), nothing) for rows in (1, 2, 4, 8, 16))
    return {
        "core": core(),
        **pairs(replace(small, rows=7, context=8192)),
        "long": iter(()),
        "grid": grid(),
        "rows": sweep,
        "pages": pages,
    }


GROUPS = ("core", "dumps", "fp8", "invariant", "features", "mixed", "bound", "long", "grid", "rows", "pages")
QUICK_GROUPS = ("core", "dumps", "bound")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see --help. Returns 1 if a cell failed."""
    arguments = harness.parse_arguments("verify", __doc__, argv, GROUPS, QUICK_GROUPS)
    bench = Bench(arguments)
    peers = Peers.find(bench.is_cuda)
    groups = _cuda_groups(peers) if bench.is_cuda else _cpu_groups(bench.quick)
    # A cell of two groups is measured once.
    chosen = {repr((cell.regime, cell.case)): cell for name in arguments.cells for cell in groups[name]}
    return harness.run("verify", arguments, bench, list(chosen.values()), peers.versions())


if __name__ == "__main__":
    sys.exit(main())
