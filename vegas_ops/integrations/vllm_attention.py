"""Attention of vLLM's layers: full and dumping in verifications, over the selection in drafts.

Mixins over vLLM's own backends, which they leave as they are for layers without a `Guidance`.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vegas_ops.integrations.vllm import KEY, check_config, options_of
from vegas_ops.integrations.vllm_guidance import Guidance, Shape, Verification

# For the type checker the mixins' base, at run time a backend's class behind them.
if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl as _Impl
    from vllm.v1.attention.backend import AttentionMetadataBuilder as _Builder
else:
    _Impl = _Builder = object

BACKENDS = {
    "CPU_ATTN": "vegas_ops.integrations.vllm_cpu.GuidedCPUBackend",
    "FLASH_ATTN": "vegas_ops.integrations.vllm_cuda.GuidedFlashAttentionBackend",
    "TRITON_ATTN": "vegas_ops.integrations.vllm_cuda.GuidedTritonBackend",
}


def register_backends() -> None:
    """Puts our backends in the places of those that they build on, in this process."""
    for name, path in BACKENDS.items():
        register_backend(AttentionBackendEnum[name], path)
    _cached_get_attn_backend.cache_clear()


@dataclass
class VerificationMetadata:
    """Of a forward of the target; prompts: vLLM's own metadata of the requests behind the first
    `verification.decodes`."""

    verification: Verification
    num_actual_tokens: int
    prompts: Any = None


@dataclass
class DraftMetadata:
    """Of a draft step: one row per request; rows: as of `Guidance.draft`."""

    num_actual_tokens: int
    seq_lens: Tensor
    block_table: Tensor
    rows: Tensor | None = None


def attention_layers(vllm_config: Any, names: list[str] | None = None) -> dict[str, Any]:
    """Layers that have a share of the cache, by name."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    return {name: x for name, x in layers.items() if x.get_kv_cache_spec(vllm_config) is not None}


def attach(vllm_config: Any, device: torch.device) -> tuple[Guidance, list[str]]:
    """Makes the loaded model's layers dump and draft; the names of the layers.

    Raises ValueError where a layer's attention is not what the ops compute.
    """
    options = check_config(vllm_config)
    layers = attention_layers(vllm_config)
    if not layers:
        raise ValueError("vegas_ops: `model` must have attention layers with a cache, got none")
    kinds = [_kind(name, layer) for name, layer in layers.items()]
    for name, kind in zip(layers, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                "vegas_ops: `model` must have the same heads, scale and dtype in every layer, got "
                f"{kind} in {name} and {kinds[0]} before; serve it without {KEY!r} in `additional_config`"
            )
    heads_q, heads_kv, head_dim, scale, dtype = kinds[0]
    guidance = Guidance(
        Shape(
            layers=len(layers),
            num_heads_q=heads_q,
            num_heads_kv=heads_kv,
            head_dim=head_dim,
            softmax_scale=scale,
            gamma=vllm_config.speculative_config.num_speculative_tokens,
            max_batch=vllm_config.scheduler_config.max_num_seqs,
            max_seqlen_k=vllm_config.model_config.max_model_len,
        ),
        options,
        dtype=dtype,
        device=device,
        all_reduce=tensor_model_parallel_all_reduce
        if vllm_config.parallel_config.tensor_parallel_size > 1
        else None,
    )
    for i, layer in enumerate(layers.values()):
        layer.impl.guidance, layer.impl.guided_layer = guidance, i
    return guidance, list(layers)


def _kind(name: str, layer: Any) -> tuple[int, int, int, float, torch.dtype]:
    impl = layer.impl
    if not isinstance(impl, GuidedImpl):
        raise ValueError(
            f"vegas_ops: the attention backend must be one of {', '.join(BACKENDS)}, got "
            f"{layer.get_attn_backend().get_name()} in {name}; set `--attention-backend`"
        )
    window = getattr(impl, "sliding_window", None)
    window = window[0] if isinstance(window, tuple) else window
    for what, given in (
        ("a sliding window", window is not None and window >= 0),
        ("ALiBi slopes", getattr(impl, "alibi_slopes", None) is not None),
        ("softcap", bool(getattr(impl, "logits_soft_cap", 0) or 0)),
        ("attention sinks", getattr(impl, "sinks", None) is not None),
        ("another layer's cache", getattr(impl, "kv_sharing_target_layer_name", None) is not None),
        ("attention other than a decoder's", impl.attn_type != "decoder"),
    ):
        if given:
            raise ValueError(
                f"vegas_ops: `model` must have plain causal attention in every layer, got {what} in {name}; "
                f"serve it without {KEY!r} in `additional_config`"
            )
    dtype = layer.kv_cache_torch_dtype
    return impl.num_heads, impl.num_kv_heads, impl.head_size, float(impl.scale), dtype


class GuidedBuilder(_Builder):
    """Builds our metadata for layers with a guidance; of prompts, vLLM's own beside it."""

    splits_prompts = True  # whether prompts go to vLLM's own kernel

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.guidance: Guidance | None = None
        if options_of(vllm_config) is not None:
            layers = attention_layers(vllm_config, layer_names)
            self.guidance = next(iter(layers.values())).impl.guidance
        if self.guidance is not None and self.splits_prompts:
            # The runner then puts verifications before prompts.
            self.reorder_batch_threshold = self.guidance.shape.gamma + 1
            self.supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if options_of(vllm_config) is None:
            return support
        # A batch with prompts is split on the host.
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda s: s.value)

    def use_cascade_attention(self, *arguments: Any, **options: Any) -> bool:
        return self.guidance is None and super().use_cascade_attention(*arguments, **options)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        common = common_attn_metadata
        if self.guidance is None:
            return super().build(common_prefix_len, common, fast_build)
        n, starts = common.num_reqs, common.query_start_loc_cpu
        decodes, last_rows, prompts = n, None, None
        if self.splits_prompts and common.max_query_len > self.guidance.shape.gamma + 1:
            longer = (starts[1 : n + 1] - starts[:n]) > self.guidance.shape.gamma + 1
            decodes = int(longer.int().argmax())
            last_rows = (common.query_start_loc[decodes + 1 : n + 1] - 1).long()
            prompts = super().build(0, _from_request(common, decodes), fast_build)
        rows = int(starts[decodes])
        verification = Verification(
            batch=n,
            decodes=decodes,
            rows=rows,
            max_rows=common.max_query_len if decodes == n else self.guidance.shape.gamma + 1,
            max_keys=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            page_size=self.kv_cache_spec.block_size,
            last_rows=last_rows,
        )
        self.guidance.begin(verification)
        return VerificationMetadata(verification, common.num_actual_tokens, prompts)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        if self.guidance is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        # A replay meets any length.
        longest = replace(common_attn_metadata, max_seq_len=self.guidance.shape.max_seqlen_k)
        return self.build(0, longest)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> Any:
        common = common_attn_metadata
        if self.guidance is None:
            return super().build_for_drafting(common, draft_index)
        return DraftMetadata(common.num_actual_tokens, common.seq_lens, common.block_table_tensor)


def _from_request(common: CommonAttentionMetadata, first: int) -> CommonAttentionMetadata:
    """The requests from the `first` on, alone."""
    if first == 0:
        return common
    starts, n = common.query_start_loc_cpu, common.num_reqs
    row = int(starts[first])
    lengths = (starts[first + 1 : n + 1] - starts[first:n]).max()

    return restricted(
        common,
        slice(first, n),
        query_start_loc=common.query_start_loc[first : n + 1] - common.query_start_loc[first],
        query_start_loc_cpu=starts[first : n + 1] - row,
        seq_lens=common.seq_lens[first:n],
        num_reqs=n - first,
        num_actual_tokens=int(starts[n]) - row,
        max_query_len=int(lengths),
        block_table_tensor=common.block_table_tensor[first:n],
        slot_mapping=common.slot_mapping[row : int(starts[n])],
    )


# Of the optional fields those that plain causal attention may read, one entry per request; the
# rest, what vLLM keeps to save itself a computation, is left out.
_PER_REQUEST = ("is_prefilling", "seq_lens_cpu_upper_bound", "_seq_lens_cpu", "_num_computed_tokens_cpu")


def restricted(
    common: CommonAttentionMetadata, requests: slice | None, **changes: Any
) -> CommonAttentionMetadata:
    """`common` with changes, and its optional fields cut to the requests, or without them (None)."""
    required = {"query_start_loc", "query_start_loc_cpu", "seq_lens", "causal", *changes}
    for field in fields(common):
        if field.name in required or field.default is MISSING:
            continue
        value = getattr(common, field.name)
        if field.name not in _PER_REQUEST or requests is None or value is None:
            changes[field.name] = field.default
        else:
            changes[field.name] = value[requests]
    return replace(common, **changes)


class GuidedImpl(_Impl):
    """A layer's attention; guidance is set once the model is loaded."""

    guidance: Guidance | None = None
    guided_layer = -1

    def key_and_value(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a layer's cache, (pages, page_size, heads, head_dim) each, as views."""
        raise NotImplementedError

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        m = attn_metadata
        if not isinstance(m, (VerificationMetadata, DraftMetadata)):
            return super().forward(
                layer, query, key, value, kv_cache, m, output, output_scale, output_block_scale
            )
        assert self.guidance is not None
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("vegas_ops: attention must not quantise its output: switch that fusion off")
        q, out = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        k, v = self.key_and_value(kv_cache)
        if isinstance(m, DraftMetadata):
            n = m.num_actual_tokens
            self.guidance.draft(self.guided_layer, q[:n], k, v, out[:n], m.block_table, m.seq_lens, m.rows)
            return output
        if m.prompts is not None:
            rows = slice(m.verification.rows, m.num_actual_tokens)
            super().forward(layer, query[rows], key[rows], value[rows], kv_cache, m.prompts, output[rows])
        self.guidance.verify(self.guided_layer, m.verification, q, k, v, out)
        return output
