"""Values that make no sense mean what docs/untrusted.md says: the same as the values they are taken for.

On the CPU lengths that do not fit are errors instead (`test_arguments.py`), so those run on a GPU alone.
Whether memory stays within the tensors is for `tests/native/hostile.cpp`, under a sanitizer, to see.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import GARBAGE_PAGES, SENTINEL, SparseCase, VerifyCase, int32
from op_checks import assert_same_bits

import vegas_ops

BF16 = torch.bfloat16
FAR = (-(2**31), 2**31 - 1)


def verify(case: VerifyCase, **changes: Any) -> dict[str, torch.Tensor]:
    outputs = case.outputs(SENTINEL)
    names = ("q", "k_cache", "v_cache", "block_table", "seqused_k")
    call = {**dict(zip(names, case.args, strict=True)), **case.kwargs, **changes}
    vegas_ops.flash_attn_with_logit_dump(**call, **outputs)
    return outputs


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, tensor in got.items():
        assert_same_bits(tensor, want[name], name)


def verify_case(device: torch.device, dump: str = "kv_head") -> VerifyCase:
    return VerifyCase(
        device=device, dtype=BF16, lengths=(300, 40, 17), q_lens=(3, 1, 2), dump=dump, spare_columns=0,
        dump_rows=(3, 2, 3), dump_len=(298, 40, 16),
    )  # fmt: skip


@pytest.mark.parametrize("dump", ("token", "kv_head", "all"))
def test_lengths_are_clamped_to_table_and_bound(cuda: torch.device, dump: str) -> None:
    case = verify_case(cuda, dump)
    capacity = case.block_table.shape[1] * case.page_size
    case.block_table[0] = case.block_table[0].clamp(0)  # the whole table is of pages
    case.max_seqlen_k = capacity
    for value, meant in ((2**31 - 1, capacity), (-5, 0), (-(2**31), 0)):
        got = verify(case, seqused_k=int32((value, 40, 17), cuda))
        assert_same(got, verify(case, seqused_k=int32((meant, 40, 17), cuda)))


def test_rows_are_clamped_to_the_query(cuda: torch.device) -> None:
    case = verify_case(cuda, "token")
    got = verify(case, cu_seqlens_q=int32((-9, 3, 4, 2**31 - 1), cuda))
    assert_same(got, verify(case, cu_seqlens_q=int32((0, 3, 4, 6), cuda)))
    # A request that ends before it begins has no rows, and whoever comes after it is not disturbed.
    got = verify(case, cu_seqlens_q=int32((3, 0, 4, 6), cuda))
    want = verify(case)
    assert_same_bits(got["out"][4:], want["out"][4:], "out of the last request")
    assert bool((got["logits"][0] == SENTINEL).all()), "dumped for a request without rows"


def test_bits_and_dump_lengths(device: torch.device) -> None:
    case = verify_case(device)
    want = verify(case)
    assert_same(verify(case, dump_rows=int32((-1, 6, 2**31 - 1), device)), want)
    for far, meant in zip(FAR, (0, 300), strict=True):
        got = verify(case, dump_len=int32((far, 40, 16), device))
        assert_same(got, verify(case, dump_len=int32((meant, 40, 16), device)))


@pytest.mark.parametrize("page", (*FAR, -1, 10**6))
def test_pages_outside_the_cache_are_masked(device: torch.device, page: int) -> None:
    case = verify_case(device)
    tables = []
    for bad in (page, GARBAGE_PAGES[0]):
        tables.append(case.block_table.clone())
        tables[-1][0, 1] = tables[-1][1, 0] = bad
    want = verify(case)
    got, other = (verify(case, block_table=table) for table in tables)
    assert_same(got, other)
    assert bool(torch.isneginf(got["logits"][0, :, :, 16:32].float()).all())
    assert_same_bits(got["out"][4:], want["out"][4:], "out of the request whose pages are right")


def test_lists_and_tails(device: torch.device) -> None:
    case = SparseCase(
        device=device, dtype=BF16, lengths=(90, 40), counts=(12, 12), tail_starts=(80, 38), spare_k=0
    )

    def run(**changes: Any) -> dict[str, torch.Tensor]:
        outputs = case.outputs(math.nan)
        names = ("q", "k_cache", "v_cache", "indices", "topk_length")
        call = {**dict(zip(names, case.args, strict=True)), **case.kwargs, **changes}
        vegas_ops.sparse_paged_decode(**call, **outputs)
        return outputs

    want = run()
    assert_same(run(topk_length=int32((2**31 - 1, 12), device)), want)
    assert_same(run(topk_length=int32((-7, 12), device)), run(topk_length=int32((0, 12), device)))
    assert_same(run(tail_start=int32((-(2**31), 38), device)), run(tail_start=int32((0, 38), device)))
    assert_same(run(tail_start=int32((2**31 - 1, 38), device)), run(tail_start=int32((90, 38), device)))
    wrong, skipped = case.indices.clone(), case.indices.clone()
    slots = case.k_cache.shape[0] * case.page_size
    for at, value in enumerate((*FAR, slots, slots + 10**6, -2)):
        wrong[0, 2 * at], skipped[0, 2 * at] = value, -1
    assert_same(run(indices=wrong), run(indices=skipped))
    if device.type == "cuda":
        capacity = case.block_table.shape[1] * case.page_size
        far = run(seqused_k=int32((2**31 - 1, 40), device))
        assert_same(far, run(seqused_k=int32((capacity, 40), device)))
        assert_same(run(seqused_k=int32((-3, 40), device)), run(seqused_k=int32((0, 40), device)))


def test_candidates_and_budgets(device: torch.device) -> None:
    logits = torch.randn((2, 50), generator=torch.Generator().manual_seed(0)).to(device)

    def run(seqlens: tuple[int, int], k: tuple[int, int], **options: Any) -> list[torch.Tensor]:
        return list(
            vegas_ops.topk_aggregate_logits(
                logits, dump="token", seqlens=int32(seqlens, device), k=int32(k, device), max_k=20, **options
            )
        )

    for given, meant in (
        (((2**31 - 1, 9), (5, 5)), ((50, 9), (5, 5))),
        (((-(2**31), 9), (5, 5)), ((0, 9), (5, 5))),
        (((50, 9), FAR), ((50, 9), (0, 9))),
        (((50, 9), (2**31 - 1, 5)), ((50, 9), (20, 5))),
    ):
        for got, want in zip(run(*given), run(*meant), strict=True):
            assert_same_bits(got, want, str(given))
    table = int32((*FAR, -1, 3), device).reshape(1, 4).repeat(2, 1)
    slots, _ = run((50, 50), (20, 20), block_table=table, page_size=16)
    tokens, _ = run((50, 50), (20, 20))
    want = torch.where(tokens >= 48, 3 * 16 + tokens - 48, -1).to(torch.int32)
    assert_same_bits(slots, want, "slots")


@pytest.mark.parametrize("where", ("k", "v", "q"))
def test_nothing_but_nan_and_infinity_in_one_request(device: torch.device, where: str) -> None:
    case = verify_case(device)
    want = verify(case)
    special = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -0.0], dtype=BF16, device=device)
    pages = case.block_table[1, :3].long()
    if where == "q":
        case.q[3] = special[torch.arange(64, device=device) % 5]
    else:
        cache = case.k_cache if where == "k" else case.v_cache
        cache[pages] = special[torch.arange(64, device=device) % 5]
    got = verify(case)
    for name, tensor in got.items():
        if name in ("logits", "guide_lse"):
            mine, other = tensor[[0, 2]], want[name][[0, 2]]
        else:
            rows = torch.tensor([0, 1, 2, 4, 5], device=device)
            dim = 0 if name == "out" else 1
            mine, other = tensor.index_select(dim, rows), want[name].index_select(dim, rows)
        assert_same_bits(mine, other, f"{name} of the other requests")
