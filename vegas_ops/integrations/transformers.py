"""Self-speculative `generate` for models of Hugging Face transformers.

    from vegas_ops.integrations.transformers import generate

    output = generate(model, **tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=200)

transformers prepares inputs, logits processors and stopping criteria as for its own `generate`; then the
driver of `vegas_ops.speculative` decodes, with its own paged cache, through a registered attention
function. Nothing is patched.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# isort: split
# Its checks of transformers come first.
from vegas_ops.integrations.transformers_model import (
    EXPERTS,
    MODEL_TYPES,
    TransformersModel,
    check_class,
    rope_parameters,
)

# isort: split
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    logits_process,
)
from transformers.generation import utils as generation_utils

from vegas_ops.arguments import check_callable, check_integer, check_kind
from vegas_ops.speculative import (
    POLICIES,
    PagedKVCache,
    Policy,
    Request,
    SamplingParams,
    SpeculativeDecoder,
    Statistics,
)

__all__ = ["MODEL_TYPES", "GenerateOutput", "TransformersModel", "generate"]

PAGE_SIZE = 64  # tokens
PREFILL_CHUNK, GPU_PREFILL_CHUNK = 1024, 8192  # tokens

# Processors that look at the scores alone: one call serves the rows of all requests.
_WITHOUT_HISTORY = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)
# Of them those that CUDA graphs are known to hold.
_IN_GRAPHS = (
    logits_process.MinPLogitsWarper,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
)
# Processors that keep a state from call to call, which drafts would disturb.
_WITH_STATE = {
    logits_process.SynthIDTextWatermarkLogitsProcessor: "`watermarking_config` must not be SynthID's",
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor: "`guidance_scale` must be None",
}
_MODES = (generation_utils.GenerationMode.GREEDY_SEARCH, generation_utils.GenerationMode.SAMPLE)
_MODEL_KWARGS = {"attention_mask", "logits_to_keep", "position_ids", "tokenizer", "use_cache"}


@dataclass
class GenerateOutput(generation_utils.GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`.

    sequences: (batch, length), prompts included. statistics: a `Statistics` per row.
    """

    statistics: list[Statistics] | None = None


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    *,
    streamer: Any = None,
    gamma: int = 6,
    policy: str | Policy = "vegas",
    ratio: float = 0.07,
    min_tokens: int = 256,
    graphs: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`model.generate(...)` by self-speculation: the greedy output is the same (in fp32 on the CPU;
    elsewhere near ties may fall otherwise), sampled output has the same distribution.

    Takes what `model.generate` takes, for greedy decoding and sampling. Works as
    `model.generate(..., custom_generate=generate, gamma=6)` too, but transformers withholds
    `streamer` and the `tokenizer` of `stop_strings` from any such callable: they need a call of this
    function, and are refused otherwise.

    Each row is a request of its own; prompts may differ in length (left padding). Logits processors
    change the probabilities of target and draft alike. They must be functions of their arguments:
    they see the row, its padding included, in its place in a batch whose other rows repeat it.
    Stopping criteria see the same after every emitted token, with scores None.

    Args:
        gamma: drafts per verification; 0 is plain decoding.
        policy: what drafts attend to: a name in `vegas_ops.speculative.POLICIES`, or a `Policy`.
        ratio, min_tokens: of a context of n tokens max(ratio * n, min_tokens), and all newer ones.
        graphs: on a GPU, capture forwards as CUDA graphs and replay them. Default: yes, unless the model
            has experts or a logits processor may wait for the device. On the CPU it has no effect.

    `cache_implementation` may be what model and configuration say of transformers' own caches ("static",
    "hybrid" ...), and changes nothing.

    Returns:
        (batch, length) token ids; a `GenerateOutput` with `return_dict_in_generate=True`. K and V of all
        rows at their full length are allocated at the start, and freed at the end.

    Raises:
        ValueError, TypeError: at the start, naming what is not supported.
    """
    speculation = {
        "streamer": streamer, "gamma": gamma, "policy": policy, "ratio": ratio, "min_tokens": min_tokens,
        "graphs": graphs,
    }  # fmt: skip
    if hasattr(generation_config, "_pad_token_tensor"):  # transformers has prepared the call
        _check_withheld(sys._getframe(1).f_locals, streamer)
        return _decode(
            model, inputs, generation_config, logits_processor, stopping_criteria, **speculation, **kwargs
        )
    check_class(model)
    for name in ("assistant_model", "custom_generate", "past_key_values", "cache", "synced_gpus"):
        if kwargs.get(name) not in (None, False):
            raise ValueError(f"`{name}` must not be given, got {type(kwargs[name]).__name__}")
    kwargs.pop("custom_generate", None)
    _check_types(
        inputs=inputs, generation_config=generation_config, logits_processor=logits_processor,
        stopping_criteria=stopping_criteria, streamer=streamer, graphs=graphs, **kwargs,
    )  # fmt: skip
    asked = model.generation_config if generation_config is None else generation_config
    _check_cache(kwargs.get("cache_implementation", asked.cache_implementation))  # before it is made
    generation_config, stopping_criteria = _with_stop_strings(
        model, generation_config, stopping_criteria, kwargs
    )

    def loop(model: Any, input_ids: Any, **prepared: Any) -> Any:
        return _decode(model, input_ids, **{**prepared, **speculation})

    return model.generate(
        inputs, generation_config, logits_processor, stopping_criteria, streamer=streamer,
        custom_generate=loop, **kwargs,
    )  # fmt: skip


@dataclass(eq=False)
class _Row(Request):
    """A row of the batch; criteria may end it, at `ended` emitted tokens."""

    batch: _Batch | None = None
    index: int = 0
    ended: int | None = field(init=False, default=None)

    def stops(self) -> bool:
        assert self.batch is not None
        return self.batch.stops(self)


class _Batch:
    """The rows of a call: when they end, and what a streamer and the caller get of them.

    As in `model.generate`, rows that ended are padded where there is an end-of-text token, and go on
    to the end of the last one where there is none.
    """

    def __init__(self, input_ids: Tensor, max_new_tokens: int, criteria: Any, pad_id: int | None) -> None:
        self.input_ids, self.rows, self.streamed = input_ids, list[_Row](), 0
        self.history = pad(input_ids, (0, max_new_tokens))
        stops = [c for c in criteria if type(c) is EosTokenCriteria]
        self.stop_ids = {token for c in stops for token in c.eos_token_id.tolist()}
        rest = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        self.criteria = StoppingCriteriaList(rest)
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        self.pad_id = 0 if pad_id is None else pad_id

    def stops(self, row: _Row) -> bool:
        n, i = len(row.output), row.index
        if row.ended is None and row.tokens[-1] in self.stop_ids:
            row.ended = n
        if row.ended is None and self.criteria:
            width = self.input_ids.shape[1] + n
            self.history[i, width - 1] = row.tokens[-1]
            ids = self.history[i, :width].expand(len(self.rows), -1)
            if bool(self.criteria(ids, None)[i]):
                row.ended = n
        if self.pads:
            return row.ended is not None
        length = self.length()
        return length is not None and n >= length

    def length(self) -> int | None:
        """Tokens of the longest output; None as long as more may come."""
        ends = [len(row.output) if row.ended is None and row.finished else row.ended for row in self.rows]
        known = [end for end in ends if end is not None]
        return max(known) if len(known) == len(ends) else None

    def stream(self, streamer: Any) -> None:
        """Tokens that all rows have, position by position."""
        length = self.length()
        while length is None or self.streamed < length:
            t = self.streamed
            if any(t >= len(row.output) and not row.finished for row in self.rows):
                return
            streamer.put(torch.tensor([self.token(row, t) for row in self.rows]))
            self.streamed += 1

    def token(self, row: _Row, t: int) -> int:
        return row.output[t] if t < len(row.output) else self.pad_id

    def sequences(self) -> Tensor:
        length = self.length() or 0
        new = [[self.token(row, t) for t in range(length)] for row in self.rows]
        return torch.cat([self.input_ids, self.input_ids.new_tensor(new)], 1)


def _decode(
    model: Any,
    input_ids: Any,
    generation_config: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    *,
    streamer: Any,
    gamma: int,
    policy: str | Policy,
    ratio: float,
    min_tokens: int,
    graphs: bool | None,
    **model_kwargs: Any,
) -> Any:
    """The loop that transformers calls in place of its own."""
    check_class(model)
    _check_call(generation_config, logits_processor, model_kwargs)
    prompts = _prompts(input_ids, model_kwargs)
    max_length = stopping_criteria.max_length or generation_config.max_length
    max_new_tokens = max_length - input_ids.shape[1]
    _check_length(model.config, max(map(len, prompts)), max_new_tokens)
    batched = all(type(p) in _WITHOUT_HISTORY for p in logits_processor)

    def process(logits: Tensor) -> Tensor:
        return logits_processor(None, logits.to(input_ids.device)).to(logits.device)

    adapter = TransformersModel(
        model, max(map(len, prompts)) + max_new_tokens, process if batched and logits_processor else None
    )
    pad_id = generation_config._pad_token_tensor
    batch = _Batch(input_ids, max_new_tokens, stopping_criteria, None if pad_id is None else int(pad_id))
    sampling = [SamplingParams()] * len(prompts)
    if generation_config.do_sample:
        seeds = torch.randint(2**62, (len(prompts),)).tolist()
        sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    for i, prompt in enumerate(prompts):
        row = _Row(
            prompt,
            sampling=sampling[i],
            max_new_tokens=max_new_tokens,
            gamma=gamma,
            policy=_policy(policy),
            ratio=ratio,
            min_tokens=min_tokens,
            logits_processor=None if batched else _row_processor(logits_processor, input_ids, i, len(prompt)),
            share_prefix_with=batch.rows[-1] if i and prompt == prompts[i - 1] else None,
            batch=batch,
            index=i,
        )
        batch.rows.append(row)
    cache = PagedKVCache(
        num_layers=adapter.num_layers,
        num_pages=sum(-(-(len(prompt) + max_new_tokens) // PAGE_SIZE) for prompt in prompts),
        page_size=PAGE_SIZE,
        num_heads_kv=adapter.num_heads_kv,
        head_dim=adapter.head_dim,
        dtype=adapter.dtype,
        device=adapter.device,
    )
    chunk = PREFILL_CHUNK if adapter.device.type == "cpu" else GPU_PREFILL_CHUNK
    chunk = getattr(generation_config, "prefill_chunk_size", None) or chunk
    if graphs is None:
        graphs = model.config.model_type not in EXPERTS and all(
            type(p) in _IN_GRAPHS for p in logits_processor
        )
    decoder = SpeculativeDecoder(adapter, cache, prefill_chunk=chunk, graphs=graphs)
    for row in batch.rows:
        decoder.add(row)
    while decoder.waiting or decoder.running:
        decoder.step()
        failed = next((i for i, row in enumerate(batch.rows) if row.finish_reason == "error"), None)
        if failed is not None:
            raise RuntimeError(f"row {failed} of `input_ids` failed: {batch.rows[failed].error}")
        if streamer is not None:
            batch.stream(streamer)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return batch.sequences()
    return GenerateOutput(sequences=batch.sequences(), statistics=[row.statistics for row in batch.rows])


def _row_processor(
    processors: Any, input_ids: Tensor, i: int, length: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The processors for row i, in the driver's form."""
    batch, padding = input_ids.shape[0], input_ids[i, : input_ids.shape[1] - length]

    def process(history: Tensor, logits: Tensor) -> Tensor:
        ids = torch.cat([padding, history.to(padding.device)]).expand(batch, -1)
        scores = logits.to(padding.device).repeat(batch, 1)
        return processors(ids, scores)[i].to(logits.device)

    return process


def _check_withheld(caller: dict[str, Any], streamer: Any) -> None:
    """What `model.generate` was given but keeps from a callable: whoever reads the stream would wait
    for ever."""
    for name, own in (("streamer", streamer), ("assistant_model", None)):
        if own is None and caller.get(name) is not None:
            raise ValueError(
                f"`{name}` must not be given to `model.generate` with `custom_generate`, which does not get "
                "it; call vegas_ops.integrations.transformers.generate (a streamer may be given there)"
            )


def _with_stop_strings(model: Any, config: Any, criteria: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Makes a criterion of `stop_strings`: transformers withholds its tokenizer."""
    strings = kwargs.pop("stop_strings", None)
    source = model.generation_config if config is None else config
    if strings is None and source.stop_strings is not None:
        config = copy.deepcopy(source)
        strings, config.stop_strings = config.stop_strings, None
    if strings is None:
        return config, criteria
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        raise ValueError("`tokenizer` must be given with `stop_strings`, got None")
    return config, StoppingCriteriaList([*(criteria or ()), StopStringCriteria(tokenizer, strings)])


def _prompts(input_ids: Any, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """Token ids of every row without its padding."""
    _check_ids("input_ids", input_ids)
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` must have the shape {tuple(input_ids.shape)} of `input_ids`, "
            f"got {tuple(mask.shape)}"
        )
    mask = mask.to(input_ids.device) != 0
    if bool((mask[:, 1:] < mask[:, :-1]).any()) or not bool(mask[:, -1:].all()) or not input_ids.shape[1]:
        raise ValueError(
            "`attention_mask` must mask nothing but padding on the left, and leave a token in every row; "
            "set `tokenizer.padding_side = 'left'`"
        )
    if positions is not None:
        count = mask.cumsum(1) - 1
        if bool((positions.to(count.device).expand_as(count) != count)[mask].any()):
            raise ValueError("`position_ids` must count the tokens of each row from 0, or be left out")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask, strict=True)]


def _check_types(**arguments: Any) -> None:
    """Before transformers looks at them, which fails on other types somewhere inside."""
    for name, value in arguments.items():
        if value is None:
            continue
        if name in ("inputs", "input_ids"):
            _check_ids(name, value)
        elif name in ("attention_mask", "position_ids"):
            check_kind(name, value, Tensor, "a tensor")
        elif name == "generation_config":
            check_kind(name, value, GenerationConfig, "a GenerationConfig")
        elif name in ("logits_processor", "stopping_criteria"):
            check_kind(name, value, (list, tuple), "a list")
            for part in value:
                check_callable(name, part)
        elif name in ("max_new_tokens", "max_length"):
            check_integer(name, value, 0)
        elif name == "graphs":
            check_kind(name, value, bool, "True, False or None")
        elif name == "streamer" and not (hasattr(value, "put") and hasattr(value, "end")):
            raise TypeError(f"`streamer` must have `put` and `end`, got {type(value).__name__}")


def _check_ids(name: str, ids: Any) -> None:
    if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        return
    got = f"shape {tuple(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
    raise (ValueError if isinstance(ids, Tensor) else TypeError)(
        f"`{name}` must be a (batch, length) tensor of token ids, such as "
        f'tokenizer(text, return_tensors="pt") holds, got {got}'
    )


def _check_call(config: Any, processors: Any, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode(None)
    if mode not in _MODES:
        raise ValueError(
            f"`generation_config` must ask for greedy decoding or sampling, got {mode.value}; "
            "num_beams, penalty_alpha, dola_layers and prompt_lookup_num_tokens must be off"
        )
    for name in ("output_attentions", "output_hidden_states", "output_logits", "output_scores"):
        if getattr(config, name, None):
            raise ValueError(f"`{name}` must be False, got True: rows are verified by blocks")
    _check_cache(config.cache_implementation)
    for processor in processors:
        for kind, message in _WITH_STATE.items():
            if isinstance(processor, kind):
                raise ValueError(f"{message}, got {type(processor).__name__}, which keeps a state")
    for name, value in model_kwargs.items():
        if name in ("past_key_values", "cache"):
            # transformers has made an empty one where none was given.
            if value is not None and (value.get_seq_length() or getattr(value, "_is_user_defined", False)):
                raise ValueError(f"`{name}` must not be given: the cache is vegas_ops' own")
        elif name not in _MODEL_KWARGS and value is not None and value is not False:
            raise ValueError(f"`{name}` must not be given, got {type(value).__name__}: it would not count")


def _check_cache(implementation: Any) -> None:
    if str(implementation or "").startswith(("quantized", "offloaded")):
        raise ValueError(
            f"`cache_implementation` must be None, got {implementation!r}: the cache is vegas_ops' own"
        )


def _check_length(config: Any, prompt: int, max_new_tokens: int) -> None:
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        return
    for rope in rope_parameters(getattr(config, "rope_parameters", None)):  # longer by YaRN, for one
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        context = max(context, int((rope.get("factor") or 1) * original))
    if prompt >= context:
        raise ValueError(
            f"`inputs` must be shorter than the model's context of {context} tokens, got {prompt}"
        )
    if prompt + max_new_tokens > context:
        raise ValueError(
            f"`max_new_tokens` must be at most {context - prompt}, what the model's context of "
            f"{context} tokens leaves behind a prompt of {prompt}, got {max_new_tokens}"
        )


def _policy(policy: str | Policy) -> Policy:
    if isinstance(policy, Policy):
        return policy
    check_kind("policy", policy, str, "a Policy or the name of one")
    return POLICIES[policy]
