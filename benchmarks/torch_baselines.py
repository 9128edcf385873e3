"""Attention of a few query rows over a long cache in plain torch, packed: what our kernels are compared with.

It is favoured: K and V lie contiguous per KV head, (batch, num_heads_kv, seqlen, head_dim),
with nothing gathered from pages, all requests have one length, and masks are made beforehand.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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
