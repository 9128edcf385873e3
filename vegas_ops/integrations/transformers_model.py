"""The model of the transformers adapter: any of its decoders, as the driver wants a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import transformers
    from packaging.version import Version
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.generation import utils as generation_utils
except ImportError as error:
    raise ImportError(
        f"vegas_ops.integrations.transformers: `pip install 'vegas_ops[transformers]'`: {error}"
    ) from error

from vegas_ops.arguments import check_callable, check_integer
from vegas_ops.speculative import Attend, LayerAttention

# Minor releases change the internals of `generate`: the range is what the tests have run with.
MIN_VERSION, MAX_VERSION = Version("5.6"), Version("5.25")


def check_version(version: str) -> None:
    if not MIN_VERSION <= Version(version) < MAX_VERSION:
        raise ImportError(
            f"vegas_ops.integrations.transformers: transformers must be at least {MIN_VERSION} and below "
            f"{MAX_VERSION}, got {version}; `pip install 'vegas_ops[transformers]'` finds one"
        )


check_version(transformers.__version__)

# `config.model_type` of the decoders that the tests compare with their own `generate`.
MODEL_TYPES = (
    "arcee", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe",
    "gpt_oss", "granite", "granitemoe", "helium", "llama", "minimax_m2", "ministral", "mistral", "mixtral",
    "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
# Of them those with experts: their forwards may wait for the device, which no CUDA graph can hold.
EXPERTS = (
    "glm4_moe", "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
_ATTENTION = "vegas_ops"
_CALLS: ContextVar[_Calls | None] = ContextVar("_CALLS", default=None)
# What models hand to any attention function beside what `_Layer` holds, without a meaning for this one.
_WITHOUT_MEANING = {
    "cache_position", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip


class TransformersModel:
    """A transformers model as `vegas_ops.speculative.SpeculativeDecoder` wants it.

    Runs one token first, to learn what every layer's attention is, and that it can be replaced; raises
    ValueError or TypeError, naming what stands in the way. The model's own attention implementation
    is in force again after every forward.

    max_position: tokens of the longest text; default: the model's limit. A layer whose window is no
    shorter counts as one without. processor: applied to logits (n, vocab_size) of any rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_position: int | None = None,
        processor: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_class(model)
        if max_position is not None:
            check_integer("max_position", max_position, 1)
        check_callable("processor", processor)
        _check_model(model)
        self.model = model
        self.device = model.device
        self.max_position = max_position or model.config.max_position_embeddings
        self._processor: Callable[[Tensor], Tensor] | None = None
        self.vocab_size, layers = self._probe()
        self.num_layers = len(layers)
        self.num_heads_q, self.num_heads_kv, self.head_dim = layers[0].shape
        self.dtype, self.softmax_scale = layers[0].dtype, layers[0].scale
        self.layer_attention = [
            LayerAttention(
                None if layer.window is None or layer.window >= self.max_position else layer.window,
                layer.softcap,
                layer.sinks,
            )
            for layer in layers
        ]
        self._processor = processor

    @torch.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, as `vegas_ops.speculative.Model` says."""
        return self._run(self.model.base_model, token_ids, positions, _Calls(attend)).last_hidden_state[0]

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(n, hidden) -> (n, vocab_size) fp32, processed."""
        logits = self.model.get_output_embeddings()(hidden)
        logits = logits / (getattr(self.model.config, "logits_scaling", None) or 1)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits.float() if self._processor is None else self._processor(logits.float())

    def _run(self, module: Any, token_ids: Tensor, positions: Tensor, calls: _Calls) -> Any:
        with _attention_of(self.model, calls):
            result = module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True
            )
        layers = self.model.config.num_hidden_layers
        if calls.count != layers:
            raise ValueError(
                f"`model` must call transformers' attention interface once per layer, {layers} times, got "
                f"{calls.count} calls (has it code of its own, or does another thread run it?)"
            )
        return result

    def _probe(self) -> tuple[int, list[_Layer]]:
        """Vocabulary size, and what the layers' attention is, from one token through the whole model."""
        hidden: list[Tensor] = []
        hook = self.model.base_model.register_forward_hook(
            lambda module, arguments, result: hidden.append(result.last_hidden_state[0])
        )
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        probe = _Probe()
        try:
            with torch.no_grad():
                logits = self._run(self.model, zero, zero, probe).logits[0]
        finally:
            hook.remove()
        name = type(self.model).__name__
        if not torch.allclose(logits.float(), self.compute_logits(hidden[0]), 1e-3, 1e-3, equal_nan=True):
            raise ValueError(
                f"`model` must compute its logits from the hidden state by its head alone, got {name}"
            )
        first = probe.layers[0]
        for i, layer in enumerate(probe.layers):
            if (layer.shape, layer.scale, layer.dtype) != (first.shape, first.scale, first.dtype):
                raise ValueError(
                    f"`model` must have the same heads, scale and dtype in every layer, got "
                    f"{layer.shape, layer.scale, layer.dtype} in layer {i} and "
                    f"{first.shape, first.scale, first.dtype} in layer 0 of {name}"
                )
        dtypes = [torch.bfloat16, torch.float16] + [torch.float32] * (self.device.type == "cpu")
        if first.dtype not in dtypes:
            known = " or ".join(str(dtype)[6:] for dtype in dtypes)
            raise ValueError(
                f"`model` must be {known} on {self.device.type}, got {first.dtype}; "
                "load it with `dtype=torch.bfloat16`"
            )
        return logits.shape[-1], probe.layers


@dataclass
class _Layer:
    """shape: num_heads_q, num_heads_kv, head_dim. The rest as in `LayerAttention`."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float
    sinks: Tensor | None


class _Calls:
    """The attention calls of one forward, handed on to `attend`."""

    def __init__(self, attend: Attend) -> None:
        self.attend, self.count = attend, 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.count += 1
        return self.attend(layer, q, k, v)


class _Probe(_Calls):
    """Attention of a single token, which says what every layer asked for."""

    def __init__(self) -> None:
        super().__init__(lambda layer, q, k, v: v.repeat_interleave(q.shape[1] // v.shape[1], 1))
        self.layers: list[_Layer] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if layer != self.count:
            raise ValueError(
                "`model` must call transformers' attention interface in every layer, in order, got a call of "
                f"layer {layer} in place {self.count}"
            )
        if k.shape != v.shape:
            raise ValueError(f"`model` must have heads of K and V alike, got {k.shape[1:]} and {v.shape[1:]}")
        if options.pop("dropout", 0.0):
            raise ValueError("`model` must run without dropout: call `model.eval()`")
        self.layers.append(
            _Layer(
                shape=(q.shape[1], k.shape[1], q.shape[2]),
                dtype=q.dtype,
                scale=float(options.pop("scaling", None) or q.shape[2] ** -0.5),
                window=options.pop("sliding_window", None),
                softcap=float(options.pop("softcap", None) or 0.0),
                sinks=_fp32(options.pop("s_aux", None)),
            )
        )
        for name, value in options.items():
            if value is not None and name not in _WITHOUT_MEANING:
                raise ValueError(f"`model` must not need `{name}` in its attention, got it in layer {layer}")
        return super().__call__(layer, q, k, v)


def _fp32(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.detach().float()


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """In the form of `transformers.AttentionInterface`, with all rows of a forward as one sequence."""
    calls = _CALLS.get()
    if calls is None:
        raise ValueError(
            f"`attn_implementation` must not be {_ATTENTION!r}: load the model with another, and call "
            "vegas_ops.integrations.transformers.generate"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return calls(module.layer_idx, q, k, v, attention_mask=attention_mask, **options)[None], None


AttentionInterface.register(_ATTENTION, _attention)


@contextmanager
def _attention_of(model: Any, calls: _Calls) -> Iterator[None]:
    """Inside, the model makes no mask, and its layers call `_attention`, which hands on to `calls`."""
    before = model.config._attn_implementation
    model.config._attn_implementation = _ATTENTION
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)
        model.config._attn_implementation = before


def check_class(model: Any) -> None:
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generation_config"):
        raise TypeError(f"`model` must be a transformers model that generates, got {type(model).__name__}")


def _check_model(model: Any) -> None:
    config, name = model.config, type(model).__name__
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"`model` must be one of {', '.join(MODEL_TYPES)}, got {config.model_type} ({name}); "
            "call its own `generate`"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"`model` must have a language modelling head, got {name}; load a ForCausalLM class")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError("`use_bidirectional_attention` must be False, got True: drafts see the past alone")
    for rope in rope_parameters(getattr(config, "rope_parameters", None)):
        if (kind := rope["rope_type"]) in ("dynamic", "longrope"):
            raise ValueError(
                f"`rope_type` must not be {kind!r}, whose frequencies depend on the whole batch; "
                "use 'yarn' or 'linear', or the model's own `generate`"
            )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(f"`device_map` must name one device, got {sorted(map(str, devices))}")
    if model.device.type not in ("cpu", "cuda"):
        raise ValueError(f"`model` must be on a CPU or CUDA device, got {model.device}")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError(f"`tp_size` must be 1, got {model._tp_size}: use vLLM for tensor parallelism")
    if generation_utils.is_deepspeed_zero3_enabled() or generation_utils.is_fsdp_managed_module(model):
        raise ValueError("`model` must be whole on one device, got one that DeepSpeed ZeRO-3 or FSDP shards")


def rope_parameters(parameters: Any) -> Iterator[dict[str, Any]]:
    """The sets of parameters in a config: one, or one for each type of layer."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters
        for value in parameters.values():
            yield from rope_parameters(value)
