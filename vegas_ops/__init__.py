"""vegas_ops: fused ops for verification-guided self-speculative decoding (arXiv 2602.07223)."""

from vegas_ops.ops import (
    AttentionWithDump,
    aggregate_logits,
    build_scheduler_metadata,
    flash_attn_with_logit_dump,
    make_workspace,
    sparse_paged_decode,
    topk_aggregate_logits,
)
from vegas_ops.version import __version__

__all__ = [
    "AttentionWithDump",
    "__version__",
    "aggregate_logits",
    "build_scheduler_metadata",
    "flash_attn_with_logit_dump",
    "make_workspace",
    "sparse_paged_decode",
    "topk_aggregate_logits",
]
