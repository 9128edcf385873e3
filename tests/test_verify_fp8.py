"""flash_attn_with_logit_dump over fp8_e4m3 caches against its oracle, on every device of this machine."""

from __future__ import annotations

import pytest
import torch
from op_cases import LAYOUTS, VerifyCase, case_dtype
from op_checks import check_verify


@pytest.mark.parametrize("page_size", (1, 7, 24, 64, 256))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_page_sizes_and_layouts(device: torch.device, layout: str, page_size: int) -> None:
    lengths = (page_size, page_size + 1, 150, 2 * page_size + 3)
    check_verify(
        VerifyCase(
            seed=page_size, device=device, dtype=torch.bfloat16, fp8=True, descale="head", layout=layout,
            head_dim=80, page_size=page_size, lengths=lengths, q_lens=(1, 1, 5, 2), dump="token_weight",
        )
    )  # fmt: skip


@pytest.mark.parametrize("rows", (1, 4, 8, 9, 16, 17, 33))
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("dump", ("none", "token", "kv_head"))
def test_fp8_row_counts(device: torch.device, dump: str, head_dim: int, rows: int) -> None:
    check_verify(
        VerifyCase(
            seed=rows, device=device, dtype=case_dtype(device), fp8=True, descale="request", heads_q=8,
            head_dim=head_dim, lengths=(700, rows, 3), q_lens=(rows, rows, 3), dump=dump, with_sinks=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("window", ((-1, -1), (16, 0), (33, 2), (-1, 3)))
@pytest.mark.parametrize("softcap", (0.0, 2.0))
def test_fp8_masks(device: torch.device, window: tuple[int, int], softcap: float) -> None:
    for causal, dump in ((True, "kv_head"), (False, "token_weight")):
        check_verify(
            VerifyCase(
                seed=3, device=device, dtype=torch.float16, fp8=True, lengths=(190, 3, 1, 150),
                q_lens=(6, 5, 1, 1), dump=dump, with_sinks=True,
                options={"causal": causal, "window_size": window, "softcap": softcap},
            )
        )  # fmt: skip


@pytest.mark.parametrize("scale", (2.0**-40, 0.2, 40.0))
def test_fp8_weights_move_with_their_reference(device: torch.device, scale: float) -> None:
    """Logits that grow from key to key move the reference of the weights again and again."""
    case = VerifyCase(
        seed=13, device=device, dtype=torch.bfloat16, fp8=True, lengths=(900, 900), q_lens=(3, 1),
        dump="kv_head", logits_dtype=torch.float32, options={"softmax_scale": scale},
    )  # fmt: skip
    for b, length in enumerate(case.lengths):
        for position in range(length):
            key = case.k_cache[int(case.block_table[b, position // 16]), position % 16]
            grown = key.float() * (position if b == 0 else length - position) / length
            key.copy_(grown.to(key.dtype))
    check_verify(case)
