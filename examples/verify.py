"""Full attention over a paged cache that also dumps the score of every cached token."""

import torch

import vegas_ops

heads_q, heads_kv, head_dim, page_size = 8, 2, 64, 16
lengths = torch.tensor([300, 77], dtype=torch.int32)  # keys per request, the new rows included
rows = torch.tensor([0, 4, 8], dtype=torch.int32)  # four new rows each
block_table = torch.randperm(38, dtype=torch.int32).view(2, 19)
k_cache, v_cache = torch.randn(2, 38, page_size, heads_kv, head_dim)
q = torch.randn(8, heads_q, head_dim)

out, lse, logits, _ = vegas_ops.flash_attn_with_logit_dump(
    q, k_cache, v_cache, block_table, lengths, cu_seqlens_q=rows, max_seqlen_q=4, max_seqlen_k=300
)  # fmt: skip
print("out", tuple(out.shape), "lse", tuple(lse.shape))
print("best candidate of each request:", [logits[b, : lengths[b] - 3].argmax().item() for b in range(2)])
