"""The plugin's attention on CPUs: prompts too are computed by the ops, which read a plain cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.sample import rejection_sampler

from vegas_ops.integrations.vllm_attention import GuidedBuilder, GuidedImpl


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """A value per request to a value per token."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return expanded.masked_fill_(expanded == replace_from, replace_to)


def repair_sampling() -> None:
    """vLLM's own function leaves its result uninitialised on CPUs unless it holds int64, so that
    temperature, top-k and top-p of drafted tokens would be whatever lay there before."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


class GuidedCPUBuilder(GuidedBuilder, CPUAttentionMetadataBuilder):
    splits_prompts = False


class GuidedCPUImpl(GuidedImpl, CPUAttentionBackendImpl):
    def key_and_value(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        # (pages, heads, page_size, 2 * head_dim)
        k, v = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return k, v

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """vLLM's kernel reads keys in an order of its own; ours in rows."""
        if self.guidance is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        rows = torch.nonzero(slot_mapping >= 0).flatten()
        slots = slot_mapping[rows].long()
        for cache, new in zip(self.key_and_value(kv_cache), (key, value), strict=True):
            page_size = cache.shape[1]
            cache[slots // page_size, slots % page_size] = new[rows]


class GuidedCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[GuidedCPUImpl]:
        return GuidedCPUImpl

    @staticmethod
    def get_builder_cls() -> type[GuidedCPUBuilder]:
        return GuidedCPUBuilder
