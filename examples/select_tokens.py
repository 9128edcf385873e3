"""From dumped scores to the physical slots that the next draft reads."""

import torch

import vegas_ops

scores = torch.randn(2, 300)  # a "token" dump
candidates = torch.tensor([297, 74], dtype=torch.int32)
block_table = torch.randperm(38, dtype=torch.int32).view(2, 19)

slots, count = vegas_ops.topk_aggregate_logits(
    scores, dump="token", seqlens=candidates, k=8, max_k=16, pool=(4, 0), block_table=block_table,
    page_size=16,
)  # fmt: skip
print("slots", slots.tolist())
print("used", count.tolist())
