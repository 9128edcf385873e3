"""A paged KV cache: pages, block tables, rollback, and prompt pages shared between requests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from vegas_ops import ops
from vegas_ops.arguments import check_dtype, check_integer, check_integers, check_kind, check_number
from vegas_ops.devices import present
from vegas_ops.speculative.model import KVTarget

FP8_MAX = 448.0  # the largest finite float8_e4m3fn


class OutOfPages(RuntimeError):
    """The cache has too few free pages; nothing was changed."""


def to_device(values: Seq[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list as a tensor, without waiting for the device."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Workspaces:
    """A workspace per op, grown when a call needs more, so that a steady loop allocates none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bounds: dict[str, dict[str, int]] = {}
        self._memory: dict[str, list[Tensor]] = {}  # outgrown ones may serve a captured graph

    def get(self, op: ops.OpName, **bounds: int) -> Tensor | None:
        """bounds: as of `make_workspace`. None on the CPU, whose kernels need none."""
        if self._device.type != "cuda":
            return None
        known = self._bounds.get(op, {})
        if any(value > known.get(name, 0) for name, value in bounds.items()):
            # To the next power of 2, or a context that grows by tokens would grow it every time.
            known = {
                name: max(known.get(name, 0), _power_of_2(value) if "max" in name else value)
                for name, value in bounds.items()
            }
            self._bounds[op] = known
            self._memory.setdefault(op, []).append(ops.make_workspace(op, device=self._device, **known))
        return self._memory[op][-1]


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0


class CacheSequence:
    """The pages of one request. `length` counts the tokens whose K and V are valid, `cuts` how often pages
    were given back."""

    def __init__(self, cache: PagedKVCache) -> None:
        check_kind("cache", cache, PagedKVCache, "a PagedKVCache")
        self.cache = cache
        self.pages: list[int] = []
        self.length = 0
        self.cuts = 0
        max_pages = cache._pages_of(cache.max_length)
        self._table = torch.full((max_pages,), -1, dtype=torch.int32, device=cache.device)
        self._listed = 0  # pages in the table

    @property
    def table(self) -> Tensor:
        """The pages on the cache's device, (max_pages,) int32, -1 beyond them."""
        begin, end = self._listed, len(self.pages)
        if begin < end:
            self._table[begin:end] = to_device(self.pages[begin:], torch.int32, self.cache.device)
            self._listed = end
        return self._table


class PagedKVCache:
    """K and V as (num_layers, num_pages, page_size, num_heads_kv, head_dim), allocated once.

    dtype: the model's, or torch.float8_e4m3fn; the cache then holds k / k_scale and v / v_scale,
    saturated, and the ops multiply them back (`k_descale`, `v_descale`, fp32 (1,)).
    max_length: tokens that one sequence may hold; default: all pages.
    Pages are counted by their users, so several sequences may start with the same prompt pages.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_length: int | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        check_integers(
            1, num_layers=num_layers, num_pages=num_pages, page_size=page_size, num_heads_kv=num_heads_kv,
            head_dim=head_dim,
        )  # fmt: skip
        if max_length is not None:
            check_integer("max_length", max_length, 1)
        check_dtype("dtype", dtype)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_number(name, scale)
            if not 0 < scale < math.inf:
                raise ValueError(f"`{name}` must be finite and > 0, got {scale}")
        self.device = present(device)
        self.workspaces = Workspaces(self.device)
        # Zeroed, not empty: a page may be gathered by torch code that multiplies before it masks.
        # One page more than is given out takes what padded rows write.
        padded = (num_layers, num_pages + 1, page_size, num_heads_kv, head_dim)
        try:
            self._k, self._v = (torch.zeros(padded, dtype=dtype, device=device) for _ in range(2))
        except RuntimeError as error:
            if not re.search(r"memory|overflow", str(error)):
                raise
            gib = 2 * math.prod(padded) * dtype.itemsize / 2**30
            raise ValueError(
                f"`num_pages` must fit into the memory of {self.device}, got {num_pages} pages of "
                f"{page_size} tokens, {gib:,.1f} GiB of K and V"
            ) from None
        self.k, self.v = self._k[:, :num_pages], self._v[:, :num_pages]
        self.unused_slot = num_pages * page_size
        self._key_bounds: dict[int, Tensor] = {}  # by block size
        self.page_size = page_size
        self.max_length = num_pages * page_size if max_length is None else max_length
        self.fp8 = dtype == torch.float8_e4m3fn
        self.k_scale, self.v_scale = k_scale, v_scale
        self.k_descale = torch.tensor([k_scale], device=device) if self.fp8 else None
        self.v_descale = torch.tensor([v_scale], device=device) if self.fp8 else None
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        layers, _, _, heads, dim = self.k.shape
        return 2 * layers * heads * dim * self.k.element_size()

    def _check_own(self, name: str, sequence: CacheSequence) -> None:
        check_kind(name, sequence, CacheSequence, "a CacheSequence")
        if sequence.cache is not self:
            raise ValueError(f"`{name}` must be a sequence of this cache, got one of another")

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def new_sequence(self) -> CacheSequence:
        return CacheSequence(self)

    def share_prefix(self, source: CacheSequence, length: int) -> CacheSequence:
        """A sequence that starts with the whole pages of `source`'s first `length` tokens.

        Its `length` is `length` rounded down to whole pages, so that neither ever writes into a
        shared page. Nothing is copied.
        """
        self._check_own("source", source)
        check_integer("length", length)
        if not 0 <= length <= source.length:
            raise ValueError(f"`length` must be in [0, {source.length}], got {length}")
        shared = source.pages[: length // self.page_size]
        sequence = self.new_sequence()
        for page in shared:
            self._users[page] += 1
        sequence.pages, sequence._listed = list(shared), len(shared)
        sequence._table[: len(shared)] = source.table[: len(shared)]
        sequence.length = len(shared) * self.page_size
        return sequence

    def reserve(self, sequence: CacheSequence, length: int) -> None:
        """Pages for `length` tokens; raises OutOfPages and changes nothing if there are too few."""
        self._check_own("sequence", sequence)
        check_integer("length", length)
        have, need = len(sequence.pages), self._pages_of(length)
        if need <= have:
            return
        if length > self.max_length:
            raise ValueError(f"`length` must be at most {self.max_length}, got {length}")
        if need - have > len(self._free):
            raise OutOfPages(f"{need - have} pages needed, {len(self._free)} free")
        fresh = [self._free.pop() for _ in range(need - have)]
        for page in fresh:
            self._users[page] = 1
        sequence.pages += fresh

    def truncate(self, sequence: CacheSequence, length: int, kept: int | None = None) -> None:
        """Rolls back (or commits) to `length` tokens and gives back the pages beyond them, or beyond
        `kept` tokens."""
        self._check_own("sequence", sequence)
        check_integer("length", length, 0)
        if kept is not None:
            check_integer("kept", kept, 0)
        keep = self._pages_of(length if kept is None else kept)
        if keep > len(sequence.pages):
            raise ValueError(f"`length` must lie within the reserved pages, got {length}")
        for page in sequence.pages[keep:][::-1]:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)
        if keep < len(sequence.pages):
            sequence.cuts += 1
            sequence._table[keep : sequence._listed] = -1
            sequence._listed = min(sequence._listed, keep)
            del sequence.pages[keep:]
        sequence.length = length

    def free(self, sequence: CacheSequence) -> None:
        self.truncate(sequence, 0)

    def block_table(self, sequences: Seq[CacheSequence], width: int | None = None) -> Tensor:
        """(batch, width) int32, -1 beyond each sequence's pages; a new tensor. Default width: as
        many pages as the longest has."""
        if width is None:
            width = max([1, *(len(s.pages) for s in sequences)])
        return torch.stack([s.table[:width] for s in sequences])

    def slots(self, block_table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots (page * page_size + offset, int64) of `positions` of the table rows `rows`; negative
        where there is no page."""
        pages = block_table[rows, positions // self.page_size]
        return torch.add(positions % self.page_size, pages, alpha=self.page_size)

    def target(self, layer: int, slots: Tensor) -> KVTarget | None:
        """Where K and V of `slots`, (n,) int64, lie, for a model that writes them itself; None for fp8."""
        if self.fp8:
            return None
        return KVTarget(self._k[layer].flatten(0, 1), self._v[layer].flatten(0, 1), slots)

    def append(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k and v, (n, num_heads_kv, head_dim), into `slots`, (n,) int64."""
        for cache, scale, x in ((self._k, self.k_scale, k), (self._v, self.v_scale, v)):
            flat = cache[layer].flatten(0, 1)
            if self.fp8:
                # The cast alone does not saturate, and bytes are what every device can index.
                x = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(cache.dtype)
                flat, x = flat.view(torch.uint8), x.view(torch.uint8)
            flat.index_copy_(0, slots, x)

    def gather(
        self, layer: int, sequence: CacheSequence, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Copies of the first `length` tokens' K and V, (length, num_heads_kv, head_dim)."""
        pages = sequence.table[: self._pages_of(length)].long()
        k, v = self.k[layer], self.v[layer]
        if not self.fp8:
            return k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]
        k, v = (x.view(torch.uint8)[pages].view(x.dtype).flatten(0, 1)[:length].float() for x in (k, v))
        return (k * self.k_scale).to(dtype), (v * self.v_scale).to(dtype)

    def bound_keys(self, block_table: Tensor, blocks: Tensor, size: int) -> None:
        """Notes channelwise minimum and maximum of the keys of `blocks`, (batch, n) int64: the
        `size` tokens from position block * size on; negative ones are left out."""
        bounds = self._bounds_by(size)
        offset = torch.arange(size, device=self.device)
        positions = (blocks[..., None] * size + offset).clamp(0, block_table.shape[1] * self.page_size - 1)
        owner = torch.arange(blocks.shape[0], device=self.device)[:, None, None]
        slots = self.slots(block_table, owner, positions)
        slots = slots.masked_fill((slots < 0) | (blocks[..., None] < 0), self.unused_slot)
        home = (slots[..., 0] // math.gcd(size, self.page_size)).flatten()
        for layer in range(bounds.shape[0]):
            flat = self._k[layer].flatten(0, 1)
            keys = flat.view(torch.uint8)[slots].view(flat.dtype) if self.fp8 else flat[slots]
            keys = (keys.float() * self.k_scale).to(bounds.dtype).flatten(0, 1)
            bounds[layer].index_copy_(0, home, torch.stack([keys.amin(1), keys.amax(1)], 1))

    def key_bounds(self, layer: int, block_table: Tensor, size: int) -> Tensor:
        """(batch, blocks, 2, num_heads_kv, head_dim): what `bound_keys` noted of each whole block."""
        count = block_table.shape[1] * self.page_size // size
        first = torch.arange(count, device=self.device) * size
        owner = torch.arange(block_table.shape[0], device=self.device)[:, None]
        slots = self.slots(block_table, owner, first)
        home = slots.masked_fill(slots < 0, self.unused_slot) // math.gcd(size, self.page_size)
        return self._bounds_by(size)[layer][home]

    def keys_and_bounds(self, size: int) -> tuple[Tensor, Tensor, int]:
        """For kernels that do what `bound_keys` and `key_bounds` do: K of all layers with the page of padded
        rows, (num_layers, num_pages + 1, page_size, num_heads_kv, head_dim); bounds of all layers,
        (num_layers, places, 2, num_heads_kv, head_dim), contiguous; and the slots per place: a block's place
        is its first token's slot divided by that."""
        return self._k, self._bounds_by(size), math.gcd(size, self.page_size)

    def _bounds_by(self, size: int) -> Tensor:
        """Bounds by the slot of a block's first token; no two blocks of a sequence share a place."""
        if size not in self._key_bounds:
            layers, pages, page_size, heads, dim = self._k.shape
            places = pages * page_size // math.gcd(size, page_size)
            dtype = torch.bfloat16 if self.fp8 else self._k.dtype
            self._key_bounds[size] = torch.zeros(
                layers, places, 2, heads, dim, dtype=dtype, device=self.device
            )
        return self._key_bounds[size]
