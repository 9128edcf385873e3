"""sparse_paged_decode against the read ceiling, peers with pages of one token, and torch.

Bytes are those of the K and V of the attended tokens; q, out, index lists and page tables are left out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import harness
import torch
from harness import Bench, Cell, Contender, Launch, Setup
from peers import FlashAttention3, FlashInfer, Peers, dense_attention, gather_sdpa
from torch import Tensor
from verify import DTYPES, GPT_OSS_20B, QWEN3_8B, QWEN3_30B_A3B, size_class

import vegas_ops

RUN = 16  # tokens of a run, and of a page
TAIL = 6 + 8  # what follows the candidates: drafted tokens and a verification's rows


@dataclass(frozen=True)
class Case:
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    batch: int
    context: int
    k: int
    lists: str = "random"  # "random" | "runs" | "per_kv_head"
    tail: int = 0  # tokens at the end of the context, attended beside the list
    page_size: int = 16
    dtype: str = "bf16"
    cache_dtype: str | None = None  # where it is not the query's
    mixed: bool = False  # requests list from no token to k tokens

    @property
    def kv_dtype(self) -> torch.dtype:
        return DTYPES[self.cache_dtype or self.dtype]

    @property
    def counts(self) -> list[int]:
        """Listed tokens of each request."""
        if not self.mixed:
            return [self.k] * self.batch
        return [self.k * (7 * b % self.batch) // max(self.batch - 1, 1) for b in range(self.batch)]

    @property
    def kv_bytes(self) -> int:
        tokens = sum(self.counts) + self.batch * self.tail
        return 2 * tokens * self.num_heads_kv * self.head_dim * self.kv_dtype.itemsize


def share(context: int, percent: int) -> int:
    """Tokens of a share of the context, in whole runs."""
    return max(RUN, context * percent // 100 // RUN * RUN)


def _regime(case: Case) -> str:
    heads = f"{case.num_heads_q}/{case.num_heads_kv}/{case.head_dim}"
    lists = case.lists.replace("_", " ") + (" and tail" if case.tail else "")
    lists += ", mixed lengths" if case.mixed else ""
    return f"{heads} {case.cache_dtype or case.dtype}, {lists}, {size_class(case.kv_bytes)}"


def _random_tokens(lists: int, tokens: int, k: int, device: torch.device) -> Tensor:
    """(lists, k) ascending token indices, uniform without replacement."""
    drawn = [torch.randperm(tokens, device=device)[:k].sort().values for _ in range(lists)]
    return torch.stack(drawn).to(torch.int32)


class _Problem:
    def __init__(self, case: Case, bench: Bench) -> None:
        self.case, device = case, bench.device
        dtype = DTYPES[case.dtype]
        pages = case.context // case.page_size
        shape = (case.batch * pages, case.page_size, case.num_heads_kv, case.head_dim)
        self.caches = bench.pool.slices(shape, case.kv_dtype, case.kv_bytes)
        shuffled = torch.randperm(case.batch * pages, device=device).to(torch.int32)
        self.block_table = shuffled.view(case.batch, pages)
        self.q = torch.randn(case.batch, case.num_heads_q, case.head_dim, dtype=dtype, device=device)
        self.candidates = case.context - case.tail
        self.slots = self._slots(self._tokens(device))
        self.topk_length = torch.tensor(case.counts, dtype=torch.int32, device=device)
        if case.lists == "per_kv_head":
            self.topk_length = self.topk_length[:, None].repeat(1, case.num_heads_kv)
        self.descale = torch.ones(1, device=device) if case.cache_dtype else None
        self.tail_start = torch.full((case.batch,), self.candidates, dtype=torch.int32, device=device)
        self.seqused_k = torch.full_like(self.tail_start, case.context)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(case.num_heads_q, case.batch, device=device)
        self.workspace = vegas_ops.make_workspace(
            "sparse_paged_decode",
            max_batch=case.batch,
            max_q_len=1,
            max_seqlen_k=case.context,
            max_k=case.k,
            num_heads_q=case.num_heads_q,
            num_heads_kv=case.num_heads_kv,
            head_dim=case.head_dim,
            device=device,
        )

    def _tokens(self, device: torch.device) -> Tensor:
        case = self.case
        if case.lists == "runs":
            runs = _random_tokens(case.batch, self.candidates // RUN, case.k // RUN, device)
            return (runs[:, :, None] * RUN + torch.arange(RUN, device=device)).flatten(1).to(torch.int32)
        if case.lists == "per_kv_head":
            lists = _random_tokens(case.batch * case.num_heads_kv, self.candidates, case.k, device)
            return lists.view(case.batch, case.num_heads_kv, case.k)
        return _random_tokens(case.batch, self.candidates, case.k, device)

    def _slots(self, tokens: Tensor) -> Tensor:
        """Physical slots of token indices (batch[, num_heads_kv], n)."""
        size = self.case.page_size
        flat = tokens.flatten(1).long()
        pages = self.block_table.gather(1, flat // size)
        return (pages * size + flat % size).to(torch.int32).view_as(tokens)

    def attended_slots(self) -> Tensor:
        """The list with the tail behind it: what a peer without tails is given."""
        tail = torch.arange(self.candidates, self.case.context, dtype=torch.int32, device=self.q.device)
        tail_slots = self._slots(tail.expand(self.case.batch, -1).contiguous())
        if self.slots.dim() == 3:
            tail_slots = tail_slots[:, None].expand(-1, self.case.num_heads_kv, -1)
        return torch.cat([self.slots, tail_slots], -1)

    def ours(self) -> Contender:
        def launch(keys: Tensor, values: Tensor) -> None:
            tail = self.case.tail > 0
            vegas_ops.sparse_paged_decode(
                self.q, keys, values, self.slots, self.topk_length,
                tail_start=self.tail_start if tail else None, seqused_k=self.seqused_k if tail else None,
                block_table=self.block_table if tail else None, k_descale=self.descale,
                v_descale=self.descale, out=self.out, lse=self.lse, workspace=self.workspace,
            )  # fmt: skip

        launches: list[Launch] = [functools.partial(launch, *cache) for cache in self.caches]
        return Contender(launches, lambda: self.out)

    def as_pages(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor, list[int]]:
        """Query, caches of one token per page, table and lengths, as a peer without lists takes them.

        Lists per KV head become requests with one KV head each.
        """
        case, slots = self.case, self.attended_slots()
        q, table, shape = self.q, slots, (-1, 1, case.num_heads_kv, case.head_dim)
        lengths = [count + case.tail for count in case.counts]
        if case.lists == "per_kv_head":
            heads = torch.arange(case.num_heads_kv, dtype=torch.int32, device=q.device)[None, :, None]
            table = (slots * case.num_heads_kv + heads).flatten(0, 1).contiguous()
            q = q.view(case.batch * case.num_heads_kv, -1, case.head_dim)
            shape = (-1, 1, 1, case.head_dim)
            lengths = [length for length in lengths for _ in range(case.num_heads_kv)]
        return q, [(keys.view(shape), values.view(shape)) for keys, values in self.caches], table, lengths

    def _as_ours(self, peer: Contender) -> Contender:
        return Contender(peer.launches, lambda: peer.result().view_as(self.out) if peer.result else self.out)

    def fa3(self, fa3: FlashAttention3) -> Contender:
        q, caches, table, lengths = self.as_pages()
        used = torch.tensor(lengths, dtype=torch.int32, device=q.device)
        return self._as_ours(fa3.attend(q, caches, table, used, 1))

    def flashinfer(self, flashinfer: FlashInfer) -> Contender:
        q, caches, table, lengths = self.as_pages()
        return self._as_ours(flashinfer.attend(q, caches, table, lengths, 1))

    def reference(self) -> tuple[Tensor, Tensor]:
        """The longest request's output, ours and computed in fp32."""
        counts = self.case.counts
        longest = max(range(len(counts)), key=counts.__getitem__)
        slots = self.attended_slots()[longest].long()
        heads = torch.arange(self.case.num_heads_kv, device=slots.device)[:, None]
        index = (slots, heads) if slots.dim() == 2 else (slots[None, :], heads)
        keys, values = (cache.flatten(0, 1)[index].transpose(0, 1) for cache in self.caches[0])
        row = slice(longest, longest + 1)
        return self.out[row], dense_attention(self.q[row], keys, values)


def _build(case: Case, peers: Peers, bench: Bench) -> Setup:
    problem = _Problem(case, bench)
    built: dict[str, Callable[[], Contender]] = {}
    if case.cache_dtype:  # beside the unpacked cache
        unpacked = _Problem(replace(case, cache_dtype=None), bench)
        return Setup(
            problem.ours(), variants={case.dtype: unpacked.ours().launches}, reference=problem.reference
        )
    if (fa3 := peers.fa3) is not None:
        built["FlashAttention-3"] = lambda: problem.fa3(fa3)
    if (flashinfer := peers.flashinfer) is not None:
        built["FlashInfer"] = lambda: problem.flashinfer(flashinfer)
    if not bench.is_cuda:
        built["gather, SDPA"] = lambda: gather_sdpa(problem.q, problem.caches, problem.attended_slots())
    return Setup(problem.ours(), built, reference=problem.reference)


def _cell(case: Case, peers: Peers) -> Cell:
    heads = f"{case.num_heads_q}/{case.num_heads_kv}/{case.head_dim}"
    panel = f"{heads} {case.cache_dtype or case.dtype}, {case.lists.replace('_', ' ')}"
    build = functools.partial(_build, case, peers)
    return Cell("sparse", {**asdict(case), "rows": 1}, case.kv_bytes, _regime(case), panel, build)


def _cuda_cases(quick: bool) -> Iterator[Case]:
    """Most telling first: a short budget cuts off the end."""
    base = Case(*QWEN3_8B, batch=16, context=32768, k=share(32768, 5))
    yield base
    yield replace(base, batch=1)
    yield replace(base, tail=TAIL)
    yield replace(base, lists="per_kv_head")
    if quick:
        return
    for batch, context in ((64, 32768), (1, 131072), (64, 8192), (16, 131072), (4, 32768), (1, 8192)):
        yield replace(base, batch=batch, context=context, k=share(context, 5))
    for percent in (10, 2):
        for batch, context in ((16, 32768), (1, 32768), (64, 32768), (1, 131072), (16, 131072), (64, 8192)):
            yield replace(base, batch=batch, context=context, k=share(context, percent))
    for lists, tail in (("per_kv_head", 0), ("runs", 0), ("random", TAIL), ("per_kv_head", TAIL)):
        for batch, context in ((16, 32768), (1, 32768), (64, 32768), (1, 131072)):
            case = replace(base, batch=batch, context=context, k=share(context, 5), lists=lists, tail=tail)
            if case not in (replace(base, tail=TAIL), replace(base, lists="per_kv_head")):
                yield case
    for heads in (GPT_OSS_20B, QWEN3_30B_A3B):
        for batch, context in ((16, 32768), (1, 32768), (64, 32768)):
            for lists in ("random", "per_kv_head"):
                yield Case(*heads, batch=batch, context=context, k=share(context, 5), lists=lists)
    for batch, context in ((4, 131072), (16, 8192), (4, 32768), (1, 8192)):
        for percent in (5, 2, 10) if (batch, context) in ((4, 131072), (16, 8192)) else (2, 10):
            yield replace(base, batch=batch, context=context, k=share(context, percent))
    for batch in (16, 64):
        yield replace(base, batch=batch, cache_dtype="fp8_e4m3")
        yield replace(base, batch=batch, k=16384 if batch == 16 else 3264, mixed=True)


def _cpu_cases(quick: bool) -> Iterator[Case]:
    base = Case(*QWEN3_8B, batch=1, context=32768, k=share(32768, 5))
    small = Case(8, 2, 64, batch=1, context=32768, k=share(32768, 5), dtype="fp32")
    yield base
    yield small
    yield replace(base, tail=TAIL)
    yield replace(base, lists="per_kv_head")
    if quick:
        return
    for percent in (2, 10):
        for case in (base, small):
            yield replace(case, k=share(32768, percent))
    yield replace(base, lists="runs")
    yield replace(small, tail=TAIL)
    yield replace(small, lists="per_kv_head")
    yield replace(base, batch=4, context=8192, k=share(8192, 5))
    yield replace(base, context=131072, k=share(131072, 5))
    yield Case(*GPT_OSS_20B, batch=1, context=32768, k=share(32768, 5))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see --help. Returns 1 if a cell failed."""
    arguments = harness.parse_arguments("sparse", __doc__, argv)
    bench = Bench(arguments)
    peers = Peers.find(bench.is_cuda)
    cases = _cuda_cases(bench.quick) if bench.is_cuda else _cpu_cases(bench.quick)
    return harness.run("sparse", arguments, bench, [_cell(case, peers) for case in cases], peers.versions())


if __name__ == "__main__":
    sys.exit(main())
