"""Reported faults of top-k selection, named by their number in the collection of reports.

Every case compares with an oracle over poisoned outputs, runs repeatedly and on a side stream, and
stands under a watchdog.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from case_rules import everywhere
from op_cases import SENTINEL_INDEX, int32
from op_checks import assert_same_bits, check_select, select
from torch import Tensor

import vegas_ops

pytestmark = pytest.mark.timeout(300)


def token_kwargs(device: torch.device, lengths: list[int], k: int | Tensor, max_k: int) -> dict[str, Any]:
    return {"dump": "token", "seqlens": int32(lengths, device), "k": k, "max_k": max_k}


def check(logits: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The oracle's set, with every index valid, distinct and ascending."""
    results = []
    everywhere(logits.device, lambda: results.append(check_select(logits, **kwargs)))
    indices, lengths = results[0]
    for row, count in zip(indices.flatten(0, -2), lengths.flatten().tolist(), strict=True):
        chosen = row[:count]
        assert bool((chosen[1:] > chosen[:-1]).all()), "indices are not distinct and ascending"
        assert bool((row[count:] == -1).all()) and not bool((chosen < 0).any())
    return indices, lengths


def test_case_050_many_values_near_the_threshold(device: torch.device) -> None:
    row = torch.zeros(16384)
    row[:10000] = torch.linspace(1.0, 1.001, 10000)
    indices, _ = check(row[None].to(device), **token_kwargs(device, [16384], 2048, 2048))
    want = torch.topk(row, 2048).values.sort().values
    assert torch.equal(row[indices[0].long().cpu()].sort().values, want)

    rows = 64 if device.type == "cuda" else 3
    logits = torch.randn((rows, 262144), generator=torch.Generator().manual_seed(0)).to(device)
    indices, _ = select(logits, **token_kwargs(device, [262144] * rows, 2048, 2048))
    got = logits.gather(1, indices.long()).sort(-1).values
    assert torch.equal(got, torch.topk(logits, 2048).values.sort(-1).values)


def test_case_052_more_ties_than_any_buffer(device: torch.device) -> None:
    row = torch.zeros(8320)
    winners = torch.randperm(8320, generator=torch.Generator().manual_seed(0))[:100]
    row[winners] = 100.0
    indices, lengths = check(row[None].to(device), **token_kwargs(device, [8320], 2048, 2048))
    assert int(lengths[0]) == 2048 and set(winners.tolist()) <= set(indices[0].tolist())


@pytest.mark.parametrize("finite", (100, 4095))
def test_case_053_nan_is_never_selected(device: torch.device, finite: int) -> None:
    generator = torch.Generator().manual_seed(0)
    row = torch.full((4096,), math.nan)
    kept = torch.randperm(4096, generator=generator)[:finite]
    row[kept] = torch.randn(finite, generator=generator)
    indices, lengths = check(row[None].to(device), **token_kwargs(device, [4096], 2048, 2048))
    assert int(lengths[0]) == min(finite, 2048)
    assert set(indices[0, : int(lengths[0])].tolist()) <= set(kept.tolist())


@pytest.mark.parametrize("k", (1, 256, 2048))
@pytest.mark.parametrize("more", (-1, 0, 1))
def test_case_055_exactly_k_candidates(device: torch.device, k: int, more: int) -> None:
    n = k + more
    logits = torch.randn((1, k + 8), generator=torch.Generator().manual_seed(k)).to(device)
    _, lengths = check(logits, **token_kwargs(device, [n], k, k))
    assert int(lengths[0]) == min(n, k)


def test_case_056_negative_row_ends(device: torch.device) -> None:
    logits = torch.randn((4, 8), generator=torch.Generator().manual_seed(0)).to(device)
    _, lengths = check(logits, **token_kwargs(device, [-1, 0, 1, 2], 4, 4))
    assert lengths.tolist() == [0, 0, 1, 2]


def test_case_057_padded_rows_do_not_stall_others(device: torch.device) -> None:
    logits = torch.randn((8, 16384), generator=torch.Generator().manual_seed(0)).to(device)
    lengths = [16384, 9000, 16384, 3, 5000, 16384, -1, 0]
    indices, counts = check(logits, **token_kwargs(device, lengths, 2048, 2048))
    assert counts.tolist() == [2048, 2048, 2048, 3, 2048, 2048, 0, 0]
    assert bool((indices[6:] == -1).all())


def test_case_060_k_differs_by_row(device: torch.device) -> None:
    rows, n = (200, 65536) if device.type == "cuda" else (9, 65536)
    logits = torch.randn((rows, n), generator=torch.Generator().manual_seed(0)).to(device)
    ks = [n if row % 2 else 100 for row in range(rows)]
    k = int32(ks, device)
    indices, counts = select(logits, **token_kwargs(device, [n] * rows, k, n))
    assert counts.tolist() == ks
    every = torch.arange(n, dtype=torch.int32, device=device)
    for row in range(rows):
        if row % 2:
            assert torch.equal(indices[row], every)
        else:
            one = slice(row, row + 1)
            alone, _ = select(logits[one], **token_kwargs(device, [n], 100, 100))
            assert torch.equal(indices[row, :100], alone[0])
            assert bool((indices[row, 100:] == -1).all())
    check(logits[:3], **token_kwargs(device, [n] * 3, k[:3], n))


@pytest.mark.parametrize("k", (1, 2999, 3000, 3001, 4500, 6000, 6001, 8192))
def test_case_062_plateaus_around_rank_k(device: torch.device, k: int) -> None:
    row = torch.cat([torch.full((3000,), value) for value in (2.0, 1.0, 0.0)])[:8192]
    row = row[torch.randperm(8192, generator=torch.Generator().manual_seed(0))]
    indices, lengths = check(row[None].to(device), **token_kwargs(device, [8192], k, 8192))
    assert int(lengths[0]) == k
    got = row[indices[0, :k].long().cpu()].sort(descending=True).values
    assert torch.equal(got, row.sort(descending=True).values[:k])


@pytest.mark.parametrize("k", (1, 31, 1025, 2048, 9175, 16384))
def test_case_064_every_slot_is_translated(device: torch.device, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 20000), generator=generator).to(device)
    table = torch.randperm(2 * 1250, generator=generator).reshape(2, 1250).to(torch.int32).to(device)
    kwargs = token_kwargs(device, [20000, 17000], k, 16384)
    logical, counts = check(logits, **kwargs)
    slots, slot_counts = select(logits, **kwargs, block_table=table, page_size=16)
    assert torch.equal(counts, slot_counts)
    for b in range(2):
        tokens = logical[b, :k].long()
        want = table[b][tokens // 16] * 16 + (tokens % 16).to(torch.int32)
        assert torch.equal(slots[b, :k], want) and bool((slots[b, k:] == -1).all())


def test_case_065_ties_and_order_do_not_vary(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(6000, generator=generator)
    row[torch.randperm(6000, generator=generator)[:500]] = row.topk(800).values[-1]
    alone, _ = check(row[None].to(device), **token_kwargs(device, [6000], 700, 700))
    for call in range(50):
        batch = torch.randn((1 + call % 7, 6000), generator=generator)
        at = call % len(batch)
        batch[at] = row
        lengths = [6000 if b == at else 100 * call for b in range(len(batch))]
        indices, _ = vegas_ops.topk_aggregate_logits(
            batch.to(device), **token_kwargs(device, lengths, 700, 700)
        )
        assert_same_bits(indices[at], alone[0], f"indices of call {call}")


@pytest.mark.parametrize(("length", "k"), ((3, 16), (0, 16), (3, 0), (0, 0)))
def test_case_066_k_larger_than_available(device: torch.device, length: int, k: int) -> None:
    logits = torch.randn((1, 8), generator=torch.Generator().manual_seed(0)).to(device)
    indices, lengths = check(logits, **token_kwargs(device, [length], k, 16))
    assert int(lengths[0]) == min(length, k)
    assert indices[0].tolist() == [*range(min(length, k)), *[-1] * (16 - min(length, k))]
    # No room in the output: nothing is written around it.
    guard = torch.full((3,), SENTINEL_INDEX, dtype=torch.int32, device=device)
    kwargs = token_kwargs(device, [length], k, 0)
    vegas_ops.topk_aggregate_logits(logits, **kwargs, indices=guard[:0].reshape(1, 0), topk_length=guard[1:2])
    assert guard.tolist() == [SENTINEL_INDEX, 0, SENTINEL_INDEX]
