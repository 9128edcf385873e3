"""What the plugin for vLLM does without vLLM: its buffers, its options, its checks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vegas_ops import ops
from vegas_ops.integrations import vllm as plugin
from vegas_ops.integrations import vllm_guidance
from vegas_ops.integrations.vllm_guidance import POLICIES, Guidance, Options, Shape, Verification

GAMMA = 4
LAYERS, HEADS_Q, HEADS_KV, HEAD_DIM, PAGE_SIZE, MAX_KEYS = 3, 4, 2, 16, 8, 96


# Buffers


class Batch:
    """Requests with these numbers of rows and keys, each layer's q, and a cache like vLLM's: K and V of a
    head side by side, pages of heads."""

    def __init__(self, rows: list[int], keys: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        n, pages = len(rows), MAX_KEYS // PAGE_SIZE
        self.rows, self.keys = rows, keys
        self.starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).int()
        self.seq_lens = torch.tensor(keys, dtype=torch.int32)
        table = torch.randperm(n * pages, generator=generator).view(n, pages).int()
        used = -(-self.seq_lens // PAGE_SIZE)
        self.block_table = table.masked_fill(torch.arange(pages) >= used[:, None], -1)
        self.kv = draw(LAYERS, n * pages, HEADS_KV, PAGE_SIZE, 2 * HEAD_DIM)
        self.q = draw(LAYERS, sum(rows), HEADS_Q, HEAD_DIM)
        self.next = draw(LAYERS, n, HEADS_Q, HEAD_DIM)

    def cache(self, layer: int, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        k, v = self.kv[layer, :, heads].transpose(1, 2).split(HEAD_DIM, -1)
        return k, v

    def verification(self, split: bool) -> Verification:
        """split: prompts (which come last) are seen by their last rows alone, as on a GPU."""
        decodes = next((i for i, n in enumerate(self.rows) if n > GAMMA + 1), len(self.rows))
        decodes = decodes if split else len(self.rows)
        return Verification(
            batch=len(self.rows),
            decodes=decodes,
            rows=int(self.starts[decodes]),
            max_rows=max([1, *self.rows[:decodes]]),
            max_keys=MAX_KEYS,
            query_start_loc=self.starts,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            page_size=PAGE_SIZE,
            last_rows=(self.starts[decodes + 1 :] - 1).long() if split else None,
        )


def guidance_for(options: Options, all_reduce: Any = None, ranks: int = 1) -> Guidance:
    shape = Shape(LAYERS, HEADS_Q // ranks, HEADS_KV // ranks, HEAD_DIM, HEAD_DIM**-0.5, GAMMA, 6, MAX_KEYS)
    return Guidance(shape, options, dtype=torch.float32, device="cpu", all_reduce=all_reduce)


def verify(guidance: Guidance, batch: Batch, split: bool = False, rank: int | None = None) -> Tensor:
    """All layers' outputs; where prompts are split off, of the others."""
    verification = batch.verification(split)
    guidance.begin(verification)
    share_q, share_kv = slice(None), slice(None)
    if rank is not None:
        n, kv = guidance.shape.num_heads_q, guidance.shape.num_heads_kv
        share_q, share_kv = slice(rank * n, rank * n + n), slice(rank * kv, rank * kv + kv)
    q = batch.q[:, :, share_q]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for layer in range(LAYERS):
        guidance.verify(layer, verification, q[layer], *batch.cache(layer, share_kv), out[layer])
    return out[:, : verification.rows]


def lists_of(guidance: Guidance) -> list[list[list[int]]]:
    """Listed tokens by layer and request."""
    assert guidance.verification is not None
    n = guidance.verification.batch
    indices, lengths = guidance.indices[:, :n].tolist(), guidance.lengths[:, :n].tolist()
    return [[ids[:m] for ids, m in zip(*layer, strict=True)] for layer in zip(indices, lengths, strict=True)]


MIXED = Batch([5, 1, 3, 5, 9, 30], [60, 1, 90, 5, 9, 70])
SPARSE = {"ratio": 0.1, "min_tokens": 3}


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, MAX_KEYS)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(0, 40),
)
def test_candidates_and_budgets_follow_the_lengths(
    sizes: list[tuple[int, int]], ratio: float, min_tokens: int
) -> None:
    rows, keys = [min(n, m) for n, m in sizes], [m for _, m in sizes]
    guidance = guidance_for(Options(ratio=ratio, min_tokens=min_tokens))
    guidance.begin(Batch(rows, keys).verification(False))
    for i, (n, m) in enumerate(zip(rows, keys, strict=True)):
        prompt = n > GAMMA + 1
        candidates = m if prompt or n == 0 else m - n + 1
        assert int(guidance.candidates[i]) == candidates
        assert int(guidance.k[i]) == min(guidance.options.budget(m), candidates)
        assert int(guidance.dump_rows[i]) == (2 if prompt else 3)
        assert int(guidance.k[i]) <= guidance.max_k


@pytest.mark.parametrize("policy", POLICIES)
def test_verification_and_selection_are_those_of_the_ops(policy: Any) -> None:
    guidance = guidance_for(Options(policy=policy, **SPARSE))
    out = verify(guidance, MIXED)
    for layer in range(LAYERS):
        k, v = MIXED.cache(layer)
        dump: Any = "token" if policy == "vegas" else "kv_head"
        expected, _, logits, guide_lse = ops.flash_attn_with_logit_dump(
            MIXED.q[layer], k, v, MIXED.block_table, MIXED.seq_lens, cu_seqlens_q=MIXED.starts,
            max_seqlen_q=30, max_seqlen_k=MAX_KEYS, dump=dump, dump_rows=guidance.dump_rows,
            dump_len=guidance.candidates,
        )  # fmt: skip
        assert logits is not None
        torch.testing.assert_close(out[layer], expected, rtol=0, atol=1e-6)
        weights: dict[str, Any] = {"mode": "weight", "guide_lse": guide_lse, "pool": (GAMMA, 0)}
        indices, length = ops.topk_aggregate_logits(
            logits, dump=dump, seqlens=guidance.candidates, k=guidance.k, max_k=guidance.max_k,
            dump_rows=guidance.dump_rows, **(weights if policy != "vegas" else {}),
        )  # fmt: skip
        for i, n in enumerate(length.tolist()):
            assert lists_of(guidance)[layer][i] == indices[i, :n].tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_split_off_are_selected_for_alike(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = (guidance_for(Options(policy=policy, **SPARSE)) for _ in range(2))
    all_rows, verified = verify(whole, MIXED), verify(split, MIXED, split=True)
    assert lists_of(split) == lists_of(whole)
    torch.testing.assert_close(verified, all_rows[:, : verified.shape[1]], rtol=0, atol=1e-6)
    # With room for one layer's scores, or two layers', there are several selections.
    for layers in (1, 2):
        monkeypatch.setattr(vllm_guidance, "SCORE_BYTES", whole._scores[:layers].nbytes)
        narrow = guidance_for(Options(policy=policy, **SPARSE))
        assert narrow.chunk == layers
        verify(narrow, MIXED)
        assert lists_of(narrow) == lists_of(whole)


@pytest.mark.parametrize("policy", POLICIES)
def test_summed_over_ranks_the_selection_is_that_of_one(policy: Any) -> None:
    one = guidance_for(Options(policy=policy, **SPARSE))
    verify(one, MIXED)
    parts: list[list[Tensor]] = [[], []]
    options = Options(policy=policy, selection_sync="allreduce", **SPARSE)

    def collect(rank: int, x: Tensor) -> Tensor:
        parts[rank].append(x.clone())
        return x

    for rank in range(2):
        verify(guidance_for(options, partial(collect, rank), ranks=2), MIXED, rank=rank)
    sums = iter([a + b for a, b in zip(*parts, strict=True)])
    summed = guidance_for(options, lambda x: next(sums), ranks=2)
    verify(summed, MIXED, rank=0)
    assert lists_of(summed) == lists_of(one)
    local = guidance_for(Options(policy=policy, **SPARSE), lambda x: x * 0, ranks=2)
    verify(local, MIXED, rank=0)
    assert lists_of(local) != lists_of(one)


@pytest.mark.parametrize("rows", [None, [4, 0, 3]])
def test_drafts_read_their_lists_and_everything_newer(rows: list[int] | None) -> None:
    guidance = guidance_for(Options(**SPARSE))
    verify(guidance, MIXED)
    chosen = list(range(len(MIXED.rows))) if rows is None else rows
    # As if all drafts but the last had been accepted: one more token follows.
    keys = MIXED.seq_lens[chosen]
    for layer in range(LAYERS):
        k, v = MIXED.cache(layer)
        q = MIXED.next[layer, chosen]
        out = torch.zeros_like(q)
        guidance.draft(
            layer, q, k, v, out, MIXED.block_table[chosen], keys,
            None if rows is None else torch.tensor(rows),
        )  # fmt: skip
        for i, request in enumerate(chosen):
            listed = lists_of(guidance)[layer][request]
            tail = range(int(guidance.candidates[request]), int(keys[i]))
            tokens = torch.tensor(sorted({*listed, *tail}))
            assert len(tokens) == len(listed) + len(tail)
            pages = MIXED.block_table[request, tokens // PAGE_SIZE]
            seen_k, seen_v = (
                x[pages, tokens % PAGE_SIZE].repeat_interleave(HEADS_Q // HEADS_KV, 1) for x in (k, v)
            )
            weights = (torch.einsum("hd,nhd->hn", q[i], seen_k) * HEAD_DIM**-0.5).softmax(-1)
            expected = torch.einsum("hn,nhd->hd", weights, seen_v)
            torch.testing.assert_close(out[i], expected, rtol=0, atol=1e-5)


# Checks


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"policy": "quest"}, ValueError, "`policy` must be one of vegas, vegas-lookahead, got 'quest'"),
        ({"selection_sync": "ring"}, ValueError, "`selection_sync` must be one of local, allreduce"),
        ({"ratio": 1.5}, ValueError, r"`ratio` must be in \[0, 1\], got 1.5"),
        ({"ratio": "7%"}, TypeError, "`ratio` must be a number, got '7%'"),
        ({"min_tokens": -1}, ValueError, "`min_tokens` must be at least 0, got -1"),
        ({"min_tokens": 2.5}, TypeError, "`min_tokens` must be an integer, got 2.5"),
        ({"gamma": 3}, ValueError, "must have no keys but policy, ratio, min_tokens, selection_sync, got"),
        (None, TypeError, r"`additional_config\['vegas_ops'\]` must be a dict, got None"),
    ],
)
def test_bad_options_are_named(values: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plugin.options_of(SimpleNamespace(additional_config={"vegas_ops": values}))


def test_without_its_key_the_plugin_stays_out() -> None:
    assert plugin.options_of(SimpleNamespace(additional_config={"other": 1})) is None
    assert plugin.options_of(SimpleNamespace(additional_config=object())) is None
    found = plugin.options_of(SimpleNamespace(additional_config={"vegas_ops": {"ratio": 0.1}}))
    assert found == Options(ratio=0.1)


@pytest.mark.parametrize(
    ("version", "device", "message"),
    [
        ("0.23.0", "cuda", "vLLM on cuda must be at least 0.24 and below 0.27, got 0.23.0"),
        ("0.27.1", "cuda", "below 0.27, got 0.27.1"),
        ("0.33.0+cpu", "cpu", "below 0.33, got 0.33.0"),
        ("0.26.0", "tpu", "must run on cuda or cpu, got 'tpu'"),
    ],
)
def test_other_versions_are_refused(version: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin.check_version(version, device)


def test_known_versions_are_taken() -> None:
    for version, device in (("0.24.0", "cuda"), ("0.26.3+cu130", "cuda"), ("0.32.0", "cpu")):
        plugin.check_version(version, device)


def config(**changes: Any) -> Any:
    """A configuration as the plugin reads it, with changes to any of its parts."""
    parts: dict[str, dict[str, Any]] = {
        "speculative_config": {
            "method": "draft_model", "model": "m", "target_model_config": None, "num_speculative_tokens": 4,
            "disable_padded_drafter_batch": False, "parallel_drafting": False,
            "use_heterogeneous_vocab": False,
        },
        "model_config": {"model": "m"},
        "parallel_config": {
            "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1, "enable_eplb": False, "enable_dbo": False,
        },
        "cache_config": {"cache_dtype": "auto"},
        "scheduler_config": {"scheduler_cls": None},
    }  # fmt: skip
    top: dict[str, Any] = {
        "additional_config": {"vegas_ops": {}}, "lora_config": None, "kv_transfer_config": None,
    }  # fmt: skip
    for name, value in changes.items():
        home = next((part for part in parts.values() if name in part), None)
        if name in top or name in parts:
            top[name] = value
        else:
            (home if home is not None else parts["model_config"]).update({name: value})
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()} | top)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pipeline_parallel_size": 2}, "`pipeline_parallel_size` must be 1, got 2"),
        ({"use_mla": True}, r"got m with latent attention \(MLA\)"),
        ({"is_multimodal_model": True}, "got m with inputs other than text"),
        ({"is_encoder_decoder": True}, "got m with an encoder"),
        ({"is_hybrid": True}, "got m with layers with a recurrent state"),
        ({"is_attention_free": True}, "got m with no attention"),
        ({"decode_context_parallel_size": 2}, "`decode_context_parallel_size` must be 1, got 2"),
        ({"prefill_context_parallel_size": 4}, "`prefill_context_parallel_size` must be 1, got 4"),
        ({"enable_eplb": True}, "`enable_eplb` must be off, got True"),
        ({"enable_dbo": True}, "`enable_dbo` must be off, got True"),
        (
            {"disable_padded_drafter_batch": True},
            "`disable_padded_drafter_batch` of `speculative_config` must",
        ),
        ({"parallel_drafting": True}, "`parallel_drafting` of `speculative_config` must be off"),
        ({"use_heterogeneous_vocab": True}, "`use_heterogeneous_vocab` of `speculative_config` must be off"),
        ({"lora_config": object()}, "`enable_lora` must be off"),
        ({"kv_transfer_config": object()}, "`kv_transfer_config` must be None"),
        ({"cache_dtype": "fp8"}, "`kv_cache_dtype` must be 'auto', got 'fp8'"),
        ({"speculative_config": None}, "`speculative_config` must be given, got None"),
        ({"method": "eagle"}, "the method 'draft_model' and the target 'm' as its model, got 'eagle'"),
        ({"model": "other"}, "the target 'm' as its model, got 'draft_model' and 'other'"),
        (
            {"method": "custom_class", "model": plugin.CUSTOM_CLASS},
            "`scheduler_cls` must be 'vegas_ops.integrations.vllm_custom_class.LookaheadScheduler', got None",
        ),
    ],
)
def test_what_is_not_served_is_refused(change: dict[str, Any], message: str) -> None:
    plugin.check_config(config())
    with pytest.raises(ValueError, match=message):
        plugin.check_config(config(**change))


def test_the_second_model_runner_is_refused_on_gpus() -> None:
    plugin.check_runner(config(), "cuda")
    second = SimpleNamespace(use_v2_model_runner=True)
    plugin.check_runner(second, "cpu")
    with pytest.raises(
        ValueError, match="must use its first model runner, got the second; unset VLLM_USE_V2"
    ):
        plugin.check_runner(second, "cuda")


def test_more_requests_than_there_is_room_for_are_refused() -> None:
    guidance = guidance_for(Options(**SPARSE))
    with pytest.raises(ValueError, match="`batch` must be at most 6, got 7"):
        guidance.begin(Batch([1] * 7, [5] * 7).verification(False))


def test_fp32_is_refused_on_gpus() -> None:
    plugin.check_dtype(config(dtype=torch.float32), "cpu")
    plugin.check_dtype(config(dtype=torch.float16), "cuda")
    with pytest.raises(ValueError, match="`dtype` must be bfloat16 or float16 on GPUs, got"):
        plugin.check_dtype(config(dtype=torch.float32), "cuda")
