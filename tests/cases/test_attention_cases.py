"""Reported faults of paged attention and its dump, named by their number in the collection of reports.

Every case compares with an fp64 oracle over poisoned outputs, runs twice and on a side stream, and
stands under a watchdog.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from case_rules import check_case, everywhere, verify
from op_cases import SENTINEL, SparseCase, VerifyCase, int32
from op_checks import assert_same_bits

import vegas_ops

pytestmark = pytest.mark.timeout(300)

BF16 = torch.bfloat16
DUMPS = ("none", "token", "token_weight", "kv_head", "rows", "all")


def one_hot_values(case: VerifyCase) -> None:
    """Token t's value is the unit vector t, so that weights can be read off the output."""
    for b, length in enumerate(case.lengths):
        for t in range(length):
            slot = case.v_cache[int(case.block_table[b, t // case.page_size]), t % case.page_size]
            slot.zero_()
            slot[:, t] = 1.0


@pytest.mark.parametrize("poison", (math.nan, math.inf))
@pytest.mark.parametrize("where", ("v", "k", "both"))
def test_case_001_nan_in_unused_slots(device: torch.device, poison: float, where: str) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, heads_q=1, heads_kv=1, page_size=3, lengths=(1, 3),
        q_lens=(1, 1), dump="kv_head",
    )  # fmt: skip
    draft = SparseCase(
        device=device, dtype=BF16, heads_q=1, heads_kv=1, page_size=3, lengths=(1, 3),
        counts=(0, 1), tail_starts=(0, 1),
    )  # fmt: skip
    used = [one.k_cache.isfinite() for one in (case, draft)]
    for one in (case, draft):
        one.k_cache.nan_to_num_(0.0)
        one.v_cache.nan_to_num_(0.0)
    clean_case = verify(case)
    clean_draft = vegas_ops.sparse_paged_decode(*draft.args, **draft.kwargs)
    for one, mask in zip((case, draft), used, strict=True):
        if where != "k":
            one.v_cache.masked_fill_(~mask, poison)
        if where != "v":
            one.k_cache.masked_fill_(~mask, poison)
    clean_out, clean_lse = clean_draft

    def check() -> None:
        got = verify(case)
        for name, tensor in got.items():
            assert_same_bits(tensor, clean_case[name], name)
        out, lse = vegas_ops.sparse_paged_decode(*draft.args, **draft.kwargs)
        assert_same_bits(out, clean_out, "out of the draft")
        assert_same_bits(lse, clean_lse, "lse of the draft")

    everywhere(device, check)
    check_case(case)
    check_case(draft)


def test_case_003_padded_rows_share_a_slot(device: torch.device) -> None:
    """Padded rows write NaN where they all point; neither they nor the real row read it."""
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(20, 0, 0, 0), q_lens=(1, 1, 1, 1), dump="token",
        spare_pages=14,
    )  # fmt: skip
    assert case.k_cache.shape[0] == 16
    used = set(case.block_table[0, :2].tolist())
    shared = next(page for page in range(16) if page not in used)
    case.block_table[1:] = shared
    case.q[1:] = math.nan
    got = check_case(case)
    assert bool((got["out"][1:] == 0).all()) and bool(torch.isneginf(got["lse"][:, 1:]).all())
    alone = VerifyCase(device=device, dtype=BF16, lengths=(20,), q_lens=(1,), dump="token", spare_pages=14)
    alone.q, alone.k_cache, alone.v_cache = case.q[:1], case.k_cache, case.v_cache
    alone.block_table = case.block_table[:1]
    assert_same_bits(verify(alone)["out"], got["out"][:1], "out of the real row")


def test_case_013_scalar_length_is_refused(device: torch.device) -> None:
    case = VerifyCase(device=device, dtype=BF16, lengths=(5, 5), q_lens=(1, 1), spare_pages=6)
    with pytest.raises(TypeError, match="`seqused_k`"):
        vegas_ops.flash_attn_with_logit_dump(*case.args[:4], 5, **case.kwargs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`seqused_k`"):
        length = torch.tensor(5, dtype=torch.int32, device=device)
        vegas_ops.flash_attn_with_logit_dump(*case.args[:4], length, **case.kwargs)


def test_case_016_pages_of_k_and_v_in_turn(device: torch.device) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, layout="interleaved_page", lengths=(33, 16), q_lens=(2, 1),
        dump="kv_head", spare_pages=0,
    )  # fmt: skip
    assert case.k_cache.shape[0] == 4 and case.k_cache.stride(0) == 2 * 16 * 2 * 64
    got = check_case(case)
    case.k_cache, case.v_cache = case.k_cache.contiguous(), case.v_cache.contiguous()
    for name, tensor in verify(case).items():
        assert_same_bits(tensor, got[name], name)


def test_case_017_transposed_inputs_in_every_call(device: torch.device) -> None:
    for seed in range(3):
        case = VerifyCase(
            seed=seed, device=device, dtype=BF16, layout="hnd", lengths=(50, 7), q_lens=(3, 1),
            dump="token",
        )  # fmt: skip
        q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
        assert not q.is_contiguous()
        case.q = q
        check_case(case)


@pytest.mark.parametrize("heads", ((28, 4), (24, 4), (40, 8), (15, 3), (12, 4)))
def test_case_019_odd_head_ratios(device: torch.device, heads: tuple[int, int]) -> None:
    for dump in DUMPS:
        check_case(
            VerifyCase(
                device=device, dtype=BF16, heads_q=heads[0], heads_kv=heads[1], lengths=(33,),
                q_lens=(2,), dump=dump,
            )
        )  # fmt: skip


@pytest.mark.parametrize("heads", ((64, 4), (64, 2), (64, 1), (8, 8)))
@pytest.mark.parametrize("length", (1, 257))
def test_case_020_large_and_unit_head_ratios(
    device: torch.device, heads: tuple[int, int], length: int
) -> None:
    shape: dict[str, Any] = {"heads_q": heads[0], "heads_kv": heads[1], "lengths": (length,)}
    check_case(VerifyCase(device=device, dtype=BF16, q_lens=(1,), dump="kv_head", **shape))
    draft = SparseCase(device=device, dtype=BF16, counts=(length // 2,), tail_starts=(length - 1,), **shape)
    check_case(draft)


def test_case_021_fp8_scales_reach_output_and_logits(device: torch.device) -> None:
    plain = VerifyCase(device=device, dtype=BF16, lengths=(16,), q_lens=(1,), dump="kv_head")
    case = VerifyCase(device=device, dtype=BF16, fp8=True, lengths=(16,), q_lens=(1,), dump="kv_head")
    case.q = plain.q
    page = int(plain.block_table[0, 0])
    case.block_table = plain.block_table
    case.k_cache = (plain.k_cache.float() / 0.25).to(torch.float8_e4m3fn)
    case.v_cache = (plain.v_cache.float() / 0.5).to(torch.float8_e4m3fn)
    case.k_descale = torch.tensor([0.25], device=device)
    case.v_descale = torch.tensor([0.5], device=device)
    got, exact = check_case(case), check_case(plain)
    assert bool(plain.k_cache[page].isfinite().all())
    torch.testing.assert_close(got["out"], exact["out"], rtol=0.1, atol=0.1)
    torch.testing.assert_close(got["logits"], exact["logits"], rtol=0.1, atol=0.2)


def test_case_023_every_call_uses_its_own_settings(device: torch.device) -> None:
    case = VerifyCase(device=device, dtype=BF16, lengths=(70,), q_lens=(3,), dump="rows")
    for options in (
        {"softmax_scale": 0.1},
        {"softmax_scale": 0.3},
        {"softcap": 1.0},
        {"window_size": (9, 0)},
        {"causal": False},
        {},
    ):
        case.options = options
        case.scale = options.get("softmax_scale", 0.125)  # type: ignore[assignment]
        case.softcap = options.get("softcap", 0.0)
        check_case(case)


@pytest.mark.parametrize("window", (1, 2))
def test_case_024_window_of_w_keeps_w_keys(device: torch.device, window: int) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(4,), q_lens=(2,), dump="rows",
        options={"window_size": (window - 1, 0)},
    )  # fmt: skip
    one_hot_values(case)
    got = check_case(case)
    for row, p in ((0, 2), (1, 3)):
        keys = (got["out"][row] != 0).nonzero()[:, 1].unique().tolist()
        assert keys == list(range(p - window + 1, p + 1))
    draft = SparseCase(
        device=device, dtype=BF16, lengths=(4,), counts=(0,), spare_k=0, tail_starts=(0,),
        options={"window_size": (window - 1, 0)},
    )  # fmt: skip
    one_hot_values(draft)  # type: ignore[arg-type]
    out = check_case(draft)["out"]
    assert (out[0] != 0).nonzero()[:, 1].unique().tolist() == list(range(4 - window, 4))


def test_case_027_softcap_before_the_mask(device: torch.device) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(2,), q_lens=(2,), dump="rows", dump_len=(2,),
        options={"softcap": 1.0},
    )  # fmt: skip
    one_hot_values(case)
    page = int(case.block_table[0, 0])
    case.k_cache[page, 1] = case.k_cache[page, 0]
    got = check_case(case)
    assert bool((got["out"][0, :, 0] == 1).all()) and bool((got["out"][0, :, 1] == 0).all())
    assert bool((got["out"][1, :, :2] == 0.5).all())
    first = got["logits"][0, :, 0].float()
    assert bool((first[:, 0].abs() < 1).all()) and bool(torch.isneginf(first[:, 1]).all())


@pytest.mark.parametrize("length", (0, 1, 257))
@pytest.mark.parametrize("num_splits", (1, 2, 7))
def test_case_029_sink_enters_once(device: torch.device, length: int, num_splits: int) -> None:
    for window in ((-1, -1), (30, 0)):  # the window leaves whole splits without a key
        case = VerifyCase(
            device=device, dtype=BF16, lengths=(length, 40), q_lens=(1, 2), dump="token",
            with_sinks=True, options={"num_splits": num_splits, "window_size": window},
        )  # fmt: skip
        case.sinks = torch.full((4,), 2.0, device=device)
        got = check_case(case)
        if length == 0:
            assert bool((got["out"][0] == 0).all()) and bool(torch.isneginf(got["lse"][:, 0]).all())
    draft = SparseCase(
        device=device, dtype=BF16, lengths=(length, 40), counts=(length // 2, 3), with_sinks=True,
        tail_starts=(length, 38), options={"num_splits": num_splits},
    )  # fmt: skip
    draft.sinks = torch.full((4,), 2.0, device=device)
    check_case(draft)


@pytest.mark.parametrize(("rows", "length"), ((5, 3), (3, 5)))
def test_case_031_bottom_right_alignment(device: torch.device, rows: int, length: int) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(length,), q_lens=(rows,), dump="all", dump_len=(length,)
    )
    one_hot_values(case)
    got = check_case(case)
    for row in range(rows):
        keys = (got["out"][row] != 0).nonzero()[:, 1].unique().tolist()
        assert keys == list(range(row + length - rows + 1))
        if not keys:
            assert bool(torch.isneginf(got["lse"][:, row]).all())
            assert bool(torch.isneginf(got["logits"][row, :, :length].float()).all())


def test_case_033_several_rows_per_request(device: torch.device) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(7, 20, 4), q_lens=(4, 4, 4), dump="all",
        dump_len=(7, 20, 4),
    )  # fmt: skip
    one_hot_values(case)
    got = check_case(case)
    for b, length in enumerate(case.lengths):
        for j in range(4):
            keys = (got["out"][4 * b + j] != 0).nonzero()[:, 1].unique().tolist()
            assert keys == list(range(length - 4 + j + 1))


@pytest.mark.parametrize("dump", DUMPS[1:])
@pytest.mark.parametrize("num_splits", (1, 2, 3, 7))
def test_case_034_dump_at_the_edges_of_splits(device: torch.device, dump: str, num_splits: int) -> None:
    check_case(
        VerifyCase(
            device=device, dtype=BF16, lengths=(100, 301, 129), q_lens=(1, 3, 7), dump=dump, wider=5,
            options={"num_splits": num_splits},
        )
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", (1, 2, 3, 8))
def test_case_035_empty_splits_are_neutral(device: torch.device, num_splits: int) -> None:
    pages = 40
    for bad in (range(20), range(20, 40), range(40), [p for p in range(40) if p not in (3, 39)]):
        case = VerifyCase(
            device=device, dtype=BF16, lengths=(16 * pages, 5), q_lens=(2, 1), dump="kv_head",
            options={"num_splits": num_splits},
        )  # fmt: skip
        case.block_table[0, list(bad)] = -1
        got = check_case(case)
        if len(bad) == pages:
            assert bool((got["out"][:2] == 0).all())
            assert bool(torch.isneginf(got["lse"][:, :2]).all())


def test_case_038_nothing_to_do(device: torch.device) -> None:
    for lengths, q_lens in (((), ()), ((5, 9), (0, 0)), ((0, 0), (2, 1))):
        for dump in DUMPS:
            case = VerifyCase(device=device, dtype=BF16, lengths=lengths, q_lens=q_lens, dump=dump)
            check_case(case)
            result = vegas_ops.flash_attn_with_logit_dump(*case.args, **case.kwargs)
            assert result.out.shape == (sum(q_lens), 4, 64) and result.out.dtype == BF16
            assert result.lse.shape == (4, sum(q_lens)) and result.lse.dtype == torch.float32
        draft = SparseCase(device=device, dtype=BF16, lengths=lengths, counts=(0,) * len(lengths), spare_k=0)
        check_case(draft)
        indices, counts = vegas_ops.topk_aggregate_logits(
            torch.zeros((len(lengths), 9), device=device), dump="token",
            seqlens=int32([0] * len(lengths), device), k=4, max_k=4,
        )  # fmt: skip
        assert indices.shape == (len(lengths), 4) and counts.shape == (len(lengths),)
        assert bool((indices == -1).all()) and bool((counts == 0).all())


@pytest.mark.parametrize("num_splits", (1, 3))
def test_case_039_lse_layout_does_not_depend_on_splits(device: torch.device, num_splits: int) -> None:
    case = VerifyCase(
        device=device, dtype=BF16, lengths=(300, 200), q_lens=(1, 1), dump="none",
        options={"num_splits": num_splits},
    )  # fmt: skip
    lse = check_case(case)["lse"]
    assert lse.shape == (4, 2) and len(set(lse.flatten().tolist())) == 8


@pytest.mark.parametrize("num_splits", (1, 2, 5))
def test_case_041_ragged_paged_and_split(device: torch.device, num_splits: int) -> None:
    check_case(
        VerifyCase(
            device=device, dtype=BF16, page_size=256, lengths=(512, 1024), q_lens=(1, 1),
            dump="token", options={"num_splits": num_splits},
        )
    )  # fmt: skip


def test_case_045_refusal_comes_from_the_call_itself(device: torch.device) -> None:
    """A head size beyond what a GPU's kernels hold on chip: an error of this call, and of no later one."""
    shape: dict[str, Any] = {"head_dim": 2**14, "heads_q": 1, "heads_kv": 1, "lengths": (3,)}
    case = VerifyCase(device=device, dtype=BF16, q_lens=(1,), **shape)
    draft = SparseCase(device=device, dtype=BF16, counts=(2,), **shape)
    for one in (case, draft):
        if device.type == "cpu":
            check_case(one)
        else:
            with pytest.raises(ValueError, match="`head_dim` must be"):
                check_case(one)
        check_case(VerifyCase(device=device, dtype=BF16, lengths=(9,), q_lens=(1,)))


@pytest.mark.parametrize("dump", ("token", "token_weight", "kv_head"))
def test_case_048_row_does_not_depend_on_its_batch(device: torch.device, dump: str) -> None:
    lengths = tuple(1 + 37 * i % 700 for i in range(32))
    case = VerifyCase(
        device=device, dtype=BF16, lengths=lengths, q_lens=(1,) * 32, dump=dump, heads_q=8,
        options={"batch_invariant": True},
    )  # fmt: skip
    together = check_case(case)
    draft = SparseCase(
        device=device, dtype=BF16, lengths=lengths, counts=tuple(n // 3 for n in lengths),
        tail_starts=tuple(n - 1 for n in lengths), heads_q=8, options={"batch_invariant": True},
    )  # fmt: skip
    drafts = check_case(draft)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).to(device)
    for rows in (order, *order[:4].split(1)):
        kwargs = {
            **case.kwargs, "cu_seqlens_q": torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
        }  # fmt: skip
        if kwargs["guide_lse_hint"] is not None:
            kwargs["guide_lse_hint"] = kwargs["guide_lse_hint"][rows]
        got = vegas_ops.flash_attn_with_logit_dump(
            case.q[rows], case.k_cache, case.v_cache, case.block_table[rows], case.seqused_k[rows],
            **kwargs,
        )  # fmt: skip
        assert_same_bits(got.out, together["out"][rows], "out")
        assert_same_bits(got.lse, together["lse"][:, rows], "lse")
        assert got.logits is not None
        for i, row in enumerate(rows.tolist()):
            n = lengths[row]
            assert_same_bits(got.logits[i, ..., :n], together["logits"][row, ..., :n], "logits")
        kwargs = draft.kwargs
        for name in ("tail_start", "seqused_k", "block_table"):
            kwargs[name] = kwargs[name][rows]
        out, _ = vegas_ops.sparse_paged_decode(
            draft.q[rows], draft.k_cache, draft.v_cache, draft.indices[rows],
            draft.topk_length[rows], **kwargs,
        )  # fmt: skip
        assert_same_bits(out, drafts["out"][rows], "out of the draft")


@pytest.mark.parametrize("kind", ("first chunk", "all but the last chunk", "all"))
@pytest.mark.parametrize("logical", (False, True))
def test_case_067_first_chunk_of_indices_all_invalid(device: torch.device, kind: str, logical: bool) -> None:
    invalid = {"first chunk": 16, "all but the last chunk": 500, "all": 20}[kind]
    valid = 0 if kind == "all" else 4
    for num_splits in (0, 1, 3):
        draft = SparseCase(
            device=device, dtype=BF16, lengths=(40,), counts=(valid,), logical=logical,
            spare_k=invalid, options={"num_splits": num_splits},
        )  # fmt: skip
        empty = torch.full((1, invalid), -1, dtype=torch.int32, device=device)
        draft.indices = torch.cat([empty, draft.indices[:, :valid]], 1)
        draft.topk_length = int32((invalid + valid,), device)
        check_case(draft)
        if kind == "all":
            got = check_case(draft)
            assert bool((got["out"] == 0).all()) and bool(torch.isneginf(got["lse"]).all())


@pytest.mark.parametrize("q_lens", ((0, 2, 1), (2, 0, 3)))
def test_case_082_nothing_is_read_before_the_first_request(
    device: torch.device, q_lens: tuple[int, ...]
) -> None:
    """A prefix array was read at -1 for request 0: what lies in memory around the arrays of lengths and pages
    counts for nothing."""
    case = VerifyCase(device=device, dtype=BF16, lengths=(40, 70, 9), q_lens=q_lens, dump="token")
    want = check_case(case)
    assert case.kwargs["cu_seqlens_q"].dtype == torch.int32

    def within(value: Any, neighbour: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int32:
            return value
        size = value.numel()
        whole = torch.full((3 * size,), neighbour, dtype=torch.int32, device=device)
        return whole[size : 2 * size].view(value.shape).copy_(value)

    for neighbour in (-1, 0, 3, 2**31 - 1):
        args = [within(value, neighbour) for value in case.args]
        kwargs = {name: within(value, neighbour) for name, value in case.kwargs.items()}
        outputs = case.outputs(SENTINEL)
        vegas_ops.flash_attn_with_logit_dump(*args, **kwargs, **outputs)
        for name, output in outputs.items():
            assert_same_bits(output, want[name], f"{name} beside {neighbour}")
