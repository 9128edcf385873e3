"""Other implementations of the same work, timed beside ours when they are there."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Contender, describe
from torch import Tensor
from torch.nn import functional
from torch_baselines import causal_bias, pack_rows, sdpa_packed

KeysValues = Sequence[tuple[Tensor, Tensor]]


class FlashAttention3:
    """FlashAttention-3 as vLLM builds it, called through its registered torch ops.

    Found through VEGAS_BENCH_FA3, the path of _vllm_fa3_C.abi3.so, or in an installed vllm. Its scheduler
    metadata is computed outside the timed region, once for all layers, as vLLM does.
    """

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self._ops = torch.ops._vllm_fa3_C
        digest = hashlib.sha256(library.read_bytes()).hexdigest()[:8]
        self.version = f"{os.environ.get('VEGAS_BENCH_FA3_VERSION', library.name)}, sha256 {digest}"

    @staticmethod
    def find() -> FlashAttention3 | None:
        named = os.environ.get("VEGAS_BENCH_FA3")
        if named:
            return FlashAttention3(Path(named))
        spec = importlib.util.find_spec("vllm")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            library = Path(folder) / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
            if library.is_file():
                return FlashAttention3(library)
        return None

    def attend(
        self, q: Tensor, caches: KeysValues, block_table: Tensor, seqused_k: Tensor, rows: int
    ) -> Contender:
        """Launches over paged caches (num_pages, page_size, num_heads_kv, head_dim), `rows` per request."""
        batch, max_pages = block_table.shape
        _, page_size, num_heads_kv, head_dim = caches[0][0].shape
        num_heads_q = q.shape[1]
        max_seqlen_k = max_pages * page_size
        out = torch.empty_like(q)
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * rows
        no_window, no_softcap, splits_by_heuristic = (-1, -1), 0.0, 0
        metadata = self._ops.get_scheduler_metadata(
            batch, rows, max_seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim, q.dtype, seqused_k,
            cu_seqlens_q, None, None, None, None, page_size, 0, True, *no_window, False, splits_by_heuristic,
            None, 0,
        )  # fmt: skip

        def launch(keys: Tensor, values: Tensor) -> None:
            self._ops.fwd(
                q, keys, values, None, None, None, out, cu_seqlens_q, None, None, None, seqused_k, rows,
                max_seqlen_k, block_table, None, None, None, None, None, None, None, None, head_dim**-0.5,
                True, *no_window, no_softcap, True, metadata, splits_by_heuristic, None, 0, None, 1, 0, None,
            )  # fmt: skip

        return Contender(bind(launch, caches), lambda: out)


class FlashInfer:
    """FlashInfer's fa2 kernels and its top-k, where flashinfer is installed; it compiles or finds its modules
    by itself.

    One row goes through its decode wrapper with tensor cores, more through its paged prefill wrapper.
    plan() runs outside the timed region.
    """

    WORKSPACE_BYTES = 1 << 30

    def __init__(self) -> None:
        self._library = importlib.import_module("flashinfer")
        self.version = str(self._library.__version__)
        self._wrappers: dict[str, Any] = {}

    @staticmethod
    def find() -> FlashInfer | None:
        if importlib.util.find_spec("flashinfer") is None:
            return None
        try:
            return FlashInfer()
        except Exception as error:
            print(f"flashinfer does not import: {describe(error)}")
            return None

    def _wrapper(self, kind: str, device: torch.device) -> Any:
        """The wrapper of a kind; both work in one workspace, since the next plan takes it over."""
        if not self._wrappers:
            workspace = torch.zeros(self.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            decode, prefill = (
                getattr(self._library, f"Batch{name}WithPagedKVCacheWrapper")
                for name in ("Decode", "Prefill")
            )
            self._wrappers["decode"] = decode(workspace, "NHD", use_tensor_cores=True, backend="fa2")
            self._wrappers["prefill"] = prefill(workspace, "NHD", backend="fa2")
        return self._wrappers[kind]

    def attend(
        self, q: Tensor, caches: KeysValues, block_table: Tensor, lengths: Sequence[int], rows: int
    ) -> Contender:
        """Launches over paged caches (num_pages, page_size, num_heads_kv, head_dim), `rows` per request.

        The next call invalidates them.
        """
        _, page_size, num_heads_kv, head_dim = caches[0][0].shape
        pages = [math.ceil(length / page_size) for length in lengths]
        indptr = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32)
        last = torch.tensor(
            [length - page_size * (count - 1) for length, count in zip(lengths, pages, strict=True)],
            dtype=torch.int32,
        )
        indices = torch.cat([block_table[b, :count] for b, count in enumerate(pages)])
        shape = (q.shape[1], num_heads_kv, head_dim, page_size)
        dtypes = {"q_data_type": q.dtype, "kv_data_type": caches[0][0].dtype}
        if rows == 1:
            wrapper = self._wrapper("decode", q.device)
            wrapper.plan(indptr.to(q.device), indices, last.to(q.device), *shape, **dtypes)
        else:
            wrapper = self._wrapper("prefill", q.device)
            first_rows = torch.arange(len(lengths) + 1, dtype=torch.int32) * rows
            wrapper.plan(first_rows, indptr, indices, last, *shape, causal=True, **dtypes)
        out = torch.empty_like(q)

        def launch(keys: Tensor, values: Tensor) -> None:
            wrapper.run(q, (keys, values), out=out)

        return Contender(bind(launch, caches), lambda: out)

    def top_k(self, scores: Sequence[Tensor], k: int, deterministic: bool = False) -> Contender:
        """Unsorted positions of the k largest of each row, and their values: its own choice of kernel."""
        select = functools.partial(self._library.top_k, k=k, deterministic=deterministic)
        return Contender(
            [functools.partial(select, row) for row in scores],
            lambda: select(scores[0])[0].sort(dim=1, descending=True).values,
        )

    def top_k_slots(
        self, scores: Sequence[Tensor], k: int, block_table: Tensor, lengths: Tensor, page_size: int
    ) -> Contender:
        """Unsorted slots of the k largest of each row."""
        select = functools.partial(
            self._library.top_k_page_table_transform,
            src_page_table=block_table, lengths=lengths, k=k, page_size=page_size,
        )  # fmt: skip
        return Contender([functools.partial(select, row) for row in scores])


@dataclass(frozen=True)
class Peers:
    """What is there to compare with on a GPU."""

    fa3: FlashAttention3 | None = None
    flashinfer: FlashInfer | None = None

    @classmethod
    def find(cls, is_cuda: bool) -> Peers:
        return cls(FlashAttention3.find(), FlashInfer.find()) if is_cuda else cls()

    def versions(self) -> dict[str, str]:
        """For the header of results; torch is always there."""
        found = {"torch": str(torch.__version__)}
        if self.fa3 is not None:
            found["FlashAttention-3"] = self.fa3.version
        if self.flashinfer is not None:
            found["FlashInfer"] = self.flashinfer.version
        return found


def bind(launch: Callable[[Tensor, Tensor], object], caches: KeysValues) -> list[Callable[[], object]]:
    """One call per pair of K and V."""
    return [functools.partial(launch, keys, values) for keys, values in caches]


def contiguous(cache: Tensor, block_table: Tensor) -> Tensor:
    """Each request's tokens in a row, (batch, num_heads_kv, tokens, head_dim): what suits torch best."""
    batch = block_table.shape[0]
    tokens = cache[block_table.long()]
    return tokens.view(batch, -1, *cache.shape[2:]).transpose(1, 2).contiguous()


def pack_heads(q: Tensor, batch: int, num_heads_kv: int) -> Tensor:
    """(total_q, num_heads_q, head_dim) to (batch, num_heads_kv, rows * group, head_dim): K is read once."""
    return pack_rows(q.view(batch, -1, *q.shape[1:]), num_heads_kv)


def unpack_heads(packed: Tensor, rows: int) -> Tensor:
    batch, num_heads_kv, packed_rows, head_dim = packed.shape
    group = packed_rows // rows
    unpacked = packed.view(batch, num_heads_kv, rows, group, head_dim).transpose(1, 2)
    return unpacked.reshape(batch * rows, num_heads_kv * group, head_dim)


def dense_sdpa(q: Tensor, caches: KeysValues, rows: int) -> Contender:
    """torch SDPA with a group's heads packed into the rows; K and V as `contiguous` makes them."""
    batch, num_heads_kv, tokens, _ = caches[0][0].shape
    query = q.view(batch, rows, *q.shape[1:])
    bias = causal_bias(rows, q.shape[1] // num_heads_kv, tokens, q.dtype)
    return Contender(
        bind(lambda keys, values: sdpa_packed(query, keys, values, bias), caches),
        lambda: unpack_heads(sdpa_packed(query, *caches[0], bias), rows),
    )


def bmm_softmax_bmm(q: Tensor, caches: KeysValues, rows: int) -> Contender:
    """Two batched products around a softmax, packed; cheaper than a full mask, the causal bias touches only
    the last columns."""
    batch, num_heads_kv, _, head_dim = caches[0][0].shape
    packed = pack_heads(q, batch, num_heads_kv).flatten(0, 1) * head_dim**-0.5
    bias = causal_bias(rows, packed.shape[1] // rows, rows, q.dtype)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        scores = torch.bmm(packed, keys.flatten(0, 1).transpose(1, 2))
        if bias is not None:
            scores[..., -rows:] += bias
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1))

    return Contender(
        bind(attend, caches),
        lambda: unpack_heads(attend(*caches[0]).unflatten(0, (batch, num_heads_kv)), rows),
    )


def sdpa_cudnn(q: Tensor, caches: KeysValues, batch: int) -> Contender:
    """cuDNN through torch SDPA, one row per request, over the same memory taken as K and V without pages."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    num_heads_kv, head_dim = caches[0][0].shape[-2:]
    query = q.view(batch, 1, -1, head_dim).transpose(1, 2)

    def attend(keys: Tensor, values: Tensor) -> None:
        key, value = (
            cache.view(batch, -1, num_heads_kv, head_dim).transpose(1, 2) for cache in (keys, values)
        )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return Contender(bind(attend, caches))


def gather_sdpa(q: Tensor, caches: KeysValues, slots: Tensor) -> Contender:
    """Index-select of the listed tokens, then torch SDPA with packed heads, one request after the other.

    `slots` is (batch, k), or (batch, num_heads_kv, k) for lists per KV head.
    """
    batch, num_heads_kv = slots.shape[0], caches[0][0].shape[2]
    packed = pack_heads(q, batch, num_heads_kv)
    longs = slots.long()
    heads = torch.arange(num_heads_kv, device=q.device)[:, None]

    def gathered(tokens: Tensor, picked: Tensor) -> Tensor:
        if picked.dim() == 2:
            return tokens[picked, heads][None]
        return tokens.index_select(0, picked).transpose(0, 1)[None]

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        outputs = []
        for b in range(batch):
            key, value = (gathered(cache.flatten(0, 1), longs[b]) for cache in (keys, values))
            outputs.append(functional.scaled_dot_product_attention(packed[b : b + 1], key, value))
        return torch.cat(outputs)

    return Contender(bind(attend, caches), lambda: unpack_heads(attend(*caches[0]), 1))


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, window_left: int = -1) -> Tensor:
    """fp32 attention of one request: q (rows, num_heads_q, head_dim), K (tokens, num_heads_kv, head_dim)."""
    rows, num_heads_q, head_dim = q.shape
    tokens, num_heads_kv, _ = keys.shape
    group = num_heads_q // num_heads_kv
    packed = pack_heads(q.float(), 1, num_heads_kv)[0]
    scores = packed @ keys.float().permute(1, 2, 0) * head_dim**-0.5
    bias = causal_bias(rows, group, rows, torch.float32)
    if bias is not None:
        scores[..., -rows:] += bias.to(q.device)
    if window_left >= 0:
        position = torch.arange(tokens - rows, tokens, device=q.device).repeat_interleave(group)
        behind = torch.arange(tokens, device=q.device) < position[:, None] - window_left
        scores.masked_fill_(behind, float("-inf"))
    return unpack_heads((scores.softmax(-1) @ values.float().transpose(0, 1))[None], rows)
