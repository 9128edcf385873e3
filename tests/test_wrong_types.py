"""Values of a wrong type anywhere in the public interface: an error that names the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_arguments
import torch
from tiny_model import TinyModel, new_cache

import vegas_ops
from vegas_ops import models, speculative
from vegas_ops.models import Qwen3Config, Qwen3Model, RopeScaling, Tokenizer
from vegas_ops.session import DEMO_MODEL
from vegas_ops.speculative import (
    POLICIES,
    VEGAS,
    CacheSequence,
    LayerAttention,
    PagedKVCache,
    Quest,
    RepetitionPenalty,
    Request,
    SamplingParams,
    SnapKV,
    SpecExtend,
    SpeculativeDecoder,
    Streaming,
    Tuning,
    Vegas,
    accept_greedy,
    accept_sampled,
    tune,
)

CONFIG = Qwen3Config(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads_q=1, num_heads_kv=1,
    head_dim=8, max_position=64,
)  # fmt: skip
MODEL = TinyModel()

VALUES: dict[str, Any] = {
    "none": None, "text": "a", "float": 1.5, "nan": float("nan"), "bool": True, "tensor": torch.tensor(1.5),
    "list": ["a"], "object": object(),
}  # fmt: skip
# Kinds of arguments, and which of the values they take.
TAKES = {
    "integer": (),
    "integer?": ("none",),
    "number": ("float",),
    "number?": ("none", "float"),
    "text": ("text",),
    "list": ("text", "list"),  # each of whose items is looked at
    "tensor": ("tensor",),
    "tensor?": ("none", "tensor"),
    "bool": ("none", "bool", "float", "nan", "tensor"),  # what torch takes for one
    "device": ("text",),
    "dtype?": ("none",),
    "callable?": ("none",),
    # A scalar of the torch ops: what torch converts is not looked at.
    "integer*": ("bool", "tensor"),
    "number*": ("bool", "tensor", "float", "nan"),
    "other": (),
    "other?": ("none",),
}


def with_kinds(call: dict[str, Any], **kinds: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A call's arguments, and kinds by name: those given, "tensor" for what is one, others left out."""
    found = {name: "tensor" for name, value in call.items() if isinstance(value, torch.Tensor)}
    return call, {**found, **kinds}


def cases() -> Iterator[tuple[Callable[..., Any], dict[str, Any], dict[str, str]]]:
    cpu = torch.device("cpu")
    optional = dict.fromkeys(
        ("sinks", "k_descale", "v_descale", "dump_rows", "dump_len", "lse", "out", "logits",
         "guide_lse", "workspace"), "tensor?"
    )  # fmt: skip
    attention = {
        "softmax_scale": "number?", "softcap": "number*", "num_splits": "integer*", "window_size": "other",
        "batch_invariant": "bool", **optional,
    }  # fmt: skip
    yield (
        vegas_ops.flash_attn_with_logit_dump,
        *with_kinds(
            test_arguments.base_verify(cpu), **attention, causal="bool", max_seqlen_q="integer",
            max_seqlen_k="integer", dump="other",
        ),
    )  # fmt: skip
    kinds = {
        k: v for k, v in attention.items() if k not in ("dump_rows", "dump_len", "guide_lse_hint", "logits")
    }
    kinds.pop("guide_lse")
    yield (
        vegas_ops.sparse_paged_decode,
        *with_kinds(test_arguments.base_sparse(cpu), **kinds, tail_start="tensor?", indices_are_slots="bool"),
    )
    select = test_arguments.base_select(cpu)
    yield (
        vegas_ops.topk_aggregate_logits,
        *with_kinds(
            select, k="integer*", max_k="integer", pool="other", num_sink="integer*", num_recent="integer*",
            count_forced="bool", per_kv_head="bool", page_size="integer*", dump="other", mode="other",
            sinks="tensor?", workspace="tensor?", dump_rows="tensor?", cu_seqlens_q="tensor?",
            block_table="tensor?", indices="tensor?", topk_length="tensor?",
        ),
    )  # fmt: skip
    names = ("logits", "dump", "seqlens", "mode", "guide_lse")
    yield (
        vegas_ops.aggregate_logits,
        *with_kinds({n: select[n] for n in names}, dump="other", mode="other", out="tensor?"),
    )
    bounds = dict.fromkeys(
        (
            "max_batch",
            "max_q_len",
            "max_seqlen_k",
            "max_k",
            "layers",
            "num_heads_q",
            "num_heads_kv",
            "head_dim",
        ),
        1,
    )  # fmt: skip
    yield (
        vegas_ops.make_workspace,
        {"op": "sparse_paged_decode", "device": "cpu", **bounds},
        {"op": "other", "device": "device", **dict.fromkeys(bounds, "integer*")},
    )
    rows = torch.zeros(2, dtype=torch.int32)
    schedule = dict.fromkeys(
        ("max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "page_size"), 1
    )
    yield (
        vegas_ops.build_scheduler_metadata,
        {"op": "sparse_paged_decode", "cu_seqlens_q": rows, "seqused_k": rows, **schedule},
        {"op": "other", "cu_seqlens_q": "tensor", "seqused_k": "tensor", "out": "tensor?",
         **dict.fromkeys(schedule, "integer")},
    )  # fmt: skip
    model, cache = MODEL, new_cache(MODEL)
    decoder = SpeculativeDecoder(model, cache)
    yield (
        PagedKVCache,
        {"num_layers": 1, "num_pages": 1, "page_size": 16, "num_heads_kv": 1, "head_dim": 64,
         "dtype": torch.float32},
        {"num_layers": "integer", "num_pages": "integer", "page_size": "integer", "num_heads_kv": "integer",
         "head_dim": "integer", "dtype": "other", "device": "device", "max_length": "integer?",
         "k_scale": "number", "v_scale": "number"},
    )  # fmt: skip
    sequence = cache.new_sequence()
    yield CacheSequence, {"cache": cache}, {"cache": "other"}
    for method in (cache.reserve, cache.truncate):
        yield method, {"sequence": sequence, "length": 0}, {"sequence": "other", "length": "integer"}
    yield cache.share_prefix, {"source": sequence, "length": 0}, {"source": "other", "length": "integer"}
    yield cache.free, {"sequence": sequence}, {"sequence": "other"}
    yield (
        SpeculativeDecoder,
        {"model": model, "cache": cache},
        {"model": "other", "cache": "other", "prefill_chunk": "integer", "on_prompt": "callable?",
         "read_every": "integer", "draft_cost": "number?"},
    )  # fmt: skip
    for method in (decoder.add, decoder.abort, decoder.preempt):
        yield method, {}, {"request": "other"}
    yield decoder.hold_prompt, {}, {"prompt": "other"}
    yield decoder.generate, {}, {"requests": "list"}
    yield (
        SamplingParams,
        {},
        {
            "temperature": "number",
            "top_k": "integer",
            "top_p": "number",
            "min_p": "number",
            "seed": "integer?",
        },
    )
    yield (
        Request,
        {"prompt": [1]},
        {"prompt": "other", "sampling": "other", "max_new_tokens": "integer", "stop_token_ids": "other",
         "stop_sequences": "other", "gamma": "integer", "policy": "other", "ratio": "number",
         "min_tokens": "integer", "logits_processor": "callable?", "forced_tokens": "other?",
         "max_iterations": "integer?", "share_prefix_with": "other?"},
    )  # fmt: skip
    yield (
        Vegas,
        {},
        {"score": "other", "rows": "other", "look_ahead": "integer", "refresh": "integer"},
    )
    yield SnapKV, {}, {"window": "integer", "kernel": "integer"}
    yield SpecExtend, {}, {"chunk": "integer", "refresh": "integer"}
    yield Streaming, {}, {"sinks": "integer"}
    yield Quest, {}, {"page": "integer"}
    yield RepetitionPenalty, {}, {"penalty": "number"}
    yield (
        tune,
        {"decoder": decoder, "prompts": [Request([1])], "new_tokens": 2},
        {"decoder": "other", "prompts": "other", "policy": "other", "gammas": "other", "ratios": "other",
         "new_tokens": "integer", "repeats": "integer", "min_tokens": "integer", "sampling": "other?",
         "on_trial": "callable?"},
    )  # fmt: skip
    yield Tuning.load, {}, {"path": "text"}
    ids, counts = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    greedy = {"drafts": ids, "num_drafts": counts, "target_logits": torch.zeros(1, 3, 5)}
    yield accept_greedy, greedy, dict.fromkeys(greedy, "other")
    sampled = {
        "drafts": ids, "num_drafts": counts, "draft_probs": torch.rand(1, 2, 5),
        "target_probs": torch.rand(1, 3, 5), "u_accept": torch.rand(1, 2), "u_emit": torch.rand(1),
    }  # fmt: skip
    yield accept_sampled, sampled, dict.fromkeys(sampled, "other")
    tokenizer = Tokenizer(DEMO_MODEL)
    yield Tokenizer, {}, {"folder": "text"}
    yield tokenizer.encode, {}, {"text": "text"}
    yield tokenizer.decode, {}, {"token_ids": "other"}
    yield tokenizer.stream(), {}, {"new_ids": "other"}
    yield (
        Qwen3Model.from_pretrained,
        {"folder": DEMO_MODEL},
        {"folder": "other", "dtype": "dtype?", "device": "device"},
    )
    yield (
        Qwen3Model.random,
        {"config": CONFIG},
        {"config": "other", "seed": "integer", "dtype": "other", "device": "device"},
    )
    yield Qwen3Model, {"config": CONFIG, "tensors": {}}, {"config": "other", "tensors": "other"}
    yield Qwen3Config.from_folder, {}, {"folder": "text"}
    yield Qwen3Config.from_dict, {}, {"values": "other"}
    shape = vars(CONFIG)
    yield (
        Qwen3Config,
        shape,
        {**{name: "integer" for name, value in shape.items() if type(value) is int},
         "rms_norm_eps": "number", "rope_theta": "number", "rope_scaling": "other", "dtype": "other",
         "eos_token_ids": "other"},
    )  # fmt: skip
    factors = dict.fromkeys(("factor", "original_max_position", "beta_fast", "beta_slow"), "number")
    yield RopeScaling, {}, {**factors, "attention_factor": "number?", "kind": "other"}


CASES = [(call, base, name, kind) for call, base, kinds in cases() for name, kind in kinds.items()]
NAMES = [f"{getattr(c, '__qualname__', c)}-{name}" for c, _, name, _ in CASES]


@pytest.mark.parametrize(("call", "base", "name", "kind"), CASES, ids=NAMES)
def test_a_wrong_type_is_named(call: Callable[..., Any], base: dict[str, Any], name: str, kind: str) -> None:
    for what, value in VALUES.items():
        if what in TAKES[kind]:
            continue
        own = "rope_type" if name == "kind" else name  # as config.json calls it
        with pytest.raises((TypeError, ValueError), match=f"`{own}` must"):
            call(**{**base, name: value})


def test_float_lengths_are_named() -> None:
    """torch's own refusal lists the whole schema of the op."""
    select = test_arguments.base_select(torch.device("cpu"))
    with pytest.raises(TypeError, match=r"^`k` must be an integer, got 1.5$"):
        vegas_ops.topk_aggregate_logits(**{**select, "k": 1.5})
    with pytest.raises(ValueError, match=r"^`k` must fit 64 bits"):
        vegas_ops.topk_aggregate_logits(**{**select, "k": 2**64})
    verify = test_arguments.base_verify(torch.device("cpu"))
    with pytest.raises(TypeError, match=r"^`max_seqlen_k` must be an integer, got 40.0$"):
        vegas_ops.flash_attn_with_logit_dump(**{**verify, "max_seqlen_k": 40.0})


def test_swapped_arguments_of_the_decoder() -> None:
    with pytest.raises(TypeError, match=r"`model` must .* got PagedKVCache .* \(model, cache\)"):
        SpeculativeDecoder(new_cache(MODEL), MODEL)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([LayerAttention()], "`layer_attention` must have an entry for each of 2 layers, got 1"),
        ([LayerAttention(window=0)] * 2, "`window` must be at least 1, got 0"),
        ([LayerAttention(window=8.0)] * 2, "`window` must be an integer, got 8.0"),  # type: ignore[arg-type]
        ([LayerAttention(softcap=None)] * 2, "`softcap` must be a number, got None"),  # type: ignore[arg-type]
        ([LayerAttention(sinks=[0.0])] * 2, "`sinks` must be a tensor, got"),  # type: ignore[arg-type]
    ],
)
def test_what_a_model_says_of_its_layers(layers: list[LayerAttention], message: str) -> None:
    model = TinyModel()
    model.layer_attention = layers  # type: ignore[attr-defined]
    with pytest.raises((TypeError, ValueError), match=message):
        SpeculativeDecoder(model, new_cache(model))


def test_every_public_name_was_looked_at() -> None:
    """But those that take no arguments, are made by others, or hold what was computed."""
    others = {
        "Accepted", "Attend", "AttentionWithDump", "Full", "LayerAttention", "Model", "ModelFolderError",
        "OutOfPages", "Pillar", "Policy", "Random", "Selection", "Statistics", "TopkOracle", "Trial",
    }  # fmt: skip
    modules = (vegas_ops, models, speculative)
    public = {name for module in modules for name in module.__all__ if callable(getattr(module, name))}
    assert {call.__qualname__.split(".")[0] for call, *_ in CASES} == public - others


def test_a_sequence_of_another_cache() -> None:
    """Its pages would be given to two owners."""
    cache, sequence = new_cache(MODEL), new_cache(MODEL).new_sequence()
    for call in (cache.reserve, cache.truncate):
        with pytest.raises(ValueError, match="`sequence` must be a sequence of this cache"):
            call(sequence, 0)


def test_unknown_policy() -> None:
    for name in (None, 5, "vegas2"):
        with pytest.raises((TypeError, ValueError), match="`policy` must be"):
            POLICIES[name]  # type: ignore[index]
    assert POLICIES["vegas"] is VEGAS


def test_a_path_may_be_text(tmp_path: Path) -> None:
    tuning = Tuning("vegas", 6, 0.07, 256, 100, 1, ())
    tuning.save(str(tmp_path / "tuned.json"))
    assert Tuning.load(str(tmp_path / "tuned.json")) == tuning
