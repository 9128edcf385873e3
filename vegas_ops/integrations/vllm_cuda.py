"""The plugin's attention on GPUs, over FlashAttention or Triton, which compute the prompts."""

from __future__ import annotations

from torch import Tensor
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vegas_ops.integrations.vllm_attention import GuidedBuilder, GuidedImpl


class _PagedImpl(GuidedImpl):
    def key_and_value(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        if kv_cache.dim() == 5:  # (pages, 2, page_size, heads, head_dim), up to 0.25
            k, v = kv_cache.unbind(1)
        else:  # (pages, heads, page_size, 2 * head_dim)
            k, v = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return k, v


class GuidedFlashAttentionBuilder(GuidedBuilder, FlashAttentionMetadataBuilder):
    pass


class GuidedFlashAttentionImpl(_PagedImpl, FlashAttentionImpl):
    pass


class GuidedFlashAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[GuidedFlashAttentionImpl]:
        return GuidedFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[GuidedFlashAttentionBuilder]:
        return GuidedFlashAttentionBuilder


class GuidedTritonBuilder(GuidedBuilder, TritonAttentionMetadataBuilder):
    pass


class GuidedTritonImpl(_PagedImpl, TritonAttentionImpl):
    pass


class GuidedTritonBackend(TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[GuidedTritonImpl]:
        return GuidedTritonImpl

    @staticmethod
    def get_builder_cls() -> type[GuidedTritonBuilder]:
        return GuidedTritonBuilder
