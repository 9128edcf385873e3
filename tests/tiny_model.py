"""Random models for tests of the driver, small enough to decode hundreds of texts in seconds."""

from __future__ import annotations

import torch
from torch import Tensor

from vegas_ops.speculative import Attend, PagedKVCache


class TinyModel:
    """A random transformer whose next token depends on the whole text.

    Linear layers are taken in fp64 and rounded once, so that a row's result does not depend on how
    many rows go with it: what remains is the attention of the ops.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        num_layers: int = 2,
        num_heads_q: int = 4,
        num_heads_kv: int = 2,
        head_dim: int = 16,
        max_position: int = 512,
        temperature: float = 1.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.vocab_size, self.num_layers, self.max_position = vocab_size, num_layers, max_position
        self.num_heads_q, self.num_heads_kv, self.head_dim = num_heads_q, num_heads_kv, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        self.softmax_scale = head_dim**-0.5
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int, scale: float) -> Tensor:
            w = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            return (w * scale * rows**-0.5).to(device)

        hidden = 32
        heads = num_heads_q + 2 * num_heads_kv
        self.embed = weight(vocab_size, hidden, vocab_size**0.5)
        self.place = weight(max_position, hidden, 0.5 * max_position**0.5)
        self.qkv = [weight(hidden, heads * head_dim, 2.0) for _ in range(num_layers)]
        self.out = [weight(num_heads_q * head_dim, hidden, 1.0) for _ in range(num_layers)]
        self.head = weight(hidden, vocab_size, 3.0 / temperature)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed[token_ids] + self.place[positions]
        n, q, kv = x.shape[0], self.num_heads_q, self.num_heads_kv
        for layer in range(self.num_layers):
            heads = (_norm(x) @ self.qkv[layer]).to(self.dtype).view(n, q + 2 * kv, self.head_dim)
            out = attend(layer, heads[:, :q], heads[:, q : q + kv], heads[:, q + kv :])
            x = x + out.reshape(n, -1).double() @ self.out[layer]
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return (_norm(hidden) @ self.head).float()


def _norm(x: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).rsqrt()


def new_cache(
    model: TinyModel, num_tokens: int = 4096, page_size: int = 16, **options: object
) -> PagedKVCache:
    return PagedKVCache(
        num_layers=model.num_layers,
        num_pages=-(-num_tokens // page_size),
        page_size=page_size,
        num_heads_kv=model.num_heads_kv,
        head_dim=model.head_dim,
        device=model.device,
        **{"dtype": model.dtype, "max_length": model.max_position, **options},  # type: ignore[arg-type]
    )
