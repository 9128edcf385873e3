"""Attention of a few query rows over a long cache in plain torch: what our kernels are compared with.

All formulations are favoured: K and V lie contiguous per KV head, (batch, num_heads_kv, seqlen, head_dim),
with nothing gathered from pages, all requests have one length, and masks are made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Formulation = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def pack_rows(q: Tensor, num_heads_kv: int) -> Tensor:
    """(batch, rows, num_heads_q, d) to (batch, num_heads_kv, rows * group, d): one tile per KV head."""
    batch, rows, num_heads_q, d = q.shape
    group = num_heads_q // num_heads_kv
    packed = q.view(batch, rows, num_heads_kv, group, d).transpose(1, 2)
    return packed.reshape(batch, num_heads_kv, rows * group, d)


def causal_bias(rows: int, group: int, seqlen: int, dtype: torch.dtype) -> Tensor | None:
    """(rows * group, seqlen) additive mask of packed rows, aligned to the bottom right; None for one row."""
    if rows == 1:
        return None
    position = torch.arange(seqlen - rows, seqlen).repeat_interleave(group)
    hidden = torch.arange(seqlen)[None, :] > position[:, None]
    return torch.zeros(rows * group, seqlen, dtype=dtype).masked_fill(hidden, float("-inf"))


def sdpa_packed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """One fused call; the query heads of a group and the rows are packed as rows of their KV head."""
    return scaled_dot_product_attention(pack_rows(q, k.shape[1]), k, v, attn_mask=bias)


def sdpa_grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """One fused call with enable_gqa, as models call it."""
    if bias is not None:
        bias = bias[:: q.shape[2] // k.shape[1]]
    return scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias, enable_gqa=True)


def matmul_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Two matrix products around a softmax, packed; its logits are there to be read."""
    logits = torch.matmul(pack_rows(q, k.shape[1]) * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if bias is not None:
        logits = logits + bias
    return torch.matmul(torch.softmax(logits, dim=-1), v)


FORMULATIONS: dict[str, Formulation] = {
    "sdpa_packed": sdpa_packed,
    "sdpa_grouped": sdpa_grouped,
    "matmul_softmax": matmul_softmax,
}


def gather_and_attend(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, formulation: Formulation = sdpa_packed
) -> Tensor:
    """Sparse decoding: gather the listed tokens, (batch, tokens), of every KV head, then attend to them."""
    where = indices[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    return formulation(q, k.gather(2, where), v.gather(2, where), None)
