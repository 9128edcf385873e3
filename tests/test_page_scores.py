"""Bounds on what a page's keys may score: the kernel against torch, and both against the keys."""

from __future__ import annotations

import os

import pytest
import torch

from vegas_ops.speculative import PagedKVCache
from vegas_ops.speculative.page_scores import available, page_scores, page_scores_by_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("page_size", "size"), [(16, 16), (64, 16), (8, 16), (12, 8)])
@pytest.mark.parametrize("dim", [64, 24])
def test_page_scores(monkeypatch, kernel, page_size, size, dim):
    if kernel and DEVICE == "cpu":
        if not INTERPRETED:
            pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
        pytest.importorskip("triton")
    monkeypatch.setattr("vegas_ops.speculative.page_scores.available", lambda device: kernel)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(
        num_layers=2,
        num_pages=40,
        page_size=page_size,
        num_heads_kv=2,
        head_dim=dim,
        dtype=dtype,
        device=DEVICE,
    )
    cache._k.copy_(torch.randn(cache._k.shape, generator=generator))
    lengths = [7 * size + 3, 2 * size, size - 1]
    sequences = []
    for n in lengths:
        sequences.append(cache.new_sequence())
        cache.reserve(sequences[-1], n)
    table = cache.block_table(sequences)
    pages = torch.arange(table.shape[1] * page_size // size, device=DEVICE)
    counts = torch.tensor([n // size for n in lengths], device=DEVICE)
    cache.bound_keys(table, torch.where(pages < counts[:, None], pages, -1), size)
    q = torch.randn(3, 6, 2 * dim, generator=generator).to(DEVICE, dtype)[..., :dim]
    tail = (counts * size).int()
    found = page_scores(cache, 1, table, q, tail, size)
    assert found.shape == (3, 2, len(pages)) and found.dtype == torch.float32
    expected = page_scores_by_torch(cache, 1, table, q, tail, size)
    for b, count in enumerate(counts.tolist()):
        torch.testing.assert_close(found[b, :, :count], expected[b, :, :count], rtol=1e-4, atol=1e-4)
        keys = cache.gather(1, sequences[b], count * size, dtype)[0].float().unflatten(0, (count, size))
        logits = torch.einsum("nshd,hgd->hgns", keys, q[b].float().unflatten(0, (2, 3)))
        # A bound for every head of the group, so their sum is at least the sum of the best keys'.
        assert (found[b, :, :count] >= logits.amax(3).sum(1) - 1e-3).all()


def test_without_a_gpu_torch_computes_them():
    assert not available(torch.device("cpu"))
