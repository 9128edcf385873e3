"""Reported faults of paged attention that read or write where they must not, by their number.

Addresses beyond 32 bits, grids beyond their limits, tables and lengths that point elsewhere. Every
case stands under a watchdog.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from case_rules import check_case, everywhere, verify
from op_cases import SENTINEL, SparseCase, VerifyCase, int32
from op_checks import assert_same_bits
from torch import Tensor

import vegas_ops

pytestmark = pytest.mark.timeout(300)

BF16 = torch.bfloat16


def needs_memory(device: torch.device, gib: float) -> None:
    """The CPU commits memory lazily, so that large strides cost it nothing."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def spread_pages(case: VerifyCase | SparseCase, stride: int, pages: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The first request's pages moved to the ids `pages` of a cache with a large page stride."""
    shape = case.k_cache.shape[1:]
    size = max(pages) * stride + 2 * shape.numel()
    storage = torch.empty(size, dtype=case.k_cache.dtype, device=case.device)
    views = []
    for offset, cache in ((0, case.k_cache), (shape.numel(), case.v_cache)):
        strides = (stride, *torch.empty(shape, device="meta").stride())
        view = storage.as_strided((max(pages) + 1, *shape), strides, offset)
        for column, page in enumerate(pages):
            view[page] = cache[int(case.block_table[0, column])]
        views.append(view)
    return views[0], views[1]


def test_case_001_slots_beyond_a_length_may_be_unmapped() -> None:
    """On the CPU a read beyond a length, or of a table entry beyond the need, would be a crash."""
    program = """
import ctypes, mmap, sys
import torch, vegas_ops
PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
keep = []
def guarded(num_bytes):
    # Bytes that end where an inaccessible stretch of the same tensor begins.
    size = -(-num_bytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 16 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(address + size, 16 * PAGE, 0) == 0
    keep.append(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)[size - num_bytes:]
def i32(*values):
    return torch.tensor(values, dtype=torch.int32)
for dtype in (torch.bfloat16, torch.float32):
    for length in (1, 5, 16, 37):
        # One KV head of 64: the cache's storage becomes inaccessible right behind the last key.
        width = 64 * (2 if dtype == torch.bfloat16 else 4)
        caches = []
        for _ in range(2):
            cache = guarded(length * width).view(dtype)[: 48 * 64].view(3, 16, 1, 64)
            cache.view(-1)[: length * 64] = torch.randn(length * 64).to(dtype)
            caches.append(cache)
        columns = -(-length // 16)
        table = guarded(columns * 4).view(torch.int32)[:8].view(1, 8)
        table[0, :columns] = torch.arange(columns, dtype=torch.int32)
        q = torch.randn(1, 4, 64).to(dtype)
        for dump in ("none", "token", "kv_head", "rows"):
            vegas_ops.flash_attn_with_logit_dump(
                q, *caches, table, i32(length), cu_seqlens_q=i32(0, 1), max_seqlen_q=1,
                max_seqlen_k=128, dump=dump)
        vegas_ops.sparse_paged_decode(
            q, *caches, i32(*range(length)).view(1, -1), i32(length - 1),
            tail_start=i32(length - 1), seqused_k=i32(length), block_table=table)
        logits = guarded(length * 4).view(torch.float32)[:64].view(1, 64)
        logits[0, :length] = torch.randn(length)
        vegas_ops.topk_aggregate_logits(
            logits, dump="token", seqlens=i32(length), k=4, max_k=4, pool=(2, 2),
            block_table=table, page_size=16)
print("survived")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240,
        cwd=Path(vegas_ops.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0 and "survived" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("page", (7766, 7767, 7768))
def test_case_004_page_id_times_stride(device: torch.device, page: int) -> None:
    needs_memory(device, 6)
    case = VerifyCase(device=device, dtype=BF16, lengths=(16,), q_lens=(1,), dump="kv_head")
    draft = SparseCase(device=device, dtype=BF16, lengths=(16,), counts=(5,), tail_starts=(14,))
    expected, expected_draft = check_case(case), check_case(draft)
    case.k_cache, case.v_cache = spread_pages(case, 276480, (page,))
    offset = draft.indices % 16
    draft.k_cache, draft.v_cache = spread_pages(draft, 276480, (page,))
    draft.indices = (page * 16 + offset).to(torch.int32)
    for one in (case, draft):
        one.block_table = int32((page, 2**31 - 1), device)[None]

    def check() -> None:
        for name, tensor in verify(case).items():
            assert_same_bits(tensor, expected[name], name)
        out, _ = vegas_ops.sparse_paged_decode(*draft.args, **draft.kwargs)
        assert_same_bits(out, expected_draft["out"], "out of the draft")

    everywhere(device, check)


def test_case_006_last_block_of_an_interleaved_buffer(device: torch.device) -> None:
    needs_memory(device, 6)
    case = VerifyCase(
        device=device, dtype=BF16, layout="interleaved_head", lengths=(16,), q_lens=(1,),
        dump="kv_head",
    )  # fmt: skip
    expected = check_case(case)
    heads, dim = case.heads_kv, case.head_dim
    blocks = 2**31 // (heads * 16 * 2 * dim) + 2
    both = torch.empty((blocks, heads, 16, 2 * dim), dtype=BF16, device=device).transpose(1, 2)
    k_cache, v_cache = both[..., :dim], both[..., dim:]
    k_cache[-1] = case.k_cache[int(case.block_table[0, 0])]
    v_cache[-1] = case.v_cache[int(case.block_table[0, 0])]
    case.k_cache, case.v_cache = k_cache, v_cache
    case.block_table = int32((blocks - 1, -1), device)[None]

    def check() -> None:
        for name, tensor in verify(case).items():
            assert_same_bits(tensor, expected[name], name)

    everywhere(device, check)


@pytest.mark.parametrize("what", ("q", "out", "logits"))
def test_case_007_row_times_stride(device: torch.device, what: str) -> None:
    needs_memory(device, 14)
    case = VerifyCase(device=device, dtype=BF16, lengths=(20,), q_lens=(3,), dump="all")
    expected = check_case(case)
    outputs = case.outputs(SENTINEL)
    narrow = case.q if what == "q" else outputs[what]
    stride = 2**30 + 64  # the third row starts beyond 2^31 elements
    storage = torch.empty(2 * stride + narrow[0].numel(), dtype=narrow.dtype, device=device)
    wide = storage.as_strided(narrow.shape, (stride, *narrow.stride()[1:]))
    wide.copy_(narrow)
    if what == "q":
        case.q = wide
    else:
        outputs[what] = wide

    def check() -> None:
        for tensor in outputs.values():
            tensor.fill_(SENTINEL)
        vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs, **outputs)
        for name, tensor in outputs.items():
            assert_same_bits(tensor, expected[name], name)

    everywhere(device, check)


@pytest.mark.parametrize("batch", (65536, 70000))
def test_case_008_batch_beyond_the_grid_limit(device: torch.device, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((batch, 1, 64), generator=generator).to(BF16).to(device) for _ in range(3))
    pages = torch.randperm(batch, generator=generator).to(torch.int32).to(device)
    k_cache, v_cache = torch.empty_like(k)[:, None], torch.empty_like(v)[:, None]
    k_cache[pages.long(), 0], v_cache[pages.long(), 0] = k, v
    ones = torch.ones(batch, dtype=torch.int32, device=device)
    scores = (q.double() * k.double()).sum(-1) / 8
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    bound = 2.0**-16 * (q.double().abs() * k.double().abs()).sum(-1).max() / 8

    def check() -> None:
        out, lse = torch.full_like(q, math.nan), torch.full((1, batch), math.nan, device=device)
        logits = torch.full((batch, 1), math.nan, device=device)
        vegas_ops.flash_attn_with_logit_dump(
            q, k_cache, v_cache, pages[:, None], ones, cu_seqlens_q=rows, max_seqlen_q=1,
            max_seqlen_k=1, out=out, lse=lse, logits=logits,
        )  # fmt: skip
        assert_same_bits(out, v, "out")
        torch.testing.assert_close(lse[0].double(), scores[:, 0], rtol=1e-6, atol=float(bound))
        torch.testing.assert_close(logits.double(), scores, rtol=1e-6, atol=float(bound))
        indices, lengths = vegas_ops.topk_aggregate_logits(
            logits, dump="token", seqlens=ones, k=2, max_k=2, block_table=pages[:, None], page_size=1
        )
        assert bool((indices[:, 0] == pages).all()) and bool((indices[:, 1] == -1).all())
        assert bool((lengths == 1).all())
        out.fill_(math.nan)
        lse.fill_(math.nan)
        vegas_ops.sparse_paged_decode(q, k_cache, v_cache, indices, lengths, out=out, lse=lse)
        assert_same_bits(out, v, "out of the draft")

    everywhere(device, check)


@pytest.mark.parametrize("page_size", (16, 32))
def test_case_010_table_ends_with_the_need(device: torch.device, page_size: int) -> None:
    for length in (1, page_size - 1, page_size, page_size + 1, 65, 129, 257):
        case = VerifyCase(
            device=device, dtype=BF16, page_size=page_size, lengths=(length,), q_lens=(1,),
            dump="kv_head", spare_columns=0, spare_pages=0,
        )  # fmt: skip
        check_case(case)
        # The same table as the last row of a larger one whose other entries are traps.
        columns = case.block_table.shape[1]
        table = torch.full((3, columns + 4), 2**31 - 1, dtype=torch.int32, device=device)
        table[1, :columns] = case.block_table[0]
        case.block_table = table[1:2]
        check_case(case)


def test_case_012_length_larger_than_the_table(device: torch.device) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(32, 10), q_lens=(1, 1), dump="token", spare_columns=0
    )
    good = check_case(case)
    case.seqused_k, case.max_seqlen_k = int32((33, 10), device), 33
    if device.type == "cpu":
        outputs = case.outputs(SENTINEL)
        with pytest.raises(ValueError, match="`seqused_k`"):
            vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs, **outputs)
        assert all(bool((tensor == SENTINEL).all()) for tensor in outputs.values())
    else:
        # Lengths on a GPU are clamped to the table, and no other request feels it.
        got = verify(case)
        torch.cuda.synchronize()
        assert_same_bits(got["out"][1], good["out"][1], "out of the other request")


@pytest.mark.parametrize("length", (16, 24))
def test_case_014_bad_page_is_not_page_zero(device: torch.device, length: int) -> None:
    case = VerifyCase(device=device, dtype=BF16, lengths=(length,), q_lens=(1,), dump="token", spare_pages=4)
    source = int(case.block_table[0, 0])
    first = (case.k_cache[source].clone(), case.v_cache[source].clone())
    case.k_cache[3], case.v_cache[3] = first
    case.k_cache[0] = case.v_cache[0] = 1e4
    case.block_table = int32((3, -1, -1), device)[None]
    draft = SparseCase(device=device, dtype=BF16, lengths=(length,), counts=(3,), spare_pages=4)
    draft.k_cache, draft.v_cache = case.k_cache, case.v_cache
    draft.block_table, draft.tail_starts = case.block_table, (12,)
    draft.indices = int32((48, -1, 50, 51, -5, 2**31 - 1), device)[None]
    draft.topk_length = int32((6,), device)
    before = (case.k_cache.clone(), case.v_cache.clone())
    got = check_case(case)
    check_case(draft)
    assert float(got["out"].abs().max()) < 100
    assert_same_bits(case.k_cache, before[0], "k_cache")
    assert_same_bits(case.v_cache, before[1], "v_cache")


@pytest.mark.parametrize("count", (1, 2))
def test_case_015_minus_one_in_a_table_of_single_tokens(device: torch.device, count: int) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, page_size=1, lengths=(count,), q_lens=(1,), dump="token",
        spare_pages=8,
    )  # fmt: skip
    case.k_cache[5], case.v_cache[5] = case.random(2, 64).to(BF16), case.random(2, 64).to(BF16)
    table = int32((-1, 5), device)[None]
    case.block_table = table[:, 1:] if count == 1 else table
    got = check_case(case)
    assert_same_bits(got["out"][0], case.v_cache[5, 0].repeat_interleave(2, 0), "out")
    out, _ = vegas_ops.sparse_paged_decode(
        case.q, case.k_cache, case.v_cache, case.block_table, int32((count,), device)
    )
    assert_same_bits(out, got["out"], "out of the draft")
