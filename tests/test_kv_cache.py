"""The paged cache: what is written is read back, pages are neither lost nor given twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vegas_ops.speculative import CacheSequence, OutOfPages, PagedKVCache


def make(num_pages: int = 8, page_size: int = 4, **options) -> PagedKVCache:
    options = {"dtype": torch.float32, **options}
    return PagedKVCache(
        num_layers=2, num_pages=num_pages, page_size=page_size, num_heads_kv=2, head_dim=8, **options
    )


def write(cache: PagedKVCache, sequence: CacheSequence, k: torch.Tensor, start: int = 0) -> None:
    n = k.shape[0]
    cache.reserve(sequence, start + n)
    table = cache.block_table([sequence])
    positions = torch.arange(start, start + n)
    slots = cache.slots(table, torch.zeros(n, dtype=torch.long), positions)
    for layer in range(2):
        cache.append(layer, slots, k + layer, -k - layer)
    sequence.length = start + n


def test_round_trip_over_scattered_pages():
    cache = make()
    a, b = cache.new_sequence(), cache.new_sequence()
    ka, kb = torch.randn(10, 2, 8), torch.randn(7, 2, 8)
    for start in range(0, 10, 3):
        write(cache, a, ka[start : start + 3], start)
        if start < 7:
            write(cache, b, kb[start : min(start + 3, 7)], start)
    for sequence, k in ((a, ka), (b, kb)):
        for layer in range(2):
            got_k, got_v = cache.gather(layer, sequence, len(k), torch.float32)
            assert torch.equal(got_k, k + layer) and torch.equal(got_v, -k - layer)


def test_rollback_frees_whole_pages_only():
    cache = make()
    sequence = cache.new_sequence()
    cache.reserve(sequence, 12)
    cache.truncate(sequence, 5)
    assert (sequence.length, len(sequence.pages), cache.num_free_pages) == (5, 2, 6)
    assert cache.block_table([sequence])[0].tolist() == sequence.pages
    cache.reserve(sequence, 8)
    assert cache.num_free_pages == 6
    cache.free(sequence)
    assert cache.num_free_pages == 8 and (sequence.table == -1).all()


def test_a_failed_reservation_changes_nothing():
    cache = make(num_pages=3)
    sequence, other = cache.new_sequence(), cache.new_sequence()
    cache.reserve(other, 8)
    before = list(other.pages)
    with pytest.raises(OutOfPages):
        cache.reserve(sequence, 5)
    assert sequence.pages == [] and cache.num_free_pages == 1 and other.pages == before


def test_prompt_pages_are_shared_until_the_last_user_leaves():
    cache = make()
    a = cache.new_sequence()
    k = torch.randn(10, 2, 8)
    write(cache, a, k)
    b = cache.share_prefix(a, 9)
    assert b.length == 8 and b.pages == a.pages[:2] and cache.num_free_pages == 5
    write(cache, b, torch.zeros(3, 2, 8), 8)
    assert torch.equal(cache.gather(0, a, 10, torch.float32)[0], k)
    cache.free(a)
    assert cache.num_free_pages == 5
    assert torch.equal(cache.gather(0, b, 8, torch.float32)[0], k[:8])
    cache.free(b)
    assert cache.num_free_pages == 8


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fp8_saturates_and_scales(scale):
    cache = make(dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=scale)
    sequence = cache.new_sequence()
    k = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0))
    k[0, 0, 0] = 1e6
    write(cache, sequence, k)
    got, _ = cache.gather(0, sequence, 6, torch.float32)
    assert got[0, 0, 0] == 448 * scale
    got[0, 0, 0] = k[0, 0, 0]
    assert (got - k).abs().max() <= k[1:].abs().max() / 16
    assert cache.k_descale is not None and cache.k_descale.tolist() == [scale]
    assert cache.bytes_per_token == 2 * 2 * 2 * 8


@pytest.mark.parametrize("num_pages", (2**45, 2**62))
def test_more_pages_than_memory_name_the_argument(num_pages):
    with pytest.raises(ValueError, match=f"`num_pages` must fit into .* got {num_pages} pages"):
        make(num_pages=num_pages)


def test_lengths_are_checked():
    cache = make(max_length=10)
    sequence = cache.new_sequence()
    with pytest.raises(ValueError, match="`length` must be at most 10, got 11"):
        cache.reserve(sequence, 11)
    with pytest.raises(ValueError, match="`length` must"):
        cache.truncate(sequence, 4)
    with pytest.raises(ValueError, match="`length` must"):
        cache.share_prefix(sequence, 1)
    with pytest.raises(ValueError, match="`page_size` must be at least 1, got 0"):
        make(page_size=0)
    with pytest.raises(ValueError, match="`v_scale` must be finite and > 0, got 0"):
        make(v_scale=0)
    with pytest.raises(ValueError, match="`device` must be present, got 'cuda:99'"):
        make(device="cuda:99")
    with pytest.raises(ValueError, match="`device` must be cpu, cuda or cuda:N, got 'abacus'"):
        make(device="abacus")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 20)), max_size=40))
def test_pages_have_exactly_their_users(actions):
    cache = make(num_pages=7)
    sequences = [cache.new_sequence() for _ in range(4)]
    for action, which, n in actions:
        sequence = sequences[which]
        try:
            if action == 0:
                cache.reserve(sequence, n)
                sequence.length = max(sequence.length, n)
            elif action == 1:
                cache.truncate(sequence, min(n, sequence.length))
            elif action == 2:
                cache.free(sequence)
            else:
                source = sequences[n % 4]
                if source is not sequence:
                    cache.free(sequence)
                    sequences[which] = cache.share_prefix(source, source.length)
        except OutOfPages:
            pass
        users = [page for s in sequences for page in s.pages]
        assert cache.num_free_pages == 7 - len(set(users))
        assert all(len(set(s.pages)) == len(s.pages) for s in sequences)
        for s in sequences:
            assert s.table[: len(s.pages)].tolist() == s.pages
            assert (s.table[len(s.pages) :] == -1).all()
