"""Inputs of the ops with traps around everything that must stay untouched.

Every cache slot outside the visible lengths holds NaN, every unused table entry a page id that
would be a wild read, every output a sentinel. A case carries the arguments of one call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vegas_ops import reference

SENTINEL = -7776.0  # exact in every dtype of an output
SENTINEL_INDEX = -7777
GARBAGE_PAGES = (-1, 2**31 - 1)
FP8 = torch.float8_e4m3fn
LAYOUTS = ("nhd", "hnd", "interleaved_head", "interleaved_page", "sliced", "cross_layer")


def int32(values: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def case_dtype(device: torch.device) -> torch.dtype:
    """Of cases that name none: the most exact that it has."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def empty_on_cuda(value: Any) -> Any:
    """Like a tensor, on a GPU that need not exist under fake tensors; other values as they are."""
    return torch.empty(value.shape, dtype=value.dtype, device="cuda") if isinstance(value, Tensor) else value


def full_nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.full(tuple(shape), math.nan, dtype=torch.float32, device=device).to(dtype)


def make_cache(
    layout: str,
    num_pages: int,
    page_size: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """K and V views (num_pages, page_size, num_heads, head_dim) full of NaN."""

    def buffer(*shape: int) -> Tensor:
        return full_nan(shape, dtype, device)

    if layout == "nhd":
        shape = (num_pages, page_size, num_heads, head_dim)
        return buffer(*shape), buffer(*shape)
    if layout == "hnd":
        shape = (num_pages, num_heads, page_size, head_dim)
        return buffer(*shape).transpose(1, 2), buffer(*shape).transpose(1, 2)
    if layout == "interleaved_head":  # K and V of a token side by side on the last dimension
        both = buffer(num_pages, num_heads, page_size, 2 * head_dim).transpose(1, 2)
        return both[..., :head_dim], both[..., head_dim:]
    if layout == "interleaved_page":  # K and V of a page side by side on dimension 1
        k, v = buffer(num_pages, 2, page_size, num_heads, head_dim).unbind(1)
        return k, v
    if layout == "sliced":  # part of larger pages, with more heads and wider rows

        def cut(extra: int) -> Tensor:
            wide = buffer(num_pages, page_size + extra, num_heads + 1, head_dim + 16)
            return wide[:, extra:, 1:, :head_dim]

        return cut(1), cut(3)
    if layout == "cross_layer":
        blocks = buffer(num_pages, 3, 2, page_size, num_heads, head_dim)
        return blocks[:, 1, 0], blocks[:, 1, 1]
    raise AssertionError(layout)


def slot_of(table_row: Tensor, positions: Tensor, page_size: int) -> Tensor:
    return table_row[positions // page_size].long() * page_size + positions % page_size


def fill_slots(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write (n, num_heads, head_dim) fp32 values, rounded to the cache's dtype."""
    rounded = values.to(cache.dtype)
    pages, offsets = slots // cache.shape[1], slots % cache.shape[1]
    if cache.element_size() == 1:
        cache.view(torch.uint8)[pages, offsets] = rounded.view(torch.uint8)
    else:
        cache[pages, offsets] = rounded


def make_descale(kind: str, batch: int, heads: int, generator: torch.Generator) -> Tensor | None:
    shape = {"none": None, "one": (1,), "head": (heads,), "request": (batch, heads)}[kind]
    if shape is None:
        return None
    factors = torch.rand(shape, generator=generator) + 0.25
    # Of two dimensions, the first is the contiguous one.
    return factors.T.contiguous().T if factors.ndim == 2 else factors


@dataclass
class PagedCase:
    """A paged cache with `lengths` visible keys per request, in pages handed out at random."""

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    descale: str = "none"
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    page_size: int = 16
    layout: str = "nhd"
    lengths: Sequence[int] = (33,)
    spare_pages: int = 2
    spare_columns: int = 2

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.batch = len(self.lengths)
        used = [-(-max(n, 0) // self.page_size) for n in self.lengths]
        num_pages = sum(used) + self.spare_pages
        width = max([*used, 0]) + self.spare_columns
        order = torch.randperm(num_pages, generator=self.generator)
        pick = torch.randint(0, 2, (self.batch, width), generator=self.generator)
        table = torch.tensor(GARBAGE_PAGES)[pick]
        kind = FP8 if self.fp8 else self.dtype
        shape = (num_pages, self.page_size, self.heads_kv, self.head_dim)
        self.k_cache, self.v_cache = make_cache(self.layout, *shape, kind, self.device)
        start = 0
        for b, count in enumerate(used):
            table[b, :count] = order[start : start + count]
            start += count
            positions = torch.arange(max(self.lengths[b], 0))
            slots = slot_of(table[b], positions, self.page_size).to(self.device)
            for cache in (self.k_cache, self.v_cache):
                fill_slots(cache, slots, self.random(len(positions), *shape[2:]))
        if self.layout in ("sliced", "cross_layer"):  # the table is part of a wider one
            beyond = torch.full((self.batch, 3), GARBAGE_PAGES[1])
            table = torch.cat([table, beyond], 1)
        self.block_table = self.put(table.to(torch.int32))[:, :width]
        self.seqused_k = int32(self.lengths, self.device)
        self.k_descale = self.put(make_descale(self.descale, self.batch, self.heads_kv, self.generator))
        self.v_descale = self.put(make_descale(self.descale, self.batch, self.heads_kv, self.generator))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def put(self, tensor: Any) -> Any:
        return None if tensor is None else tensor.to(self.device)

    def rows_of_q(self, rows: int, extra: int, strided: bool) -> Tensor:
        """Query rows, then `extra` rows of NaN that belong to no request."""
        values = self.random(rows, self.heads_q, self.head_dim)
        q = full_nan((rows + extra, self.heads_q + 1, self.head_dim), self.dtype, self.device)
        q = q[:, 1:] if strided else q[:, 1:].contiguous()
        q[:rows] = values.to(self.dtype)
        return q

    def loaded(self, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """One request's keys and values in float64, 0 where the page is bad, and which exist."""
        table = self.block_table[b]
        positions = torch.arange(max(self.lengths[b], 0), device=self.device)
        slots = reference._slots(positions, table, self.k_cache)
        keys, values = (
            reference._load(cache, slots, reference._descale_of(descale, b, self.heads_kv), torch.float64)
            for cache, descale in ((self.k_cache, self.k_descale), (self.v_cache, self.v_descale))
        )
        return keys, values, slots >= 0


@dataclass
class VerifyCase(PagedCase):
    """A call of flash_attn_with_logit_dump."""

    q_lens: Sequence[int] = (3,)
    extra_rows: int = 0
    strided: bool = False
    dump: str = "token"
    dump_rows: Sequence[int] | None = None
    dump_len: Sequence[int] | None = None
    logits_dtype: torch.dtype | None = None
    wider: int = 0
    hint_kind: str = "near"
    with_sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert len(self.q_lens) == self.batch
        rows = sum(self.q_lens)
        self.total_q = rows + self.extra_rows
        self.q = self.rows_of_q(rows, self.extra_rows, self.strided)
        self.cu = [0]
        for n in self.q_lens:
            self.cu.append(self.cu[-1] + n)
        self.max_seqlen_k = max([*self.lengths, 1])
        self.scale = self.options.get("softmax_scale") or self.head_dim**-0.5
        self.softcap = self.options.get("softcap", 0.0)
        self.sinks = self.put(self.random(self.heads_q)) if self.with_sinks else None
        hint = self.random(self.batch, 2, self.heads_kv)
        self.hint = hint + 3 if self.hint_kind == "near" else hint * 0 - 1e4

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seqused_k

    @property
    def kwargs(self) -> dict[str, Any]:
        def ints(values: Sequence[int] | None) -> Tensor | None:
            return None if values is None else int32(values, self.device)

        return {
            "cu_seqlens_q": int32(self.cu, self.device),
            "max_seqlen_q": max([*self.q_lens, 1]),
            "max_seqlen_k": self.max_seqlen_k,
            "sinks": self.sinks,
            "k_descale": self.k_descale,
            "v_descale": self.v_descale,
            "dump": self.dump,
            "guide_lse_hint": self.hint if self.dump == "token_weight" else None,
            "dump_rows": ints(self.dump_rows),
            "dump_len": ints(self.dump_len),
            **self.options,
        }

    def outputs(
        self, fill: float, dtype: torch.dtype | None = None, width: int | None = None
    ) -> dict[str, Tensor]:
        """Outputs full of `fill`, in the op's dtypes or all in `dtype`, logits of `width` if given."""

        def make(shape: Sequence[int], own: torch.dtype) -> Tensor:
            return torch.full(tuple(shape), fill, dtype=dtype or own, device=self.device)

        wide = self.max_seqlen_k + self.wider if width is None else width
        outputs = {
            "out": make((self.total_q, self.heads_q, self.head_dim), self.dtype),
            "lse": make((self.heads_q, self.total_q), torch.float32),
        }
        if self.strided:
            outputs["out"] = make((self.total_q, self.heads_q, self.head_dim + 16), self.dtype)
            outputs["out"] = outputs["out"][..., : self.head_dim]
        shapes = {
            "token": (self.batch, wide),
            "token_weight": (self.batch, wide),
            "kv_head": (self.batch, 2, self.heads_kv, wide),
            "rows": (self.batch, self.heads_q, 2, wide),
            "all": (self.total_q, self.heads_q, wide),
        }
        if self.dump != "none":
            summed = self.dump in ("token", "token_weight")
            own = self.logits_dtype or (torch.float32 if summed else torch.bfloat16)
            outputs["logits"] = make(shapes[self.dump], own)
        if self.dump in ("token_weight", "kv_head"):
            outputs["guide_lse"] = make((self.batch, 2, self.heads_kv), torch.float32)
        return outputs

    def visible(self, b: int, exists: Tensor) -> Tensor:
        """(q_len, length) bool."""
        length, q_len = self.lengths[b], self.q_lens[b]
        keys = torch.arange(length, device=self.device)[None]
        p = (length - q_len + torch.arange(q_len, device=self.device))[:, None]
        left, right = self.options.get("window_size", (-1, -1))
        mask = exists[None].expand(q_len, -1)
        if self.options.get("causal", True):
            mask = mask & (keys <= p)
        if left >= 0:
            mask = mask & (keys >= p - left)
        if right >= 0:
            mask = mask & (keys <= p + right)
        return mask


@dataclass
class SparseCase(PagedCase):
    """A call of sparse_paged_decode.

    `counts` are the listed tokens per request, drawn below `tail_starts` (or the length). Entries
    behind a count hold garbage; `holes` of the counted ones are replaced by what must be skipped.
    """

    counts: Sequence[int] = (5,)
    tail_starts: Sequence[int] | None = None
    logical: bool = False
    per_head: bool = False
    holes: int = 0
    repeats: bool = False
    spare_k: int = 3
    strided: bool = False
    with_sinks: bool = False
    give_lengths: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.q = self.rows_of_q(self.batch, 0, self.strided)
        self.sinks = self.put(self.random(self.heads_q)) if self.with_sinks else None
        lists = self.heads_kv if self.per_head else 1
        max_k = max([*self.counts, 0]) + self.spare_k
        pick = torch.randint(0, 2, (self.batch, lists, max_k), generator=self.generator)
        indices = torch.tensor(GARBAGE_PAGES)[pick]
        lengths = torch.zeros(self.batch, lists, dtype=torch.int64)
        table = self.block_table.cpu()
        slots_in_cache = self.k_cache.shape[0] * self.page_size
        for b in range(self.batch):
            below = self.lengths[b]
            if self.tail_starts is not None:
                below = min(below, max(self.tail_starts[b], 0))
            for head in range(lists):
                count = self.counts[b]
                if self.repeats and below > 0:
                    tokens = torch.randint(0, below, (count,), generator=self.generator)
                else:
                    tokens = torch.randperm(below, generator=self.generator)[:count]
                    if self.per_head and head:
                        tokens = tokens[: max(len(tokens) - head, 0)]
                if not self.logical and len(tokens):
                    tokens = table[b][tokens // self.page_size].long() * self.page_size + (
                        tokens % self.page_size
                    )
                beyond = below if self.logical else slots_in_cache
                for hole in range(min(self.holes, len(tokens))):
                    at = int(torch.randint(0, len(tokens), (), generator=self.generator))
                    tokens[at] = (-1, -9, 2**31 - 1, beyond)[hole % 4]
                if self.logical and (self.tail_starts is not None or not self.give_lengths):
                    # At or beyond tail_start, or an unstated length, is the caller's fault.
                    tokens[tokens == below] = -1
                indices[b, head, : len(tokens)] = tokens
                lengths[b, head] = len(tokens)
        if not self.per_head:
            indices, lengths = indices[:, 0], lengths[:, 0]
        if self.strided:  # lists and their lengths are parts of wider tensors
            beyond = torch.full((*indices.shape[:-1], 5), GARBAGE_PAGES[1])
            indices, lengths = torch.cat([indices, beyond], -1), torch.stack([lengths, lengths + 9], -1)
        self.indices = self.put(indices.to(torch.int32))[..., :max_k]
        self.topk_length = self.put(lengths.to(torch.int32))
        if self.strided:
            self.topk_length = self.topk_length[..., 0]

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.indices, self.topk_length

    @property
    def kwargs(self) -> dict[str, Any]:
        tail = self.tail_starts
        window = self.options.get("window_size", (-1, -1))
        needs_lengths = tail is not None or self.give_lengths or window != (-1, -1)
        return {
            "tail_start": None if tail is None else int32(tail, self.device),
            "seqused_k": self.seqused_k if needs_lengths else None,
            "block_table": self.block_table if tail is not None or self.logical else None,
            "indices_are_slots": not self.logical,
            "sinks": self.sinks,
            "k_descale": self.k_descale,
            "v_descale": self.v_descale,
            **self.options,
        }

    def outputs(self, fill: float, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        wide = torch.full(
            (self.batch, self.heads_q, self.head_dim + 16 * self.strided), fill,
            dtype=dtype or self.dtype, device=self.device,
        )  # fmt: skip
        lse = torch.full((self.heads_q, self.batch), fill, dtype=dtype or torch.float32, device=self.device)
        return {"out": wide[..., : self.head_dim], "lse": lse}

    def attended(self, b: int, head: int) -> list[int]:
        """Slots of the tokens that one KV head of a request attends to, one by one."""
        kwargs = self.kwargs
        num_pages = self.k_cache.shape[0]
        table = self.block_table[b].tolist()
        length = self.lengths[b] if kwargs["seqused_k"] is not None else None
        if length == 0:
            return []
        left, right = self.options.get("window_size", (-1, -1))
        row = (self.indices[b, head] if self.per_head else self.indices[b]).tolist()
        count = int(self.topk_length[b, head] if self.per_head else self.topk_length[b])
        slots: list[int] = []
        positions = []
        for index in row[: max(count, 0)]:
            if self.logical:
                positions.append(index)
            elif 0 <= index < num_pages * self.page_size:
                slots.append(index)
        if self.tail_starts is not None:
            assert length is not None
            positions += range(max(self.tail_starts[b], 0), length)
        for position in positions:
            if position < 0 or position // self.page_size >= len(table):
                continue
            if length is not None:
                p = length - 1
                if position > p or (left >= 0 and position < p - left):
                    continue
                if right >= 0 and position > p + right:
                    continue
            page = table[position // self.page_size]
            if 0 <= page < num_pages:
                slots.append(page * self.page_size + position % self.page_size)
        return slots


class SelectCase:
    """A call of topk_aggregate_logits, from the arguments of `op_draws.select_arguments`.

    Logits are small integers, so that sums are exact in fp32.
    """

    def __init__(self, device: torch.device, **arguments: Any) -> None:
        self.device, self.arguments = device, arguments
        c = arguments
        generator = torch.Generator().manual_seed(c["seed"])
        dump, batch, width, heads = c["dump"], c["batch"], c["width"], c["heads"]
        cu = [0]
        for n in c["q_lens"]:
            cu.append(cu[-1] + n)
        total_q = cu[-1] + 1
        shape: tuple[int, ...] = {
            "token": (batch, width),
            "token_weight": (batch, width),
            "kv_head": (batch, 2, heads, width),
            "rows": (batch, heads, 2, width),
            "all": (total_q, heads, width),
        }[dump]
        lead = () if c["layers"] is None else (c["layers"],)
        shape = (*lead, *shape)
        values = torch.randint(-c["spread"], c["spread"] + 1, shape, generator=generator).float()
        drawn = torch.rand(shape, generator=generator)
        special = torch.tensor([-math.inf, math.inf, math.nan, -0.0])
        which = torch.randint(0, 4, shape, generator=generator)
        values = torch.where(drawn < c["specials"], special[which], values)
        # A one-row request dumps equal planes.
        for b, n in enumerate(c["q_lens"]):
            if n == 1 and dump == "kv_head":
                values[..., b, 1, :, :] = values[..., b, 0, :, :]
            if n == 1 and dump == "rows":
                values[..., b, :, 1, :] = values[..., b, :, 0, :]
        summed = dump in ("token", "token_weight")
        dtype = torch.float32 if summed or c["fp32"] else torch.bfloat16
        # Columns behind the last that the dump's views leave out.
        wide = torch.full((*shape[:-1], width + 3), math.inf, dtype=dtype)
        wide[..., :width] = values.to(dtype)
        self.logits = wide.to(device)[..., :width]
        self.dump_kwargs: dict[str, Any] = {
            "dump": dump,
            "mode": c["mode"],
            "seqlens": int32(c["seqlens"], device),
            "cu_seqlens_q": int32(cu, device) if c["with_rows"] else None,
            "dump_rows": None if c["dump_rows"] is None else int32(c["dump_rows"], device),
        }
        norms: dict[str, Tensor] = {}
        if c["mode"] == "weight" and dump == "kv_head":
            norms["guide_lse"] = torch.randn((*lead, batch, 2, heads), generator=generator)
            # Equal planes have equal normalisers.
            for b, n in enumerate(c["q_lens"]):
                if n == 1:
                    norms["guide_lse"][..., b, 1, :] = norms["guide_lse"][..., b, 0, :]
        if c["mode"] == "weight" and dump in ("rows", "all"):
            norms["lse"] = torch.randn((*lead, heads, total_q), generator=generator)
            if c["with_sinks"]:
                norms["sinks"] = torch.randn((*lead, heads), generator=generator)
        self.dump_kwargs.update({name: tensor.to(device) for name, tensor in norms.items()})
        self.kwargs = self._selection()

    def _selection(self) -> dict[str, Any]:
        c, k = self.arguments, self.arguments["k"]
        names = ("max_k", "pool", "num_sink", "num_recent", "count_forced", "per_kv_head")
        kwargs = {name: c[name] for name in names}
        kwargs["k"] = k if isinstance(k, int) else int32(k, self.device)
        page_size = c["page_size"]
        if page_size is not None:
            generator = torch.Generator().manual_seed(c["seed"])
            pages = -(-c["width"] // page_size)
            table = torch.randint(0, 2**31 // page_size - 1, (c["batch"], pages), generator=generator)
            table[torch.rand(table.shape, generator=generator) < 0.1] = -1
            for b, n in enumerate(c["seqlens"]):
                table[b, -(-max(n, 0) // page_size) :] = 2**31 - 1
            kwargs["block_table"] = table.to(torch.int32).to(self.device)
            kwargs["page_size"] = page_size
        return kwargs

    @property
    def weighted(self) -> bool:
        return self.arguments["mode"] == "weight" and self.arguments["dump"] in ("kv_head", "rows", "all")

    @property
    def error(self) -> float:
        """Relative error of sums: the exponent of a weight is rounded to fp32, so its weight is off in
        proportion to it."""
        return 2e-6 + 2.0**-22 * (self.arguments["spread"] + 10) if self.weighted else 0.0

    def of_head(self, head: int) -> tuple[Tensor, dict[str, Any]]:
        """The dump of one KV head alone."""
        kwargs = dict(self.dump_kwargs)
        if "guide_lse" in kwargs:
            kwargs["guide_lse"] = kwargs["guide_lse"][..., head : head + 1].contiguous()
        return self.logits[..., head : head + 1, :], kwargs


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _tensors(values: dict[str, Any]) -> Iterator[Tensor]:
    for value in values.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, Tensor) and value.device.type != "meta":
            yield value


def twin(case: Any, device: torch.device, **more: Any) -> Any:
    """The same case on another device: its tensors keep their strides, and share memory as they did.

    `more` become further attributes of it, tensors in dictionaries included. A GPU gets all in one transfer;
    on the CPU each storage stays an allocation of its own, which shows sanitizers its ends.
    """
    values = {**case.__dict__, **more}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(values)}
    sources = {key: torch.empty(0, dtype=torch.uint8).set_(storage) for key, storage in storages.items()}
    moved: dict[int, tuple[Tensor, int]] = {}
    if device.type == "cuda":
        at, starts = 0, {}
        for key, source in sources.items():
            starts[key] = at
            at += -(-source.numel() // 512) * 512
        packed = torch.empty(at, dtype=torch.uint8, pin_memory=True)
        for key, source in sources.items():
            packed[starts[key] : starts[key] + source.numel()] = source
        there = packed.to(device, non_blocking=True)
        moved = {key: (there, start) for key, start in starts.items()}
    else:
        moved = {key: (source.clone(), 0) for key, source in sources.items()}

    def move(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: move(inner) for name, inner in value.items()}
        if not isinstance(value, Tensor) or value.device.type == "meta":
            return value
        whole, start = moved[value.untyped_storage().data_ptr()]
        view = torch.empty(0, dtype=value.dtype, device=device)
        offset = start // value.element_size() + value.storage_offset()
        return view.set_(whole.untyped_storage(), offset, value.shape, value.stride())

    other = copy.copy(case)
    other.__dict__.update({name: move(value) for name, value in values.items()})
    other.device = device
    return other
