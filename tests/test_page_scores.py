"""Quest's pages: the kernels against torch, and what a page may score against its keys."""

from __future__ import annotations

import os

import pytest
import torch

from vegas_ops.speculative import PagedKVCache
from vegas_ops.speculative.page_scores import (
    available,
    note_bounds,
    page_scores,
    page_scores_by_torch,
    page_tokens,
)
from vegas_ops.speculative.selection import in_chunks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.gpu


def choose_kernels(monkeypatch, kernel):
    if kernel and DEVICE == "cpu":
        if not INTERPRETED:
            pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
        pytest.importorskip("triton")
    monkeypatch.setattr("vegas_ops.speculative.page_scores.available", lambda device: kernel)


def filled_cache(page_size, lengths, dim):
    """A cache of random keys, and sequences of so many tokens in it."""
    cache = PagedKVCache(
        num_layers=2,
        num_pages=40,
        page_size=page_size,
        num_heads_kv=2,
        head_dim=dim,
        dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32,
        device=DEVICE,
    )
    cache._k.copy_(torch.randn(cache._k.shape, generator=torch.Generator().manual_seed(0)))
    sequences = []
    for n in lengths:
        sequences.append(cache.new_sequence())
        cache.reserve(sequences[-1], n)
    return cache, sequences


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("page_size", "size"), [(16, 16), (64, 16), (8, 16), (12, 8)])
@pytest.mark.parametrize("dim", [64, 24])
def test_page_scores(monkeypatch, kernel, page_size, size, dim):
    choose_kernels(monkeypatch, kernel)
    cache, sequences = filled_cache(page_size, [7 * size + 3, 2 * size, size - 1], dim)
    dtype, table = cache.k.dtype, cache.block_table(sequences)
    width = table.shape[1] * page_size // size
    counts = torch.tensor([7, 2, 0], device=DEVICE)
    tail = (counts * size + 1).int()
    note_bounds(cache, table, tail, width, size)
    q = torch.randn(3, 6, 2 * dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[..., :dim]
    k = torch.tensor([3 * size, 2 * size, 0], device=DEVICE).int()
    found, pages, budgets = page_scores(cache, 1, table, q, tail, k, size)
    assert found.shape == (6, width) and found.dtype == torch.float32
    assert pages.tolist() == [7, 7, 2, 2, 0, 0] and budgets.tolist() == [3, 3, 2, 2, 0, 0]
    assert pages.dtype == budgets.dtype == torch.int32
    found = found.unflatten(0, (3, 2))
    expected = page_scores_by_torch(cache, 1, table, q, tail, size)
    for b, count in enumerate(counts.tolist()):
        torch.testing.assert_close(found[b, :, :count], expected[b, :, :count], rtol=1e-4, atol=1e-4)
        keys = cache.gather(1, sequences[b], count * size, dtype)[0].float().unflatten(0, (count, size))
        logits = torch.einsum("nshd,hgd->hgns", keys, q[b].float().unflatten(0, (2, 3)))
        # A bound for every head of the group, so their sum is at least the sum of the best keys'.
        assert (found[b, :, :count] >= logits.amax(3).sum(1) - 1e-3).all()


@pytest.mark.parametrize("kernel", [False, True])
def test_a_table_shorter_than_a_page_has_none(monkeypatch, kernel):
    choose_kernels(monkeypatch, kernel)
    cache, sequences = filled_cache(8, [5], 24)
    table, tail = cache.block_table(sequences)[:, :1], torch.tensor([5], dtype=torch.int32, device=DEVICE)
    q = torch.zeros(1, 6, 24, dtype=cache.k.dtype, device=DEVICE)
    scores, pages, budgets = page_scores(cache, 0, table, q, tail, tail, 16)
    assert scores.shape == (2, 0) and pages.tolist() == budgets.tolist() == [0, 0]


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("page_size", "size"), [(16, 16), (64, 16), (8, 16), (12, 8)])
@pytest.mark.parametrize("dim", [64, 24])
def test_bounds_are_noted_of_the_last_whole_pages(monkeypatch, kernel, page_size, size, dim):
    choose_kernels(monkeypatch, kernel)
    cache, sequences = filled_cache(page_size, [6 * size + 5, 3 * size, size - 1, 1], dim)
    table = cache.block_table(sequences)
    table[3] = -1  # an unused row
    ends = torch.tensor([6 * size + 5, 3 * size, size - 1, 0], device=DEVICE, dtype=torch.int32)
    unknown = 7.5
    cache.keys_and_bounds(size)[1].fill_(unknown)
    note_bounds(cache, table, ends, 4, size)
    for layer in range(2):
        bounds = cache.key_bounds(layer, table, size)
        for b, count in enumerate([6, 3, 0]):
            keys = cache.gather(layer, sequences[b], count * size, cache.k.dtype)[0].unflatten(
                0, (count, size)
            )
            known = range(max(count - 4, 0), count)
            for page in range(count):
                extremes = torch.stack([keys[page].amin(0), keys[page].amax(0)])
                assert torch.equal(
                    bounds[b, page], extremes if page in known else torch.full_like(extremes, unknown)
                )


@pytest.mark.parametrize("kernel", [False, True])
def test_tokens_of_pages(monkeypatch, kernel):
    choose_kernels(monkeypatch, kernel)
    pages = torch.tensor([[0, 3, 200], [5, -1, -1], [-1, -1, -1]], dtype=torch.int32, device=DEVICE)
    length = torch.tensor([3, 1, 0], dtype=torch.int32, device=DEVICE)
    tokens, lengths = page_tokens(pages, length, 48)
    expected = in_chunks(pages, length, 48)
    assert torch.equal(tokens, expected[0]) and torch.equal(lengths, expected[1])
    assert tokens[1, :49].tolist() == [*range(240, 288), -1] and lengths.tolist() == [144, 48, 0]


def test_without_a_gpu_torch_computes_them():
    assert not available(torch.device("cpu"))
