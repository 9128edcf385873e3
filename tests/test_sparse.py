"""sparse_paged_decode against its oracle, on every device of this machine."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from op_cases import LAYOUTS, SparseCase, case_dtype, empty_on_cuda, int32
from op_checks import assert_same_bits, check_sparse
from op_draws import drawn, sparse_arguments
from torch import Tensor

import vegas_ops


@given(arguments=drawn(sparse_arguments))
def test_any_case(device: torch.device, arguments: dict[str, Any]) -> None:
    if device.type == "cuda" and arguments["dtype"] == torch.float32:
        arguments["dtype"] = torch.bfloat16
    check_sparse(SparseCase(device=device, **arguments))


@pytest.mark.parametrize("page_size", (1, 2, 7, 16, 53, 64, 256))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes_and_layouts(device: torch.device, layout: str, page_size: int) -> None:
    for logical in (False, True):
        check_sparse(
            SparseCase(
                seed=page_size, device=device, dtype=torch.bfloat16, layout=layout,
                page_size=page_size, lengths=(page_size + 5, 100), counts=(3, 40),
                tail_starts=(page_size + 1, 97), logical=logical,
            )
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", (64, 80, 96, 128, 192, 256))
@pytest.mark.parametrize("kind", ("fp32", "bf16", "fp16", "bf16+fp8", "fp16+fp8", "fp32+fp8"))
def test_head_dims_and_dtypes(device: torch.device, head_dim: int, kind: str) -> None:
    name, _, fp8 = kind.partition("+")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("fp32 is for the CPU")
    check_sparse(
        SparseCase(
            seed=head_dim, device=device, dtype=dtype, fp8=bool(fp8), head_dim=head_dim,
            descale="request" if fp8 else "none", lengths=(131, 5), counts=(70, 2),
            tail_starts=(120, 5),
        )
    )  # fmt: skip


@pytest.mark.parametrize("group", range(1, 17))
def test_group_sizes(device: torch.device, group: int) -> None:
    check_sparse(
        SparseCase(
            seed=group, device=device, dtype=torch.bfloat16, heads_q=2 * group, lengths=(77, 18),
            counts=(33, 4), tail_starts=(70, 10),
        )
    )  # fmt: skip


@pytest.mark.parametrize("tail", (None, 0, 1, 7, 64, 129))
@pytest.mark.parametrize("count", (0, 1, 64, 129))
def test_tail_lengths(device: torch.device, tail: int | None, count: int) -> None:
    lengths = (300, 200, 0)
    starts = None if tail is None else tuple(max(n - tail, 0) for n in lengths)
    for per_head in (False, True):
        check_sparse(
            SparseCase(
                seed=2, device=device, dtype=torch.bfloat16, lengths=lengths, per_head=per_head,
                counts=(count, max(count - 1, 0), 0), tail_starts=starts, with_sinks=True,
            )
        )  # fmt: skip


@pytest.mark.parametrize("num_splits", (0, 1, 2, 3, 5, 64))
@pytest.mark.parametrize("batch_invariant", (False, True))
def test_splits(device: torch.device, num_splits: int, batch_invariant: bool) -> None:
    check_sparse(
        SparseCase(
            seed=3, device=device, dtype=torch.bfloat16, lengths=(5000, 100, 1), page_size=64,
            counts=(1500, 1, 0), tail_starts=(4100, 99, 1), with_sinks=True,
            options={"num_splits": num_splits, "batch_invariant": batch_invariant},
        )
    )  # fmt: skip


@pytest.mark.parametrize(("group", "head_dim"), ((4, 128), (8, 64), (1, 256), (12, 128)))
@pytest.mark.parametrize("kind", ("bf16", "fp16", "bf16+fp8"))
def test_many_requests(device: torch.device, kind: str, group: int, head_dim: int) -> None:
    """Which then share multiprocessors otherwise; some without keys, some longer than a CTA's share."""
    generator = random.Random(group)
    lengths = [generator.choice((0, 3, 40, 300, 2500)) for _ in range(70)]
    tails = [generator.randint(0, length) for length in lengths]
    name, _, fp8 = kind.partition("+")
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    for options in ({}, {"batch_invariant": True}):
        check_sparse(
            SparseCase(
                seed=group, device=device, dtype=dtype, fp8=bool(fp8), heads_q=2 * group, head_dim=head_dim,
                lengths=lengths, tail_starts=tails,
                counts=[generator.randint(0, tail) for tail in tails], page_size=64, options=options,
            )
        )  # fmt: skip


@pytest.mark.parametrize(("group", "head_dim"), ((4, 128), (8, 64), (1, 256), (3, 80), (12, 128)))
@pytest.mark.parametrize(
    "counts", ((1500,), (900, 890, 905, 870), (1200, 3, 0, 40), (700, 0, 710), (0,), (20,) * 9)
)
@pytest.mark.parametrize("per_head", (False, True))
def test_few_requests(
    device: torch.device, per_head: bool, counts: tuple[int, ...], group: int, head_dim: int
) -> None:
    """Whose keys are spread over many multiprocessors: equally long lists, and lists that are not."""
    check_sparse(
        SparseCase(
            seed=group, device=device, dtype=torch.bfloat16, heads_q=2 * group, head_dim=head_dim,
            lengths=[count + 60 for count in counts], tail_starts=[count + 50 for count in counts],
            counts=counts, per_head=per_head, page_size=16, with_sinks=group == 8,
        )
    )  # fmt: skip


@pytest.mark.parametrize("batch", (16, 64, 150))
@pytest.mark.parametrize("heads_q", (8, 24))
@pytest.mark.parametrize("options", ({}, {"batch_invariant": True}, {"num_splits": 3}))
def test_padded_batches(device: torch.device, options: dict[str, Any], heads_q: int, batch: int) -> None:
    """Requests without keys: at the end, as engines pad, at the beginning, between others, everywhere."""
    for kept in (range(batch // 4), range(batch - 2, batch), (1, batch // 2, batch - 3), ()):
        lengths = [0] * batch
        for b in kept:
            lengths[b] = 900 + b
        check_sparse(
            SparseCase(
                seed=batch, device=device, dtype=case_dtype(device), heads_q=heads_q, head_dim=64,
                lengths=lengths, tail_starts=[max(n - 8, 0) for n in lengths],
                counts=[n // 2 for n in lengths], page_size=16, with_sinks=True, options=options,
            )
        )  # fmt: skip


@pytest.mark.parametrize("window", ((0, 0), (5, 0), (100, -1), (-1, 0)))
def test_window_layer_drafts_from_a_clipped_tail(device: torch.device, window: tuple[int, int]) -> None:
    lengths = (90, 3, 0)
    for starts in ((0, 0, 0), (80, 1, 0)):
        check_sparse(
            SparseCase(
                seed=4, device=device, dtype=case_dtype(device), lengths=lengths,
                counts=(0, 0, 0), spare_k=0, tail_starts=starts, with_sinks=True,
                options={"window_size": window},
            )
        )  # fmt: skip


def test_tail_meets_bad_pages(device: torch.device) -> None:
    case = SparseCase(
        seed=5, device=device, dtype=case_dtype(device), lengths=(70, 40, 30), counts=(10, 0, 0),
        tail_starts=(30, 0, 28),
    )  # fmt: skip
    case.block_table[0, 2] = -1
    case.block_table[1, :3] = 2**31 - 1
    case.block_table[2, 1] = case.k_cache.shape[0]
    got = check_sparse(case)
    assert bool((got["out"][1] == 0).all()) and bool(torch.isneginf(got["lse"][:, 1]).all())


def test_table_without_columns_on_a_gpu(cuda: torch.device) -> None:
    """Lengths are device data there: whatever they say, such a table holds no token."""
    case = SparseCase(
        device=cuda, dtype=torch.bfloat16, lengths=(20, 7), counts=(3, 1), tail_starts=(10, 2), logical=True
    )
    kwargs = {**case.kwargs, "block_table": case.block_table[:, :0]}
    out, lse = vegas_ops.sparse_paged_decode(*case.args, **kwargs)
    assert not out.any() and torch.isneginf(lse).all()


def test_empty_row_reads_no_index(device: torch.device) -> None:
    """A padded row of an engine: length 0, a stale count and stale indices."""
    case = SparseCase(
        seed=6, device=device, dtype=case_dtype(device), lengths=(40, 0), counts=(8, 0),
        tail_starts=(38, 17),
    )  # fmt: skip
    case.indices[1] = case.indices[0]
    case.topk_length[1] = 8
    got = check_sparse(case)
    assert bool((got["out"][1] == 0).all()) and bool(torch.isneginf(got["lse"][:, 1]).all())


@pytest.mark.parametrize("count", (-1, -(2**31)))
def test_negative_counts_are_empty(device: torch.device, count: int) -> None:
    case = SparseCase(
        device=device, dtype=case_dtype(device), lengths=(40, 40), counts=(8, 8), give_lengths=False
    )
    case.topk_length[1] = count
    got = check_sparse(case)
    assert bool((got["out"][1] == 0).all())


def test_count_is_clamped_to_the_list(device: torch.device) -> None:
    case = SparseCase(device=device, dtype=case_dtype(device), lengths=(40,), counts=(8,), spare_k=0)
    full = check_sparse(case)
    case.topk_length[0] = 2**31 - 1
    clamped = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    assert_same_bits(clamped[0], full["out"], "out")


def test_full_list_equals_verification(device: torch.device) -> None:
    """Listing every token and drafting gives what the verification of that row gives."""
    case = SparseCase(
        seed=7, device=device, dtype=case_dtype(device), lengths=(130,), counts=(0,),
        tail_starts=(0,),
    )  # fmt: skip
    out, lse = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    full = vegas_ops.flash_attn_with_logit_dump(
        case.q, case.k_cache, case.v_cache, case.block_table, case.seqused_k,
        cu_seqlens_q=int32((0, 1), device), max_seqlen_q=1, max_seqlen_k=130, dump="none",
    )  # fmt: skip
    # The two ops may round their weights relative to different references.
    torch.testing.assert_close(out, full.out, rtol=1.6e-2, atol=2e-3)
    torch.testing.assert_close(lse, full.lse)


def test_visible_nan_stays_in_its_request(device: torch.device) -> None:
    case = SparseCase(
        seed=8, device=device, dtype=case_dtype(device), lengths=(70, 90, 33), counts=(30, 40, 20)
    )
    clean = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    slot = int(case.indices[1, 3])
    case.v_cache[slot // 16, slot % 16, 0, 7] = math.nan
    got = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    assert bool(got[0][1, :2, 7].isnan().all())
    assert_same_bits(got[0][[0, 2]], clean[0][[0, 2]], "out of the other requests")


@pytest.mark.parametrize("logical", (False, True))
def test_batch_invariant(device: torch.device, logical: bool) -> None:
    lengths = (1500, 33, 1, 0, 3000)
    case = SparseCase(
        seed=9, device=device, dtype=torch.bfloat16, lengths=lengths, counts=(700, 5, 0, 0, 1200),
        tail_starts=(1490, 30, 0, 0, 2000), logical=logical, options={"batch_invariant": True},
    )  # fmt: skip
    out, lse = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    for b in range(len(lengths)):
        kwargs = case.kwargs
        for name in ("tail_start", "seqused_k", "block_table"):
            kwargs[name] = kwargs[name][b : b + 1]
        alone = vegas_ops.sparse_paged_decode(
            case.q[b : b + 1], case.k_cache, case.v_cache, case.indices[b : b + 1],
            case.topk_length[b : b + 1], **kwargs,
        )  # fmt: skip
        assert_same_bits(alone[0][0], out[b], f"out of request {b}")
        assert_same_bits(alone[1][:, 0], lse[:, b], f"lse of request {b}")


def test_page_stride_beyond_32_bits(device: torch.device) -> None:
    case = SparseCase(
        seed=10, device=device, dtype=torch.bfloat16, lengths=(60,), counts=(20,),
        tail_starts=(50,), logical=True,
    )  # fmt: skip
    expected = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    pages, page_shape = 40, case.k_cache.shape[1:]
    stride = 2**27 + 64
    size = (pages - 1) * stride + 2 * page_shape.numel()
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 2 * size + 2**30:
        pytest.skip("needs 11 GiB of free GPU memory")
    storage = torch.empty(size, dtype=torch.bfloat16, device=device)  # the CPU commits it lazily
    table = (15, 16, 39, 17)
    views = []
    for offset, cache in ((0, case.k_cache), (page_shape.numel(), case.v_cache)):
        strides = (stride, *cache.stride()[1:])
        view = storage.as_strided((pages, *page_shape), strides, offset)
        for column, page in enumerate(table):
            view[page] = cache[int(case.block_table[0, column])]
        views.append(view)
    case.k_cache, case.v_cache = views
    case.block_table = int32(table, device)[None]
    got = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    assert_same_bits(got[0], expected[0], "out")
    case.logical = False
    slots = case.block_table[0][(case.indices.clamp(0, 59) // 16).long()] * 16 + case.indices % 16
    case.indices = slots.to(torch.int32)
    got = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    assert_same_bits(got[0], expected[0], "out by slots")


def test_long_context(device: torch.device) -> None:
    length = 2**20 if device.type == "cuda" else 150_000
    check_sparse(
        SparseCase(
            seed=12, device=device, dtype=torch.bfloat16, heads_q=2, heads_kv=1, page_size=256,
            lengths=(length, 3), counts=(length // 15, 1), tail_starts=(length - 8, 2),
        )
    )  # fmt: skip


def test_workspace_given_is_left_reusable(device: torch.device) -> None:
    """One workspace for calls of all shapes within its bounds, each of which splits requests differently."""
    workspace = vegas_ops.make_workspace(
        "sparse_paged_decode", max_batch=40, max_q_len=1, max_seqlen_k=4000, max_k=3000, num_heads_q=24,
        num_heads_kv=4, head_dim=128, device=device,
    )  # fmt: skip
    shapes: list[dict[str, Any]] = [
        {"lengths": (4000,), "counts": (2900,)},
        {"lengths": (90,) * 40, "counts": (80,) * 40, "heads_q": 24, "heads_kv": 4},
        {"lengths": (3000, 0, 2000), "counts": (2000, 0, 50), "head_dim": 128, "heads_q": 24, "heads_kv": 4},
        {"lengths": (2500,) * 4, "counts": (700,) * 4, "options": {"batch_invariant": True}},
        {"lengths": (900,) * 9, "counts": (800,) * 9, "options": {"num_splits": 7}, "per_head": True},
    ]
    for turn in range(3):
        for seed, shape in enumerate(shapes):
            tails = tuple(max(n - 20 * turn, 0) for n in shape["lengths"])
            case = SparseCase(
                seed=seed, device=device, dtype=case_dtype(device), page_size=64, tail_starts=tails, **shape
            )
            check_sparse(case)
            fresh = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
            got = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs, workspace=workspace)
            for name, a, b in zip(("out", "lse"), fresh, got, strict=True):
                assert_same_bits(a, b, name)


# Integration with torch.


@pytest.mark.parametrize(("head_dim", "group"), ((64, 16), (128, 12), (128, 3), (256, 16)))
def test_workspace_serves_smaller_heads(device: torch.device, head_dim: int, group: int) -> None:
    workspace = vegas_ops.make_workspace(
        "sparse_paged_decode", max_batch=2, max_q_len=1, max_seqlen_k=300, max_k=40, num_heads_q=32,
        num_heads_kv=2, head_dim=256, device=device,
    )  # fmt: skip
    case = SparseCase(
        seed=5, device=device, dtype=torch.bfloat16, heads_q=2 * group, head_dim=head_dim, lengths=(300, 18),
        counts=(37, 4), tail_starts=(200, 10), page_size=16,
    )  # fmt: skip
    expected = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs)
    got = vegas_ops.sparse_paged_decode(*case.args, **case.kwargs, workspace=workspace)
    for before, after in zip(expected, got, strict=True):
        assert_same_bits(after, before, "out or lse")


@pytest.mark.parametrize("tail", (False, True))
def test_opcheck(device: torch.device, tail: bool) -> None:
    case = SparseCase(
        device=device, dtype=case_dtype(device), lengths=(20, 7), counts=(3, 1),
        tail_starts=(18, 5) if tail else None, with_sinks=True,
    )  # fmt: skip
    outputs, kwargs = case.outputs(0.0), case.kwargs
    workspace = None
    if device.type == "cuda":
        workspace = vegas_ops.make_workspace(
            "sparse_paged_decode", max_batch=2, max_q_len=1, max_seqlen_k=64, max_k=8,
            num_heads_q=4, num_heads_kv=2, head_dim=64, device=device,
        )  # fmt: skip
    torch.library.opcheck(
        torch.ops.vegas_ops.sparse_paged_decode.default,
        (
            *case.args, kwargs["tail_start"], kwargs["seqused_k"], kwargs["block_table"], True,
            0.125, 0.0, case.sinks, -1, -1, None, None, False, 0, outputs["out"], outputs["lse"],
            workspace,
        ),
    )  # fmt: skip


def test_compile_fullgraph(device: torch.device) -> None:
    case = SparseCase(
        device=device, dtype=case_dtype(device), lengths=(20, 7), counts=(3, 1), tail_starts=(18, 5)
    )

    def step(q: Tensor, kwargs: dict[str, Any]) -> Tensor:
        out, _ = vegas_ops.sparse_paged_decode(q * 2, *case.args[1:], **kwargs)
        return out + 1

    out = torch.compile(step, fullgraph=True, backend="aot_eager")(case.q, case.kwargs)
    assert_same_bits(out, step(case.q, case.kwargs), "out")


def test_fake_tensors_on_cuda() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = SparseCase(dtype=torch.bfloat16, lengths=(20, 7), counts=(3, 1), tail_starts=(18, 5))
    with FakeTensorMode():
        out, lse = vegas_ops.sparse_paged_decode(
            *map(empty_on_cuda, case.args), **{name: empty_on_cuda(v) for name, v in case.kwargs.items()}
        )
        assert out.device.type == lse.device.type == "cuda"
        assert out.shape == case.q.shape and lse.shape == (4, 2) and lse.dtype == torch.float32
