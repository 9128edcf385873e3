"""The oracles against torch's own attention and against selection written out by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from op_cases import SENTINEL, VerifyCase, int32
from torch import Tensor

from vegas_ops import reference


def run(case: VerifyCase, **kwargs: Any) -> dict[str, Tensor]:
    outputs = case.outputs(math.nan, torch.float64)
    reference.flash_attn_with_logit_dump(*case.args, **{**case.kwargs, **kwargs}, **outputs)
    return outputs


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("group", (1, 3))
def test_attention_equals_torch(causal: bool, group: int) -> None:
    case = VerifyCase(
        dtype=torch.float32, heads_q=2 * group, lengths=(37, 5), q_lens=(4, 1), dump="rows",
        page_size=7, layout="hnd", options={"causal": causal},
    )  # fmt: skip
    got = run(case)
    for b, length in enumerate(case.lengths):
        table = case.block_table[b]
        tokens = [(int(table[t // 7]), t % 7) for t in range(length)]
        k = torch.stack([case.k_cache[p, o] for p, o in tokens], 1).double()
        v = torch.stack([case.v_cache[p, o] for p, o in tokens], 1).double()
        q = case.q[case.cu[b] : case.cu[b + 1]].double().transpose(0, 1)
        rows = q.shape[1]
        mask = torch.ones(rows, length, dtype=torch.bool)
        mask = mask.tril(length - rows) if causal else mask
        want = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, enable_gqa=True
        )[0]
        here = slice(case.cu[b], case.cu[b + 1])
        torch.testing.assert_close(got["out"][here], want.transpose(0, 1))
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / 8
        scores = scores.masked_fill(~mask, -math.inf)
        torch.testing.assert_close(got["lse"][:, here], scores.logsumexp(-1))
        n = length - rows + 1
        torch.testing.assert_close(got["logits"][b, :, 0, :n], scores[:, 0, :n])
        torch.testing.assert_close(got["logits"][b, :, 1, :n], scores[:, -1, :n])
        assert bool(got["logits"][b, :, :, n:].isnan().all())


def test_sink_takes_weight_and_gives_nothing() -> None:
    case = VerifyCase(lengths=(9,), q_lens=(1,), dump="none", with_sinks=True)
    plain, sunk = run(case, sinks=None), run(case)
    assert case.sinks is not None
    kept = torch.sigmoid(plain["lse"][:, 0] - case.sinks.double())
    torch.testing.assert_close(sunk["out"][0], plain["out"][0] * kept[:, None])
    torch.testing.assert_close(sunk["lse"], plain["lse"])


def test_dumps_agree_with_each_other() -> None:
    case = VerifyCase(lengths=(50,), q_lens=(4,), dump="all", options={"softcap": 2.0})
    every = run(case, dump_len=int32((47,)))["logits"][:, :, :47]
    case.dump = "rows"
    rows = run(case)["logits"][0, :, :, :47]
    torch.testing.assert_close(rows[:, 0], every[0])
    torch.testing.assert_close(rows[:, 1], every[3])
    case.dump = "token"
    token = run(case)["logits"][0, :47]
    torch.testing.assert_close(token, rows.sum((0, 1)))
    for dump, wide in (("token", token), ("rows", rows[None])):
        full = torch.full((*wide.shape[:-1], 47), 0.0, dtype=torch.float64)
        full[:] = wide
        summed, _ = reference.aggregate_logits(
            full if dump == "rows" else full[None], dump=dump, seqlens=int32((47,))
        )
        torch.testing.assert_close(summed[0], token.float())


def test_guide_logits_are_group_means() -> None:
    """Logits are linear without a softcap, so a guide row's are the mean over its group."""
    case = VerifyCase(heads_q=6, lengths=(50,), q_lens=(3,), dump="rows")
    rows = run(case)["logits"][0, :, :, :48]
    case.dump = "kv_head"
    got = run(case)
    guides = got["logits"][0, :, :, :48]
    torch.testing.assert_close(
        guides, rows.reshape(2, 3, 2, 48).mean(1).transpose(0, 1), rtol=1e-5, atol=1e-6
    )
    # The last row sees two keys more than are dumped, the first row none.
    torch.testing.assert_close(got["guide_lse"][0, 0], guides[0].logsumexp(-1))
    case.dump = "token_weight"
    case.hint = got["guide_lse"].float()
    weights = run(case)["logits"][0, :48]
    norm = case.hint[0].double()[:, :, None]
    torch.testing.assert_close(weights, torch.exp(guides - norm).sum((0, 1)))


def test_nothing_is_written_where_it_must_not_be() -> None:
    case = VerifyCase(lengths=(20, 9, 0), q_lens=(2, 0, 1), extra_rows=1, dump="kv_head", dump_rows=(2, 3, 0))
    outputs = case.outputs(SENTINEL, torch.float64)
    reference.flash_attn_with_logit_dump(*case.args, **case.kwargs, **outputs)
    assert bool((outputs["out"][3] == SENTINEL).all())
    assert bool((outputs["logits"][0, 0] == SENTINEL).all())
    assert bool((outputs["logits"][0, 1, :, :19] != SENTINEL).all())
    assert bool((outputs["logits"][1:] == SENTINEL).all())
    assert bool((outputs["guide_lse"][0] != SENTINEL).all())
    assert bool((outputs["guide_lse"][1:] == SENTINEL).all())
    assert bool((outputs["out"][2] == 0).all()) and bool(torch.isneginf(outputs["lse"][:, 2]).all())


def select_by_hand(
    row: list[float], k: int, before: int, after: int, forced: set[int], on_top: bool, max_k: int
) -> list[int]:
    n = len(row)
    k = min(max(k, 0), n)

    def alive(i: int) -> bool:
        return not math.isnan(row[i]) and row[i] != -math.inf

    def score(i: int) -> float:
        around = range(max(0, i - before), min(n, i + after + 1))
        return max(row[j] for j in around if alive(j))

    limit = max_k if on_top else min(k, max_k)
    chosen = sorted(forced)[:limit]
    left = min(k if on_top else k - len(chosen), max_k - len(chosen))
    others = [i for i in range(n) if i not in forced and alive(i)]
    others.sort(key=lambda i: (-score(i), i))
    return sorted(chosen + others[: max(left, 0)])


def test_selection_equals_selection_by_hand() -> None:
    generator = random.Random(0)
    for _ in range(300):
        n = generator.randint(0, 12)
        pool_of = [0.0, -0.0, 1.0, 2.0, 3.0, math.inf, -math.inf, math.nan]
        row = [generator.choice(pool_of) for _ in range(n)]
        k, max_k = generator.randint(-1, 14), generator.randint(0, 14)
        before, after = generator.randint(0, 3), generator.randint(0, 3)
        num_sink, num_recent = generator.choice((0, 0, 2, 20)), generator.choice((0, 0, 3))
        on_top = generator.random() < 0.5
        forced = {i for i in range(n) if i < num_sink or i >= n - num_recent}
        got, count = reference.topk_aggregate_logits(
            torch.tensor([[*row, 9.0]]), dump="token", seqlens=int32((n,)), k=k, max_k=max_k,
            pool=(before, after), num_sink=num_sink, num_recent=num_recent,
            count_forced=not on_top,
        )  # fmt: skip
        want = select_by_hand(row, k, before, after, forced, on_top, max_k)
        assert got[0].tolist() == want + [-1] * (max_k - len(want))
        assert count.tolist() == [len(want)]


def test_weights_follow_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    seqlens = int32((30,))
    cu = int32((0, 2))
    lse = torch.randn((3, 2), generator=generator)
    sinks = torch.randn(3, generator=generator)
    rows = torch.randn((1, 3, 2, 30), generator=generator)
    got, heads = reference.aggregate_logits(
        rows, dump="rows", mode="weight", lse=lse, sinks=sinks, cu_seqlens_q=cu, seqlens=seqlens
    )
    weights = rows[0].exp() / (lse.exp() + sinks.exp()[:, None])[:, :, None]
    assert heads == 3
    torch.testing.assert_close(got[0], weights.sum((0, 1)))
    guide_lse = torch.randn((1, 2, 3), generator=generator)
    planes = torch.randn((1, 2, 3, 30), generator=generator)
    got, _ = reference.aggregate_logits(
        planes, dump="kv_head", mode="weight", guide_lse=guide_lse, seqlens=seqlens,
        dump_rows=int32((2,)),
    )  # fmt: skip
    torch.testing.assert_close(got[0], (planes[0, 1] - guide_lse[0, 1, :, None]).exp().sum(0))


def test_draft_over_everything_equals_verification() -> None:
    case = VerifyCase(lengths=(40,), q_lens=(1,), dump="none", with_sinks=True)
    full = run(case)
    listed = torch.randperm(33, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for logical in (True, False):
        indices = listed if logical else case.block_table[0][listed // 16] * 16 + listed % 16
        out, lse = reference.sparse_paged_decode(
            case.q, case.k_cache, case.v_cache, indices.to(torch.int32)[None], int32((33,)),
            tail_start=int32((33,)), seqused_k=case.seqused_k, block_table=case.block_table,
            indices_are_slots=not logical, sinks=case.sinks,
        )  # fmt: skip
        torch.testing.assert_close(out, full["out"].float())
        torch.testing.assert_close(lse, full["lse"].float())


def test_listed_twice_counts_twice_and_bad_entries_not_at_all() -> None:
    case = VerifyCase(lengths=(8,), q_lens=(1,), dump="none", page_size=8)
    page = int(case.block_table[0, 0])
    slots = int32((page * 8, page * 8, -1, 2**31 - 1, page * 8 + 1))
    out, _ = reference.sparse_paged_decode(case.q, case.k_cache, case.v_cache, slots[None], int32((5,)))
    keys, values, _ = case.loaded(0)
    scores = torch.einsum("hgd,thd->hgt", case.q[0].double().reshape(2, 2, 64), keys[:2]) / 8
    weights = scores.exp() * torch.tensor([2.0, 1.0], dtype=torch.float64)
    weights = weights / weights.sum(-1, keepdim=True)
    want = torch.einsum("hgt,thd->hgd", weights, values[:2]).reshape(4, 64)
    torch.testing.assert_close(out[0], want.float())
