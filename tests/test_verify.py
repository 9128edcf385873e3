"""flash_attn_with_logit_dump against its oracle, on every device of this machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from op_cases import LAYOUTS, SENTINEL, VerifyCase, case_dtype, empty_on_cuda, int32
from op_checks import assert_same_bits, check_verify
from op_draws import DUMPS, drawn, verify_arguments
from torch import Tensor

import vegas_ops
from vegas_ops import _C


def run(case: VerifyCase, **outputs: Tensor) -> vegas_ops.AttentionWithDump:
    return vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs, **outputs)


@given(arguments=drawn(verify_arguments))
def test_any_case(device: torch.device, arguments: dict[str, Any]) -> None:
    if device.type == "cuda" and arguments["dtype"] == torch.float32:
        arguments["dtype"] = torch.bfloat16
    check_verify(VerifyCase(device=device, **arguments))


@pytest.mark.parametrize("page_size", (1, 2, 7, 16, 53, 64, 256))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes_and_layouts(device: torch.device, layout: str, page_size: int) -> None:
    lengths = (page_size, page_size + 1, max(page_size - 1, 1), 2 * page_size + 3)
    check_verify(
        VerifyCase(
            seed=page_size, device=device, dtype=torch.bfloat16, layout=layout,
            page_size=page_size, lengths=lengths, q_lens=(1, 4, 1, 2), dump="kv_head",
        )
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", (64, 80, 96, 128, 192, 256))
@pytest.mark.parametrize("kind", ("fp32", "bf16", "fp16", "bf16+fp8", "fp16+fp8", "fp32+fp8"))
def test_head_dims_and_dtypes(device: torch.device, head_dim: int, kind: str) -> None:
    name, _, fp8 = kind.partition("+")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("fp32 is for the CPU")
    check_verify(
        VerifyCase(
            seed=head_dim, device=device, dtype=dtype, fp8=bool(fp8), head_dim=head_dim,
            descale="request" if fp8 else "none", lengths=(131, 5), q_lens=(7, 1),
            dump="kv_head", logits_dtype=torch.float32,
        )
    )  # fmt: skip


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("dump", ("token", "kv_head"))
def test_group_sizes(device: torch.device, group: int, dump: str) -> None:
    check_verify(
        VerifyCase(
            seed=group, device=device, dtype=torch.bfloat16, heads_q=2 * group, lengths=(77, 18),
            q_lens=(5, 1), dump=dump,
        )
    )  # fmt: skip


@pytest.mark.parametrize("rows", range(1, 34))
def test_row_counts(device: torch.device, rows: int) -> None:
    check_verify(
        VerifyCase(
            seed=rows, device=device, dtype=case_dtype(device), heads_q=8, lengths=(100, rows, 40),
            q_lens=(rows, rows, 3), dump="token_weight",
        )
    )  # fmt: skip


@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("dump_rows", (None, 0, 1, 2, 3))
@pytest.mark.parametrize("dump_len", (None, 0, 1, 41, 1000, -1))
def test_dumps(device: torch.device, dump: str, dump_rows: int | None, dump_len: int | None) -> None:
    check_verify(
        VerifyCase(
            seed=1, device=device, dtype=case_dtype(device), lengths=(50, 44, 0, 9),
            q_lens=(4, 1, 2, 0), extra_rows=1, dump=dump, wider=3,
            dump_rows=None if dump_rows is None else (dump_rows,) * 4,
            dump_len=None if dump_len is None else (dump_len,) * 4,
        )
    )  # fmt: skip


@pytest.mark.parametrize("group", (1, 3, 4, 5, 8, 12))
@pytest.mark.parametrize("head_dim", (64, 80, 128, 256))
@pytest.mark.parametrize(("rows", "page_size"), ((7, 16), (1, 1), (13, 64)))
def test_dumped_rows(device: torch.device, group: int, head_dim: int, rows: int, page_size: int) -> None:
    """Logits may be written several at a time, or not where `max_seqlen_k` leaves them no alignment."""
    for i, options in enumerate(({}, {"window_size": (100, 0)}, {"batch_invariant": True})):
        check_verify(
            VerifyCase(
                seed=group, device=device, dtype=case_dtype(device), heads_q=2 * group, head_dim=head_dim,
                page_size=page_size, lengths=(340, rows, 70, 0), q_lens=(rows, rows, 1, 1), dump="rows",
                wider=(0, 4, 3)[i], dump_len=(340, 2, 69, 5) if i == 1 else None,
                dump_rows=(3, 2, 3, 3) if i == 2 else None, options=options,
            )
        )  # fmt: skip


@pytest.mark.parametrize("dump", ("token_weight", "kv_head"))
@pytest.mark.parametrize("rows", (1, 6, 7, 12, 14, 15, 22, 23))
@pytest.mark.parametrize("head_dim", (64, 96, 128))
def test_guide_rows_beside_any_number_of_rows(
    device: torch.device, head_dim: int, rows: int, dump: str
) -> None:
    for group in (4, 8):
        check_verify(
            VerifyCase(
                seed=rows, device=device, dtype=case_dtype(device), heads_q=2 * group, head_dim=head_dim,
                lengths=(1500, 0, rows, 70, 333), q_lens=(rows, 1, rows, 1, 0), dump=dump, with_sinks=True,
                dump_rows=(3, 3, 2, 3, 1), options={"window_size": (900, -1), "softcap": 5.0},
            )
        )  # fmt: skip


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("window", ((-1, -1), (0, 0), (0, -1), (16, 0), (33, 2), (-1, 3), (500, 500)))
@pytest.mark.parametrize("with_sinks", (False, True))
def test_masks(device: torch.device, causal: bool, window: tuple[int, int], with_sinks: bool) -> None:
    for dump in ("token", "kv_head"):
        check_verify(
            VerifyCase(
                seed=3, device=device, dtype=torch.bfloat16, lengths=(90, 3, 1, 150),
                q_lens=(6, 5, 1, 1), dump=dump, with_sinks=with_sinks,
                options={"causal": causal, "window_size": window, "softcap": 2.0},
            )
        )  # fmt: skip


@pytest.mark.parametrize("num_splits", (0, 1, 2, 3, 5, 64))
@pytest.mark.parametrize("batch_invariant", (False, True))
def test_splits(device: torch.device, num_splits: int, batch_invariant: bool) -> None:
    for dump in ("token", "kv_head"):
        check_verify(
            VerifyCase(
                seed=4, device=device, dtype=torch.bfloat16, lengths=(3001, 100, 1), page_size=64,
                q_lens=(7, 1, 1), dump=dump, with_sinks=True,
                options={"num_splits": num_splits, "batch_invariant": batch_invariant},
            )
        )  # fmt: skip


def test_no_requests_and_no_rows(device: torch.device) -> None:
    dtype = case_dtype(device)
    check_verify(VerifyCase(device=device, dtype=dtype, lengths=(), q_lens=()))
    for dump in DUMPS:
        check_verify(VerifyCase(device=device, dtype=dtype, lengths=(5, 0), q_lens=(0, 0), dump=dump))
        check_verify(
            VerifyCase(
                device=device, dtype=dtype, lengths=(0, 0), q_lens=(1, 3), dump=dump,
                with_sinks=True,
            )
        )  # fmt: skip


@pytest.mark.parametrize("bad_page", (-1, -7, 2**31 - 1, "first beyond"))
@pytest.mark.parametrize("dump", ("token", "token_weight", "kv_head", "rows", "all"))
def test_bad_pages_are_masked(device: torch.device, bad_page: int | str, dump: str) -> None:
    case = VerifyCase(
        seed=5, device=device, dtype=case_dtype(device), lengths=(70, 40), q_lens=(3, 1),
        dump=dump,
    )  # fmt: skip
    page = case.k_cache.shape[0] if bad_page == "first beyond" else bad_page
    case.block_table[0, 1] = page
    case.block_table[1, 2] = page  # the page of this request's only query row
    check_verify(case)


def test_request_whose_pages_are_all_bad(device: torch.device) -> None:
    case = VerifyCase(device=device, dtype=case_dtype(device), lengths=(40, 40), q_lens=(2, 2))
    case.block_table[0] = -1
    got = check_verify(case)
    assert bool((got["out"][:2] == 0).all()) and bool(torch.isneginf(got["lse"][:, :2]).all())


@pytest.mark.parametrize("where", ("k", "v", "q"))
@pytest.mark.parametrize("fp8", (False, True))
def test_visible_nan_stays_in_its_request(device: torch.device, fp8: bool, where: str) -> None:
    case = VerifyCase(
        seed=6, device=device, dtype=case_dtype(device), fp8=fp8, lengths=(70, 90, 33), q_lens=(3, 4, 1),
        dump="token",
    )  # fmt: skip
    clean = run(case)
    if where == "q":
        case.q[case.cu[1] + 3, 0, 5] = math.nan
    else:
        cache = case.k_cache if where == "k" else case.v_cache
        cache[int(case.block_table[1, 0]), 3, 0, 7] = math.nan
    got = run(case)
    last = got.out[case.cu[2] - 1, : 1 if where == "q" else 2]
    assert bool(last.isnan().any(-1).all()), "NaN was swallowed"
    others = [0, 1, 2, case.cu[2]]
    assert_same_bits(got.out[others], clean.out[others], "out of the other requests")
    assert_same_bits(got.lse[:, others], clean.lse[:, others], "lse of the other requests")
    assert clean.logits is not None and got.logits is not None
    for b, n in ((0, 68), (2, 33)):
        assert_same_bits(got.logits[b, :n], clean.logits[b, :n], "logits of the other requests")


@pytest.mark.parametrize("fp8", (False, True))
def test_nan_outside_every_window_is_not_seen(device: torch.device, fp8: bool) -> None:
    case = VerifyCase(
        seed=7, device=device, dtype=case_dtype(device), fp8=fp8, lengths=(200,), q_lens=(3,), dump="kv_head",
        options={"window_size": (40, 0)},
    )  # fmt: skip
    clean = run(case, **case.outputs(SENTINEL))
    for cache in (case.k_cache, case.v_cache):
        for position in range(157):
            cache[int(case.block_table[0, position // 16]), position % 16] = math.nan
    got = run(case, **case.outputs(SENTINEL))
    for name in ("out", "lse", "logits", "guide_lse"):
        assert_same_bits(getattr(got, name), getattr(clean, name), name)


@pytest.mark.parametrize("fp8", (False, True))
def test_unused_slots_do_not_matter_bitwise(device: torch.device, fp8: bool) -> None:
    case = VerifyCase(
        seed=8, device=device, dtype=torch.bfloat16, fp8=fp8, lengths=(3, 70), q_lens=(1, 3), dump="token"
    )
    poisoned = run(case, **case.outputs(SENTINEL))
    for cache in (case.k_cache, case.v_cache):
        cache.copy_(cache.float().nan_to_num(0.0).to(cache.dtype))
    zeroed = run(case, **case.outputs(SENTINEL))
    assert_same_bits(poisoned.out, zeroed.out, "out")
    assert poisoned.logits is not None and zeroed.logits is not None
    assert_same_bits(poisoned.logits, zeroed.logits, "logits")


@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("fp8", (False, True))
def test_batch_invariant(device: torch.device, fp8: bool, dump: str) -> None:
    lengths, q_lens = (1500, 33, 1, 700, 2049, 90), (7, 1, 1, 3, 5, 17)
    case = VerifyCase(
        seed=9, device=device, dtype=torch.bfloat16, fp8=fp8, lengths=lengths, q_lens=q_lens, dump=dump,
        options={"batch_invariant": True},
    )  # fmt: skip
    together = run(case, **case.outputs(SENTINEL))
    for b in range(len(lengths)):
        kwargs = case.kwargs
        kwargs["cu_seqlens_q"] = int32((0, q_lens[b]), device)
        if kwargs["guide_lse_hint"] is not None:
            kwargs["guide_lse_hint"] = kwargs["guide_lse_hint"][b : b + 1].contiguous()
        rows = slice(case.cu[b], case.cu[b + 1])
        alone = vegas_ops.flash_attn_with_logit_dump(
            case.q[rows], case.k_cache, case.v_cache, case.block_table[b : b + 1],
            case.seqused_k[b : b + 1], **kwargs,
        )  # fmt: skip
        assert_same_bits(alone.out, together.out[rows], f"out of request {b}")
        assert_same_bits(alone.lse, together.lse[:, rows], f"lse of request {b}")
        if together.guide_lse is not None and alone.guide_lse is not None:
            assert_same_bits(alone.guide_lse[0], together.guide_lse[b], f"guide_lse of {b}")
        if together.logits is not None and alone.logits is not None:
            n = lengths[b] - q_lens[b] + 1
            got, want = alone.logits[..., :n], together.logits[..., :n]
            want = want[rows] if dump == "all" else want[b : b + 1]
            assert_same_bits(got, want, f"logits of request {b}")


def test_hint_of_an_empty_guide_stays_finite(device: torch.device) -> None:
    case = VerifyCase(
        device=device, dtype=case_dtype(device), lengths=(20,), q_lens=(2,), dump="token_weight"
    )
    case.hint = torch.full_like(case.hint, -math.inf)
    logits = run(case).logits
    assert logits is not None
    assert bool((logits[0, :19] > 3.4e38).all()) and bool(logits[0, :19].isfinite().all())


def test_two_rounds_use_the_guide_lse_as_hint(device: torch.device) -> None:
    """With this round's own normaliser every plane's weights sum to one over what its row sees."""
    case = VerifyCase(
        device=device, dtype=case_dtype(device), lengths=(64, 30), q_lens=(1, 1), dump="kv_head"
    )
    guide_lse = run(case).guide_lse
    assert guide_lse is not None
    case.dump, case.hint = "token_weight", guide_lse
    logits = run(case).logits
    assert logits is not None
    for b, n in enumerate(case.lengths):
        assert float(logits[b, :n].sum()) == pytest.approx(case.heads_kv, rel=1e-5)


def test_page_stride_beyond_32_bits(device: torch.device) -> None:
    """Page id times page stride passes 2^31 elements: the pages between are never touched."""
    case = VerifyCase(
        seed=10, device=device, dtype=torch.bfloat16, lengths=(60,), q_lens=(3,), dump="kv_head"
    )
    expected = run(case, **case.outputs(SENTINEL))
    pages, page_shape = 40, case.k_cache.shape[1:]
    stride = 2**27 + 64  # the last page starts beyond 5e9 elements
    size = (pages - 1) * stride + 2 * page_shape.numel()
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 2 * size + 2**30:
        pytest.skip("needs 11 GiB of free GPU memory")
    storage = torch.empty(size, dtype=torch.bfloat16, device=device)  # the CPU commits it lazily
    table = (15, 16, 39, 17)
    strides = (stride, *case.k_cache.stride()[1:])
    views = []
    for offset, cache in ((0, case.k_cache), (page_shape.numel(), case.v_cache)):
        view = storage.as_strided((pages, *page_shape), strides, offset)
        for column, page in enumerate(table):
            view[page] = cache[int(case.block_table[0, column])]
        views.append(view)
    case.k_cache, case.v_cache = views
    case.block_table = int32(table, device)[None]
    got = run(case, **case.outputs(SENTINEL))
    for field in ("out", "lse", "logits", "guide_lse"):
        assert_same_bits(getattr(got, field), getattr(expected, field), field)


def test_long_context(device: torch.device) -> None:
    length = 2**20 if device.type == "cuda" else 150_000
    check_verify(
        VerifyCase(
            seed=12, device=device, dtype=torch.bfloat16, heads_q=2, heads_kv=1, page_size=256,
            lengths=(length, 3), q_lens=(2, 1), dump="token",
        )
    )  # fmt: skip


@pytest.mark.parametrize("dump", ("token", "token_weight"))
@pytest.mark.parametrize("heads_kv", (1, 2, 3, 8, 16, 20))
def test_sums_over_heads_within_wide_bounds(device: torch.device, heads_kv: int, dump: str) -> None:
    """Where a dump may be large, CTAs exchange their heads' parts while they attend: in many turns here."""
    long, window = (70_000, 3000) if device.type == "cuda" else (1400, 600)
    bound = 2**21 // heads_kv
    for fp8, head_dim, rows, options in (
        (False, 64, 3, {}), (False, 128, 5, {"batch_invariant": True}), (True, 128, 2, {"num_splits": 7}),
        (False, 128, 4, {"window_size": (window, 0), "softcap": 0.0}),
    ):  # fmt: skip
        check_verify(
            VerifyCase(
                seed=heads_kv, device=device, dtype=case_dtype(device), fp8=fp8, heads_q=heads_kv,
                heads_kv=heads_kv, head_dim=head_dim, page_size=64, lengths=(long, 0, 900, 65),
                q_lens=(rows, 0, 1, rows), dump=dump, wider=bound - long,
                options={"max_seqlen_k": bound, **options},
            )
        )  # fmt: skip


def test_dumped_rows_beyond_32_bits(device: torch.device) -> None:
    """The logits of the last request start beyond 2^31 elements."""
    lengths, q_lens = (20, 20, 20), (2, 2, 2)
    case = VerifyCase(
        seed=11, device=device, dtype=torch.bfloat16, lengths=lengths, q_lens=q_lens, dump="token"
    )
    stride = 2**30 + 8
    size = 2 * stride + 64
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 4 * size + 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    logits = torch.empty(size, device=device).as_strided((3, 64), (stride, 1))
    logits.fill_(SENTINEL)
    expected = run(case, **case.outputs(SENTINEL))
    assert expected.logits is not None
    vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs, logits=logits)
    assert_same_bits(logits[:, :20].contiguous(), expected.logits, "logits")
    assert bool((logits[:, 20:] == SENTINEL).all())


@pytest.mark.parametrize("batch", [1, 5, 40])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("rows", "dump"), [(3, "token"), (20, "token"), (20, "token_weight")])
def test_the_launch_before_writes_lengths_and_pages(
    device: torch.device, batch: int, head_dim: int, rows: int, dump: Literal["token", "token_weight"]
) -> None:
    """A kernel may look at them while that launch still runs. Here they are lists of selected tokens: pages
    of one token each."""
    tokens, max_k, heads, heads_kv = 3000, 2000, 8, 2
    generator = torch.Generator().manual_seed(batch)
    dtype = case_dtype(device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = normal(batch * rows, heads, head_dim)
    caches = [normal(batch * tokens, 1, heads_kv, head_dim) for _ in range(2)]
    cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
    table = torch.arange(batch * tokens, dtype=torch.int32, device=device).view(batch, tokens)
    seqlens = int32([tokens] * batch, device)
    scores = torch.randn(6, batch, tokens, generator=generator).to(device)
    counts = torch.randint(rows, max_k + 1, (6, batch), generator=generator, dtype=torch.int32)
    counts[2, 0], counts[4, batch // 2] = 0, max_k
    counts = counts.to(device)
    indices = torch.zeros(batch, max_k, dtype=torch.int32, device=device)
    length = torch.zeros(batch, dtype=torch.int32, device=device)
    hint = torch.zeros(batch, 2, heads_kv, device=device) if dump == "token_weight" else None
    bounds = {"num_heads_q": heads, "num_heads_kv": heads_kv, "head_dim": head_dim, "device": device}
    workspaces = [
        vegas_ops.make_workspace(
            op, max_batch=batch, max_q_len=rows, max_seqlen_k=tokens, max_k=max_k, **bounds
        )
        for op in ("topk_aggregate_logits", "flash_attn_with_logit_dump")
    ]
    outputs = [
        (
            torch.zeros_like(q),
            torch.zeros(heads, batch * rows, device=device),
            torch.zeros(batch, max_k, device=device),
        )
        for _ in scores
    ]

    def select(i: int) -> None:
        vegas_ops.topk_aggregate_logits(
            scores[i], dump="token", seqlens=seqlens, k=counts[i], max_k=max_k, block_table=table,
            page_size=1, indices=indices, topk_length=length, workspace=workspaces[0],
        )  # fmt: skip

    def verify(out: Tensor, lse: Tensor, logits: Tensor) -> None:
        vegas_ops.flash_attn_with_logit_dump(
            q, *caches, indices, length, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=rows, max_seqlen_k=max_k,
            dump=dump, guide_lse_hint=hint, out=out, lse=lse, logits=logits, workspace=workspaces[1],
        )  # fmt: skip

    def rounds() -> None:
        for i, tensors in enumerate(outputs):
            select(i)
            verify(*tensors)

    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rounds()
        graph.replay()
        torch.cuda.synchronize()
    else:
        rounds()
    for i, tensors in enumerate(outputs):
        select(i)
        if device.type == "cuda":
            torch.cuda.synchronize()
        expected = [torch.zeros_like(x) for x in tensors]
        verify(*expected)
        for name, got, wanted in zip(("out", "lse", "logits"), tensors, expected, strict=True):
            assert_same_bits(got, wanted, f"{name} of round {i}")


@pytest.mark.parametrize("dump", ["token", "token_weight"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rows"), [(32, 128, 7), (16, 64, 8), (9, 64, 3), (32, 128, 17), (64, 64, 12)]
)
def test_bound_far_beyond_the_lengths(
    device: torch.device, heads: int, head_dim: int, rows: int, dump: str
) -> None:
    """Large dumps are added up otherwise than small ones, whatever the lengths turn out to be."""
    bound = 100_000
    check_verify(
        VerifyCase(
            seed=3, device=device, dtype=case_dtype(device), heads_q=heads, head_dim=head_dim,
            heads_kv=8 if heads != 9 else 9, lengths=(2500, 0, 63, 190), q_lens=(rows, 1, rows, 0), dump=dump,
            options={"max_seqlen_k": bound, "window_size": (700, -1)}, wider=bound - 2500,
        )
    )  # fmt: skip


def call_of_two_kernels(device: torch.device) -> VerifyCase:
    return VerifyCase(
        seed=9, device=device, dtype=torch.bfloat16, heads_q=8, head_dim=128, lengths=(700, 130, 3),
        q_lens=(8, 5, 1), dump="kv_head", logits_dtype=torch.float32, with_sinks=True,
    )  # fmt: skip


def test_portable_kernels_on_request_agree_on_cuda(cuda: torch.device, tmp_path: Path) -> None:
    if _C.kernel_name(0, True) == "portable":
        pytest.skip("the portable kernels are what this GPU or environment chooses anyway")
    # VEGAS_OPS_KERNELS is read once, so the portable kernels run in a process of their own.
    saved = tmp_path / "portable.pt"
    code = (
        "import sys, torch, test_verify\n"
        "from vegas_ops import _C\n"
        "assert _C.kernel_name(0, True) == 'portable'\n"
        "got = test_verify.check_verify(test_verify.call_of_two_kernels(torch.device(sys.argv[2])))\n"
        "torch.save({name: tensor.cpu() for name, tensor in got.items()}, sys.argv[1])\n"
    )
    paths = [str(Path(__file__).parent), str(Path(vegas_ops.__file__).parents[1])]
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "VEGAS_OPS_KERNELS": "portable"}
    command = [sys.executable, "-c", code, str(saved), str(cuda)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    # Both were within the oracle's bounds; the outputs are bf16.
    own = {name: tensor.cpu() for name, tensor in check_verify(call_of_two_kernels(cuda)).items()}
    torch.testing.assert_close(own, torch.load(saved, weights_only=True), atol=2**-8, rtol=2**-7)


# Integration with torch.


def raw_arguments(case: VerifyCase) -> tuple[Any, ...]:
    """Arguments of the registered op, outputs included."""
    outputs = case.outputs(0.0)
    kwargs = case.kwargs
    dump = DUMPS.index(case.dump)
    left, right = case.options.get("window_size", (-1, -1))
    return (
        *case.args, kwargs["cu_seqlens_q"], kwargs["max_seqlen_q"], kwargs["max_seqlen_k"],
        case.scale, True, left, right, case.softcap, case.sinks, case.k_descale, case.v_descale,
        dump, kwargs["guide_lse_hint"], kwargs["dump_rows"], kwargs["dump_len"], False, 0,
        outputs["out"], outputs["lse"], outputs.get("logits"), outputs.get("guide_lse"), None,
    )  # fmt: skip


@pytest.mark.parametrize("dump", DUMPS)
def test_opcheck(device: torch.device, dump: str) -> None:
    case = VerifyCase(
        device=device, dtype=case_dtype(device), lengths=(20, 7), q_lens=(3, 1), dump=dump,
        with_sinks=True, dump_rows=(3, 1), dump_len=(5, 4),
    )  # fmt: skip
    op = torch.ops.vegas_ops.flash_attn_with_logit_dump.default
    arguments = raw_arguments(case)
    if device.type == "cuda":
        workspace = vegas_ops.make_workspace(
            "flash_attn_with_logit_dump", max_batch=2, max_q_len=3, max_seqlen_k=20, num_heads_q=4,
            num_heads_kv=2, head_dim=64, device=device,
        )  # fmt: skip
        arguments = (*arguments[:-1], workspace)
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_compile_fullgraph(device: torch.device, backend: str) -> None:
    case = VerifyCase(device=device, dtype=case_dtype(device), lengths=(20, 7), q_lens=(3, 1), dump="token")

    def step(q: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        result = vegas_ops.flash_attn_with_logit_dump(q * 2, *case.args[1:], **kwargs)
        return result.out + 1, result.logits

    out, logits = torch.compile(step, fullgraph=True, backend=backend)(case.q, case.kwargs)
    want_out, want_logits = step(case.q, case.kwargs)
    assert_same_bits(out, want_out, "out")
    assert logits is not None and want_logits is not None
    for b, n in ((0, 18), (1, 7)):
        assert_same_bits(logits[b, :n], want_logits[b, :n], "logits")


def test_workspace_in_a_compiled_graph(device: torch.device) -> None:
    """Its size is known to the library alone, and follows the batch."""

    def step(x: Tensor) -> Tensor:
        bounds = (x.shape[0], 4, 128, 4, 1, 4, 2, 64)
        return torch.ops.vegas_ops.new_workspace(x, 0, *bounds).sum() + x

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 5):
        x = torch.randn(batch, device=device)
        assert_same_bits(compiled(x), x, "sum with a zeroed workspace")


def test_fake_tensors_on_cuda() -> None:
    """Shapes are inferred for a GPU that need not exist."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = VerifyCase(dtype=torch.bfloat16, lengths=(20, 7), q_lens=(3, 1), dump="kv_head")
    with FakeTensorMode():
        result = vegas_ops.flash_attn_with_logit_dump(
            *map(empty_on_cuda, case.args), **{name: empty_on_cuda(v) for name, v in case.kwargs.items()}
        )
        assert result.logits is not None and result.guide_lse is not None
        assert all(t.device.type == "cuda" for t in result if t is not None)
        assert result.out.shape == case.q.shape and result.out.dtype == torch.bfloat16
        assert result.lse.shape == (4, 4) and result.lse.dtype == torch.float32
        assert result.logits.shape == (2, 2, 2, 20) and result.logits.dtype == torch.bfloat16
        assert result.guide_lse.shape == (2, 2, 2)
