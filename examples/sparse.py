"""A draft step: attention over selected slots and everything newer."""

import torch

import vegas_ops

heads_q, heads_kv, head_dim, page_size = 8, 2, 64, 16
k_cache, v_cache = torch.randn(2, 38, page_size, heads_kv, head_dim)
block_table = torch.randperm(38, dtype=torch.int32).view(2, 19)
slots = torch.randint(38 * page_size, (2, 16), dtype=torch.int32)
used = torch.tensor([16, 9], dtype=torch.int32)
q = torch.randn(2, heads_q, head_dim)

out, lse = vegas_ops.sparse_paged_decode(
    q, k_cache, v_cache, slots, used, tail_start=torch.tensor([290, 70], dtype=torch.int32),
    seqused_k=torch.tensor([300, 77], dtype=torch.int32), block_table=block_table,
)  # fmt: skip
print("out", tuple(out.shape), "lse", tuple(lse.shape))
