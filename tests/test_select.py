"""topk_aggregate_logits and aggregate_logits against their oracles, on every device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from op_cases import SelectCase, int32
from op_checks import assert_same_bits, check_aggregate, check_select, check_select_case, select
from op_draws import drawn, select_arguments
from torch import Tensor

import vegas_ops

DUMPS = ("token", "token_weight", "kv_head", "rows", "all")


def token_row(values: Sequence[float] | Tensor, device: torch.device, pad: int = 2) -> tuple[Tensor, Tensor]:
    """One request's token dump, followed by columns that would win if they were read."""
    row = torch.as_tensor(values, dtype=torch.float32)
    beyond = torch.full((pad,), math.inf)
    return torch.cat([row, beyond])[None].to(device), int32((len(row),), device)


@given(arguments=drawn(select_arguments))
def test_any_case(device: torch.device, arguments: dict[str, Any]) -> None:
    check_select_case(SelectCase(device, **arguments))


def rows_of_values() -> dict[str, Callable[[int], Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def random(n: int) -> Tensor:
        return torch.randn(n, generator=generator)

    def one_outlier(n: int) -> Tensor:
        row = torch.full((n,), 0.25)
        row[n // 2] = 1e30
        return row

    def plateaus(n: int) -> Tensor:
        return (torch.arange(n) // max(n // 5, 1) % 3).float()

    def next_floats(n: int) -> Tensor:
        bits = torch.full((n,), 0x3F800000, dtype=torch.int32) + torch.arange(n, dtype=torch.int32)
        return bits.view(torch.float32)

    def mixed(n: int) -> Tensor:
        special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-42, -1e-42, 3e38])
        return special[torch.randint(0, 8, (n,), generator=generator)]

    return {
        "random": random,
        "all equal": lambda n: torch.full((n,), -3.5),
        "all zeros of both signs": lambda n: torch.tensor([0.0, -0.0]).repeat(n)[:n],
        "all +inf": lambda n: torch.full((n,), math.inf),
        "all -inf": lambda n: torch.full((n,), -math.inf),
        "all NaN": lambda n: torch.full((n,), math.nan),
        "negative NaN": lambda n: torch.full((n,), -1, dtype=torch.int32).view(torch.float32),
        "one NaN": lambda n: torch.cat([torch.full((1,), math.nan), random(n)])[:n],
        "mixed specials": mixed,
        "narrow": lambda n: 1.0 + torch.rand(n, generator=generator) * 1e-3,
        "next floats": next_floats,
        "next floats, falling": lambda n: next_floats(n).flip(0),
        "denormals": lambda n: torch.randint(-9, 9, (n,), generator=generator).float() * 1e-44,
        "plateaus": plateaus,
        "sawtooth": lambda n: (torch.arange(n) % 17).float(),
        "rising": lambda n: torch.arange(n).float(),
        "falling": lambda n: -torch.arange(n).float(),
        "one outlier": one_outlier,
        "all negative": lambda n: -random(n).abs() - 1,
        "huge range": lambda n: torch.exp(random(n) * 20) * random(n).sign(),
    }


@pytest.mark.parametrize("name", list(rows_of_values()))
def test_adversarial_rows(device: torch.device, name: str) -> None:
    make = rows_of_values()[name]
    for n in (1, 2, 31, 32, 33, 255, 1000, 4097):
        logits, seqlens = token_row(make(n), device)
        for k in {0, 1, 2, n // 3, n - 1, n, n + 1}:
            check_select(logits, dump="token", seqlens=seqlens, k=k, max_k=n + 2)


@pytest.mark.parametrize("name", ("random", "narrow", "plateaus", "mixed specials", "falling"))
def test_long_rows(device: torch.device, name: str) -> None:
    n = 131072
    logits, seqlens = token_row(rows_of_values()[name](n), device)
    for k in (1, 256, 9175, 70000):
        check_select(logits, dump="token", seqlens=seqlens, k=k, max_k=k)


@pytest.mark.parametrize("pool", ((1, 0), (6, 0), (0, 6), (3, 2), (20, 11), (200, 0)))
def test_pooling(device: torch.device, pool: tuple[int, int]) -> None:
    for name in ("random", "mixed specials", "plateaus", "one outlier", "rising"):
        for n in (1, 7, 100, 1000):
            logits, seqlens = token_row(rows_of_values()[name](n), device)
            for k in (1, n // 2, n):
                check_select(logits, dump="token", seqlens=seqlens, k=k, max_k=k, pool=pool)


@pytest.mark.parametrize("count_forced", (True, False))
@pytest.mark.parametrize("max_k", (0, 1, 5, 8, 30))
def test_forced_tokens(device: torch.device, count_forced: bool, max_k: int) -> None:
    row = torch.randn(20, generator=torch.Generator().manual_seed(1))
    row[1], row[19], row[7] = -math.inf, math.nan, math.inf
    logits, seqlens = token_row(row, device)
    for num_sink, num_recent in ((0, 0), (2, 0), (0, 3), (4, 4), (15, 15), (100, 100)):
        for k in (0, 1, 4, 6, 20, 50):
            check_select(
                logits, dump="token", seqlens=seqlens, k=k, max_k=max_k, num_sink=num_sink,
                num_recent=num_recent, count_forced=count_forced,
            )  # fmt: skip


def test_request_without_scores_keeps_only_forced_tokens(device: torch.device) -> None:
    logits = torch.full((3, 40), 5.0, device=device)
    indices, lengths = check_select(
        logits, dump="token", seqlens=int32((40, 40, 40), device), k=8, max_k=8, num_sink=2,
        num_recent=1, dump_rows=int32((3, 0, 2), device),
        cu_seqlens_q=int32((0, 0, 2, 4), device),
    )  # fmt: skip
    assert lengths.tolist() == [3, 3, 8]
    assert indices[0].tolist() == [0, 1, 39, -1, -1, -1, -1, -1]


def test_layers_share_lengths_and_table(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(-9, 9, (4, 2, 2, 3, 200), generator=generator)
    logits = logits.to(torch.bfloat16).to(device)
    table = torch.randperm(2 * 13, generator=generator).reshape(2, 13).to(torch.int32).to(device)
    kwargs: dict[str, Any] = {
        "dump": "kv_head", "seqlens": int32((200, 90), device), "k": int32((20, 100), device),
        "max_k": 64, "block_table": table, "page_size": 16, "pool": (3, 0),
    }  # fmt: skip
    indices, lengths = check_select(logits, **kwargs)
    assert indices.shape == (4, 2, 64)
    for layer in range(4):
        own = select(logits[layer], **kwargs)
        assert_same_bits(indices[layer], own[0], "indices of a layer alone")
        assert_same_bits(lengths[layer], own[1], "topk_length of a layer alone")


def test_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((9, 5000), generator=generator).to(device)
    logits[:, 100:800] = 0.5  # ties around the threshold
    lengths = (5000, 1, 0, 3000, 4999, 700, 5000, 64, 2000)
    seqlens = int32(lengths, device)
    together = select(logits, dump="token", seqlens=seqlens, k=900, max_k=900)
    for b in range(9):
        alone = select(logits[b : b + 1], dump="token", seqlens=seqlens[b : b + 1], k=900, max_k=900)
        assert_same_bits(alone[0][0], together[0][b], f"indices of row {b}")


def long_row(kind: str, n: int, generator: torch.Generator) -> Tensor:
    normal, place = torch.randn(n, generator=generator), torch.arange(n, dtype=torch.float32)
    rows = {
        "normal": normal,
        "narrow": 1.0 + 1e-5 * normal,
        "heavy-tailed": (4.0 * normal).exp(),
        "two-valued": (normal > 2.0).float(),
        "ascending": place,
        "descending": -place,
        "sawtooth": place % 97,
        "outlier": torch.where(place == n // 2, 1e30, normal),
        "denormal": (1e-42 * normal),
        "mostly masked": torch.where(normal > 1.9, normal, -math.inf),
        "nan": torch.where(normal > 1.9, math.nan, normal),
        "infinite": torch.where(normal > 1.9, math.inf, normal),
    }
    return rows[kind]


@pytest.mark.parametrize("pool", ((0, 0), (6, 0), (2, 5)))
@pytest.mark.parametrize(
    "kind",
    ("normal", "narrow", "heavy-tailed", "two-valued", "ascending", "descending", "sawtooth", "outlier",
     "denormal", "mostly masked", "nan", "infinite"),
)  # fmt: skip
def test_long_lists_of_any_values(device: torch.device, kind: str, pool: tuple[int, int]) -> None:
    """Shared by several thread blocks on CUDA, and ranked through a sample everywhere."""
    n, generator = 40_000, torch.Generator().manual_seed(6)
    logits = torch.stack([long_row(kind, n, generator) for _ in range(3)]).to(device)
    table = torch.randperm(3 * 2500, generator=generator).reshape(3, 2500).to(torch.int32).to(device)
    check_select(
        logits, dump="token", seqlens=int32((n, n - 1, 9001), device), k=int32((2000, 17, 8500), device),
        max_k=9000, pool=pool, num_sink=4, num_recent=64, block_table=table, page_size=16,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ("normal", "two-valued", "sawtooth", "heavy-tailed", "mostly masked"))
@pytest.mark.parametrize("lists, n", ((1, 8192), (6, 8185), (40, 4096), (3, 32768), (20, 16_000)))
def test_however_lists_are_divided(device: torch.device, lists: int, n: int, kind: str) -> None:
    """On CUDA, the number and size of thread blocks depend on how many lists there are and how long."""
    generator = torch.Generator().manual_seed(8)
    rows = torch.stack([long_row(kind, n, generator) for _ in range(lists)])
    seqlens = int32([max(n - 97 * b * b, 0) for b in range(lists)], device)
    k = int32([n // 20 + 31 * b for b in range(lists)], device)
    pages = -(-n // 16)
    table = torch.randperm(lists * pages, generator=generator).reshape(lists, pages).int().to(device)
    for pad, pool in ((0, (6, 0)), (3, (7, 0)), (8, (1, 0)), (5, (0, 0))):
        logits = torch.cat([rows, torch.full((lists, pad), math.inf)], 1).to(device)
        check_select(
            logits, dump="token_weight", seqlens=seqlens, k=k, max_k=n // 10, pool=pool, num_sink=3,
            num_recent=40, block_table=table, page_size=16,
        )  # fmt: skip


@pytest.mark.parametrize("pool", ((0, 0), (6, 0)))
@pytest.mark.parametrize("lists, n", ((3, 32_768), (2, 300_000)))
@pytest.mark.parametrize("better", (True, False))
def test_sample_that_misleads(
    device: torch.device, lists: int, n: int, pool: tuple[int, int], better: bool
) -> None:
    """The Hopper kernels look where these scores are much better than elsewhere, or worse."""
    generator = torch.Generator().manual_seed(9)
    logits, window = torch.randn((lists, n), generator=generator), torch.arange(512)
    drawn = 4 + (((window << 23) | (window * 0x9E3779B1 % 2**32 >> 9)) * (n - 68) >> 32)
    last = drawn | 7
    if better:
        logits[:, last[::18]] = 3.5
    else:
        logits[:, (last[:, None] - torch.arange(8)).clamp(min=0)] -= 9
    check_select(
        logits.to(device), dump="token", seqlens=int32((n,) * lists, device), k=n // 20, max_k=n // 20,
        pool=pool, num_sink=4, num_recent=64,
    )  # fmt: skip


def test_list_of_a_million(device: torch.device) -> None:
    """Beyond the shared memory of any cluster of thread blocks."""
    n, generator = 1_000_000, torch.Generator().manual_seed(7)
    logits = torch.randn((2, n), generator=generator).to(device)
    seqlens = int32((n, 40_000), device)
    check_select(logits, dump="token", seqlens=seqlens, k=50_000, max_k=50_000, pool=(6, 0))


def test_workspace_given_is_left_reusable(device: torch.device) -> None:
    workspace = vegas_ops.make_workspace(
        "topk_aggregate_logits", max_batch=4, max_q_len=8, max_seqlen_k=20000, max_k=3000,
        num_heads_q=8, num_heads_kv=2, head_dim=128, device=device,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    for n in (20000, 3, 4000, 20000):
        logits = torch.randn((4, n), generator=generator).to(device)
        seqlens = int32((n, n // 2, 0, 1), device)
        check_select(logits, dump="token", seqlens=seqlens, k=n // 3, max_k=3000, workspace=workspace)


def test_aggregate_then_select_equals_select(device: torch.device) -> None:
    """An engine with tensor parallelism all-reduces in between."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((3, 2, 8, 900), generator=generator).to(torch.bfloat16).to(device)
    guide_lse = torch.randn((3, 2, 8), generator=generator).to(device) + 3
    kwargs: dict[str, Any] = {
        "dump": "kv_head", "mode": "weight", "guide_lse": guide_lse,
        "seqlens": int32((900, 400, 5), device),
    }  # fmt: skip
    sums, heads = vegas_ops.aggregate_logits(logits, **kwargs)
    assert heads == 8
    direct = select(logits, **kwargs, k=77, max_k=80)
    halves = select(sums, dump="token", seqlens=kwargs["seqlens"], k=77, max_k=80)
    assert_same_bits(direct[0], halves[0], "indices")


# Integration with torch.


def test_opcheck(device: torch.device) -> None:
    logits = torch.randn(2, 2, 3, 50).to(torch.bfloat16).to(device)
    seqlens = int32((50, 20), device)
    table = torch.arange(8, dtype=torch.int32, device=device).reshape(2, 4)
    workspace = None
    if device.type == "cuda":
        workspace = vegas_ops.make_workspace(
            "topk_aggregate_logits", max_batch=2, max_q_len=1, max_seqlen_k=64, max_k=8,
            num_heads_q=3, num_heads_kv=3, head_dim=64, device=device,
        )  # fmt: skip
    indices = torch.zeros((2, 8), dtype=torch.int32, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    torch.library.opcheck(
        torch.ops.vegas_ops.topk_aggregate_logits.default,
        (
            logits, 3, seqlens, 8, None, 0, None, None, None, None, None, 2, 0, 1, 1, True, False,
            table, 16, 8, indices, lengths, workspace,
        ),
    )  # fmt: skip
    out = torch.zeros((2, 50), device=device)
    torch.library.opcheck(
        torch.ops.vegas_ops.aggregate_logits.default,
        (logits, 3, seqlens, 0, None, None, None, None, None, out),
    )


def test_compile_fullgraph(device: torch.device) -> None:
    logits = torch.randn(2, 300).to(device)
    seqlens = int32((300, 20), device)

    def step(logits: Tensor, seqlens: Tensor) -> tuple[Tensor, Tensor]:
        indices, lengths = vegas_ops.topk_aggregate_logits(
            logits * 2, dump="token", seqlens=seqlens, k=30, max_k=32, pool=(2, 0)
        )
        sums, _ = vegas_ops.aggregate_logits(logits, dump="token", seqlens=seqlens)
        return indices + 1, sums[0] + lengths[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(logits, seqlens)
    for got, want in zip(compiled, step(logits, seqlens), strict=True):
        assert_same_bits(got, want, "compiled")


def test_fake_tensors_on_cuda() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        logits = torch.empty((5, 2, 2, 4, 300), dtype=torch.bfloat16, device="cuda")
        seqlens = torch.empty(2, dtype=torch.int32, device="cuda")
        indices, lengths = vegas_ops.topk_aggregate_logits(
            logits, dump="kv_head", seqlens=seqlens, k=9, max_k=16, per_kv_head=True
        )
        assert indices.shape == (5, 2, 4, 16) and lengths.shape == (5, 2, 4)
        assert indices.dtype == lengths.dtype == torch.int32 and indices.device.type == "cuda"
        sums, heads = vegas_ops.aggregate_logits(logits, dump="kv_head", seqlens=seqlens)
        assert sums.shape == (5, 2, 300) and sums.dtype == torch.float32 and heads == 4


def test_weights_on_either_side_of_overflow(device: torch.device) -> None:
    """Sums as large as fp32 holds, give or take their rounding, pass for infinite ones and the reverse."""
    overflow = math.log(torch.finfo(torch.float32).max)
    logits = torch.zeros(1, 1, 2, 8, device=device)
    logits[..., 0] = 90
    for step in range(-8, 9):
        lse = torch.full((1, 2), 90 - overflow + step * 3e-6, device=device)
        check_aggregate(
            logits, 2.8e-5, dump="rows", mode="weight", seqlens=int32((8,), device), lse=lse,
            cu_seqlens_q=int32((0, 2), device), dump_rows=int32((1,), device),
        )  # fmt: skip
