"""`generate` for transformers against `generate` of transformers."""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_qwen3 import shared_models
from torch import Tensor
from toy_speculation import p_value

pytest.importorskip("transformers")

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation import LogitsProcessor, StoppingCriteria

from vegas_ops.integrations.transformers import MODEL_TYPES, TransformersModel, generate
from vegas_ops.integrations.transformers_model import check_version
from vegas_ops.session import DEMO_MODEL
from vegas_ops.speculative import PagedKVCache, Request, SpeculativeDecoder, Vegas

WINDOW = 24
SPECULATION = {"gamma": 4, "ratio": 0.07, "min_tokens": 8}
# Layers by turns, or in two halves, where a model type has both kinds.
MIXED = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, dict[str, Any]] = {
    **{
        kind: {"sliding_window": WINDOW, "layer_types": MIXED}
        for kind in ("exaone4", "gemma2", "gemma3_text")
    },
    **{kind: {"sliding_window": WINDOW, "layer_types": MIXED} for kind in ("gpt_oss", "ministral", "olmo3")},
    **{kind: {"sliding_window": None} for kind in ("mistral", "mixtral", "phi3", "starcoder2")},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": MIXED},
}


def random_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose next token depends on the text, and is seldom a close call."""
    values = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False, **CONFIGS.get(kind, {}), **changes,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval().float()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15, generator=generator)
        if "sinks" in name or name.endswith("router.bias"):  # transformers draws them anew every time
            torch.nn.init.normal_(parameter, generator=generator)
    model.lm_head.weight.data *= 4
    return model


def batch_of(*lengths: int, vocab_size: int = 97, seed: int = 1) -> dict[str, Tensor]:
    """Random prompts of these lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab_size, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


BATCH = batch_of(90, 30, 5)


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return random_model("qwen3")


def assert_same(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    """Greedy output as of the model's own `generate`; the other's rows in full."""
    speculation = {key: options.pop(key, value) for key, value in (SPECULATION | {"policy": "vegas"}).items()}
    expected = model.generate(**batch, do_sample=False, **options)
    options["return_dict_in_generate"] = True
    result = generate(model, **batch, do_sample=False, **speculation, **options)
    torch.testing.assert_close(result.sequences, expected, rtol=0, atol=0)
    return result


# Greedy output


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_greedy_output_is_that_of_transformers(kind: str) -> None:
    model = random_model(kind)
    before = model.config._attn_implementation
    result = assert_same(model, BATCH, max_new_tokens=50)
    assert result.sequences[:, 90:].unique().numel() > 8  # texts, not loops
    assert sum(s.drafted for s in result.statistics) > sum(s.accepted for s in result.statistics) > 0
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "policy", ["vegas-lookahead", "streaming", "topk-oracle", Vegas(score="weight")], ids=str
)
def test_every_kind_of_policy(policy: Any) -> None:
    assert_same(random_model("gpt_oss"), BATCH, max_new_tokens=30, policy=policy)


@pytest.mark.parametrize("kind", ["mistral", "starcoder2"])
def test_windows_in_every_layer_are_decoded_plainly(kind: str) -> None:
    result = assert_same(random_model(kind, sliding_window=WINDOW), BATCH, max_new_tokens=30)
    assert all(s.drafted == 0 for s in result.statistics)


def test_windows_longer_than_the_text_are_none() -> None:
    result = assert_same(random_model("mistral", sliding_window=120), BATCH, max_new_tokens=30)
    assert all(s.drafted > 0 for s in result.statistics)


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_scaled_rope(rope: str) -> None:
    scaling = {"rope_type": rope, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    if rope == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert_same(
        random_model("llama", rope_parameters=scaling, max_position_embeddings=256), BATCH, max_new_tokens=30
    )


def test_every_way_to_call(qwen3: Any) -> None:
    ids, options = BATCH["input_ids"][:1], {"max_new_tokens": 20, "do_sample": False}
    expected = qwen3.generate(ids, **options)
    config = transformers.GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=2, pad_token_id=0)
    for output in (
        generate(qwen3, ids, **options),
        generate(qwen3, ids, config, graphs=True),
        generate(qwen3, input_ids=ids, max_length=110, do_sample=False, gamma=0),
        qwen3.generate(ids, custom_generate=generate, gamma=3, policy="streaming", **options),
    ):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert generate(qwen3, ids, max_new_tokens=1, do_sample=False).shape == (1, 91)


REAL = [DEMO_MODEL, *(folder for folder in shared_models() if folder.name != DEMO_MODEL.name)]


@pytest.mark.parametrize("folder", REAL, ids=lambda path: path.name)
def test_real_text(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = tokenizer_of(folder)
    texts = [Path(argparse.__file__).read_text()[:9000], Path(random.__file__).read_text()[:2000]]
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
    batch.pop("token_type_ids", None)
    result = assert_same(model, batch, max_new_tokens=64, policy="vegas-lookahead", gamma=6)
    for statistics in result.statistics:
        assert statistics.tokens_per_iteration > 1.5


def tokenizer_of(folder: Path) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), padding_side="left", pad_token="<|endoftext|>"
    )


def test_prompts_are_computed_in_chunks_of_the_size_given(qwen3: Any) -> None:
    rows: list[int] = []
    hook = qwen3.base_model.register_forward_pre_hook(
        lambda module, arguments, options: rows.append(options["position_ids"].numel()), with_kwargs=True
    )
    options = {"max_new_tokens": 4, "do_sample": False}
    whole = generate(qwen3, **BATCH, **options)
    largest, rows[:] = max(rows), []
    chunked = generate(qwen3, **BATCH, **options, prefill_chunk_size=32)
    hook.remove()
    assert largest == 89 and max(rows) == 32
    torch.testing.assert_close(chunked, whole, rtol=0, atol=0)


# Logits processors


class Favour(LogitsProcessor):
    """A row's own favourite after every token that is a multiple of 3, in place."""

    def __init__(self, favourites: list[int]) -> None:
        self.favourites = torch.tensor(favourites)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores))
        scores[rows, self.favourites] += 40.0 * (input_ids[:, -1] % 3 == 0)
        return scores


def allowed(row: int, ids: Tensor) -> list[int]:
    return list(range(3 + row, 90, 1 + len(ids) % 3))


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 30},
    "min_length": {"min_length": 115},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 8], *([i] for i in range(20, 60))]},
    "sequence_bias": {"sequence_bias": [[[9], 20.0], [[9, 11], -60.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 5, "eos_token_id": None},
    "suppress_tokens": {"suppress_tokens": list(range(20, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 95))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (5, 1.2)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "watermarking_config": {"watermarking_config": transformers.WatermarkingConfig(bias=8.0)},
    "custom": {"logits_processor": [Favour([10, 20, 30])]},
    "several": {"repetition_penalty": 1.2, "min_new_tokens": 30, "logits_processor": [Favour([10, 20, 30])]},
}


def ends_of(model: Any) -> list[int]:
    """Tokens that end the rows of BATCH at different places."""
    output = model.generate(**BATCH, do_sample=False, max_new_tokens=40, eos_token_id=None)
    return [int(output[row, 90 + at]) for row, at in enumerate((20, 11, 5))]


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_are_honoured(qwen3: Any, name: str) -> None:
    options = {k: transformers.LogitsProcessorList(v) if k == "logits_processor" else v
               for k, v in PROCESSORS[name].items()}  # fmt: skip
    options = {"eos_token_id": ends_of(qwen3), "max_new_tokens": 40, **options}
    plain = qwen3.generate(
        **BATCH, do_sample=False, **{k: options[k] for k in ("eos_token_id", "max_new_tokens")}
    )
    result = assert_same(qwen3, BATCH, **options)
    assert result.sequences.shape != plain.shape or not torch.equal(result.sequences, plain)


def test_processors_change_drafts_as_well(qwen3: Any) -> None:
    """Forced by its processor to one text, the model drafts that text."""
    result = generate(
        qwen3, **BATCH, do_sample=False, max_new_tokens=40, return_dict_in_generate=True,
        prefix_allowed_tokens_fn=lambda row, ids: [3 + (len(ids) * 7 + row) % 80], **SPECULATION,
    )  # fmt: skip
    for statistics in result.statistics:
        assert statistics.accepted == statistics.drafted > 0


# Sampling


def exact_pairs(model: Any, ids: Tensor, process: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The joint distribution of the next two tokens, (vocab_size, vocab_size)."""

    def next_token(texts: Tensor) -> Tensor:
        with torch.no_grad():
            return process(texts, model(texts).logits[:, -1].float()).softmax(-1).double()

    first = next_token(ids)[0]
    tokens = torch.arange(len(first))[:, None]
    return first[:, None] * next_token(torch.cat([ids.expand(len(first), -1), tokens], 1))


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"top_k": 5, "temperature": 1.5},
    "top-p, min-p": {"top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
    "typical": {"typical_p": 0.7},
    "penalty": {"repetition_penalty": 1.6, "top_p": 0.9},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_samples_follow_the_model(name: str) -> None:
    """Three tokens, the last two of them drafted or verified in one round: chi-square."""
    model = random_model("llama", vocab_size=12, num_hidden_layers=2, eos_token_id=None)
    model.lm_head.weight.data *= 0.15
    options = {"top_k": 0, **SAMPLING[name]}
    ids = batch_of(40, vocab_size=12)["input_ids"]
    config = transformers.GenerationConfig(do_sample=True, max_new_tokens=3, pad_token_id=0, **options)
    processors = model._get_logits_processor(config, input_ids_seq_length=40, model_kwargs={})
    first_two = exact_pairs(model, ids, processors)
    counts = torch.zeros(12, 12, dtype=torch.float64)
    torch.manual_seed(7)
    copies = 100 if name == "penalty" else 1000
    for _ in range(2000 // copies):
        output = generate(
            model,
            ids,
            config,
            num_return_sequences=copies,
            gamma=2,
            ratio=0.0,
            min_tokens=2,
            policy="streaming",
        )
        assert output.shape == (copies, 43)
        # Given the first token, which the prompt gives, the second is the first of a round.
        for a, b in output[:, 40:42].tolist():
            counts[a, b] += 1
    assert p_value(counts.flatten(), first_two.flatten() * counts.sum()) > 1e-4


def test_the_seed_of_torch_repeats_samples(qwen3: Any) -> None:
    def sample() -> Tensor:
        torch.manual_seed(3)
        return generate(
            qwen3, **BATCH, do_sample=True, max_new_tokens=20, num_return_sequences=2, **SPECULATION
        )

    first = sample()
    torch.testing.assert_close(sample(), first, rtol=0, atol=0)
    assert len({tuple(row.tolist()) for row in first[:, 90:]}) == 6


# The end, and the stream


class AtTokens(StoppingCriteria):
    """Ends row i at tokens[i]."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.tokens


@pytest.mark.parametrize("eos", ["all", "last", None])
@pytest.mark.parametrize("criteria", [True, False])
def test_rows_end_inside_a_block(qwen3: Any, eos: str | None, criteria: bool) -> None:
    ends = ends_of(qwen3)
    options: dict[str, Any] = {"eos_token_id": {"all": ends, "last": ends[2]}.get(eos or "")}
    if criteria:
        options["stopping_criteria"] = transformers.StoppingCriteriaList([AtTokens(ends)])
    result = assert_same(qwen3, BATCH, max_new_tokens=60, **options)
    assert (result.sequences.shape[1] < 150) == (criteria or eos == "all")


def test_no_time_is_one_token(qwen3: Any) -> None:
    assert_same(qwen3, BATCH, max_new_tokens=60, max_time=0.0, eos_token_id=None)


class Stream:
    """Keeps what it is given, in order."""

    def __init__(self) -> None:
        self.pieces: list[list[Any]] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.pieces.append(value.tolist())

    def end(self) -> None:
        self.pieces.append(["end"])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eos", [True, False])
def test_streamers_get_what_transformers_would_give(qwen3: Any, rows: int, eos: bool) -> None:
    batch = {name: value[:rows] for name, value in BATCH.items()}
    ends = ends_of(qwen3)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": ends[2] if eos else None}
    options["stopping_criteria"] = transformers.StoppingCriteriaList([AtTokens(ends[:rows])])
    ours, theirs = Stream(), Stream()
    qwen3.generate(**batch, streamer=theirs, **options)
    generate(qwen3, **batch, streamer=ours, **options, **SPECULATION)
    assert ours.pieces == theirs.pieces


def test_stop_strings_and_a_text_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = tokenizer_of(DEMO_MODEL)
    ids = tokenizer("def add(a, b):\n    return a + b\n\n" * 20, return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 60, "do_sample": False, "tokenizer": tokenizer, "stop_strings": ["return"]}
    expected = model.generate(ids, **options)
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
    output = generate(model, ids, streamer=streamer, **options)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert "return" in capsys.readouterr().out
    options["generation_config"] = transformers.GenerationConfig(stop_strings=options.pop("stop_strings"))
    torch.testing.assert_close(generate(model, ids, **options), expected, rtol=0, atol=0)


# The driver itself


def test_the_driver_serves_a_transformers_model(qwen3: Any) -> None:
    model = TransformersModel(qwen3)
    cache = PagedKVCache(
        num_layers=model.num_layers, num_pages=40, page_size=16, num_heads_kv=model.num_heads_kv,
        head_dim=model.head_dim, dtype=model.dtype,
    )  # fmt: skip
    decoder = SpeculativeDecoder(model, cache)
    prompts = [row[keep.bool()] for row, keep in zip(*BATCH.values(), strict=True)]
    requests = [Request(prompt.tolist(), max_new_tokens=25, **SPECULATION) for prompt in prompts]
    outputs = decoder.generate(requests)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = qwen3.generate(prompt[None], max_new_tokens=25, do_sample=False, eos_token_id=None)
        assert output == expected[0, len(prompt) :].tolist()


# Refusals


def refused(
    change: Callable[[Any], Any] | None = None, kind: str = "qwen3", **options: Any
) -> Callable[[], Any]:
    def call() -> Any:
        model = random_model(kind)
        if change is not None:
            model = change(model) or model
        inputs = {} if {"inputs", "inputs_embeds"} & options.keys() else BATCH
        return generate(model, **{**inputs, "max_new_tokens": 4, **options})

    return call


def with_config(**values: Any) -> Callable[[Any], None]:
    return lambda model: model.config.update(values)


def filled_cache() -> Any:
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(3, 2, 4, 16), torch.zeros(3, 2, 4, 16), 0)
    return cache


def own_code(model: Any) -> None:
    """As remote code may be: a layer that does without the attention interface."""
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (torch.zeros_like(hidden_states), None)


def own_code_at_the_end(model: Any) -> None:
    model.model.layers[-1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states * 0, None)


def with_bias(model: Any) -> None:
    attention = model.model.layers[2].self_attn
    attention.forward = functools.partial(attention.forward, position_bias=torch.ones(1))


def more_values(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj = torch.nn.Linear(64, 64)


def other_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def other_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, arguments, out: out if out.dim() == 2 else 2 * out)


def dynamic_rope() -> Any:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return random_model("llama", rope_parameters=rope)


HOLE = (torch.arange(90) != 40).long()
SYNTH_ID = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (refused(lambda model: torch.nn.Linear(2, 2)), "`model` must be a transformers model"),
    "model type": (refused(with_config(model_type="gpt2")), "`model` must be one of .*got gpt2"),
    "no head": (refused(lambda model: model.set_output_embeddings(None)), "`model` must have a language"),
    "own code": (refused(own_code), "`model` must call transformers' attention interface"),
    "own code at the end": (refused(own_code_at_the_end), "once per layer, 4 times, got 3 calls"),
    "bias": (refused(with_bias), "`model` must not need `position_bias` in its attention, got it in layer 2"),
    "values": (refused(more_values), "`model` must have heads of K and V alike, got"),
    "scale": (refused(other_scale), "the same heads, scale and dtype in every layer, got .* in layer 1"),
    "head": (refused(other_head), "`model` must compute its logits from"),
    "bidirectional": (
        refused(with_config(use_bidirectional_attention=True)),
        "`use_bidirectional_attention` must be False",
    ),
    "rope": (refused(lambda model: dynamic_rope()), "`rope_type` must not be 'dynamic'"),
    "dropout": (refused(lambda model: set_dropout(model)), "model.eval()"),
    "dtype": (refused(lambda model: model.double()), "`model` must be bfloat16 or float16 or float32 on cpu"),
    "devices": (refused(lambda model: setattr(model, "hf_device_map", {"a": 0, "b": 1})), "`device_map`"),
    "no device": (lambda: TransformersModel(random_model("qwen3").to("meta")), "`model` must be on a CPU or"),
    "sharded": (refused(lambda model: setattr(model, "_is_fsdp_managed_module", True)), "must be whole on"),
    "tensor parallel": (refused(lambda model: setattr(model, "_tp_size", 2)), "`tp_size` must be 1"),
    "beams": (refused(num_beams=2), "num_beams"),
    "prompt lookup": (refused(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens"),
    "assistant": (refused(assistant_model=object()), "`assistant_model` must not be given"),
    "scores": (refused(return_dict_in_generate=True, output_scores=True), "`output_scores` must be False"),
    "cache": (refused(past_key_values=filled_cache()), "`past_key_values` must not be given"),
    "empty cache": (refused(past_key_values=transformers.DynamicCache()), "`past_key_values` must not be"),
    "quantized cache": (refused(cache_implementation="offloaded"), "`cache_implementation` must be None"),
    "guidance": (refused(guidance_scale=2.0), "`guidance_scale` must be None"),
    "SynthID": (refused(watermarking_config=SYNTH_ID, do_sample=True), "SynthID"),
    "embeddings": (refused(inputs_embeds=torch.zeros(1, 3, 64)), "`inputs_embeds` must not be given"),
    "mask's shape": (refused(attention_mask=BATCH["attention_mask"][:, 1:]), "`attention_mask` must have"),
    "floats": (refused(inputs=BATCH["input_ids"].float()), "`inputs` must be a .* tensor of token ids"),
    "text": (refused(inputs="Once upon a time"), "`inputs` must be a .* tensor of token ids.*got str"),
    "a row": (refused(inputs=BATCH["input_ids"][0]), r"`inputs` must be a .* got shape \(90,\)"),
    "lists": (refused(inputs=BATCH["input_ids"].tolist()), "`inputs` must be a .* got list"),
    "mask's type": (refused(attention_mask=[1]), "`attention_mask` must be a tensor, got"),
    "positions' type": (refused(position_ids=[1]), "`position_ids` must be a tensor, got"),
    "configuration's type": (refused(generation_config={}), "`generation_config` must be a Gener.* got dict"),
    "processors' type": (refused(logits_processor=len), "`logits_processor` must be a list, got builtin"),
    "a criterion's type": (refused(stopping_criteria=["x"]), "`stopping_criteria` must be callable, got 'x'"),
    "streamer's type": (refused(streamer="x"), "`streamer` must have `put` and `end`, got str"),
    "graphs' type": (refused(graphs="no"), "`graphs` must be True, False or None, got 'no'"),
    "length's type": (refused(max_new_tokens=4.5), "`max_new_tokens` must be an integer, got 4.5"),
    "right padding": (refused(attention_mask=BATCH["attention_mask"].flip(1)), "padding_side = 'left'"),
    "hole": (refused(attention_mask=BATCH["input_ids"] * 0 + HOLE), "`attention_mask` must mask nothing but"),
    "positions": (refused(position_ids=torch.arange(90).expand(3, -1) + 5), "`position_ids` must count"),
    "policy": (refused(policy="best"), "`policy` must be one of vegas, .*got 'best'"),
    "policy's type": (refused(policy=5), "`policy` must be a Policy or the name of one, got 5"),
    "gamma": (refused(gamma=2.5), "`gamma` must be an integer, got 2.5"),
    "min_tokens": (refused(min_tokens=True), "`min_tokens` must be an integer, got True"),
    "ratio": (refused(ratio=2.0), "`ratio` must be in"),
    "ratio's type": (refused(ratio="x"), "`ratio` must be a number, got 'x'"),
    "prompt's length": (
        refused(inputs=torch.full((1, 3000), 5), attention_mask=torch.ones(1, 3000)),
        "`inputs` must be shorter than the model's context of 2048 tokens, got 3000",
    ),
    "length": (refused(max_new_tokens=10**5), "`max_new_tokens` must be at most .* got 100000"),
    "stop strings": (refused(stop_strings=["x"]), "`tokenizer` must be given"),
}  # fmt: skip


def set_dropout(model: Any) -> None:
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_served_is_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_filled_cache_is_refused_on_either_way(qwen3: Any) -> None:
    ids = BATCH["input_ids"]
    with pytest.raises(ValueError, match="must not be given"):
        qwen3.generate(ids, past_key_values=filled_cache(), custom_generate=generate, max_new_tokens=4)


def test_what_transformers_withholds_is_refused(qwen3: Any) -> None:
    ids, options = BATCH["input_ids"][:1], {"max_new_tokens": 4, "custom_generate": generate}
    with pytest.raises(ValueError, match="`streamer` must not be given"):
        qwen3.generate(ids, streamer=Stream(), **options)
    with pytest.raises(ValueError, match="tokenizer"):
        qwen3.generate(ids, stop_strings=["x"], tokenizer=object(), **options)

    streamer = Stream()

    def loop(model: Any, input_ids: Any, **prepared: Any) -> Any:
        return generate(model, input_ids, streamer=streamer, **prepared)

    qwen3.generate(ids, max_new_tokens=4, custom_generate=loop)
    assert streamer.pieces[-1] == ["end"] and len(streamer.pieces) == 5


def test_the_attention_function_serves_generate_alone(qwen3: Any) -> None:
    model = random_model("qwen3")
    model.set_attn_implementation("vegas_ops")
    with pytest.raises(ValueError, match="`attn_implementation` must not be 'vegas_ops'"):
        model(BATCH["input_ids"])


def test_a_failure_leaves_the_model_as_it_was(qwen3: Any) -> None:
    before = qwen3.config._attn_implementation

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.masked_fill(torch.arange(3)[:, None] == 1, -torch.inf)

    with pytest.raises(RuntimeError, match="row 1 of `input_ids` failed"):
        generate(qwen3, **BATCH, max_new_tokens=4, logits_processor=[Nothing()])
    assert qwen3.config._attn_implementation == before
    assert_same(qwen3, BATCH, max_new_tokens=4)


@pytest.mark.parametrize("version", ["4.57.1", "5.5.4", "5.25.0", "6.0.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ImportError, match=f"at least 5.* and below 5.*, got {version}"):
        check_version(version)
