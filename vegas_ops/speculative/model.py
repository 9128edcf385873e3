"""What the driver asks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q, k, v) -> out: q and out (n, num_heads_q, head_dim), k and v
(n, num_heads_kv, head_dim), after norm and RoPE. It appends k and v to the paged cache, then
attends as the running phase (prompt, verification, draft) demands."""


class Model(Protocol):
    """A decoder-only model whose attention layers call `attend` once each, in order.

    The driver owns the cache and the attention; everything else is the model's. `n` rows belong to
    several requests; a row's result must not depend on the other rows.
    """

    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    vocab_size: int
    max_position: int  # positions are below it: the context limit
    dtype: torch.dtype
    device: torch.device
    softmax_scale: float

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids and positions (n,) int64 -> hidden (n, hidden)."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden (n, hidden) -> logits (n, vocab_size) fp32."""
        ...
