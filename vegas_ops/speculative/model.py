"""What the driver asks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vegas_ops.arguments import check_integer, check_number, check_tensors

Attend = Callable[[int, Tensor, Any, Any], Tensor]
"""attend(layer, q, k, v) -> out: q and out (n, num_heads_q, head_dim), k and v
(n, num_heads_kv, head_dim), after norm and RoPE. It appends k and v to the paged cache, then
attends as the running phase (prompt, verification, draft) demands. It also has a method
`target(layer)`: where that gives a `KVTarget`, a model may write the rows' K and V there itself, and
passes None for both."""


class KVTarget(NamedTuple):
    """Where a layer's new rows belong: k and v (all slots, num_heads_kv, head_dim), slots (n,) int64."""

    k: Tensor
    v: Tensor
    slots: Tensor


class LayerAttention(NamedTuple):
    """What a layer's attention adds to the softmax over all keys.

    window: keys that a row sees, its own among them; None is all. softcap: 0 is off. sinks:
    (num_heads_q,) fp32 or None.
    """

    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and self.softcap == 0 and self.sinks is None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the attention ops."""
        window_size = (-1, -1) if self.window is None else (self.window - 1, 0)
        return {"window_size": window_size, "softcap": self.softcap, "sinks": self.sinks}


class Model(Protocol):
    """A decoder-only model whose attention layers call `attend` once each, in order.

    The driver owns the cache and the attention; everything else is the model's. `n` rows belong to
    several requests; a row's result must not depend on the other rows.

    A model may have `layer_attention`, one `LayerAttention` per layer, for windows, softcap and
    sinks. Layers with a window draft with their window; the others get selections, and a model
    that has no others is decoded plainly.
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


def check_model(model: Any) -> None:
    """TypeError or ValueError, naming what is missing or wrong."""
    needed = (*Model.__annotations__, "forward", "compute_logits")
    missing = [name for name in needed if not hasattr(model, name)]
    if missing:
        raise TypeError(
            f"`model` must have all that vegas_ops.speculative.Model names, got {type(model).__name__} "
            f"without {', '.join(missing)}; the arguments are (model, cache)"
        )
    layers = layer_attention(model)
    if len(layers) != model.num_layers:
        raise ValueError(
            f"`layer_attention` must have an entry for each of {model.num_layers} layers, got {len(layers)}"
        )
    for window, softcap, sinks in layers:
        if window is not None:
            check_integer("window", window, 1)
        check_number("softcap", softcap)
        if sinks is not None:
            check_tensors(sinks=sinks)


def layer_attention(model: Model) -> Sequence[LayerAttention]:
    """The model's, or plain attention in every layer."""
    return getattr(model, "layer_attention", None) or [LayerAttention()] * model.num_layers


def selecting_layers(model: Model) -> list[int]:
    """Layers that see every key: those that drafts select for."""
    return [i for i, layer in enumerate(layer_attention(model)) if layer.window is None]
